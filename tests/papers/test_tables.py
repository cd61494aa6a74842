"""The papers' tables and figures: none is missing, each command that an entry plans is one, folders of another lineage
are refused, and what is drawn is what the paper means, from made-up folders and from small runs."""
import importlib
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from credit_rl.command import main
from credit_rl.estimate import KNOWN_SIZES
from credit_rl.methods import get_method
from credit_rl.options import flat
from credit_rl.parts import Measured, assign
from credit_rl.potentials import scoring_flops
from credit_rl.runlog import RunLog, write_json
from credit_rl.settings import make_config
from credit_rl.step_metrics import credit_metrics
from credit_rl.studies import tables
from credit_rl.studies.papers import (PAPERS, RunRow, Work, all_works, entries, equations, find_entry, make_works, paper_numbers,
                                      paper_sentences, papers_folder, plan_entry, plan_lines, plan_table, price,
                                      read_paper, report, reported_table, settings_file)
from credit_rl.studies.tables import DRAWINGS, draw_rows, score_table
from credit_rl.trajectory import Group, example_group, to_json
from credit_rl.warmup import pool_tiers, read_collected
from made_runs import BIG, SEVEN, SMALL, answered, assessed, begun, evaluated, judged, made

ROOT = Path(__file__).resolve().parents[2]
MULTI = ['hotpotqa', '2wikimultihopqa', 'musique', 'bamboogle']


@pytest.fixture(autouse=True)
def at_root(monkeypatch): monkeypatch.chdir(ROOT)


def drawn(paper, name, rows): return draw_rows(find_entry(paper, name), rows)[0]


# ---- the specification ----

def test_no_table_and_no_figure_is_missing():
    for paper in PAPERS:
        spec = read_paper(paper)
        numbered = [f'{kind} {n + 1}' for kind in ('table', 'figure') for n in range(spec[f'{kind}s'])]
        assert [e.name for e in entries(paper)] == [n for n in numbered if n not in spec.get('absent', ())]
        named = {r['run'] if isinstance(r, dict) else r for e in entries(paper) for of in e.rows.values()
                 for r in (of if isinstance(of, list) else [of])}
        warm = {r.get('warm') for r in spec['runs'].values()} | {r['teacher.model']['run'] for r in spec['runs'].values()
                                                                  if isinstance(r.get('teacher.model'), dict)}
        pools = {name for r in spec['runs'].values() if 'warmup' in r for name in r.get('pool', ())}
        assert named | pools | warm - {None} == {*spec['runs']}          # each run that is specified is one of an entry
    assert {e.draw for p in PAPERS for e in entries(p)} - {''} == {*DRAWINGS}
    assert all(bool(e.draw) == bool(e.rows) for p in PAPERS for e in entries(p))
    for paper in PAPERS:
        found = equations(paper)
        assert found.number.tolist() == [*range(1, len(found) + 1)]
        for module, name in {tuple(f.split('.')) for f in found.function if f}:
            assert name in importlib.import_module(f'credit_rl.{module}').__all__


@pytest.mark.skipif('CREDIT_RL_PAPERS' not in os.environ, reason='CREDIT_RL_PAPERS is not set')
def test_the_entries_are_those_of_the_papers_texts():
    "CREDIT_RL_PAPERS is a folder of their texts; of IGPO the pictures are lost."
    texts = [p.read_text(encoding='utf-8') for p in sorted(Path(os.environ['CREDIT_RL_PAPERS']).glob('*.txt'))]
    title = {'tips': 'INFORMATION-POTENTIAL', 'tspo': 'Double Homogenization', 'igpo': 'Information Gain-based',
             'prs': 'Progressive Reward Shaping', 'carl': 'Knowing When to Ask'}
    for paper, words in title.items():
        (text,) = [t for t in texts if words in t[:400]]
        found = {f'{"table" if kind == "Table" else "figure"} {n}'
                 for kind, n in re.findall(r'\b(Table|Figure|Fig\.) (\d+)\b', text)}
        listed = {e.name for e in entries(paper)}
        assert found <= listed and (paper == 'igpo' or found == listed), paper


@pytest.mark.parametrize('paper', PAPERS)
@pytest.mark.long
def test_every_command_is_one(paper):
    "Files, settings and options are there, in full size and in small, and no folder belongs to two commands."
    for small in (False, True):
        commands = {}
        for work in (w for e in entries(paper) for w in all_works(plan_entry(e, 'x', small))):
            work.check()
            assert commands.setdefault(work.folder, work.command) == work.command


def test_what_the_papers_report_is_read():
    assert {path.stem for path in papers_folder().glob('*.csv')} == {*PAPERS, 'said'}
    for paper in PAPERS:
        numbers = paper_numbers(paper)
        assert list(numbers) == ['table', 'unit', 'row', 'column', 'value']
        assert numbers.drop(columns='value').notna().all(axis=None)
        for name, rows in numbers.groupby('table'):
            table = reported_table(paper, name)
            assert table.size == len(rows) and rows.unit.nunique() == 1 and table.notna().any(axis=None)
            assert find_entry(paper, name).draw != 'settings_table' and report(paper, name).equals(table)
    assert sum(paper_numbers(paper).table.nunique() for paper in PAPERS) == 46
    assert set(paper_sentences()) <= {(e.paper, e.name) for p in PAPERS for e in entries(p)}
    kept = reported_table('carl', 'table 12')
    assert (kept.did / kept.n * 100 - kept['rate, %']).abs().max() < .05
    hops = reported_table('carl', 'table 7')
    assert hops[['2 hops', '3 hops', '4 hops']].sum(axis=1).equals(hops['all']) and hops['all'].sum() == 100
    bins = reported_table('carl', 'table 4')
    assert bins.iloc[:4].sum().tolist() == bins.loc['all'].tolist()
    with pytest.raises(KeyError, match='numbers'): reported_table('carl', 'table 5')


def test_where_the_papers_files_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr('credit_rl.studies.papers.files', lambda package: tmp_path / 'site-packages' / package)
    monkeypatch.chdir(ROOT / 'nbs' / 'papers')
    assert papers_folder() == ROOT / 'data' / 'papers'
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match='data/papers'): papers_folder()


@pytest.mark.parametrize('row, model', [('Qwen2.5 3B', SMALL), ('Qwen2.5 7B', BIG),
                                        ('Qwen2.5 14B', 'Qwen/Qwen2.5-14B-Instruct'),
                                        ('Llama 3 8B', 'meta-llama/Llama-3.1-8B-Instruct'),
                                        ('Qwen3 4B', 'Qwen/Qwen3-4B-Instruct-2507')])
def test_the_formula_of_scoring_gives_the_papers_table(row, model):
    lengths = (400., 1219.2, 2038.4, 2857.6, 3676.8)                     # TIPS table 13
    shape = tables.teacher_shape(KNOWN_SIZES[model])
    assert scoring_flops(shape, lengths) == pytest.approx(report('tips', 'table 11').scoring[row], rel=1e-3)
    assert shape.dense == pytest.approx(report('tips', 'table 12')['N dense'][row], rel=1e-3)


# ---- the plan and the queue ----

def test_a_folder_says_what_is_set_over_its_file():
    rows = plan_entry(find_entry('tspo', 'table 4'), 'x', over={'steps': 3, 'ranks': 1, 'tests.questions': 20})
    assert [r.run.name for r in rows] == ['tspo_qwen2.5_3b,strategy=none,steps=3',
                                          'tspo_qwen2.5_3b,strategy=all,steps=3', 'tspo_qwen2.5_3b,steps=3']
    train, export, test = rows[0].works
    assert 'ranks=1' in test.words and 'questions=20' in test.words and f'model={export.folder}/model' in test.words
    assert rows[0].test.name.endswith('@best@eval_tspo,questions=20')
    for wrong in ('rank', 'critic.foo', 'tests.question', 'tests.steps'):
        with pytest.raises(ValueError, match=wrong.removeprefix('tests.')):
            plan_entry(find_entry('tspo', 'table 4'), 'x', over={wrong: 3})
    # what doesn't fit into a name is told apart by a checksum
    much = {f'tests.{n}': 'x' * 30 for n in ('protocol', 'system_prompt', 'user_prompt', 'baseline')}
    names = [plan_entry(find_entry('tspo', 'table 4'), 'x', over={**much, 'tests.seed': n})[0].test.name for n in (1, 2)]
    assert names[0] != names[1] and len(names[0].split('@')[-1]) == 80
    # a judge that is given is asked in place of all that files name, in small and at full size
    judge = {'base_url': 'http://here/v1', 'model': 'm'}
    for small, (paper, name) in ((s, e) for s in (False, True) for e in (('prs', 'table 1'), ('tips', 'table 4'))):
        asked = [w for w in all_works(plan_entry(find_entry(paper, name), 'x', small, {'judge': judge}))
                 if w.method == 'longform' or w.method == 'train' and 'judge' in w.config.options]
        assert len(asked) == (5 if paper == 'prs' else 1)
        assert all(judge in (w.given.get('judge'), w.given.get('options', {}).get('judge')) for w in asked)
    tuned = next(w for w in all_works(plan_entry(find_entry('carl', 'table 2'), 'x')) if w.method == 'sft')
    assert tuned.config.sft['calls'] and tuned.config.sft['per_question'] == 4
    carl = plan_entry(find_entry('carl', 'table 9'), 'x')
    warm = {r.label: next((w for w in r.works if w.method == 'warmup'), None) for r in carl}
    assert warm['7B CARL, cold'] is None and warm['7B CARL, random'].config.must_pass is False
    (row,) = [r for r in carl if r.label == '3B Search-R1 PPO, random']
    assert f'critic.warmed={row.works[2].folder}' in row.works[3].words and row.works[2].config.model == SMALL
    assert sum(r.label == '7B CARL, curated' for r in carl) == 3                            # seeds
    # what is known without tools is asked once a model, and read by warm-ups, logs, and what a run is examined on
    works = all_works(carl) + all_works(plan_entry(find_entry('carl', 'table 16'), 'x'))
    asked = [str(w.folder) for w in dict.fromkeys(works) if w.method == 'pool']
    assert len(asked) == 4 and sum('split=train' in place for place in asked) == 2
    for w in works:
        if w.method == 'competence':
            assert set(w.settings['pool']) < set(asked) and 1 < price(w)[0] < 30
            assert {'data=carl', 'questions=500', 'max_tokens=8192'} < {*w.words}
        if w.method not in ('train', 'warmup'): continue
        own = [place for place in asked if Path(w.config.model).name in place]
        if w.method == 'warmup': assert w.config.pool == own and len(own) == 2
        elif w.config.critic.warmed: assert w.config.log.pool == own[0]
    assert plan_lines(works)


def test_what_it_costs():
    """Seven billion parameters, of which a checkpoint holds 14 bytes each: two and one under way, and the weights of
    nine more and of the best."""
    rows = plan_entry(find_entry('tspo', 'figure 5'), 'x')
    assert len(rows) == 33 and {r.step for r in rows} == {*range(0, 501, 50)}
    train = rows[0].works[0]
    hours, size = price(train)
    from credit_rl.estimate import memory, read_sizes
    from credit_rl.setup import plan_of
    needs = memory(read_sizes(BIG), plan_of(train.config))
    assert size == 3 * needs['checkpoint'] + 10 * needs['best'] and 100 < hours < 2000
    assert price(rows[0].works[1]) == (0, 2 * KNOWN_SIZES[BIG].parameters)
    # a warm-up is not a training, a pool's answers are a turn, and a run by another model's teacher has its own size
    dearest, dear, cheap = (max(price(w)[0] for w in all_works(plan_entry(find_entry('carl', 'table 2'), 'x'))
                                if w.method == verb) for verb in ('train', 'pool', 'sft'))
    warm = [price(w)[0] for w in all_works(plan_entry(find_entry('carl', 'table 11'), 'x')) if w.method == 'warmup']
    assert max(warm) < .05 * dearest and cheap < dear < 100 and min(warm) < .5 * max(warm)      # cold: nothing is taught
    own, other = (next(w for w in r.works if w.method == 'train' and 'tips_qwen2.5_7b' in w.name)
                  for r in plan_entry(find_entry('tips', 'table 6'), 'x')[1:3])
    assert price(own)[0] == price(other)[0]
    table = plan_table(all_works(rows)[:3])
    assert {*table.state} == {'missing'} and '0 of 3 done' in plan_lines(all_works(rows)[:3])[1]


def test_a_folder_of_another_lineage_is_refused(tmp_path):
    (row, *_) = plan_entry(find_entry('tspo', 'table 4'), tmp_path)
    work = row.works[0]
    with RunLog(work.folder) as log:
        log.write_params({**flat(work.config), 'steps': 9, 'ranks': 1})
        log.summary({'method': 'tspo'})
    assert work.misfits() == ['steps is 9, wanted 500'] and 'another lineage' in row.lacks[0]
    with pytest.raises(ValueError, match='steps is 9'): make_works(row.works)
    with pytest.raises(ValueError, match='steps is 9'): draw_rows(find_entry('tspo', 'table 4'), [row])


def test_a_prompt_of_another_training_and_questions_that_were_trained_on_are_refused(tmp_path):
    "PRS's long answers: a run is not trained and judged on one file."
    (row, *_) = plan_entry(find_entry('tspo', 'table 4'), tmp_path)
    train, _, test = row.works
    with RunLog(train.folder) as log: log.summary({'prompt_hash': 'a'})
    evaluated(test.folder, nq=.5)
    manifest = {'prompt_hash': 'b', 'settings': flat(test.config), 'model': {'name': 'x'}}
    (test.folder / 'nq' / 'manifest.json').write_text(json.dumps(manifest))
    (test.folder / 'summary.json').write_text('{}')
    assert test.misfits() == ['its prompt is b, that of the training a']
    (tmp_path / 'pairs.jsonl').touch()
    with pytest.raises(ValueError, match='split'):
        plan_entry(find_entry('prs', 'table 1'), tmp_path, over={'path': str(tmp_path / 'pairs.jsonl')})


@pytest.mark.parametrize('paper, name', [('tspo', 'table 4')])
@pytest.mark.long
def test_a_small_entry_goes_through_and_goes_on(paper, name, tmp_path, capfd):
    entry = find_entry(paper, name)
    rows = plan_entry(entry, tmp_path, True)[:1]
    assert make_works(all_works(rows)[:2], say=lambda line: None) == {}
    assert [w.state for w in rows[0].works] == ['done', 'done', 'missing']
    said = []
    assert make_works(all_works(rows), say=said.append) == {} and rows[0].lacks == []
    assert not any(line.startswith(f'{rows[0].works[0].name}:') for line in said)           # what is done is left
    assert draw_rows(replace(entry, arguments={**entry.arguments, 'against': {}}), rows)[0].seeds.tolist() == [1]


# Entries that take a minute together; `make small` has all.
CHEAP = {'tips': ('table 10', 'table 12', 'figure 5', 'figure 12'), 'tspo': ('table 2', 'figure 6'),
         'igpo': ('figure 1', 'figure 4'), 'prs': ('figure 5',), 'carl': ('table 1', 'table 4', 'table 12')}


@pytest.mark.parametrize('paper', CHEAP)
@pytest.mark.long
def test_small_entries_are_made_and_drawn(paper, tmp_path):
    "CARL's too, whose 20 mini-batches are more than the rollouts of a small step."
    given = ['--small', '--run', '--draw', '--runs', str(tmp_path), '--out', str(tmp_path / 'out')]
    assert main(['reproduce', paper, *CHEAP[paper], *given]) == 0
    assert len([*(tmp_path / 'out').iterdir()]) == len(CHEAP[paper])
    if paper == 'carl':                                       # its warm-up has the tiers of the pool, and asks nothing
        (pool,), warm = tmp_path.glob('pool,model=tiny_carl*'), tmp_path / 'carl_qwen2.5_7b,warmup'
        data = read_collected(warm / 'rollouts-train.jsonl.gz')
        found = pool_tiers(pool, data.questions)
        assert data.tier.tolist() == [found[q.source, q.id] for q in data.questions] and {*found.values()} == {1, 2}


def test_the_verbs(capsys, tmp_path):
    assert main(['reproduce', 'tspo', 'table 4', '--runs', str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert '0 of 9 done' in said and 'tspo_qwen2.5_3b,strategy=none' in said
    assert main(['reproduce', 'tspo', 'table 4', '--runs', str(tmp_path), '--rows', 'none', 'all']) == 0
    assert '0 of 6 done' in capsys.readouterr().out
    with pytest.raises(SystemExit, match='nobody'): main(['reproduce', 'tspo', 'table 4', '--rows', 'nobody'])
    assert main(['reproduce', 'tspo', 'figure 3', '--run', '--draw']) == 0 and 'not measured' in capsys.readouterr().out
    with pytest.raises(SystemExit, match='no row is made'): main(['tables', 'tspo', 'table 4', '--runs', str(tmp_path)])
    with pytest.raises(SystemExit, match='numbered'): main(['reproduce', 'tips', 'table 7'])


# ---- what is drawn ----

def test_rewards_of_turns_have_the_outcome_in_them(tmp_path):
    log = begun(tmp_path / 'tspo')
    latent = ((0., 0., 0., 0.), (1., 1., 0., 0.), (0., 0., 0., 0.))
    log.turns(1, [{'kind': 'train', 'trajectory': to_json(t), 'reward': float(i == 0), 'turn_rewards': list(x)}
                  for i, (t, x) in enumerate(zip(example_group().trajectories, latent))])
    table = drawn('tspo', 'table 2', [RunRow('tspo', log.folder)])
    assert {kind: table.loc[kind].iloc[:4].tolist() for kind in ('O+P+', 'O-P+', 'O-P-')} == {
        'O+P+': [1, 1, 1, 1], 'O-P+': [1, 1, 0, 0], 'O-P-': [0, 0, 0, 0]}
    counts = drawn('tspo', 'table 1', [RunRow('tspo', log.folder)])
    assert counts.loc['all', 'all'] == 3


def test_questions_answered_by_yes_count_where_the_paper_counts_them(tmp_path):
    "TSPO table 1: 51,713 rollouts are all of them, those whose golds are yes or no too."
    log, t = begun(tmp_path / 'run'), example_group().trajectories[2]
    log.turns(1, [{'kind': 'train', 'trajectory': to_json(replace(t, question=replace(t.question, answers=('yes',))))}])
    row = RunRow('run', log.folder)
    assert drawn('tspo', 'table 1', [row]).loc['all', 'all'] == 1 and tables.process_table([row]).loc['all', 'all'] == 0


def test_what_was_asked_on_other_sets_is_pooled_by_hand(tmp_path):
    "CARL tables 12, 14 and 16, of two sets and what is no part of them; of a tiny run its own questions."
    def found(known, right, notes, value):
        play = {'1': {'EM': 0., 'n': 4 - known}, '2': {'EM': right, 'n': known}}
        kept = {'precision': value, 'tokens': 10., 'contexts': known}
        return {'tiers': {'1': 4 - known, '2': known}, 'base': {'no tools': play, 'notes': kept}, 'known_before': right,
                'notes': kept, 'broken': {'working': right, 'no tool': 1.},
                'critic': {'value': {'1': .25, '2': value}, 'notes': notes}}
    sets = {'hotpotqa': found(3, 1., [['kept', .2], ['kept', -.2], ['lost', -.1]], .5),
            'musique': found(1, 0., [['failed', .3], ['lost', .1]], .9), 'gsm8k': found(4, 1., [['kept', .1]], .7)}
    write_json(tmp_path / 'summary.json', {'competence_sets': sets})
    row = [RunRow('carl', tmp_path)]
    signs = DRAWINGS['sign_rates'](row, {'hotpotqa': 2, 'musique': 2})                # the first two of three
    assert signs.n.tolist() == [2, 1, 1] and signs.did[:2].tolist() == [1, 0]
    assert signs.rate[:2].tolist() == [.5, 0] and math.isnan(signs.rate.iloc[2])
    assert DRAWINGS['sign_rates'](row).n.tolist() == [3, 2, 1]
    broken = DRAWINGS['broken_table'](row, ['hotpotqa', 'musique']).loc['carl']
    assert broken.working == .75 and broken['no tool'] == 1 and broken['no tool, base'] == .75
    mechanism = DRAWINGS['mechanism_table'](row).loc['carl']
    assert mechanism['no tool, all, base'] == pytest.approx((.75 + 0 + 1) / 3) and mechanism['V, not known'] == .25
    assert mechanism['V, known'] == mechanism['note precision'] == pytest.approx((3 * .5 + .9 + 4 * .7) / 8)
    with pytest.raises(ValueError, match='was not examined on nq'): DRAWINGS['broken_table'](row, ['nq'])
    work = Work('competence', 0, tmp_path, {'data': 'hotpotqa', 'questions': 4}, None, (SimpleNamespace(folder=tmp_path),))
    assert not work.done                                                     # nobody says how many were asked
    for asked in (3, 4):
        sets['hotpotqa'] |= {'questions': asked, 'split': None}
        write_json(tmp_path / 'summary.json', {'competence_sets': sets})
        assert work.done == (asked == 4)
    write_json(tmp_path / 'summary.json', {'competence': sets['musique']})
    assert DRAWINGS['broken_table'](row, ['hotpotqa']).loc['carl', 'working'] == 0


def test_rows_are_compared_on_the_papers_sets(tmp_path):
    "TSPO table 4. A mean over seeds, its spread, the gain, and the paired difference."
    rows = [RunRow(label, None, assessed(made(tmp_path / f'{label}{seed}', 'tspo'), 2, em + seed / 10), seed)
            for label, em in (('none', .2), ('all', .3), ('all-wrong', .4)) for seed in (0, 1)]
    table = drawn('tspo', 'table 4', rows)
    assert table.columns[:5].tolist() == [*MULTI, 'mean'] and table.seeds.tolist() == [2, 2, 2]
    assert table['mean'].round(9).to_dict() == {'none': .25, 'all': .35, 'all-wrong': .45}
    assert table['±'].round(6).tolist() == [round(.1 / 2 ** .5, 6)] * 3
    assert table.gain.round(9).tolist()[1:] == [round(.35 / .25 - 1, 9), .8]
    assert table.difference.round(9).tolist()[1:] == [.1, .2]
    with pytest.raises(ValueError, match='lacks'):
        drawn('tspo', 'table 4', [RunRow('none', None, assessed(made(tmp_path / 'few', 'tspo'), 2, sets=('nq',)))])


def test_checkpoints_are_drawn_by_step_and_options_by_value(tmp_path):
    run = made(tmp_path / 'run', 'tspo', options={'alpha': .5})
    rows = [RunRow('TSPO', run, assessed(run, step, em), 0, step) for step, em in ((10, .1), (20, .4), (30, .2))]
    figure = drawn('tspo', 'figure 5', rows)
    assert [ax.get_title() for ax in figure.axes] == [*MULTI, 'mean of the sets']
    assert figure.axes[-1].lines[0].get_xydata().round(9).tolist() == [[10, .1], [20, .4], [30, .2]]
    lines = drawn('tspo', 'figure 7', rows[:1]).axes[0].lines
    assert len(lines) == len(SEVEN) + 1 and lines[-1].get_label() == 'mean' and lines[-1].get_xdata().tolist() == [.5]
    log = begun(tmp_path / 'logged', method='igpo', steps=2)
    for step in (1, 2): log.metrics(step, dev_f1=.6, dev_em=.1, trained_tokens=100)
    (ax,) = drawn('igpo', 'figure 5', [RunRow('IGPO', log.folder)]).axes
    assert ax.lines[0].get_xydata().tolist() == [[100, .6], [200, .6]]


def test_tokens_of_a_rollout_have_the_observations_in_them(tmp_path):
    (line,) = drawn('tspo', 'figure 6', [RunRow('x', made(tmp_path / 'run', 'tspo', played=1))]).axes[0].lines
    played = example_group().trajectories[0].turns
    assert line.get_ydata()[0] == sum(len(t.action_ids) + len(t.observation_ids) for t in played)


def test_the_teacher_scores_the_states_before_turns(tmp_path):
    "TIPS tables 11 and 13: S_0 is the prompt, and no state lies behind the answer."
    run = made(tmp_path / 'run', played=1, questions_per_step=256, group_size=1)
    t, table = example_group().trajectories[0], drawn('tips', 'table 13', [RunRow('x', run)])
    assert table.S.tolist() == [len(t.turns)] and table['L 0'].tolist() == [len(t.prompt_ids)]
    whole = len(t.prompt_ids) + sum(len(x.action_ids) + len(x.observation_ids) for x in t.turns[:-1])
    assert table['L max'].tolist() == [whole] == table[f'L {len(t.turns) - 1}'].tolist()


def test_a_row_draws_rollouts_of_its_own_run(tmp_path):
    "TIPS figures 5 and 8 to 11, token by token, of the last steps; not the largest advantage over all folders."
    t, runs = example_group().trajectories[0], {}
    for name, size in (('ppo', .1), ('tips', .2)):
        log = begun(tmp_path / name, method=name, steps=20, model='tiny')
        for step, shift in ((1, -5.), (20, 0.)):
            own = [[shift + size * i for i in range(len(x.action_ids))] for x in t.turns]
            log.turns(step, [{'kind': 'train', 'trajectory': to_json(t), 'reward': 1., 'token_advantages': own,
                              'advantages': [sum(x) / len(x) for x in own]}])
        runs[name] = RunRow(name, log.folder)
    ax, _ = drawn('tips', 'figure 5', [*runs.values()]).axes
    assert sum(bar.get_height() for bar in ax.patches) == sum(len(x.action_ids) for x in t.turns)
    titles = [drawn('tips', f'figure {n}', [runs[name]]).axes[0].get_title(loc='left') for n, name in
              ((10, 'tips'), (11, 'ppo'))]
    assert titles[0].startswith('tips: right') and titles[1].startswith('ppo: right') and 'turn by turn' in titles[0]
    (runs['ppo'].run / 'base').symlink_to(ROOT / 'data' / 'tiny_base')
    (ax,) = drawn('tips', 'figure 11', [runs['ppo']]).axes
    colours = {bar.get_facecolor() for bar in ax.patches if bar.get_facecolor()[3] > 0}
    assert 'token by token' in ax.get_title(loc='left') and len(colours) >= max(len(x.action_ids) for x in t.turns)
    with pytest.raises(ValueError, match='wrong'): drawn('tips', 'figure 8', [runs['ppo']])


def test_long_answers_are_rows_by_verdict(tmp_path):
    "PRS tables 1 and 5, figures 2, 3 and 6: the paper's rows, pass rates by a judge; what has no verdict is missing."
    rows = [RunRow(label, run := made(tmp_path / label[:2], 'prs+vspo', logged={'reward': .4}), judged(
        assessed(run, 2, sets=('pairs',)), rate), 0, 2) for label, rate in (('Untrained', .8), ('GRPO + PRS', .7))]
    table = drawn('prs', 'table 1', rows)
    assert {*table.index} < {*reported_table('prs', 'table 1').index}
    assert table['mean']['reference: Untrained'] == .8 and table['multi']['hallucination: GRPO + PRS'] == .9
    assert table['simple']['reference: GRPO + PRS'] != table['simple']['reference: GRPO + PRS']
    axes = drawn('prs', 'figure 2', rows).axes
    assert [ax.lines[0].get_ydata().round(9).tolist() for ax in axes] == [[.4, .4], [.8]]
    with pytest.raises(ValueError, match='judged'):
        score_table([RunRow('x', None, assessed(made(tmp_path / 'y'), 1, sets=('pairs',)))], ['reference_pass'])


def test_a_line_is_fitted_where_lengths_differ(tmp_path):
    rows = []
    for name, lengths in (('a', (100., 200.)), ('b', (100., 100.))):
        log = begun(tmp_path / name, method=name, steps=2)
        for step, tokens in enumerate(lengths, 1): log.metrics(step, tokens=tokens, seconds_step=2. + .03 * tokens)
        rows.append(RunRow(name, log.folder))
    table = DRAWINGS['regression_table'](rows)
    assert table.slope['a'] == pytest.approx(.03) and table.intercept['a'] == pytest.approx(2)
    assert table.slope['b'] != table.slope['b'] and table['mean length'].tolist() == [150, 100]


def test_settings_stand_beside_the_papers_with_their_source(tmp_path):
    table = DRAWINGS['settings_table']([RunRow('mine', made(tmp_path / 'run', options={'band': 'small'}))], 'tips_qwen2.5_7b')
    assert table.loc['steps'].tolist() == [500, 2, 'section 4']
    assert table.loc['options.band'].tolist()[:2] == ['medium', 'small'] and 'healthy' not in table.index
    asked = make_config({**yaml.safe_load(settings_file('carl_qwen2.5_7b').read_text()), 'run': 'x'})
    log = RunLog(tmp_path / 'carl')
    log.write_params(flat(asked))
    log.close()
    table = DRAWINGS['settings_table']([RunRow('mine', log.folder)], 'carl_qwen2.5_7b').drop(columns='source')
    assert {'critic.rate', 'critic.clip', 'adamw.clip', 'learner.stage'} <= {*table.index}
    assert [n for n, (paper, mine) in table.iterrows() if paper != mine and n != 'method'] == []
    sources = DRAWINGS['settings_table']([RunRow('mine', log.folder)], 'carl_qwen2.5_7b').source
    assert 'table 5' in sources['critic.backbone_rate']
    assert 'head 0' in sources['adamw.weight_decay'] and 'AdamW each' in sources['critic.step']


@pytest.mark.parametrize('name', ['grpo', 'dapo'])                         # which leaves such groups out
def test_groups_without_advantage_are_counted(name):
    "PRS figure 4 and IGPO figure 1: a task counts where none of its rollouts has an advantage."
    first = example_group()
    lost = Group(first.question, [first.trajectories[2]] * 3)
    method = get_method(name).bind({})
    found = credit_metrics(method, assign(method, [first, lost], look=lambda layout, asks: None))
    assert found['zero_groups'] == .5 and found['zero_advantage'] == .5


def test_a_rollout_that_teaches_nothing_says_nothing_of_a_critic():
    "A turn of the right one has no reward; a critic that knows every outcome explains all of the others."
    earned = lambda t, x: replace(t, turns=[replace(turn, reward=x) for turn in t.turns])
    own, outcome = example_group(), torch.tensor([1., 0, 0, 1, 0, 0])
    groups = [Group(own.question, [earned(t, math.nan if (b, i) == (0, 0) else 0.) for i, t in enumerate(own.trajectories)])
              for b in range(2)]
    knows = lambda layout, asks: Measured(values=outcome[layout.row_trajectory][:, None] * layout.trained)
    method = get_method('outcome+brought/gae').bind({})
    found = credit_metrics(method, assign(method, groups, knows), SimpleNamespace(where=lambda token_turns: token_turns >= 0))
    assert found['explained_variance'] == 1.


def test_tiers_are_of_five_tries_set_by_set(tmp_path):
    "CARL tables 1, 3 and 19."
    asked, known = {'hotpotqa': ['a', 'b', 'c', 'd'], 'gsm8k': ['e', 'f']}, {'a', 'e', 'f'}
    tries, few = [RunRow('tries', answered(tmp_path / f'{n} tries', BIG, {
        name: [(q, .2 * (q in known), 0, .8) for q in ids] for name, ids in asked.items()}, tries=n)) for n in (5, 4)]
    assert drawn('carl', 'table 1', [tries])['tier 1, tries'].to_dict() == {'hotpotqa': .75, 'gsm8k': 0}
    with pytest.raises(ValueError, match='tries'): drawn('carl', 'table 1', [few])
    played = {'hotpotqa': [('a', 1, 0, 1), ('b', 0, 1, 1), ('c', 1, 2, 1), ('d', 0, 0, 0), ('z', 0, 0, 1)],
              'gsm8k': [('e', 0, 0, 1)]}
    row = drawn('carl', 'table 3', [tries, RunRow('CARL', None, answered(tmp_path / 'eval', BIG, played))]).loc['CARL']
    assert (row['tool rate, tier 1'], row['tool rate, tier 2'], row['EM, tier 2']) == (2 / 3, 0, 1)
    assert row['wrong answers, tier 1'] == 1 / 3 and row['questions, tier 1'] == 3
    alone = drawn('carl', 'table 19', [replace(tries, label='tries 7B'), replace(tries, label='7B base, no tools')])
    assert alone['wrong answers, tier 1'].round(9).tolist() == [.8] and alone.index.tolist() == ['7B base, no tools']


def test_hops_are_counted_over_three_sets(tmp_path):
    sets = {'hotpotqa': [('a', 1, 1, 1)], '2wikimultihopqa': [('b', 0, 1, 1)], 'gsm8k': [('c', 1, 0, 1)],
            'musique': [('d', 1, 1, 1), ('e', 0, 1, 1), ('f', 1, 1, 1)]}
    hops = {'musique': {'d': 2, 'e': 3, 'f': 4}, '2wikimultihopqa': {'b': 4}}
    table = drawn('carl', 'table 18', [RunRow('eval', None, answered(tmp_path / 'eval', BIG, sets, hops=hops))])
    assert table['n, eval'].to_dict() == {'2 hops': 3, '3 hops': 1, '4 hops': 1}
    assert table['eval'].round(9).to_dict() == {'2 hops': round(2 / 3, 9), '3 hops': 0, '4 hops': 1}


def test_critics_are_those_of_warm_ups(tmp_path):
    "CARL tables 11 and 13, figures 2 and 4."
    log = begun(tmp_path / 'run', method='carl', steps=500)
    for step in range(0, 501, 25): log.metrics(step, gate_explained=.5 + step / 2000, explained_outcome=.1)
    table = drawn('carl', 'table 13', [RunRow('7B', log.folder)])
    assert table.index.tolist() == [*range(0, 501, 50)] and table['7B'].iloc[[0, -1]].tolist() == [.5, .75]
    warmed = []
    for kind, pairs in (('cold', [[.95, 0], [.05, 1]]), ('curated', [[.95, 1], [.05, 0]])):
        log = begun(tmp_path / kind, collected=kind, method='carl')
        log.summary({'collected': kind, 'method': 'carl', 'calibration': pairs})
        warmed.append(RunRow(kind, log.folder))
    bins = drawn('carl', 'table 11', warmed)
    assert bins.loc['AUC'].to_dict() == {'cold': 0, 'curated': 1} and bins.loc['0.9 to 1.0', 'curated'] == 1
    axes = drawn('carl', 'figure 2', [*warmed, RunRow('CARL', made(tmp_path / 'trained', 'carl'))]).axes
    assert {line.get_label(): line.get_ydata()[9] for line in axes[0].lines[:2]} == {'cold': 0, 'curated': 1}
    log, t = begun(tmp_path / 'valued', method='carl', steps=2), example_group().trajectories[0]
    known = replace(t, question=replace(t.question, meta={'tier': 2}))
    for step, value in ((1, .9), (2, .1)):
        log.turns(step, [{'kind': 'train', 'trajectory': to_json(known), 'values': [value]}])
    (ax,) = drawn('carl', 'figure 4', [RunRow('7B', log.folder)]).axes
    assert [bar.get_x() for bar in ax.patches if bar.get_height()] == pytest.approx([.9])


def test_errors_are_of_a_hundred_wrong_answers_to_musique(tmp_path):
    right, near, lost = example_group().trajectories
    for name in ('musique', 'hotpotqa'):
        log = RunLog(tmp_path / 'eval' / name)
        log.turns(0, [{'trajectory': to_json(t)} for t in [right] * 5 + [near] * 70 + [lost] * 70])
        (log.folder / 'scores.json').write_text(json.dumps({'score': .1}))
        (log.folder / 'manifest.json').write_text(json.dumps({'settings': {}, 'protocol': {'name': None}, 'metric': {'name': 'em'}}))
    table = drawn('carl', 'table 7', [RunRow('CARL', None, tmp_path / 'eval')])
    assert {key[1] for key in table.index} == {'musique'} and table['all'].sum() == 100


def test_what_was_trained_on_is_counted(tmp_path):
    test = assessed(made(tmp_path / 'run', 'tspo'), 2)
    (test / 'nq' / 'manifest.json').write_text(json.dumps({'settings': {}, 'questions': {'asked': 9, 'train_inside': 4}}))
    _, notes = draw_rows(find_entry('tspo', 'table 3'), [RunRow('7B TSPO', None, test)])
    assert notes == ['7B TSPO, nq: 4 of 9 questions were trained on']
