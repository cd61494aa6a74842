"What is refused in settings before anything runs, and what a path may look like."
import argparse
import os

import pytest
import torch
import yaml

from credit_rl.parameters import make_parser, read_settings
from credit_rl.runlog import RunFolders, RunLog, read_params, read_yaml
from credit_rl.settings import make_config


def read(*arguments): return read_settings(argparse.ArgumentParser(), list(arguments))[0]


@pytest.mark.parametrize('text, key, line', [
    ('steps: 70\nseed: 1\nsteps: 7\n', 'steps', 3), ('steps: 70\n"steps": 70\n', 'steps', 2),
    ('options: {alpha: 0.5, alpha: 1}\n', 'alpha', 1), ('world:\n  size: 3\n  size: 3\n', 'size', 3),
    ('sets: [{a: 1, a: 1}]\n', 'a', 1), ('1: a\n1: b\n', '1', 2), ('1: a\n1.0: b\n', '1.0', 2),
    ('yes: 1\ntrue: 2\n', 'true', 2), ('0x10: 1\n16: 2\n', '16', 2)])
def test_a_key_that_stands_twice_is_refused_with_its_place(text, key, line, tmp_path):
    path = tmp_path / 'params.yaml'
    path.write_text(text)
    with pytest.raises(ValueError, match=f"key '{key}' twice .*params.yaml\", line {line}"): read('--params', str(path))
    with pytest.raises(ValueError, match=f"key '{key}' twice"): read_yaml(path)


def test_a_key_twice_in_a_typed_value_is_refused():
    with pytest.raises(ValueError, match="'alpha'"): read('options={alpha: 0.5, alpha: 1}')
    with pytest.raises(ValueError, match="'alpha'"): make_config({'options': '{alpha: 0.5, alpha: 1}'})


def test_a_file_that_papermill_reads_is_refused_too(tmp_path):
    (tmp_path / 'p.yaml').write_text('steps: 70\nsteps: 7\n')
    with pytest.raises(yaml.YAMLError, match="'steps'"): RunFolders.read(tmp_path / 'p.yaml')


@pytest.mark.parametrize('seed', [2 ** 64, 10 ** 30, -2 ** 63 - 1, 0, 2 ** 63 - 1, 2 ** 64 - 1, -2 ** 63])
def test_a_seed_is_one_that_generators_take_or_is_refused(seed):
    if -2 ** 63 <= seed < 2 ** 64: return torch.Generator().manual_seed(make_config({'seed': seed}).seed)
    for given in ({'seed': seed}, read(f'seed={seed}')):
        with pytest.raises(ValueError, match='seed'): make_config(given)


def test_spaces_around_the_sign_are_refused_with_a_sentence(capsys):
    with pytest.raises(SystemExit): read('steps', '=', '3')
    assert 'name=value' in capsys.readouterr().err


def test_a_list_without_brackets_has_no_empty_parts():
    assert make_config({'offload': 'reference,,teacher'}).learner.offload == ['reference', 'teacher']
    assert make_config({'offload': ''}).learner.offload == []
    with pytest.raises(ValueError): make_config({'offload': 'reference,[teacher'})


def test_a_tilde_leads_home(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    config = make_config({'run': '~/run', 'model': '~/base', 'path': '~', 'vllm': {'arguments': {'a': ['~/x', 'b~']}}})
    assert config.run == str(tmp_path / 'run') and config.model == str(tmp_path / 'base')
    assert config.path == str(tmp_path) and config.vllm == {'arguments': {'a': [str(tmp_path / 'x'), 'b~']}}
    (tmp_path / 'p.yaml').write_text('run: ~/run\nsteps: 3\n')
    config = make_config(read('--params', '~/p.yaml', 'model=~/base'))
    assert config.run == str(tmp_path / 'run') and config.steps == 3 and config.model == str(tmp_path / 'base')
    with RunLog(config.run) as log: log.write_params({'run': config.run})
    assert read_params(tmp_path / 'run')['run'] == str(tmp_path / 'run') and not os.path.exists('~')


@pytest.mark.parametrize('text, said', [('steps: ' + '[' * 60_000, 'nested too deep'),
                                        ('steps: ' + '9' * 5_000, 'digits'), ('steps: 2001-13-45', 'month')])
def test_settings_without_bounds_are_refused_by_their_file(tmp_path, text, said):
    path = tmp_path / 'p.yaml'
    path.write_text(text)
    for look in (lambda: read('--params', str(path)), lambda: read_yaml(path)):
        with pytest.raises(ValueError, match=f'p.yaml.*{said}'): look()
    with pytest.raises(ValueError, match=said): read(text.replace(': ', '='))


def test_a_tilde_leads_home_behind_a_name_too(monkeypatch):
    "A shell leaves it as it is there: a folder ~ was made where the command ran."
    monkeypatch.setenv('HOME', '/home/me')
    parser = make_parser('module', 'about')
    parser.add_argument('places', nargs='*')
    parser.add_argument('--out')
    given = parser.parse_args(['own=~/model', '~/run', 'x=~', 'a~/b', '--out=~/page.html'])
    assert given.places == ['own=/home/me/model', '/home/me/run', 'x=~', 'a~/b'] and given.out == '/home/me/page.html'


def test_a_file_of_settings_that_is_not_there_is_refused_with_its_neighbour(tmp_path):
    (tmp_path / 'asking.yaml').touch()
    with pytest.raises(FileNotFoundError, match=f'no file {tmp_path}/askng.yaml; did you mean {tmp_path}/asking.yaml'):
        read('--params', str(tmp_path / 'askng.yaml'))
    with pytest.raises(FileNotFoundError, match='file'): read('--params', str(tmp_path / 'qqq'))
