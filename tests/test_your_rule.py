"""nbs/your_rule.md, followed literally in a copy of the checkout: its commands run, and nothing else changes."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from started import copied

COPIED = ('nbs', 'credit_rl', 'data/tiny_base', 'runs/params', 'settings.ini', 'setup.py',
          'pyproject.toml', 'README.md', 'LICENSE')
SECONDS = 300   # for each command, on a machine with company


@pytest.fixture(scope='module')
def guide(root):
    "The guide's blocks in their order: list of (language, text)."
    text = (root / 'nbs' / 'your_rule.md').read_text(encoding='utf-8')
    return re.findall(r'^```(\w+)\n(.*?)^```$', text, re.M | re.S)


def blocks(guide, language):
    return [text for kind, text in guide if kind == language]


@pytest.fixture(scope='module')
def checkout(tmp_path_factory):
    "A copy of what the guide needs."
    return copied(COPIED, tmp_path_factory.mktemp('checkout'))


def files(folder):
    "What stands in each file of a folder, but for byte code and runs: dict path -> bytes."
    found = (p.relative_to(folder) for p in folder.rglob('*') if p.is_file())
    kept = (p for p in found if '__pycache__' not in p.parts and p.parts[:1] != ('runs',) and not p.name[0] == '.')
    return {str(p): (folder / p).read_bytes() for p in kept}


def notebook(guide):
    "The guide's Markdown and Python blocks as cells."
    cells = []
    for i, (language, text) in enumerate((b for b in guide if b[0] in ('markdown', 'python'))):
        cell = {'id': f'c{i:03d}', 'metadata': {}, 'source': text.strip('\n').splitlines(keepends=True)}
        code = {'cell_type': 'code', 'execution_count': None, 'outputs': []}
        cells.append({**cell, **(code if language == 'python' else {'cell_type': 'markdown'})})
    kernel = {'display_name': 'python3', 'language': 'python', 'name': 'python3'}
    return {'cells': cells, 'metadata': {'kernelspec': kernel}, 'nbformat': 4, 'nbformat_minor': 5}


def add_line(path, change):
    "Put the line marked + in a diff after the line before it, in a notebook."
    before, added = (line[1:] for line in change.strip('\n').split('\n'))
    book = json.loads(path.read_text(encoding='utf-8'))
    places = [(c, i) for c in book['cells'] for i, line in enumerate(c['source']) if line.rstrip('\n') == before]
    assert len(places) == 1, f'{before!r} must stand in {path.name} once, found {len(places)} times'
    [(cell, i)] = places
    cell['source'].insert(i + 1, added + '\n')
    path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')


@pytest.fixture(scope='module')
def followed(guide, checkout):
    "The files before, and what each command of the guide said: (dict, dict command -> text)."
    before = files(checkout)
    new = checkout / 'nbs' / '1_rules' / '44_median.ipynb'
    new.write_text(json.dumps(notebook(guide), indent=1) + '\n', encoding='utf-8')
    [change] = blocks(guide, 'diff')
    add_line(checkout / 'nbs' / '1_rules' / '60_methods.ipynb', change)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ['PATH']))
    env = {**os.environ, 'PATH': path, 'PYTHONPATH': str(checkout), 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
    said, [commands] = {}, blocks(guide, 'bash')
    for command in commands.strip().split('\n'):
        done = subprocess.run(['bash', '-c', command], cwd=checkout, env=env, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS)
        assert done.returncode == 0, f'{command}\n{done.stdout[-3000:]}'
        said[command] = done.stdout
    return before, said


@pytest.mark.long
@pytest.mark.process
def test_the_guide_trains_its_rule_and_shows_it(followed, checkout):
    "Three steps that move the weights, a row of the table, and a row of the comparison."
    _, said = followed
    logged = map(json.loads, (checkout / 'runs/median/metrics.jsonl').read_text().splitlines())
    steps = [values for values in logged if 'loss' in values]
    assert [values['step'] for values in steps] == [1, 2, 3] and all(values['grad_norm'] > 0 for values in steps)
    *_, table, comparison = said.values()
    assert re.search(r'^\| median \| .*operatorname\{median\}.* \| this page \| text only \| none \|', table, re.M)
    assert re.search(r'^\| *\W*median\b', comparison, re.M) and re.search(r'^\| *\W*grpo\b', comparison, re.M)


@pytest.mark.long
@pytest.mark.process
def test_one_line_is_all_that_the_rule_changes(followed, checkout, guide):
    "Beside the new notebook, one line of one notebook, and what the export writes."
    before, now = followed[0], files(checkout)
    changed = {name for name in {*before, *now} if before.get(name) != now.get(name)}
    exported = {'credit_rl/median.py', 'credit_rl/methods.py', 'credit_rl/_modidx.py'}
    assert changed == {'nbs/1_rules/44_median.ipynb', 'nbs/1_rules/60_methods.ipynb', *exported}
    lines = lambda book: [line for cell in json.loads(book)['cells'] for line in cell['source']]
    old, new = (lines(state['nbs/1_rules/60_methods.ipynb']) for state in (before, now))
    new.remove('from credit_rl import median\n')
    assert new == old


@pytest.mark.long
@pytest.mark.process
def test_what_the_guide_says_is_refused_is_refused(followed, checkout):
    "A quantile of 2, shaping beside a sum over turns; the mixtures that it names are accepted."
    script = """
from credit_rl.methods import get_method
for spelling in ('prs/median', 'outcome/median/value'): assert get_method(spelling).rule.name == 'median'
assert get_method('median').settings({'q': .75})['q'] == .75
for refused in (lambda: get_method('median').settings({'q': 2}), lambda: get_method('outcome+shaping/median')):
    try: refused()
    except ValueError as e: print(e)
    else: raise AssertionError('accepted')
from credit_rl.compare import plan_jobs
print(len(plan_jobs(['median', 'grpo'], [1, 2, 3], {}, 'runs/median-grpo')), 'runs')
"""
    done = subprocess.run([sys.executable, '-c', script], cwd=checkout, text=True, stdin=subprocess.DEVNULL,
                          env={**os.environ, 'PYTHONPATH': str(checkout)}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=SECONDS)
    assert done.returncode == 0, done.stdout
    assert 'at most 1, got 2' in done.stdout and 'median sums over turns' in done.stdout and '6 runs' in done.stdout
