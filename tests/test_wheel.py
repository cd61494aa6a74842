"""The wheel that users get: what it holds and asks for, and what works with its base alone."""
import re
import subprocess
import venv
from configparser import ConfigParser
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from started import copied

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ['setup.py', 'settings.ini', 'pyproject.toml', 'LICENSE', 'README.md', 'credit_rl']

pytestmark = pytest.mark.long      # the first builds the wheel that all of them read


@pytest.fixture(scope='session')
def wheel(tmp_path_factory, run_python):
    "The wheel, built from a copy: no build folder is left in the checkout, and none of an earlier build gets in."
    source, out = copied(SHIPPED, tmp_path_factory.mktemp('source')), tmp_path_factory.mktemp('wheel')
    run_python('-m', 'pip', 'wheel', source, '--no-deps', '--no-build-isolation', '--no-index', '--wheel-dir', out)
    return next(out.glob('*.whl'))


def needed(name, seen):
    "Distributions that `name` needs here, itself included, extras apart."
    if name not in seen:
        seen[name] = distribution(name)
        for line in seen[name].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({'extra': ''}):
                needed(re.sub(r'[-_.]+', '-', requirement.name).lower(), seen)
    return seen


def python_with(names, wheel, folder):
    "Python of a fresh environment with the wheel, some packages and what they need, by links to those of this one."
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / 'bin' / 'python'
    where = 'import sysconfig; print(sysconfig.get_path("purelib"))'
    site = Path(subprocess.check_output([python, '-Ic', where], text=True).strip())
    dists = {}
    for name in names: needed(name, dists)
    for dist in dists.values():
        for top in {Path(f).parts[0] for f in dist.files} - {'..', '__pycache__', 'distutils-precedence.pth'}:
            if not (site / top).exists():
                (site / top).symlink_to(dist.locate_file(top))
    ZipFile(wheel).extractall(site)  # a wheel of pure Python is installed by unpacking it
    return python


@pytest.fixture(scope='session')
def torch_python(wheel, tmp_path_factory):
    return python_with(['torch'], wheel, tmp_path_factory.mktemp('torch_alone'))


@pytest.fixture(scope='session')
def base_python(wheel, tmp_path_factory):
    return python_with(['torch', 'numpy', 'pyyaml'], wheel, tmp_path_factory.mktemp('base'))


def test_the_wheel_holds_the_modules_and_their_page_and_nothing_else(wheel):
    names = ZipFile(wheel).namelist()
    held = {str(p.relative_to(ROOT)) for p in (ROOT / 'credit_rl').rglob('*.py')}
    held |= {'credit_rl/view.html', 'credit_rl/view.css'}
    assert {n for n in names if n.startswith('credit_rl/')} == held
    assert {n.split('/')[0].split('-')[0] for n in names} == {'credit_rl'}


def test_the_wheel_says_what_settings_say(wheel):
    settings = ConfigParser(delimiters=['='], interpolation=None)
    settings.read(ROOT / 'settings.ini')
    cfg, zipped = settings['DEFAULT'], ZipFile(wheel)
    metadata = zipped.read(next(n for n in zipped.namelist() if n.endswith('.dist-info/METADATA'))).decode()
    assert f'\nVersion: {cfg["version"]}\n' in metadata and f'\nRequires-Python: >={cfg["min_python"]}\n' in metadata
    asked = [Requirement(line) for line in re.findall(r'^Requires-Dist: (.*)$', metadata, re.M)]
    assert {r.name for r in asked if r.marker is None} == {'torch', 'numpy', 'pyyaml'}
    extras = set(re.findall(r'^Provides-Extra: (.*)$', metadata, re.M))
    assert {'run', 'lab', 'train', 'vllm', 'serve', 'dense', 'judge', 'gguf', 'documents', 'docs', 'dev', 'all'} == extras


def test_credit_functions_need_torch_alone(torch_python):
    modules = sorted(p.stem[3:] for p in (ROOT / 'nbs' / '1_rules').glob('[34][0-9]_*.ipynb'))
    assert 'tspo' in modules, 'where are the notebooks 30 to 49?'
    script = f"""
import importlib, sys, traceback
for absent in ('transformers', 'numpy', 'pandas', 'yaml', 'nbdev', 'fastcore'):
    try: importlib.import_module(absent)
    except ModuleNotFoundError: continue
    sys.exit(f'{{absent}} can be imported: this is not an environment with torch alone')
import torch
failed = []
for module in {modules}:
    try: loaded = importlib.import_module(f'credit_rl.{{module}}')
    except Exception: failed.append(traceback.format_exc())
    else: assert loaded.__file__.startswith(sys.prefix), loaded.__file__
print(*failed, sep='\\n')
sys.exit(len(failed))
"""
    done = subprocess.run([torch_python, '-Ic', script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


def test_every_name_of_the_package_needs_the_base_alone(base_python):
    script = """
import credit_rl.api, importlib.util
for absent in ('transformers', 'requests', 'pandas', 'nbdev', 'openai'):
    assert importlib.util.find_spec(absent) is None, absent
for name in (*credit_rl.api.HOMES, *credit_rl.api.MODULES): getattr(credit_rl, name)
assert credit_rl.METHODS['tspo'] and credit_rl.make_config({'method': 'tspo'}).method == 'tspo'
from credit_rl.judge import Judge
try: Judge('http://127.0.0.1:1/v1', 'm')
except ImportError as e: assert 'credit_rl[judge]' in str(e), e
else: raise AssertionError('openai was not missed')
"""
    done = subprocess.run([base_python, '-Ic', script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize('module, words', [('command', ['train']), ('train', [])])
def test_a_missing_package_is_named_with_its_extra(module, words, base_python, tmp_path):
    done = subprocess.run([base_python, '-Im', f'credit_rl.{module}', *words, 'model=tiny', 'steps=1'], cwd=tmp_path,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 1 and done.stdout.endswith("pip install 'credit_rl[run]'\n"), done.stdout
    assert 'Traceback' not in done.stdout
