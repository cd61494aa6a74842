"""The package from outside: what `import credit_rl` costs and gives, and the command `credit-rl`."""
import ast
import importlib
import inspect
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import credit_rl
from credit_rl.api import HOMES, MODULES
from credit_rl.command import VERBS, main
from credit_rl.options import options_in
from credit_rl.evaluate import Evaluation, set_names
from credit_rl.parameters import by_group, make_parser, read_settings
from credit_rl.prepare import Warming
from credit_rl.runlog import source_hash
from credit_rl.settings import GROUPS, data_sets, make_config

ROOT = Path(__file__).resolve().parents[2]
EXPORT = runpy.run_path(str(ROOT / 'docs' / 'export.py'))   # its functions, by name


def test_importing_the_package_imports_nothing_heavy():
    code = 'import sys, credit_rl; assert not {"torch", "transformers", "numpy", "pandas", "yaml"} & set(sys.modules)'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('name', [*HOMES, *MODULES])
def test_every_name_is_there(name):
    assert getattr(credit_rl, name) is not None and name in dir(credit_rl)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no 'tspo_advantage'"):
        credit_rl.tspo_advantage
    with pytest.raises(ImportError):
        from credit_rl import tspo_advantage  # noqa: F401


@pytest.mark.parametrize('verb, prefix, groups', [
    ('train', '', GROUPS.values()), ('warmup', '', [Warming]), ('sft', '', GROUPS.values()),
    ('evaluate', '', Evaluation.__bases__)])
def test_help_lists_every_setting_with_its_line(verb, prefix, groups, capsys):
    with pytest.raises(SystemExit) as end:
        main([verb, '--help'])
    text = capsys.readouterr().out
    assert end.value.code == 0 and 'settings, as name=value' in text
    for group in groups:
        for name, option in options_in(group).items():
            assert f'    {prefix}{name}={option.default!r}' in text and option.about and option.about in text


@pytest.mark.parametrize('words, near', [
    (['compare', '--metods', 'tspo'], "did you mean '--methods'"),
    (['serve', 'x', '--prot=1'], "did you mean '--port'"),
    (['evaluate', '--modle', 'x'], "did you mean '--model'")])
def test_a_mistyped_flag_names_the_nearest(words, near, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2 and near in capsys.readouterr().err


@pytest.mark.parametrize('verb', VERBS)
def test_every_verb_has_a_help(verb, capsys):
    with pytest.raises(SystemExit) as end:
        main([verb, '--help'])
    assert end.value.code == 0 and 'usage: ' in capsys.readouterr().out


def test_an_unknown_verb_names_the_nearest():
    with pytest.raises(SystemExit, match="there is no verb 'trian'; did you mean 'train'"):
        main(['trian'])


def test_importing_the_package_changes_nothing_in_a_program_of_others(tmp_path):
    "No hooks, and no variable of the environment, whatever is imported, also where that program is run by `-m`."
    (tmp_path / 'theirs.py').write_text(
        'import os, sys\nstate = lambda: (list(sys.meta_path), sys.excepthook, dict(os.environ))\nbefore = state()\n'
        'import credit_rl, credit_rl.api, credit_rl.launch, credit_rl.options\nassert state() == before\n')
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(tmp_path), str(ROOT)])}
    env.pop('OMP_WAIT_POLICY', None)
    for how in (['theirs.py'], ['-m', 'theirs']):
        done = subprocess.run([sys.executable, *how], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('command, policy', [
    (['-m', 'credit_rl.train'], 'passive'), (['-m', 'credit_rl.command', 'audit'], 'passive'),
    (['-c', 'from credit_rl.command import main; main(["audit"])'], 'passive'),
    (['-c', 'import credit_rl.folr'], None)])
def test_threads_sleep_in_commands(command, policy, tmp_path):
    "What stands in the environment when a command imports PyTorch, and where the user says otherwise."
    (tmp_path / 'torch.py').write_text('import os, sys\nprint(os.environ.get("OMP_WAIT_POLICY"))\nsys.exit()')
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    for given in ({}, {'OMP_WAIT_POLICY': 'active'}):
        env = {n: v for n, v in os.environ.items() if n != 'OMP_WAIT_POLICY'} | {'PYTHONPATH': path} | given
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.stdout.strip() == str(given.get('OMP_WAIT_POLICY', policy)), done.stderr


@pytest.mark.parametrize('name, module', [('tspo', 'folr'), ('carl', 'smdp')])
def test_modules_by_the_names_of_the_field(name, module):
    alias, own = importlib.import_module(f'credit_rl.{name}'), importlib.import_module(f'credit_rl.{module}')
    assert getattr(credit_rl, name) is alias and own.__all__
    assert all(getattr(alias, n) is getattr(own, n) for n in own.__all__)


# ---- what help says ----

def test_help_says_what_arguments_are():
    "In a plain import of one module; without nbdev or fastcore, which the package does not need."
    code = ('import sys, credit_rl.folr, inspect; print(inspect.getdoc(credit_rl.folr.tspo_advantages)); '
            'assert not {"nbdev", "fastcore"} & set(sys.modules)')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'Parameters\n----------\noutcome : (N,) 0 or 1\n' in done.stdout
    assert 'alpha : reward of the turns up to first_turn in a wrong rollout, in [0, 1]' in done.stdout
    assert 'Compare first-occurrence rewards' in done.stdout


def comments_of(source, name):
    "What docs/export.py reads of the arguments of a function or class."
    named = lambda tree, name: next((n for n in tree.body if getattr(n, 'name', '') == name), None)
    thing = named(ast.parse(source), name)
    if isinstance(thing, ast.ClassDef): thing = named(thing, '__init__')
    return EXPORT['argument_comments'](thing, source.split('\n')) if thing else {}


@pytest.mark.parametrize('name', [n for n in HOMES if n.islower()])
def test_every_described_argument_of_the_package_is_in_its_help(name):
    source = inspect.getsource(importlib.import_module(f'credit_rl.{HOMES[name]}'))
    help_text = ' '.join(inspect.getdoc(getattr(credit_rl, name)).split())
    for argument, text in comments_of(source, name).items():
        assert f'{argument} : {" ".join(text.split())}' in help_text


def test_modules_are_as_the_export_leaves_them():
    "After `nbdev_export` alone what arguments mean is not in their docstrings: `make export`."
    for path in sorted((ROOT / 'credit_rl').glob('[!_]*.py')):
        source = path.read_text(encoding='utf-8')
        assert EXPORT['with_parameters'](source) == source, path.name


def test_comments_of_arguments_are_read():
    source = ('# %% a cell\ndef f(a, b):  # two of them\n    pass\ndef g(\n    x,  # (N,) of #1\n    # before\n'
              '    y="# no",\n    z=(1,\n       2),  # a pair\n           # that goes on\n'
              '    # and\n    # more\n    *, k  # last\n'
              '): pass\n# behind\ndef h(x): pass\nclass C:\n    def __init__(self, a):  # of a C\n        pass\n')
    assert [comments_of(source, name) for name in 'fghC'] == [
        {'a, b': 'two of them'},
        {'x': '(N,) of #1', 'y': 'before', 'z': 'a pair that goes on', 'k': 'and more last'}, {}, {'a': 'of a C'}]


def test_sections_are_written_once_into_what_is_public():
    source = ('def f(a):  # é, \\d\n    "Doc."; return a\ndef _g(a):  # private\n    "Doc."\n'
              'def h(\n    a,  # one\n):\n    r"""Long\n    doc."""\n'
              'class C:\n    "Class."\n    def __init__(self, b):  # two\n        pass\n'
              '    def m(self, c):  # three\n        \'Method.\'\n    def n(self, c): "None."\n'
              'def z(d):  # none\n    pass\n')
    new = EXPORT['with_parameters'](source)
    loaded = {}
    exec(new, loaded)
    section = '\n\nParameters\n----------\n'
    docs = [inspect.getdoc(thing) for thing in (loaded['f'], loaded['_g'], loaded['h'], loaded['C'], loaded['C'].m)]
    assert docs == [f'Doc.{section}a : é, \\d', 'Doc.', f'Long\ndoc.{section}a : one', f'Class.{section}b : two',
                    f'Method.{section}c : three']
    assert loaded['f'](1) == 1 and loaded['C'].n.__doc__ == 'None.' and loaded['z'].__doc__ is None
    assert EXPORT['with_parameters'](new) == new and source_hash(new) == source_hash(source)


def test_a_long_line_is_broken_where_three_quotation_marks_are_too_many():
    source = f'def f(a):  # {"word " * 40}\n    "{"x" * 57} {"y" * 56}"\n'
    assert len(source.split('\n')[1]) == 120
    new = EXPORT['with_parameters'](source)
    assert max(map(len, new.split('\n')[1:])) <= 120 and new.count('word') == 80


# ---- the ways in which settings are written ----

def read(*typed):
    "What a command reads: its settings, and its own arguments."
    parser = make_parser('x', 'About.')
    parser.add_argument('--methods', nargs='+')
    parser.add_argument('--out')
    return read_settings(parser, list(typed), by_group(*GROUPS.values()))


@pytest.mark.parametrize('typed', [
    ('method=tspo', 'seed=1', 'dry_run=true'), ('--method', 'tspo', '--seed=1', '--dry_run'),
    ('-p', 'method', 'tspo', '-p', 'seed', '1', '-p', 'dry_run', 'True'), ('--dry-run', 'method=tspo', '--seed', '1')])
def test_a_setting_is_read_however_it_is_written(typed):
    settings, given = read(*typed)
    assert make_config(settings) == make_config({'method': 'tspo', 'seed': 1, 'dry_run': True})


def test_an_option_is_set_by_its_name_in_the_dict(tmp_path):
    (tmp_path / 'p.yaml').write_text('options: {alpha: 1.0, ddof: 1}')
    settings, _ = read('--params', str(tmp_path / 'p.yaml'), 'options.alpha=0.5', 'options.overlong.buffer=9',
                       'vllm.dtype=bfloat16', 'world.size=60')
    assert settings == {'options': {'alpha': .5, 'ddof': 1, 'overlong.buffer': 9}, 'vllm': {'dtype': 'bfloat16'},
                        'world': {'size': 60}}
    for typed in (['--options.alpha', '0.5', 'seed=1'], ['--options.alpha=0.5', '--seed', '1'],
                  ['-p', 'options.alpha', '0.5', '-p', 'seed', '1']):
        assert read(*typed)[0] == {'options': {'alpha': .5}, 'seed': 1}
    with pytest.raises(ValueError, match="no setting 'metod.x'"): make_config(read('metod.x=1')[0])


@pytest.mark.parametrize('typed', [
    ('--methods', 'tspo', 'grpo', '--out', 'a=b', 'steps=5'), ('methods=tspo,grpo', 'steps=5', 'out=a=b'),
    ('steps=5', '--out=a=b', 'methods=[tspo, grpo]'), ('--methods', 'tspo,grpo', 'steps=5', '--out', 'a=b'),
    ('--methods=tspo,grpo', '--steps', '5', '--out', 'a=b'), ('--methods', 'tspo,', 'grpo', '--out=a=b', 'steps=5')])
def test_an_argument_that_takes_several_leaves_the_settings(typed):
    settings, given = read(*typed)
    assert (settings, given.methods, given.out) == ({'steps': 5}, ['tspo', 'grpo'], 'a=b')


def test_a_dict_may_come_as_text_as_papermill_hands_it_over():
    assert make_config({'options': '{alpha: 0.5}', 'betas': '[0.9, 0.99]'}).options == {'alpha': .5}
    with pytest.raises(ValueError, match='options must be a dict'): make_config({'options': 'alpha'})


def test_a_list_needs_no_brackets():
    "As --methods, rules and sets need none."
    for text in ('belief, entropy', 'belief,entropy', '[belief, entropy]'):
        assert make_config(read(f'measure={text}')[0]).measure == ['belief', 'entropy']
    assert make_config(read('measure=belief')[0]).measure == ['belief']
    assert make_config({'betas': '0.9,0.99'}).betas == [.9, .99]


def test_sets_are_joined_by_plus_and_by_comma_everywhere():
    for text in ('nq+hotpotqa', 'nq, hotpotqa', 'nq,hotpotqa'):
        assert data_sets(make_config({'data': text})) == set_names(text) == ['nq', 'hotpotqa']


@pytest.mark.parametrize('module, function, words', [
    ('search_service', 'read_corpus', ['index', 'corpus.jsonl', 'OUT']),
    ('export', 'export_run', ['export', 'run', 'OUT']),
    ('audit', 'run_audit', ['audit', 'run=OUT', 'model=data/tiny_base'])])
def test_an_interrupt_ends_in_a_line(module, function, words, tmp_path, monkeypatch, capsys, root):
    def interrupted(*args, **rest): raise KeyboardInterrupt
    monkeypatch.chdir(root)
    monkeypatch.setattr(importlib.import_module(f'credit_rl.{module}'), function, interrupted)
    with pytest.raises(SystemExit) as ended: main([word.replace('OUT', str(tmp_path / 'out')) for word in words])
    assert ended.value.code == 130 and 'interrupted; the same command begins anew' in capsys.readouterr().err
