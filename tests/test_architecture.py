"""What holds for every notebook: floors, one module each, lengths, outputs. Each rule is a function that gives its complaints."""
import ast
import json
import re
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NUMBERED = re.compile(r'(\d\d)_([a-z][a-z0-9_]*)')
LONGEST = 45  # lines of an exported cell
HERE = [str(p) for p in (ROOT, ROOT.parent, Path.home(), Path(tempfile.gettempdir())) if p != Path(p.anchor)]
PATHS = re.compile('(?<![\\w/.:<])(?:' + '|'.join(map(re.escape, HERE)) +
                   '|/(?:home|root|Users|tmp|var|usr|opt|mnt|private|scratch))/\\w')


class Cell:
    "One cell: its source, directives (`#| name: rest` as a dict), tags, outputs, and syntax tree without magics."
    def __init__(self, d):
        self.source, self.code = ''.join(d['source']), d['cell_type'] == 'code'
        self.tags, self.outputs = d['metadata'].get('tags', []), d.get('outputs', [])
        self.ran = bool(self.outputs) or d.get('execution_count') is not None
        self.directives = dict(re.findall(r'^#\s*\|\s*(\w+):?[ \t]*(.*?)\s*$', self.source, re.M)) if self.code else {}
        self.exported = any(name in self.directives for name in ('export', 'exporti', 'exports'))
        lines = (re.sub(r'^(\s*)[%!].*', r'\1pass', line) for line in self.source.splitlines())
        self.tree = ast.parse('\n'.join(lines) if self.code else '')

    def asserts(self):
        return any(
            isinstance(n, ast.Assert) or isinstance(n, ast.Call) and 'assert' in ast.unparse(n.func)
            for n in ast.walk(self.tree))


class Notebook:
    "A notebook of nbs/: `number` and `name` from its file name, its cells."
    def __init__(self, stem, text):
        self.stem, self.cells = stem, [Cell(d) for d in json.loads(text)['cells']]
        match = NUMBERED.fullmatch(stem)
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
            yield from (f'{n.module}.{a.name}' for a in n.names) if n.module == 'credit_rl' else [('.' * n.level) +
                                                                                                  (n.module or '')]


def definitions(cells):
    "Public names that cells define at the top level."
    for c in cells:
        for n in c.tree.body:
            if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names = [n.name]
            elif isinstance(n, (ast.Assign, ast.AnnAssign)):
                targets = n.targets if isinstance(n, ast.Assign) else [n.target]
                # not a.b = …
                names = [
                    x.id
                    for t in targets
                    for x in ast.walk(t)
                    if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
                ]
            else:
                names = []
            yield from (x for x in names if not x.startswith('_'))


# ---- rules on one notebook ----

def floors(nb, numbers):
    "Imports come from smaller numbers only; cells that are not exported may import their own module."
    for c in nb.code:
        for name in imports(c.tree):
            if name.startswith('.'):
                yield f'imports {name} relatively; write credit_rl.MODULE'
            elif name.startswith('credit_rl.'):
                module = name.split('.')[1]
                own = module == nb.name and not c.exported
                if module not in numbers:
                    yield f'imports {name}, which no notebook exports'
                elif not own and numbers[module] >= (100 if nb.number is None else nb.number):
                    yield f'imports {name} of notebook {numbers[module]:02d}'


def named_like_its_module(nb, numbers):
    if nb.runs or nb.number is None:
        return [f'exports to {nb.modules}'] if nb.modules or nb.exported else []
    return [] if nb.modules == [nb.name] else [f'wanted one `default_exp {nb.name}`, got {nb.modules}']


def no_notebook_tools(nb, numbers):
    return [
        f'exports an import of {name}' for c in nb.exported for name in imports(c.tree)
        if name.split('.')[0] in ('nbdev', 'fastcore')
    ]


def torch_alone(nb, numbers):
    "Floors 3 and 4 load with torch, the standard library and this package."
    if nb.number is not None and 30 <= nb.number <= 49:
        for c in nb.exported:
            body = [n for n in c.tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
            for name in imports(ast.Module(body, [])):
                if name.split('.')[0] not in {'torch', 'credit_rl', *sys.stdlib_module_names}:
                    yield f'imports {name} when it is loaded'


def short_cells(nb, numbers):
    for c in nb.exported:
        lines = len(c.source.strip().splitlines())
        if lines > LONGEST:
            yield f'an exported cell of {lines} lines: {c.source.splitlines()[1]}'


def everything_shown(nb, numbers):
    "Each public name is used in a cell that is not exported."
    used = {x.id if isinstance(x, ast.Name) else x.attr for c in nb.code if not c.exported
            for x in ast.walk(c.tree) if isinstance(x, (ast.Name, ast.Attribute))}
    return [f'{name} is never shown' for name in definitions(nb.exported) if name not in used]


def nothing_skipped(nb, numbers):
    return [f'`#| eval: false` on: {c.source.splitlines()[-1]}' for c in nb.code
            if c.directives.get('eval', '').lower() == 'false' and (c.exported or c.asserts())]


def clean_outputs(nb, numbers):
    """Outputs name no folder of the machine they were made on and hold no error, and no progress bar that only a
    kernel could draw."""
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
    return [] if nb.runs or not nb.exported or any(c.outputs for c in nb.code) else ['has no outputs: execute it '
                                                                                     'before it is committed']


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


RULES = [
    floors, named_like_its_module, no_notebook_tools, torch_alone, short_cells, everything_shown, nothing_skipped,
    clean_outputs, executed, run_notebook
]


# ---- the tests ----

NOTEBOOKS = [Notebook(p.stem, p.read_text(encoding='utf-8')) for p in sorted((ROOT / 'nbs').glob('*.ipynb'))]
NUMBERS = {nb.name: nb.number for nb in NOTEBOOKS if nb.number is not None and not nb.runs}


@pytest.mark.parametrize('rule', RULES, ids=lambda rule: rule.__name__)
def test_rule(rule):
    complaints = [f'{nb.stem}: {complaint}' for nb in NOTEBOOKS for complaint in rule(nb, NUMBERS)]
    assert not complaints, '\n' + '\n'.join(complaints)


def test_one_notebook_a_module_and_one_module_a_notebook():
    assert not [nb.stem for nb in NOTEBOOKS if nb.number is None and nb.stem != 'index'], 'wanted NN_name.ipynb'
    numbers = [nb.number for nb in NOTEBOOKS if nb.number is not None]
    assert len(numbers) == len(set(numbers)), f'two notebooks share a number: {numbers}'
    exported = [m for nb in NOTEBOOKS for m in nb.modules]
    assert len(exported) == len(set(exported)), f'two notebooks write one module: {exported}'
    modules = {p.stem for p in (ROOT / 'credit_rl').glob('*.py')} - {'__init__', '_modidx'}
    assert modules == set(exported), (f'without a notebook: {modules - set(exported)}; not exported yet: '
                                      f'{set(exported) - modules}')
    assert not [p.name for p in (ROOT / 'credit_rl').iterdir() if p.is_dir() and p.name != '__pycache__'
                ], 'modules stand side by side'


def test_modules_list_what_their_notebooks_define():
    for nb in NOTEBOOKS:
        for module in nb.modules:
            tree = ast.parse((ROOT / 'credit_rl' / f'{module}.py').read_text(encoding='utf-8'))
            lists = {ast.unparse(n.targets[0]): n.value for n in tree.body if isinstance(n, ast.Assign)}
            listed, passed_on = (set(ast.literal_eval(lists.get(name, ast.List([])))) for name in ('__all__', '_all_'))
            assert listed == passed_on | set(definitions(nb.exported)), (f'{module}.__all__ is not what {nb.stem} '
                                                                         'defines; export it again')


def notebook(stem, *cells, **first):
    "A notebook of code cells for the test below; `first` is merged into its first cell."
    cells = [{'cell_type': 'code', 'source': s, 'metadata': {}, 'outputs': [], 'execution_count': None} for s in cells]
    cells[0] |= first
    return Notebook(stem, json.dumps({'cells': cells}))


def output(text):
    return [{'output_type': 'stream', 'name': 'stdout', 'text': [text]}]


BAD = [
    (floors, notebook('12_b', '#| export\nfrom credit_rl.c import f')),
    (floors, notebook('12_b', '#| export\ndef f():\n    from credit_rl import c')),
    (floors, notebook('12_b', '#| export\nimport credit_rl.b')),
    (floors, notebook('12_b', 'from credit_rl.gone import f')),
    (floors, notebook('12_b', '#| export\nfrom .a import f')),
    (named_like_its_module, notebook('12_b', '#| default_exp c')),
    (named_like_its_module, notebook('12_b', '#| export\nx = 1')),
    (named_like_its_module, notebook('93_b', '#| default_exp b')),
    (no_notebook_tools, notebook('12_b', '#| export\nfrom fastcore.basics import patch')),
    (torch_alone, notebook('34_b', '#|export\nimport math, numpy as np')),
    (short_cells, notebook('12_b', '#| export\ndef f():\n' + '    x = 1\n' * 44)),
    (everything_shown, notebook('12_b', '#| export\ndef f(): pass', '# f\n"f"')),
    (nothing_skipped, notebook('12_b', '#| eval: false\nassert f() == 1')),
    (nothing_skipped, notebook('12_b', '#| export\n#| eval: false\ndef f(): pass')),
    (nothing_skipped, notebook('12_b', '#|eval: False\ntorch.testing.assert_close(x, y)')),
    (clean_outputs, notebook('12_b', 'f()', outputs=output('saved /home/ada/model'))),
    (clean_outputs, notebook('12_b', 'f()', outputs=output(f'saved {ROOT}/model'))),
    (clean_outputs, notebook('12_b', 'f()', outputs=[{'output_type': 'error', 'traceback': ['no']}])),
    (
        clean_outputs,
        notebook(
            '12_b',
            'f()',
            outputs=[
                {
                    'output_type': 'display_data',
                    'data': {'application/vnd.jupyter.widget-view+json': {}, 'text/plain': '0/1'},
                }
            ],
        ),
    ),
    (executed, notebook('12_b', '#| export\nx = 1', 'x')),
    (run_notebook, notebook('92_b', 'x = 1')),
    (run_notebook, notebook('92_b', 'x = 1', metadata={'tags': ['parameters']}, execution_count=3)),
    (run_notebook, notebook('92_b', 'def f(): pass', metadata={'tags': ['parameters']})),
]
GOOD = [
    notebook('12_b', '#| default_exp b', '#| export\nimport os\nfrom credit_rl.a import g\ndef f():\n    return g(os)',
             '%time f()\nfrom credit_rl.b import f\nassert f() == 1', '#| eval: false\nlong_run()',
             outputs=output('1')),
    notebook('92_b', 'x = 1', metadata={'tags': ['parameters']}),
    notebook('12_b', '#| default_exp b',
             outputs=output('1/home/2 </tmp/> see https://example.org/tmp/x and runs/demo')),
]


@pytest.mark.parametrize('rule, bad', BAD, ids=[f'{rule.__name__}-{i}' for i, (rule, _) in enumerate(BAD)])
def test_rules_notice(rule, bad):
    assert list(rule(bad, {'a': 11, 'b': 12, 'c': 13}))


@pytest.mark.parametrize('good', GOOD, ids=['library', 'run', 'output'])
def test_rules_let_good_notebooks_pass(good):
    assert not [c for rule in RULES for c in rule(good, {'a': 11, 'b': 12, 'c': 13})]
