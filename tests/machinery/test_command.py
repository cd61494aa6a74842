"""The package from outside: what `import credit_rl` costs and gives, and the command `credit-rl`."""
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fastcore.docments import docments
from started import copied

import credit_rl
from credit_rl.api import HOMES, MODULES
from credit_rl.command import VERBS, main
from credit_rl.options import flat_options
from credit_rl.evaluate import Evaluation, set_names
from credit_rl.parameters import by_group, make_parser, read_settings
from credit_rl.settings import Config, data_sets, make_config

ROOT = Path(__file__).resolve().parents[2]


def test_importing_the_package_imports_nothing_heavy():
    code = 'import sys, credit_rl; assert not {"torch", "transformers", "numpy", "pandas", "yaml"} & set(sys.modules)'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_module_is_imported_where_there_is_no_fcntl():
    "As on Windows: only what locks a file asks for it."
    code = """
import importlib, pkgutil, sys
sys.modules.pop('fcntl', None)
class Without:
    def find_spec(self, name, *rest):
        if name == 'fcntl': raise ModuleNotFoundError(f'No module named {name!r}', name=name)
sys.meta_path.insert(0, Without())
import credit_rl
for m in pkgutil.walk_packages(credit_rl.__path__, 'credit_rl.'): importlib.import_module(m.name)
"""
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('name', [*HOMES, *MODULES])
def test_every_name_is_there(name):
    assert getattr(credit_rl, name) is not None and name in dir(credit_rl)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'tspo_advantage'"):
        credit_rl.tspo_advantage
    with pytest.raises(ImportError):
        from credit_rl import tspo_advantage  # noqa: F401


@pytest.mark.parametrize('verb, first, later', [
    ('train', 'learning_rate', 'adamw.betas'), ('sft', 'sft.epochs', 'adamw.betas'), ('evaluate', 'model', None),
    ('audit', 'plays', 'adamw.betas'), ('warmup', 'per_tier', 'adamw.clip'), ('longform', 'judge', None)])
def test_help_shows_what_matters_and_help_all_every_setting_with_its_line(verb, first, later, capsys):
    def shown(*words):
        with pytest.raises(SystemExit): main([verb, *words])
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 130
        return ' '.join(text.split())
    few, every = shown('--help'), shown('--help', 'all')
    assert f' {first}=' in few and (later is None or f' {later}=' not in few)
    hidden = {'audit': ('method', 'steps', 'adamw.clip', 'log.kl'), 'sft': ('method', 'steps', 'adamw.clip', 'log.kl'),
              'warmup': ('steps', 'group_size')}.get(verb, ())
    assert not [name for name in hidden if f' {name}=' in every]
    for name, option in flat_options(Evaluation if verb in ('evaluate', 'longform') else Config).items() if not hidden else ():
        assert f' {name}={option.default!r}' in every and ' '.join(option.about.split()) in every


@pytest.mark.parametrize('words, near', [
    (['compare', '--metods', 'tspo'], "did you mean '--methods'"),
    (['serve', 'x', '--prot=1'], "did you mean '--port'"),
    (['evaluate', '--modle', 'x'], 'model=')])
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
    with pytest.raises(SystemExit, match="'trian'"):
        main(['trian'])


def test_a_verb_whose_package_is_missing_names_the_extra(monkeypatch):
    def missing(arguments): raise ModuleNotFoundError("No module named 'faiss'", name='faiss')
    monkeypatch.setattr('credit_rl.dumps.view_main', missing)
    with pytest.raises(SystemExit, match='credit-rl'): main(['view', 'runs/x'])


def test_importing_the_package_changes_nothing_in_a_program_of_others(tmp_path):
    "Hooks, variables, papermill's log: whatever is imported, also by `-m`."
    (tmp_path / 'theirs.py').write_text(
        'import logging, os, sys\nstate = lambda: (list(sys.meta_path), sys.excepthook, dict(os.environ),\n'
        '                 list(logging.getLogger("papermill").filters))\nbefore = state()\n'
        'import credit_rl, credit_rl.api, credit_rl.launch, credit_rl.options, credit_rl.runlog\n'
        'assert state() == before\n')
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(tmp_path), str(ROOT)])}
    env.pop('OMP_WAIT_POLICY', None)
    for how in (['theirs.py'], ['-m', 'theirs']):
        done = subprocess.run([sys.executable, *how], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('command, policy', [
    (['-m', 'credit_rl.train'], 'passive'), (['-m', 'credit_rl.command', 'audit'], 'passive'),
    (['-c', 'from credit_rl.command import main; main(["audit"])'], 'passive'),
    (['-c', 'import credit_rl.tspo'], None)])
def test_threads_sleep_in_commands(command, policy, tmp_path):
    "What stands in the environment when a command imports PyTorch, and where the user says otherwise."
    (tmp_path / 'torch.py').write_text('import os, sys\nprint(os.environ.get("OMP_WAIT_POLICY"))\nsys.exit()')
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    for given in ({}, {'OMP_WAIT_POLICY': 'active'}):
        env = {n: v for n, v in os.environ.items() if n != 'OMP_WAIT_POLICY'} | {'PYTHONPATH': path} | given
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.stdout.strip() == str(given.get('OMP_WAIT_POLICY', policy)), done.stderr


@pytest.mark.parametrize('name, module', [('folr', 'tspo'), ('smdp', 'carl')])
def test_modules_by_their_names_before(name, module):
    alias, own = importlib.import_module(f'credit_rl.{name}'), importlib.import_module(f'credit_rl.{module}')
    assert getattr(credit_rl, module) is own and own.__all__
    assert all(getattr(alias, n) is getattr(own, n) for n in own.__all__)


# ---- what help says ----

@pytest.mark.parametrize('name', [n for n in HOMES if inspect.isfunction(getattr(credit_rl, n))])
def test_a_docstring_of_the_package_has_a_line_for_every_argument(name):
    "With the same shape as the comment beside it."
    function = getattr(credit_rl, name)
    lines = dict(re.findall(r'^(\w+): (.+)', inspect.getdoc(function), re.M))
    comments = docments(function, returns=False)
    assert set(lines) == set(comments) == set(inspect.signature(function).parameters)
    for argument, comment in comments.items():
        shape = re.match(r'\(.*?\)', comment)
        assert not shape or shape[0] in lines[argument], argument


def test_an_export_of_a_fresh_clone_changes_nothing(tmp_path):
    "The modules are as `nbdev_export` writes them from the notebooks."
    copied(('nbs', 'credit_rl', 'settings.ini'), tmp_path)
    files = lambda: {str(p): p.read_bytes() for p in (tmp_path / 'credit_rl').rglob('*.py') if p.name != '_modidx.py'}
    before = files()
    command = [Path(sys.executable).parent / 'nbdev_export']
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, 'PYTHONPATH': str(tmp_path)}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    assert [name for name, text in files().items() if before.get(name) != text] == []


# ---- the ways in which settings are written ----

def read(*typed):
    "What a command reads: its settings, and its own arguments."
    parser = make_parser('x', 'About.')
    parser.add_argument('--methods', nargs='+')
    parser.add_argument('--out')
    return read_settings(parser, list(typed), by_group(Config))


@pytest.mark.parametrize('typed, near', [
    (('--method', 'tspo'), 'method='), (('--dry-run',), 'dry_run='), (('--options.alpha=0.5',), 'options.alpha='),
    (('-p', 'seed', '1'), 'papermill'), (('out=x',), '--out')])
def test_a_setting_is_written_in_one_way_and_an_argument_in_another(typed, near, capsys):
    with pytest.raises(SystemExit): read(*typed)
    assert near in capsys.readouterr().err


def test_an_option_is_set_by_its_name_in_the_dict(tmp_path):
    (tmp_path / 'p.yaml').write_text('options: {alpha: 1.0, ddof: 1}')
    settings, _ = read('--params', str(tmp_path / 'p.yaml'), 'options.alpha=0.5', 'options.overlong.buffer=9',
                       'vllm.dtype=bfloat16', 'world.size=60', 'deepspeed.steps_per_print=9', 'learner.deepspeed.zero=1')
    assert settings == {'options': {'alpha': .5, 'ddof': 1, 'overlong.buffer': 9}, 'vllm': {'dtype': 'bfloat16'},
                        'world': {'size': 60}, 'learner.deepspeed': {'steps_per_print': 9, 'zero': 1}}
    with pytest.raises(ValueError, match='setting'): make_config(read('metod.x=1')[0])


def test_sets_are_joined_by_plus_and_by_comma_everywhere():
    for text in ('nq+hotpotqa', 'nq, hotpotqa', 'nq,hotpotqa'):
        assert data_sets(make_config({'data': text}).data) == set_names(text) == ['nq', 'hotpotqa']


@pytest.mark.parametrize('module, function, words', [
    ('search_service', 'read_corpus', ['index', 'corpus.jsonl', 'OUT']),
    ('export', 'export_run', ['export', 'run', 'OUT']),
    ('audit', 'run_audit', ['audit', 'run=OUT', 'model=data/tiny_base'])])
def test_an_interrupt_ends_in_a_line(module, function, words, tmp_path, monkeypatch, capsys, root):
    def interrupted(*args, **rest): raise KeyboardInterrupt
    monkeypatch.chdir(root)
    monkeypatch.setattr(importlib.import_module(f'credit_rl.{module}'), function, interrupted)
    with pytest.raises(SystemExit) as ended: main([word.replace('OUT', str(tmp_path / 'out')) for word in words])
    assert ended.value.code == 130 and 'interrupted; the same command' in capsys.readouterr().err


def test_a_model_is_exported_into_its_run_unless_a_folder_is_named(monkeypatch, capsys):
    monkeypatch.setattr('credit_rl.export.export_run', lambda run, folder, checkpoint: folder)
    main(['export', 'runs/x'])
    main(['export', 'runs/x', 'models/y'])
    assert capsys.readouterr().out == f'{Path("runs/x/model")}\nmodels/y\n'
