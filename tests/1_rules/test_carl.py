"""41_carl: CARL's segment advantages against their definition, and their identities."""
import math

import pytest, torch
from hypothesis import given, strategies as st
from torch.testing import assert_close

from credit_rl.carl import segment_advantages

NAN = math.nan
chances = st.floats(0, 1, width=32)
lams = st.sampled_from([0.0, 0.3, 0.5, 0.95, 1.0])


@st.composite
def rollouts(draw, missing=False):
    "values (N, S) float64 with NaN padding, segment_mask, reward (N,); `missing`: some own values are NaN too."
    counts = draw(st.lists(st.integers(1, 15), min_size=1, max_size=5))
    own = st.one_of(chances, st.just(NAN)) if missing else chances
    rows = [draw(st.lists(own, min_size=k, max_size=k)) for k in counts]
    width = max(counts)
    values = torch.tensor([row + [NAN] * (width - len(row)) for row in rows], dtype=torch.float64)
    outcome = st.sampled_from([0.0, 1.0] + [NAN] * missing)
    reward = torch.tensor(draw(st.lists(outcome, min_size=len(counts), max_size=len(counts))), dtype=torch.float64)
    return values, torch.arange(width) < torch.tensor(counts)[:, None], reward


def slow(values, reward, lam):
    "One rollout, the definition: carry the last known value over a gap, take differences, sum them with powers of λ."
    if math.isnan(values[0]) or math.isnan(reward): return [0.0] * len(values)
    known = []
    for v in values: known.append(known[-1] if math.isnan(v) else v)
    delta = [b - a for a, b in zip(known, [*known[1:], reward])]
    return [sum(lam ** (j - k) * delta[j] for j in range(k, len(delta))) for k in range(len(delta))]


@given(rollouts(missing=True), lams)
def test_the_definition(batch, lam):
    values, mask, reward = batch
    out = segment_advantages(values, mask, reward, lam)
    for i, n in enumerate(mask.sum(1).tolist()):
        expected = torch.tensor(slow(values[i, :n].tolist(), reward[i].item(), lam), dtype=torch.float64)
        assert_close(out[i, :n], expected, atol=1e-9, rtol=1e-9)
        assert not out[i, n:].any()
    assert not out.isnan().any()


@given(dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
       constant=st.floats(-100, 100, width=16), segments=st.integers(1, 15), lam=lams)
def test_a_critic_that_was_right_all_along_gives_exactly_zero(dtype, constant, segments, lam):
    values = torch.full((2, segments), constant).to(dtype)
    out = segment_advantages(values, torch.ones(2, segments, dtype=torch.bool), values[:, 0], lam)
    assert (out == 0).all() and out.dtype == dtype


def test_refusals():
    good = dict(values=torch.full((2, 3), 0.5), segment_mask=torch.ones(2, 3, dtype=torch.bool), reward=torch.zeros(2),
                lam=0.0)
    for right in (torch.tensor([1, 0]), torch.tensor([True, False])):
        assert segment_advantages(**{**good, 'reward': right})[:, 2].tolist() == [.5, -.5]
    for bad, message in ((dict(reward=torch.zeros(3)), r'reward must be \(2,\)'),
                         (dict(reward=torch.zeros(2, 1)), r'reward must be \(2,\)'),
                         (dict(values=torch.full((2, 3), math.inf)), 'finite'),
                         (dict(reward=torch.tensor([math.inf, 0])), 'finite'),
                         (dict(segment_mask=torch.ones(2, 3)), 'bool'),
                         (dict(segment_mask=torch.tensor([[True, False, True]] * 2)), 'hole'),
                         (dict(segment_mask=torch.tensor([[False] * 3] * 2)), 'hole'), (dict(lam=-0.1), 'lam'),
                         (dict(lam=1.1), 'lam')):
        with pytest.raises(ValueError, match=message): segment_advantages(**{**good, **bad})
