"""32_tspo: TSPO against its paper's example and equations, when it is GRPO, near misses, and chi-squared against
scipy. No library that can be installed holds TSPO: it is compared with its definition, written out slowly."""
import math

import pytest, torch
from hypothesis import given, strategies as st
from torch.testing import assert_close

from credit_rl.advantages import group_normalize, turn_normalize
from credit_rl.tspo import (check_binary, chi_squared, first_occurrence, first_turns, folr_rewards, group_misses,
                            near_miss_share, near_miss_statistics, op_table, selective_advantages, tspo_advantages)
from credit_rl.trajectory import Group, Question, Trajectory, Turn
from credit_batches import NAN, binary_batches, cells


@given(binary_batches(), st.sampled_from(['none', 'all', 'all-wrong']), st.sampled_from([0.0, 0.5, 1.0]))
def test_tspo_collapses_to_grpo(batch, strategy, alpha):
    outcome, first, mask, groups = batch
    flat = lambda **kw: torch.where(mask, group_normalize(outcome, groups, **kw)[:, None], 0.0)
    for kw in (dict(ddof=1), dict(eps=0.5)):
        assert_close(tspo_advantages(*batch, strategy='none', **kw), flat(**kw))
        assert_close(tspo_advantages(*batch, strategy='all', **kw),
                     turn_normalize(folr_rewards(outcome, first, mask), mask, groups, **kw))
    assert_close(tspo_advantages(*batch, alpha=0.0, strategy=strategy), flat())
    assert_close(tspo_advantages(*batch, alpha=alpha, strategy='none'), flat())
    a, by_turn = (tspo_advantages(*batch, alpha=alpha, strategy=s) for s in ('all-wrong', 'all'))
    for m in cells(groups): assert_close(a[m], flat()[m] if outcome[m].any() else by_turn[m])
    assert not tspo_advantages(*batch, alpha=alpha, strategy=strategy)[~mask].any()


@given(binary_batches(), st.floats(0, 1))
def test_tspo_is_equation_6(batch, alpha):
    outcome, first, mask, groups = batch
    r = folr_rewards(outcome, first, mask, alpha)
    for i in range(len(outcome)):
        for k in range(mask.shape[1]):
            expected = 0 if not mask[i, k] else 1 if outcome[i] else alpha if k <= first[i] else 0
            assert math.isclose(r[i, k], expected, rel_tol=1e-6)


def test_tspo_refuses():
    args = dict(outcome=torch.tensor([1., 0.]), first_turn=torch.tensor([0, -1]),
                turn_mask=torch.ones(2, 2, dtype=torch.bool), groups=torch.tensor([0, 0]))
    for bad in (dict(outcome=torch.tensor([0.5, 0.])), dict(outcome=torch.tensor([NAN, 0.])), dict(strategy='mixed'),
                dict(outcome=torch.tensor([-1., 1.])), dict(alpha=-0.1), dict(first_turn=torch.tensor([2, 0])),
                dict(first_turn=torch.tensor([-2, 0])), dict(first_turn=torch.tensor([0., 0.])),
                dict(first_turn=torch.tensor([True, False]))):
        with pytest.raises(ValueError): tspo_advantages(**{**args, **bad})
    mask, group, seen = torch.ones(3, 2, dtype=torch.bool), torch.zeros(3, dtype=torch.long), torch.tensor([[NAN, NAN], [1, 0], [0, 0]])
    missing = selective_advantages(seen, torch.tensor([NAN, 0., 0.]), torch.tensor([NAN, 0., 0.]), mask, group)
    torch.testing.assert_close(missing, torch.tensor([[0., 0], [1, 0], [-1, 0]]), atol=1e-5, rtol=0)     # an all-wrong group still
    with pytest.raises(ValueError): selective_advantages(seen, torch.zeros(3, 2), torch.zeros(3), mask, group)
    for table in ([[1, 0], [2, 0]], [[0, 0], [1, 2]], [[0, 0], [0, 0]], [1, 2], [[1, -1], [2, 3]]):
        with pytest.raises(ValueError): chi_squared(table)


def test_golds_without_evidence_are_looked_for_where_that_is_asked():
    yes = Question('q', 'Is it?', ['yes'])
    said = Group(yes, [Trajectory(yes, [0], [Turn('tool', [1], [-1.0], [2], '', 'Yes, it is.')], 'answer', 'yes')])
    assert first_turns([said]).tolist() == [-1] and first_turns([said], match_short=True).tolist() == [0]
    with pytest.raises(TypeError): first_occurrence(['x'], 'x')
    with pytest.raises(TypeError): first_occurrence('x', ['x'])


@given(binary_batches(), st.data())
def test_near_miss_statistics(batch, data):
    outcome, first, mask, groups = batch
    labels = sorted(set(groups.tolist()))
    scored = torch.tensor([data.draw(st.booleans()) for _ in labels])[groups.unique(return_inverse=True)[1]]
    counts, table = group_misses(outcome, first, groups, scored), op_table(outcome, first, scored)
    for row, label in zip(counts.tolist(), labels):
        own = [i for i, g in enumerate(groups.tolist()) if g == label and scored[i]]
        assert row == [sum(bool(outcome[i]) for i in own), sum(not outcome[i] and first[i] >= 0 for i in own),
                       sum(not outcome[i] and first[i] < 0 for i in own)]
    assert counts.sum(0).tolist() == [table[0, 0] + table[1, 0], table[0, 1], table[1, 1]]
    a = tspo_advantages(outcome, first, mask, groups)
    kept = [(groups == label, row) for label, row in zip(labels, counts.tolist()) if sum(row)]
    failed, some_wrong = [(m, row) for m, row in kept if not row[0]], [r for _, r in kept if r[1] + r[2]]
    share = lambda hits, among: sum(hits) / len(among) if among else NAN
    expected = dict(near_miss=near_miss_share(table), all_wrong=share([1 for _ in failed], kept),
                    near_miss_by_group=share([r[1] / (r[1] + r[2]) for r in some_wrong], some_wrong),
                    near_miss_groups=share([r[1] > 0 for _, r in failed], failed),
                    revived=share([bool(a[m].any()) for m, _ in failed], failed))
    found = near_miss_statistics(outcome, first, mask, groups, scored)
    assert found == pytest.approx(expected, nan_ok=True, rel=1e-6)
    assert not found['revived'] > found['near_miss_groups']  # without a find nothing is revived


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4))
def test_chi_squared_agrees_with_scipy(counts):
    from scipy.stats import chi2_contingency
    table = torch.tensor(counts).view(2, 2)
    if not (table.sum(0).all() and table.sum(1).all()):
        with pytest.raises(ValueError, match='counts'): chi_squared(table)
        return
    expected = chi2_contingency(table.numpy(), correction=False)
    assert math.isclose(chi_squared(table), expected.statistic, rel_tol=1e-9, abs_tol=1e-9)
    # as 32_tspo has it
    assert math.isclose(math.erfc(math.sqrt(chi_squared(table) / 2)), expected.pvalue, rel_tol=1e-6, abs_tol=1e-12)


def test_op_table():
    outcome, first = torch.tensor([1., 1, 0, 0, 0]), torch.tensor([0, -1, 3, -1, -1])
    assert math.isnan(near_miss_share([[3, 0], [1, 0]]))
    for low in (outcome.long(), outcome.bool(), outcome.bfloat16()): assert check_binary(low).dtype == torch.float32
    for bad in (dict(scored=torch.tensor([0, 1, 1, 0, 1])), dict(scored=torch.tensor([True])),
                dict(first_turn=first[:2]), dict(outcome=outcome / 2), dict(first_turn=first.float())):
        for rule in (op_table, lambda **kw: group_misses(groups=torch.zeros(5).long(), **kw)):
            with pytest.raises(ValueError): rule(**{**dict(outcome=outcome, first_turn=first), **bad})
