"""Batches of rewards for the properties of credit rules, and what is compared with them, written out slowly."""
import math
import statistics

import torch
from hypothesis import strategies as st

NAN = math.nan
numbers = st.floats(-10, 10, width=32)


@st.composite
def batches(draw, values=numbers, lone=True):
    "x (N, K) float64 with NaN padding, turn_mask, groups with any ids in any order, one of two members or more."
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
