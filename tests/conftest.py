"""Fixtures that every test may use."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope='session')
def root():
    "The top of the checkout."
    return ROOT


@pytest.fixture(scope='session')
def data():
    "The folder of real data sets, one sub-folder each."
    folder = os.environ.get('CREDIT_RL_DATA')
    if not folder:
        pytest.skip('CREDIT_RL_DATA is not set: no real data sets here')
    if not Path(folder).is_dir():
        pytest.fail(f'CREDIT_RL_DATA={folder} is not a folder')
    return Path(folder)


@pytest.fixture(scope='session')
def run_python():
    "Run this Python with some arguments in the checkout; fails the test, with what it printed, on another exit code than `code`."
    def run(*args, code=0, env=None, cwd=ROOT):
        done = subprocess.run([sys.executable, *map(str, args)], cwd=cwd, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == code, f'exit code {done.returncode}, wanted {code}:\n{done.stdout[-6000:]}'
        return done.stdout
    return run
