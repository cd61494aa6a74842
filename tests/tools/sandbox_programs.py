"""Random programs through the Python tool, watched from outside: no file, socket or process, no growth of this process,
no run beyond its limit.

    python tests/tools/sandbox_programs.py 10000 [SEED]     prints the figures and exits with 1 if anything got out

Programs are written by a grammar of ours (`programs`): what agents write, and what they should not be able to do."""
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

from credit_rl.tools import PythonTool
from credit_rl.trajectory import Result

SECONDS, MEMORY, CHARS, AT_ONCE = .25, 32, 2000, 8
GRACE = 1.                        # seconds after which Monty ends a worker that does not end a program itself
NAMES = st.sampled_from(list('abcdefg'))
WORDS = st.text(alphabet='abc xyzäß\u202e\U0001f600%{}\\n', max_size=12).map(repr)
NUMBERS = st.one_of(st.integers(-3, 9), st.integers(-10 ** 6, 10 ** 6), st.sampled_from([10 ** 9, 2 ** 63, 10 ** 30]),
                    st.floats(allow_nan=False, allow_infinity=False, width=32)).map(repr)
MARK = 'SANDBOX_MARK'             # file that programs try to write, below the working directory
HOSTILE = [                       # what should end in an error, and leave nothing
    f'open({MARK!r}, "w").write("x")', 'open("/etc/passwd").read()', 'import socket', 'import subprocess',
    'import ctypes', f'import os\nos.system("touch {MARK}")', f'import os\nos.mkdir({MARK!r})',
    'import os\nprint(os.environ)', f'from pathlib import Path\nPath({MARK!r}).write_text("x")',
    f'from pathlib import Path\nPath("/tmp/{MARK}").touch()', 'import os\nos.fork()',
    'import threading\nthreading.Thread(target=print).start()', 'import sys\nsys.modules.clear()',
    '__import__("os").listdir("/")', 'exec("import socket")', 'eval("open(1)")', 'print(().__class__.__bases__)',
    'print([].__class__.__mro__[-1].__subclasses__())', 'import urllib.request\nurllib.request.urlopen("http://a")',
    'import asyncio\nasyncio.run(asyncio.sleep(9))', 'import time\ntime.sleep(9)', 'input()', 'breakpoint()',
    'globals()["__builtins__"]', 'import pickle\npickle.loads(b"cos\\nsystem\\n(S\'true\'\\ntR.")']
WASTEFUL = [                      # what should be stopped at a limit
    'while True: pass', 'while True: print("more")', 'a = "x"\nwhile True: a += a', 'a = []\nwhile True: a.append(a)',
    'def f(): return f()\nf()', 'sum(range(10 ** 12))', 'print("x" * 10 ** 7)', 'a = 9\nwhile True: a = a * a',
    'import sys\nwhile True: print("more", file=sys.stderr)', 'a = []\nfor i in range(10 ** 6): a = [a]\nprint(a)',
    'while True:\n    try: print("more")\n    except: pass', 'print(sorted(range(10 ** 7)))',
    '{i: i for i in range(10 ** 8)}', 'print(10 ** 10 ** 8)', 'import re\nre.match("(a+)+$", "a" * 40 + "b")']
START = "a, b, c, d, e, f, g = 1, 'x y', [1, 2], {'k': 2}, 3.5, (1, 'z'), None\n"
OPERATORS = st.sampled_from('+ - * / // % ** < == and or in << is'.split())
FUNCTIONS = st.sampled_from('len str int repr list sorted sum range abs min max set tuple type iter'.split())
METHODS = st.sampled_from('upper() split() __class__ format(1) join("ab") encode() items() append(1)'.split())


def formed(text, *parts):
    "Text with the values of strategies in its places."
    return st.tuples(*parts).map(lambda values: text.format(*values))


def expressions(inner):
    "An expression made of smaller ones."
    return st.one_of(
        formed('({} {} {})', inner, OPERATORS, inner), formed('[{}, {}]', inner, inner),
        formed('{{{}: {}}}', inner, inner), formed('({})[{}]', inner, inner), formed('{}({})', FUNCTIONS, inner),
        formed('({}).{}', inner, METHODS),
        formed('[{} for {} in {}]', inner, NAMES, inner), formed('(lambda {}: {})(1)', NAMES, inner),
        formed('f"{{({})}} and {{{}!r}}"', NAMES, NAMES))


CONSTANTS = st.sampled_from(['None', 'True', '[]', '{}', 'range(5)'])
EXPRESSIONS = st.recursive(st.one_of(NAMES, NAMES, WORDS, NUMBERS, CONSTANTS), expressions, max_leaves=6)
OTHERS = st.sampled_from(['pass', 'import math', 'import json', 'raise ValueError("x")'])
SIMPLE = st.one_of(formed('{} = {}', NAMES, EXPRESSIONS), formed('{} += {}', NAMES, EXPRESSIONS),
                   formed('print({})', EXPRESSIONS), formed('print(search({}))', EXPRESSIONS), EXPRESSIONS, OTHERS,
                   st.sampled_from(HOSTILE))


def indented(block): return '\n'.join('    ' + line for line in block.split('\n'))


def blocks(inner):
    "A statement around others."
    body = st.lists(inner, min_size=1, max_size=3).map('\n'.join).map(indented)
    return st.one_of(
        formed('if {}:\n{}', EXPRESSIONS, body), formed('for {} in {}:\n{}', NAMES, EXPRESSIONS, body),
        formed('for {} in range({}):\n{}', NAMES, st.integers(0, 50), body), formed('while {}:\n{}', EXPRESSIONS, body),
        formed('def {0}():\n{1}', NAMES, body), formed('class {}:\n{}', NAMES, body),
        formed('try:\n{}\nexcept Exception as e:\n    print(e)\nfinally:\n    pass', body))


def programs():
    "A random program: mostly of the grammar, some hostile or wasteful, a few that are none."
    whole = st.lists(st.recursive(SIMPLE, blocks, max_leaves=5), min_size=1, max_size=6).map('\n'.join)
    return st.one_of(*[whole.map(START.__add__)] * 12, st.sampled_from(WASTEFUL), st.text(max_size=40))


def play(pipe):
    "What the process that is watched does: it runs the programs that it is sent, in the folder where it stands."
    tool = PythonTool(lambda query: f'found {query}'[:50], SECONDS, MEMORY, CHARS, searches=5, workers=AT_ONCE)
    while codes := pipe.recv(): pipe.send(tool.call(codes))


class Watch:
    "What a process and its interpreters hold, seen from outside."
    def __init__(self, pid): self.parent, self.worst, self.seen = psutil.Process(pid), 0., Counter()

    def look(self):
        "Note what the interpreters hold. Returns what the process holds: MiB, descriptors, threads."
        for worker in self.parent.children(recursive=True):
            try:
                if worker.status() == psutil.STATUS_ZOMBIE: continue
                self.worst = max(self.worst, worker.memory_info().rss / 2 ** 20)
                self.seen['open files'] += sum(f.fd > 2 for f in worker.open_files())       # not what it prints to
                self.seen['sockets'] += len(worker.net_connections('inet'))
                self.seen['processes'] += worker.name() != 'monty' or worker.ppid() != self.parent.pid
            except psutil.NoSuchProcess: pass                                   # it was replaced meanwhile
        return self.parent.memory_info().rss / 2 ** 20, self.parent.num_fds(), self.parent.num_threads()


def play_all(number, start, pipe, watch, note):
    "Let so many random programs be run, several at once; `note(seconds, answers, held)` is called after each call."
    @seed(start)
    @settings(max_examples=-(-number // AT_ONCE), database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    @given(st.lists(programs(), min_size=AT_ONCE, max_size=AT_ONCE))
    def batch(codes):
        since = time.monotonic()
        pipe.send(codes)
        if not pipe.poll(60): raise TimeoutError(f'no answer within a minute: {codes!r}')
        answers = pipe.recv()
        note(time.monotonic() - since, answers, watch.look())
    batch()


def run_programs(number, start=0, say=None):
    "Run so many random programs in a process of their own, watched from this one: dict of figures."
    took, held, results, long = [], [], Counter(), []
    def note(seconds, answers, now):
        took.append(seconds)
        held.append(now)
        results.update(result.value for _, result in answers)
        long.extend(text for text, _ in answers if len(text) > CHARS + 301)
        if say and len(took) % 100 == 0: say(f'{len(took) * AT_ONCE} programs, {now[0]:.0f} MiB')
    before, (pipe, other) = os.getcwd(), multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        process = multiprocessing.get_context('spawn').Process(target=play, args=(other,), daemon=True)
        try:
            process.start()
            watch = Watch(process.pid)
            play_all(number, start, pipe, watch, note)
            pipe.send(None)
            process.join(30)
        finally:
            os.chdir(before)
            process.kill()
        left = [p for p in (*Path(folder).iterdir(), Path(f'/tmp/{MARK}'), Path(f'/{MARK}')) if p.exists()]
    settled, late = held[len(held) // 4:], [s for s in took if s > SECONDS + GRACE + 10]
    third = max(1, len(settled) // 3)
    first, last = ([max(column) for column in zip(*part)] for part in (settled[:third], settled[-third:]))
    return {'programs': len(took) * AT_ONCE, **{r.value: results[r.value] for r in Result if results[r.value]},
            'slowest call, s': round(max(took), 2), 'calls beyond the limit': len(late), 'answers too long': len(long),
            'files left': len(left),
            **{f'{k} of interpreters': watch.seen[k] for k in ('open files', 'sockets', 'processes')},
            'most memory of an interpreter, MiB': round(watch.worst), 'process, MiB': round(last[0], 1),
            'growth, MiB': round(last[0] - first[0], 1), 'more descriptors': last[1] - first[1],
            'more threads': last[2] - first[2]}


def what_got_out(figures):
    "What is not as it should be: list of names. The process may grow by 2 %, and by 4 MiB while it warms up."
    wrong = [k for k in ('calls beyond the limit', 'answers too long', 'files left', 'open files of interpreters',
                         'sockets of interpreters', 'processes of interpreters') if figures[k]]
    if figures['most memory of an interpreter, MiB'] > MEMORY + 64: wrong.append('most memory of an interpreter, MiB')
    if figures['growth, MiB'] > max(4., .02 * figures['process, MiB']): wrong.append('growth, MiB')
    return wrong + [k for k in ('more descriptors', 'more threads') if figures[k] > AT_ONCE]


if __name__ == '__main__':
    number, start = (*map(int, sys.argv[1:]), 0)[:2]
    found = run_programs(number, start, lambda line: print(line, flush=True))
    for name, value in found.items(): print(f'{name:36} {value}')
    print('got out:', ', '.join(what_got_out(found)) or 'nothing')
    sys.exit(bool(what_got_out(found)))
