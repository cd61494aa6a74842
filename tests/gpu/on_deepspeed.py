"""DeepSpeed on one rank, by NCCL on a card: TSPO from data/tiny_weak in float32 at ZeRO 2 and 3, each in a process of
its own, one stopped after a step and resumed. Their steps are those of the library's own learner."""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time

from on_learning import ROOT, settings
from run import CannotRun

from credit_rl.runlog import metrics_by_step

CLOSE = 1e-3     # largest difference of a step's loss and gradient norm, over 1 and their size
SAME = 'loss', 'grad_norm', 'reward'
STEPS = 3


def train(folder, device, **how):
    "A run in a process of its own: what its steps logged, {step: dict}."
    asked = {**settings(True), 'steps': STEPS, 'dtype': 'float32', 'run': folder, **how}
    around = {'PYTHONPATH': str(ROOT)} | ({'CUDA_VISIBLE_DEVICES': '', 'DS_ACCELERATOR': 'cpu'} if device == 'cpu' else {})
    done = subprocess.run([sys.executable, '-m', 'credit_rl.train', *(f'{k}={json.dumps(v)}' for k, v in asked.items())],
                          cwd=ROOT, env={**os.environ, **around}, text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-3000:]
    return metrics_by_step(folder)


def section(record, a):
    if importlib.util.find_spec('deepspeed') is None: raise CannotRun('deepspeed is not installed')
    with tempfile.TemporaryDirectory() as folder:
        wanted = train(f'{folder}/plain', a.device)
        for stage in (2, 3):
            since, run, how = time.time(), f'{folder}/{stage}', dict(learner='deepspeed', stage=stage)
            if stage == 3: train(run, a.device, **how, steps=1)
            found = train(run, a.device, **how, resume=stage == 3)
            apart = {name: max(abs(found[step][name] - row[name]) / (1 + abs(row[name])) for step, row in wanted.items()
                               if name in row) for name in SAME}
            record.put(f'ZeRO {stage}', {**apart, 'steps': len(wanted), 'seconds': time.time() - since})
            assert max(apart.values()) < CLOSE, f'ZeRO {stage} learns something else'
