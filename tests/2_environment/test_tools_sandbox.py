"""The sandbox of 13_tools under random programs, watched from outside; tests/tools/sandbox_programs.py runs ten
thousand."""
import os
import time
from pathlib import Path

import pytest

pytest.importorskip('psutil', reason='psutil is not installed')
pytest.importorskip('pydantic_monty', reason='pydantic_monty is not installed')
from sandbox_programs import run_programs, what_got_out                                          # noqa: E402

from credit_rl.tools import PythonTool                                                           # noqa: E402
from credit_rl.trajectory import Result                                                          # noqa: E402


@pytest.mark.skipif(not Path('/proc').exists(), reason='needs /proc to look into interpreters')
def test_random_programs_get_nothing_out():
    figures = run_programs(int(os.environ.get('CREDIT_RL_PROGRAMS', 160)))
    assert figures['ok'] > figures['programs'] / 10 and figures['timeout'], figures       # some do something
    assert not what_got_out(figures), figures


PRINTING = {'to the end': 'while True: print("more")', 'in spite of errors':
            'while True:\n    try: print("more")\n    except: pass', 'from a function':
            'def f():\n    while True: print("more")\ntry: f()\nexcept: pass\nwhile True: pass',
            'as errors': 'import sys\nwhile True: print("more", file=sys.stderr)'}


@pytest.mark.parametrize('how', PRINTING)
def test_a_program_that_goes_on_printing_is_stopped_at_the_output_limit(how):
    "And not at the time limit, here a quarter of a minute."
    tool = PythonTool(seconds=15, output_chars=100)
    tool.run('print(1)')
    since = time.monotonic()
    text, result = tool.call([PRINTING[how]])[0]
    assert time.monotonic() - since < 5
    assert result is Result.ERROR and text.startswith('Error: the output is longer than 100 characters')
    assert len(text) < 200
    assert tool.call(['print("a" * 100)']) == [('a' * 100, Result.OK)]                    # its worker is replaced
    assert tool.call(['print("a" * 101)'])[0][1] is Result.ERROR
    assert tool.call(['print("a" * 99)\nprint()\nprint()']) == [('a' * 99, Result.OK)]
