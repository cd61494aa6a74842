"""Notebooks that were saved, written in the form in which the last commit has them, so that a diff shows what was
edited alone. JupyterLab writes counts, sorts keys and cuts pictures up: one line that is saved is a diff of hundreds.
`make lab` hands this file to JupyterLab by `--config`, which calls `restore` when it saves; `make export` runs it."""
import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EMPTY = {'cells': [], 'metadata': {}, 'nbformat': 4, 'nbformat_minor': 5}


def git(*words):
    "What git says of the files of this checkout: str, None where it fails, as in a folder that is no repository."
    said = subprocess.run(['git', '-C', str(ROOT), *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return said.stdout.decode('utf-8') if said.returncode == 0 else None


def split(part, name=''):
    "What a notebook holds under a name, with source and text as lists of lines; pictures stay whole."
    if isinstance(part, dict): return {k: v if k.startswith('application/') else split(v, k) for k, v in part.items()}
    if isinstance(part, list): return [split(v) for v in part]
    is_text = isinstance(part, str) and (name in ('source', 'text') or name.startswith('text/'))
    return part.splitlines(keepends=True) if is_text else part


def joined(outputs):
    "A cell's outputs, of which a stream's neighbours are one: a slow machine prints in pieces."
    found = []
    for output in outputs:
        last = found[-1] if found else {}
        if output['output_type'] == last.get('output_type') == 'stream' and output['name'] == last['name']:
            last['text'] += output['text']
        else: found.append(output)
    return found


def as_before(text, old):
    """A saved notebook's text in the form of an older one: what says the same stands as it stood there, and of the
    rest, counts, addresses in memory and what a program noted of itself are gone. Cells are known by their ids."""
    import nbformat
    from nbdev.clean import clean_nb
    from nbdev.config import get_config

    def read(text):
        notebook = nbformat.reads(text, as_version=4)
        clean_nb(notebook, allowed_cell_metadata_keys=get_config(path=ROOT).allowed_cell_metadata_keys.split())
        for cell in notebook.cells:
            if cell.cell_type == 'code': cell.outputs = joined(cell.outputs)
        return notebook

    def mend(new, was, stood):
        same = {name: part for name, part in stood.items() if name in new and was.get(name) == new[name]}
        names = [*(name for name in stood if name in new), *(name for name in new if name not in stood)]
        return {name: same[name] if name in same else split(new[name], name) for name in names}

    new, was, stood = read(text), read(old), json.loads(old)
    cells = {cell['id']: (cell, raw) for cell, raw in zip(was.pop('cells'), stood['cells'])}
    found = [mend(cell, *cells.get(cell['id'], ({}, {}))) for cell in new.pop('cells')]
    return json.dumps({'cells': found, **mend(new, was, stood)}, ensure_ascii=False, indent=1) + '\n'


def restore(path):
    "Write a notebook in the form in which the last commit has it, if it is not. Its time stays: JupyterLab minds."
    text, times = path.read_text(encoding='utf-8'), path.stat()
    old = git('show', f'HEAD:./{path.relative_to(ROOT)}') or json.dumps(EMPTY)
    if (new := as_before(text, old)) == text: return
    path.write_text(new, encoding='utf-8')
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def saved_notebooks():
    "Notebooks that differ from the last commit, new ones included: list of paths, none while a merge is open."
    if git('rev-parse', '-q', '--verify', 'MERGE_HEAD'): return []
    said = [git('diff', '--name-only', '--relative', '-z', 'HEAD', '--', 'nbs'),
            git('ls-files', '--others', '--exclude-standard', '-z', '--', 'nbs')]
    paths = {ROOT / name for names in said for name in (names or '').split('\0') if name.endswith('.ipynb')}
    return sorted(filter(Path.exists, paths))


def restore_saved(model, os_path, **_):
    "JupyterLab's hook."
    if model['type'] == 'notebook': restore(Path(os_path).resolve())


if __name__ == '__main__':
    for path in saved_notebooks(): restore(path)
elif 'c' in globals():
    c.FileContentsManager.post_save_hook = restore_saved  # noqa: F821  JupyterLab's configuration
