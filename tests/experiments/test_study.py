"""76_study: what a study finds, on stored runs of another comparison, and what it refuses."""
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from papermilled import papermill, shown
from scipy import stats

from credit_rl.compare import dev_area, plan_jobs
from credit_rl.engine import ScriptedEngine
from credit_rl.methods import get_method
from credit_rl.parts import Facts
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.studies.regimes import regime_environment
from credit_rl.rollout import rollout
from credit_rl.runlog import load_yaml, metrics_by_step, read_params, read_summary, read_text, stored_folders
from credit_rl.significance import holm
from credit_rl.studies.study import (SCORE, join_estimates, predict, rank_agreement, read_audits, regimes_of, study_tables,
                             which_rule_when)
from credit_rl.tiny import Player, act, tiny_tokenizer
from credit_rl.world import get_regime, world_of

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / 'runs' / 'sweep_weak'


@pytest.fixture
def study(tmp_path):
    "One regime, with all seeds of GRPO and fewer of TSPO, and a run that did not finish."
    for name in ('grpo-201', 'grpo-202', 'grpo-203', 'tspo-201', 'tspo-202', 'tspo-203'):
        (tmp_path / 'weak' / name).mkdir(parents=True)
        for file in ('params.yaml', 'summary.json'):
            (tmp_path / 'weak' / name / file).write_text(read_text(STORED / name / file))
        rows = metrics_by_step(STORED / name).values()
        (tmp_path / 'weak' / name / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    (tmp_path / 'weak' / 'tspo-202' / 'summary.json').unlink()
    return tmp_path


def test_where_outcomes_are_shares_the_end_is_what_is_right(study):
    "Exact match of all parts at once would be 0 and say nothing."
    for name, right in (('grpo-201', .2), ('grpo-203', .3), ('tspo-201', .25), ('tspo-203', .45)):
        place = study / 'weak' / name / 'summary.json'
        summary = json.loads(place.read_text())
        summary['final'] |= {'em': 0., 'right': right}
        place.write_text(json.dumps(summary | {'final_em': 0.}))
    (found,) = study_tables(study, ('final_right', ))['final_right'].to_dict('records')
    assert found['difference'] == pytest.approx(.1)


def test_runs_of_one_seed_that_began_with_two_bases_are_no_pair(study):
    place = study / 'weak' / 'tspo-203' / 'summary.json'
    summary = json.loads(place.read_text())
    summary['base']['em'] += .01
    place.write_text(json.dumps(summary))
    with pytest.raises(ValueError, match='differently'):
        study_tables(study)


def test_a_study_read_again_has_own_spreads_and_one_family(study):
    "Two measures of one rule: intervals are Student's of its own seeds, p-values Holm's over both tables."
    tables, by_hand = study_tables(study, ('dev_area', 'final_right')), []
    for name, value in (('dev_area', dev_area), ('final_right', lambda run: read_summary(run)['final_em'])):
        (row,) = tables[name].to_dict('records')
        d = [value(study / 'weak' / f'tspo-{seed}') - value(study / 'weak' / f'grpo-{seed}') for seed in (201, 203)]
        assert (row['regime'], row['rule'], row['seeds']) == ('weak', 'tspo', 2)        # one of three did not finish
        assert row['difference'] == pytest.approx(np.mean(d))
        assert (row['low'], row['high']) == pytest.approx(stats.t.interval(.95, 1, np.mean(d), stats.sem(d)), rel=1e-3)
        by_hand.append(stats.ttest_1samp(d, 0).pvalue)
        assert row['says'] == 'not told apart' and row['detectable'] > abs(row['difference'])
    assert [tables[name].p.item() for name in tables] == pytest.approx(holm(by_hand), rel=1e-3)


def test_rank_agreement_is_scipys_and_leaves_out_regimes_and_rules():
    "Against scipy on what is left; rules that always end in the order of their scores leave nothing to doubt."
    rng = np.random.default_rng(3)
    both = pd.DataFrame([(g, r) for g in 'abcd' for r in 'uvwxy'][:-2], columns=['regime', 'rule'])
    both['score'] = rng.normal(size=len(both))
    both['difference'] = both.score + rng.normal(size=len(both))
    both.loc[0, 'difference'] = both.loc[1, 'difference']
    tau_of = lambda rows: stats.kendalltau(rows.score, rows.difference).statistic
    variance = sum((of.nunique() - 1) * np.var([tau_of(both[of != name]) for name in of.unique()])
                   for of in (both.regime, both.rule))
    tau, reach = tau_of(both), stats.norm.ppf(.975) * variance ** .5
    assert rank_agreement(both) == pytest.approx((tau, tau - reach, min(1, tau + reach)), abs=1e-4)
    assert rank_agreement(both.assign(difference=both.score ** 3)) == pytest.approx((1, 1, 1))
    assert np.isnan(rank_agreement(both[both.rule == 'u'])[1:]).all()      # one rule says nothing of another one


@pytest.mark.parametrize('rho', [0, .5, .8])
def test_the_interval_of_rank_agreement_covers(rho):
    """Scores and differences of five regimes and eight rules, with a share of either and one of their own, all of
    correlation rho: Kendall's τ of two normal variables is 2/π arcsin rho."""
    rng, truth, held, times = np.random.default_rng(0), 2 / np.pi * np.arcsin(rho), 0, 400
    both = pd.DataFrame([(g, r) for g in range(5) for r in range(8)], columns=['regime', 'rule'])
    shape = np.linalg.cholesky([[1, rho], [rho, 1]]).T
    for _ in range(times):
        rule, regime, own = (rng.normal(size=(n, 2)) @ shape * share ** .5 for n, share in ((8, .3), (5, .3), (40, .4)))
        both[['score', 'difference']] = rule[both.rule] + regime[both.regime] + own
        _, low, high = rank_agreement(both)
        held += low <= truth <= high
    assert .93 < held / times < .99


@pytest.mark.parametrize('n', [2, 5])
def test_the_interval_of_joined_estimates_covers(n):
    "Estimates of other truths, each with an error of its own, joined into the mean of these truths."
    rng, times = np.random.default_rng(1), 4000
    truth, error = rng.normal(size=n), rng.uniform(.1, 1, n)
    held = 0
    for values in rng.normal(truth, error, (times, n)):
        mean, low, high = join_estimates(values, values - 1.96 * error, values + 1.96 * error)
        assert mean == pytest.approx(values.mean())
        held += low <= truth.mean() <= high
    assert .94 < held / times < .96


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
    assert 'ahead' in tables and 'behind' in tables and 'weak' in tables and len(shown(page, 'image/png')) == 5


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
            return method.bind(options, Facts(metric=regime.metric)).text_rewards(groups)['outcome']
        first, *jobs = plan_jobs(['grpo', *rules], [611], params, 'nowhere', [name])
        outcome = earned(first, {})
        assert 0 < outcome.mean() < 1
        for job in jobs: assert torch.equal(earned(job, job.settings.get('options', {})), outcome), job.name
        if 'igpo' in rules: assert not torch.equal(earned(jobs[-1], {}), outcome)


def test_the_stored_study_again_is_whole_and_each_run_has_its_rules_rate():
    "Every rule that was foretold, and GRPO, on the same twelve seeds; those of a seed began with one base."
    place = ROOT / 'runs/study_again'
    rates = pd.read_csv(place / 'rates.csv').set_index(['regime', 'rule']).rate
    foretold = pd.read_csv(place / 'predictions.csv')
    assert set(rates.index) == {*zip(foretold.regime, foretold.rule), *((world, 'grpo') for world in foretold.regime)}
    for (world, rule), rate in rates.items():
        runs = {int(run.name.rpartition('-')[2]): run 
                for run in stored_folders(place / world, f'{rule}-6*/params.yaml')}
        assert sorted(runs) == list(range(611, 623)), (world, rule)
        for seed, run in runs.items():
            params = read_params(run)
            assert (params['learning_rate'], params['seed'], params['steps']) == (rate, seed, 60)
            assert read_summary(run)['base'] == read_summary(place / world / f'grpo-{seed}')['base']


def test_the_stored_study_again_shows_what_the_pages_say():
    "Who is ahead and who behind; the control within .03; and where a prediction did not hold."
    place = ROOT / 'runs/study_again'
    found = study_tables(place, ('sampled_right',))['sampled_right'].set_index(['regime', 'rule'])
    foretold = pd.read_csv(place / 'predictions.csv').set_index(['regime', 'rule'])
    assert {*found.index[found.says == 'ahead']} == {
        ('many-parts', 'notes'), ('rarely-right', 'tspo'), ('rarely-right', 'igpo')}
    assert {*found.index[found.says == 'behind']} == {('rarely-right', 'prs')}
    assert found.difference['many-parts', 'notes'] >= .03
    assert (found.loc['plain', ['low', 'high']].abs() < .03).all(axis=None)
    inside = found.difference.between(foretold.low.reindex(found.index), foretold.high.reindex(found.index))
    assert [*inside.index[~inside]] == [('many-parts', 'notes')]
