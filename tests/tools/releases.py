"""Releases of other trainers, read without importing them: they want Ray, vLLM or a GPU, and their signatures stand in
their source. `make test` installs those of tests/releases.txt in a folder of their own, where they are read. With
RELEASES=required (the nightly workflow) a release that is not installed is an error, not a skip."""
import ast
import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import pytest

PINNED = Path(sys.prefix) / 'releases'      # read there, never imported


def missing(why):
    "Skip, or fail where releases are required."
    (pytest.fail if os.environ.get('RELEASES') == 'required' else pytest.skip)(why)


def source(module):
    "The text of a module's file. Skips where its package is not installed; fails where the package lacks the module."
    package, *rest = module.split('.')
    spec = importlib.util.find_spec(package)
    if spec is None and os.environ.get('RELEASES') != 'required': spec = PathFinder.find_spec(package, [str(PINNED)])
    if spec is None or not spec.submodule_search_locations:
        missing(f'{package} is not installed here: pip install --no-deps {package}')
    for place in map(Path, spec.submodule_search_locations):
        for path in (place.joinpath(*rest).with_suffix('.py'), place.joinpath(*rest, '__init__.py')):
            if path.is_file(): return path.read_text(encoding='utf-8')
    pytest.fail(f'{package} has no module {module} any more')


def defined(module, name):
    "The definition of a dotted name in a module's source: an ast node. Fails where it is gone."
    node = ast.parse(source(module))
    for part in name.split('.'):
        found = [n for n in ast.walk(node) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
                 and n.name == part]
        if not found: pytest.fail(f'{module} has no {name} any more')
        node = found[0]
    return node


def arguments(module, name):
    "Names of a function's arguments, in order, ** before the last where it takes any."
    a = defined(module, name).args
    names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return names + ([f'**{a.kwarg.arg}'] if a.kwarg else [])


def members(module, name):
    "Names that a class defines: its fields, methods and what methods set on self."
    node, found = defined(module, name), set()
    for n in ast.walk(node):
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)): found.add(n.name)
        elif isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name): found.add(n.target.id)
        elif isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store): found.add(n.attr)
    return found


def load(module):
    "A module of a release, imported. Skips with what it lacks."
    try: return importlib.import_module(module)
    except Exception as e: missing(f'{module} cannot be imported here: {type(e).__name__}: {str(e)[:80]}')


class Stubs:
    "A finder of modules that are not installed and not used: every name in them is an empty class."
    def __init__(self, *packages): self.packages = packages
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in self.packages: return ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = ModuleType(spec.name)
        def attribute(name):
            if name.startswith('__'): raise AttributeError(name)
            anything = lambda cls, source, handler: {'type': 'any'}               # for fields of pydantic's models
            return type(name, (), {'__get_pydantic_core_schema__': classmethod(anything)})
        module.__getattr__ = attribute
        return module
    def exec_module(self, module): pass


def stub(monkeypatch, *packages):
    "Let packages that a release imports and that its tested functions do not use be imported as stubs."
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    monkeypatch.setattr(sys, 'meta_path', [*sys.meta_path, Stubs(*absent)])
