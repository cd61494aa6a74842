"""28_groups, 40_advantages: properties of credit rules, and what TRL and torchrl make of the same rewards.

RLOO, GRPO, Dr. GRPO and REINFORCE++ are compared with TRL's trainers, GAE with torchrl, and what no maintained library
holds that can be installed beside them (MT-GRPO, MT-GRPO*, GiGPO) with its definition, written out slowly.
"""
import functools, itertools, math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from torchrl.objectives.value import functional

from credit_rl.advantages import (anchor_ids, anchor_share, discounted_sum, gae, gigpo, group_normalize, mt_grpo,
                                  mt_grpo_star, reinforce_pp, rloo, to_tokens, turn_normalize)
from credit_rl.tspo import folr_rewards, tspo_advantages
from credit_rl.carl import segment_advantages
from credit_rl.information_gain import NORMS, igpo_advantages
from credit_rl.groups import at_last_turn, discounted_suffix, group_share
from credit_rl.layout import loss_weights
from credit_rl.losses import kl
from credit_rl.parts import to_tokens
from credit_rl.trajectory import Group, Question, Trajectory, Turn, example_group
from credit_batches import NAN, batches, cells, z


# ---------------------------------------------------------------- comparing

@given(batches(), st.sampled_from([0, 1]), st.booleans())
def test_group_normalize_is_the_z_score_of_each_group(batch, ddof, scale):
    x, mask, groups = batch
    out = group_normalize(x, groups, mask, ddof=ddof, scale=scale)
    one = group_normalize(x[:, 0], groups, ddof=ddof, scale=scale)
    close = lambda got, values: assert_close(got, torch.tensor(values, dtype=x.dtype), atol=1e-7, rtol=1e-6)
    for members in cells(groups):
        where = [(i, k) for i in members for k in range(x.shape[1]) if mask[i, k]]
        close(torch.stack([out[w] for w in where]), z([x[w].item() for w in where], ddof, scale=scale))
        close(one[members], z(x[members, 0].tolist(), ddof, scale=scale))
    assert not out[~mask].any()


@given(batches(), st.sampled_from(['last', 'none']), st.sampled_from([0, 1]), st.booleans())
def test_turn_normalize_compares_turn_with_turn(batch, pad, ddof, scale):
    x, mask, groups = batch
    out = turn_normalize(x, mask, groups, pad, ddof, scale=scale)
    last = mask.sum(1) - 1
    for members in cells(groups):
        for k in range(x.shape[1]):
            there = [i for i in members if pad == 'last' or mask[i, k]]
            expected = z([x[i, min(k, int(last[i]))].item() for i in there], ddof, scale=scale)
            for i, e in zip(there, expected):
                assert math.isclose(out[i, k], e if mask[i, k] else 0.0, rel_tol=1e-6, abs_tol=1e-7)


def anchors_of(x):
    "Anchors (N, K) that depend on a rollout's own rewards, so that they move with it."
    return (torch.nan_to_num(x) > 0).long()


def finds_of(x, mask):
    "Outcomes (N,) and first turns (N,) for TSPO that depend on a rollout's own rewards."
    first = torch.where(x[:, 0] > 2, -1, (mask.sum(1) - 1) // 2)
    return (x[:, 0] > 0).to(x.dtype), first


brief = settings(max_examples=12)
IGPO = [*itertools.product(NORMS, ('paper', 'released'))]
RULES = {  # (x (N, K), turn_mask, groups) → (N, K) or (N,)
    'joint norm': lambda v, m, g: group_normalize(v, g, m),
    'outcome norm': lambda v, m, g: group_normalize(v[:, 0], g),
    'turn norm': turn_normalize,
    'turn norm, none': lambda v, m, g: turn_normalize(v, m, g, pad='none'),
    'rloo': lambda v, m, g: rloo(v[:, 0], g),
    'reinforce_pp': lambda v, m, g: reinforce_pp(v[:, 0]),
    'reinforce_pp baseline': lambda v, m, g: reinforce_pp(v[:, 0], g),
    'mt_grpo': lambda v, m, g: mt_grpo(v[:, 0].abs(), v[:, 0], m[:, :2], g),
    'mt_grpo_star': lambda v, m, g: mt_grpo_star(v, v[:, 0], m, g),
    'mt_grpo_star pooled': lambda v, m, g: mt_grpo_star(v, v[:, 0], m, g, norm='pooled'),
    'gigpo': lambda v, m, g: gigpo(v, anchors_of(v), m, g),
    'gigpo std': lambda v, m, g: gigpo(v, anchors_of(v), m, g, mode='mean_std_norm'),
    'tspo': lambda v, m, g: tspo_advantages(*finds_of(v, m), m, g, 0.5, 'all'),
    'tspo all-wrong': lambda v, m, g: tspo_advantages(*finds_of(v, m), m, g),
    'folr': lambda v, m, g: folr_rewards(*finds_of(v, m), m, 0.5),
    'discounted_sum': lambda v, m, g: discounted_sum(v, m, 0.9),
    **{f'igpo {norm} {variant}': functools.partial(igpo_advantages, gamma=0.9, norm=norm, variant=variant)
       for norm, variant in IGPO},
    'segments': lambda v, m, g: segment_advantages(v, m, (v[:, 0] > 0).to(v.dtype), 0.5),
}
COMPARING = ('joint norm', 'turn norm', 'rloo', 'reinforce_pp', 'reinforce_pp baseline', 'mt_grpo', 'mt_grpo_star',
             'mt_grpo_star pooled')
every_rule = pytest.mark.parametrize('rule', RULES.values(), ids=RULES)


@every_rule
@brief
@given(batch=batches(), random=st.randoms(use_true_random=False))
def test_order_and_names_of_groups_do_not_matter(rule, batch, random):
    x, mask, groups = batch
    order = torch.tensor(random.sample(range(len(x)), len(x)))
    renamed = groups * 7 + 1000
    for y in (x, torch.where(mask, x, 0.0)):
        assert_close(rule(y[order], mask[order], renamed[order]), rule(y, mask, groups)[order], atol=1e-8, rtol=1e-8)


@every_rule
@brief
@given(batch=batches(), garbage=st.sampled_from([NAN, 0.0, 1e6]))
def test_padding_is_never_read(rule, batch, garbage):
    x, mask, groups = batch
    wide = torch.cat([torch.where(mask, x, garbage), torch.full((len(x), 2), garbage, dtype=x.dtype)], 1)
    got, wanted = rule(wide, torch.nn.functional.pad(mask, (0, 2)), groups), rule(x, mask, groups)
    if got.ndim == 2:
        assert not got[:, wanted.shape[1]:].any() and not wanted[~mask[:, :wanted.shape[1]]].any()
        got = got[:, :wanted.shape[1]]
    assert_close(got, wanted, atol=1e-12, rtol=1e-12)


@every_rule
@brief
@given(batch=batches())
def test_low_precision_uses_float32_statistics(rule, batch):
    x, mask, groups = batch
    for dtype in (torch.bfloat16, torch.float16):
        low = x.to(dtype)
        out = rule(low, mask, groups)
        assert out.dtype == dtype and not out.isnan().any()
        assert torch.equal(out, rule(low.float(), mask, groups).to(dtype))


@brief
@given(dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
       constant=st.floats(-1000, 1000, width=16), size=st.integers(2, 40))
def test_equal_rewards_give_exactly_zero(dtype, constant, size):
    x, groups = torch.full((size, 3), constant).to(dtype), torch.zeros(size, dtype=torch.long)
    mask, one = torch.ones(size, 3, dtype=torch.bool), x[:, 0]
    for a in (group_normalize(x, groups, mask), group_normalize(one, groups), turn_normalize(x, mask, groups),
              rloo(one, groups), reinforce_pp(one), reinforce_pp(one, groups), mt_grpo_star(x, one, mask, groups),
              gigpo(x, torch.zeros(size, 3, dtype=torch.long), mask, groups, gamma=0.0, mode='mean_std_norm'),
              group_normalize(one, groups, ddof=1), group_normalize(one, groups, eps=0.0),
              *(igpo_advantages(x, mask, groups, norm=norm, variant=variant, eps=0.0) for norm, variant in IGPO)):
        assert (a == 0).all() and a.dtype == dtype


@brief
@given(batches(), st.data())
def test_a_missing_trajectory_leaves_the_statistics(batch, data):
    x, mask, groups = batch
    gone = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(x), max_size=len(x))))
    kept = ~gone
    holed = torch.where(gone[:, None], NAN, x)
    if kept.sum() < 2 or groups[kept].unique(return_counts=True)[1].max() < 2: return
    same_anchors = lambda v, m, g: gigpo(v, torch.zeros_like(m, dtype=torch.long), m, g)
    for rule in (same_anchors, *(RULES[name] for name in RULES if name in COMPARING or name.startswith('igpo'))):
        out = rule(holed, mask, groups)
        assert (out[gone] == 0).all()
        assert_close(out[kept], rule(x[kept], mask[kept], groups[kept]), atol=1e-8, rtol=1e-8)
    assert discounted_sum(holed, mask, 0.9)[mask & gone[:, None]].isnan().all()         # missing stays missing
    seen = [[x[i, 0].item() for i in m if kept[i]] for m in cells(groups) if kept[m].any()]
    collapsed = sum(len(set(values)) == 1 for values in seen) / len(seen)
    assert math.isclose(group_share(holed[:, 0], groups)['collapsed'], collapsed, rel_tol=1e-6)


def test_half_measured_trajectories_infinities_and_lone_groups_are_refused():
    def refused(said, *rules):
        for rule in rules:
            with pytest.raises(ValueError, match=said): rule()
    pair, both, full = torch.tensor([0, 0]), torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 2)
    half, lone = torch.tensor([[1., NAN], [0., 1.]]), torch.tensor([0, 1])
    refused('bridge', lambda: group_normalize(half, pair), lambda: turn_normalize(half, both, pair),
            lambda: discounted_sum(half, both, 1.0))
    endless = torch.tensor([1., -math.inf])
    refused('infinite', lambda: group_normalize(endless, pair), lambda: rloo(endless, pair),
            lambda: reinforce_pp(endless), lambda: mt_grpo(endless, endless, both, pair),
            lambda: mt_grpo_star(endless[:, None].expand(2, 2), half[1], both, pair),
            lambda: gigpo(endless.expand(2, 2), both.long(), both, pair),
            lambda: discounted_sum(endless.expand(2, 2), both, 1.0))
    refused('member', lambda: group_normalize(half[1], lone), lambda: rloo(half[1], lone),
            lambda: turn_normalize(half[1:].expand(2, 2), both, lone), lambda: reinforce_pp(half[1], lone),
            lambda: tspo_advantages(half[1], torch.tensor([-1, -1]), both, lone),
            lambda: mt_grpo(half[1], half[1], both, lone), lambda: mt_grpo_star(half, half[1], both, lone),
            lambda: gigpo(half[1:].expand(2, 2), both.long(), both, lone))
    beside = group_normalize(torch.tensor([1., 0., 5.]), torch.tensor([0, 0, 1]))
    assert beside[2] == 0                                                               # a lone member beside others
    with pytest.raises(TypeError, match='index_groups'): group_normalize(half[1], [example_group()])
    holes = torch.tensor([[False, True], [True, True]])
    refused('hole', lambda: turn_normalize(full, holes, pair), lambda: discounted_sum(full, holes, 1.0),
            lambda: at_last_turn(full[0], holes), lambda: gigpo(full, both.long(), holes, pair),
            lambda: mt_grpo_star(full, full[0], holes, pair), lambda: mt_grpo(full[0], full[0], holes, pair),
            lambda: folr_rewards(full[0], pair, holes))
    refused('trajectory', lambda: at_last_turn(torch.ones(3), both))
    refused('ddof', *(lambda g=g: reinforce_pp(full[0], g, ddof=3) for g in (None, pair)))
    refused('bool', lambda: group_normalize(half, pair, torch.ones(2, 2)))
    refused('rows', lambda: mt_grpo(full[:, :1], full[0], both, pair), lambda: mt_grpo(full[0], full[0], both[:1], pair))
    refused('integers', lambda: loss_weights(both, pair), lambda: to_tokens(full, both))


def test_integer_rewards_are_not_truncated():
    x, mask, groups = torch.tensor([[1, 0, 1], [0, 0, 0]]), torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 0])
    of_outcomes = [lambda v: folr_rewards(v[:, 0], groups, mask, 0.5), lambda v: gigpo(v, mask.long(), mask, groups),
                   lambda v: tspo_advantages(v[:, 0], groups, mask, groups, 0.5, 'all'),
                   lambda v: mt_grpo(v[:, 0], v[:, 0], mask & torch.tensor([True, True, False]), groups)]
    named = ('joint norm', 'turn norm', 'discounted_sum', 'rloo', 'reinforce_pp', 'reinforce_pp baseline',
             'mt_grpo_star', 'igpo joint paper')
    for rule in (*of_outcomes, *(lambda v, rule=RULES[name]: rule(v, mask, groups) for name in named)):
        assert rule(x).dtype == torch.float32
        assert_close(rule(x), rule(x.float()))


# ---------------------------------------------------------------- accumulating

@given(batches(), st.floats(0, 1))
def test_discounted_sum_is_the_recursion(batch, gamma):
    x, mask, groups = batch
    y = discounted_sum(x, mask, gamma)
    for row, own, got in zip(x.tolist(), mask.tolist(), y.tolist()):
        total, expected = 0.0, []
        for r, m in list(zip(row, own))[::-1]:
            total = r + gamma * total if m else 0.0
            expected.insert(0, total)
        assert all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9) for a, b in zip(got, expected))
    assert_close(discounted_sum(x, mask, 0.0), torch.where(mask, x, 0.0))
    assert_close(discounted_sum(x, mask, 1.0)[:, 0], torch.where(mask, x, 0.0).sum(1))
    assert_close(at_last_turn(x[:, 0], mask).sum(1), x[:, 0])


@given(st.integers(1, 70), st.floats(0, 1))
def test_doubling_reaches_every_length(length, factor):
    x = torch.randn(2, length, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    y = discounted_suffix(x, factor)
    assert_close(y[:, -1], x[:, -1])
    assert_close(y[:, :-1], x[:, :-1] + factor * y[:, 1:])


# ---------------------------------------------------------------- other advantages

def trl_advantages(rewards, size, kind='GRPO', **settings):
    "What TRL's trainer makes of rewards (N,) in groups of `size`; NaN is a reward that could not be had."
    module = pytest.importorskip(f'trl.trainer.{kind.lower()}_trainer', reason='pip install credit_rl[train]')
    class Bare(getattr(module, f'{kind}Trainer')):
        def __getattr__(self, name): return None                      # what is not said below
    trainer = object.__new__(Bare)                                    # its method, without a model and data
    same, ids, n = (lambda x, *a, **k: x), [[0]] * len(rewards), len(rewards)
    written = (ids, ids, None, [''] * n, None, {}, None, None) if kind == 'GRPO' else (ids, ids, [''] * n)
    args = SimpleNamespace(per_device_train_batch_size=n, steps_per_generation=1, gradient_accumulation_steps=1,
                           gradient_checkpointing_kwargs=None)
    stubs = dict(
        num_generations=size, reward_weights=torch.ones(1), reward_func_names=['r'], reward_funcs=[None], beta=0.0,
        scale_rewards='group', multi_objective_aggregation='sum_then_normalize', num_iterations=1, args=args,
        _pending_extra_logs={}, _pending_metrics={}, _metrics={'train': defaultdict(list)},
        _logs=defaultdict(list, rewards=defaultdict(list)), _tokenizer=SimpleNamespace(pad_token_id=0),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        accelerator=SimpleNamespace(device=torch.device('cpu'), process_index=0, gather=same, reduce=same),
        _generate=lambda prompts: written, _calculate_rewards=lambda *a: rewards[:, None].clone(),
        _get_per_token_logps_and_entropies=lambda *a, **k: (torch.zeros(n, 1), None, None))
    for name, value in {**stubs, **settings}.items(): setattr(trainer, name, value)
    return trainer._generate_and_score_completions([{'prompt': ''}] * n)['advantages']


@pytest.mark.parametrize('seed', range(2))
def test_outcome_comparisons_are_trls(seed):
    g = torch.Generator().manual_seed(seed)
    r, groups = (torch.rand(12, generator=g) > 0.5) + 0.3 * torch.rand(12, generator=g), torch.arange(12) // 4
    r[8:] = 0.7                                                                             # a group without spread
    gone = torch.where(torch.arange(12) == 3 * seed % 12, NAN, r)
    close = lambda ours, theirs: assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for x in (r, gone):
        close(group_normalize(x, groups, ddof=1, eps=1e-4), trl_advantages(x, 4))
        close(group_normalize(x, groups, scale=False), trl_advantages(x, 4, scale_rewards='none'))      # Dr. GRPO
        close(rloo(x, groups), trl_advantages(x, 4, 'RLOO'))
        close(reinforce_pp(x, ddof=1, eps=1e-4), trl_advantages(x, 12))  # the whole batch as one group
    # TRL divides the leave-one-out differences by their deviation: G/(G−1) times ours on both sides of the fraction,
    # but for its ε
    close(reinforce_pp(r, groups, ddof=1, eps=1e-4 * 3 / 4), trl_advantages(r, 4, 'RLOO', normalize_advantages=True))


def test_rloo_with_k1_in_the_reward_is_trls():
    "RLOO as published takes the KL penalty off the reward, summed over the text's tokens: k1."
    g = torch.Generator().manual_seed(0)
    r, (old, ref) = torch.rand(8, generator=g), -torch.rand(2, 8, 1, generator=g) - 0.1
    said = iter([old, ref])
    theirs = trl_advantages(r, 4, 'RLOO', beta=0.3, ref_model=object(),
                            _get_per_token_logps_and_entropies=lambda *a, **k: (next(said), None, None))
    assert_close(rloo(r - 0.3 * kl(old, ref, 'k1').sum(1), torch.arange(8) // 4), theirs, atol=1e-6, rtol=1e-5)


@given(batches(), st.sampled_from(['turn', 'pooled']), st.booleans(), st.floats(0, 2), st.floats(0, 2),
       st.sampled_from([(0, 1e-6), (1, 0.5)]), st.data())
def test_mt_grpo_star_is_the_definition(batch, norm, literal, mid, final, how, data):
    x, mask, groups = batch
    flags = lambda p: torch.tensor([[data.draw(p) for _ in range(x.shape[1])] for _ in range(len(x))])
    tool, unrated, tokens = flags(st.booleans()), flags(st.integers(0, 4)) == 0, flags(st.integers(1, 9))
    outcome = torch.tensor([data.draw(st.sampled_from([0., 1., NAN])) for _ in range(len(x))], dtype=torch.float64)
    rewards = torch.where(mask, torch.where(unrated & tool, NAN, x), data.draw(st.sampled_from([NAN, 1e6])))
    a = mt_grpo_star(rewards, outcome, mask, groups, tool, mid, final, norm, literal, tokens if literal else None, *how)
    for members in cells(groups):
        known = [i for i in members if not outcome[i].isnan()]
        outer = dict(zip(known, z([outcome[i].item() for i in known], *how)))
        compared = {}
        for i in known:
            for s, k in enumerate(k for k in range(x.shape[1]) if mask[i, k] and tool[i, k]):
                if not rewards[i, k].isnan(): compared.setdefault(s if norm == 'turn' else 0, []).append((i, k))
        inner = {}
        for where in compared.values():
            inner |= zip(where, z([(rewards[w] / (tokens[w] if literal else 1)).item() for w in where], *how))
        for i in members:
            for k in range(x.shape[1]):
                expected = mid * inner.get((i, k), 0.0) + final * outer.get(i, 0.0) if mask[i, k] else 0.0
                assert math.isclose(a[i, k], expected, rel_tol=1e-5, abs_tol=1e-5)


@given(batches(), st.floats(0, 1), st.sampled_from([0, 1]), st.sampled_from([1e-6, 0.5]), st.data())
def test_mt_grpo_is_the_definition(batch, beta, ddof, eps, data):
    x, mask, groups = batch
    mask = mask[:, :2]
    call, outcome = ([data.draw(st.sampled_from([0., 0.25, 1., NAN])) for _ in range(len(x))] for _ in range(2))
    a = mt_grpo(torch.tensor(call, dtype=torch.float64), torch.tensor(outcome, dtype=torch.float64), mask, groups,
                beta, ddof, eps)
    for members in cells(groups):
        known = [i for i in members if not math.isnan(outcome[i])]
        called = [i for i in known if not math.isnan(call[i])]
        outer = dict(zip(known, z([outcome[i] for i in known], ddof, eps)))
        inner = dict(zip(called, z([call[i] for i in called], ddof, eps)))
        for i in members:
            first = beta * inner[i] + (1 - beta) * outer[i] if i in inner else outer.get(i, 0.0)
            assert a[i].tolist() == pytest.approx(
                [v if m else 0.0 for v, m in zip([first, outer.get(i, 0.0)], mask[i])], abs=1e-6)


@given(batches(), st.sampled_from([0.0, 0.95, 1.0]), st.sampled_from(['mean_norm', 'mean_std_norm']),
       st.sampled_from([(0, 1e-6), (1, 0.5)]), st.data())
def test_gigpo_compares_within_anchors(batch, gamma, mode, how, data):
    x, mask, groups = batch
    anchors = torch.tensor([[data.draw(st.integers(0, 2)) for _ in range(x.shape[1])] for _ in range(len(x))])
    a = gigpo(x, anchors, mask, groups, gamma, 0.7, mode, *how)
    total, to_go = torch.where(mask, x, 0.0).sum(1), discounted_sum(x, mask, gamma)
    scale = mode == 'mean_std_norm'
    for members in cells(groups):
        episode = z(total[members].tolist(), *how, scale=scale)
        for anchor in range(3):
            where = [(i, k) for i in members for k in range(x.shape[1]) if mask[i, k] and anchors[i, k] == anchor]
            for (i, k), step in zip(where, z([to_go[w].item() for w in where], *how, scale=scale)):
                assert math.isclose(a[i, k], episode[members.index(i)] + 0.7 * step, rel_tol=1e-5, abs_tol=1e-5)


def test_anchors_are_exact_contexts():
    q = Question('q', '?', ['a'])
    turn = lambda ids, obs, context=None: Turn('tool', ids, [-1.0] * len(ids), obs, '', '', context_ids=context)
    make = lambda *turns: Trajectory(q, [1, 2], turns, 'answer', 'a')
    first, other_split = make(turn([3, 4], [5]), turn([7], [])), make(turn([3], [4, 5]), turn([6], []))
    longer, edited = (make(turn([3], [4]), turn([6], []), turn([1], [])),
                      make(turn([9], [9]), turn([8], [], context=[1, 2, 3, 4, 5])))
    a = anchor_ids([Group(q, [first, other_split, longer, edited]), Group(q, [make(turn([3, 4], [5]))])])
    assert a[0, 1] == a[1, 1] == a[3, 1] and a[2, 1] != a[0, 1] and len({a[i, 0].item() for i in range(4)}) == 1
    assert a[4, 0] != a[0, 0] and a[0, 2] == -1  # another question, the same ids; no third turn
    assert math.isclose(anchor_share(a, a >= 0), 3 / 5, rel_tol=1e-6)


# ---------------------------------------------------------------- tokens

def random_rows(seed, rows=5, length=12, trajectories=None, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    r, v = torch.randn(2, rows, length, generator=g, dtype=dtype)
    mask = torch.rand(rows, length, generator=g) < 0.6
    owner = None if trajectories is None else torch.randint(0, trajectories, (rows,), generator=g)
    return torch.where(mask, r, NAN), torch.where(mask, v, NAN), mask, owner


@given(st.integers(0, 10 ** 6), st.floats(0, 1), st.floats(0, 1), st.sampled_from([None, 1, 2, 3]))
def test_gae_is_the_recursion_over_trained_tokens(seed, gamma, lam, trajectories):
    r, v, mask, owner = random_rows(seed, trajectories=trajectories)
    a, returns = gae(r, v, mask, gamma, lam, owner)
    ids = list(range(len(r))) if owner is None else owner.tolist()
    for t in set(ids):
        where = [(i, j) for i in range(len(r)) if ids[i] == t for j in range(r.shape[1]) if mask[i, j]]
        later_v = later_a = 0.0
        for w in where[::-1]:
            later_a = (r[w] + gamma * later_v - v[w] + gamma * lam * later_a).item()
            later_v = v[w].item()
            assert math.isclose(a[w], later_a, rel_tol=1e-9, abs_tol=1e-9)
            assert math.isclose(returns[w], later_a + later_v, rel_tol=1e-9, abs_tol=1e-9)
    assert not a[~mask].any() and not returns[~mask].any()


def test_gae_agrees_with_torchrl():
    g = torch.Generator().manual_seed(0)
    r, v = torch.randn(2, 6, 40, generator=g)
    mask = torch.rand(6, 40, generator=g) < 0.5
    for gamma, lam in ((1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.9, 0.0)):
        a, returns = gae(r, v, mask, gamma, lam)
        for i in range(6):                  # torchrl knows no holes: give it the trained tokens alone
            x, value = r[i][mask[i]].view(1, -1, 1), v[i][mask[i]].view(1, -1, 1)
            done = torch.zeros_like(x, dtype=torch.bool)
            done[:, -1] = True
            later = torch.cat([value[:, 1:], torch.zeros(1, 1, 1)], 1)
            expected, target = functional.generalized_advantage_estimate(gamma, lam, value, later, x, done, done)
            assert_close(a[i][mask[i]], expected.flatten(), atol=1e-5, rtol=1e-5)
            assert_close(returns[i][mask[i]], target.flatten(), atol=1e-5, rtol=1e-5)


def test_gae_and_to_tokens_refuse():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for given, said in (((x, x * NAN, mask, 1.0, 1.0), 'finite'), ((x, x, mask, 1.0, 1.1), 'lam'),
                        ((x, x, mask.float(), 1.0, 1.0), 'bool'),
                        ((x, x, mask, 1.0, 1.0, torch.tensor([0])), 'row_trajectory')):
        with pytest.raises(ValueError, match=said): gae(*given)
    a, returns = gae(x, x, torch.zeros_like(mask), 1.0, 1.0)               # an empty micro-batch
    assert not a.any() and not returns.any()
    token_turns = torch.tensor([[-1, 0, 0, -1, 1, -1, 2, 2]])
    for table, said in ((torch.ones(1, 2), r'\[-1, 2\)'), (torch.ones(2, 3), 'R = 2'),
                        (torch.tensor([[1., NAN, 0.]]), 'finite')):
        with pytest.raises(ValueError, match=said): to_tokens(table, token_turns)
    r, v, mask, _ = random_rows(0)
    low = gae(r.bfloat16(), v.bfloat16(), mask, 1.0, 0.95)[0]
    assert_close(low, gae(r.bfloat16().float(), v.bfloat16().float(), mask, 1.0, 0.95)[0].bfloat16())


# ---- what a caller of the functions meets ----

CALLS = {  # function -> what it takes: two rollouts of one group, two turns each
    'group_normalize': 'outcome groups', 'group_share': 'outcome groups', 'at_last_turn': 'outcome mask',
    'discounted_sum': 'turns mask gamma', 'folr_rewards': 'outcome first mask', 'rloo': 'outcome groups',
    'tspo_advantages': 'outcome first mask groups', 'turn_normalize': 'turns mask groups', 'reinforce_pp': 'outcome',
    'gae': 'turns turns mask gamma gamma', 'mt_grpo': 'outcome outcome mask groups',
    'mt_grpo_star': 'turns outcome mask groups', 'gigpo': 'turns anchors mask groups',
    'igpo_advantages': 'turns mask groups', 'vspo_weights': 'turns', 'task_values': 'turns',
    'shaping_rewards': 'states mask gamma', 'history_max': 'states mask', 'answer_potential': 'logps',
    'segment_advantages': 'turns mask outcome', 'policy_loss': 'logps logps turns turns'}
NO_ADVANTAGES = ('at_last_turn', 'folr_rewards', 'task_values', 'shaping_rewards', 'history_max', 'answer_potential',
                 'policy_loss')    # rewards, values, and a loss, which has to be a way back


def called(name, **given):
    from credit_rl import advantages, carl, groups, information_gain, losses, potentials, tspo, vspo
    values = {'outcome': torch.tensor([0., 1.]), 'groups': torch.tensor([0, 0]), 'first': torch.tensor([0, -1]),
              'mask': torch.ones(2, 2, dtype=torch.bool), 'turns': torch.tensor([[0., 1.], [1., 1.]]), 'gamma': .9,
              'anchors': torch.tensor([[0, 1], [0, 2]]), 'states': torch.tensor([[-2., -1., 0.], [-2., -2., 0.]]),
              'logps': torch.tensor([[-2., -1.], [-2., -2.]]), **given}
    homes = (groups, tspo, advantages, information_gain, vspo, potentials, carl, losses)
    function = next(vars(m)[name] for m in homes if name in vars(m))
    return function(*(values[x] for x in CALLS[name].split()))


@pytest.mark.parametrize('name', CALLS)
def test_lists_and_arrays_and_empty_batches_are_refused_and_credit_is_no_way_back(name):
    called(name)
    tensors = {'outcome': [0., 1.], 'groups': [0, 0], 'first': [0, -1], 'mask': [[True, True], [True, True]],
               'turns': [[0., 1.], [1., 1.]], 'anchors': [[0, 1], [0, 2]], 'states': [[-2., -1., 0.], [-2., -2., 0.]],
               'logps': [[-2., -1.], [-2., -2.]]}
    for argument in tensors.keys() & set(CALLS[name].split()):
        for wrong in (tensors[argument], np.array(tensors[argument])):
            with pytest.raises(TypeError, match='as_tensor'): called(name, **{argument: wrong})
    if name not in ('group_share', 'vspo_weights', *NO_ADVANTAGES):
        learned = {key: torch.tensor(tensors[key], requires_grad=True) for key in ('outcome', 'turns')}
        out = called(name, **learned)
        assert not any(x.requires_grad for x in (out if isinstance(out, tuple) else (out,)))
    if name == 'task_values' or name not in (*NO_ADVANTAGES, 'discounted_sum'):
        none, pairs = torch.zeros(0), torch.zeros(0, 2)
        given = {'outcome': none, 'groups': none.long(), 'first': none.long(), 'mask': pairs.bool(), 'turns': pairs,
                 'anchors': pairs.long()}
        with pytest.raises(ValueError, match='batch'): called(name, **given)


def test_a_deviation_is_never_made_smaller():
    from credit_rl.vspo import informative, vspo_weights
    x, groups = torch.tensor([0., 1.]), torch.tensor([0, 0])
    for call in (lambda e: group_normalize(x, groups, eps=e), lambda e: reinforce_pp(x, groups, eps=e),
                 lambda e: informative(x[None], e), lambda e: vspo_weights(x[None], eps=e)):
        for bad in (-7, math.nan):
            with pytest.raises(ValueError, match='least'): call(bad)
    for bad in (dict(clip=7), dict(temperature=math.nan, sampling='none'), dict(alpha=math.nan)):
        with pytest.raises(ValueError): vspo_weights(x[None], **bad)
