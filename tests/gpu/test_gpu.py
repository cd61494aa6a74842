"""What needs a GPU: `make test-gpu` on a machine that has one; no network is needed. Elsewhere only the program itself
is tried, with small models.

With CREDIT_RL_GPU=required, which `make test-gpu` sets, a machine without a GPU fails: a test that was never run must
not look like one that passed.
"""
import argparse
import gc
import json
import os
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch

import on_learning
import on_same
import on_shapes
import run
from credit_rl import engine
from gguf_files import small_llama

REQUIRED = os.environ.get('CREDIT_RL_GPU') == 'required'
PUBLISHED = {'qwen2.5-0.5b': 494_032_768, 'qwen2.5-3b': 3_085_938_688, 'qwen2.5-7b': 7_615_616_512}


def sections(root, run_python, out, *arguments, env={}):
    said = run_python(root / 'tests' / 'gpu' / 'run.py', *arguments, '--out', out, env={'PYTHONPATH': str(root), **env})
    return said, {path.stem: json.loads(path.read_text()) for path in Path(out).glob('*.json')}


@pytest.mark.long
def test_every_section_runs_on_a_cpu_with_small_models(root, run_python, tmp_path):
    said, found = sections(root, run_python, tmp_path, '--device', 'cpu', '--small', '--share', '4',
                           env={'CUDA_VISIBLE_DEVICES': ''})
    assert {name: part['state'] for name, part in found.items()} == dict.fromkeys(run.SECTIONS, 'done'), said
    same = found['same']['numbers']
    assert all(max(same[f'{name}, float32'].values()) < 1e-4 for name in on_same.NAMES) and same['engine'][
        'equal'] == same['engine']['tokens'] > 500
    assert all(max(same[f'planted: {fault}'].values()) > .1 for fault in on_same.FAULTS)
    assert found['shapes']['numbers']['toy: scoring']['nats_apart'] < 1e-3
    assert found['trees']['numbers']['toy, 2 layers, float32, group']['gradients_apart'] < 1e-4
    assert found['learning']['numbers']['TSPO']['steps'] == 2 and found['same']['versions']['torch']


def test_without_a_gpu_it_says_so_and_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(SystemExit, match='has no GPU'): run.main(['--out', str(tmp_path)])   # the exit code is 1


class Stub:
    "A section in place of a module of tests/gpu."
    def __init__(self, section): self.section = section


def run_stubs(monkeypatch, tmp_path, required=False, **parts):
    for name, part in parts.items(): monkeypatch.setitem(sys.modules, f'on_{name}', Stub(part))
    monkeypatch.setattr(run, 'REQUIRED', required)
    with pytest.raises(SystemExit) as end:
        run.main([*parts, '--device', 'cpu', '--share', '.02', '--out', str(tmp_path)])
    return end.value.code, {name: json.loads((tmp_path / f'{name}.json').read_text()) for name in parts}


def test_a_section_that_cannot_run_says_so_and_the_rest_goes_on(monkeypatch, tmp_path):
    def lacking(record, a): raise ImportError("No module named 'bm25s'")
    def fine(record, a): record.put('x', 1.)
    code, found = run_stubs(monkeypatch, tmp_path, same=lacking, trees=fine)
    assert code == 0 and found['same']['state'] == 'cannot run' and 'bm25s' in found['same']['why']
    assert found['trees']['numbers'] == {'x': 1.} and found['trees']['state'] == 'done'
    assert run_stubs(monkeypatch, tmp_path, same=lacking)[0] == 2
    assert run_stubs(monkeypatch, tmp_path, required=True, same=lacking, trees=fine)[0] == 1


def test_what_was_found_before_a_deadline_or_a_failure_is_kept(monkeypatch, tmp_path):
    def slow(record, a):
        record.put('first', 1.)
        try: time.sleep(60)
        except Exception: record.put('swallowed', 1.)
    def failing(record, a):
        record.put('first', 1.)
        raise AssertionError('wrong by a half')
    code, found = run_stubs(monkeypatch, tmp_path, same=slow, trees=failing)
    assert code == 1 and [found[n]['state'] for n in ('same', 'trees')] == ['late', 'failed']
    assert all(part['numbers'] == {'first': 1.} for part in found.values()) and 'by a half' in found['trees']['why']


@pytest.mark.parametrize('shape', PUBLISHED)
def test_sizes_are_the_published_ones(shape):
    with torch.device('meta'): model = on_shapes.random_model(shape, 'meta', 'bfloat16')
    sizes = on_shapes.sizes_of(model)
    assert sizes.parameters == PUBLISHED[shape] and sizes.layers == on_shapes.SHAPES[shape][0]
    assert .001 < on_shapes.lora_share(model) < .05


def test_the_cache_of_one_measurement_is_gone_before_the_next():
    "Not when Python next looks for cycles: a peak of memory would have it in."
    model, generator, kept = on_shapes.random_model('toy', 'cpu', 'float32'), torch.Generator().manual_seed(0), []
    reserve = engine._SlotCache.reserve
    def noted(cache, *shape):
        kept.append(weakref.ref(cache))
        reserve(cache, *shape)
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine._SlotCache, 'reserve', noted)
            on_shapes.writing(model, 'cpu', 2, 20, 4, generator)
        assert kept and not any(cache() for cache in kept)
    finally: gc.enable()


@pytest.mark.long
def test_where_a_real_model_is_at_hand_it_learns_instead(root, tmp_path, monkeypatch):
    "A random model stands for it; of its time nothing is left, so that the first checkpoint is the last."
    monkeypatch.chdir(root)
    for part in small_llama(positions=4096): part.save_pretrained(tmp_path / 'model')
    few = dict(model=str(tmp_path / 'model'), questions=12, dev_questions=3, test_questions=4, max_tokens=2500,
               passage_tokens=300, turn_tokens=6, base_questions=2, group_size=2, questions_per_step=2, row_tokens=4096)
    monkeypatch.setattr(on_learning, 'REAL', tmp_path / 'model')
    monkeypatch.setattr(on_learning, 'real_settings', lambda own=on_learning.real_settings: {**own(), **few})
    record = run.Record(tmp_path / 'learning.json', {})
    record.until = time.time()
    with pytest.raises(AssertionError, match='gained'):
        on_learning.section(record, argparse.Namespace(device='cuda', small=False))
    tuned, learned = (record.found['numbers'][name] for name in ('fine-tuning', 'TSPO'))
    assert tuned['demonstrations'] > 5 and learned['steps'] == on_learning.real_settings()['eval_every']
    assert learned['questions'] == tuned['questions'] == 4


def test_an_interval_is_wilsons():
    low, high = on_learning.interval(.5, 100)
    assert (round(low, 4), round(high, 4)) == (.4038, .5962) and on_learning.interval(0., 10)[0] == 0.


@pytest.mark.skipif(not REQUIRED, reason='make test-gpu')
@pytest.mark.timeout(1500)
def test_all_sections_on_the_gpu(root, run_python, tmp_path):
    said, found = sections(root, run_python, os.environ.get('CREDIT_RL_GPU_OUT') or tmp_path)
    print(said)
    assert {name: part['state'] for name, part in found.items()} == dict.fromkeys(run.SECTIONS, 'done'), said
