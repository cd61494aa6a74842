"""The package from outside: what `import credit_rl` costs and gives, and the command `credit-rl`."""
import subprocess
import sys

import pytest

import credit_rl
from credit_rl.api import HOMES, MODULES
from credit_rl.command import VERBS, main
from credit_rl.options import options_in
from credit_rl.settings import GROUPS


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
    ('train', '', GROUPS.values()), ('warmup', '', GROUPS.values()), ('sft', '', GROUPS.values()),
    ('evaluate', '', [])])
def test_help_lists_every_setting_with_its_line(verb, prefix, groups, capsys):
    with pytest.raises(SystemExit) as end:
        main([verb, '--help'])
    text = capsys.readouterr().out
    assert end.value.code == 0 and 'settings, as name=value' in text
    for group in groups:
        for name, option in options_in(group).items():
            assert f'    {prefix}{name}={option.default!r}' in text and option.about and option.about in text


@pytest.mark.parametrize('verb', VERBS)
def test_every_verb_has_a_help(verb, capsys):
    with pytest.raises(SystemExit) as end:
        main([verb, '--help'])
    assert end.value.code == 0 and 'usage: ' in capsys.readouterr().out


def test_an_unknown_verb_names_the_nearest():
    with pytest.raises(SystemExit, match="there is no verb 'trian'; did you mean 'train'"):
        main(['trian'])
