"""Run notebooks run by papermill as a user would, and what they show; not a test file."""
import atexit
import functools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import yaml

ROOT = Path(__file__).resolve().parents[2]


def notebook_path(stem):
    "Where the notebook of a stem such as '90_train' lies, whichever chapter it is in."
    (path,) = (ROOT / 'nbs').rglob(f'{stem}.ipynb')
    return path


@functools.cache
def kernel():
    "The manager of a kernel that notebooks share one after the other; it ends with this process."
    import conftest
    from jupyter_client import AsyncKernelManager
    from jupyter_core.utils import run_sync
    manager = AsyncKernelManager(kernel_name='python3')
    run_sync(manager.start_kernel)(env={**os.environ, 'CUDA_VISIBLE_DEVICES': ''})
    conftest.SHARED.append(manager.provisioner.pid)
    atexit.register(manager.provisioner.process.kill)
    return manager


def clean_kernel(cwd):
    "The shared kernel without what a notebook named before, in another working directory."
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook
    cell = new_code_cell(f'%reset -f\nimport os\nos.chdir({str(cwd)!r})')
    NotebookClient(new_notebook(cells=[cell]), km=kernel(), timeout=300).execute()
    return kernel()


def papermill(out, *arguments, settings, cwd, notebook='90_train', fresh=False):
    """Run a run notebook as the command does, of which only the reading of `-p name value` is done here, in the kernel
    that these notebooks share, or in a fresh one. Returns (exit code, what it printed and the error if any, the
    notebook as it was saved)."""
    from papermill import PapermillExecutionError, execute_notebook
    here = {} if fresh else {'km': clean_kernel(cwd)}
    flags, names, values = arguments[::3], arguments[1::3], arguments[2::3]
    assert set(flags) <= {'-p'} and len(names) == len(values), f'wanted -p name value ..., got {arguments}'
    given = {**settings, **{name: yaml.safe_load(value) for name, value in zip(names, values)}}
    out.parent.mkdir(parents=True, exist_ok=True)
    code, error = 0, ''
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=''):
        try:
            execute_notebook(str(notebook_path(notebook)), str(out), given, cwd=str(cwd), progress_bar=False, **here)
        except PapermillExecutionError as e: code, error = 1, str(e)
    saved = json.loads(out.read_text())
    return code, printed(saved) + error, saved


def outputs(notebook):
    "All outputs of a notebook: list of (index of the cell, output)."
    return [(i, o) for i, cell in enumerate(notebook['cells']) for o in cell.get('outputs', [])]


def shown(notebook, kind):
    "What a notebook shows of a MIME type."
    return [''.join(o['data'][kind]) for _, o in outputs(notebook) if kind in o.get('data', {})]


def printed(notebook):
    return ''.join(''.join(o['text']) for _, o in outputs(notebook) if o['output_type'] == 'stream')


def commands_of(name):
    "The commands of papermill in the head of a papers' file: list of lists of words."
    return [shlex.split(line[4:]) for line in (ROOT / 'runs' / 'params' / f'{name}.yaml').read_text().splitlines()
            if line.startswith('#   papermill ')]


def typed(words, given, cwd):
    "Run a command of papermill with settings that stand over the files'. Returns the notebook."
    done = subprocess.run([sys.executable, '-m', *words, '-y', json.dumps(given), '--no-progress-bar'], cwd=cwd,
                          env={**os.environ, 'CUDA_VISIBLE_DEVICES': ''}, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    notebook = json.loads((cwd / words[2]).read_text())
    assert not [o for _, o in outputs(notebook) if o['output_type'] == 'error']
    return notebook
