"""A comparison killed, resumed and reported: which runs are made, or made again, and what is said of failures."""
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import yaml
from scipy import stats

from credit_rl import compare
from credit_rl.compare import (common_seeds, curve_panels, effort_table, load_runs, main, markdown_table, dev_area,
                               learning_curves, pack_runs, paired_differences, plan_jobs, sampled_right, seed_curves,
                               setting_differences)
from credit_rl.jobs import Job, run_jobs
from credit_rl.runlog import RunLog, module_hashes, read_summary
from made_runs import begun

SCORES = {'em': .5, '1': .7, '2': .4, '3': .3}


def made_up(folder, method, seed, final=.5, steps=4, finished=True, params={}, **summary):
    "A run folder of invented numbers."
    log = begun(folder / f'{method}-{seed}', **dict(method=method, seed=seed, steps=steps, data='tiny') | params)
    for step in range(steps + 1):
        log.metrics(step, dev_em=.2 + .3 * step / steps, **({'reward': .1 * step, 'trajectories': 8} if step else {}))
    if finished:
        log.summary({'method': method, 'seed': seed, 'base_em': .2, 'final_em': final, 'questions': 60, 'seconds': 30,
                     'ceiling': {**SCORES, 'all': .9}, 'base': SCORES, 'final': {**SCORES, 'em': final}, **summary})
    return log.folder


# What the fake of 90_train does, given its parameters: writes a run folder. It fails where a file FAIL-METHOD-SEED
# stands beside the runs.
FAKE = textwrap.dedent(
    """
    import json, os, pathlib
    folder = pathlib.Path(run)
    with open(folder.parent/'started.jsonl', 'a') as f:
        f.write(json.dumps({'run': folder.name, 'method': method, 'resume': resume, 'model': model, 'steps': steps,
                            'threads': os.environ['OMP_NUM_THREADS']}) + '\\n')
    from credit_rl.runlog import RunLog
    log = RunLog(run, resume)
    log.write_params({'method': method, 'seed': seed, 'steps': steps, 'data': 'tiny', 'run': run}, may_change=['steps'])
    log.cut(-1)
    log.metrics(0, dev_em=0.2)
    if (folder.parent/f'FAIL-{folder.name}').exists(): raise RuntimeError(f'{method} fell over a chair')
    log.metrics(steps, dev_em=0.5, reward=0.5, trajectories=8)
    scores = {'em': 0.5, '2': 0.5}
    log.summary({'method': method, 'seed': seed, 'base_em': 0.2, 'final_em': 0.5 + seed / 100, 'questions': 60,
                 'seconds': 30, 'base': scores, 'final': scores})
"""
)
DEFAULTS = {'method': 'grpo', 'seed': 0, 'run': 'runs/x', 'model': 'elsewhere', 'steps': 4, 'resume': False}


real_command = compare.papermill_command


def fake_command(job, notebook, model=None):
    "Stands for `papermill_command`: the fake as a plain script, which starts in no time."
    told = json.loads(real_command(job, notebook, model)[-1])
    given = DEFAULTS | {k: v for k, v in told.items() if k in DEFAULTS} | {'resume': job.begun}
    return [sys.executable, '-c', '\n'.join(f'{k} = {v!r}' for k, v in given.items()) + FAKE]


def started(out):
    "Names of the runs that were begun, in order; with a star where they were told to resume."
    lines = map(json.loads, (out / 'started.jsonl').read_text().splitlines())
    return [line['run'] + '*' * line['resume'] for line in lines]


@pytest.fixture
def settings(tmp_path):
    "A parameters file whose model is not the tiny one, so that no base is made."
    (tmp_path / 'params.yaml').write_text('steps: 4\nmodel: elsewhere\n')
    return tmp_path / 'params.yaml'


def arguments(settings, out, methods='grpo tspo', seeds='1 2', **more):
    "Arguments of the command. The fake stands for both notebooks."
    given = {'methods': methods, 'seeds': seeds, 'params': settings, 'out': out, 'workers': 2, 'notebook': __file__,
             'report': __file__, **more}
    return [word for name, value in given.items() for word in (f'--{name}', *str(value).split())]


@pytest.fixture
def reports(monkeypatch):
    "What is reported where a plain script makes each run: a list of (folder, names of runs, baseline)."
    found = []
    monkeypatch.setattr(compare, 'papermill_command', fake_command)
    monkeypatch.setattr(compare, '_report', lambda notebook, out, folders, baseline, say: found.append(
        (out.name, [f.name for f in folders], baseline)) or True)
    return found


def test_only_what_is_missing_is_made(tmp_path, settings, reports, capsys):
    out = tmp_path / 'runs'
    out.mkdir()
    (out / 'FAIL-tspo-1').touch()

    assert main(arguments(settings, out)) == 1
    said = capsys.readouterr().out
    assert sorted(started(out)) == ['grpo-1', 'grpo-2', 'tspo-1', 'tspo-2']
    assert 'tspo, seed 1 failed: RuntimeError: tspo fell over a chair' in said and '3 of 4 done, 1 failed' in said
    table = [line.split() for line in said.splitlines()]
    for line in ('grpo 1 to do', 'grpo 1 done 4/4 0.500', 'tspo 1 FAILED 0/4 0.200'): assert line.split() in table
    # seed by seed; the failed run is left out, the report is made
    assert reports.pop()[1:] == (['grpo-1', 'grpo-2', 'tspo-2'], 'grpo')

    (out / 'FAIL-tspo-1').unlink()
    assert main(arguments(settings, out)) == 0
    assert started(out)[4:] == ['tspo-1*'] and len(reports.pop()[1]) == 4
    assert main(arguments(settings, out)) == 0 and len(started(out)) == 5

    settings.write_text('steps: 5\nmodel: elsewhere\n')
    with pytest.raises(SystemExit, match='asked'):
        main(arguments(settings, out))
    assert len(started(out)) == 5


def test_each_seed_has_one_base(tmp_path, monkeypatch):
    import credit_rl.tiny
    made = []
    monkeypatch.setattr(credit_rl.tiny, 'make_base', lambda folder, seed, **more: made.append(
        (folder, seed, more['known'])) or folder)
    jobs = [Job(m, s, tmp_path / f'{m}-{s}') for s in (1, 2) for m in ('grpo', 'tspo')]
    for job in jobs[:2]:
        made_up(tmp_path, job.method, job.seed)
    # nothing of seed 1 is to do
    assert compare._bases(jobs, tmp_path / 'bases', print) == dict.fromkeys(jobs[2:], tmp_path / 'bases' / '2')
    assert made == [(tmp_path / 'bases' / '2', 2, ())]
    assert compare._bases([Job('grpo', 3, tmp_path / 'x', {'model': 'a/b'})], tmp_path, print) == {} and len(made) == 1
    carl = Job('carl', 2, tmp_path / 'y', {'protocol': 'carl-tiny'})                  # of other words, so another base
    assert compare._bases([carl], tmp_path / 'bases', print) == {carl: tmp_path / 'bases' / 'carl-2'}


def test_a_regime_has_bases_of_its_own(tmp_path, monkeypatch):
    "They are made by their command, which a comparison that lacks them names before anything is computed."
    monkeypatch.chdir(tmp_path)
    jobs = [Job('grpo', 2, tmp_path / str(i), settings) for i, settings in enumerate(
        ({'regime': 'far'}, {'regime': 'near-miss'}, {'regime': 'mixed', 'model': 'a/b'}))]
    (tmp_path / 'data' / 'bases' / 'near-miss-2').mkdir(parents=True)
    with pytest.raises(ValueError, match='credit_rl.studies.regimes far seed=2$'): compare._check_regimes(jobs)
    (tmp_path / 'data' / 'bases' / 'far-2').mkdir()
    compare._check_regimes(jobs)
    assert compare._bases(jobs, tmp_path / 'bases', print) == {}


def test_worlds_and_variants(tmp_path, settings, reports):
    "Each world has a folder and a report; a variant runs under its own name, with settings of its own."
    worlds = {'a': {'model': 'base-a'}, 'b': {'model': 'base-b', 'steps': 5}}
    methods = {'half': {'method': 'tspo'}, 'grpo': {'model': 'mine'}}
    settings.write_text(yaml.safe_dump({'steps': 4, 'method': 'tspo', 'seed': 7, 'worlds': worlds, 'methods': methods}))
    assert main(arguments(settings, tmp_path / 'runs', 'grpo half', '1')) == 0
    assert reports == [('a', ['grpo-1', 'half-1'], 'grpo'), ('b', ['grpo-1', 'half-1'], 'grpo')]
    lines = [json.loads(line) for w in 'ab'
             for line in sorted((tmp_path / 'runs' / w / 'started.jsonl').read_text().splitlines())]
    assert [(x['run'], x['method'], x['model'], x['steps']) for x in lines] == [
        ('grpo-1', 'grpo', 'mine', 4), ('half-1', 'tspo', 'base-a', 4),
        ('grpo-1', 'grpo', 'mine', 5), ('half-1', 'tspo', 'base-b', 5)]
    with pytest.raises(SystemExit, match="did you mean 'half'|no method 'halff'"):
        main(arguments(settings, tmp_path / 'runs', 'halff', '1'))


# A run that holds its folder and says that it began, then waits for a file `go` (or gives up), then is done.
PATIENT = """
import pathlib, sys, time
from credit_rl.runlog import Hold
folder = pathlib.Path(sys.argv[1])
held = Hold(folder)
with open(folder/'begun', 'a') as f: f.write('x')
for _ in range(600):
    if (folder.parent/'go').exists(): break
    time.sleep(.1)
else: sys.exit('nobody said go')
(folder/'summary.json').write_text('{}')
"""
SITTING = """
import sys, pathlib
from credit_rl.jobs import Job, run_jobs
run_jobs([Job('a', 1, pathlib.Path(sys.argv[1]))], lambda job: [sys.executable, '-c', sys.argv[2], job.folder])
"""


@pytest.mark.parametrize('sign, times', [(signal.SIGKILL, 1), (signal.SIGINT, 2), (signal.SIGTERM, 2)], ids=str)
def test_a_command_that_ends_early(tmp_path, root, sign, times):
    "Killed, its process runs on and the next command waits for it. Interrupted or told to end, it ends its process."
    job = Job('a', 1, tmp_path / 'a-1')
    begun = job.folder / 'begun'
    first = subprocess.Popen([sys.executable, '-c', SITTING, job.folder, PATIENT], cwd=root, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)
    while not (begun.exists() and begun.read_text()):   # an empty file is one that it has opened and not written yet
        assert first.poll() is None
        time.sleep(.01)
    first.send_signal(sign)
    first.wait()
    said = []

    def say(line):
        said.append(line)
        (tmp_path / 'go').touch()

    assert run_jobs([job], lambda job: [sys.executable, '-c', PATIENT, job.folder], say=say) == {} and job.done
    assert begun.read_text() == 'x' * times and ('waiting' in said[0]) == (sign == signal.SIGKILL)


def test_through_papermill(tmp_path, settings, root, run_python):
    "The command itself: one run by a notebook that stands for 90_train, and the real report."
    import nbformat
    from nbformat.v4 import new_code_cell, new_notebook
    out = tmp_path / 'runs'
    parameters = new_code_cell('\n'.join(f'{k} = {v!r}' for k, v in DEFAULTS.items()),
                               metadata={'tags': ['parameters']})
    kernel = {'kernelspec': {'display_name': 'python3', 'language': 'python', 'name': 'python3'}}
    nbformat.write(new_notebook(cells=[parameters, new_code_cell(FAKE)], metadata=kernel), tmp_path / '90.ipynb')
    made_up(out, 'tspo', 1, final=.6, params={'run': 'x'})             # done before
    said = run_python('-m', 'credit_rl.compare', *arguments(
        settings, out, seeds='1', notebook=tmp_path / '90.ipynb', report=root / 'nbs' / '94_compare.ipynb', workers=1))
    assert 'grpo, seed 1: done  [2 of 2 done, 0 failed]' in said
    (line,) = map(json.loads, (out / 'started.jsonl').read_text().splitlines())
    assert line == {'run': 'grpo-1', 'method': 'grpo', 'resume': False, 'model': 'elsewhere', 'steps': 4,
                    'threads': str(os.cpu_count())}
    by = [f'dev_em_by_{x}.png' for x in ('step', 'trajectories', 'seconds')]
    assert {p.name for p in (out / 'figures').iterdir()} == {*by, 'grpo-1.png', 'tspo-1.png'}
    outputs = [o for c in nbformat.read(out / 'report.ipynb', 4).cells for o in c.get('outputs', [])]
    assert not [o for o in outputs if o.output_type == 'error']
    assert sum('image/png' in o.get('data', {}) for o in outputs) == 5
    assert '| tspo | 1 |' in (out / 'table.md').read_text()
    assert any('tspo − grpo' in o.get('data', {}).get('text/html', '') for o in outputs)


def test_what_no_run_would_take_is_refused_before_the_first(tmp_path, settings, monkeypatch):
    monkeypatch.setattr(compare, 'run_jobs', lambda *a, **k: pytest.fail('something was begun'))
    monkeypatch.setattr(compare, '_bases', lambda *a, **k: pytest.fail('a base was begun'))
    good = 'steps: 4'
    for text, more, message in (
            ('stpes: 4', {}, "'steps'"), ('- steps', {}, 'lines'), ('steps: many', {}, "'many'"),
            (good, {'baseline': 'tpso'}, 'tpso'), (good, {'methods': 'grppo'}, "'grpo'"), (good, {'workers': 0}, 'least'),
            (good, {'params': 'none.yaml'}, 'none.yaml'), (good, {'notebook': 'none.ipynb'}, 'none.ipynb')):
        settings.write_text(text)
        with pytest.raises(SystemExit, match=message): main(arguments(settings, tmp_path / 'runs', **more))
    assert not (tmp_path / 'runs').exists()


# ---- tables ----

def test_differences_are_paired_by_seed(tmp_path):
    for seed, luck in ((1, 0), (2, .2), (3, -.1), (4, .1), (5, 0)):
        made_up(tmp_path, 'grpo', seed, .5 + luck)
        made_up(tmp_path, 'tspo', seed, .5 + luck + (.04 if seed % 2 else .01))
    row = paired_differences(tmp_path).loc['tspo − grpo']
    apart = [.04, .01, .04, .01, .04]
    assert row['mean difference'] == pytest.approx(.028)
    assert (row.low, row.high) == pytest.approx(stats.t.interval(.95, 4, .028, stats.sem(apart)), rel=1e-3)
    assert row['better in'] == '5 of 5' and row.seeds == 5 and row.says == 'ahead'
    assert row.p == pytest.approx(stats.ttest_1samp(apart, 0).pvalue)
    back = paired_differences(tmp_path, baseline='tspo').loc['grpo − tspo']
    assert abs(back['mean difference'] + row['mean difference']) < 1e-12 and back['better in'] == '0 of 5'
    with pytest.raises(KeyError, match="'final_f1'"):
        paired_differences(tmp_path, 'final_f1')


def test_the_area_under_a_development_curve_is_compared(tmp_path):
    "By hand: .1, .5, .5 at steps 0, 10, 20 have an area of .4. What logs no steps has none, and is compared without."
    for method, curve in (('grpo', (.1, .5, .5)), ('tspo', (.1, .1, .5)), ('sft', ())):
        made_up(tmp_path, method, 1, .5)
        folder = tmp_path / f'{method}-1'
        (folder / 'metrics.jsonl').unlink()
        lines = [json.dumps({'step': 10 * i, 'dev_em': em}) for i, em in enumerate(curve)]
        if lines: (folder / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
    assert dev_area(tmp_path / 'grpo-1') == pytest.approx(.4)
    table = paired_differences(tmp_path, 'dev_area')['mean difference']
    assert table['tspo − grpo'] == pytest.approx(-.2) and math.isnan(table['sft − grpo'])
    assert paired_differences(tmp_path)['mean difference'].tolist() == [0, 0]


@pytest.mark.parametrize('share', [False, True], ids=['exact match', 'a share of parts'])
def test_what_was_sampled_is_compared(tmp_path, share):
    "By hand: the mean over the steps, of what the outcome says where right is a share; stages and F1 are no share."
    of, rows = ('reward', {'dev_right': .3}) if share else ('em', {})
    for method, steps in (('grpo', (.1, .5)), ('tspo', (.2, .6)), ('prs', (.4, .4)), ('igpo', (.5, .3)), ('sft', ())):
        made_up(tmp_path, method, 1, .5)
        folder = tmp_path / f'{method}-1'
        (folder / 'metrics.jsonl').unlink()
        lines = [{'step': 0, 'dev_em': .9, **rows}, *({'step': i + 1, of: x} for i, x in enumerate(steps))]
        if steps: (folder / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, lines)) + '\n')
    assert sampled_right(tmp_path / 'grpo-1') == pytest.approx(.3)
    table = paired_differences(tmp_path, 'sampled_right')['mean difference']
    assert table['tspo − grpo'] == pytest.approx(.1) and math.isnan(table['sft − grpo'])
    for other in ('prs − grpo', 'igpo − grpo'):
        assert math.isnan(table[other]) if share else table[other] == pytest.approx(.1), other


def test_what_cannot_be_paired_is_refused(tmp_path):
    for method, seeds in (('grpo', (1, 2)), ('tspo', (2, 3))):
        for seed in seeds:
            made_up(tmp_path, method, seed)
    made_up(tmp_path, 'prs', 2, finished=False)
    kept, left_out = common_seeds(tmp_path)
    assert [f.name for f in kept] == ['grpo-2', 'tspo-2']
    assert len(left_out) == 3 and 'prs-2 has not finished' in left_out
    made_up(tmp_path, 'tips', 2, params={'data': 'hotpotqa'})
    with pytest.raises(ValueError, match='different'):
        paired_differences(kept + [tmp_path / 'tips-2'])
    made_up(tmp_path / 'again', 'tspo', 2)
    with pytest.raises(ValueError, match='tspo'):
        load_runs([tmp_path / 'tspo-2', tmp_path / 'again' / 'tspo-2'])


def test_variants_are_called_as_the_sweep_calls_them(tmp_path):
    "Two variants may differ in settings that are no options, such as how often a teacher is refreshed."
    for job in plan_jobs(['tips', 'tips-every4'], [7],
                         {'methods': {'tips-every4': {'method': 'tips', 'teacher_every': 4}}}, tmp_path):
        made_up(tmp_path, job.method, 7, params={'method': job.method, **job.settings})
    assert set(load_runs(tmp_path).method) == set(effort_table(tmp_path).index) == {'tips', 'tips-every4'}


def test_runs_of_one_name_and_runs_without_steps_are_compared_or_refused(tmp_path):
    for sweep, rate in (('a', 1e-6), ('b', 1e-3)): made_up(tmp_path / sweep, 'grpo', 1, params={'learning_rate': rate})
    both = [tmp_path / 'a' / 'grpo-1', tmp_path / 'b' / 'grpo-1']
    assert setting_differences(both).learning_rate.tolist() == [1e-6, 1e-3]
    curve_panels(load_runs(tmp_path / 'a'))                                                  # the baseline alone
    log = begun(tmp_path / 'a' / 'warm-1', method='carl', seed=1, data='tiny')
    log.summary({'passed': True})
    assert [f.name for f in common_seeds(tmp_path / 'a')[0]] == ['grpo-1']
    with pytest.raises(SystemExit, match='nothing was learned'): main([str(both[0]), str(log.folder)])
    with pytest.raises(SystemExit, match='nowhere'): main([str(both[0]), str(tmp_path / 'nowhere')])


def test_a_run_of_trl_is_packed_once_its_last_step_is_logged(tmp_path):
    "TRL writes no summary."
    made_up(tmp_path, 'grpo', 1, finished=False)
    cut = begun(tmp_path / 'tspo-1', steps=4)
    cut.metrics(3, dev_em=.2)
    with pytest.raises(ValueError, match='tspo-1'): pack_runs(tmp_path)
    cut.metrics(4, dev_em=.2)
    assert pack_runs(tmp_path, remove=True) == 2 and load_runs(tmp_path).groupby('run').step.max().tolist() == [4, 4]


@pytest.mark.parametrize('where', ['table', 'removal'])
def test_a_pack_that_was_ended_is_gone_on_with(tmp_path, monkeypatch, where):
    "Ended before the table of runs is written, after that of steps, or while it removes: what is stored reads as before."
    made_up(tmp_path, 'grpo', 1)
    pack_runs(tmp_path, remove=True)
    made_up(tmp_path, 'tspo', 1)
    def ends(*_, **__): raise OSError('no space')
    with monkeypatch.context() as m:
        written, unlink = compare._write_table, Path.unlink
        if where == 'table': m.setattr(compare, '_write_table', lambda path, rows: ends() if path.stem == 'runs' else written(path, rows))
        else: m.setattr(Path, 'unlink', lambda path, **how: ends() if path.name == 'summary.json' else unlink(path, **how))
        with pytest.raises(OSError): pack_runs(tmp_path, remove=True)
    assert read_summary(tmp_path / 'grpo-1')['method'] == 'grpo' and len(load_runs(tmp_path)) == 10
    assert pack_runs(tmp_path, remove=True) == 2 and not (tmp_path / 'tspo-1').exists() and len(load_runs(tmp_path)) == 10


def test_table(tmp_path):
    made_up(tmp_path, 'grpo', 1, .5, code=module_hashes(['outcome']))
    made_up(tmp_path, 'grpo', 2, .7, code=module_hashes(['outcome']))
    made_up(tmp_path, 'tspo', 1, .8, collapsed=True, code={'folr': 'old', 'no_such_module': 'old'})
    made_up(tmp_path, 'tips', 1, finished=False)
    lines = markdown_table(tmp_path).splitlines()
    head, rule, *rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]
    assert ', '.join(head) == 'method, seeds, base EM, final EM, gain, 1 hop, 2 hops, 3 hops, minutes, note'
    assert [row[0] for row in rows] == ['tspo', 'grpo', 'ceiling']     # best first
    assert rows[1][3:5] == ['0.600 (0.500 to 0.700)', '+0.400 (+0.300 to +0.500)'] and rows[1][-1] == ''
    assert rows[0][-1] == 'rerun needed: folr, no_such_module changed; 1 collapsed' and rows[2][3] == '0.900'


def test_a_replay_finds_the_numbers_again_and_notices_others(tmp_path, finished, capsys):
    "A run of three steps, replayed for two: the same numbers; with one of them changed in the log: not."
    shutil.copytree(finished(method='tips'), tmp_path / 'tips-0', symlinks=True)
    assert main(['--replay', '1', '--out', str(tmp_path)]) == 0 and capsys.readouterr().out.count('agrees') == 1
    log = tmp_path / 'tips-0' / 'metrics.jsonl'
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows[1]['reward'] += .01
    log.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    assert main(['--replay', '1', '--out', str(tmp_path)]) == 1 and 'tips-0: DIFFERS' in capsys.readouterr().out
    found = json.loads((tmp_path / 'tips-0' / 'replay.json').read_text())
    assert not found['agrees'] and found['metric'] == 'reward' and abs(found['gap'] - .01) < 1e-6


def test_curves_by_trained_tokens(tmp_path):
    "Summed up over steps; a run that did not log them from its first step on has no such axis from there on."
    for method, logged in (('grpo', [30, 0, 50]), ('tspo', [40, None, 60])):
        log = begun(tmp_path / f'{method}-1', method=method, seed=1, steps=3)
        log.metrics(0, dev_em=.1)
        for step, tokens in enumerate(logged, 1):
            log.metrics(step, trajectories=8, dev_em=.2, **({} if tokens is None else {'trained_tokens': tokens}))
    made_up(tmp_path, 'ppo', 1)                                                    # before they were logged
    runs = load_runs(tmp_path)
    seen = {method: of.trained_tokens_seen.tolist() for method, of in runs.groupby('method')}
    assert seen['grpo'] == [0, 30, 30, 80] and seen['tspo'][:2] == [0, 40] and all(map(math.isnan, seen['tspo'][2:]))
    assert all(map(math.isnan, seen['ppo']))
    curves = seed_curves(runs, x='trained_tokens')
    assert set(curves.method) == {'grpo', 'tspo'} and curves[curves.method == 'grpo'].x.max() == 80
    figure = learning_curves(runs, x='trained_tokens')
    assert 'credit' in figure.axes[0].get_xlabel() and 'not drawn' in figure.axes[0].get_title('left')


def test_a_baseline_is_found_without_its_options(tmp_path):
    made_up(tmp_path, 'tips', 1)
    made_up(tmp_path, 'ppo', 1, .4, params={'options': {'whiten': True}})
    table = paired_differences(tmp_path, baseline='ppo')
    assert list(table.index) == ['tips − ppo (whiten=True)'] and abs(table['mean difference'].iloc[0] - .1) < 1e-9
    with pytest.raises(ValueError, match="'pp'"):
        paired_differences(tmp_path, baseline='pp')


def test_a_key_among_the_settings_is_refused_before_papermill_writes_it(root, tmp_path, monkeypatch):
    monkeypatch.chdir(root)
    judge = {'base_url': 'http://127.0.0.1:9/v1', 'model': 'stub', 'api_key': 'sk-a-key-that-nobody-may-see'}
    (tmp_path / 'params.yaml').write_text(json.dumps({'options': {'judge': judge}}))
    with pytest.raises(SystemExit, match='JUDGE_KEY=') as refusal:
        main(['--methods', 'outcome+judge/calls', '--seeds', '1', '--params', str(tmp_path / 'params.yaml'), '--out',
              str(tmp_path / 'out')])
    assert 'sk-' not in str(refusal.value) and not (tmp_path / 'out').exists()


@pytest.mark.parametrize('attack, said', [
    ('a|b\n\n<img src=x onerror=alert(1)> `c`', "a\\|b &lt;img src=x onerror=alert(1)> 'c'"),
    ('![a](http://h/x.png)', '![a] (http://h/x.png)'), ('[a](javascript:alert(1))', '[a] (javascript:alert(1))'),
    ('a\\|b', 'a\\\\\\|b')], ids=['HTML', 'an image', 'a link', 'an escape'])
def test_a_method_s_name_from_a_file_stays_in_its_cell(tmp_path, attack, said):
    "Nor does it fetch anything when it is shown, or lead elsewhere."
    RunLog(made_up(tmp_path, 'grpo', 1), resume=True)
    for file in ('params.yaml', 'summary.json'):
        path = tmp_path / 'grpo-1' / file
        values = {**yaml.safe_load(path.read_text()), 'method': attack}
        path.write_text(json.dumps(values))
    header, rule, row, *rest = markdown_table(tmp_path).splitlines()
    assert row.startswith(f'| {said} | 1 |') and '<' not in row


def test_folders_of_runs_stand_beside_runs_and_hops_are_of_the_seeds_that_have_them(tmp_path):
    for name in ('study/a', 'study/b', 'c'):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / 'params.yaml').write_text('method: grpo')
    assert [f.name for f in compare.find_runs([tmp_path / 'c', tmp_path / 'study'])] == ['c', 'a', 'b']
    made = lambda **hops: {'final': hops, 'base_em': 0., 'final_em': .5, 'seconds': 60.}
    row = compare._table_row('grpo', {1: made(**{'1': .2}), 2: made(**{'1': .4, '4': .6})})
    assert (row['1 hop'], row['4 hops'], row['minutes']) == ('0.300', '0.600', '1.0')


def test_runs_that_are_there_are_paired_by_seed_and_others_are_named(tmp_path, capsys):
    right = {('grpo', 1): '1000', ('grpo', 2): '0000', ('tspo', 1): '1100', ('tspo', 2): '0110', ('igpo', 3): '1111'}
    for (method, seed), marks in right.items(): made_up(tmp_path, method, seed, final_right=marks)
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    rows = {line.split(maxsplit=3)[0].rpartition('/')[2]: line.split() for line in said.splitlines() if ' − ' in line}
    assert {name: float(row[4]) for name, row in rows.items()} == {'tspo-1': .25, 'tspo-2': .5}, said
    assert 'not compared, for no run of grpo was asked the same by the same seed' in said and 'igpo-3' in said


def test_the_rules_of_the_real_model_differ_in_credit_and_take_a_rate_that_is_typed(root, monkeypatch):
    monkeypatch.chdir(root)
    rules = ['grpo', 'tspo', 'tspo-flat', 'igpo']
    def rows(*typed):
        given, params = compare._arguments(['--params', 'runs/params/real_rules.yaml', '--methods', *rules, '--seeds', '1', *typed])
        return [job.settings for job in compare.plan_jobs(given.methods, given.seeds, params, given.out)]
    stored = rows()
    differ = {name for row in stored for name in row if any(row[name] != other.get(name) for other in stored)}
    assert differ <= {'method', 'options'} and {row['learning_rate'] for row in stored} == {1e-4}
    assert {row['learning_rate'] for row in rows('learning_rate=0.00003')} == {3e-5} and stored[2]['options']['flat']
