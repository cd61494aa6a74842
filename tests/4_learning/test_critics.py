"""51_critics: measures against scikit-learn, heads and positions against a backbone that is called token by token."""
import math

import pytest, torch
from hypothesis import given, strategies as st
from torch.testing import assert_close

from credit_rl.critics import (CompetenceHead, LinearHead, at_states, auc, brier, expected_calibration_error,
                               explained_variance, reliability, scale_gradient, segment_starts,
                               token_values)
from credit_rl.layout import pack
from credit_rl.parts import first_tokens
from credit_rl.trajectory import Group, Question, Trajectory, Turn

NAN = math.nan
chances = st.one_of(st.floats(0, 1), st.integers(0, 10).map(lambda i: i / 10), st.sampled_from([0.0, 1.0]))


@st.composite
def pairs(draw, x=chances, least=1):
    "Predictions with many ties and outcomes 0 or 1."
    n = draw(st.integers(least, 40))
    return draw(st.lists(x, min_size=n, max_size=n)), draw(st.lists(st.sampled_from([0, 1]), min_size=n, max_size=n))


@given(pairs(st.one_of(chances, st.floats(-50, 50))))
def test_auc_is_scikit_learns_and_the_share_of_pairs_won(pair):
    metrics = pytest.importorskip('sklearn.metrics')
    scores, labels = pair
    if len(set(labels)) < 2:
        assert math.isnan(auc(scores, labels))
        return
    assert math.isclose(auc(scores, labels), metrics.roc_auc_score(labels, scores), abs_tol=1e-12)
    wins = [(a > b) + (a == b) / 2 for a, i in zip(scores, labels) if i for b, j in zip(scores, labels) if not j]
    assert math.isclose(auc(scores, labels), sum(wins) / len(wins), abs_tol=1e-12)
    assert math.isclose(auc([-s for s in scores], labels), 1 - auc(scores, labels), abs_tol=1e-12)
    assert math.isclose(auc(scores, [1 - i for i in labels]), 1 - auc(scores, labels), abs_tol=1e-12)


@given(pairs())
def test_brier_and_explained_variance_are_scikit_learns(pair):
    metrics = pytest.importorskip('sklearn.metrics')
    p, y = pair
    assert math.isclose(brier(p, y), metrics.brier_score_loss(y, p, pos_label=1), abs_tol=1e-12)
    if len(set(y)) < 2: assert math.isnan(explained_variance(p, y))
    else: assert math.isclose(explained_variance(p, y), metrics.explained_variance_score(y, p), abs_tol=1e-9)


@given(st.integers(0, 10 ** 6), st.integers(1, 60), st.integers(1, 12))
def test_reliability_is_scikit_learns_curve(seed, n, bins):
    calibration = pytest.importorskip('sklearn.calibration')
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(n, generator=g, dtype=torch.float64)
    y = (torch.rand(n, generator=g) < 0.5).double()
    predicted, observed, count = reliability(p, y, bins)
    true, mean = calibration.calibration_curve(y.numpy(), p.numpy(), n_bins=bins)
    some = count > 0
    assert_close(observed[some], torch.tensor(true)); assert_close(predicted[some], torch.tensor(mean))
    assert count.sum() == n and observed[~some].isnan().all()
    weighted = sum(c * abs(a - b) for c, a, b in zip(count[some].tolist(), true, mean)) / n
    assert math.isclose(expected_calibration_error(p, y, bins), weighted, abs_tol=1e-9)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_bins_have_their_upper_edge_in_either_precision(dtype):
    edges = torch.arange(11, dtype=torch.float64).div(10).to(dtype)
    assert reliability(edges, torch.zeros(11))[2].tolist() == [2] + [1] * 9  # 0 and 0.1, then one edge each
    assert reliability([i / 10 for i in range(11)], [0] * 11)[2].tolist() == [2] + [1] * 9
    above = torch.nextafter(edges[1:10], torch.ones(9, dtype=dtype))
    assert reliability(above, torch.zeros(9))[2].tolist() == [0] + [1] * 9


def test_equal_returns_are_undefined_however_they_are_rounded():
    assert math.isnan(explained_variance(torch.rand(11), torch.full((11,), 0.7)))
    assert all(math.isnan(measure([], [])) for measure in (explained_variance, expected_calibration_error))


def test_chances_outside_the_unit_interval_are_refused():
    for measure in (expected_calibration_error, brier, reliability):
        for p, y in (([-0.1], [0]), ([1.1], [0]), ([0.5], [2]), ([0.5], [-1]), ([math.inf], [1])):
            with pytest.raises(ValueError, match=r'\[0, 1\]'): measure(p, y)


def test_other_refusals():
    for measure in (auc, brier, expected_calibration_error, explained_variance):
        with pytest.raises(ValueError, match='NaN'): measure([0.5, NAN], [0, 1])
        with pytest.raises(ValueError, match='pairs'): measure([0.5, 0.2], [0])
    with pytest.raises(ValueError, match='0 or 1'): auc([0.5, 0.2], [0.5, 1])
    with pytest.raises(ValueError, match='bin'): reliability([0.5], [1], 0)
    for factor in (-0.1, NAN):
        with pytest.raises(ValueError, match='factor'): scale_gradient(torch.ones(1), factor)


def test_heads_stay_in_range_and_are_their_formula():
    hidden, competence = 100 * torch.randn(4, 7, 16, generator=torch.Generator().manual_seed(0)), CompetenceHead(16)
    for p in competence.parameters(): torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(1))
    out = competence(hidden)
    assert ((out >= 0) & (out <= 1)).all() and out.std() > 0.1
    inner = torch.nn.functional.gelu(hidden @ competence.hidden.weight.T + competence.hidden.bias)
    by_hand = torch.sigmoid(inner @ competence.out.weight[0] + competence.out.bias)
    assert_close(out, by_hand, atol=1e-5, rtol=1e-5)
    torch.manual_seed(0)
    assert 0.01 < LinearHead(1000, std=0.02).out.weight.std() < 0.03


@pytest.mark.parametrize('make', [LinearHead, CompetenceHead])
def test_values_are_float32_on_a_low_precision_backbone_and_in_low_precision_heads(make):
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    for head in (make(8), make(8).bfloat16()):
        torch.nn.init.normal_(head.out.weight, generator=torch.Generator().manual_seed(2))
        assert head(hidden).dtype == torch.float32
        head(hidden).sum().backward()
        assert head.out.weight.grad is not None


@st.composite
def layouts(draw):
    "A packed group of rollouts of 1 to 4 turns, some turns in contexts of their own (rows)."
    number = st.integers(1, 3)
    ids = lambda n: list(range(1, n + 1))
    def turn(first):
        n = draw(number)
        edited = ids(draw(number)) if not first and draw(st.booleans()) else None
        return Turn('tool', ids(n), [-0.5] * n, ids(draw(st.integers(0, 2))), '', '', context_ids=edited)
    question = Question('q', 'q', ['a'])
    turns = lambda: [turn(k == 0) for k in range(draw(st.integers(1, 4)))]
    members = range(draw(st.integers(1, 3)))
    return pack([Group(question, [Trajectory(question, ids(draw(number)), turns(), 'turn_cap') for _ in members])])


def running_sum(ids):
    "A causal backbone with two coordinates: the sum of all ids so far, and 1."
    return torch.stack([ids.cumsum(1).double(), torch.ones_like(ids).double()], -1)


@given(layouts())
def test_values_are_read_at_the_last_context_token(layout):
    hidden = running_sum(layout.ids)
    head = lambda h: 2 * h[..., 0] + h[..., 1]
    all_values = token_values(hidden, layout.trained, head)
    for r in range(len(layout.ids)):
        for t in range(layout.ids.shape[1]):  # call the backbone on the context alone
            alone = head(running_sum(layout.ids[r:r + 1, :t])[0, -1]) if layout.trained[r, t] else 0
            assert all_values[r, t] == alone
    firsts = first_tokens(layout.token_turns)
    states = segment_starts(layout.token_turns, layout.row_trajectory, layout.turn_mask)
    table = at_states(all_values, states)
    assert firsts.sum() == layout.turn_mask.sum() and (table.isnan() == ~layout.turn_mask).all()
    assert_close(at_states(token_values(hidden, firsts, head), states), table, equal_nan=True)
    for i, k in layout.turn_mask.nonzero().tolist():
        row, position = states[i, k].tolist()
        assert table[i, k] == head(hidden[row, position])
        assert layout.row_trajectory[row] == i and layout.token_turns[row, position + 1] == k
        assert layout.token_turns[row, position] != k


def test_gradients_reach_head_and_backbone():
    hidden = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    turns = torch.tensor([[-1, 0, 0, -1], [-1, -1, 0, 0]])
    head = CompetenceHead(8)
    torch.nn.init.ones_(head.out.weight)
    token_values(hidden, first_tokens(turns), head).sum().backward()
    reached = hidden.grad.abs().sum(-1) > 0
    assert reached.tolist() == [[True, False, False, False], [False, True, False, False]]
    hidden.grad = None
    token_values(scale_gradient(hidden, 0.0), turns >= 0, head).sum().backward()
    assert hidden.grad is None and head.out.weight.grad is not None


def test_no_state_at_all():
    head, none = LinearHead(8), torch.full((2, 3, 2), -1)
    assert at_states(torch.randn(1, 4), none).isnan().all()
    assert not token_values(torch.randn(2, 4, 8), torch.zeros(2, 4, dtype=torch.bool), head).any()


def test_refusals_of_positions():
    turns, owner = torch.tensor([[-1, 0, 0, -1], [-1, -1, 1, 1]]), torch.tensor([0, 0])
    mask = torch.ones(1, 2, dtype=torch.bool)
    segment_starts(turns, owner, mask)
    split, bare = torch.tensor([[-1, 0, -1, 0], [-1, -1, 1, 1]]), torch.tensor([[0, 0, 0, -1], [-1, -1, 1, 1]])
    for bad in ((split, owner, mask), (bare, owner, mask),
                (turns, owner, torch.ones(1, 3, dtype=torch.bool)), (turns, owner, mask[:, :1]),
                (turns, torch.tensor([0, 1]), mask), (turns, torch.tensor([0, 1]), mask.expand(2, 2))):
        with pytest.raises(ValueError, match='turn_mask'): segment_starts(*bad)
    hidden, first = torch.zeros(2, 4, 3), lambda h: h[..., 0]
    with pytest.raises(ValueError, match='prompt'): token_values(hidden, bare >= 0, first)
    with pytest.raises(ValueError, match='bool'): token_values(hidden, turns, first)
    with pytest.raises(ValueError, match='bool'): token_values(hidden, (turns >= 0)[:1], first)
    for states in ([[[2, 0]]], [[[0, 4]]], [[[0, 3]]]):                       # the last token has none after it
        with pytest.raises(ValueError, match='rows'): at_states(torch.zeros(2, 4), torch.tensor(states))
