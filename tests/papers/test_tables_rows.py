"""Rows of tables, from made-up run folders: two sizes are two rows, folders are not pooled unless asked, and the
command works wherever it stands and whatever comes first."""
import json

import pytest

from credit_rl.studies import papers
from credit_rl.command import main
from credit_rl.studies.papers import find_entry
from credit_rl.studies.tables import (calibration_table, draw_entry, gain_table, process_table, score_table, time_table,
                              _folder_names, _run_names)
from made_runs import BIG, SMALL, evaluated, made

def test_two_sizes_are_two_rows(tmp_path):
    "The code of before made of a 3B and a 7B run two seeds of one row."
    runs = [made(tmp_path / f'{m}_{size[13:15]}', m, size, em=em) for m, size, em in
            (('ppo', SMALL, .2), ('tips', SMALL, .3), ('ppo', BIG, .4), ('tips', BIG, .5))]
    for table in (score_table(runs), time_table(runs), gain_table(runs, ('options.band',))):
        assert len(table) == 4 and set(table.seeds) == {1}, table
        assert sum('3B' in name for name in table.index) == sum('7B' in name for name in table.index) == 2
    gains = gain_table(runs, ('options.band',)).gain
    assert sorted(round(x, 9) for x in gains) == [0, 0, .25, .5]        # each over PPO of its own size


def test_what_differs_makes_a_name_and_seeds_do_not(tmp_path):
    first = made(tmp_path / 'a', seed=1, learning_rate=1e-6, ranks=1, corpus='x')
    other = made(tmp_path / 'b', seed=2, learning_rate=1e-6, ranks=8, corpus='x')
    slow = made(tmp_path / 'c', seed=3, learning_rate=1e-7, ranks=8, corpus='x')
    assert _run_names([first, other]) == ['tips', 'tips']
    assert _run_names([first, other, slow]) == ['tips (learning_rate=1e-06)'] * 2 + ['tips (learning_rate=1e-07)']
    assert score_table([first, other]).seeds.tolist() == [2]


def test_evaluations_of_one_name_are_two_rows(tmp_path):
    one, two = evaluated(tmp_path / '3b' / 'eval', SMALL, .2), evaluated(tmp_path / '7b' / 'eval', BIG, .4)
    assert _folder_names([one, two]) == ['3b/eval', '7b/eval']
    assert score_table([one, two])['mean'].to_dict() == {'3b/eval': .2, '7b/eval': .4}
    assert len(score_table([one, one])) == 1                                          # given twice, it is there once


def test_rollouts_of_folders_are_pooled_only_if_asked(tmp_path, capsys):
    one, two = made(tmp_path / 'one', 'tspo', played=3), made(tmp_path / 'two', 'grpo', played=2)
    apart = process_table([one, two])
    assert apart.loc[('one', 'all'), 'all'] == 3 and apart.loc[('two', 'all'), 'all'] == 2
    assert process_table([one, two], pool=True).loc['all', 'all'] == 5 == draw_entry(
        find_entry('tspo', 'table 1'), [one, two], pool=True).loc['all', 'all']
    assert process_table([one]).loc['all', 'all'] == 3
    main(['tables', 'tspo', '--pool', '--only', 'table 1', str(one), str(two)])
    shown = capsys.readouterr().out.partition('settings that differ')[0].partition('these runs:')[2]
    assert shown and 'one ' not in shown


def test_examined_runs_of_two_sizes_are_two_columns(tmp_path):
    critic = {'auc': 1., 'chances': [.95, .05], 'outcomes': [1, 0]}
    runs = [made(tmp_path / name, 'carl', size) for name, size in (('a', SMALL), ('b', BIG))]
    for run in runs:
        summary = json.loads((run / 'summary.json').read_text())
        (run / 'summary.json').write_text(json.dumps({**summary, 'competence': {'critic': critic}}))
    assert len(calibration_table(runs).columns) == 2


def test_the_command_takes_folders_behind_only_and_works_outside_a_checkout(tmp_path, monkeypatch, capsys):
    "Before: 'unrecognized arguments'; and outside, no table at all, since the paper's numbers were missing."
    run = made(tmp_path / 'run')
    main(['tables', 'tips', '--only', 'table 15', str(run)])
    assert 'these runs:' in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(papers, 'paper_numbers', papers.paper_numbers.__wrapped__)          # nothing is read already
    for module in ('papers', 'tables'):
        monkeypatch.setattr(f'credit_rl.studies.{module}.files', lambda package: tmp_path / 'site-packages' / package)
    main(['tables', 'tips', str(run)])
    said = capsys.readouterr().out
    assert 'these runs:' in said and "the papers' numbers lie in data/papers" in said
    assert 'tips, table 10' in said and 'inside the checkout' in said
    with pytest.raises(SystemExit, match='holds no run'): main(['tables', 'tips', str(tmp_path / 'nowhere')])


def test_settings_are_compared_with_the_file_of_the_same_size(tmp_path, root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    main(['tables', 'tips', '--only', 'table 15', str(made(tmp_path / 'run', model=SMALL))])
    said = capsys.readouterr().out
    assert 'run: steps is 2' in said and 'run: model' not in said
