"""Processes that tests start and read, on the processor; not a test file. The fixture `start` ends what it started."""
import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from credit_rl.launch import free_port

ROOT = Path(__file__).resolve().parents[2]


def typed(settings):
    "Settings as one types them: list of words."
    return [f'{name}={json.dumps(value)}' for name, value in settings.items()]


def copied(names, target):
    "Copy what is there of files and folders of the checkout, but for byte code and what is hidden. Returns target."
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns('__pycache__', '.*'))
        elif (ROOT / name).exists(): shutil.copy(ROOT / name, target / name)
    return target


context = multiprocessing.get_context('forkserver')
context.set_forkserver_preload(['credit_rl.train', 'transformers.models.qwen2.modeling_qwen2'])


def apart(function, *given, **how):
    "Exit code of a function in a process of its own, which sees no GPU and says nothing."
    child = context.Process(target=_mute, args=(function, given, how))
    child.start()
    try: child.join()
    finally: child.kill()               # one that has ended does not mind; Python would wait for another for ever
    return child.exitcode


def _mute(function, given, how):
    import torch
    sys.stdout = sys.stderr = open(os.devnull, 'w')
    torch.cuda.is_available = lambda: False
    function(*given, **how)


class Started(subprocess.Popen):
    "A module as a process of its own, and what it said so far; a variable of the environment that is None is left out."
    def __init__(self, *command, cwd=ROOT, **environment):
        given = {**os.environ, 'PYTHONPATH': str(ROOT), 'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': '1',
                 'PYTHONUNBUFFERED': '1', **environment}
        super().__init__([sys.executable, '-m', *map(str, command)], cwd=cwd, text=True, stdin=subprocess.DEVNULL,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         env={name: value for name, value in given.items() if value is not None})
        self.said = ''

    def read_until(self, words):
        "Read up to words that must come. A line may hold what two ranks printed at once, and break in between."
        while words not in self.said.replace('\n', ''):
            line = self.stdout.readline()
            if not line: pytest.fail(f'{words!r} was never said, but:\n{self.said[-6000:]}')
            self.said += line

    def end(self, seconds=400):
        "Wait for its end: (exit code, what it said). The time is for a busy machine."
        try: self.said += self.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired: pytest.fail(f'it has not ended after {seconds} s:\n{self.said[-6000:]}')
        return self.returncode, self.said

    def kill_all(self):
        "End it and all that it started."
        import psutil
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.pid).children(recursive=True): process.kill()
        self.kill()


def ranks_of(pid, wait_for=0):
    "The ranks among what a process started: rank -> psutil.Process."
    import psutil
    while True:
        found = {}
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if 'RANK' in (environment := child.environ()): found[int(environment['RANK'])] = child
        if len(found) >= wait_for: return found
        time.sleep(.1)


def on_ranks(script, ranks, out, *arguments, seconds=540):
    "Run a script on some ranks: what each wrote to `out`. Judged by these files, for gloo may fall over at exit."
    import torch
    process = Started('torch.distributed.run', '--nproc_per_node', ranks, '--master_addr', '127.0.0.1', '--master_port',
                      free_port(), script, out, *arguments, CUDA_VISIBLE_DEVICES=os.environ.get('CUDA_VISIBLE_DEVICES'),
                      GLOO_SOCKET_IFNAME='lo' if sys.platform == 'linux' else None)
    said = ''
    try: said = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired: pass
    finally: process.kill_all()
    files = [Path(f'{out}.{rank}') if rank else Path(out) for rank in range(ranks)]
    assert all(map(Path.exists, files)), f'{ranks} ranks left no result:\n{said[-6000:]}'
    return [torch.load(file, weights_only=True) for file in files]
