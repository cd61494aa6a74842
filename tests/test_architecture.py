"""What holds for every notebook: floors, modules, isolation, outputs. Rules are functions that give complaints."""
import ast
import functools
import json
import re
import sys
import tempfile
from pathlib import Path

import pytest

from credit_rl.parameters import notebooks_in

ROOT = Path(__file__).resolve().parents[1]
NUMBERED = re.compile(r'(\d\d\d?)_([a-z][a-z0-9_]*)')
APART = ('experiments', 'papers')   # chapters
# they know no method by its name
LOOP = ('learner', 'sharded', 'methods', 'step_metrics', 'dry_run', 'settings', 'setup', 'train', 'sft', 'prepare',
        'export')
# written by hand: other names of modules
ALIASES = {'folr', 'smdp'}
HERE = [str(p) for p in (ROOT, ROOT.parent, Path.home(), Path(tempfile.gettempdir())) if p != Path(p.anchor)]
PATHS = re.compile('(?<![\\w/.:<])(?:' + '|'.join(map(re.escape, HERE)) +
                   '|/(?:home|root|Users|tmp|var|usr|opt|mnt|private|scratch))/\\w')


# they export nothing, so they may import anything: the README, and the tour, whose three zeros put it before 00
FRONT = ('index', '000_tour')


class Cell:
    "One cell: its source, directives (`#| name: rest` as a dict), tags, outputs, and syntax tree without magics."
    def __init__(self, d):
        self.source, self.code = ''.join(d['source']), d['cell_type'] == 'code'
        self.tags, self.outputs = d['metadata'].get('tags', []), d.get('outputs', [])
        self.ran = bool(self.outputs) or d.get('execution_count') is not None
        self.directives = dict(re.findall(r'^#\s*\|\s*(\w+):?[ \t]*(.*?)\s*$', self.source, re.M)) if self.code else {}
        self.exported = any(name in self.directives for name in ('export', 'exporti', 'exports'))

    @functools.cached_property
    def tree(self):
        lines = (re.sub(r'^(\s*)[%!].*', r'\1pass', line) for line in self.source.splitlines())
        return ast.parse('\n'.join(lines) if self.code else '')

    def asserts(self):
        return any(isinstance(n, ast.Assert) or isinstance(n, ast.Call) and 'assert' in ast.unparse(n.func)
                   for n in ast.walk(self.tree))


class Notebook:
    "A notebook of nbs/: `number` and `name` from its file name, the folder that is its chapter, its cells."
    def __init__(self, stem, text, chapter='nbs'):
        self.stem, self.chapter, self.cells = stem, chapter, [Cell(d) for d in json.loads(text)['cells']]
        match = NUMBERED.fullmatch(stem) if stem not in FRONT else None
        self.number, self.name = (int(match[1]), match[2]) if match else (None, stem)
        self.code = [c for c in self.cells if c.code]
        self.exported = [c for c in self.code if c.exported]
        self.modules = [c.directives['default_exp'] for c in self.code if 'default_exp' in c.directives]
        self.runs = self.number is not None and self.number >= 90


def imports(tree):
    "Full dotted names that a tree imports, at any depth: 'credit_rl.metrics', 'torch.nn'."
    for n in ast.walk(tree):
        if isinstance(n, ast.Import):
            yield from (a.name for a in n.names)
        elif isinstance(n, ast.ImportFrom):
            whole = n.module in ('credit_rl', 'credit_rl.studies')
            yield from (f'{n.module}.{a.name}' for a in n.names) if whole else ['.' * n.level + (n.module or '')]


def module_of(name):
    "The module of a full dotted name below credit_rl: 'metrics', 'lab' of credit_rl.studies."
    return name.removeprefix('credit_rl.').removeprefix('studies.').split('.')[0]


# ---- rules on one notebook ----

def floors(nb, numbers):
    "Imports of what exports come from smaller numbers; cells that are not exported may import their own module."
    for c in nb.code:
        for name in imports(c.tree):
            if name.startswith('.'):
                yield f'imports {name} relatively; write credit_rl.MODULE'
            elif name.startswith('credit_rl.'):
                module = module_of(name)
                own = module == nb.name and not c.exported
                if module not in numbers:
                    yield f'imports {name}, which no notebook exports'
                elif not own and numbers[module] >= (nb.number if nb.exported and nb.number is not None else 100):
                    yield f'imports {name} of notebook {numbers[module]:02d}'


@functools.cache
def apart():
    "Modules of the chapters that nothing else may stand on."
    return {p.stem.partition('_')[2] for chapter in APART for p in notebooks_in(ROOT / 'nbs' / chapter)}


def experiments_and_papers_apart(nb, numbers):
    "Nothing outside APART imports from it, front pages aside: who reads a rule need not read an experiment."
    if nb.chapter in APART or nb.stem in FRONT: return
    modules = {module_of(name) for c in nb.code for name in imports(c.tree) if name.startswith('credit_rl.')}
    yield from (f'imports {name}, of a chapter apart' for name in sorted(modules & apart() - {nb.name}))


def named_like_its_module(nb, numbers):
    over = nb.chapter == 'experiments' and not nb.exported     # a page that only reads what a study wrote
    if nb.runs or nb.number is None or over:
        return [f'exports to {nb.modules}'] if nb.modules or nb.exported else []
    wanted = f'studies.{nb.name}' if nb.chapter in APART else nb.name
    return [] if nb.modules == [wanted] else [f'wanted one `default_exp {wanted}`, got {nb.modules}']


def no_notebook_tools(nb, numbers):
    return [f'exports an import of {name}' for c in nb.exported for name in imports(c.tree)
            if name.split('.')[0] in ('nbdev', 'fastcore')]


def torch_alone(nb, numbers):
    "Floors 3 and 4 load with torch, the standard library and this package."
    if nb.number is not None and 30 <= nb.number <= 49:
        for c in nb.exported:
            body = [n for n in c.tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
            for name in imports(ast.Module(body, [])):
                if name.split('.')[0] not in {'torch', 'credit_rl', *sys.stdlib_module_names}:
                    yield f'imports {name} when it is loaded'


def nothing_private_from_elsewhere(nb, numbers):
    "Names that begin with _ stay in their module: neither imported nor reached through it."
    modules = {a.asname or a.name for c in nb.code for n in ast.walk(c.tree)
               if isinstance(n, ast.ImportFrom) and n.module in ('credit_rl', 'credit_rl.studies') for a in n.names}
    for c in nb.code:
        for n in ast.walk(c.tree):
            if isinstance(n, ast.ImportFrom) and n.module and n.module.startswith('credit_rl.'):
                yield from (f'imports {n.module}.{a.name}' for a in n.names if private(a.name))
            elif isinstance(n, ast.Attribute) and private(n.attr) and isinstance(n.value, ast.Name):
                if n.value.id in modules: yield f'uses {n.value.id}.{n.attr}'


def private(name):
    return name.startswith('_') and not name.startswith('__')


# words of methods that mean something else in the loop: metrics; what a measurement is made at; weights of a micro-batch's
# tokens; the mean over several sets; a key of the rewards
OTHER_MEANINGS = {'turns', 'calls', 'right', 'weights', 'all', 'outcome'}


@functools.cache
def method_words():
    "(names of methods and parts, names of their options), as credit_rl.methods lists them in its dicts."
    from credit_rl import methods
    rows = [d for name, d in vars(methods).items() if name.isupper() and name[0] != '_' and isinstance(d, dict)]
    assert {'tips', 'folr', 'turns', 'value', 'dual-clip'} <= {name for d in rows for name in d}, 'where are the parts?'
    names = {name for d in rows for name in d}
    options = {name for d in rows for part in d.values() for name in getattr(part, 'options', {})}
    return names - OTHER_MEANINGS, options - OTHER_MEANINGS


def loop_knows_no_method(nb, numbers):
    "No text in the loop that is compared with something, or is a key, names a method, a part or an option."
    if nb.name not in LOOP: return
    names, options = method_words()
    for c in nb.exported:
        for n in ast.walk(c.tree):
            asked, of = asked_with(n)
            words = {x.value for x in asked if isinstance(x, ast.Constant) and isinstance(x.value, str)}
            if not re.search(r'\boptions\b', of):                      # of those no word may be a key
                words &= names if isinstance(n, ast.Dict) else names | options
            yield from (f'asks for {word!r}: {ast.unparse(n)[:70]}' for word in sorted(words))


def asked_with(n):
    "What a node of a syntax tree compares, matches or uses as a key: (nodes, what is asked, as text)."
    if isinstance(n, ast.Compare):
        return [x for side in (n.left, *n.comparators) for x in getattr(side, 'elts', [side])], ''
    if isinstance(n, ast.MatchValue): return [n.value], ''
    if isinstance(n, ast.Dict): return n.keys, ''
    if isinstance(n, ast.Subscript): return [n.slice], ast.unparse(n.value)
    if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ('get', 'pop', 'setdefault'):
        return n.args[:1], ast.unparse(n.func.value)
    return [], ''


def nothing_skipped(nb, numbers):
    return [f'`#| eval: false` on: {c.source.splitlines()[-1]}' for c in nb.code
            if c.directives.get('eval', '').lower() == 'false' and (c.exported or c.asserts())]


def clean_outputs(nb, numbers):
    "Outputs hold no folder of their machine, no error, and no progress bar that only a kernel could draw."
    for c in nb.code:
        for o in c.outputs:
            if any('widget-view' in kind for kind in o.get('data', {})):
                yield f'a widget is left in the output of: {c.source[:60]!r}'
            shown = {k: v for k, v in o.get('data', {}).items() if not k.startswith('image/')}
            text = json.dumps([o.get('text', ''), shown, o.get('traceback', '')]).replace('\\n', '\n')
            if o['output_type'] == 'error' or 'Traceback (most recent call last)' in text:
                yield f'an error is left in the output of: {c.source[:60]!r}'
            if path := PATHS.search(text):
                yield f'{text[path.start():path.start() + 40]!r} is in the output of: {c.source[:60]!r}'


def executed(nb, numbers):
    "A library notebook shows what its cells gave."
    if nb.runs or not nb.exported: return
    if not any(c.outputs for c in nb.code): yield 'has no outputs: execute it before it is committed'
    for c in nb.code:
        calls = [n.value.func for n in c.tree.body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
        if not c.outputs and 'eval' not in c.directives and any(getattr(f, 'id', '') == 'print' for f in calls):
            yield f'prints and shows nothing: {c.source[:60]!r}'


def run_notebook(nb, numbers):
    "A run notebook is a template: parameters, calls, no functions, no outputs."
    if nb.runs:
        if sum('parameters' in c.tags for c in nb.code) != 1:
            yield 'wanted one cell tagged `parameters`'
        for c in nb.code:
            if c.ran:
                yield f'a cell has outputs or a count: {c.source[:60]!r}'
            for n in ast.walk(c.tree):
                if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    yield f'defines {n.name}'
                elif isinstance(n, ast.Assign) and isinstance(n.value, ast.Lambda):
                    yield f'defines {ast.unparse(n.targets[0])}'
        first = next((name for c in nb.code for name in imports(c.tree)), 'credit_rl.launch')
        if first != 'credit_rl.launch': yield f'imports {first} before let_threads_sleep() of credit_rl.launch'


RULES = [floors, experiments_and_papers_apart, named_like_its_module, no_notebook_tools, torch_alone,
         nothing_private_from_elsewhere, loop_knows_no_method, nothing_skipped, clean_outputs, executed, run_notebook]


# ---- the tests ----

PATHS_OF_NOTEBOOKS = sorted(notebooks_in(ROOT / 'nbs'), key=lambda p: p.stem)
NOTEBOOKS = [Notebook(p.stem, p.read_text(encoding='utf-8'), p.parent.name) for p in PATHS_OF_NOTEBOOKS]
NUMBERS = {nb.name: nb.number for nb in NOTEBOOKS if nb.number is not None and not nb.runs}


@pytest.mark.parametrize('rule', RULES, ids=lambda rule: rule.__name__)
def test_rule(rule):
    complaints = [f'{nb.stem}: {complaint}' for nb in NOTEBOOKS for complaint in rule(nb, NUMBERS)]
    assert not complaints, '\n' + '\n'.join(complaints)


def test_a_modules_tests_lie_in_a_folder_named_as_its_chapter():
    "tests/1_rules/test_tspo.py is of nbs/1_rules/32_tspo.ipynb, and so is test_tspo_MORE.py."
    chapters, wrong = {nb.name: nb.chapter for nb in NOTEBOOKS if not nb.runs}, []
    for path in (ROOT / 'tests').rglob('test_*.py'):
        words = path.stem.split('_')[1:]
        names = ['_'.join(words[:n]) for n in range(len(words), 0, -1)]
        name = next((name for name in names if name in chapters), None)
        apart = path.parent.name in ('tests', 'program', 'bench', 'gpu')
        if name and not apart and path.parent.name != chapters[name]: wrong.append(f'{path.name}: {chapters[name]}')
    assert not wrong


def test_one_notebook_a_module_and_one_module_a_notebook():
    assert not [nb.stem for nb in NOTEBOOKS if nb.number is None and nb.stem not in FRONT], 'wanted NN_name.ipynb'
    numbers = [nb.number for nb in NOTEBOOKS if nb.number is not None]
    assert len(numbers) == len(set(numbers)), f'two notebooks share a number: {numbers}'
    exported = [m for nb in NOTEBOOKS for m in nb.modules]
    assert len(exported) == len(set(exported)), f'two notebooks write one module: {exported}'
    paths = [p.relative_to(ROOT / 'credit_rl') for p in (ROOT / 'credit_rl').rglob('*.py')]
    modules = {'.'.join(p.with_suffix('').parts) for p in paths if p.stem not in {'__init__', '_modidx', *ALIASES}}
    assert modules == set(exported), (f'without a notebook: {modules - set(exported)}; not exported yet: '
                                      f'{set(exported) - modules}')
    assert {len(p.parts) for p in paths} == {1, 2} and {p.parts[0] for p in paths if len(p.parts) > 1} == {'studies'}


def notebook(stem, *cells, **first):
    "A notebook of code cells for the test below; `first` is merged into its first cell."
    cells = [{'cell_type': 'code', 'source': s, 'metadata': {}, 'outputs': [], 'execution_count': None} for s in cells]
    cells[0] |= first
    return Notebook(stem, json.dumps({'cells': cells}))


def output(text):
    return [{'output_type': 'stream', 'name': 'stdout', 'text': [text]}]


NUMBERED_SO = {'a': 11, 'b': 12, 'c': 13}
BAD = [
    (floors, notebook('12_b', '#| export\nfrom credit_rl.c import f')),
    (floors, notebook('12_b', '#| export\nimport credit_rl.b')),
    (floors, notebook('12_b', 'from credit_rl.gone import f')),
    (floors, notebook('12_b', '#| export\nfrom .a import f')),
    (experiments_and_papers_apart, notebook('12_b', 'from credit_rl.studies.longform import f')),
    (named_like_its_module, notebook('12_b', '#| default_exp c')),
    (named_like_its_module, notebook('12_b', '#| export\nx = 1')),
    (named_like_its_module, notebook('93_b', '#| default_exp b')),
    (named_like_its_module, notebook('000_tour', '#| default_exp tour')),
    (no_notebook_tools, notebook('12_b', '#| export\nfrom fastcore.basics import patch')),
    (torch_alone, notebook('34_b', '#|export\nimport math, numpy as np')),
    (nothing_private_from_elsewhere, notebook('12_b', 'from credit_rl.a import g, _h')),
    (nothing_private_from_elsewhere, notebook('12_b', '#| export\nfrom credit_rl import a as m\nx = m._h()')),
    (loop_knows_no_method, notebook('63_train', "#| export\nteaches = name == 'tips'")),
    (loop_knows_no_method, notebook('63_train', "#| export\nif method.reward in ('shaping', 'record'): pass")),
    (loop_knows_no_method, notebook('62_setup', "#| export\nmatch rule:\n    case 'smdp': pass")),
    (loop_knows_no_method, notebook('61_settings', "#| export\nhigh = method.options['band'][1]")),
    (loop_knows_no_method, notebook('52_learner', "#| export\nREADS = {'tips': 'teacher'}")),
    (nothing_skipped, notebook('12_b', '#| eval: false\nassert f() == 1')),
    (nothing_skipped, notebook('12_b', '#| export\n#| eval: false\ndef f(): pass')),
    (clean_outputs, notebook('12_b', 'f()', outputs=output('saved /home/ada/model'))),
    (clean_outputs, notebook('12_b', 'f()', outputs=output(f'saved {ROOT}/model'))),
    (clean_outputs, notebook('12_b', 'f()', outputs=[{'output_type': 'error', 'traceback': ['no']}])),
    (clean_outputs, notebook('12_b', 'f()', outputs=[
        {'output_type': 'display_data', 'data': {'application/vnd.jupyter.widget-view+json': {}}}])),
    (executed, notebook('12_b', '#| export\nx = 1', 'x')),
    (executed, notebook('12_b', '#| export\nx = 1', 'print(x)', outputs=output('1'))),
    (run_notebook, notebook('92_b', 'x = 1')),
    (run_notebook, notebook('92_b', 'x = 1', metadata={'tags': ['parameters']}, execution_count=3)),
    (run_notebook, notebook('92_b', 'def f(): pass', metadata={'tags': ['parameters']})),
    (run_notebook, notebook('92_b', 'x = 1', 'import torch', metadata={'tags': ['parameters']})),
]
GOOD = [
    notebook('12_b', '#| default_exp b', '#| export\nimport os\nfrom credit_rl.a import g\ndef f():\n    return g(os)',
             '%time f()\nfrom credit_rl.b import f\nassert f() == 1', '#| eval: false\nlong_run()',
             outputs=output('1')),
    notebook('92_b', 'x = 1', metadata={'tags': ['parameters']}),
    notebook('000_tour', 'from credit_rl.c import f'),
    notebook('63_train', '#| default_exp train', '#| export\nfrom credit_rl.a import *\nclass _Parent: x = 1',
             '#| export\nclass _One(_Parent): pass\nclass _Two(_Parent): pass', 'assert 1 + 1 == 2',
             *['#| export\n_x = table["seconds"], table.get("em"), kind == "plain", say("tips")'] * 5,
             outputs=output('')),
    notebook('12_b', '#| default_exp b',
             outputs=output('1/home/2 </tmp/> see https://example.org/tmp/x and runs/demo')),
]


@pytest.mark.parametrize('rule, bad', BAD, ids=[f'{rule.__name__}-{i}' for i, (rule, _) in enumerate(BAD)])
def test_rules_notice(rule, bad):
    assert list(rule(bad, NUMBERED_SO))


@pytest.mark.parametrize('good', GOOD, ids=['library', 'run', 'tour', 'loop', 'output'])
def test_rules_let_good_notebooks_pass(good):
    assert not [c for rule in RULES for c in rule(good, NUMBERED_SO)]
