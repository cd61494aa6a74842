"""The papers' tables and figures: none is missing from the list, each that is said to be drawn is drawn from two-step
runs made here, and each command that is named is one."""
import math
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from credit_rl.studies import tables
from credit_rl.command import VERBS, main
from credit_rl.studies.competence import examine_run
from credit_rl.engine import ScriptedEngine
from credit_rl.estimate import KNOWN_SIZES
from credit_rl.evaluate import Evaluation, check_evaluation, run_evaluation
from credit_rl.studies.longform import run_longform
from credit_rl.potentials import scoring_flops
from credit_rl.studies.papers import (ABSENT, ENTRIES, LAST, Entry, count_states, entry_table, find_entry, numbered,
                              paper_numbers, paper_sentences, papers_folder, report, reported_table)
from credit_rl.parameters import by_group, from_settings, make_parser, read_settings
from credit_rl.prepare import prepare
from credit_rl.runlog import RunLog, read_metrics, read_turns
from credit_rl.settings import GROUPS, make_config
from credit_rl.setup import tiny_worlds
from credit_rl.studies.tables import DRAWINGS, draw_entry, entry_lines, gain_table, setting_gaps, settings_table, sort_folders
from credit_rl.tiny import NOISY_CODER, act_coder, memory_of, tiny_model, tiny_tokenizer
from credit_rl.train import train
from test_longform import by_numbers, gossip, settings_for
from judge_server import Stub
from made_runs import BIG, SEVEN, answered, assessed, judged, made

ROOT = Path(__file__).resolve().parents[2]
OF_RUNS = {*DRAWINGS} - {'trained_table', 'checkpoint_figure', 'option_figure', 'asking_rates', 'tier_table'}
DRAWN = [e for of in ENTRIES.values() for e in of if e.draw]
SMALL = dict(steps=2, eval_every=2, questions=20, dev_questions=6, test_questions=6, questions_per_step=4, group_size=4,
             threads=1, track='', log_rollouts=4)
WORLD = dict(size=300, hops=[1, 2], famous=dict(train=30, dev=15, test=15), easy=5, hard=5)
CODED = {**SMALL, 'protocol': 'carl-tiny', 'world': WORLD, 'learning_rate': 1e-3, 'recompute': True}
WARM = {**{k: v for k, v in CODED.items() if k not in ('steps', 'eval_every')}, 'method': 'carl', 'per_tier': 20,
        'clusters': 4, 'warm_steps': 2, 'warm_least': 1, 'warm_every': 1, 'warm_batch': 64, 'warm_rise': 1,
        'must_pass': False}


def quiet(line): pass


class Coder(ScriptedEngine):
    "A scripted coder where a random model would never call; the learner reads what it wrote for itself."
    def __init__(self, model, tokenizer, worlds, **limits):
        memory = {text: answer for w in worlds.values() for text, answer in memory_of(w).items()}
        super().__init__(lambda text, rng: act_coder(text, rng, NOISY_CODER, memory), tokenizer)
    def load(self, weights): pass
    def sleep(self): pass


def carl_runs(folder, patch):
    "A warm-up, and a run by CARL that begins with its critic and is examined."
    tokenizer, model = tiny_tokenizer(numbers=True), folder / 'coder'
    tiny_model(tokenizer, width=32, heads=1, feedforward=64).save_pretrained(model)
    tokenizer.save_pretrained(model)
    worlds = tiny_worlds(config := make_config({**CODED, 'method': 'carl', 'model': str(model)}), config.seed)
    patch.setattr('credit_rl.setup.HFEngine', lambda m, tokenizer, **limits: Coder(m, tokenizer, worlds))
    warm = prepare({**WARM, 'model': str(model), 'run': str(folder / 'runs' / 'warm')}, say=quiet)
    run = train({**CODED, 'method': 'carl', 'model': str(model), 'critic_from': str(warm),
                 'run': str(folder / 'runs' / 'carl-0')}, say=quiet)
    examine_run(run, say=quiet)


@pytest.fixture(scope='module')
def runs(tmp_path_factory, spoken):
    "Folders of every kind: trainings of two steps, a warm-up, an evaluation with hops, one of long answers, judged."
    folder = tmp_path_factory.mktemp('tables')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, 'is_available', lambda: False)
        patch.setenv('NO_PROXY', '127.0.0.1')
        for method, more in (('tips', {'options': {'band': 'medium'}, 'teacher_every': 1}), ('ppo', {}), ('tspo', {}),
                             ('prs+vspo', {}), ('igpo', {})):
            train({**SMALL, 'method': method, 'model': str(ROOT / 'data' / 'tiny_base'), 'measure':
                   ['belief', 'entropy'], 'run': str(folder / 'runs' / f'{method}-0'), **more}, say=quiet)
        rows = {'musique': str(ROOT / 'data' / 'rows' / 'musique.jsonl'),
                'hotpotqa': str(ROOT / 'data' / 'hotpotqa_sample.json')}
        run_evaluation({'data': [*rows], 'path': rows, 'model': spoken, 'run': str(folder / 'runs' / 'played'),
                        'max_turns': 2, 'turn_tokens': 6, 'passages': 2, 'questions': 2}, say=quiet, progress=False)
        with Stub(by_numbers) as stub:
            run_longform(settings_for(stub, folder / 'runs' / 'long'), engine=gossip(None), say=quiet, progress=False)
        carl_runs(folder, patch)
        yield folder / 'runs'


@pytest.fixture(scope='module')
def made_folders(tmp_path_factory):
    "Runs that were evaluated on seven sets and judged, at two steps, and tries without tools, made up."
    folder = tmp_path_factory.mktemp('made')
    for method in ('ppo', 'tips', 'tspo', 'igpo', 'prs+vspo'):
        made(folder / method, method, em=.4, logged={'reward': .4, 'kl': .01})
        for step, em in ((1, .3), (2, .4)): judged(assessed(folder / method, step, em, (*SEVEN, 'pairs')), em)
    for i in range(5):
        answered(folder / f'try-{i}', BIG, {'hotpotqa': [('a', i, 0, 1), ('b', 0, 0, 1)]}, 'direct', False)
    answered(folder / 'asked', BIG, {'hotpotqa': [('a', 1, 0, 1), ('b', 0, 1, 1)]})
    return folder


# ---- the list ----

def test_no_table_and_no_figure_is_missing():
    assert set(ENTRIES) == set(LAST) == {'tips', 'tspo', 'igpo', 'prs', 'carl'}
    for paper, of in ENTRIES.items():
        assert [e.name for e in of] == numbered(paper) and {e.paper for e in of} == {paper}
    assert len(entry_table()) == sum(map(sum, LAST.values())) - len(ABSENT) == count_states().loc['all', 'all']
    assert len(entry_table('prs')) == 14 and all(e.title and (e.command or e.state == 'illustration')
                                                 for of in ENTRIES.values() for e in of)


@pytest.mark.skipif('CREDIT_RL_PAPERS' not in os.environ, reason='CREDIT_RL_PAPERS is not set')
def test_the_numbers_are_those_of_the_papers_texts():
    """CREDIT_RL_PAPERS is a folder of their texts. Every number in one is in the list; all of the list are in it, but
    for IGPO, whose pictures are lost."""
    texts = [p.read_text(encoding='utf-8') for p in sorted(Path(os.environ['CREDIT_RL_PAPERS']).glob('*.txt'))]
    title = {'tips': 'INFORMATION-POTENTIAL', 'tspo': 'Double Homogenization', 'igpo': 'Information Gain-based',
             'prs': 'Progressive Reward Shaping', 'carl': 'Knowing When to Ask'}
    for paper, words in title.items():
        (text,) = [t for t in texts if words in t[:400]]
        found = {f'{"table" if kind == "Table" else "figure"} {n}'
                 for kind, n in re.findall(r'\b(Table|Figure|Fig\.) (\d+)\b', text)}
        listed = {e.name for e in ENTRIES[paper]}
        assert found <= listed, (paper, found - listed)
        if paper != 'igpo': assert found == listed, (paper, listed - found)
        assert {f'table {LAST[paper][0]}', f'figure {LAST[paper][1]}'} <= found


def settings_in(words):
    "The settings of a command credit-rl VERB, and of files that it names."
    parser = make_parser('x', 'About.')
    settings, _ = read_settings(parser, words, by_group(*GROUPS.values(), *Evaluation.__bases__))
    return settings


@pytest.mark.parametrize('command', sorted({e.command for of in ENTRIES.values() for e in of if e.command}))
def test_a_command_is_one(command, root, monkeypatch):
    "Its verb, its files and its settings are there."
    monkeypatch.chdir(root)
    for part in command.split(' && '):
        program, verb, *words = shlex.split(part)
        assert all(Path(w).exists() for w in [verb, *words] if w.endswith(('.yaml', '.ipynb')) and 'notebook' not in w)
        if program == 'credit-rl':
            assert verb in VERBS
            if verb == 'train': make_config(settings_in(words))
            if verb == 'evaluate':
                here = {'corpus': None, 'path': None, 'engine': 'hf', 'vllm': {}}       # no server, and no vLLM
                check_evaluation(from_settings(Evaluation, settings_in(words) | here))
        else: assert program in ('papermill', 'lm_eval')


def test_what_the_papers_report_is_read():
    assert {path.stem for path in papers_folder().glob('*.csv')} == {*ENTRIES, 'said'}
    for paper in ENTRIES:
        numbers = paper_numbers(paper)
        assert list(numbers) == ['table', 'unit', 'row', 'column', 'value']
        assert numbers.drop(columns='value').notna().all(axis=None)
        for name, rows in numbers.groupby('table'):
            table = reported_table(paper, name)
            assert table.size == len(rows) and rows.unit.nunique() == 1 and table.notna().any(axis=None)
            assert find_entry(paper, name).draw != 'settings_table' and report(paper, name).equals(table)
    assert sum(paper_numbers(paper).table.nunique() for paper in ENTRIES) == 46
    assert set(paper_sentences()) <= {(e.paper, e.name) for of in ENTRIES.values() for e in of}
    kept = reported_table('carl', 'table 12')
    assert (kept.did / kept.n * 100 - kept['rate, %']).abs().max() < .05
    hops = reported_table('carl', 'table 7')
    assert hops[['2 hops', '3 hops', '4 hops']].sum(axis=1).equals(hops['all']) and hops['all'].sum() == 100
    bins = reported_table('carl', 'table 4')
    assert bins.iloc[:4].sum().tolist() == bins.loc['all'].tolist()
    with pytest.raises(KeyError, match='no numbers'): reported_table('carl', 'table 5')


def test_where_the_papers_numbers_are_looked_for(root, tmp_path, monkeypatch):
    "Beside the package, and in the project of the current folder; else it is said where."
    assert papers_folder() == root / 'data' / 'papers'
    monkeypatch.setattr('credit_rl.studies.papers.files', lambda package: tmp_path / 'site-packages' / package)
    monkeypatch.chdir(root / 'nbs' / 'papers')
    assert papers_folder() == root / 'data' / 'papers'
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match='neither .*site-packages/data/papers nor '): papers_folder()


@pytest.mark.parametrize('paper, model', [('Qwen2.5 3B', 'Qwen/Qwen2.5-3B-Instruct'),
                                          ('Qwen2.5 7B', 'Qwen/Qwen2.5-7B-Instruct'),
                                          ('Qwen2.5 14B', 'Qwen/Qwen2.5-14B-Instruct'),
                                          ('Llama 3 8B', 'meta-llama/Llama-3.1-8B-Instruct'),
                                          ('Qwen3 4B', 'Qwen/Qwen3-4B-Instruct-2507')])
def test_the_formula_of_scoring_gives_the_papers_table(paper, model):
    lengths = (400., 1219.2, 2038.4, 2857.6, 3676.8)                     # TIPS table 13
    shape = tables.teacher_shape(KNOWN_SIZES[model])
    assert scoring_flops(shape, lengths) == pytest.approx(report('tips', 'table 11').scoring[paper], rel=1e-3)
    assert shape.dense == pytest.approx(report('tips', 'table 12')['N dense'][paper], rel=1e-3)


# ---- drawn ----

@pytest.mark.parametrize('entry', DRAWN, ids=lambda e: f'{e.paper}, {e.name}')
@pytest.mark.long
def test_each_is_drawn_from_runs_of_two_steps(entry, runs, made_folders, root, monkeypatch):
    monkeypatch.chdir(root)
    drawing = draw_entry(entry, [runs if entry.draw in OF_RUNS else made_folders])
    if hasattr(drawing, 'columns'): assert len(drawing) and drawing.notna().any(axis=None)
    else: assert sum(len(ax.lines) + len(ax.patches) + len(ax.collections) + len(ax.texts) for ax in drawing.axes) > 1


def test_every_drawing_is_of_an_entry():
    assert {e.draw for e in DRAWN} == set(DRAWINGS) and all(f.__name__ == name for name, f in DRAWINGS.items())


@pytest.mark.long
def test_tables_hold_what_the_folders_say(runs):
    found = draw_entry(find_entry('tips', 'table 14'), [runs]).loc['tips (tiny_base)']
    steps = read_metrics(runs / 'tips-0').dropna(subset=['seconds_step'])
    assert found['a step'] == pytest.approx(steps.seconds_step.mean())
    assert found.overhead == pytest.approx(steps.seconds_teacher.mean()
                                           / (steps.seconds_step - steps.seconds_teacher).mean())
    counts = tables.process_table([runs / 'tspo-0'])
    kept = [r for r in read_turns(runs / 'tspo-0') if r['kind'] == 'train']
    assert counts.loc['all', 'all'] == len(kept) == 32
    gains = gain_table([runs], ('options.band',))
    ppo = gains.gain['ppo (tiny_base)']
    assert ppo == pytest.approx(0, abs=1e-12) or math.isnan(ppo)
    assert 'tips: band medium (tiny_base)' in gains.index
    assert math.isnan(gains.gain['carl (coder)'])                    # another model, and it was asked other questions
    drawn = gain_table([runs], ('options.temperature', 'options.smoothing', 'options.clip'))   # as they are
    assert 'prs+vspo: temperature 0.1, smoothing 2, clip True (tiny_base)' in drawn.index
    table = draw_entry(find_entry('carl', 'table 4'), [runs])['warm']
    assert table['all'] == table.drop('all').sum() and any(n.startswith('tier 1, forced') for n in table.index)
    kinds = sort_folders([runs])
    assert {k: len(v) for k, v in kinds.items()} == {'training': 6, 'warm-up': 1, 'evaluation': 2}


def test_a_line_is_fitted_where_lengths_differ(tmp_path):
    for name, lengths, slope in (('a', (100., 200.), .03), ('b', (100., 100.), math.nan)):
        log = RunLog(tmp_path / name)
        log.write_params({'method': name, 'seed': 0, 'steps': 2})
        for step, tokens in enumerate(lengths, 1): log.metrics(step, tokens=tokens, seconds_step=2. + .03 * tokens)
    table = tables.regression_table([tmp_path])
    assert table.slope['a'] == pytest.approx(.03) and table.intercept['a'] == pytest.approx(2)
    assert math.isnan(table.slope['b']) and table['mean length'].tolist() == [150, 100]


def test_two_runs_of_one_name_and_seed_are_refused(tmp_path):
    for name in 'ab':
        log = RunLog(tmp_path / name)
        log.write_params({'method': 'grpo', 'seed': 0, 'steps': 1})
        log.metrics(1, tokens=3.)
    with pytest.raises(ValueError, match='both grpo with seed 0'): tables.curve_figure([tmp_path], ['tokens'])


def test_settings_that_differ_are_listed_with_their_source(runs, root, monkeypatch):
    monkeypatch.chdir(root)
    table = settings_table([runs / 'tips-0'], 'tips_qwen2.5_7b', differ=True)
    assert table.loc['steps'].tolist() == [500, 2, 'section 4'] and 'options.band' not in table.index
    assert len(settings_table([runs / 'tips-0'], 'tips_qwen2.5_7b')) > len(table)
    lines = setting_gaps('carl', [runs / 'played'])
    assert 'played: passages is 2, in the paper 3 (section 4.1, k)' in lines
    monkeypatch.chdir(runs)
    with pytest.raises(FileNotFoundError, match='inside the checkout'): settings_table([runs / 'tips-0'], 'carl_x')


def test_what_is_not_in_the_folders_is_said_with_the_command(runs, tmp_path):
    with pytest.raises(ValueError, match='not run: .*runs of evaluation, got 1 of training; credit-rl evaluate'):
        draw_entry(find_entry('tips', 'table 8'), [runs / 'tips-0'])
    with pytest.raises(ValueError, match='table 15.*not run; credit-rl export .* lm_eval'):
        draw_entry(find_entry('carl', 'table 15'), [runs])
    with pytest.raises(ValueError, match='illustration$'): draw_entry(find_entry('prs', 'figure 1'), [runs])
    with pytest.raises(ValueError, match='was examined: credit-rl competence'):
        draw_entry(find_entry('carl', 'table 16'), [runs / 'tips-0'])
    with pytest.raises(ValueError, match='its tables are numbered to 16'): find_entry('tips', 'table 7')
    with pytest.raises(ValueError, match='the papers are'): find_entry('ppo', 'table 1')
    (tmp_path / 'empty').mkdir()
    with pytest.raises(ValueError, match='holds no run'):
        draw_entry(find_entry('tips', 'table 14'), [tmp_path / 'empty'])


def test_the_verb_prints_the_list_and_writes_what_is_drawn(runs, tmp_path, root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    main(['tables', 'igpo'])
    said = capsys.readouterr().out
    assert all(f'{e.name}: {e.title}; {e.state}' in said for e in ENTRIES['igpo'])
    main(['tables', 'tips', str(runs / 'tips-0'), str(runs / 'ppo-0'), '--out', str(tmp_path)])
    said = capsys.readouterr().out
    assert said.count('\n==') + 1 == len(ENTRIES['tips']) and 'the paper:' in said and 'these runs:' in said
    assert 'tips, table 8 (settings of the retrieval server): not run' in said and 'settings that differ' in said
    assert {'tips_table_14.csv', 'tips_figure_5.png', 'tips_figure_12.png'} <= {p.name for p in tmp_path.iterdir()}
    assert 'tips-0: steps is 2, in the paper 500 (section 4)' in said
    with pytest.raises(SystemExit, match='table 7'): main(['tables', 'tips', '--only', 'table 7'])
    assert entry_lines(Entry('tips', 'figure 3', 'x', 'curve_figure', {'metrics': ('em',)}), [runs / 'tips-0'])[-1] == (
        'a figure: give --out FOLDER')


def test_every_paper_file_is_there(root):
    for files in tables.FILES.values():
        for name in files.values(): assert yaml.safe_load((root / 'runs' / 'params' / f'{name}.yaml').read_text())
