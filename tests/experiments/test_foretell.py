"48_foretell: what decides about a score that was frozen, against SciPy and by hand."
import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import kendalltau, spearmanr

from credit_rl.studies.foretell import RIVALS, came, decide, resample, spearman, survey_tree, with_rivals


def table(worlds=8, rules=4, noise=.3, seed=0):
    "Predictions of rivals that say nothing, and what came: the score, but for noise."
    rng = np.random.default_rng(seed)
    rows = pd.DataFrame([{'world': f'w{w}', 'rule': f'r{r}', 'score': math.exp(rng.normal())} for w in range(worlds)
                         for r in range(rules)])
    for name in RIVALS: rows[name] = rng.normal(size=len(rows))
    steps = np.exp(np.log(rows.score) + noise * rng.normal(size=len(rows)))
    return rows, rows[['world', 'rule']].assign(steps=steps, turns=1 / steps, reached=1., first_reached=1.)


def test_spearman_is_scipys_with_ties():
    rng = np.random.default_rng(0)
    x, y = rng.integers(5, size=40).astype(float), rng.normal(size=40)
    assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic)
    assert math.isnan(spearman(np.ones(4), np.arange(4.)))


def test_the_primary_test_is_of_ranks_over_all_rows():
    rows, learned = table()
    found = decide(rows, learned, times=200)
    assert found['table'].rho['score'] == pytest.approx(spearmanr(rows.score, learned.steps).statistic)
    assert found['best'] == max(RIVALS, key=lambda name: spearmanr(rows[name], learned.steps).statistic)
    assert found['passed'] and found['rows'] == 32 and 'Spearman, Adam' not in found['secondary'].index
    taus = [kendalltau(rows.score[at], learned.steps[at]).statistic for at in rows.groupby('world').groups.values()]
    second = found['secondary'].value
    assert second['Kendall within worlds'] == pytest.approx(np.mean(taus))
    assert second['Spearman, turns'] == pytest.approx(-found['table'].rho['score'])     # turns were made the inverse


def test_a_rival_as_good_as_the_score_fails_it():
    rows, learned = table()
    found = decide(rows.assign(signal=rows.score), learned, times=200)
    assert found['best'] == 'signal' and found['table'].less_low['signal'] == 0 and not found['passed']


def test_who_never_gets_there_is_last_and_unknown_rows_are_left_out_and_counted():
    rows, learned = table()
    learned.loc[0, ['steps', 'reached']] = math.nan, 0.
    learned.loc[learned.world == 'w3', ['steps', 'first_reached']] = math.nan, 0.
    rows.loc[5, 'score'] = math.nan
    found = decide(rows, learned, times=20)
    assert found['left_out'] == 5 and found['rows'] == 27
    known = rows.score.notna() & (learned.world != 'w3')
    logs = np.log(learned.steps).where(learned.index != 0, -1e9)[known]
    assert found['table'].rho['score'] == pytest.approx(spearmanr(rows.score[known], logs).statistic)
    assert came(learned)[0] == -math.inf


def test_worlds_are_resampled_whole():
    found = resample(['a'] * 3 + ['b'], lambda at: {'whole': (at == 0).sum() == (at == 2).sum()}, 50)
    assert found['whole'].all()


def test_what_rivals_say_of_rules_that_credit_whole_rollouts_is_what_grpo_gets():
    world = dict(turns=6., decides=.25, mixed=.1, partial=True, cosine=.9, squared_error=4., over_first=1.)
    found = with_rivals(pd.DataFrame([{'world': 'w', 'rule': rule, **world} for rule in ('grpo', 'tspo flat', 'tspo')]))
    assert found.rule.tolist() == ['tspo flat', 'tspo']
    assert found.routine.tolist() == [1., 2.] and found.turns.tolist() == [1., 6.] and found.mixed.tolist() == [1., 10.]
    assert survey_tree('tspo', 3, True) == survey_tree('dr-grpo', 3, True) < survey_tree('gigpo', 9, False) + 1
