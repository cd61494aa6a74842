"""Run notebooks run by papermill as a user would, and what they show; not a test file."""
import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]


def papermill(out, *arguments, settings, cwd, notebook='90_train'):
    "Run a run notebook as the command does. Returns (exit code, what was printed, the notebook as it was saved)."
    out.parent.mkdir(parents=True, exist_ok=True)
    given = out.parent / 'settings.yaml'
    given.write_text(yaml.safe_dump(settings))
    template = str(ROOT / 'nbs' / f'{notebook}.ipynb')
    command = [template, str(out), '-f', str(given), *arguments, '--log-output', '--no-progress-bar']
    done = subprocess.run([sys.executable, '-m', 'papermill', *command], cwd=cwd, text=True, timeout=540,
                          env={**os.environ, 'CUDA_VISIBLE_DEVICES': ''}, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout, json.loads(out.read_text())


def outputs(notebook):
    "All outputs of a notebook: list of (index of the cell, output)."
    return [(i, o) for i, cell in enumerate(notebook['cells']) for o in cell.get('outputs', [])]


def shown(notebook, kind):
    "What a notebook shows of a MIME type."
    return [''.join(o['data'][kind]) for _, o in outputs(notebook) if kind in o.get('data', {})]


def printed(notebook):
    return ''.join(''.join(o['text']) for _, o in outputs(notebook) if o['output_type'] == 'stream')
