"""What needs a GPU: `make test-gpu` on a machine that has one; no network is needed. Elsewhere it is skipped, and
only the program itself is tried, at a toy's size.

With CREDIT_RL_GPU=required, which `make test-gpu` sets, a machine without a GPU fails instead: a test that was never
run must not look like one that passed.
"""
import json
import os
import sys
from pathlib import Path

import pytest
import torch

import measure
import run

REQUIRED = os.environ.get('CREDIT_RL_GPU') == 'required'
ON_GPU = REQUIRED or torch.cuda.is_available()
SHAPES = [shape for shape in measure.SHAPES if shape != 'toy']
NUMBERS = ('acting_tokens_per_second', 'reading_tokens_per_second', 'learning_tokens_per_second',
           'separate_over_packed')


def measured(said):
    return [json.loads(line.split(' ', 1)[1]) for line in said.splitlines() if line.startswith('MEASURED ')]


def test_the_program_itself_runs_on_a_cpu(root, run_python):
    said = run_python(root / 'tests' / 'gpu' / 'measure.py', 'toy', '--device', 'cpu', '--dtype', 'float32', '--rows',
                      '4', '--tokens', '200', env={'PYTHONPATH': str(root), 'CUDA_VISIBLE_DEVICES': ''})
    (m,) = measured(said)
    assert m['shape'] == 'toy' and m['device'] == 'a CPU' and m['tokens_each'] == 180 and all(
        m[n] > 0 for n in NUMBERS) and m['states'] == 16
    assert '- toy, float32, 4 trajectories of 180 tokens on a CPU: acting' in said and m['logp_gap'] < 1e-3 and m[
        'largest_difference_nats'] < 1e-3


def test_without_a_gpu_it_says_so_and_fails(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(sys, 'argv', ['measure.py'])
    with pytest.raises(SystemExit, match='has no GPU'): measure.main()       # a sentence: the exit code is 1


@pytest.mark.parametrize('shape', ['qwen2.5-0.5b', 'qwen2.5-3b', 'qwen2.5-7b'])
def test_sizes_are_the_published_ones(shape):
    published = {'qwen2.5-0.5b': 494_032_768, 'qwen2.5-3b': 3_085_938_688, 'qwen2.5-7b': 7_615_616_512}
    assert measure.sizes(shape).parameters == published[shape]


def test_a_tree_is_its_rows_on_a_cpu():
    found = measure.tree_against_rows('toy', 'cpu', 40, 30)
    assert found['nats_apart'] < 1e-4 and found['gradients_apart'] < 1e-4 and found['nodes'] < found['tokens']


def run_parts(root, run_python, out, *arguments, check=True, env={}):
    said = run_python(root / 'tests' / 'gpu' / 'run.py', *arguments, '--out', out, env={'PYTHONPATH': str(root), **env})
    return said, {path.stem: json.loads(path.read_text()) for path in Path(out).glob('*.json')}


def test_every_part_runs_on_a_cpu_with_toys(root, run_python, tmp_path):
    _, found = run_parts(root, run_python, tmp_path, '--device', 'cpu', '--small', env={'CUDA_VISIBLE_DEVICES': ''})
    assert set(found) == {'step', 'tree', 'training'} and all('numbers' in part for part in found.values()), found
    assert found['tree']['numbers'][0]['gradients_apart'] < 1e-4 and found['step']['versions']['torch']
    training = found['training']['numbers']
    assert training['steps'] == 1 and 0 <= training['final_em'] <= 1 and training['parameters'] < 100_000


def test_a_part_that_cannot_run_says_so_and_the_rest_goes_on(monkeypatch, tmp_path, capsys):
    def lacking(a): raise ImportError("No module named 'papermill'")
    monkeypatch.setattr(run, 'PARTS', {'training': lacking, 'tree': run.tree_part})
    with pytest.raises(SystemExit) as end: run.main(['--device', 'cpu', '--small', '--out', str(tmp_path)])
    assert end.value.code == 0 and "CANNOT RUN training: No module named 'papermill'" in capsys.readouterr().out
    assert 'papermill' in json.loads((tmp_path / 'training.json').read_text())['cannot run']
    assert json.loads((tmp_path / 'tree.json').read_text())['numbers']
    monkeypatch.setattr(run, 'PARTS', {'training': lacking})
    with pytest.raises(SystemExit) as end: run.main(['--device', 'cpu', '--out', str(tmp_path)])
    assert end.value.code == 2


def test_layers_are_cut_where_they_do_not_fit(monkeypatch):
    monkeypatch.setattr(run, 'room', lambda device: 80e9)
    assert [run.layers_that_fit(s, 'cuda') for s in SHAPES[:2]] == [24, 36]
    assert 10 < run.layers_that_fit('qwen2.5-7b', 'cuda') < 28


@pytest.mark.skipif(not ON_GPU, reason='no GPU here: `make test-gpu` on a machine that has one')
def test_flex_attention_over_a_tree_is_rows_of_their_own(root, run_python):
    _, found = run_parts(root, run_python, root / 'runs' / 'gpu', 'tree')
    if 'cannot run' in found['tree']: pytest.skip(found['tree']['cannot run'])
    assert [m['shape'] for m in found['tree']['numbers']] == SHAPES
    assert all(m['nats_apart'] < 1e-2 and m['gradients_apart'] < 1e-2 for m in found['tree']['numbers'])


@pytest.mark.skipif(not ON_GPU, reason='no GPU here: `make test-gpu` on a machine that has one')
@pytest.mark.timeout(7200)
def test_a_model_of_64_million_parameters_learns_from_nothing(root, run_python):
    _, found = run_parts(root, run_python, root / 'runs' / 'gpu', 'training')
    if 'cannot run' in found['training']: pytest.skip(found['training']['cannot run'])
    numbers = found['training']['numbers']
    assert numbers['parameters'] > 6e7 and numbers['final_em'] >= numbers['base_em']


@pytest.mark.skipif(not ON_GPU, reason='no GPU here: `make test-gpu` on a machine that has one')
def test_a_step_at_the_true_shapes(root, run_python):
    _, found = run_parts(root, run_python, root / 'runs' / 'gpu', 'step')
    for m in found['step']['numbers']:
        if 'left out' in m: continue
        assert m['parameters'] == measure.sizes(m['shape']).parameters and all(m[n] > 0 for n in NUMBERS)
        assert m['learning_bytes'] < 1.25 * m['estimated_bytes'], 'the estimate says too little'
    assert any('left out' not in m for m in found['step']['numbers'])
