"""Properties of the credit rules of floors 3 and 4: 30_outcome, 32_folr, 40_advantages."""
import math, statistics, subprocess, sys

import pytest, torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

from credit_rl.advantages import (anchor_ids, anchor_share, discounted_sum, gae, gigpo, group_normalize, mt_grpo,
                                  mt_grpo_star, reinforce_pp,
                                  rloo, to_tokens, turn_normalize)
from credit_rl.folr import (chi_squared, evidence_golds, first_occurrence, first_turns, folr_rewards, near_miss_share,
                            op_table,
                            tspo_advantages)
from credit_rl.outcome import (at_last_turn, broke_format, discounted_suffix, extract_answer, group_share, index_groups,
                               outcome_rewards,
                               standardize)
from credit_rl.trajectory import Group, Question, Result, Stop, Trajectory, Turn, example_group

settings.register_profile('credit', deadline=None, max_examples=40)
settings.load_profile('credit')
NAN = math.nan
numbers = st.floats(-10, 10, width=32)


@st.composite
def batches(draw, values=numbers, lone=True):
    "x (N, K) float64 with NaN padding, turn_mask, groups with any ids in any order, one of them of two members or more."
    sizes = [draw(st.integers(2, 4))] + draw(st.lists(st.integers(1 if lone else 2, 4), max_size=3))
    labels = draw(st.lists(st.integers(-50, 50), min_size=len(sizes), max_size=len(sizes), unique=True))
    groups = draw(st.permutations([label for label, size in zip(labels, sizes) for _ in range(size)]))
    counts = draw(st.lists(st.integers(1, 4), min_size=len(groups), max_size=len(groups)))
    rows = [draw(st.lists(values, min_size=k, max_size=k)) for k in counts]
    width = max(counts)
    x = torch.tensor([row + [NAN] * (width - len(row)) for row in rows], dtype=torch.float64)
    return x, torch.arange(width) < torch.tensor(counts)[:, None], torch.tensor(groups)


@st.composite
def binary_batches(draw):
    "outcome, first_turn, turn_mask, groups for TSPO."
    _, mask, groups = draw(batches())
    outcome = torch.tensor(draw(st.lists(st.sampled_from([0., 1.]), min_size=len(groups), max_size=len(groups))),
                           dtype=torch.float64)
    first = torch.tensor([draw(st.integers(-1, int(n) - 1)) for n in mask.sum(1)])
    return outcome, first, mask, groups


def cells(groups):
    "Members of each group, as lists of indices."
    return [[i for i, g in enumerate(groups.tolist()) if g == label] for label in dict.fromkeys(groups.tolist())]


def z(values, ddof=0, eps=1e-6, scale=True):
    "Slow reference: compare a list of numbers with itself by the standard library."
    if len(values) < 2 or max(values) == min(values): return [0.0] * len(values)
    mean, std = statistics.fmean(values), (statistics.stdev if ddof else statistics.pstdev)(values)
    return [(v - mean) / (std + eps) if scale else v - mean for v in values]


# ---------------------------------------------------------------- comparing

@given(batches(), st.sampled_from([0, 1]), st.booleans())
def test_group_normalize_is_the_z_score_of_each_group(batch, ddof, scale):
    x, mask, groups = batch
    out, one = group_normalize(x, groups, mask, ddof=ddof, scale=scale), group_normalize(x[:, 0], groups, ddof=ddof,
                                                                                         scale=scale)
    for members in cells(groups):
        where = [(i, k) for i in members for k in range(x.shape[1]) if mask[i, k]]
        expected = z([x[w].item() for w in where], ddof, scale=scale)
        assert_close(torch.stack([out[w] for w in where]), torch.tensor(expected, dtype=x.dtype), atol=1e-7, rtol=1e-6)
        assert_close(one[members], torch.tensor(z(x[members, 0].tolist(), ddof, scale=scale), dtype=x.dtype), atol=1e-7,
                     rtol=1e-6)
    assert not out[~mask].any()


@given(batches(), st.sampled_from(['last', 'none']))
def test_turn_normalize_compares_turn_with_turn(batch, pad):
    x, mask, groups = batch
    out = turn_normalize(x, mask, groups, pad=pad)
    last = mask.sum(1) - 1
    for members in cells(groups):
        for k in range(x.shape[1]):
            there = [i for i in members if pad == 'last' or mask[i, k]]
            expected = z([x[i, min(k, int(last[i]))].item() for i in there])
            for i, e in zip(there, expected): assert math.isclose(out[i, k], e if mask[i, k] else 0.0, rel_tol=1e-6,
                                                                  abs_tol=1e-7)


@given(batches(st.integers(-3, 3).map(float)), st.floats(-5, 5), st.floats(0.1, 10))
def test_shift_and_scale_do_not_matter(batch, shift, scale):
    x, mask, groups = batch
    for rule in (lambda v: group_normalize(v, groups, mask, eps=0), lambda v: turn_normalize(v, mask, groups, eps=0),
                 lambda v: group_normalize(v[:, 0], groups, eps=0)):
        assert_close(rule(scale * x), rule(x), atol=1e-9, rtol=1e-9)
        kept = rule(x) != 0                 # an inexact shift may open a spread of one bit where there was none
        assert_close(rule(x + shift)[kept], rule(x)[kept], atol=1e-9, rtol=1e-9)


@given(batches(), st.randoms(use_true_random=False))
def test_order_and_names_of_groups_do_not_matter(batch, random):
    x, mask, groups = batch
    order = torch.tensor(random.sample(range(len(x)), len(x)))
    renamed = groups * 7 + 1000
    filled = torch.where(mask, x, 0.0)
    for rule in (lambda v, m, g: group_normalize(v, g, m), turn_normalize,
                 lambda v, m, g: turn_normalize(v, m, g, pad='none'),
                 lambda v, m, g: rloo(v[:, 0], g), lambda v, m, g: reinforce_pp(v[:, 0], g),
                 lambda v, m, g: reinforce_pp(v[:, 0]),
                 lambda v, m, g: mt_grpo_star(v, v[:, 0], m, g), lambda v, m, g: discounted_sum(v, m, 0.9)):
        for y in (x, filled):
            assert_close(rule(y[order], mask[order], renamed[order]), rule(y, mask, groups)[order], atol=1e-8, rtol=1e-8)


@given(batches(), st.sampled_from([NAN, 0.0, 1e6]))
def test_padding_is_never_read(batch, garbage):
    x, mask, groups = batch
    wide = torch.cat([torch.where(mask, x, garbage), torch.full((len(x), 2), garbage, dtype=x.dtype)], 1)
    wide_mask = torch.nn.functional.pad(mask, (0, 2))
    for rule in (lambda v, m: group_normalize(v, groups, m), lambda v, m: turn_normalize(v, m, groups),
                 lambda v, m: discounted_sum(v, m, 0.5),
                 lambda v, m: mt_grpo_star(v, outcome, m, groups), lambda v, m: turn_normalize(v, m, groups, pad='none')):
        outcome = x[:, 0]
        assert_close(rule(wide, wide_mask)[:, :x.shape[1]], rule(x, mask), atol=1e-12, rtol=1e-12)
        assert not rule(wide, wide_mask)[:, x.shape[1]:].any()


@given(batches(lone=False))
def test_group_advantages_sum_to_zero(batch):
    x, mask, groups = batch
    joint = group_normalize(x, groups, mask)
    leave_one_out, baseline = rloo(x[:, 0], groups), reinforce_pp(x[:, 0], groups)
    for members in cells(groups):
        for a in (joint[members], leave_one_out[members], baseline[members]): assert abs(a.sum()) < 1e-6


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@given(constant=st.floats(-1000, 1000, width=16), size=st.integers(2, 40))
def test_equal_rewards_give_exactly_zero(dtype, constant, size):
    x, groups = torch.full((size, 3), constant).to(dtype), torch.zeros(size, dtype=torch.long)
    mask = torch.ones(size, 3, dtype=torch.bool)
    for a in (group_normalize(x, groups, mask), group_normalize(x[:, 0], groups), turn_normalize(x, mask, groups),
              rloo(x[:, 0], groups),
              reinforce_pp(x[:, 0]), reinforce_pp(x[:, 0], groups), mt_grpo_star(x, x[:, 0], mask, groups),
              gigpo(x, torch.zeros(size, 3, dtype=torch.long), mask, groups, gamma=0.0, mode='mean_std_norm'),
              group_normalize(x[:, 0], groups, ddof=1), group_normalize(x[:, 0], groups, eps=0.0)):
        assert (a == 0).all() and a.dtype == dtype


def test_no_spread_is_tested_on_the_spread_not_on_the_deviation():
    equal = torch.full((11,), 0.7)
    assert (equal - equal.sum() / 11).any()                          # float32 cannot even average eleven equal numbers
    assert not group_normalize(equal, torch.zeros(11, dtype=torch.long)).any()


@given(batches())
def test_low_precision_uses_float32_statistics(batch):
    x, mask, groups = batch
    for dtype in (torch.bfloat16, torch.float16):
        low = x.to(dtype)
        for rule in (lambda v: group_normalize(v, groups, mask), lambda v: turn_normalize(v, mask, groups),
                     lambda v: discounted_sum(v, mask, 0.9),
                     lambda v: rloo(v[:, 0], groups), lambda v: reinforce_pp(v[:, 0])):
            out = rule(low)
            assert out.dtype == dtype and not out.isnan().any()
            assert_close(out, rule(low.float()).to(dtype), atol=1e-2, rtol=2e-2)


@given(batches(), st.data())
def test_a_missing_trajectory_leaves_the_statistics(batch, data):
    x, mask, groups = batch
    gone = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(x), max_size=len(x))))
    kept = ~gone
    holed = torch.where(gone[:, None], NAN, x)
    if kept.sum() < 2 or groups[kept].unique(return_counts=True)[1].max() < 2: return
    for rule in (lambda v, m, g: group_normalize(v, g, m), turn_normalize, lambda v, m, g: rloo(v[:, 0], g),
                 lambda v, m, g: reinforce_pp(v[:, 0]),
                 lambda v, m, g: reinforce_pp(v[:, 0], g),
                 lambda v, m, g: gigpo(v, torch.zeros_like(m, dtype=torch.long), m, g),
                 lambda v, m, g: mt_grpo_star(v, v[:, 0], m, g)):
        out = rule(holed, mask, groups)
        assert (out[gone] == 0).all()
        assert_close(out[kept], rule(x[kept], mask[kept], groups[kept]), atol=1e-8, rtol=1e-8)
    assert discounted_sum(holed, mask, 0.9)[mask & gone[:, None]].isnan().all()         # missing stays missing


def test_half_measured_trajectories_infinities_and_lone_groups_are_refused():
    pair, both = torch.tensor([0, 0]), torch.ones(2, 2, dtype=torch.bool)
    half = torch.tensor([[1., NAN], [0., 1.]])
    for rule in (lambda: group_normalize(half, pair), lambda: turn_normalize(half, both, pair),
                 lambda: discounted_sum(half, both, 1.0)):
        with pytest.raises(ValueError, match='bridge'): rule()
    with pytest.raises(ValueError, match='infinite'): group_normalize(torch.tensor([1., -math.inf]), pair)
    lone = torch.tensor([0, 1])
    for rule in (lambda: group_normalize(half[1], lone), lambda: turn_normalize(half[1:].expand(2, 2), both, lone),
                 lambda: rloo(half[1], lone),
                 lambda: tspo_advantages(half[1], torch.tensor([-1, -1]), both, lone),
                 lambda: reinforce_pp(half[1], lone),
                 lambda: mt_grpo(half[1], half[1], both, lone), lambda: mt_grpo_star(half, half[1], both, lone),
                 lambda: gigpo(half[1:].expand(2, 2), both.long(), both, lone)):
        with pytest.raises(ValueError, match='one member'): rule()
    assert group_normalize(torch.tensor([1., 0., 5.]), torch.tensor([0, 0,
                                                                     1]))[2] == 0       # a lone member beside others
    with pytest.raises(TypeError, match='index_groups'): group_normalize(half[1], [example_group()])
    with pytest.raises(ValueError, match='hole'): turn_normalize(half, torch.tensor([[False, True], [True, True]]), pair)
    with pytest.raises(ValueError, match='bool'): group_normalize(half, pair, torch.ones(2, 2))


def test_empty_cells_and_invalid_entries_do_not_leak():
    out = standardize(torch.tensor([1., NAN, 3.]), torch.tensor([0, 5, 0]), torch.tensor([True, False, True]), eps=0)
    assert out.tolist() == [-1, 0, 1]


def test_per_turn_comparison_rewards_not_stopping_and_padding_does_not():
    x = torch.tensor([[1., 1., NAN], [0.5, 0.5, 0.5], [0., 0., 0.]])
    mask, groups = ~x.isnan(), torch.zeros(3, dtype=torch.long)
    assert turn_normalize(x, mask, groups, pad='none')[1, 2] > 0.99
    assert abs(turn_normalize(x, mask, groups)[1, 2]) < 1e-6
    assert abs(turn_normalize(x, mask, groups)[0, 2]) == 0


def test_integer_rewards_are_not_truncated():
    x, mask, groups = torch.tensor([[1, 0, 1], [0, 0, 0]]), torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 0])
    for rule in (lambda v: group_normalize(v, groups, mask), lambda v: turn_normalize(v, mask, groups),
                 lambda v: discounted_sum(v, mask, 0.5),
                 lambda v: rloo(v[:, 0], groups), lambda v: reinforce_pp(v[:, 0]),
                 lambda v: reinforce_pp(v[:, 0], groups),
                 lambda v: mt_grpo_star(v, v[:, 0], mask, groups), lambda v: gigpo(v, mask.long(), mask, groups),
                 lambda v: folr_rewards(v[:, 0], groups, mask, 0.5),
                 lambda v: tspo_advantages(v[:, 0], groups, mask, groups, 0.5, 'all'),
                 lambda v: mt_grpo(v[:, 0], v[:, 0], mask & torch.tensor([True, True, False]), groups)):
        assert rule(x).dtype == torch.float32
        assert_close(rule(x), rule(x.float()))


# ---------------------------------------------------------------- outcomes

@pytest.mark.parametrize('text, form, expected', [
    ('<answer> a </answer> <answer>b</answer>', 'answer', 'b'), ('<answer>a</answer><answer>b', 'answer', 'a'),
    ('<answer>a<answer>b</answer>', 'answer', 'b'), ('<answer>two\nlines</answer>', 'answer', 'two\nlines'),
    ('no tags', 'answer', None),
    ('</answer>a<answer>', 'answer', None), ('<answer></answer>', 'answer', ''),
    (r'\boxed{1} \boxed{\frac{1}{2}}', 'boxed', r'\frac{1}{2}'),
    (r'\boxed{1} \boxed{2', 'boxed', '1'), (r'\boxed{\boxed{3}}', 'boxed', '3'), (r'\boxed{\{a\}}', 'boxed', r'\{a\}'),
    ('boxed{1}', 'boxed', None),
    (r'} \boxed{4} {', 'boxed', '4'), (r'{ \boxed{5}', 'boxed', '5'), (r'\boxed {6}', 'boxed', '6'),
    (r'\boxed{\} 7}', 'boxed', r'\} 7')])
def test_extract_answer(text, form, expected):
    assert extract_answer(text, form) == expected


nested = st.recursive(st.text('ab 1\\', max_size=3).map(lambda s: s.replace('\\', '\\\\')),
                      lambda inner: st.lists(inner, max_size=3).map(lambda parts: '{' + ''.join(parts) + '}'),
                      max_leaves=6)


@given(nested, st.text('xy{ ', max_size=5))
def test_balanced_boxes_come_back_whole(content, before):
    assert extract_answer(before + r'\boxed{' + content + '} and so on', 'boxed') == content.strip()


def test_outcomes_and_penalties():
    g = example_group()
    mute = Trajectory(g.question, g.trajectories[0].prompt_ids, g.trajectories[0].turns[:1], Stop.TURN_CAP)
    bad = Turn('tool', [1], [-0.1], [2], 'search(', '', result=Result.MALFORMED)
    clumsy = Trajectory(g.question, [0], [bad, g.trajectories[0].turns[-1]], Stop.ANSWER, 'Budapest')
    group = Group(g.question, [*g.trajectories, mute, clumsy])
    assert outcome_rewards([group]).tolist() == [1, 0, 0, 0, 1]
    assert outcome_rewards([group], 'f1', penalty=-2.0).tolist() == [1, 0, 0, -2, -2] and broke_format(clumsy)
    assert outcome_rewards([group], lambda p, golds: len(p) / 2).tolist() == [4, 3, 2.5, 0, 4]
    mask, groups = index_groups([group, g])
    assert mask.sum(1).tolist() == [4, 4, 4, 1, 2, 4, 4, 4] and groups.tolist() == [0] * 5 + [1] * 3
    with pytest.raises(ValueError, match='metric'): outcome_rewards([group], 'em ')
    with pytest.raises(ValueError, match='penalty'): outcome_rewards([group], 'f1', penalty=1.0)


@given(batches(st.sampled_from([0., 1.])))
def test_group_shares_add_up(batch):
    x, _, groups = batch
    share = group_share(x[:, 0], groups)
    assert math.isclose(share['all_right'] + share['mixed'] + share['all_wrong'], 1, rel_tol=1e-6)
    assert math.isclose(share['collapsed'], 1 - share['mixed'], rel_tol=1e-6, abs_tol=1e-6)
    silent = [not group_normalize(x[:, 0], groups)[m].any() for m in cells(groups)]
    assert math.isclose(share['collapsed'], sum(silent) / len(silent), rel_tol=1e-6, abs_tol=1e-6)


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


# ---------------------------------------------------------------- TSPO

def test_tspo_paper_example():
    outcome, first = torch.tensor([1., 0, 0]), torch.tensor([1, 1, -1])
    mask, groups = torch.ones(3, 4, dtype=torch.bool), torch.zeros(3).long()
    assert folr_rewards(outcome, first, mask).tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]
    a = tspo_advantages(outcome, first, mask, groups, strategy='all')
    assert_close(a[:, 0], torch.tensor([0.707, 0.707, -1.414]), atol=5e-4, rtol=0)
    assert_close(a[:, 2], torch.tensor([1.414, -0.707, -0.707]), atol=5e-4, rtol=0)
    assert round(chi_squared([[10092, 25645], [0, 15976]]), 4) == 5605.5009


@given(binary_batches(), st.sampled_from(['none', 'all', 'all-wrong']), st.sampled_from([0.0, 0.5, 1.0]))
def test_tspo_collapses_to_grpo(batch, strategy, alpha):
    outcome, first, mask, groups = batch
    grpo = torch.where(mask, group_normalize(outcome, groups)[:, None], 0.0)
    assert_close(tspo_advantages(*batch, alpha=0.0, strategy=strategy), grpo)
    assert_close(tspo_advantages(*batch, alpha=alpha, strategy='none'), grpo)
    a = tspo_advantages(*batch, alpha=alpha)
    by_turn = tspo_advantages(*batch, alpha=alpha, strategy='all')
    for members in cells(groups): assert_close(a[members],
                                               by_turn[members] if not outcome[members].any() else grpo[members])
    assert not tspo_advantages(*batch, alpha=alpha, strategy=strategy)[~mask].any()


@given(binary_batches(), st.floats(0, 1))
def test_folr_is_equation_6(batch, alpha):
    outcome, first, mask, groups = batch
    r = folr_rewards(outcome, first, mask, alpha)
    for i in range(len(outcome)):
        for k in range(mask.shape[1]):
            expected = 0 if not mask[i, k] else 1 if outcome[i] else alpha if k <= first[i] else 0
            assert math.isclose(r[i, k], expected, rel_tol=1e-6)


def test_a_rollout_cut_off_at_its_find_pads_with_alpha_an_answered_one_with_zero():
    wrong, pair, found = torch.zeros(2), torch.tensor([0, 0]), torch.tensor([0, 2])
    answered = torch.tensor([[True, True, False], [True, True, True]])
    cut = torch.tensor([[True, False, False], [True, True, True]])
    assert_close(tspo_advantages(wrong, found, answered, pair, alpha=0.5)[1], torch.tensor([0., 1., 1.]), atol=1e-5,
                 rtol=0)
    assert not tspo_advantages(wrong, found, cut, pair, alpha=0.5).any()


@pytest.mark.parametrize('change', [dict(outcome=torch.tensor([0.5, 0.])), dict(outcome=torch.tensor([NAN, 0.])),
                                    dict(outcome=torch.tensor([-1., 1.])),
                                    dict(alpha=-0.1), dict(first_turn=torch.tensor([2, 0])),
                                    dict(first_turn=torch.tensor([-2, 0])),
                                    dict(first_turn=torch.tensor([0., 0.])), dict(strategy='mixed')])
def test_tspo_refuses(change):
    args = dict(outcome=torch.tensor([1., 0.]), first_turn=torch.tensor([0, -1]),
                turn_mask=torch.ones(2, 2, dtype=torch.bool), groups=torch.tensor([0, 0]))
    with pytest.raises(ValueError): tspo_advantages(**{**args, **change})


def test_first_occurrence_traps():
    assert first_occurrence(['Rome was', 'Romeo'], ['rome']) == 0 and first_occurrence(['Romeo'], ['Rome']) is None
    assert first_occurrence(['the', 'a.'], ['The', 'a',
                                            '!']) is None                # golds that normalise to nothing match nothing
    assert first_occurrence(['yes', 'x'], ['Yes', 'No', 'x']) is None
    assert first_occurrence(['yes', 'x'], ['x'], match_short=True) == 1
    assert evidence_golds(['Yes.', '7', 'Seven']) == ['seven']
    g = example_group()
    assert first_turns([g, g]).tolist() == [1, 1, -1] * 2
    yes = Group(Question('q', 'Is it?', ['yes']), [Trajectory(Question('q', 'Is it?', ['yes']), [0],
                                                              g.trajectories[0].turns, 'answer', 'yes')])
    assert first_turns([yes]).tolist() == [-1]
    with pytest.raises(TypeError): first_occurrence(['x'], 'x')
    with pytest.raises(TypeError): first_occurrence('x', ['x'])


def test_op_table():
    outcome, first = torch.tensor([1., 1, 0, 0, 0]), torch.tensor([0, -1, 3, -1, -1])
    table = op_table(outcome, first)
    assert table.tolist() == [[1, 1], [1, 2]] and near_miss_share(table) == 1 / 3
    assert op_table(outcome, first, torch.tensor([True, True, False, True, False])).tolist() == [[1, 0], [1, 1]]
    assert math.isnan(near_miss_share([[3, 0], [1, 0]]))
    with pytest.raises(ValueError): chi_squared([[1, 0], [2, 0]])


# ---------------------------------------------------------------- other advantages

@given(batches(lone=False))
def test_rloo_leaves_itself_out(batch):
    x, _, groups = batch
    a = rloo(x[:, 0], groups)
    for members in cells(groups):
        for i in members:
            others = [x[j, 0].item() for j in members if j != i]
            assert math.isclose(a[i], x[i, 0].item() - statistics.fmean(others), rel_tol=1e-9, abs_tol=1e-9)


@given(batches(lone=False))
def test_reinforce_pp(batch):
    x, _, groups = batch
    r = x[:, 0]
    assert_close(reinforce_pp(r), torch.tensor(z(r.tolist()), dtype=r.dtype), atol=1e-7, rtol=1e-6)
    centered = group_normalize(r, groups, scale=False)
    expected = centered / ((centered ** 2).mean().sqrt() + 1e-6)
    assert_close(reinforce_pp(r, groups), expected)


@given(batches())
def test_mt_grpo_star_without_calls_is_grpo(batch):
    x, mask, groups = batch
    grpo = torch.where(mask, group_normalize(x[:, 0], groups)[:, None], 0.0)
    for norm in ('turn', 'pooled'): assert_close(mt_grpo_star(x, x[:, 0], mask, groups, lambda_mid=0.0, norm=norm), grpo)
    assert_close(mt_grpo_star(x, x[:, 0], mask, groups, tool_mask=torch.zeros_like(mask)), grpo)
    two, two_mask = x[:, :2], mask[:, :2]
    assert_close(mt_grpo(two[:, 0], x[:, 0], two_mask, groups, beta=0.0), grpo[:, :2])


def test_mt_grpo_star_details():
    mask, groups = torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 0])
    tool = torch.tensor([[False, True, False], [True, False,
                                                False]])          # the first rollout's first turn was no call
    rewards, outcome = torch.tensor([[9., 1., 9.], [0., 9., 9.]]), torch.tensor([1., 1.])
    a = mt_grpo_star(rewards, outcome, mask, groups, tool_mask=tool)
    assert_close(a, torch.tensor([[0., 1., 0.], [-1., 0., 0.]]), atol=1e-5, rtol=0)     # first call against first call
    unrated = torch.tensor([[NAN, 1., 0.], [0., 2., 0.]])                       # a judge that failed on one call
    a = mt_grpo_star(unrated, torch.tensor([1., 0.]), mask, groups)
    assert_close(a, torch.tensor([[1., 0., 1.], [-1., 0., -1.]]), atol=1e-5, rtol=0)
    long = mt_grpo_star(rewards, outcome, mask, groups, tool_mask=tool, literal=True,
                        turn_tokens=torch.tensor([[1, 4, 1], [2, 1, 1]]), eps=0)
    assert_close(long, torch.tensor([[0., 1., 0.], [-1., 0., 0.]]))
    late = torch.tensor([[True, False, False], [True, True, True]])             # cut off after one call
    cut_off = mt_grpo_star(torch.tensor([[1., 0, 0], [0., 5, 0]]), outcome, late, groups,
                           tool_mask=late & torch.tensor([True, True, False]))
    assert_close(cut_off, torch.tensor([[1., 0., 0.], [-1., 0., 0.]]), atol=1e-5, rtol=0)   # a lone second call gets 0
    no_call = mt_grpo(torch.tensor([1., NAN, 0.]), torch.tensor([0., 3., 0.]),
                      torch.tensor([[True, True], [True, False], [True, True]]), torch.zeros(3).long())
    final = group_normalize(torch.tensor([0., 3., 0.]), torch.zeros(3).long())
    assert_close(no_call[1, 0], final[1]); assert_close(no_call[0, 0], 0.5 + final[0] / 2, atol=1e-5, rtol=0)


@given(batches(), st.sampled_from([0.0, 0.95, 1.0]), st.sampled_from(['mean_norm', 'mean_std_norm']), st.data())
def test_gigpo_compares_within_anchors(batch, gamma, mode, data):
    x, mask, groups = batch
    anchors = torch.tensor([[data.draw(st.integers(0, 2)) for _ in range(x.shape[1])] for _ in range(len(x))])
    a = gigpo(x, anchors, mask, groups, gamma, 0.7, mode)
    total, to_go = torch.where(mask, x, 0.0).sum(1), discounted_sum(x, mask, gamma)
    scale = mode == 'mean_std_norm'
    for members in cells(groups):
        episode = z(total[members].tolist(), scale=scale)
        for anchor in range(3):
            where = [(i, k) for i in members for k in range(x.shape[1]) if mask[i, k] and anchors[i, k] == anchor]
            for (i, k), step in zip(where, z([to_go[w].item() for w in where], scale=scale)):
                assert math.isclose(a[i, k], episode[members.index(i)] + 0.7 * step, rel_tol=1e-5, abs_tol=1e-5)


def test_anchors_are_exact_contexts():
    q = Question('q', '?', ['a'])
    turn = lambda ids, obs, context=None: Turn('tool', ids, [-1.0] * len(ids), obs, '', '', context_ids=context)
    make = lambda *turns: Trajectory(q, [1, 2], turns, 'answer', 'a')
    same_context_other_split = make(turn([3], [4, 5]), turn([6], []))
    a = anchor_ids([Group(q, [make(turn([3, 4], [5]), turn([7], [])), same_context_other_split, make(turn([3], [4]),
                                                                                                     turn([6], []),
                                                                                                     turn([1], [])),
                              make(turn([9], [9]), turn([8], [], context=[1, 2, 3, 4, 5]))]),
                    Group(q, [make(turn([3, 4], [5]))])])
    assert a[0, 1] == a[1, 1] == a[3, 1] and a[2, 1] != a[0, 1] and len({a[i, 0].item() for i in range(4)}) == 1
    assert a[4, 0] != a[0, 0] and a[0, 2] == -1                            # another question, the same ids; no third turn
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
            assert math.isclose(a[w], later_a, rel_tol=1e-9, abs_tol=1e-9) and math.isclose(returns[w], later_a + later_v,
                                                                                            rel_tol=1e-9, abs_tol=1e-9)
    assert not a[~mask].any() and not returns[~mask].any()


@given(st.integers(0, 10 ** 6))
def test_gae_limits_and_shapes(seed):
    r, v, mask, _ = random_rows(seed)
    rewards_to_go = torch.where(mask, torch.where(mask, r, 0.0).flip(1).cumsum(1).flip(1), 0.0)
    a, returns = gae(r, v, mask, 1.0, 1.0)
    assert_close(returns, rewards_to_go)                                                # telescoping: the critic cancels
    assert_close(a, torch.where(mask, rewards_to_go - v, 0.0))
    wide, pad = torch.cat([r, torch.full_like(r, NAN)], 1), torch.cat([mask, torch.zeros_like(mask)], 1)
    assert_close(gae(wide, wide, pad, 0.9, 0.9)[0][:, :r.shape[1]], gae(r, r, mask, 0.9, 0.9)[0])
    low = gae(r.bfloat16(), v.bfloat16(), mask, 1.0, 0.95)[0]
    assert low.dtype == torch.bfloat16
    assert_close(low, gae(r.bfloat16().float(), v.bfloat16().float(), mask, 1.0, 0.95)[0].bfloat16())


def test_gae_agrees_with_torchrl():
    functional = pytest.importorskip('torchrl.objectives.value.functional')
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


def test_gae_refuses():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match='finite'): gae(x, x * NAN, mask, 1.0, 1.0)
    with pytest.raises(ValueError, match='lam'): gae(x, x, mask, 1.0, 1.1)
    with pytest.raises(ValueError, match='bool'): gae(x, x, mask.float(), 1.0, 1.0)
    with pytest.raises(ValueError, match='row_trajectory'): gae(x, x, mask, 1.0, 1.0, torch.tensor([0]))
    a, returns = gae(x, x, torch.zeros_like(mask), 1.0, 1.0)               # an empty micro-batch
    assert not a.any() and not returns.any()


@given(batches(), st.data())
def test_to_tokens_is_a_lookup(batch, data):
    x, mask, _ = batch
    owner = torch.tensor(data.draw(st.lists(st.integers(0, len(x) - 1), min_size=1, max_size=5)))
    token_turns = torch.tensor([[data.draw(st.integers(-1, int(mask[i].sum()) - 1)) for _ in range(6)] for i in owner])
    out = to_tokens(x, token_turns, owner)
    for r, i in enumerate(owner.tolist()):
        for t in range(6):
            k = token_turns[r, t].item()
            assert out[r, t] == (x[i, k] if k >= 0 else 0)
    assert_close(to_tokens(x[owner], token_turns), out)


def test_to_tokens_keeps_turns_of_value_zero_apart():
    token_turns = torch.tensor([[-1, 0, 0, -1, 1, -1, 2, 2]])
    assert to_tokens(torch.tensor([[1., 0., 2.]]), token_turns).tolist() == [[0, 1, 1, 0, 0, 0, 2, 2]]
    with pytest.raises(ValueError, match=r'\[-1, 2\)'): to_tokens(torch.ones(1, 2), token_turns)
    with pytest.raises(ValueError, match='R = 2'): to_tokens(torch.ones(2, 3), token_turns)
    with pytest.raises(ValueError, match='finite'): to_tokens(torch.tensor([[1., NAN, 0.]]), token_turns)


# ---------------------------------------------------------------- floors

def test_floors_3_and_4_need_nothing_but_torch():
    code = ("import sys\n"
            "class Refuse:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        if name.split('.')[0] in {'transformers', 'datasets', 'pandas', 'matplotlib', 'seaborn', 'scipy', 'sklearn',\n"
            "                                  'nbdev', 'fastcore', 'yaml', 'requests', 'trl', 'accelerate', 'IPython', 'rank_bm25',\n"
            "                                  'bm25s', 'tqdm'}:\n"
            "            raise ImportError('refused: ' + name)\n"
            "sys.meta_path.insert(0, Refuse())\n"
            "import credit_rl.outcome, credit_rl.folr, credit_rl.advantages, credit_rl.losses\n")
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
