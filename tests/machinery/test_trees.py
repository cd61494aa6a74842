"""Rows that share a prefix, read as a forest and in rows of their own: the same losses, gradients, whole steps."""
import copy
import importlib.util

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (GPT2Config, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config,
                          Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

import tree_steps
from credit_rl import learner, trees
from credit_rl.estimate import rows_work
from credit_rl.layout import hidden_states, token_logps
from credit_rl.learner import PlainBackend
from credit_rl.runlog import read_metrics
from credit_rl.scoring import AnswerTemplate, answer_logps, answer_logps_separate, joint_logps
from credit_rl.trees import (Paths, attend_by_trees, check_tree, deal_nodes, node_numbers, path_attention, plant,
                             read_tree)
from credit_rl.train import train
from made_runs import SHORT
from started import on_ranks

SIZES = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, initializer_range=.3, max_position_embeddings=1024)
MADE = {
    'qwen2': lambda **o: Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **o})),
    'qwen3': lambda **o: Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **o})),
    'llama': lambda **o: LlamaForCausalLM(LlamaConfig(**{**SIZES, **o})),
    'mistral': lambda **o: MistralForCausalLM(MistralConfig(**{**SIZES, **o}, sliding_window=None)),
}


def made(kind='qwen2', attention='sdpa', **options):
    torch.manual_seed(0)
    model = MADE[kind](**options).train()
    model.set_attn_implementation(attention)
    return model


@st.composite
def rows(draw):
    "Rows that grow off each other: nothing shared, prefixes of each other, the same row twice, single tokens."
    found = [draw(st.lists(st.integers(1, 39), min_size=1, max_size=12))]
    for _ in range(draw(st.integers(0, 6))):
        base = draw(st.sampled_from(found))
        kept = draw(st.integers(0, len(base)))
        found.append(base[:kept] + draw(st.lists(st.integers(1, 39), min_size=0 if kept else 1, max_size=8)))
    return found


def rectangle(found):
    lengths = torch.tensor([len(row) for row in found])
    ids = torch.zeros(len(found), int(lengths.max()), dtype=torch.long)
    for i, row in enumerate(found): ids[i, :len(row)] = torch.tensor(row)
    return ids, lengths


def both_ways(model, ids, lengths, seed=0):
    "Loss and gradients of a random weighted sum of log-probabilities and entropies, by rows and by a tree."
    trained = torch.arange(ids.shape[1]) < lengths[:, None]
    weights = torch.randn(ids.shape, generator=torch.Generator().manual_seed(seed))
    out = []
    for tree in (None, plant(ids, node_numbers(ids, lengths))):
        model.zero_grad()
        logp, entropy = token_logps(model, ids, trained, .7, True, hidden_states(model, ids, tree), tree and tree.place)
        loss = ((logp + .1 * entropy) * weights * trained).sum() / trained.sum()
        if loss.requires_grad: loss.backward()
        out.append((logp.detach(), loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()
                                                  if p.grad is not None}))
    return out


def check_both(model, ids, lengths, seed=0):
    (logp, loss, gradients), (logp2, loss2, gradients2) = both_ways(model, ids, lengths, seed)
    assert_close(logp2, logp, atol=1e-5, rtol=1e-5)
    assert_close(loss2, loss, atol=1e-5, rtol=1e-5)
    assert gradients.keys() == gradients2.keys()
    for name in gradients: assert_close(gradients2[name], gradients[name], atol=1e-4, rtol=1e-4)


MODELS = {}


@settings(max_examples=60, deadline=None)
@given(rows(), st.sampled_from([*MADE]), st.sampled_from(['eager', 'sdpa']), st.integers(0, 9))
def test_any_forest_is_its_rows(found, kind, attention, seed):
    if (kind, attention) not in MODELS: MODELS[kind, attention] = made(kind, attention)
    check_both(MODELS[kind, attention], *rectangle(found), seed)


@settings(max_examples=100, deadline=None)
@given(rows())
def test_nodes_are_the_prefixes_of_the_rows(found):
    ids, lengths = rectangle(found)
    nodes = node_numbers(ids, lengths)
    prefix = {}
    for row, numbers in zip(found, nodes.tolist()):
        for n in range(len(row)): assert prefix.setdefault(numbers[n], row[:n + 1]) == row[:n + 1]
    assert sorted(prefix) == list(range(len({tuple(p) for p in prefix.values()})))
    tree = plant(ids, nodes)
    sees = [[prefix[q][:len(prefix[k])] == prefix[k] for k in range(len(prefix))] for q in range(len(prefix))]
    assert tree.mask().tolist() == sees and tree.work[1] == sum(map(sum, sees))
    some = torch.tensor([i for i in range(len(found)) if i % 2 == 0])
    assert set(plant(ids[some], nodes[some]).ids.tolist()) <= set(tree.ids.tolist())
    q, k, v = torch.randn(3, 1, 2, len(prefix), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=tree.mask())
    assert_close(path_attention(q, k, v, Paths(tree)), dense)


# ---- flex attention: by blocks, as a GPU reads a tree; on a CPU PyTorch computes the same densely ----

def forest(width, seed=0):
    "A tree of so many columns, of rows that share a third, and their lengths."
    generator = torch.Generator().manual_seed(seed)
    shared, part = width // 3, width // 3
    ids = torch.randint(1, 40, (2, shared + width - shared - part), generator=generator)
    ids[1, :shared], ids[0, shared], ids[1, shared] = ids[0, :shared], 1, 2
    lengths = torch.tensor([shared + part, ids.shape[1]])
    tree = plant(ids, node_numbers(ids, lengths))
    assert len(tree.ids) == width
    return tree


@pytest.mark.parametrize('kind', [*MADE])
def test_flex_attention_reads_the_same(kind):
    model, (ids, lengths) = made(kind).eval(), rectangle([[1, 2, 3, 4, 5], [1, 2, 3, 7], [1, 2, 9, 9, 9, 9], [8]])
    tree = plant(ids, node_numbers(ids, lengths))
    with torch.no_grad(): assert_close(read_tree(model, tree, flex=True), read_tree(model, tree), atol=1e-5, rtol=1e-5)


def test_flex_attention_learns_the_same(monkeypatch):
    monkeypatch.setattr(torch_flex, '_validate_device', lambda *ignored: None)   # a CPU's dense form has gradients
    model, tree = made(), forest(300)
    weights = torch.randn(300, SIZES['hidden_size'], generator=torch.Generator().manual_seed(0))
    found = []
    for flex in (True, False):
        model.zero_grad()
        (read_tree(model, tree, flex) * weights).mean().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for name in found[1]: assert_close(found[0][name], found[1][name], atol=1e-6, rtol=1e-4)


def test_six_widths_are_one_compilation():
    "Three heads to a key, which no other test has, so that another's compilation does not serve."
    model = made(num_attention_heads=6).eval()
    before = len(trees.COMPILATIONS)
    with torch.no_grad():
        for width in (100, 300, 500, 600, 800, 1000):
            tree = forest(width)
            assert_close(read_tree(model, tree, flex=True), read_tree(model, tree), atol=1e-4, rtol=1e-4)
    assert len(trees.COMPILATIONS) == before + 1


@settings(max_examples=20, deadline=None)
@given(rows(), st.lists(st.integers(1, 400), min_size=1, max_size=7), st.integers(1, 4))
def test_blocks_are_those_of_the_whole_mask(found, times, more):
    "As PyTorch finds them by looking at every pair of columns, each list in the same order."
    long = [[i for token, n in zip(row, times * 2) for i in [token] * n] or [1] for row in found]
    ids, lengths = rectangle(long)
    tree = plant(ids, node_numbers(ids, lengths)).padded(128 * more)
    lists, width = trees.tree_blocks(tree), len(tree.ids)
    mask = trees.block_mask(tree.ends, lists)
    wanted = torch_flex.create_block_mask(mask.mask_mod, None, None, width, width, device='cpu')
    assert mask.shape == wanted.shape
    names = [f'{full}{side}_{kind}' for side in ('kv', 'q') for full in ('', 'full_')
             for kind in ('num_blocks', 'indices')]
    for name, found in zip(names, lists, strict=True):
        assert torch.equal(found, getattr(wanted, name)) and found.is_contiguous() and found.dtype == torch.int32, name


class Largest(TorchDispatchMode):
    "The most elements of a tensor that was made inside."
    elements = 0
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor): self.elements = max(self.elements, x.numel())
        return out


def test_a_long_tree_needs_no_mask_over_its_columns(monkeypatch):
    "All that is made to read a tree of W columns, but for the attention itself, is far smaller than W × W."
    model, tree, width = made().eval(), forest(4000), 4000
    nothing = lambda query, key, value, *ignored, **unused: torch.zeros_like(query)
    monkeypatch.setattr(trees, 'flex_attend', nothing)
    with torch.no_grad(), Largest() as largest: read_tree(model, tree, flex=True)
    assert 0 < largest.elements <= 4096 * 64 < width ** 2 / 32


@pytest.mark.parametrize('heads', [4, 6])
def test_shared_keys_are_not_copied_for_flex_attention(heads, monkeypatch):
    seen, real = [], trees.flex_attend
    monkeypatch.setattr(trees, 'flex_attend', lambda *args: seen.append(args) or real(*args))
    with torch.no_grad(): read_tree(made(num_attention_heads=heads).eval(), forest(100), flex=True)
    assert [(args[0].shape[1], args[1].shape[1], args[2].shape[1]) for args in seen] == [(heads, 2, 2)] * 2


def test_widths_are_padded_to_few_and_by_little():
    widths = [w + -w % trees._step(w) for w in range(1, 20000)]
    assert all(w % 128 == 0 and w >= 256 for w in widths) and widths == sorted(widths)
    assert all(p <= w * 17 / 16 for w, p in enumerate(widths, 1) if w >= 2048)
    assert len({p for p in widths if 8192 < p <= 16384}) == 16


@pytest.mark.parametrize('reentrant', [False, True])
def test_checkpointed_gradients_are_the_same(reentrant):
    ids, lengths = rectangle([[1, 2, 3, 4, 5], [1, 2, 3, 7], [1, 2, 9, 9, 9, 9], [8]])
    plain, less = made(), made()
    less.gradient_checkpointing_enable({'use_reentrant': reentrant})
    if reentrant: less.enable_input_require_grads()
    _, (logp, _, gradients) = both_ways(plain, ids, lengths)
    _, (logp2, _, gradients2) = both_ways(less, ids, lengths)
    assert torch.equal(logp, logp2)
    for name in gradients: assert_close(gradients2[name], gradients[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize('attention', ['eager', 'sdpa'])
def test_a_model_that_reads_trees_reads_rows_as_before(attention):
    model, ids = made(attention=attention).eval(), torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    before = [model(ids).logits, model(ids, attention_mask=mask).logits[:, 1:], model.generate(ids, max_new_tokens=6)]
    attend_by_trees(model)
    after = [model(ids).logits, model(ids, attention_mask=mask).logits[:, 1:], model.generate(ids, max_new_tokens=6)]
    for a, b in zip(before, after): assert torch.equal(a, b)
    copied = copy.deepcopy(model)
    check_both(copied, *rectangle([[1, 2, 3], [1, 2, 4]]))


@pytest.mark.parametrize('config, why', [
    (GPT2Config(), 'not for'),
    (MistralConfig(sliding_window=4096), 'window'),
    (Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=1), 'window'),
    (LlamaConfig(attention_dropout=.1), 'dropout'),
    (LlamaConfig(rope_parameters={'rope_type': 'dynamic', 'factor': 2., 'rope_theta': 1e4}), 'dynamic'),
], ids=['architecture', 'mistral', 'qwen2', 'dropout', 'rope'])
def test_what_would_be_wrong_is_refused(config, why):
    with pytest.raises(ValueError, match=why): check_tree(config)


def test_dropout_of_low_rank_additions_is_refused():
    from peft import LoraConfig, inject_adapter_in_model
    for drop in (0., .1):
        model = inject_adapter_in_model(LoraConfig(r=2, target_modules=['q_proj'], lora_dropout=drop), made())
        if drop:
            with pytest.raises(ValueError, match='drops'): attend_by_trees(model)
        else: check_both(model, *rectangle([[1, 2, 3], [1, 2, 4]]))


@settings(max_examples=60, deadline=None)
@given(rows(), st.integers(1, 40), st.integers(1, 4))
def test_everything_is_dealt_once_within_the_budget(found, budget, ranks):
    ids, lengths = rectangle(found)
    nodes = node_numbers(ids, lengths)
    units = [row[row >= 0] for row in nodes]
    shares = deal_nodes(units, budget, ranks)
    assert len(shares) == ranks and len({len(parts) for parts in shares}) == 1
    parts = [part for parts in shares for part in parts if part]
    assert sorted(i for part in parts for i in part) == list(range(len(found)))
    for part in parts: assert len(part) == 1 or len(torch.cat([units[i] for i in part]).unique()) <= budget
    assert deal_nodes(units, 10 ** 6)[0] == [sorted(range(len(found)), key=lambda i: (units[i].tolist(), i))]


@settings(max_examples=20, deadline=None)
@given(rows(), st.lists(st.lists(st.integers(1, 39), min_size=2, max_size=4), min_size=1, max_size=3, unique_by=tuple),
       st.sampled_from([5, 20, 10 ** 6]), st.booleans())
def test_answers_scored_in_forests_are_those_scored_one_by_one(found, golds, budget, joint):
    if 'score' not in MODELS: MODELS['score'] = made().eval()
    model, (ids, lengths) = MODELS['score'], rectangle(found)
    first = torch.stack([torch.arange(len(found)), torch.zeros_like(lengths)], 1)
    states = torch.stack([first, torch.stack([torch.arange(len(found)), lengths - 1], 1)], 1)       # (N, 2, 2)
    answers = [[AnswerTemplate(gold, i % 2, len(gold)) for i, gold in enumerate(golds)]] * len(found)
    wanted = answer_logps_separate(model, (ids, lengths), states, answers)
    if not joint: scores = answer_logps(model, (ids, lengths), states, answers, 'tree', budget)
    else:
        trained = (torch.arange(ids.shape[1]) < lengths[:, None]) & (ids % 2 == 0)
        logp, scores = joint_logps(model, (ids, lengths), trained, states, answers, .7, 'tree', budget)
        with torch.no_grad(): assert_close(logp, token_logps(model, ids, trained, .7), atol=1e-5, rtol=1e-5)
    assert torch.equal(scores.tokens, wanted.tokens)
    assert_close(scores.sums, wanted.sums, atol=1e-4, rtol=1e-5)


# ---- whole steps ----

def assert_same_steps(found, wanted):
    "What was seen, logged and learned is the same in float32."
    for x, y in zip(found['seen'], wanted['seen'], strict=True):
        assert x.keys() == y.keys()
        for name in x: assert_close(x[name], y[name], atol=1e-4, rtol=0, equal_nan=True, msg=lambda m: f'{name}: {m}')
    for x, y in zip(found['logs'], wanted['logs'], strict=True):
        assert {n: float(v) for n, v in x.items()} == pytest.approx({n: float(v) for n, v in y.items()}, abs=1e-5)
    assert_close(found['weights'], wanted['weights'], atol=1e-4, rtol=0)


@pytest.mark.parametrize('critic', [None, 'own', 'shared'])
def test_steps_with_trees_are_those_without(critic, monkeypatch):
    wanted, forwards = tree_steps.two_steps(PlainBackend(), False, critic), []
    grown = learner.tree_of
    monkeypatch.setattr(learner, 'tree_of', lambda ids, nodes: forwards.append(grown(ids, nodes)) or forwards[-1])
    assert_same_steps(tree_steps.two_steps(PlainBackend(), True, critic), wanted)
    assert sum(tree is not None for tree in forwards) >= 8          # and they were trees


@pytest.mark.skipif(not importlib.util.find_spec('deepspeed'), reason='pip install credit_rl[train]')
@pytest.mark.parametrize('stages', [(3,), pytest.param((0, 1, 2), marks=pytest.mark.nightly)])
def test_deepspeeds_steps_with_trees_are_the_plain_learners_without(tmp_path, stages):
    found = on_ranks(tree_steps.__file__, 2, tmp_path / 'out.pt', *stages)[0]
    wanted = tree_steps.two_steps(PlainBackend(), False)
    assert sorted(found) == list(stages)
    for stage in found: assert_same_steps(found[stage], wanted)


# ---- runs ----

SHORT = {**SHORT, 'steps': 1, 'eval_every': 1, 'dev_questions': 4, 'test_questions': 4, 'minibatches': 1}


def test_a_run_with_trees_takes_the_steps_of_one_without(tmp_path):
    tables = {}
    for tree in (False, True):
        folder = train({**SHORT, 'method': 'tips', 'tree': tree, 'gradient_checkpointing': tree,
                        'run': str(tmp_path / f'run{tree}')}, say=lambda line: None)
        tables[tree] = read_metrics(folder)
    plain, trees = ({n: v for n, v in t.iloc[1].items() if not n.startswith('seconds')} for t in tables.values())
    assert plain['updates'] == 1 and plain['grad_norm'] > 0 and plain.keys() == trees.keys()
    assert trees == pytest.approx(plain, abs=1e-4, rel=1e-4, nan_ok=True)


def test_a_dry_run_says_what_sharing_saves_before_it_is_measured():
    lines = []
    settings = dict(model=SHORT['model'], dry_run=True, tflops=1., group_size=16, minibatches=1, row_tokens=4096,
                    prompt_tokens=64, response_tokens=128, run='runs/planned')
    train({**settings, 'tree': True}, say=lines.append)
    said = next(line for line in lines if line.startswith('tree:'))
    assert said.startswith(f'tree: {64 + 16 * 128:,} tokens in place of {16 * 192:,} with padding (16 of the')
    lines.clear()
    train(settings, say=lines.append)
    assert not any('tree' in line for line in lines)


def test_the_prediction_is_the_work_of_real_rows():
    "Exact where nothing is common but the prompt, and of segments, whatever their calls' lengths."
    rng = iter(range(10 ** 6))
    new = lambda n: [next(rng) for _ in range(n)]
    prompt = new(20)
    together = [prompt + new(30) for _ in range(5)]
    base, edited = list(prompt), []
    for _ in range(7):
        action, seen, notes = new(4), new(4), new(4)
        edited += [base + action, base + action + seen + notes]
        base = base + action + notes
    edited.append(base + new(4))
    for rows, args in ((together, (20, 30, 1, 5)), (edited, (20, 60, 15, 1))):
        ids, lengths = rectangle(rows)
        (apart, _), shared = rows_work(*args)
        assert apart == ids.numel()
        tokens, pairs = plant(ids, node_numbers(ids, lengths)).work
        assert (tokens, pairs - tokens / 2) == pytest.approx(shared)


def test_a_run_that_cannot_read_trees_does_not_begin(tmp_path):
    with pytest.raises(ValueError, match='lora_dropout'):
        train({**SHORT, 'tree': True, 'lora': {'r': 2, 'lora_dropout': .1}, 'run': str(tmp_path / 'run')}, say=print)
    assert not (tmp_path / 'run').exists()


def test_what_is_saved_of_a_model_that_reads_trees_knows_nothing_of_them(tmp_path):
    model = made()
    attend_by_trees(model)
    model.save_pretrained(tmp_path)
    again = Qwen2ForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == 'sdpa' and 'tree' not in (tmp_path / 'config.json').read_text()
