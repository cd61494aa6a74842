"""The checks for while one works: what changed and what stands on it directly, in two minutes on two cores.

Runs the tour, the notebooks that changed since the last commit and those whose modules import theirs directly; the
test files that changed or that import one of these modules; and tests/test_architecture.py. Left out: what depends on
a change only through other modules; the run notebooks 9x; tests that start processes (the mark `process`); tests that
took longer than `--below` seconds when durations were recorded (tests/durations.json). `make test-all` leaves nothing
out.
"""
import argparse
import ast
import functools
import os
import subprocess
import sys
import time
from pathlib import Path

from credit_rl.parameters import notebooks_in

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
TOUR = 'tour'                  # the notebook that newcomers run first: it stands on nearly everything


@functools.cache
def imports(path):
    "Modules of this package, and files of tests/, that a file imports anywhere: set of names."
    found, own = set(), lambda module: module.removeprefix('credit_rl.').removeprefix('studies.')
    for n in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(n, ast.Import): found |= {own(a.name) for a in n.names}
        elif isinstance(n, ast.ImportFrom):
            here = n.module in (None, 'credit_rl', 'credit_rl.studies')                          # from . import x; from credit_rl import x
            found |= {a.name for a in n.names} if here else {own(n.module)}
    return found


def changed_since(commit):
    "Files that differ from a commit, new ones that git does not ignore included: list of paths from the root."
    git = lambda *how: subprocess.check_output(['git', *how], cwd=ROOT, text=True).split('\n')
    return sorted({*git('diff', '--name-only', commit), *git('ls-files', '--others', '--exclude-standard')} - {''})


def names_of(paths):
    "What changed, by names: (modules, files of tests/ without .py, run notebooks)."
    modules, tests, runs = set(), set(), set()
    for path in map(Path, paths):
        number, _, name = path.stem.partition('_')
        if path.parts[0] == 'nbs' and path.suffix == '.ipynb':
            if path.stem == 'index': modules.add('index')
            else: (runs if number >= '90' else modules).add(name)
        elif path.parts[0] == 'credit_rl' and path.suffix == '.py' and path.stem[0] != '_': modules.add(path.stem)
        elif path.parts[0] == 'tests' and path.suffix == '.py': tests.add(path.stem)
    return modules, tests, runs


def chosen(modules, tests):
    "The notebooks to run and the test files, in order."
    code = {p.stem: imports(p) for p in (ROOT / 'credit_rl').rglob('*.py')}
    books = sorted(notebooks_in(ROOT / 'nbs'), key=lambda p: p.stem)
    library = [p for p in books if not '90' <= p.stem < 'a']
    name = lambda p: p.stem.partition('_')[2] or p.stem                     # index.ipynb has no number
    run = [p for p in library if name(p) in {*modules, TOUR} or code.get(name(p), set()) & modules]
    files = [p for p in sorted((ROOT / 'tests').rglob('test_*.py'))
             if p.stem in {*tests, 'test_architecture'} or imports(p) & (modules | tests)]
    return run, files


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--changed', nargs='+', metavar='NAME', help='the modules that changed, if git need not say')
    parser.add_argument('--since', default='HEAD', metavar='COMMIT', help='compare with another commit, e.g. main')
    parser.add_argument('--below', default='1.5', metavar='SECONDS', help='the longest a test may have taken')
    parser.add_argument('--list', action='store_true', help='only say what would be run')
    return parser.parse_args()


def notebooks_of(names):
    "The notebooks that export modules: list of paths from the root."
    paths = [p.relative_to(ROOT) for name in names for p in notebooks_in(ROOT / 'nbs')
             if p.stem < '90' and p.stem.partition('_')[2] == name]
    if len(paths) != len(names): sys.exit(f'wanted names of modules, such as advantages, got {names}')
    return paths


def check(notebooks, files, below):
    "Run the notebooks on one core and the tests on another. Returns whether any failed."
    here = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])])
    env = {'OMP_WAIT_POLICY': 'passive', **os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': here}
    how = dict(cwd=ROOT, env=env, text=True)
    wanted = '^(' + '|'.join(p.stem for p in notebooks) + r')\.ipynb$'
    ours = subprocess.Popen([BIN / 'nbdev_test', '--path', 'nbs', '--file_re', wanted, '--n_workers', '0'],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how) if notebooks else None
    tests = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-m', 'not process', '--below', below, *files], **how)
    if ours: print('== notebooks\n' + ours.communicate()[0])
    return bool(tests.returncode or ours and ours.returncode)


def main():
    given, start = read_arguments(), time.monotonic()
    modules, tests, runs = names_of(notebooks_of(given.changed) if given.changed else changed_since(given.since))
    if runs: print('left out, papermill runs them in `make test-all`:', *sorted(runs))
    if not modules | tests: return print(f'no notebook and no test differs from {given.since}')
    if not given.list: subprocess.run([BIN / 'nbdev_export'], cwd=ROOT, check=True)
    notebooks, files = chosen(modules, tests)
    print('notebooks:', *(p.stem for p in notebooks), '\ntests:', *(p.stem for p in files), flush=True)
    if given.list: return
    failed = check(notebooks, files, given.below)
    print(f'{"failed" if failed else "passed"} after {time.monotonic() - start:.0f} s')
    sys.exit(failed)


if __name__ == '__main__':
    main()
