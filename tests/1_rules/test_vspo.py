"""42_vspo: value-based sampling; frequencies of the draw against its probabilities, weights against literal copies."""
import math, statistics

import pytest, torch
from hypothesis import given, strategies as st
from torch.testing import assert_close

from credit_rl.groups import group_normalize
from credit_rl.layout import loss_weights
from credit_rl.vspo import (choose_groups, informative, sampling_probabilities, task_values, value_smoothing,
                            vspo_weights)

NAN = math.nan
reward = st.one_of(st.sampled_from([0.0, 1.0]), st.integers(-16, 32).map(lambda i: i / 16))   # exact in every type


def seeded(seed=0): return torch.Generator().manual_seed(seed)


@st.composite
def tables(draw, missing=False):
    "Rewards (B, G) float64, groups without spread among them; with `missing`, some are NaN."
    width = draw(st.integers(2, 5))
    row = st.one_of(st.lists(reward, min_size=width, max_size=width), reward.map(lambda x: [x] * width))
    x = torch.tensor(draw(st.lists(row, min_size=1, max_size=6)), dtype=torch.float64)
    if missing:
        gone = draw(st.lists(st.sampled_from([False, False, True]), min_size=x.numel(), max_size=x.numel()))
        x = torch.where(torch.tensor(gone).view(x.shape), NAN, x)
    return x


def own(row): return [v for v in row.tolist() if not math.isnan(v)]


@given(tables(missing=True))
def test_values_and_kept_groups_are_the_definition(x):
    values, keep = task_values(x), informative(x)
    best = max((v for row in x for v in own(row)), default=NAN)
    for value, kept, row in zip(values, keep, x):
        rewards = own(row)
        if not rewards:
            assert value.isnan() and not kept
            continue
        variance = statistics.pvariance(rewards)
        assert kept == (variance >= 1e-6)
        assert math.isclose(value, (best - statistics.fmean(rewards)) * variance, abs_tol=1e-12)
        if len(set(rewards)) == 1: assert value == 0


@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.long]), tables(missing=True))
def test_low_precision_uses_float32_statistics(dtype, x):
    if dtype is torch.long: x = x.nan_to_num(2.).round()                                   # whole rewards, as they may come
    low = x.to(dtype)                                                                      # rewards are exact in it
    assert task_values(low).dtype == torch.float32
    assert_close(task_values(low), task_values(x.float()), equal_nan=True)
    assert_close(vspo_weights(low, generator=seeded()), vspo_weights(x.float(), generator=seeded()))


def test_silence_is_tested_on_the_spread_too():
    x = torch.full((1, 11), 50000.7)
    assert ((x - x.sum(1, keepdim=True) / 11) ** 2).mean() > 1e-6  # the rounded mean alone gives more variance than ε
    assert not informative(x).any()
    tiny = torch.tensor([[0.0, 1.9e-3], [0.0, 2.1e-3]], dtype=torch.float64)   # variance d²/4 around 1e-6
    assert informative(tiny).tolist() == [False, True] and informative(tiny, eps=0.0).all()


@given(tables(missing=True), st.sampled_from(['value', 'random', 'none']), st.booleans(), st.integers(0, 1000))
def test_places_are_kept_and_filled(x, sampling, clip, seed):
    weights, counts = vspo_weights(x, generator=seeded(seed), sampling=sampling, clip=clip)
    keep = informative(x)
    assert counts.sum() == len(x) and not counts.is_floating_point() and weights.dtype == torch.float64
    if sampling == 'none' or keep.all() or not keep.any():
        assert counts.tolist() == weights.tolist() == [1] * len(x)
    else:
        assert ((counts > 0) == keep).all() and (weights[~keep] == 0).all()
        assert_close(weights, value_smoothing(counts.double(), 2) if clip else counts.double())
    again = vspo_weights(x, generator=seeded(seed), sampling=sampling, clip=clip)
    assert_close(again, (weights, counts))


KEPT = torch.tensor([[1.0, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])


@pytest.mark.parametrize('sampling, temperature', [('value', 0.1), ('random', 0.1)])
def test_the_draw_follows_its_probabilities(sampling, temperature):
    """n independent draws: by Hoeffding and a union bound over m groups and two sides, some frequency is off by more
    than sqrt(ln(2m/δ) / 2n) with probability at most δ, here 1e-6. Draws that it must not be mistaken for are further
    away."""
    n, rivals = 20_000, {}
    x = torch.cat([KEPT, torch.zeros(n, 5)])
    _, counts = vspo_weights(x, temperature=temperature, generator=seeded(1), sampling=sampling)
    frequency = (counts[:3] - 1).double() / n
    assert counts[:3].sum() == n + 3 and not counts[3:].any()
    values = task_values(x)[:3].double()
    for t in (0.1, 0.02, 1.0, math.inf): rivals[t] = sampling_probabilities(values, t)
    truth = rivals.pop(temperature if sampling == 'value' else math.inf)
    bound = math.sqrt(math.log(2 * 3 / 1e-6) / (2 * n))
    assert (frequency - truth).abs().max() < bound
    for other in rivals.values():
        if (other - truth).abs().max() > 2 * bound: assert (frequency - other).abs().max() > bound
    assert sum((other - truth).abs().max() > 2 * bound for other in rivals.values()) >= 2


def test_draws_of_seeds_differ_and_do_not_touch_the_global_generator():
    x = torch.cat([KEPT, torch.zeros(20, 5)])
    torch.manual_seed(5)
    before = torch.get_rng_state()
    draws = {tuple(vspo_weights(x, generator=seeded(s))[1].tolist()) for s in range(5)}
    assert len(draws) == 5 and (torch.get_rng_state() == before).all()
    vspo_weights(x)
    assert (torch.get_rng_state() != before).any()


@given(tables(), st.integers(0, 100), st.booleans(), st.randoms(use_true_random=False))
def test_weights_are_literal_copies(x, seed, spread_groups, random):
    """One row with N times its advantage, averaged over the places of the batch, is N copies of it: in the clipped
    term, whatever the ratio."""
    b, g = x.shape
    flat, labels = x.flatten(), torch.arange(b).repeat_interleave(g) * 3 - 5
    order = torch.tensor(random.sample(range(b * g), b * g)) if spread_groups else torch.arange(b * g)
    flat, labels = flat[order], labels[order]
    generator = seeded(seed)
    advantages, ratio = group_normalize(flat, labels), torch.randn(b * g, 6, generator=generator).double().exp()
    term = lambda a, rho: torch.minimum(rho * a[:, None], rho.clamp(.8, 1.2) * a[:, None])
    turns = torch.where(torch.arange(6) < torch.randint(1, 7, (b * g, 1), generator=generator), 0, -1)
    mean = lambda rows, **kw: loss_weights(turns[rows], torch.arange(len(rows)), 'sequence-mean-token-mean', **kw)
    loss = lambda rows, omega, **kw: (term(omega * advantages[rows], ratio[rows]) * mean(rows, **kw)).sum()

    kept, w = choose_groups(flat, labels, generator=seeded(seed), clip=False)
    position = labels.unique(return_inverse=True)[1]
    rows = torch.isin(position, torch.tensor(kept)).nonzero()[:, 0]
    table = torch.stack([flat[position == i] for i in range(b)])
    counts = vspo_weights(table, generator=seeded(seed), clip=False)[1]
    copies = torch.cat([(position == i).nonzero()[:, 0].repeat(int(n)) for i, n in enumerate(counts)])
    assert len(copies) == b * g and kept == (counts > 0).nonzero()[:, 0].tolist() and len(w) == len(rows)
    assert_close(loss(rows, w.double(), denominator=b * g), loss(copies, 1.), atol=1e-6, rtol=1e-5)


def test_ragged_groups_and_missing_members():
    x = torch.tensor([1.0, NAN, 0, 1, 1, NAN, 0.5, 0])
    labels = torch.tensor([7, 7, 7, 2, 2, 9, 4, 4])  # 2: silent; 4: varies; 7: varies with a missing member; 9: missing
    kept, w = choose_groups(x, labels, generator=seeded(0), clip=False)
    assert kept == [1, 2] and w.shape == (5,)
    seven, four = w[:3], w[3:]
    assert seven[1] == 0 and seven[0] == seven[2] and four[0] == four[1]
    assert_close(seven[0] + four[0], torch.tensor(4.))                                                 # four places
    silent = choose_groups(torch.tensor([1.0, 1, NAN, 0, 0]), torch.tensor([0, 0, 0, 1, 1]))
    assert silent[0] == [0, 1] and silent[1].tolist() == [1, 1, 0, 1, 1]


def test_refusals():
    good = dict(rewards=torch.tensor([[1.0, 0], [1, 1]]), temperature=0.1, alpha=2, eps=1e-6, sampling='value')
    vspo_weights(**good)
    for bad, message in ((dict(rewards=torch.ones(3)), r'\(B, G\)'), (dict(rewards=torch.ones(3, 1)), 'G >= 2'),
                         (dict(rewards=torch.tensor([[1.0, math.inf]])), 'infinite'), (dict(temperature=0.0), 'temperature'),
                         (dict(temperature=NAN), 'temperature'), (dict(alpha=0.9), 'alpha'), (dict(alpha=NAN), 'alpha'),
                         (dict(alpha=math.inf), 'clip=False'), (dict(sampling='uniform'), 'sampling')):
        with pytest.raises(ValueError, match=message): vspo_weights(**{**good, **bad})
    with pytest.raises(ValueError, match='unknown'): sampling_probabilities(torch.tensor([1.0, NAN]), 0.1)
    for keep in (torch.ones(3, dtype=torch.bool), torch.ones(2)):
        with pytest.raises(ValueError, match='keep'): sampling_probabilities(torch.ones(2), 0.1, keep)
    for count in (-1, 1.5, torch.tensor([1, -2])):
        with pytest.raises(ValueError, match='stands'): value_smoothing(count, 2)
    with pytest.raises(ValueError, match='member'): choose_groups(torch.ones(2), torch.tensor([0, 1]))
    with pytest.raises(TypeError, match='integer'): choose_groups(torch.ones(2), [0, 0])
