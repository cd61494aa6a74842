"""What needs a GPU: `make test-gpu` on a machine that has one; no network is needed. Elsewhere it is skipped, and
only the program itself is tried, at a toy's size.

With CREDIT_RL_GPU=required, which `make test-gpu` sets, a machine without a GPU fails instead: a test that was never
run must not look like one that passed.
"""
import json
import os
import sys

import pytest
import torch

import measure

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


@pytest.mark.skipif(not ON_GPU, reason='no GPU here: `make test-gpu` on a machine that has one')
@pytest.mark.parametrize('shape', SHAPES)
def test_a_step_at_the_true_shape(root, run_python, shape, capsys):
    said = run_python(root / 'tests' / 'gpu' / 'measure.py', shape, env={'PYTHONPATH': str(root)})
    with capsys.disabled(): print('\n' + said)
    if 'LEFT OUT' in said: pytest.skip(next(line for line in said.splitlines() if 'LEFT OUT' in line))
    (m,) = measured(said)
    assert m['parameters'] == measure.sizes(shape).parameters and all(m[n] > 0 for n in NUMBERS)
    assert m['learning_bytes'] < 1.25 * m['estimated_bytes'], 'the estimate says too little'
