"""76_study: what a study finds, on stored runs of another comparison, and what it refuses."""
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from papermilled import papermill, shown
from scipy import stats

from credit_rl.compare import dev_area, plan_jobs, pooled_intervals
from credit_rl.engine import ScriptedEngine
from credit_rl.methods import get_method
from credit_rl.parts import Facts, bind
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.regimes import regime_environment
from credit_rl.rollout import rollout
from credit_rl.runlog import load_yaml, read_summary
from credit_rl.significance import holm
from credit_rl.study import (SCORE, predict, rank_agreement, read_audits, regimes_of, study_differences,
                             study_tables, which_rule_when)
from credit_rl.tiny import Player, act, tiny_tokenizer
from credit_rl.world import get_regime, world_of

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / 'runs' / 'sweep_weak'


@pytest.fixture
def study(tmp_path):
    "One regime, with all seeds of GRPO and fewer of TSPO, and a run that did not finish."
    for name in ('grpo-201', 'grpo-202', 'grpo-203', 'tspo-201', 'tspo-202', 'tspo-203'):
        shutil.copytree(STORED / name, tmp_path / 'weak' / name)
    (tmp_path / 'weak' / 'tspo-202' / 'summary.json').unlink()
    return tmp_path


def test_a_rule_is_held_against_grpo_on_its_own_seeds(study):
    for metric, value in (('dev_area', dev_area), ('final_right', lambda run: read_summary(run)['final_em'])):
        (found,) = study_differences(study, metric).to_dict('records')
        by_hand = [value(study / 'weak' / f'tspo-{seed}') - value(study / 'weak' / f'grpo-{seed}')
                   for seed in (201, 203)]
        assert (found['regime'], found['rule'], found['seeds']) == ('weak', 'tspo', 2)
        assert found['difference'] == pytest.approx(sum(by_hand) / 2)
        reach = stats.t.ppf(.975, 1) * stats.sem(by_hand)      # one rule in one regime: the usual interval of a mean
        assert found['low'] == pytest.approx(found['difference'] - reach, rel=1e-3)
        assert found['high'] == pytest.approx(found['difference'] + reach, rel=1e-3)
        ends = found['low'] > 0, found['high'] < 0
        assert found['says'] == {(True, False): 'ahead', (False, True): 'behind'}.get(ends, 'level')


def test_where_outcomes_are_shares_the_end_is_what_is_right(study):
    "Exact match of all parts at once would be 0 and say nothing."
    for name, right in (('grpo-201', .2), ('grpo-203', .3), ('tspo-201', .25), ('tspo-203', .45)):
        place = study / 'weak' / name / 'summary.json'
        summary = json.loads(place.read_text())
        summary['final'] |= {'em': 0., 'right': right}
        place.write_text(json.dumps(summary | {'final_em': 0.}))
    (found,) = study_differences(study, 'final_right').to_dict('records')
    assert found['difference'] == pytest.approx(.1)


def test_runs_of_one_seed_that_began_with_two_bases_are_no_pair(study):
    place = study / 'weak' / 'tspo-203' / 'summary.json'
    summary = json.loads(place.read_text())
    summary['base']['em'] += .01
    place.write_text(json.dumps(summary))
    with pytest.raises(ValueError, match='tspo-203 and .*grpo-203 began with bases that play differently'):
        study_differences(study)


def test_luck_is_pooled_over_regimes_as_in_an_analysis_of_variance():
    "Against scipy: the mean square within groups is that of its F test, and the reach Student's."
    rng = np.random.default_rng(0)
    groups = [rng.normal(mean, .02, n) for mean, n in ((0., 3), (.1, 8), (-.05, 3))]
    within = sum(((g - g.mean()) ** 2).sum() for g in groups) / 11
    between = sum(len(g) * (g.mean() - np.concatenate(groups).mean()) ** 2 for g in groups) / 2
    assert between / within == pytest.approx(stats.f_oneway(*groups).statistic)
    for g, (low, high) in zip(groups, pooled_intervals([torch.tensor(g) for g in groups])):
        assert (low, high) == pytest.approx(stats.t.interval(.95, 11, g.mean(), (within / len(g)) ** .5), rel=1e-3)


def test_a_study_read_again_has_own_spreads_and_one_family(study):
    "Two measures of one rule: intervals are Student's of its own seeds, p-values Holm's over both tables."
    tables, by_hand = study_tables(study, ('dev_area', 'final_right')), []
    for name, value in (('dev_area', dev_area), ('final_right', lambda run: read_summary(run)['final_em'])):
        (row,) = tables[name].to_dict('records')
        d = [value(study / 'weak' / f'tspo-{seed}') - value(study / 'weak' / f'grpo-{seed}') for seed in (201, 203)]
        assert (row['low'], row['high']) == pytest.approx(stats.t.interval(.95, 1, np.mean(d), stats.sem(d)), rel=1e-3)
        by_hand.append(stats.ttest_1samp(d, 0).pvalue)
        assert row['says'] == 'not told apart' and row['detectable'] > abs(row['difference'])
    assert [tables[name].p.item() for name in tables] == pytest.approx(holm(by_hand), rel=1e-3)


def test_a_rule_that_did_as_the_baseline_did_says_nothing_of_luck_elsewhere():
    apart, same = torch.tensor([.01, .03, .08]), torch.zeros(8)
    ends = pooled_intervals([apart, same])
    assert ends == [*pooled_intervals([apart]), (0, 0)]
    assert pooled_intervals([apart, torch.zeros(1)])[1] == (0, 0)
    for level in (torch.zeros(1), torch.zeros(3)): assert np.isnan(pooled_intervals([level])[0]).all()  # no luck seen


def test_rank_agreement_is_scipys_and_draws_regimes_and_rules():
    "Against rows repeated one by one; rules that always end in the order of their scores agree in every sample."
    rng = np.random.default_rng(3)
    both = pd.DataFrame([(g, r) for g in 'abcd' for r in 'uvwxy'][:-2], columns=['regime', 'rule'])
    both['score'] = rng.normal(size=len(both))
    both['difference'] = both.score + rng.normal(size=len(both))
    both.loc[0, 'difference'] = both.loc[1, 'difference']
    tau, low, high = rank_agreement(both, 4000)
    assert tau == pytest.approx(stats.kendalltau(both.score, both.difference).statistic)
    by_hand = []
    for _ in range(2000):
        of = [rng.choice(names, len(names)) for names in (both.regime.unique(), both.rule.unique())]
        times = [(of[0] == row.regime).sum() * (of[1] == row.rule).sum() for row in both.itertuples()]
        drawn = both.loc[both.index.repeat(times)]
        by_hand.append(stats.kendalltau(drawn.score, drawn.difference).statistic)
    assert (low, high) == pytest.approx(np.nanquantile(by_hand, [.025, .975]), abs=.05)
    assert rank_agreement(both.assign(difference=both.score ** 3)) == pytest.approx((1, 1, 1))


def test_a_regime_without_runs_or_audits_is_none(tmp_path):
    for empty in (regimes_of, read_audits):
        with pytest.raises(FileNotFoundError, match='holds no'): empty(tmp_path)
    nothing = pd.DataFrame(columns=['regime', 'seed', 'before', 'right', 'rule', SCORE])
    assert which_rule_when(nothing, pd.DataFrame({'regime': []})).empty


def test_the_page_shows_what_was_expected_and_what_came_out(study):
    "Of three rules, one of which GRPO's seeds say nothing about."
    place = study / 'weak' / 'audits' / '7'
    place.mkdir(parents=True)
    ends = [SCORE, f'{SCORE}, low', f'{SCORE}, high']
    pd.DataFrame([[0., 0., 0.], [2., 1., 3.], [-1., -1.5, -.5]], columns=ends,
                 index=pd.Index(['grpo', 'tspo', 'prs+vspo'], name='rule')).to_csv(place / 'audit.csv')
    (place / 'audit.json').write_text(json.dumps({'bottleneck': {'answer': .7}, 'right': .05}))
    predict(read_audits(study)).to_csv(study / 'predictions.csv', index=False)
    code, said, page = papermill(study / 'report.ipynb', settings={'folder': str(study)}, cwd=ROOT, notebook='98_study')
    assert code == 0, said
    tables = '\n'.join(map(str, shown(page, 'text/plain')))
    assert 'ahead' in tables and 'behind' in tables and 'weak' in tables and len(shown(page, 'image/png')) == 4


def test_the_study_again_gives_all_rules_one_outcome_but_prs():
    "On games of a player that is right, wrong, and does not answer; by IGPO's own settings they would be others."
    params = load_yaml((ROOT / 'runs/params/study_again.yaml').read_text())
    chat = Chat(PROTOCOLS['tiny'], tiny_tokenizer())
    player = Player(near_miss=.4, broken_answer=.3)
    for name, rules in (('many-parts', ('dr-grpo', 'gigpo', 'notes')), ('plain', ('dr-grpo', 'tspo', 'igpo'))):
        regime = get_regime(name)
        world = world_of({**regime.world, 'size': 150}, 'train', 7, 6)
        engine = ScriptedEngine(lambda text, rng: act(text, rng, player), chat.tokenizer)
        groups = rollout(engine, regime_environment(regime, world, chat), world.questions, 4, seed=1)
        def earned(job, options):
            method = get_method(job.settings.get('method', job.method))
            return bind(method, options, Facts(metric=regime.metric)).text_rewards(groups)['outcome']
        first, *jobs = plan_jobs(['grpo', *rules], [611], params, 'nowhere', [name])
        outcome = earned(first, {})
        assert 0 < outcome.mean() < 1
        for job in jobs: assert torch.equal(earned(job, job.settings.get('options', {})), outcome), job.name
        if 'igpo' in rules: assert not torch.equal(earned(jobs[-1], {}), outcome)
