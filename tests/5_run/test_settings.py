"Settings are plain classes that one can read, and a new one is a line in one place."
import dataclasses
import inspect
from dataclasses import dataclass

import pytest

from credit_rl import settings
from credit_rl.evaluate import Evaluation
from credit_rl.options import MOVED, SettingsGroup, flat_options, options_in, setting
from credit_rl.parameters import by_group, from_settings, make_parser, notebook_settings, read_settings
from credit_rl.prepare import Warming
from credit_rl.runlog import RunLog
from credit_rl.settings import Config, check, make_config


@pytest.mark.parametrize('whole', [Config, Warming, Evaluation])
def test_every_field_stands_in_the_source_of_a_class(whole):
    "No class is generated: its source can be shown, and each field is a line of one of them."
    sources = [inspect.getsource(group) for group in [*whole.__mro__, *(o.kind for o in options_in(whole).values())]
               if isinstance(group, type) and issubclass(group, SettingsGroup)]
    for name in flat_options(whole):
        assert any(f'    {name.rpartition(".")[2]}: ' in source for source in sources), name
    assert whole.__dataclass_params__.frozen and not whole.__module__.startswith('types')


def test_a_new_setting_is_one_line():
    "It is read from a file's dict, a notebook and a command line, listed by --help, stored, and refused out of its range."
    @dataclass(frozen=True)
    class Keeping(settings.Keeping):
        "What is measured and kept."
        photos: int = setting(3, 'pictures of each step', least=0)

    new = dataclasses.make_dataclass('New', [], bases=(Keeping, *Config.__bases__[1:]), frozen=True)
    assert set(options_in(new)) - set(options_in(Config)) == {'photos'}
    groups = by_group(new)
    assert 'photos' in groups['What is measured and kept'] and len(groups) == len(by_group(Config))
    typed, _ = read_settings(make_parser('run', 'Run.'), ['photos=5', 'method=grpo'], groups)
    assert from_settings(new, typed).photos == 5 == from_settings(new, notebook_settings({'photos': 5}, new)).photos
    assert vars(new())['photos'] == 3
    with pytest.raises(ValueError, match='photos'): new(photos=-1)
    with pytest.raises(ValueError, match="'photos'"): from_settings(new, {'fotos': 1})


def test_a_name_of_before_is_read_as_the_setting_of_today():
    "Every one of them leads to a setting, in a dict, on a command line, and over what a file says."
    options = flat_options(Warming) | flat_options(Evaluation)
    assert set(MOVED.values()) <= set(options)
    old = {'log_kl': False, 'hosts': 2, 'ranks': 2, 'endpoint': 'node0:1'}
    new = {'log': {'kl': False}, 'hosts': {'count': 2, 'endpoint': 'node0:1'}, 'ranks': 2}
    assert make_config(old) == make_config(new) == make_config({**new, **old}) != Config()
    typed, _ = read_settings(make_parser('run', 'Run.'), ['log_kl=false', 'hosts.count=2', 'endpoint=node0:1', 'ranks=2'],
                             by_group(Config))
    assert make_config(typed) == make_config(old)
    assert make_config({**new, 'log_kl': True}).log.kl                      # by itself, over its group
    with pytest.raises(ValueError, match='twice'): make_config({'log_kl': True, 'log.kl': False})
    with pytest.raises(ValueError, match='log.kl'): make_config({'log': {'lk': True}})


@pytest.mark.parametrize('given, why', [
    ({'method': 'carl', 'critic': {'kind': 'shared', 'step': 'together', 'backbone_rate': 1e-7}}, 'one rate'),
    ({'method': 'carl', 'critic': {'kind': 'shared', 'mix': 0, 'backbone_rate': 1e-7}}, 'no backbone'),
    ({'method': 'ppo', 'critic': {'kind': 'frozen', 'backbone_rate': 1e-7}}, 'never moves'),
    ({'method': 'ppo', 'critic': {'step': 'together', 'mix': .5}}, "shares the policy's"),
    ({'method': 'grpo', 'critic': {'rate': .001, 'step': 'together'}}, 'critic.step'),
    ({'method': 'grpo', 'teacher': {'every': 5}}, 'grpo has no teacher'),
    ({'method': 'grpo', 'correction': {'limits': [0., 3.]}}, 'without a kind')])
def test_settings_of_a_critic_or_correction_that_nothing_reads_are_refused(given, why):
    with pytest.raises(ValueError, match=why): check(make_config({**given, 'run': 'runs/x'}))


def test_questions_of_own_files_and_many_hops_are_logged(tmp_path):
    log = RunLog(tmp_path / 'run')
    log.metrics(0, **{'dev_em_my-questions': .5, 'dev_right_b': 1., 'dev_em_12': 0.})
    with pytest.raises(ValueError, match='unknown metric'): log.metrics(1, dev_emm=.5)
    log.close()
