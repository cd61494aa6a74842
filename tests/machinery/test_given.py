"Nothing given is dropped: whatever a notebook's cell or a command line hands over is used as meant, or named."
import collections
import fractions
import math
import pathlib
import random
import re
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_rl.options import Option, flat, flat_options, options_in
from credit_rl.parameters import by_group, make_parser, notebook_settings, read_settings
from credit_rl.settings import Config, check, make_config, read_parameters

MODEST = {int: lambda rng: rng.randrange(1, 9), float: lambda rng: rng.choice([.5, 2 ** -20, 1.]),
          bool: lambda rng: rng.random() < .5, str: lambda rng: rng.choice(['runs/mine', 'a b', 'runs/try #5']),
          list: lambda rng: [rng.choice([.5, .25]) for _ in range(2)], dict: lambda rng: {'r': rng.randrange(9)}}
WRAPPED = {int: [int, np.int64, np.int32, np.uint8, Decimal, np.array, torch.tensor],
           float: [float, np.float64, np.float32, Decimal, fractions.Fraction, np.array, torch.tensor],
           bool: [bool, np.bool_, np.array, torch.tensor], str: [str, np.str_, pathlib.Path, pathlib.PurePosixPath],
           list: [list, tuple, np.array, torch.tensor, collections.deque, lambda v: [np.float64(x) for x in v]],
           dict: [dict, collections.OrderedDict, collections.Counter, lambda v: {k: np.int64(x) for k, x in v.items()},
                  lambda v: collections.ChainMap(v)]}


def kind_of(option): return option.kind or type(option.default)


@pytest.mark.parametrize('seed', range(8))
def test_a_cells_values_are_used_as_meant_or_refused_by_name(seed):
    rng, cells = random.Random(seed), 0
    for name, option in flat_options(Config).items():
        if kind_of(option) not in MODEST: continue
        meant = option.default if option.choices else MODEST[kind_of(option)](rng)
        wrap = rng.choice(WRAPPED.get(type(meant), [lambda v: v]))
        group, _, field = name.partition('.')
        cell = {group: {field: wrap(meant)} if field else wrap(meant), 'np': np, 'table': object()}
        try: found = flat(read_parameters(cell))[name]
        except ValueError as e: assert (field or name) in str(e)
        else:
            assert found == meant and type(found) in (type(meant), kind_of(option)), (name, wrap, found)
            cells += 1
    assert cells > 60                                        # few are out of their range


@pytest.mark.parametrize('value', [object(), {1, 2}, print, float, lambda: 1, np.datetime64('NaT'), 3j, b'x',
                                   Decimal('sNaN'), np.array(['2026-11-28'], dtype='datetime64[D]')])
def test_what_a_setting_cannot_hold_is_refused_by_its_name(value):
    for name in ('learning_rate', 'steps', 'run', 'resume', 'kl', 'critic'):
        with pytest.raises(ValueError, match=name): read_parameters({name: value})


def test_what_is_no_setting_is_left_alone_and_a_misspelt_one_is_not():
    cell = {'np': np, 'torch': torch, 'HERE': pathlib.Path('.'), 'pi': np.float64(3.14), 'table': object(),
            'deepspeed': np, 'weights': torch.ones(2, 2), 'train': print}
    assert notebook_settings(cell, Config) == {}
    for name, value in {'stesp': np.int64(3), 'learning_rat': Decimal('1e-5'), 'modle': pathlib.Path('base'),
                        'optoins': collections.OrderedDict(alpha=1)}.items():
        with pytest.raises(ValueError, match=f"'{name}'; did you mean"): read_parameters({name: value})


def test_values_of_other_kinds_reach_a_run_as_pythons_own():
    "Its params.yaml is written from them."
    config = make_config({'learning_rate': np.float64(1e-5), 'options': {'alpha': np.float64(.5)},
                          'world': collections.OrderedDict(famous={'train': np.int64(3), 'dev': 3, 'test': 3})})
    assert type(config.learning_rate) is float and type(config.options['alpha']) is float
    assert type(config.world['famous']['train']) is int and type(config.world) is dict
    for wrong in (['a', .9], [.9, math.nan], [True, .9]):
        with pytest.raises(ValueError, match='betas'): make_config({'adamw.betas': wrong})
    assert Option(1.).read('w', np.longdouble(.5)) == .5 and Option(None).read('any', (np.int8(1),)) == [1]


@pytest.mark.parametrize('name', ['learning_rate', 'kl', 'temperature', 'critic.rate', 'adamw.weight_decay'])
def test_an_infinite_rate_is_refused(name):
    with pytest.raises(ValueError, match=name): check(make_config({name: math.inf}))
    check(make_config({'adamw.clip': math.inf}))                          # no clip at all


# ---- what is typed on a command line ----

def typed(*words): return read_settings(make_parser('run', 'Run.'), list(words), by_group(Config))[0]


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.text('ab #:-\'"{}[],&*!|>%@`010.e_~\\\n', max_size=12), st.text(max_size=8),
                 st.sampled_from(['runs/try #5', '010', '1:30', '0x10', '1e3', 'yes', 'on', 'No', '2026-11-28', '- a',
                                  'a: b', '1_000', '.5', '!!python/name:os', '*x', '&x', '? a', 'null #5'])))
def test_a_text_setting_is_the_text_that_was_typed(text):
    if len(text) > 1 and text[0] == text[-1] and text[0] in '\'"': return                   # YAML's, as one can see
    texts = [n for n in ('run', 'healthy', 'model', 'path') if n != 'path' or text.lstrip()[:1] not in ('{', '[')]
    for name, value in typed(*(f'{name}={text}' for name in texts)).items():
        null = options_in(Config)[name].default is None and text.strip() in ('', '~', 'null')
        assert value == (None if null else text) or text.startswith('~') and '/' in text     # the home folder


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.integers(-99, 10 ** 7).map(str), st.from_regex(r'[-+]?0*[0-9]{1,4}', fullmatch=True),
                 st.from_regex(r'0[xob][0-7]{1,3}|[0-9]{1,2}(:[0-5][0-9]){1,2}|[0-9]{1,3}(_[0-9]{3}){1,2}|[0-9]e[0-9]',
                               fullmatch=True)))
def test_a_number_is_decimal_or_refused_by_its_name(text):
    found = typed(*(f'{n}={text}' for n in ('seed', 'kl', 'options.alpha')), f'betas=[{text}, .5]')
    for name in ('seed', 'kl'):
        try: value = getattr(make_config({name: found[name]}), name)
        except ValueError as e: assert name in str(e)
        else: assert value == float(text)                     # Python's reading: decimal, _ between digits
    meant = text if re.search('[xob:e]', text) else int(text)
    assert found['options'] == {'alpha': meant} and found['adamw.betas'] == [meant, .5]


def test_a_list_of_texts_keeps_what_yaml_drops():
    assert make_config(typed('measure=belief,entropy')).measure == ['belief', 'entropy']
    for line in ('measure=belief #5', 'measure=[belief, entropy #5]', 'vllm={a: 1} # b', 'options.name=a #5'):
        with pytest.raises(ValueError, match='#5|# b'): make_config(typed(line))
    assert typed("options.name='a #5'") == {'options': {'name': 'a #5'}} and typed("run='a b'") == {'run': 'a b'}


def test_in_a_file_yamls_own_meaning_stays(tmp_path):
    (tmp_path / 'p.yaml').write_text('seed: 010\nsteps: 1:30\nrun: runs/try #5\nquestions: 0x10\n')
    found = typed('--params', str(tmp_path / 'p.yaml'))
    assert found == {'seed': 8, 'steps': 90, 'run': 'runs/try', 'questions': 16}
