"""52_learner in whole runs: dropout that repeats itself."""
import importlib.util
import json
import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch

from credit_rl.runlog import read_turns, same_metrics
from credit_rl.train import train

ROOT = Path(__file__).resolve().parents[1]
# the KL term makes it update at every step
SHORT = dict(model=str(ROOT / 'data' / 'tiny_base'), steps=4, eval_every=2, questions_per_step=4, group_size=4, questions=50, dev_questions=4, test_questions=4,
             max_turns=3, turn_tokens=12, kl=.01, learning_rate=1e-2, world={'size': 200}, threads=1, track='')
DROPPING = {**SHORT, 'lora': {'r': 4, 'lora_dropout': .2}}
LEARNERS = {'plain': {}, **({'deepspeed': dict(learner='deepspeed', stage=2)} if importlib.util.find_spec('deepspeed') else {})}
needs_peft = pytest.mark.skipif(not importlib.util.find_spec('peft'), reason='peft is not installed: pip install credit_rl[train]')

context = multiprocessing.get_context('forkserver')
context.set_forkserver_preload(['credit_rl.train', 'transformers.models.qwen2.modeling_qwen2'])


def sitting(settings, seed):
    "A run, or the rest of one, after other work that left torch's generator somewhere."
    sys.stdout = sys.stderr = open(os.devnull, 'w')
    torch.cuda.is_available = lambda: False
    torch.manual_seed(seed)
    train(settings)


def sit(folder, settings, seed=0):
    "The folder of a run that a process of its own made."
    child = context.Process(target=sitting, args=({**settings, 'run': str(folder)}, seed))
    child.start()
    child.join()
    assert child.exitcode == 0
    return folder


def assert_same(a, b):
    assert same_metrics(a, b) == [] and read_turns(a) == read_turns(b)
    one, other = (json.loads((folder / 'summary.json').read_text()) for folder in (a, b))
    assert {**one, 'seconds': 0} == {**other, 'seconds': 0}


# ---- dropout ----

@needs_peft
@pytest.mark.parametrize('learner', LEARNERS)
def test_a_run_with_dropout_repeats_itself_and_is_resumed(tmp_path, learner):
    "Whatever was drawn before in the process; and a run of two steps that goes on to four ends as the one of four."
    settings = {**DROPPING, **LEARNERS[learner]}
    whole, again = sit(tmp_path / 'whole', settings), sit(tmp_path / 'again', settings, seed=1)
    assert_same(whole, again)
    resumed = sit(tmp_path / 'resumed', {**settings, 'steps': 2}, seed=2)
    sit(resumed, {**settings, 'resume': True}, seed=3)
    assert_same(whole, resumed)
    assert same_metrics(whole, sit(tmp_path / 'without', {**settings, 'lora': {'r': 4}})) != []   # it does drop
