"39_significance: intervals cover, tests keep their level over a family, and power is what it says, on simulated data."
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from credit_rl.diagnostics import _gain_interval
from credit_rl.significance import detectable, holm, jackknife, mean_interval, ratio_interval, welch, wilson


def test_students_interval_is_scipys_and_covers():
    rng = np.random.default_rng(0)
    for n in (2, 3, 8):
        d = rng.normal(.01, .03, n)
        assert mean_interval(d)[1:3] == pytest.approx(stats.t.interval(.95, n - 1, d.mean(), stats.sem(d)))
        assert mean_interval(d)[3] == pytest.approx(stats.ttest_1samp(d, 0).pvalue)
        ends = [mean_interval(x)[1:3] for x in rng.normal(.01, .03, (2000, n)).tolist()]
        assert .93 < np.mean([low <= .01 <= high for low, high in ends]) < .97
    assert mean_interval([.1])[0] == .1 and all(map(math.isnan, mean_interval([.1])[1:]))
    assert mean_interval([0., 0., 0.]) == (0, 0, 0, 1)
    assert all(map(math.isnan, mean_interval([.55 - .5, .6 - .55])[1:]))           # equal but for rounding


def test_welch_is_scipys_and_covers_where_variances_differ_tenfold():
    "A pooled variance holds the truth in 67 % of these."
    rng, held, pooled = np.random.default_rng(1), 0, 0
    for _ in range(2000):
        x, y = rng.normal(.3, .1, 6), rng.normal(.2, .01, 20)
        d, low, high, p = welch(x.mean(), stats.sem(x), 5, y.mean(), stats.sem(y), 19)
        held += low <= .1 <= high
        end = stats.ttest_ind(x, y).confidence_interval()
        pooled += end.low <= .1 <= end.high
    assert .93 < held / 2000 < .97 and pooled / 2000 < .75
    assert p == pytest.approx(stats.ttest_ind(x, y, equal_var=False).pvalue)
    assert welch(1, 0, 3, 1, 0, 3) == (0, 0, 0, 1) and math.isnan(welch(1, math.nan, 3, 1, 0, 3)[1])


def test_holm_is_by_hand_and_keeps_its_promise():
    assert holm([.04, math.nan, .01, .02])[::2] == [.04, .03] and math.isnan(holm([.04, math.nan])[1])
    assert holm([]) == [] and holm([.5, .9]) == [1., 1.]
    rng = np.random.default_rng(2)
    wrong = np.mean([min(holm(p)) < .05 for p in rng.random((4000, 10)).tolist()])
    assert .035 < wrong < .06                                                # of families without any difference


def test_the_detectable_difference_is_found_in_four_of_five_studies():
    rng = np.random.default_rng(3)
    for n in (3, 8):
        size = detectable(.03, n)
        p = [mean_interval(d)[3] for d in rng.normal(size, .03, (2000, n)).tolist()]
        assert np.mean(np.array(p) < .05) == pytest.approx(.8, abs=.03)
    assert detectable(.03, 8, .05 / 20) > 1.5 * detectable(.03, 8) and math.isnan(detectable(.03, 1))
    assert detectable(0., 5) == 0.


def test_the_jackknife_of_a_ratio_covers_and_of_a_norm_a_bootstrap_does_not():
    "The length of an expectation, by products of different draws."
    generator, ratio, norm, boot = torch.Generator().manual_seed(4), 0, 0, 0
    b, dims, times = 24, 40, 400
    true = dims * .3 ** 2
    for _ in range(times):
        x = torch.randn(b, dims, generator=generator).double() + .3
        y = 2 + x[:, 0] + torch.randn(b, generator=generator)
        left = lambda v: torch.cat([v.mean()[None], (v.sum() - v) / (b - 1)])
        _, low, high = jackknife((left(y) / (left(x[:, 1]) + 3)).log())
        ratio += low <= math.log(2.3 / 3.3) <= high
        products = x @ x.T
        products.fill_diagonal_(0.)
        rows = products.sum(1)
        values = torch.cat([products.sum()[None] / (b * (b - 1)), (products.sum() - 2 * rows) / ((b - 1) * (b - 2))])
        apart = x - x.mean(0)
        kernel = (apart @ apart.T).fill_diagonal_(0.)
        _, low, high = jackknife(values, 2 * kernel.pow(2).sum() / (b * (b - 1)) ** 2)
        norm += low <= true <= high
        drawn = x[torch.randint(b, (100, b), generator=generator)].mean(1).pow(2).sum(1)
        low, high = drawn.quantile(torch.tensor([.025, .975]).double()).tolist()
        boot += low <= true <= high
    assert .93 < ratio / times < .975 and .93 < norm / times < .975 and boot / times < .5


@pytest.mark.parametrize('n', [25, 200])
def test_wilsons_interval_is_scipys_and_covers(n):
    "In the mean over shares: of one share it goes up and down with n (Brown, Cai and DasGupta 2001)."
    assert wilson(3 / n, n) == pytest.approx(stats.binomtest(3, n).proportion_ci(method='wilson'), abs=1e-4)
    right, held = np.arange(n + 1), []
    ends = np.array([wilson(x / n, n) for x in right])
    for share in np.linspace(.02, .98, 97):
        held.append(stats.binom.pmf(right, n, share) @ ((ends[:, 0] <= share) & (share <= ends[:, 1])))
    assert .945 < np.mean(held) < .96 and min(held) > .83


def test_the_interval_of_a_gain_covers_and_is_wide_where_the_questions_are_the_same():
    "Newcombe's. Of the same questions, whose answers before and after agree, it holds the gain more often."
    rng, apart, paired = np.random.default_rng(5), 0, 0
    for _ in range(2000):
        before, after, luck = *rng.random((2, 60)), rng.random(60)
        for same in (False, True):
            b, a = (np.mean((luck if same else x) < share) for x, share in ((before, .3), (after, .5)))
            low, high = _gain_interval(b, a, 60)
            if same: paired += low <= .2 <= high
            else: apart += low <= .2 <= high
    assert .93 < apart / 2000 < .97 < paired / 2000


def test_a_mean_over_questions_has_an_interval_that_covers():
    "Alike within 24 or 8 questions. As if all were independent, it would hold 56 to 58 %."
    rng = np.random.default_rng(6)
    for questions in (8, 24):
        held = naive = 0
        for _ in range(1500):
            counts = rng.integers(1, 12, questions)
            sums = counts * rng.normal(.3, .2, questions) + rng.normal(0, .1 * counts ** .5)
            mean, low, high = ratio_interval(torch.tensor(sums), torch.tensor(counts))
            held += low <= .3 <= high
            naive += abs(mean - .3) < 1.96 * (.05 / counts.sum()) ** .5
        assert .925 < held / 1500 < .97 and naive / 1500 < .65
    x = torch.tensor([.1, .5, .2])
    assert ratio_interval(x, torch.ones(3)) == pytest.approx(mean_interval(x.tolist())[:3])
    assert all(map(math.isnan, ratio_interval(torch.tensor([1., 0.]), torch.tensor([1., 0.]))[1:]))


def made_beliefs(rng, questions, apart, alike):
    "Beliefs that are higher by `apart` where a gold was shown, and alike within a question."
    count = rng.integers(3, 10, questions)
    question = np.arange(questions).repeat(count)
    shown = rng.random(len(question)) < rng.beta(1, 2, questions)[question]
    return pd.DataFrame({'question': question, 'shown': shown, 'belief': apart * shown + alike * rng.normal(
        size=questions)[question] + rng.normal(size=len(question))})


@pytest.fixture(scope='module')
def page_auc():
    "The AUC of nbs/experiments/47_beliefs.ipynb, of all questions and with each left out."
    page = json.loads((Path(__file__).resolve().parents[2] / 'nbs/experiments/47_beliefs.ipynb').read_text())
    space = {'torch': torch, 'jackknife': jackknife}
    exec(next(text for cell in page['cells'] if (text := ''.join(cell['source'])).startswith('def _auc(')), space)
    return space['_auc']


def test_an_auc_is_scipys_with_any_question_left_out(page_auc):
    rows = made_beliefs(np.random.default_rng(1), 8, 1., .5).round(1)                            # with ties
    for value, part in zip(page_auc(rows).tolist(), (rows, *(rows[rows.question != q] for q in range(8)))):
        shown, unshown = part.belief[part.shown], part.belief[~part.shown]
        assert value == pytest.approx(stats.mannwhitneyu(shown, unshown).statistic / len(shown) / len(unshown))


@pytest.mark.long
def test_the_interval_of_an_auc_covers(page_auc):
    "The truth is that of very many questions. A percentile bootstrap over questions holds it in 84 to 94 %."
    rng, made = np.random.default_rng(0), (2.2, .5)
    true, held = np.mean([page_auc(made_beliefs(rng, 1000, *made))[0].item() for _ in range(10)]), 0
    for _ in range(300):
        _, low, high = jackknife(page_auc(made_beliefs(rng, 25, *made)), ends=(0, 1))
        held += low <= true <= high
    assert .905 < held / 300 < .995                             # 93 to 97 %, give or take two errors of what 300 show
