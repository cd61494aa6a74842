"""Tables and figures as the papers mean them, from made-up run folders of a few rows."""
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from credit_rl.methods import get_method
from credit_rl.studies.papers import ENTRIES, count_states, find_entry
from credit_rl.parts import assign, bind
from credit_rl.runlog import RunLog
from credit_rl.step_metrics import credit_metrics
from credit_rl.studies.tables import draw_entry, score_table, setting_gaps
from credit_rl.trajectory import Group, example_group, to_json

from made_runs import BIG, SEVEN, SMALL, answered, assessed, judged, made

ROOT = Path(__file__).resolve().parents[2]
MULTI = ['hotpotqa', '2wikimultihopqa', 'musique', 'bamboogle']


def drawn(paper, name, folders): return draw_entry(find_entry(paper, name), folders)


def test_each_entry_is_the_papers_or_says_why_not():
    entries = [e for of in ENTRIES.values() for e in of]
    assert all(e.state == "not the paper's" for e in entries if e.differs)
    assert count_states().loc['all', "not the paper's"] == sum(bool(e.differs) for e in entries)
    assert all(e.differs[0].islower() and not e.differs.endswith('.') for e in entries if e.differs)


# ---- TSPO ----

def test_rewards_of_turns_have_the_outcome_in_them(tmp_path):
    "TSPO table 2: a right rollout earns 1 in every turn. Before, the outcome was left out, and it earned 0."
    log = RunLog(tmp_path / 'tspo')
    log.write_params({'method': 'tspo', 'seed': 0, 'steps': 1, 'options': {}})
    latent = ((0., 0., 0., 0.), (1., 1., 0., 0.), (0., 0., 0., 0.))
    log.turns(1, [{'kind': 'train', 'trajectory': to_json(t), 'reward': float(i == 0), 'turn_rewards': list(x)}
                  for i, (t, x) in enumerate(zip(example_group().trajectories, latent))])
    table = drawn('tspo', 'table 2', [log.folder])
    assert {kind: table.loc[kind].iloc[:4].tolist() for kind in ('O+P+', 'O-P+', 'O-P-')} == {
        'O+P+': [1, 1, 1, 1], 'O-P+': [1, 1, 0, 0], 'O-P-': [0, 0, 0, 0]}


def test_strategies_are_compared_on_the_papers_four_sets(tmp_path):
    "TSPO table 4. Before, it was drawn from the training's own test questions, which have two of the four sets."
    runs = [made(tmp_path / s, 'tspo', options={'strategy': s}) for s in ('none', 'all', 'all-wrong')]
    with pytest.raises(ValueError, match='not run: this is drawn from runs of evaluation|export a run'):
        drawn('tspo', 'table 4', runs)
    tests = [assessed(run, 2, em) for run, em in zip(runs, (.25, .3, .31))]
    table = drawn('tspo', 'table 4', runs + tests)
    assert table.columns[:5].tolist() == [*MULTI, 'mean']
    assert table['mean'].round(9).to_dict() == {'tspo: strategy none': .25, 'tspo: strategy all': .3,
                                                'tspo: strategy all-wrong': .31}
    with pytest.raises(ValueError, match='none of 1 evaluations has all of hotpotqa'):
        drawn('tspo', 'table 4', [few := made(tmp_path / 'few', 'tspo'), assessed(few, 2, sets=('nq',))])
    lines = drawn('tspo', 'figure 7', runs + tests).axes[0].lines
    assert len(lines) == len(SEVEN) + 1 and lines[-1].get_label() == 'mean'


def test_the_best_checkpoint_is_reported_and_all_are_drawn(tmp_path):
    "TSPO figure 5: a point for each checkpoint; table 4 has the best alone, and never a mean over checkpoints."
    run = made(tmp_path / 'run', 'tspo')
    (run / 'summary.json').write_text('{"method": "tspo", "best_step": 20, "collapsed": false}')
    folders = [run, *(assessed(run, step, em) for step, em in ((10, .1), (20, .4), (30, .2)))]
    assert drawn('tspo', 'table 4', folders)['mean'].round(9).tolist() == [.4]
    figure = drawn('tspo', 'figure 5', folders)
    assert [ax.get_title() for ax in figure.axes] == [*MULTI, 'mean of the sets']
    assert figure.axes[-1].lines[0].get_xydata().round(9).tolist() == [[10, .1], [20, .4], [30, .2]]
    with pytest.raises(ValueError, match='--checkpoint STEP'): drawn('tspo', 'figure 5', folders[:2])
    with pytest.raises(ValueError, match='export a run'): drawn('tspo', 'figure 5', folders[:1])


def test_tokens_of_a_rollout_have_the_observations_in_them(tmp_path):
    "TSPO figure 6: what the model wrote alone is shorter by what came back."
    run = made(tmp_path / 'run', 'tspo', played=1)
    (line,) = drawn('tspo', 'figure 6', [run]).axes[0].lines
    played = example_group().trajectories[0].turns
    assert line.get_ydata()[0] == sum(len(t.action_ids) + len(t.observation_ids) for t in played)


# ---- TIPS ----

def test_gains_over_ppo_are_of_seven_sets_and_the_same_model(tmp_path):
    """TIPS tables 3, 5 and 6. Before, means were of the training's own two sets, and PPO of any size was the
    baseline."""
    runs, tests = [], []
    for model, ppo, tips in ((SMALL, .2, .3), (BIG, .4, .44)):
        for method, em in (('ppo', ppo), ('tips', tips)):
            runs.append(made(tmp_path / f'{method}{model[12:15]}', method, model, options={'band': 'small'} if
                             method == 'tips' else {}, teacher='self' if method == 'tips' else None))
            tests.append(assessed(runs[-1], 2, em))
    for name, row in (('table 3', 'tips: model {}'), ('table 5', 'tips: model {}, band small'),
                      ('table 6', 'tips: model {}, teacher self')):
        table = drawn('tips', name, runs + tests)
        gain = table['gain, em' if name == 'table 3' else 'gain']
        assert gain[row.format('Qwen2.5-3B-Instruct')] == pytest.approx(.5)
        assert gain[row.format('Qwen2.5-7B-Instruct')] == pytest.approx(.1)
    with pytest.raises(ValueError, match='export a run'): drawn('tips', 'table 3', runs)
    figure = drawn('tips', 'figure 6', [runs[1], tests[1]])
    assert [ax.get_ylabel() for ax in figure.axes][1] == 'exact match, mean of the sets'
    assert figure.axes[1].lines[0].get_ydata().round(9).tolist() == [.3]


def test_the_teacher_scores_the_states_before_turns(tmp_path):
    "TIPS tables 11 and 13: S_0 is the prompt, and no state lies behind the answer. Before, it was S_1 to S_K."
    run = made(tmp_path / 'run', played=1, questions_per_step=256, group_size=1)
    t, table = example_group().trajectories[0], drawn('tips', 'table 13', [run])
    assert table.S.tolist() == [len(t.turns)] and table['L 0'].tolist() == [len(t.prompt_ids)]
    whole = len(t.prompt_ids) + sum(len(x.action_ids) + len(x.observation_ids) for x in t.turns[:-1])
    assert table['L max'].tolist() == [whole] == table[f'L {len(t.turns) - 1}'].tolist()


def test_tokens_of_the_last_steps_are_drawn(tmp_path):
    """TIPS figures 5 and 8 to 11 are of the final checkpoint, token by token. Before, they were of all steps, and of
    the means of turns."""
    log, t = RunLog(tmp_path / 'run'), example_group().trajectories[0]
    log.write_params({'method': 'ppo', 'seed': 0, 'steps': 20, 'options': {}, 'model': 'tiny'})
    for step, shift in ((1, -5.), (20, 0.)):
        own = [[shift + .1 * i for i in range(len(x.action_ids))] for x in t.turns]
        log.turns(step, [{'kind': 'train', 'trajectory': to_json(t), 'reward': 1., 'token_advantages': own,
                          'advantages': [sum(x) / len(x) for x in own]}])
    (ax,) = drawn('tips', 'figure 5', [log.folder]).axes
    assert sum(bar.get_height() for bar in ax.patches) == sum(len(x.action_ids) for x in t.turns)
    assert all(bar.get_height() == 0 for bar in ax.patches if bar.get_x() + bar.get_width() < -.1)
    (ax,) = drawn('tips', 'figure 11', [log.folder]).axes
    assert 'turn by turn' in ax.get_title(loc='left')              # its tokenizer is not here
    (log.folder / 'base').symlink_to(ROOT / 'data' / 'tiny_base')
    (ax,) = drawn('tips', 'figure 11', [log.folder]).axes
    colours = {bar.get_facecolor() for bar in ax.patches if bar.get_facecolor()[3] > 0}
    assert 'token by token' in ax.get_title(loc='left') and len(colours) >= max(len(x.action_ids) for x in t.turns)


def test_curves_of_seven_sets_have_a_panel_for_each(tmp_path):
    "TIPS figure 4. Before, a run that trains on NQ and HotpotQA had these two."
    run = made(tmp_path / 'run')
    figure = drawn('tips', 'figure 4', [run, assessed(run, 1, .2), assessed(run, 2, .3)])
    assert [ax.get_title() for ax in figure.axes] == [*SEVEN, 'mean of the sets']


# ---- IGPO, PRS ----

def test_igpo_is_drawn_by_f1(tmp_path):
    "IGPO figures 3 and 5. Before, they were drawn by exact match, and of the sets that are trained on."
    run = made(tmp_path / 'run', 'igpo', em=.2)
    tests = [assessed(run, step, .3) for step in (1, 2)]
    for test in tests:
        for place in test.glob('*/scores.json'):
            place.write_text(json.dumps({**json.loads(place.read_text()), 'f1': .6}))
    figure = drawn('igpo', 'figure 3', [run, *tests])
    assert [ax.get_title() for ax in figure.axes] == [*SEVEN, 'mean of the sets']
    assert set(figure.axes[-1].lines[0].get_ydata().round(9)) == {.6}
    log = RunLog(tmp_path / 'logged')
    log.write_params({'method': 'igpo', 'seed': 0, 'steps': 2, 'options': {}})
    for step in (1, 2): log.metrics(step, dev_f1=.6, dev_em=.1, trained_tokens=100)
    (ax,) = drawn('igpo', 'figure 5', [log.folder]).axes
    assert ax.lines[0].get_xydata().tolist() == [[100, .6], [200, .6]]


def test_prs_long_form_is_judged(tmp_path):
    "PRS tables 5 and 8, figures 2, 3 and 6: pass rates by a judge. Before, exact match on short answers."
    runs = [made(tmp_path / f't{t}', 'prs+vspo', options={'temperature': t}) for t in (.1, .5)]
    tests = [judged(assessed(run, step, sets=('pairs',)), rate + step / 100)
             for run, rate in zip(runs, (.8, .7)) for step in (1, 2)]
    table = drawn('prs', 'table 5', runs + tests)
    assert table['mean, reference_pass'].round(9).tolist() == [.82, .72]
    assert table['multi, hallucination_pass'].eq(.9).all()
    assert table['simple, reference_pass'].isna().all()               # no verdict there is missing, and not 0
    assert len(drawn('prs', 'table 8', runs[:1] + tests[:2])) == 1
    (ax,) = drawn('prs', 'figure 3', runs + tests).axes
    assert [line.get_ydata().round(9).tolist() for line in ax.lines] == [[.81, .82], [.71, .72]]
    with pytest.raises(ValueError, match='none of these runs logged reward'): drawn('prs', 'figure 2', runs + tests)
    with pytest.raises(ValueError, match='was not judged'):
        drawn('prs', 'table 5', [run := made(tmp_path / 'x', 'prs+vspo'), assessed(run, 1, sets=('pairs',))])


def test_two_judged_sets_are_two_columns_and_their_mean(tmp_path):
    test = judged(assessed(made(tmp_path / 'run', 'prs'), 2, sets=('pairs', 'other')), .2)
    shutil.copy(test / 'pairs' / 'judged.json', test / 'other')
    found = json.loads((test / 'other' / 'judged.json').read_text())
    (test / 'other' / 'judged.json').write_text(json.dumps({**found, 'dataset': 'other',
                                                            'all': {**found['all'], 'reference_pass': .8}}))
    assert score_table([test], 'reference_pass').iloc[0][['pairs', 'other', 'mean']].tolist() == [.2, .8, .5]


def test_long_answers_are_trained_on_long_answers():
    """PRS tables 5 and 8, figures 2, 3, 4 and 6: Qwen3-14B and the long form. Before, the commands trained a 3B model
    on short answers."""
    for name in ('table 5', 'table 8', 'figure 2', 'figure 3', 'figure 4', 'figure 6'):
        trains = [c for c in find_entry('prs', name).command.split(' && ') if c.startswith('credit-rl train')]
        assert trains and all('_long_' in c and 'qwen3_14b' in c and 'path=PAIRS corpus=PASSAGES' in c for c in trains)
    both = find_entry('prs', 'figure 4').command
    assert 'prs_long_outcome_qwen3_14b' in both and 'prs_long_qwen3_14b' in both


def test_a_long_run_is_compared_with_the_file_of_the_long_form(tmp_path, root, monkeypatch):
    monkeypatch.chdir(root)
    run = made(tmp_path / 'run', 'prs+vspo', model='Qwen/Qwen3-14B', data='pairs')
    gaps = setting_gaps('prs', [run])
    assert not any(': model is' in line or ': data is' in line for line in gaps)
    eight = made(tmp_path / 'eight', 'prs', model='Qwen/Qwen3-8B', data='pairs')
    assert not any(': model is' in line for line in setting_gaps('prs', [eight]))


def test_dense_rewards_are_compared_on_seven_sets(tmp_path):
    """TIPS table 4 and figure 6b: means over the seven sets that were evaluated. Before, the training's own test
    questions, which are of two sets, were among them."""
    folders = [made(tmp_path / m, m) for m in ('ppo', 'mt-ppo', 'grpo')]
    folders += [assessed(folder, 1, em, sets) for folder, em, sets in zip(
        list(folders), (.4, .3, .9), (SEVEN, SEVEN, SEVEN[:2]))]
    table = drawn('tips', 'table 4', folders)
    assert len(table) == 2 and table['mean, em'].round(6).tolist() == [.4, .3] and 'mean, f1' in table
    assert find_entry('tips', 'figure 6').arguments == {'sets': SEVEN}


def test_groups_without_advantage_are_counted():
    "PRS figure 4 and IGPO figure 1: a task counts where none of its rollouts has an advantage."
    first = example_group()
    lost = Group(first.question, [first.trajectories[2]] * 3)
    method = bind(get_method('grpo'), {})
    found = credit_metrics(method, assign(method, [first, lost], look=lambda layout, asks: None))
    assert found['zero_groups'] == .5 and found['zero_advantage'] == .5


# ---- CARL ----

def tries(folder, model, known, asked, count=5):
    "Tries without tools, of which the last alone gets right what is known."
    return [answered(folder / f'try-{i}', model, {name: [(q, i == count - 1 and q in known, 0, True) for q in ids]
                                                  for name, ids in asked.items()}, 'direct', False)
            for i in range(count)]


def test_tiers_are_of_five_tries_set_by_set(tmp_path):
    """CARL tables 1, 3 and 19. Before, the share was one number of a run's test questions, and rates were of all its
    sets, GSM8K with the others."""
    asked = {'hotpotqa': ['a', 'b', 'c', 'd'], 'gsm8k': ['e', 'f']}
    plain = tries(tmp_path, BIG, {'a', 'e', 'f'}, asked)
    assert drawn('carl', 'table 1', plain)['tier 1, Qwen2.5-7B-Instruct'].to_dict() == {'hotpotqa': .75, 'gsm8k': 0}
    with pytest.raises(ValueError, match='no question was tried 5 times'): drawn('carl', 'table 1', plain[:4])
    run = made(tmp_path / 'carl_7b', 'carl')
    played = {'hotpotqa': [('a', 1, 0, 1), ('b', 0, 1, 1), ('c', 1, 2, 1), ('d', 0, 0, 0), ('z', 0, 0, 1)],
              'gsm8k': [('e', 0, 0, 1)]}
    test = answered(tmp_path / 'eval', 'models/carl_7b', played)
    other = answered(tmp_path / 'small', SMALL, played)              # whose tiers are not known
    table = drawn('carl', 'table 3', [*plain, run, test, other])
    assert list(table.index) == ['eval']
    row = table.loc['eval']
    assert (row['tool rate, tier 1'], row['tool rate, tier 2'], row['EM, tier 2']) == (2 / 3, 0, 1)
    assert row['wrong answers, tier 1'] == 1 / 3 and row['questions, tier 1'] == 3
    assert drawn('carl', 'table 19', [*plain, run, test]).equals(table)


def test_hops_are_counted_over_three_sets(tmp_path):
    "CARL table 18. Before, each set had its rows, and 2Wiki's own numbers of hops."
    sets = {'hotpotqa': [('a', 1, 1, 1)], '2wikimultihopqa': [('b', 0, 1, 1)], 'gsm8k': [('c', 1, 0, 1)],
            'musique': [('d', 1, 1, 1), ('e', 0, 1, 1), ('f', 1, 1, 1)]}
    hops = {'musique': {'d': 2, 'e': 3, 'f': 4}, '2wikimultihopqa': {'b': 4}}
    test = answered(tmp_path / 'eval', BIG, sets, hops=hops)
    table = drawn('carl', 'table 18', [test])
    assert table['n, eval'].to_dict() == {'2 hops': 3, '3 hops': 1, '4 hops': 1}
    assert table['eval'].round(9).to_dict() == {'2 hops': round(2 / 3, 9), '3 hops': 0, '4 hops': 1}


def test_explained_variance_is_of_held_out_rollouts(tmp_path):
    "CARL table 13: every 50 steps from the warm-up on. Before, of the training's own rollouts, at any ten steps."
    log = RunLog(tmp_path / 'run')
    log.write_params({'method': 'carl', 'seed': 1, 'steps': 500, 'options': {}})
    for step in range(0, 501, 25): log.metrics(step, gate_explained=.5 + step / 2000, explained_outcome=.1)
    table = drawn('carl', 'table 13', [log.folder])
    assert table.index.tolist() == [*range(0, 501, 50)] and table.carl.iloc[[0, -1]].tolist() == [.5, .75]


def test_errors_are_of_a_hundred_wrong_answers_to_musique(tmp_path):
    "CARL table 7. Before, all sets were in it, and right answers by CARL's EM were wrong."
    right, near, lost = example_group().trajectories
    for name in ('musique', 'hotpotqa'):
        log = RunLog(tmp_path / 'eval' / name)
        log.turns(0, [{'trajectory': to_json(t)} for t in [right] * 5 + [near] * 70 + [lost] * 70])
        (log.folder / 'scores.json').write_text(json.dumps({'score': .1}))
        (log.folder / 'manifest.json').write_text(json.dumps({'protocol': {'name': None}, 'metric': {'name': 'em'}}))
    table = drawn('carl', 'table 7', [tmp_path / 'eval'])
    assert {key[1] for key in table.index} == {'musique'} and table['all'].sum() == 100


def test_figures_of_the_warmed_up_critic_are_of_warm_ups_and_the_first_step(tmp_path):
    "CARL figures 2a and 4. Before, of the critic after training, and of the rollouts of all steps."
    for kind, pair in (('cold', [.95, 0]), ('curated', [.95, 1])):
        log = RunLog(tmp_path / kind)
        log.write_params({'collected': kind, 'method': 'carl', 'seed': 1})
        log.summary({'collected': kind, 'method': 'carl', 'calibration': [pair]})
    axes = drawn('carl', 'figure 2', [tmp_path / 'cold', tmp_path / 'curated', made(tmp_path / 'run', 'carl')]).axes
    assert {line.get_label(): line.get_ydata()[9] for line in axes[0].lines[:2]} == {'cold': 0, 'curated': 1}
    assert axes[1].get_ylabel() == 'exact match, held-out questions'
    log, t = RunLog(tmp_path / 'valued'), example_group().trajectories[0]
    log.write_params({'method': 'carl', 'seed': 1, 'steps': 2, 'options': {}})
    known = replace(t, question=replace(t.question, meta={'tier': 2}))
    for step, value in ((1, .9), (2, .1)):
        log.turns(step, [{'kind': 'train', 'trajectory': to_json(known), 'values': [value]}])
    (ax,) = drawn('carl', 'figure 4', [log.folder]).axes
    assert [bar.get_x() for bar in ax.patches if bar.get_height()] == pytest.approx([.9])
