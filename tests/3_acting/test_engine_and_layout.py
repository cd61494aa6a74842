"""Acting and reading agree: what the engine sampled, token by token, is what one plain forward and the learner see,
whoever else is in the batch."""
import copy
import dataclasses
import string

import pytest
import torch
from hypothesis import given, strategies as st

from credit_rl.engine import HFEngine, SamplingParams, ScriptedEngine, draw
from credit_rl.layout import AVERAGES, loss_weights, pack, take, token_logps
from credit_rl.learner import FrozenModels, Learner, Optimiser, deal
from credit_rl.parts import Credit, Loss, Needs, assign
from credit_rl.methods import METHODS
from credit_rl.outcome import outcome_rewards
from credit_rl.protocol import CHATML, PROTOCOLS, Chat, byte_tokenizer
from credit_rl.rollout import Environment, rollout
from credit_rl.readers import Passage
from credit_rl.tiny import tiny_environment
from credit_rl.tools import SearchTool
from credit_rl.trajectory import Group, Question, Stop, Trajectory, Turn
from credit_rl.world import make_world
from random_models import small_qwen

SAMPLING = SamplingParams(max_tokens=24)
TEMPERATURE = 1.7


def same_logps(a, b):
    """Assert that float32 log-probabilities agree within 1e-4, where the model is well-conditioned.

    A sharp model in a muddle is not: there one token in a hundred (or one in a short row) may be up to 1e-3 off, as
    far as a float32 forward is from a float64 one. `test_in_double_precision_the_cache_is_exact` shows that it is
    rounding.
    """
    gap = (a - b).abs()
    assert a.shape == b.shape and gap.max() < 1e-3, f'up to {gap.max():.2g} apart'
    assert (gap > 1e-4).sum() <= max(1, gap.numel() // 100)


@pytest.fixture(scope='module')
def play(base):
    "Function that lets the base play some questions; settings of the engine and of the rollout may be given."
    model, tokenizer, _ = base
    world = make_world('train', seed=3, size=200, questions=8)
    env = tiny_environment(world, Chat(PROTOCOLS['tiny'], tokenizer))

    def play(attention='eager', questions=world.questions, group_size=4, sampling=SAMPLING, seed=5, **engine):
        model.set_attn_implementation(attention)
        return rollout(HFEngine(model, tokenizer, **engine), env, list(questions), group_size, sampling, seed)
    play.questions = world.questions
    return play


@pytest.fixture(scope='module')
def groups(play):
    return play()


def trajectories(groups):
    return [t for g in groups for t in g.trajectories]


def said(t):
    "What a trajectory's model wrote: the ids of each turn."
    return [turn.action_ids for turn in t.turns]


def spread(t):
    "Ids of a trajectory that is one row, and the positions of those that the model wrote."
    ids, own = list(t.prompt_ids), []
    for turn in t.turns:
        own += range(len(ids), len(ids) + len(turn.action_ids))
        ids += [*turn.action_ids, *turn.observation_ids]
    return torch.tensor(ids), torch.tensor(own)


def recorded(t):
    return torch.tensor([p for turn in t.turns for p in turn.action_logps])


@torch.no_grad()
def plain(model, t, temperature=1.0, **forward):
    "Log-probabilities (n,) of what the model wrote in `t`, by Hugging Face's own forward over the whole row."
    ids, own = spread(t)
    logits = model(ids[None], **forward).logits[0, own - 1].float()
    return (logits / temperature).log_softmax(-1).gather(-1, ids[own][:, None])[:, 0]


@pytest.mark.parametrize('act, read', [('eager', 'sdpa'), ('sdpa', 'eager')])
def test_a_plain_forward_gives_the_sampled_logps(base, play, act, read):
    flat = trajectories(play(act))
    assert max(len(t.turns) for t in flat) >= 3                       # the cache lived through several turns
    base[0].set_attn_implementation(read)
    for t in flat: same_logps(plain(base[0], t), recorded(t))


def test_in_double_precision_the_cache_is_exact(base):
    model, tokenizer = copy.deepcopy(base[0]).double(), base[1]
    world = make_world('train', seed=3, size=200, questions=8)
    env = tiny_environment(world, Chat(PROTOCOLS['tiny'], tokenizer))
    for t in trajectories(rollout(HFEngine(model, tokenizer), env, list(world.questions), 4, SAMPLING, 5)):
        # what is left is that draws are in float32
        torch.testing.assert_close(plain(model, t), recorded(t), atol=1e-5, rtol=0)


def test_logps_are_those_of_the_tempered_distribution(base, play):
    groups = play(sampling=dataclasses.replace(SAMPLING, temperature=TEMPERATURE))
    for t in trajectories(groups): same_logps(plain(base[0], t, TEMPERATURE), recorded(t))
    assert any((plain(base[0], t) - recorded(t)).abs().max() > .05 for t in trajectories(groups))
    layout = pack(groups)
    same_logps(Learner(base[0], temperature=TEMPERATURE).evaluate(layout).logp, layout.logps)


def test_draws_follow_the_distribution():
    logits = torch.randn(1, 7, generator=torch.Generator().manual_seed(0)) * 2
    n = 20000
    ids, _ = draw(logits.expand(n, 7), (torch.arange(n) + .5) / n, SamplingParams(temperature=TEMPERATURE))
    frequency = torch.bincount(ids, minlength=7) / n
    torch.testing.assert_close(frequency, (logits[0] / TEMPERATURE).softmax(-1), atol=2 / n, rtol=0)


COMPANY = {'few rows, small readings': dict(max_rows=5, read_tokens=32), 'sdpa': dict(attention='sdpa')}


@pytest.mark.long
@pytest.mark.parametrize('setting', COMPANY.values(), ids=COMPANY)
def test_the_batch_changes_no_sample(play, groups, setting):
    for a, b in zip(trajectories(groups), trajectories(play(**setting))):
        assert said(a) == said(b)
        same_logps(recorded(a), recorded(b))


def test_padding_order_and_company_change_no_logp(base, groups):
    model, layout = base[0], pack(groups)
    model.set_attn_implementation('sdpa')
    order = torch.randperm(len(layout.ids), generator=torch.Generator().manual_seed(0))
    pad = torch.randint(len(layout.ids), (len(layout.ids), 17)) + 5    # rubbish, if anybody looked
    beyond = torch.arange(layout.ids.shape[1]) >= layout.lengths[:, None]
    dirty = torch.where(beyond, 7, layout.ids)
    with torch.no_grad():
        whole = token_logps(model, layout.ids, layout.trained)
        shuffled = token_logps(model, layout.ids[order], layout.trained[order])
        padded = token_logps(model, torch.cat([dirty, pad], 1), torch.nn.functional.pad(layout.trained, (0, 17)))
        alone = [token_logps(model, layout.ids[i:i + 1, :n], layout.trained[i:i + 1, :n])[0]
                 for i, n in enumerate(layout.lengths.tolist())]
    same_logps(shuffled, whole[order])
    same_logps(padded[:, :-17], whole)
    for row, of_all in zip(alone, whole): same_logps(row, of_all[:len(row)])


@pytest.mark.parametrize('kind', ['ppo', 'gspo'])
def test_no_gradient_starts_at_an_observation(base, groups, kind):
    "With clipping, KL and entropy: hidden states that predict no action get a gradient of exactly 0."
    learner = Learner(copy.deepcopy(base[0]), Loss(kind, kl=.1, entropy=.1), Optimiser(minibatches=1),
                      frozen=FrozenModels(base[0]))
    base[0].requires_grad_(True)                                       # the reference froze it
    layout, kept = pack(groups[:3]), []

    def keep(module, args, out):
        if out.requires_grad:
            out.retain_grad()
            kept.append(out)
    learner.scorer.model.model.norm.register_forward_hook(keep)
    credit = Credit(torch.randn(layout.ids.shape, generator=torch.Generator().manual_seed(0)) * layout.trained)
    learner.step(layout, learner.evaluate(layout, Needs(logp=True, ref_logp=True)), credit)
    (hidden,) = kept
    predicts = layout.trained.roll(-1, 1)                              # position t predicts t + 1
    size = hidden.grad.norm(dim=-1)
    assert (size[~predicts] == 0).all() and (size[predicts] > 0).float().mean() > .9


@st.composite
def random_groups(draw):
    """Groups of random trajectories; some turns come with an edited context. Every id is used once, so that places can
    be told from ids."""
    fresh = iter(range(1, 10 ** 9))
    some = lambda least, most: [next(fresh) for _ in range(draw(st.integers(least, most)))]

    def trajectory(question):
        turns = []
        for k in range(draw(st.integers(1, 4))):
            action = some(1, 4)
            turns.append(Turn('tool', action, [-i / 8 for i in range(1, len(action) + 1)], some(0, 3), '', '',
                              context_ids=some(1, 4) if draw(st.integers(0, 3)) == 0 else None))
        return Trajectory(question, some(1, 4), turns, Stop.LENGTH)

    groups = []
    for b in range(draw(st.integers(1, 3))):
        question = Question(str(b), '?', ['x'])
        groups.append(Group(question, [trajectory(question) for _ in range(draw(st.integers(1, 3)))]))
    return groups


def spelled(t):
    "A trajectory's rows, spelled out: lists of (id, what it is, turn, log-probability)."
    rows = [[(i, 'prompt', -1, 0.) for i in t.prompt_ids]]
    for k, turn in enumerate(t.turns):
        if turn.context_ids is not None:
            rows.append([(i, 'prompt', -1, 0.) for i in turn.context_ids])
        rows[-1] += [(i, 'action', k, p) for i, p in zip(turn.action_ids, turn.action_logps)]
        rows[-1] += [(i, 'observation', -1, 0.) for i in turn.observation_ids]
    # a first context that was replaced was never acted in
    return [row for row in rows if any(what == 'action' for _, what, _, _ in row)]


@given(random_groups())
def test_each_id_is_prompt_action_or_observation(groups):
    layout, flat = pack(groups), trajectories(groups)
    rows = [(i, row) for i, t in enumerate(flat) for row in spelled(t)]
    assert layout.row_trajectory.tolist() == [i for i, _ in rows]
    assert layout.lengths.tolist() == [len(row) for _, row in rows]
    for r, (_, row) in enumerate(rows):
        n = len(row)
        ids, what, turns, logps = zip(*row)
        assert layout.ids[r, :n].tolist() == list(ids) and (layout.ids[r, n:] == 0).all()
        assert layout.token_turns[r, :n].tolist() == list(turns) and (layout.token_turns[r, n:] == -1).all()
        assert layout.trained[r, :n].tolist() == [w == 'action' for w in what]
        assert layout.logps[r, :n].tolist() == list(logps)
    for i, t in enumerate(flat):
        assert layout.turn_mask[i].tolist() == [k < len(t.turns) for k in range(layout.turn_mask.shape[1])]


@given(random_groups())
def test_states_end_where_the_next_turn_has_not_begun(groups):
    "State k ends with the id before turn k's first action, in the row where turn k acted."
    layout, flat = pack(groups), trajectories(groups)
    for i, t in enumerate(flat):
        ends = [(t.turns[0].context_ids or t.prompt_ids)[-1]]
        ends += [(turn.observation_ids or turn.action_ids)[-1] for turn in t.turns]
        for end, (row, position) in zip(ends, layout.states[i].tolist()):
            assert layout.row_trajectory[row] == i and layout.ids[row, position] == end
        assert (layout.states[i, len(t.turns) + 1:] == -1).all()
        row, position = layout.states[i, len(t.turns)].tolist()
        assert position == layout.lengths[row] - 1                     # by length; the sum of a mask is no position


@given(random_groups(), st.randoms(use_true_random=False))
def test_taking_some_keeps_everything_about_them(groups, rng):
    layout = pack(groups)
    some = rng.sample(range(len(layout.groups)), rng.randint(1, len(layout.groups)))
    part = take(layout, some)
    assert part.ids.shape[1] == part.lengths.max() and torch.equal(part.groups, layout.groups[some])
    for i, old in enumerate(some):
        a, b = part.row_trajectory == i, layout.row_trajectory == old
        width = min(part.ids.shape[1], layout.ids.shape[1])
        for name in ('ids', 'token_turns', 'logps', 'trained'):
            assert torch.equal(getattr(part, name)[a][:, :width], getattr(layout, name)[b][:, :width])
        assert torch.equal(part.lengths[a], layout.lengths[b]) and torch.equal(part.turn_mask[i], layout.turn_mask[old])
        for (r, p), (r_old, p_old) in zip(part.states[i].tolist(), layout.states[old].tolist()):
            assert p == p_old and (r == r_old == -1 or part.ids[r, p] == layout.ids[r_old, p_old])
    assert part.trained.sum() == sum((layout.trained[layout.row_trajectory == i]).sum() for i in some)


@given(random_groups(), st.integers(1, 40), st.integers(1, 3), st.sampled_from(AVERAGES))
def test_micro_batches_and_ranks_add_up(groups, budget, ranks, average):
    "Each trajectory is computed once, all ranks run equally many forwards, and the parts sum to the whole."
    layout = pack(groups)
    weights = loss_weights(layout.token_turns, layout.row_trajectory, average)
    terms = torch.randn(layout.ids.shape, generator=torch.Generator().manual_seed(budget))
    rows = [layout.row_trajectory == i for i in range(len(layout.groups))]
    sizes = [(int(of.sum()), int(layout.lengths[of].max())) for of in rows]
    shares = deal(sizes, budget, ranks)
    assert sorted(i for parts in shares for part in parts for i in part) == list(range(len(sizes)))
    assert len({len(parts) for parts in shares}) == 1 and len(shares) == ranks
    total = 0.
    for part in (part for parts in shares for part in parts if part):
        assert len(part) == 1 or sum(sizes[i][0] for i in part) * max(sizes[i][1] for i in part) <= budget
        of = torch.isin(layout.row_trajectory, torch.tensor(part))
        total += (weights[of] * terms[of]).sum().item()
    assert total == pytest.approx((weights * terms).sum().item(), rel=1e-4, abs=1e-5)


def sharp_model(vocabulary): return small_qwen(vocabulary, max_position_embeddings=512, initializer_range=.1)


class Nothing:
    "A retriever that finds nothing."
    def search(self, queries, k):
        return [[] for _ in queries]


def merging_tokenizer():
    "Bytes, and a token for each pair of letters: what a model says letter by letter would be encoded otherwise."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    pairs = [(a, b) for a in string.ascii_lowercase for b in string.ascii_lowercase]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate([*alphabet, *(a + b for a, b in pairs)])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token='<|im_end|>', pad_token='<|endoftext|>',
                                   additional_special_tokens=['<|im_start|>'], chat_template=CHATML)


def test_sampled_ids_are_kept_where_encoding_their_text_would_give_others():
    tokenizer = merging_tokenizer()
    model = small_qwen(len(tokenizer), max_position_embeddings=512)
    env = Environment(Chat(PROTOCOLS['tiny'], tokenizer), SearchTool(Nothing(), k=1, max_tokens=9), max_turns=3,
                      max_tokens=400)
    groups = rollout(HFEngine(model, tokenizer), env, [Question('q', 'who?', ['x'])], 4, SamplingParams(max_tokens=40),
                     seed=1)
    layout, again = pack(groups), lambda ids: tokenizer(tokenizer.decode(ids), add_special_tokens=False).input_ids
    for i, t in enumerate(trajectories(groups)):
        ids, own = spread(t)
        assert layout.ids[i, :len(ids)].tolist() == ids.tolist()
        same_logps(plain(model, t), recorded(t))   # later turns were sampled after those ids, not after their text's
    assert sum(again(ids) != list(ids) for t in trajectories(groups) for ids in said(t)) > 4
    same_logps(Learner(model).evaluate(layout).logp, layout.logps)


def test_the_prompts_example_is_no_answer():
    "The published prompt shows an answer, Beijing: who says nothing has not given it."
    chat = Chat(PROTOCOLS['tspo'], byte_tokenizer())
    assert '<answer> Beijing </answer>' in chat.tokenizer.decode(chat.prompt_ids('?'))
    env = Environment(chat, SearchTool(Nothing(), k=1, max_tokens=9), max_turns=2, max_tokens=8000)
    silent = ScriptedEngine(lambda text, rng: 'hm', chat.tokenizer, max_length=8000)
    groups = rollout(silent, env, [Question('q', 'Capital of China?', ['Beijing'])], 2)
    assert all(t.answer is None and t.stop is Stop.TURN_CAP for t in trajectories(groups))
    assert outcome_rewards(groups).tolist() == [0, 0]


def test_an_observation_is_no_answer():
    class Echo:
        def search(self, queries, k):
            return [[Passage('0', '', '<answer> Beijing </answer>')] for _ in queries]
    chat = Chat(PROTOCOLS['tiny'], byte_tokenizer())
    env = Environment(chat, SearchTool(Echo(), k=1, max_tokens=99), max_turns=2)
    groups = rollout(ScriptedEngine(lambda text, rng: '<tool_call> China </tool_call>', chat.tokenizer), env,
                     [Question('q', '?', ['Beijing'])])
    assert 'Beijing' in groups[0].trajectories[0].turns[0].observation_text and groups[0].trajectories[0].answer is None


def test_stop_strings_do_not_begin_in_the_prompt():
    "A prompt's last letters and the first that is sampled are no stop string."
    tokenizer = byte_tokenizer()
    engine, prompt = HFEngine(sharp_model(len(tokenizer)), tokenizer), tokenizer('who').input_ids
    (free,) = engine.generate([prompt], SamplingParams(max_tokens=6)).ids
    first = tokenizer.decode(free[:1])
    for stop in ('o' + first, 'who' + first):
        assert engine.generate([prompt], SamplingParams(max_tokens=6, stop=(stop,))).ids[0] == free
    assert engine.generate([prompt], SamplingParams(max_tokens=6, stop=(first,))).ids[0] == free[:1]


@pytest.mark.parametrize('words', ['</é>', '结'])
def test_a_stop_string_may_take_more_tokens_than_letters(words):
    "Each byte is a token. The model's layers add nothing, so a token's own vector names the next one."
    tokenizer = byte_tokenizer()
    prompt, *stop = tokenizer(f'a{words}b').input_ids
    assert len(stop[:-1]) > len(words)
    model = sharp_model(len(tokenizer))
    with torch.no_grad():
        for layer in model.model.layers:
            for part in (layer.self_attn.o_proj, layer.mlp.down_proj): part.weight.zero_()
        model.lm_head.weight.zero_()
        vectors = model.get_input_embeddings().weight
        for last, after in zip([prompt, *stop], stop): model.lm_head.weight[after] = vectors[last]
    said = HFEngine(model, tokenizer).generate([[prompt]], SamplingParams(greedy=True, max_tokens=8, stop=(words,)))
    assert said.ids[0] == stop[:-1]


def test_groups_without_a_difference_get_exactly_nothing():
    "Zero variance is seen by the spread: three equal rewards, 0 or 1, give advantages that are exactly 0."
    chat = Chat(PROTOCOLS['tiny'], byte_tokenizer())
    env = Environment(chat, SearchTool(Nothing(), k=1, max_tokens=9))
    for answer in ('right', 'wrong'):
        engine = ScriptedEngine(lambda text, rng: f'<answer> {answer} </answer>', chat.tokenizer)
        groups = rollout(engine, env, [Question('q', '?', ['right'])], 3)
        for name, m in METHODS.items():
            if not m.rule.compares or m.needs.forwards or name in ('mt-grpo*', 'mt-grpo', 'prs', 'prs+vspo', 'igpo-f1'):
                continue
            batch = assign(m, groups, look=lambda layout, asks: None)
            assert batch.empty or (batch.credit.advantages == 0).all(), (name, answer)
