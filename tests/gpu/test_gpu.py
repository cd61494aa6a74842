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

from credit_rl.layout import hidden_states, token_logps
from credit_rl.trees import node_numbers, plant

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


def tree_against_rows(shape, device, prompt, response):
    """How far log-probabilities of a tree (by flex attention on a GPU) are from those of rows of their own, in nats,
    and the norm of the difference of their gradients over the norm of these."""
    model = measure.random_model(shape, device, 'float32').train()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 500, (5, prompt + response), generator=generator)
    ids[:4, :prompt] = ids[0, :prompt]                                           # the fifth shares nothing
    ids[3, :prompt + response // 2] = ids[2, :prompt + response // 2]
    lengths = torch.tensor([prompt + response, prompt + response - 7, prompt + response, prompt + response, prompt])
    tree = plant(ids, node_numbers(ids, lengths)).to(device)
    trained = ((torch.arange(ids.shape[1]) < lengths[:, None]) & (torch.arange(ids.shape[1]) >= prompt // 2)).to(device)
    ids, found = ids.to(device), []
    for how in (None, tree):
        logp = token_logps(model, ids, trained, hidden=hidden_states(model, ids, how), place=how and how.place)
        parameters = [p for n, p in model.named_parameters() if 'layers' in n]
        found.append((logp.detach(), torch.autograd.grad(logp.sum() / trained.sum(), parameters)))
    (rows, own), (columns, other) = found
    norm = lambda tensors: float(torch.stack([t.norm() for t in tensors]).norm())
    return float((rows - columns).abs().max()), norm([a - b for a, b in zip(own, other)]) / norm(own)


def test_a_tree_is_its_rows_on_a_cpu():
    apart, gradients = tree_against_rows('toy', 'cpu', 40, 30)
    assert apart < 1e-4 and gradients < 1e-4


@pytest.mark.skipif(not ON_GPU, reason='no GPU here: `make test-gpu` on a machine that has one')
@pytest.mark.parametrize('shape', SHAPES[:1])
def test_flex_attention_over_a_tree_is_rows_of_their_own(shape):
    apart, gradients = tree_against_rows(shape, 'cuda', 500, 300)
    assert apart < 1e-2 and gradients < 1e-2


@pytest.mark.skipif(not ON_GPU, reason='no GPU here: `make test-gpu` on a machine that has one')
@pytest.mark.parametrize('shape', SHAPES)
def test_a_step_at_the_true_shape(root, run_python, shape, capsys):
    said = run_python(root / 'tests' / 'gpu' / 'measure.py', shape, env={'PYTHONPATH': str(root)})
    with capsys.disabled(): print('\n' + said)
    if 'LEFT OUT' in said: pytest.skip(next(line for line in said.splitlines() if 'LEFT OUT' in line))
    (m,) = measured(said)
    assert m['parameters'] == measure.sizes(shape).parameters and all(m[n] > 0 for n in NUMBERS)
    assert m['learning_bytes'] < 1.25 * m['estimated_bytes'], 'the estimate says too little'
