("Between engine and learner, without vLLM: which weights are whole, where a turn ends, how far two log-probabilities "
 "lie apart, and what corrects for it.")
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

from credit_rl.engine import stop_tokens
from credit_rl.models import load_model
from credit_rl.learner import Learner, Optimiser
from credit_rl.parts import Loss
from credit_rl.losses import policy_terms
from credit_rl.protocol import byte_tokenizer
from credit_rl.tiny import tiny_tokenizer
from credit_rl.vllm_engine import _reason, complete, parameter_shapes, sampler_weights
from random_models import small_qwen

BYTES, WORDS = byte_tokenizer(), tiny_tokenizer()


# ---- where a turn ends ----


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from('</think> x;>'), min_size=1, max_size=25).map(''.join),
       st.lists(st.sampled_from(['</think>', '>', '>;', 'x x', ' x', 'nk']), min_size=1, max_size=3, unique=True))
def test_only_after_some_tokens_text_needs_looking_at(text, stop):
    "What first completes a stop string may end a turn; one of the sure ones always does."
    surely, may = stop_tokens(BYTES, len(BYTES), tuple(stop))
    assert surely <= may
    seen = []
    for i in BYTES(text).input_ids:
        met_before = any(s in BYTES.decode(seen) for s in stop)
        seen.append(i)
        met = any(s in BYTES.decode(seen) for s in stop)
        assert i in may or met == met_before
        assert i not in surely or met


def test_in_words_one_token_is_a_stop_string():
    surely, may = stop_tokens(WORDS, len(WORDS), ('</tool_call>',))
    assert {WORDS.decode([i]) for i in surely} == {'</tool_call>'} and WORDS.convert_tokens_to_ids('>') not in surely


@pytest.mark.parametrize('words', ['</é>', '<é', '结'])
def test_a_stop_string_may_take_more_tokens_than_letters(words):
    ids = BYTES(words).input_ids
    engine = SimpleNamespace(tokenizer=BYTES, eos_ids=(), stop_tokens=lambda stop: stop_tokens(BYTES, len(BYTES), stop))
    for n in range(1, len(ids) + 1):
        row = SimpleNamespace(new=ids[:n], strings=(words,), room=99)
        assert _reason(row, engine) == (None if n < len(ids) else 'stop')


# ---- weights ----

def test_a_learners_weights_are_whole(root):
    model, _ = load_model(str(root / 'data' / 'tiny_base'))
    shapes, shared = parameter_shapes(root / 'data' / 'tiny_base')
    assert shared and set(shapes) == {n for n, _ in model.named_parameters(remove_duplicate=False)}
    for named in (dict(model.named_parameters()), dict(model.named_parameters(remove_duplicate=False)),
                  Learner(model, Loss(), Optimiser()).weights()):
        whole = complete(named, shapes, shared)
        assert set(whole) == set(shapes)
        assert whole['lm_head.weight'].data_ptr() == whole['model.embed_tokens.weight'].data_ptr()
        assert not any(t.requires_grad for t in whole.values())


def test_an_output_layer_of_its_own_is_not_made_up(tmp_path):
    model = small_qwen(20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    shapes, shared = parameter_shapes(tmp_path)
    named = dict(model.named_parameters())
    assert not shared
    assert complete(named, shapes, shared)['lm_head.weight'].data_ptr() == model.lm_head.weight.data_ptr()


# ---- the gap, and what corrects for it ----

SHAPE = (4, 6)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(['truncated', 'masked']), st.booleans())
def test_weights_multiply_a_positive_part_of_the_loss(seed, kind, by_trajectory):
    "So weighing a token's term and weighing its advantage are the same, for every loss of `losses`."
    g = torch.Generator().manual_seed(seed)
    logp, old, engine = (-3 * torch.rand(SHAPE, generator=g) for _ in range(3))
    trained, advantages = torch.rand(SHAPE, generator=g) < .7, torch.randn(SHAPE, generator=g)
    rows = torch.tensor([0, 0, 1, 2]) if by_trajectory else None
    w = sampler_weights(old, engine, trained, kind, row_trajectory=rows)
    assert (w >= 0).all() and (w <= 2).all() and (w[~trained] == 0).all()
    for loss in ('ppo', 'gspo', 'gspo-token', 'cispo', 'reinforce'):
        for dual in (None, 3.) if loss == 'ppo' else (None,):
            terms = lambda a: policy_terms(logp, old, a, trained, loss, dual_clip=dual)[0]
            assert_close(terms(advantages * w), terms(advantages) * w)
    if by_trajectory:
        assert all(len(w[rows == r][trained[rows == r]].unique()) <= 1 for r in range(3))


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_weighted_by_the_ratio_an_expectation_is_the_learners(seed):
    "Σ engine probability · weight · f is Σ learner probability · f; truncation only takes away."
    g = torch.Generator().manual_seed(seed)
    engine, learner = (torch.randn(1, 9, generator=g).log_softmax(-1) for _ in range(2))
    f, every = torch.rand(1, 9, generator=g), torch.ones(1, 9, dtype=torch.bool)
    exact = (learner.exp() * f).sum()
    mean = lambda **how: (engine.exp() * sampler_weights(learner, engine, every, **how) * f).sum()
    assert_close(mean(high=1e9), exact)
    assert_close(mean(kind='masked', high=1e9), exact)
    assert mean(high=1.2) <= exact + 1e-6 and mean(kind='masked', high=1.2) <= mean(high=1.2) + 1e-6


def test_a_long_trajectory_does_not_overflow_into_nonsense():
    far = torch.zeros(1, 2000)
    for kind, wanted in (('truncated', 2.), ('masked', 0.)):
        assert sampler_weights(far, far - 5, far == 0, kind,
                               row_trajectory=torch.tensor([0])).unique().tolist() == [wanted]
    assert sampler_weights(far - 5, far, far == 0, row_trajectory=torch.tensor([0])).unique().tolist() == [0.]


# ---- while vLLM starts ----

STARTS = """
import subprocess, sys, time
from credit_rl.vllm_engine import _watch
before = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)
time.sleep(.1)                                                # a tick of the clock by which processes are told apart
with _watch():
    time.sleep(.1)
    inside = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)
    print(before.pid, inside.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not Path('/proc').exists(), reason='needs /proc')
def test_what_a_killed_process_was_starting_is_ended(root):
    "And not what it had started before."
    psutil = pytest.importorskip('psutil')
    process = subprocess.Popen([sys.executable, '-c', STARTS], cwd=root, text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    before, inside = map(int, process.stdout.readline().split())
    (watcher,) = {c.pid for c in psutil.Process(process.pid).children()} - {before, inside}
    while '_psutil' not in Path(f'/proc/{watcher}/maps').read_text(): time.sleep(.1)
    time.sleep(2)                                                          # for the watcher to have seen them
    process.kill()
    process.communicate()
    end = time.monotonic() + 30
    while runs(inside) and time.monotonic() < end: time.sleep(.1)
    assert not runs(inside) and runs(before)
    os.kill(before, signal.SIGKILL)


def runs(pid):
    "Whether a process is there, and no zombie."
    try: return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] not in 'ZX'
    except OSError: return False
