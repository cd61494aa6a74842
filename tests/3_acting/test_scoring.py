"""Gold answers at every state: one packed forward says what a plain forward for each pair says, and nothing else has
any influence."""
import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.testing import assert_close

from credit_rl import scoring
from credit_rl.layout import HeadPieces, pack, token_logps
from credit_rl.learner import Learner, _GoldQuery
from credit_rl.models import load_tokenizer
from credit_rl.protocol import PROTOCOLS, Chat, Protocol, byte_tokenizer, parse
from credit_rl.scoring import (SCHEMAS, AnswerTemplate, Schema, acting_states, answer_batches, answer_form,
                               answer_header, answer_ids, answer_logps, answer_logps_separate, batch_logps,
                               gather_scores, gold_templates, joint_logps, read_schema, schema_warning, takes_tree_mask)
from credit_rl.trajectory import Group, Question, Stop, Trajectory, Turn, example_group

VOCABULARY = 60
SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=.3, bos_token_id=None,
             eos_token_id=None, pad_token_id=None)
FOR_BLOOM = ('hidden_size', 'vocab_size', 'initializer_range')
OWN = {'gpt2': dict(n_embd=32, n_layer=2, n_head=4, n_positions=128, vocab_size=VOCABULARY, initializer_range=.3,
                    bos_token_id=None, eos_token_id=None),
       'bloom': dict(n_layer=2, n_head=4, **{k: SIZES[k] for k in FOR_BLOOM})}


def make(kind='qwen2', attention='sdpa', dtype=torch.float32, **changes):
    "A small random model of some architecture whose weights are large enough that every id it sees matters."
    from transformers import AutoConfig, AutoModelForCausalLM
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**OWN.get(kind, SIZES), **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).eval()


@pytest.fixture(scope='module')
def qwen():
    return make()


@pytest.fixture(scope='module')
def exact():
    "In double precision, where packed and plain must agree to many digits."
    return make(dtype=torch.float64)


@torch.no_grad()
def plain(model, rows, states, answers):
    "The definition: a forward of the whole text of one state and one gold at a time; NaN where one does not exist."
    out = torch.full((*states.shape[:2], max(map(len, answers), default=0)), math.nan, dtype=torch.float64)
    for n, golds in enumerate(answers):
        for s, (row, position) in enumerate(states[n].tolist()):
            for m, gold in enumerate(golds if row >= 0 else ()):
                text = [*rows[0][row, :position + 1].tolist(), *gold.ids]
                logp = model(input_ids=torch.tensor([text])).logits[0].double().log_softmax(-1)
                at = range(position + 1 + gold.start, position + 1 + gold.end)
                out[n, s, m] = sum(logp[t - 1, text[t]] for t in at)
    return out


def same(scores, expected, atol=1e-4):
    sums = getattr(scores, 'sums', scores)
    assert_close(sums.double(), expected.double(), atol=atol, rtol=0, equal_nan=True)


# ---- random work ----

def template(ids):
    return st.integers(0, len(ids) - 1).flatmap(
        lambda start: st.integers(start + 1, len(ids)).map(lambda end: AnswerTemplate(ids, start, end)))


@st.composite
def works(draw):
    "Rows of different lengths, trajectories with states in one or two of them (some missing), and golds or none."
    ids = lambda low, high: draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=low, max_size=high))
    texts = [ids(1, 20) for _ in range(draw(st.integers(1, 4)))]
    width = max(map(len, texts)) + draw(st.integers(0, 3))
    padded = [[*t, *[draw(st.integers(0, VOCABULARY - 1))] * (width - len(t))] for t in texts]
    rows = torch.tensor(padded), torch.tensor([len(t) for t in texts])
    n, s = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    one = st.integers(0, len(texts) - 1).flatmap(lambda r: st.integers(0, len(texts[r]) - 1).map(lambda p: [r, p]))
    states = torch.tensor([[draw(st.one_of(one, st.just([-1, -1]))) for _ in range(s)] for _ in range(n)])
    answers = [[draw(template(ids(1, 6))) for _ in range(draw(st.integers(0, 3)))] for _ in range(n)]
    return rows, states, answers


def fixed(seed=1):
    "Always the same: three trajectories, one in two rows, with a hole, a gold without header, one of one token."
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(VOCABULARY, shape, generator=g)
    rows = draw(4, 30), torch.tensor([30, 17, 9, 12])
    states = torch.tensor([[[0, 3], [0, 12], [0, 29]], [[1, 0], [3, 11], [-1, -1]], [[2, 5], [-1, -1], [2, 8]]])
    gold = lambda n, start, end: AnswerTemplate(draw(n).tolist(), start, end)
    return rows, states, [[gold(6, 2, 5), gold(3, 0, 1)], [gold(9, 4, 9)],
                          [gold(4, 0, 4), gold(4, 1, 3), gold(2, 1, 2)]]


# ---- equal to plain forwards ----

@given(works(), st.sampled_from(['packed', 'cache']), st.sampled_from([1, 40, 16384]))
def test_any_work_scores_as_plain_forwards_do(exact, work, method, budget):
    scores = answer_logps(exact, *work, method=method, budget=budget)
    same(scores, plain(exact, *work), atol=1e-9)
    _, states, answers = work
    counts = torch.zeros(scores.sums.shape, dtype=torch.long)
    for n, golds in enumerate(answers):
        for m, gold in enumerate(golds): counts[n, states[n, :, 0] >= 0, m] = gold.end - gold.start
    assert scores.tokens.tolist() == counts.tolist() and scores.missing == 0


@pytest.mark.parametrize('kind, attention', [('llama', 'eager'), ('qwen3', 'sdpa'), ('gpt2', 'sdpa')])
def test_architectures(kind, attention):
    model, work = make(kind, attention), fixed()
    expected = plain(model, *work)
    assert takes_tree_mask(model)
    for method in ('auto', 'packed', 'cache'): same(answer_logps(model, *work, method=method), expected)
    same(answer_logps_separate(model, *work), expected)


@pytest.mark.skipif(not hasattr(torch.compiler, 'set_stance'), reason='this torch cannot be told not to compile')
def test_flex_attention_is_the_same_tree(qwen):
    work = fixed()
    trained = torch.arange(work[0][0].shape[1]) < work[0][1][:, None]
    with torch.compiler.set_stance('force_eager'):
        same(answer_logps(qwen, *work, method='flex'), plain(qwen, *work))
        logp, scores = joint_logps(qwen, work[0], trained, *work[1:], method='flex')
    same(scores, plain(qwen, *work))
    same(logp, token_logps(qwen, work[0][0], trained).detach())
    assert qwen.config._attn_implementation == 'sdpa'


@settings(max_examples=6)
@given(st.integers(0, 99), st.sampled_from([1, 128]))
def test_blocks_of_packed_answers_are_those_of_the_whole_mask(seed, multiple):
    """As PyTorch finds them by looking at every pair of tokens; some of those that are seen whole may be listed as
    seen in part, where two branches meet in a block, which costs a comparison and changes nothing."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=g))
    rows = torch.randint(VOCABULARY, (3, 700), generator=g), torch.tensor([700, draw(1, 700), draw(1, 200)])
    states = torch.tensor([[[r, draw(0, int(n))] for _ in range(3)] for r, n in enumerate(rows[1])])
    answers = [[AnswerTemplate([draw(0, VOCABULARY) for _ in range(n)], n // 2, n) for n in (draw(1, 300), draw(1, 9))]
               for _ in rows[1]]
    for batch in answer_batches(rows, states, answers, budget=4096, multiple=multiple)[0]:
        found, width = scoring._packed_blocks(batch), batch.ids.shape[1]
        assert found.shape == (len(batch.ids), 1, width, width)
        see = lambda b, h, q, k: batch.mask()[b, 0][q, k]
        wanted = create_block_mask(see, len(batch.ids), None, width, width, device='cpu')
        assert torch.equal(found.to_dense(), wanted.to_dense())
        whole, most = ({(b, q, int(k)) for b in range(len(batch.ids)) for q in range(m.kv_num_blocks.shape[2])
                        for k in m.full_kv_indices[b, 0, q, :m.full_kv_num_blocks[b, 0, q]]} for m in (found, wanted))
        assert whole <= most and len(whole) >= .6 * len(most)
        assert torch.equal(create_mask(found.mask_mod, len(batch.ids), 1, width, width, 'cpu'), batch.mask())


class Fussy:
    "Mixed into a model: refuses a mask with four axes, as fused kernels do."
    @property
    def base_model(self):
        def forward(attention_mask=None, **inputs):
            if attention_mask is not None and attention_mask.ndim == 4:
                raise ValueError('attention_mask must have two axes')
            return self.model(attention_mask=attention_mask, **inputs)
        return forward


def test_a_model_that_refuses_the_mask_is_read_through_its_cache(qwen):
    model = make()
    model.__class__ = type('Fussy', (Fussy, type(model)), {})
    work = fixed()
    with pytest.warns(UserWarning, match='axes'): assert not takes_tree_mask(model)
    same(answer_logps(model, *work), plain(qwen, *work))
    trained = torch.rand(work[0][0].shape, generator=torch.Generator().manual_seed(0)) < .5
    trained &= torch.arange(30) < work[0][1][:, None]
    logp, scores = joint_logps(model, work[0], trained, *work[1:])
    same(scores, plain(qwen, *work))
    same(logp, token_logps(qwen, work[0][0], trained).detach())


RECURRENT = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
                 num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
                 layer_types=['linear_attention', 'full_attention'])


@pytest.mark.parametrize('kind, changes', [('bloom', {}), ('qwen3_next', RECURRENT)], ids=['alibi', 'recurrent'])
def test_models_that_a_tree_mask_would_misread(kind, changes):
    model, work = make(kind, 'eager', **changes), fixed()
    expected = plain(model, *work)
    same(answer_logps(model, *work), expected)
    if kind != 'bloom':                                               # refuses; the other returns plausible numbers
        wrong = answer_logps(model, *work, method='packed').sums
        assert (wrong - expected).abs().nan_to_num(0).max() > .1


def test_a_window_longer_than_the_probe_is_read_from_the_configuration():
    model = make('mistral', sliding_window=20)
    work = fixed()
    assert takes_tree_mask(model)                                     # too short to notice
    same(answer_logps(model, *work), plain(model, *work))
    assert (answer_logps(model, *work, method='packed').sums - plain(model, *work)).abs().nan_to_num(0).max() > .1


def test_a_learner_heeds_the_window_of_each_model_that_it_scores():
    "Rows fit into one model's window, with their golds too, and not into the other's."
    layout = pack([example_group()], prefix=1)
    most = dict(vocab_size=int(layout.ids.max()) + 1, max_position_embeddings=4096)
    golds = [[AnswerTemplate((3, 4, 5), 1, 3)]] * len(layout.states)
    wide, near = make('mistral', sliding_window=4096, **most), make('mistral', sliding_window=20, **most)
    learner, states = Learner(wide), acting_states(layout.states, layout.turn_mask)
    for model in (wide, near):
        query = _GoldQuery(layout, states, golds, 2 ** 16, joint=True)
        found = learner.backend.score(None, SimpleNamespace(model=model, temperature=1.), query, None)
        assert_close(found['logp'], token_logps(model, layout.ids, layout.trained).detach(), atol=1e-4, rtol=1e-4)
        same(found['gold_logp'], plain(model, (layout.ids, layout.lengths), states, golds))


def test_bfloat16_is_measured_in_float32():
    model, work = make(dtype=torch.bfloat16), fixed()
    scores = answer_logps(model, *work, method='packed')
    assert scores.sums.dtype == torch.float32
    # logits themselves have 8 bits
    error = (scores.sums - plain(model, *work)).abs() / scores.tokens.clamp(min=1)
    assert error.nan_to_num(0).max() < .3
    (batch,), _ = answer_batches(*work)
    kept = []
    handle = model.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: kept.append(logits))
    values = batch_logps(model, batch)
    handle.remove()
    # logits where they are asked, nowhere else
    assert len(kept) == 1 and kept[0].shape == (len(batch.target), VOCABULARY)
    assert_close(values, kept[0].float().log_softmax(-1).gather(-1, batch.target[:, None])[:, 0])


# ---- how much is read at once ----

@pytest.mark.parametrize('method', ['packed', 'tree', 'cache'])
def test_every_way_of_scoring_keeps_branches_in_the_budget(method):
    "Two hundred golds of one row: no forward reads more than the budget, by a cache with what it holds."
    rows, states, answers = fixed()
    many = [AnswerTemplate((1 + m % 40, 1 + m // 40, 2), 1, 3) for m in range(200)]
    golds, trained = [many, *answers[1:]], torch.arange(rows[0].shape[1])[None] == rows[1][:, None] - 1
    model, read = make(dtype=torch.float64), []
    def count(module, args, kwargs):
        past = kwargs.get('past_key_values')
        ids = kwargs['input_ids'] if 'input_ids' in kwargs else kwargs['inputs_embeds'][..., 0]
        read.append(ids.numel() + (len(ids) * past.get_seq_length() if past is not None else 0))
    model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    few = joint_logps(model, rows, trained, states, golds, method=method, budget=128)
    alone, most, forwards = answer_logps(model, rows, states, golds, method, budget=128), max(read), len(read)
    assert most <= 128 and forwards > 16
    whole = joint_logps(model, rows, trained, states, golds, method=method, budget=10 ** 6)
    assert max(read) > 128
    same(few[0], whole[0], 1e-9)
    for scores in (few[1], alone): same(scores.sums, whole[1].sums, 1e-9)


def test_the_head_of_a_cache_is_read_in_pieces(monkeypatch):
    "Two hundred golds at a state, of which the budget would allow forty: no more logits than `HeadPieces` has."
    rows, states, answers = fixed()
    golds = [[AnswerTemplate((1 + m % 40, 1 + m // 40, 2), 1, 3) for m in range(200)], *answers[1:]]
    model, made = make(dtype=torch.float64), []
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: made.append(logits.numel()))
    wanted = answer_logps(model, rows, states, golds, method='cache', budget=400)
    assert max(made) > 30 * VOCABULARY
    monkeypatch.setattr(HeadPieces, 'budget', 30 * VOCABULARY)
    made.clear()
    found = answer_logps(model, rows, states, golds, method='cache', budget=400)
    assert max(made) <= 30 * VOCABULARY and len(made) > 20
    same(found, wanted.sums, 1e-9)


def test_measuring_leaves_no_trace(qwen):
    work = fixed()
    qwen.train()
    try:
        scores = answer_logps(qwen, *work)
        assert qwen.training and not scores.sums.requires_grad
    finally:
        qwen.eval()
    assert all(p.grad is None for p in qwen.parameters()) and qwen.config._attn_implementation == 'sdpa'
    dropping = make(attention_dropout=.5).train()
    assert_close(answer_logps(dropping, *work).sums, scores.sums, atol=1e-4, rtol=0, equal_nan=True)


# ---- both at once, and over ranks ----

@settings(max_examples=20)
@given(works(), st.integers(0, 2 ** 20), st.sampled_from([1, 50, 16384]))
def test_one_forward_for_tokens_and_golds(exact, work, seed, budget):
    (ids, lengths), states, answers = work
    trained = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < .4
    trained &= torch.arange(ids.shape[1]) < lengths[:, None]
    logp, scores = joint_logps(exact, work[0], trained, states, answers, temperature=.6, method='packed', budget=budget)
    same(logp, token_logps(exact, ids, trained, .6).detach(), 1e-5)   # token_logps speaks float32
    same(scores, plain(exact, *work), 1e-9)
    batches, counts = answer_batches(work[0], states, answers, budget, trained=trained)
    read = lambda i, rank: batch_logps(exact, batches[i], .6) if i % 2 == rank else 0.
    again, summed = gather_scores(batches, [read(i, 0) + read(i, 1) for i in range(len(batches))], counts, trained)
    assert_close(again.to(logp.dtype), logp)
    assert_close(summed.sums.to(scores.sums.dtype), scores.sums, equal_nan=True)


# ---- missing and refused ----

def test_what_does_not_fit_is_missing_and_counted(qwen):
    rows, states, answers = fixed()
    sums, fits = answer_logps(qwen, rows, states, answers, 'packed').sums, {}
    for limit in (12, 33):
        fits[limit] = torch.zeros(sums.shape, dtype=torch.bool)
        for n, golds in enumerate(answers):
            for m, gold in enumerate(golds):
                fits[limit][n, :, m] = (states[n, :, 0] >= 0) & (states[n, :, 1] + 1 + gold.end <= limit)
        for method in ('packed', 'cache'):
            scores = answer_logps(qwen, rows, states, answers, method, max_length=limit)
            same(scores, torch.where(fits[limit], sums, math.nan))
            assert scores.missing == (~sums.isnan() & ~fits[limit]).sum() > 0
            assert (scores.tokens[~sums.isnan()] > 0).all()           # missing, not absent
    same(answer_logps_separate(qwen, rows, states, answers, max_length=33), torch.where(fits[33], sums, math.nan))


def test_the_context_is_the_models_own():
    model, (rows, states, answers) = make(max_position_embeddings=32), fixed()
    assert answer_logps(model, rows, states, answers).missing == 1    # 30 ids and a gold that ends at 5
    longest = lambda end: [answers[0], [AnswerTemplate(range(40), 30, end)], answers[2]]
    for score in (answer_logps, answer_logps_separate):
        for end in (40, 32):                                          # the second leaves no room for a state of one id
            with pytest.raises(ValueError, match=f'gold 0 of trajectory 1 takes {end} ids .* context of 32'):
                score(model, rows, states, longest(end))
    assert answer_logps(model, rows, states, longest(31)).sums[1, 0, 0] < 0


def test_what_does_not_fit_together_is_refused(qwen):
    r, s, a = fixed()
    for given, message in (((r, s, a[:2]), 'lists'), ((r, s[..., 0], a), r'\(N, S, 2\)'), ((r, s.float(), a), 'integers'),
                           (((r[0], r[1][:2]), s, a), r'lengths \(R,\)'), ((r, s + torch.tensor([0, 1]), a), 'trajectory 0'),
                           ((r, s + torch.tensor([9, 0]), a), 'token'),
                           ((r, torch.where(s == 0, -1, s) * torch.tensor([0, 1]), a), 'token')):
        with pytest.raises(ValueError, match=message): answer_logps(qwen, *given)
    with pytest.raises(ValueError, match="'fast'"): answer_logps(qwen, r, s, a, method='fast')
    with pytest.raises(ValueError, match='trained'): joint_logps(qwen, r, r[0], s, a)
    for bad in ((0, 0), (2, 1), (0, 4), (-1, 2)):
        with pytest.raises(ValueError, match='least'): AnswerTemplate([1, 2, 3], *bad)
    nowhere = answer_logps(qwen, r, torch.full_like(s, -1), a)                              # nothing to score is fine
    assert nowhere.sums.shape == (3, 3, 3) and nowhere.sums.isnan().all() and not nowhere.tokens.any()
    assert nowhere.missing == 0 and answer_logps(qwen, r, s, [[], [], []]).sums.shape == (3, 3, 0)


# ---- where a gold's tokens are ----

@pytest.fixture(scope='module')
def bpe():
    "A byte-level BPE that has learned to merge across the borders of an answer tag."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                                  show_progress=False)
    core.train_from_iterator(['>Rome<', '>Rome<', '>Ro', '"Rome"', 'San José', 'ome<', 'é.</'] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token='<|im_end|>',
                                   additional_special_tokens=['<|im_start|>'])


@settings(max_examples=100)
@given(st.text('<answer>Rome. é"San\n', max_size=8),
       st.text('Rome é"San José.<', min_size=1, max_size=8).filter(str.strip),
       st.sampled_from(['', '</answer>', '<', '. ']))
def test_a_gold_is_the_fewest_tokens_that_hold_it(bpe, before, gold, after):
    found = answer_ids(bpe, before, gold, after)
    ids = bpe(before + gold + after, add_special_tokens=False).input_ids
    assert list(found.ids) == ids                                     # the text is encoded once, as a whole
    ends = [0]
    for i in ids: ends.append(ends[-1] + len(bytes_of(bpe, i)))
    first, last = len(before.encode()), len((before + gold).encode())
    overlap = [i for i in range(len(ids)) if ends[i] < last and ends[i + 1] > first]
    assert (found.start, found.end) == (overlap[0], overlap[-1] + 1)


def bytes_of(tokenizer, i):
    "The bytes that a token of a byte-level tokenizer stands for; those above 127 all as 128."
    return [ASCII.get(c, 128) for c in tokenizer.convert_ids_to_tokens(i)]


ASCII = {**{chr(b): b for b in range(33, 127)}, 'Ġ': 32, 'Ċ': 10}           # byte-level letters of what the test writes


def test_golds_that_cannot_be_encoded_are_refused(bpe):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    core = Tokenizer(models.WordLevel({'a': 0, 'b': 1, '?': 2}, unk_token='?'))
    core.pre_tokenizer, core.normalizer = pre_tokenizers.WhitespaceSplit(), normalizers.Replace('~', '')
    words = PreTrainedTokenizerFast(tokenizer_object=core, unk_token='?')
    # an unknown word beside it does no harm
    assert answer_ids(words, 'x ', 'a b', ' x') == AnswerTemplate([2, 0, 1, 2], 1, 3)
    for tokenizer, given, error, said in ((bpe, ('<answer>', '\n\t', '</answer>'), ValueError, 'tokens'),
                                          (words, ('a ', '~', ' b'), ValueError, 'tokens'),  # the tokenizer drops it
                                          (words, ('a ', 'b c'), ValueError, 'word'), (object(), 'ab', TypeError, 'fast')):
        with pytest.raises(error, match=said): answer_ids(tokenizer, *given)


# ---- from rollouts ----

def conversation(chat, question, turns):
    "A trajectory of given turns (what the model says, what it is told or None), in a tokenizer's ids."
    made = []
    for said, told in turns:
        ids, shown = chat.encode(said), chat.observation_ids(told) if told else ()
        made.append(Turn('tool' if told else 'answer', ids, [-1.] * len(ids), shown, said, told or ''))
    return Trajectory(question, chat.prompt_ids(question.text), made, Stop.ANSWER, 'Rome')


@pytest.mark.parametrize('role', ['user', None])
def test_state_and_template_together_are_the_conversation(role):
    "What is scored reads as if the model had answered there, in the chat template's own words."
    tokenizer = byte_tokenizer()
    chat = Chat(Protocol('p', response_role=role, answer_tag='final'), tokenizer)
    question = Question('q', 'Where?', ['Rome', 'the city of Rome', 'Rome'])
    t = conversation(chat, question, [('I look. <tool_call>x</tool_call>', 'It is Rome.'),
                                      ('So. <final>Rome</final>', None)])
    groups = [Group(question, [t, t])]
    layout = pack(groups, prefix=len(chat.encode(answer_header(chat))))
    states = acting_states(layout.states, layout.turn_mask)
    prompt, turn = chat.prompt_ids('Where?'), chat.encode(t.turns[0].action_text) + list(t.turns[0].observation_ids)
    own = {'tag': 'final', 'open': '<final> ', 'close': ' </final>'}              # no example in its prompt: one blank
    for schema in (*SCHEMAS, Schema('\n<{tag}> ', ' </{tag}>')):
        answers = gold_templates(chat, groups, schema)
        assert [len(golds) for golds in answers] == [2, 2] and (states[:, 2] == -1).all()
        shape = SCHEMAS[schema] if isinstance(schema, str) else schema
        for (row, position), context in zip(states[0].tolist(), (prompt, prompt + turn)):
            for gold, text in zip(answers[0], ('Rome', 'the city of Rome')):
                read = tokenizer.decode([*layout.ids[row, :position + 1].tolist(), *gold.ids])
                wanted = tokenizer.decode(context) + shape.before.format(**own) + text + shape.after.format(**own)
                assert read == wanted and tokenizer.decode(gold.ids[gold.start:gold.end]) == text


def test_a_teacher_reads_the_answer_form_that_the_prompt_teaches():
    "With the blank of the prompt's own example; a protocol that boxes its answers boxes the gold."
    tokenizer, group = byte_tokenizer(), example_group()
    for name, protocol in PROTOCOLS.items():
        chat = Chat(protocol, tokenizer)
        text = lambda ids: tokenizer.decode(ids).removeprefix(answer_header(chat))
        gold = gold_templates(chat, [group], 'tips')[0][0]
        before, taught = text(gold.ids[:gold.start]), f'{protocol.system or ""} {protocol.user}'
        if protocol.answer_tag is None: assert before == '\\boxed{'
        elif name == 'igpo': assert before == '<answer>' and '<answer>the answer alone</answer>' in taught
        else: assert before == '<answer> ' and (name == 'tiny' or re.search(r'<answer> \w+ </answer>', taught))
        assert parse(protocol, text(gold.ids) + answer_form(protocol)[1]).answer == 'Budapest'
        assert text(gold_templates(chat, [group], ['Answer: ', '.'])[0][0].ids) == 'Answer: Budapest.'


def test_templates_are_refused_by_name():
    chat, group = Chat(PROTOCOLS['tspo'], byte_tokenizer()), example_group()
    for unknown in ('carl', ['<{tag}>'], ('a', 1), None):
        with pytest.raises(ValueError, match="'igpo'"): gold_templates(chat, [group], unknown)
    with pytest.raises(ValueError, match="'carl'"):
        gold_templates(Chat(PROTOCOLS['carl'], byte_tokenizer()), [group], 'igpo')
    for answers in ([], ['Budapest', ' ']):
        question = dataclasses.replace(group.question, answers=answers)
        with pytest.raises(ValueError, match="'casablanca'"):
            gold_templates(chat, [dataclasses.replace(group, question=question)])


def test_the_papers_protocols_have_the_papers_words():
    "IGPO and TIPS section 3.2, typed from the papers; elsewhere the answer form of the prompt."
    def written(name, schema='own'):
        chat = Chat(PROTOCOLS[name], byte_tokenizer())
        ids = gold_templates(chat, [example_group()], schema)[0][0].ids
        return chat.tokenizer.decode(ids).removeprefix(answer_header(chat))
    sentence = "<think>Now there's enough information to answer</think><answer>Budapest</answer>"
    assert written('igpo') == written('igpo', 'igpo') == sentence == written('tips', 'igpo')
    assert written('tips') == written('tips', 'tips') == '<answer> Budapest'
    for name in PROTOCOLS.keys() - {'igpo'}:
        if 'tiny' not in name: assert read_schema('own', PROTOCOLS[name]) == read_schema('tips'), name


def test_a_schema_is_refused_or_warned_about_before_anything_is_scored():
    words, tiny = load_tokenizer(str(Path(__file__).parents[2] / 'data' / 'tiny_base')), PROTOCOLS['tiny']
    said = schema_warning('igpo', tiny, words)
    lost = ['Now', 'there', 's', 'enough', 'information', 'to', 'answer']
    assert f'no words for {", ".join(map(repr, lost))},' in said and schema_warning('igpo', tiny) == ''
    for schema in ('igpo', 'bare'):
        with pytest.raises(ValueError, match="'carl-tiny'"): schema_warning(schema, PROTOCOLS['carl-tiny'])
    for bad in ('<think> {relation} ', '{}{question} '):
        with pytest.raises(ValueError, match='placeholders'): schema_warning([bad, ''], tiny)
    for bad in ('{open}', ('{open}',)):
        with pytest.raises(ValueError, match='gold_schema'): Protocol('p', gold_schema=bad)


def test_a_model_that_gives_nan_scores_nothing_and_says_so():
    "Else a damaged teacher's golds would read as missing."
    model, work = make(), fixed()
    model.config.name_or_path = 'models/broken'
    model.model.norm.weight.data[0] = math.nan
    nothing = torch.zeros_like(work[0][0]).bool()
    for method in ('packed', 'cache'):
        with pytest.raises(ValueError, match="'models/broken'"): answer_logps(model, *work, method=method)
        with pytest.raises(ValueError, match="'models/broken'"):
            joint_logps(model, work[0], nothing, *work[1:], method=method)
