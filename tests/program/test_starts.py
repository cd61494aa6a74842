"""The start of a run: what is refused before anything is computed, what is said, what a start that failed leaves."""
import importlib
import itertools
import json
import logging
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from credit_rl import dry_run, evaluate, launch, prepare, sft, train as training
from credit_rl.datasets import load_questions
from credit_rl.diagnostics import wilson
from credit_rl.learner import Learner, Optimiser
from credit_rl.models import find_model, load_model, local_folder
from credit_rl.parts import Loss
from credit_rl.runlog import FolderInUse, Hold, RunFolders, RunLog, RunPaths
from credit_rl.settings import make_config
from credit_rl.setup import forecast
from credit_rl.train import train
from made_runs import BASE, SHORT

ROOT = Path(__file__).resolve().parents[2]


# ---- options and settings are checked before a start ----

@pytest.mark.parametrize('settings, message', [
    (dict(method='tspo', options={'alpha': 'abc'}), 'alpha'),
    (dict(method='mt-grpo*', options={'lambda_mid': float('nan')}), 'lambda_mid'),
    (dict(method='ppo', critic_rate=-1), 'rate'),
    (dict(loss={'clip_high': -.2}), 'clip_high'),
    (dict(loss={'cliphigh': .2}), "'clip_high'"),
    (dict(loss={'kl_kind': 'k9'}), "'k1'"),
    (dict(threads=10000), 'threads=10000'), (dict(minibatches=9, questions_per_step=2, group_size=4), 'minibatches=9'),
    # hints that lead to the right setting
    (dict(lr=1e-3), "'learning_rate'"), (dict(alpha=2), 'options.alpha=2'), (dict(data='tinny'), "'tiny'"),
    (dict(band='medium', method='tips'), "'tips'"), (dict(data='hotpot'), "'hotpotqa'"), (dict(xyz=2), '--help')])
def test_what_cannot_be_is_refused_by_a_dry_run_too(settings, message, tmp_path):
    said = []
    with pytest.raises(ValueError, match=message):
        train({'run': str(tmp_path / 'run'), 'dry_run': True, **settings}, say=said.append)
    assert not said and not (tmp_path / 'run').exists()


def audited(settings): return importlib.import_module('credit_rl.audit').read_audit_settings(settings)
def under_trl(settings): return importlib.import_module('credit_rl.trl_trainer').trl_run(settings)


@pytest.mark.parametrize('start', [audited, under_trl])
def test_what_has_no_dry_run_says_so_and_does_not_begin(start, tmp_path):
    with pytest.raises(ValueError, match='dry_run'):
        start({'run': str(tmp_path / 'run'), 'model': BASE, 'dry_run': True})
    assert not (tmp_path / 'run').exists()


def test_threads_that_this_host_can_use_pass(monkeypatch):
    monkeypatch.setattr(os, 'cpu_count', lambda: 2)
    for threads in (None, 1, 16): launch.check_threads(threads)
    with pytest.raises(ValueError, match='threads=17'): launch.check_threads(17)


def test_a_learner_updates_on_fewer_trajectories_than_mini_batches():
    from transformers import AutoModelForCausalLM
    from credit_rl.layout import pack
    from credit_rl.parts import Credit
    from credit_rl.trajectory import example_group
    model = AutoModelForCausalLM.from_pretrained(BASE)
    layout = pack([example_group()])
    layout.ids.clamp_(max=model.config.vocab_size - 1)
    learner = Learner(model, Loss(), Optimiser(minibatches=9))
    log = learner.step(layout, None, Credit(layout.trained.float()))
    assert log['updates'] == len(layout.groups) < 9


# ---- a start that failed can be made again in the same folder ----

def fail(*args): raise RuntimeError('something broke')


@pytest.mark.parametrize('where', ['make_setup', '_begin'])
def test_a_start_that_failed_leaves_its_folder_free(where, tmp_path, monkeypatch):
    monkeypatch.setattr(training, where, fail)
    with pytest.raises(RuntimeError, match='broke'):
        train({**SHORT, 'run': str(tmp_path / 'run')}, say=lambda line: None)
    RunLog(tmp_path / 'run')                           # refuses a folder that holds a run


def test_what_has_a_checkpoint_or_was_there_before_is_kept(tmp_path):
    log = RunLog(tmp_path)
    with pytest.raises(RuntimeError), log.beginning():
        log.write_params({'seed': 1})
        (tmp_path / 'checkpoints' / 'step-000000').mkdir(parents=True)
        raise RuntimeError
    assert (tmp_path / 'params.yaml').exists()
    (tmp_path / 'checkpoints' / 'step-000000').rmdir()
    with pytest.raises(RuntimeError), RunLog(tmp_path, resume=True).beginning(): raise RuntimeError
    assert (tmp_path / 'params.yaml').exists()


def test_a_fine_tuning_without_right_rollouts_leaves_its_folder_free(tmp_path, monkeypatch):
    monkeypatch.setattr(sft, 'play_parts', lambda *args: [])
    with pytest.raises(ValueError, match='imitate'):
        sft.rejection_sft({**SHORT, 'run': str(tmp_path / 'run')}, say=lambda line: None)
    RunLog(tmp_path / 'run')


def test_a_start_under_trl_that_failed_leaves_its_folder_free(tmp_path, monkeypatch):
    trl = pytest.importorskip('credit_rl.trl_trainer')
    pytest.importorskip('trl')
    monkeypatch.setattr(trl, 'evaluate', fail)
    with pytest.raises(RuntimeError, match='broke'):
        trl.trl_run({**SHORT, 'run': str(tmp_path / 'run'), 'method': 'grpo'}, say=lambda line: None)
    RunLog(tmp_path / 'run')


# ---- the notebook of a run ----

def as_papermill_writes(executed=False, cell="run = 'runs/train'\nresume = False", **given):
    cells = [{'cell_type': 'code', 'source': cell.splitlines(keepends=True), 'metadata': {'tags': ['parameters']},
              'execution_count': 1 if executed else None}]
    return json.dumps({'cells': cells, 'metadata': {'papermill': {'parameters': given}}})


def test_a_dry_run_keeps_the_finished_notebook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place, write = Path('runs/mine/notebook.ipynb'), RunFolders.write
    write(done := as_papermill_writes(executed=True, run='runs/mine'), place)
    RunLog(place.parent).write_params({'seed': 1})
    with pytest.raises(FileExistsError): write(as_papermill_writes(run='runs/mine', dry_run=True), place)
    assert place.read_text() == done
    write(as_papermill_writes(cell='folders = 3'), 'runs/other/report.ipynb')               # a report has no run


@pytest.mark.parametrize('path', ['runs/mine/notebook.ipynb', './runs/mine/notebook.ipynb'])
def test_papermill_hands_such_a_path_to_us(path, monkeypatch):
    iorw = pytest.importorskip('papermill.iorw')
    monkeypatch.chdir(ROOT)
    given = {}
    monkeypatch.setattr('setuptools.setup', lambda **settings: given.update(settings))
    runpy.run_path(str(ROOT / 'setup.py'))
    io = iorw.PapermillIO()
    io.register('local', iorw.LocalHandler())
    for line in given['entry_points']['papermill.io']:
        prefix, place = line.split(' = ')
        assert place == 'credit_rl.runlog:RunPaths'
        io.register(prefix, RunPaths)
    assert io.get_handler(path) is RunPaths and io.get_handler('elsewhere/notebook.ipynb') is not RunPaths


def test_another_projects_runs_are_papermills_own(tmp_path, monkeypatch):
    "A folder that is missing is its error, as without us."
    pytest.importorskip('papermill.iorw')
    (tmp_path / 'settings.ini').write_text('[DEFAULT]\nlib_name = theirs\n')
    monkeypatch.chdir(tmp_path)
    path, filters = 'runs/x/notebook.ipynb', list(logging.getLogger('papermill').filters)
    RunPaths.pretty_path(path)
    with pytest.raises(FileNotFoundError, match='output'): RunPaths.write('{"cells": []}', path)
    assert logging.getLogger('papermill').filters == filters


@pytest.mark.parametrize('name', ['90_train', '91_evaluate', '92_warmup'])
def test_the_run_notebooks_say_where_their_run_lies(name, tmp_path, monkeypatch):
    "Else a notebook apart from its run would be let pass."
    monkeypatch.chdir(tmp_path)
    text = (ROOT / 'nbs' / f'{name}.ipynb').read_text()
    notebook = json.loads(text)
    for cell in notebook['cells']: cell.pop('execution_count', None)
    with pytest.raises(ValueError, match='give -p run'): RunFolders.write(json.dumps(notebook), 'runs/x/notebook.ipynb')


# ---- what is said of a run that is over, or goes on ----

def test_a_run_that_is_shown_again_tells_its_log_again(finished):
    first = ((folder := finished()).parent / 'lines').read_text().splitlines()
    for steps, why in ((3, 'has its 3 steps'), (0, 'has 3 steps, more than steps=0')):
        train({**SHORT, 'run': str(folder), 'resume': True, 'steps': steps}, say=(again := []).append)
        assert why in again[-1] and again[-2] == first[-1] and any(x.startswith('base: EM') for x in again)
        (line,), (then,) = ([x for x in lines if x.startswith('step 1/3')] for lines in (first, again))
        assert line.startswith(then)


def test_a_run_that_goes_on_tells_its_log_first(finished, tmp_path):
    folder, lines = shutil.copytree(finished(), tmp_path / 'more', symlinks=True), []
    train({**SHORT, 'run': str(folder), 'resume': True, 'steps': 4}, say=lines.append)
    at = lines.index('resumed after step 3')
    assert any(x.startswith('step 1/4') for x in lines[:at]) and any(x.startswith('step 4/4') for x in lines[at:])


# ---- a dry run sees what a start would fall over ----

def dry(**settings):
    "What a dry run is refused for, and its lines."
    lines = []
    with pytest.raises((ValueError, OSError)) as e: train({'model': BASE, 'dry_run': True, **settings}, lines.append)
    return str(e.value), lines


SAMPLE = dict(data='hotpotqa', path=str(ROOT / 'data' / 'hotpotqa_sample.json'), dev_questions=1, test_questions=1)


def test_a_dry_run_sees_what_a_prompt_would_fall_over(tmp_path, spoken):
    "One that is too long; one of a real set, for the tiny base, which has no words for it; one that asks no search."
    for given, why in ((dict(max_tokens=8), 'raise max_tokens'),
                       (dict(max_tokens=8, model=spoken, **SAMPLE), 'raise max_tokens'),
                       (SAMPLE, 'no words'), (dict(protocol='direct'), 'without a search')):
        assert why in dry(run=str(tmp_path / 'run'), **given)[0], given


def test_a_dry_run_tries_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'access', lambda path, mode: False)          # root may write everywhere
    assert 'cannot be written' in dry(run=str(tmp_path / 'run'))[0] and not (tmp_path / 'run').exists()


@pytest.fixture
def offline(monkeypatch):
    "A hub that is out of reach, as a name is that nobody knows: list of the times that the name was looked up."
    from huggingface_hub import constants
    monkeypatch.setattr(constants, 'ENDPOINT', 'http://hub.invalid')
    asked, look_up = [], socket.getaddrinfo
    def counted(host, *more, **named):
        if host in ('hub.invalid', b'hub.invalid'): asked.append(host)
        return look_up(host, *more, **named)
    monkeypatch.setattr(socket, 'getaddrinfo', counted)
    return asked


def test_a_dry_run_lists_all_that_is_missing_and_estimates_without_a_network(offline, tmp_path, monkeypatch):
    "The papers' files on a host without network, search server and GPUs: in seconds, for the clients are not begun."
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 0)
    given = yaml.safe_load((ROOT / 'runs' / 'params' / 'tips_qwen2.5_7b.yaml').read_text())
    lines = []
    with pytest.raises(ValueError, match='start') as e:
        train({**given, 'run': str(tmp_path / 'run'), 'dry_run': True, 'path': None,
               'corpus': 'http://127.0.0.1:9', 'patience': {'tries': 2}}, lines.append)
    assert len(offline) <= 2
    why = str(e.value).splitlines()
    for part in ('vLLM', 'nq_open', '127.0.0.1:9', "model 'Qwen/Qwen2.5-7B-Instruct'"):
        assert any(part in line for line in why), (part, why)
    assert any('memory of a rank' in line for line in lines) and any('a step, if' in line for line in lines)


# ---- a model that is not there ----

def test_a_model_that_is_not_there_is_named_at_once_with_the_folder(offline, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = 'models/qwen'
    calls = lambda: train({'model': model, 'run': 'runs/x'}), lambda: load_model(model), lambda: local_folder(model)
    for call in calls:
        offline.clear()
        with pytest.raises(ConnectionError, match=f"model '{model}': there is no such folder in {tmp_path}, and "
                                                  "http://hub.invalid does not answer"): call()
        assert len(offline) == 1
    assert not list(tmp_path.iterdir())


def test_a_model_that_the_hub_does_not_have_is_named(monkeypatch):
    from huggingface_hub import constants
    from hub import Hub
    with Hub({'there/model': ('0' * 40, {'config.json': b'{}'})}) as server:
        monkeypatch.setattr(constants, 'ENDPOINT', server.url)
        monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE',
                            server.url + '/{repo_id}/resolve/{revision}/{filename}')
        find_model('there/model')
        with pytest.raises(ValueError, match="'not/there'"):
            find_model('not/there')


# ---- how far it is ----

def test_the_estimate_measures_what_this_host_does(monkeypatch):
    monkeypatch.setattr(dry_run, 'measure_tflops', lambda dtype: .05)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    *_, step, likely, _, reckoned, taken = forecast(make_config({'model': BASE}))
    *_, given, _, _, said = forecast(make_config({'model': BASE, 'tflops': 50}))     # a GPU, and no word of reckoning
    assert 'are reckoned' in reckoned and 'reckoned' not in step
    seconds = [float(re.search(r'be: ([0-9.e+-]+) s', line)[1]) for line in (step, given)]
    assert seconds[0] > 1.5 * seconds[1]
    assert 'measured on this host in float32: 0.05 TFLOP/s' in taken and 'taking 50 TFLOP/s' in said
    assert 'if trajectories are' in likely


def test_a_measured_product_is_what_its_clock_says(monkeypatch):
    "By a clock that goes on by a second at each look: three products of 2 · 256³ FLOPs in five seconds."
    from credit_rl.estimate import measure_tflops
    ticks = itertools.count()
    with monkeypatch.context() as clock:
        clock.setattr('time.monotonic', lambda: float(next(ticks)))
        found = measure_tflops('cpu', width=256, seconds=3.5)
    assert found == pytest.approx(3 * 2 * 256 ** 3 / 5 / 1e12)


# ---- interrupted, small samples, indexes, names ----

def test_an_interrupt_is_a_line_that_says_how_to_go_on(finished, tmp_path, monkeypatch, capsys):
    over = finished()
    def stop(*args, **more): raise KeyboardInterrupt
    begun = tmp_path / 'begun'                            # before its first checkpoint
    begun.mkdir()
    (begun / 'params.yaml').write_text('')
    for module, name in ((training, 'train'), (prepare, 'prepare'), (sft, 'rejection_sft'),
                         (evaluate, 'run_evaluation')):
        monkeypatch.setattr(module, name, stop)
        for run, how in ((over, 'resume=true.*after step 3'), (begun, 'yet, so with resume=true the same command'),
                         (tmp_path / 'new', 'yet, so the same command begins anew')):
            with pytest.raises(SystemExit) as end: module.main([f'run={run}'])
            (line,) = capsys.readouterr().err.splitlines()
            assert end.value.code == 130 and 'interrupted' in line
            if module in (training, prepare): assert re.search(how, line), line


@pytest.mark.parametrize('command', [
    ['-m', 'credit_rl.command', 'longform'],
    ['-c', 'import sys; from credit_rl.command import main; sys.exit(main(["audit"]))']])
def test_an_interrupt_while_modules_are_imported_is_a_line_too(command, tmp_path):
    "It takes seconds, a minute on a slow disk. `python -m credit_rl.MODULE` has a traceback there: see 89_command."
    (tmp_path / 'torch.py').write_text('raise KeyboardInterrupt')
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                          env={**os.environ, 'PYTHONPATH': path})
    (line,) = done.stderr.splitlines()
    assert 'interrupted; give the same command again' in line and done.returncode in (130, -signal.SIGINT)


def test_all_wrong_and_all_right_have_an_interval_too():
    "By hand: Wilson's at its ends, z² = 3.84: of none of 10 right up to 3.84 / 13.84."
    found = [evaluate._intervals([{'em': em}] * 10, ['em'], 0)['em'] for em in (0., 1.)]
    assert found[0] == pytest.approx([0., .2775], abs=1e-3) and found[1] == pytest.approx([.7225, 1.], abs=1e-3)
    assert found[0] == pytest.approx(list(wilson(0., 10)), abs=1e-3)
    low, high = evaluate._intervals([{'em': 0.}, {'em': 1.}] * 5, ['em'], 0)['em']
    assert 0 < low < .5 < high < 1


def test_another_file_of_the_same_split_is_named(tmp_path):
    row = {'_id': 'a', 'question': 'Who?', 'answer': 'Ada', 'context': [['Ada', ['Ada was here.']]]}
    (tmp_path / 'dev.json').write_text(json.dumps([row]))
    (tmp_path / 'flashrag_dev.jsonl').write_text(json.dumps({'id': 'b', 'question': 'Who?', 'golden_answers': ['B']}))
    with pytest.warns(UserWarning, match='taken'):
        assert len(load_questions('hotpotqa', tmp_path, 'dev')) == 1
    settings = evaluate.Evaluation(model=BASE, data='hotpotqa', path=str(tmp_path), split='dev', questions=2)
    with pytest.warns(UserWarning, match='questions'):
        evaluate.open_set(settings, 'hotpotqa', {})


# ---- a folder that another process writes ----

def trl_run(settings, say): return importlib.import_module('credit_rl.trl_trainer').trl_run(settings, say)


GSM8K = str(next((ROOT / 'data' / 'rows').glob('gsm8k.*')))
WARM = dict(model=str(ROOT / 'data' / 'tiny_carl'), protocol='carl-tiny', method='carl', threads=1)
WRITE = {
    'training': lambda run, spoken: train({**SHORT, 'run': run}, say=print),
    'training, resumed': lambda run, spoken: train({**SHORT, 'run': run, 'resume': True}, say=print),
    'training on ranks': lambda run, spoken: train({**SHORT, 'run': run, 'learner': 'deepspeed', 'ranks': 2}, print),
    'warm-up': lambda run, spoken: prepare.prepare({**WARM, 'run': run, 'resume': True}, say=print),
    'fine-tuning': lambda run, spoken: sft.rejection_sft({**SHORT, 'run': run}, say=print),
    'training under TRL': lambda run, spoken: trl_run({**SHORT, 'run': run, 'method': 'grpo'}, print),
    'evaluation': lambda run, spoken: evaluate.run_evaluation(
        {'run': run, 'model': spoken, 'data': 'gsm8k', 'path': GSM8K}),
    'notebook': lambda run, spoken: RunFolders.write(as_papermill_writes(run=run, resume=True),
                                                     Path(run) / 'notebook.ipynb'),
}


@pytest.mark.parametrize('name', WRITE)
def test_a_folder_that_is_written_is_refused_before_a_model_is_loaded(name, tmp_path, spoken, monkeypatch):
    def load(*args, **more): raise AssertionError('a model was loaded')
    if name == 'training on ranks': pytest.importorskip('deepspeed')
    if name.endswith('TRL'): pytest.importorskip('trl')
    for module, loads in ((training, 'make_setup'), (prepare, 'make_setup'), (sft, 'make_setup'), (launch, 'launch'),
                          (evaluate, 'load_model')):
        monkeypatch.setattr(module, loads, load)
    if name.endswith('TRL'): monkeypatch.setattr(importlib.import_module('credit_rl.trl_trainer'), 'make_setup', load)
    (tmp_path / 'notebook.ipynb').write_text('of the run that is there')
    contents = lambda: {p.name: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()}
    with Hold(tmp_path):
        before = contents()
        with pytest.raises(FolderInUse, match=f'{tmp_path} is being written by process {os.getpid()} on '):
            WRITE[name](str(tmp_path), spoken)
        assert contents() == before


def test_a_run_that_is_over_or_failed_lets_its_folder_go(tmp_path, monkeypatch):
    "Also where its error is kept."
    run = str(tmp_path / 'run')
    with monkeypatch.context() as broken:
        broken.setattr(training, 'train_step', lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError) as kept: train({**SHORT, 'run': run}, say=lambda line: None)
    folder = train({**SHORT, 'steps': 1, 'run': run, 'resume': True}, say=lambda line: None)
    assert (folder / 'summary.json').exists() and not (folder / '.writer').exists() and kept


def test_a_package_that_is_missing_stands_in_the_list(root, tmp_path, monkeypatch):
    "Without `datasets`, as after `make demo`, nothing can be downloaded."
    monkeypatch.chdir(root)
    monkeypatch.setitem(sys.modules, 'datasets', None)
    monkeypatch.setattr('huggingface_hub.constants.HF_HOME', str(tmp_path / 'hub'))
    for dry in ('true', 'false'):
        with pytest.raises(SystemExit, match='downloading'):
            training.main([f'run={tmp_path}/run', 'data=hotpotqa', 'model=data/tiny_base', f'dry_run={dry}'])
