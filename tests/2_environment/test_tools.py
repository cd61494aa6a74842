"The tools: texts, cuts, isolation of failures, limits; programs that mean harm."
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from credit_rl.readers import Passage
from credit_rl.retrieval import BM25
from credit_rl.tools import PythonTool, SearchTool, count_words, cut, render_plain
from credit_rl.trajectory import Result

TEXTS = 'red fox runs', 'grey fox sleeps', 'grey wolf'
CORPUS = [Passage(str(i), f'Title {i}', text) for i, text in enumerate(TEXTS)]
BM = BM25(CORPUS)


class Stub:
    "A retriever that raises on 'broken', waits for `release` on 'hang', and counts its searches."
    def __init__(self): self.searches, self.release = [], threading.Event()
    def search(self, queries, k):
        self.searches.append(list(queries))
        if 'broken' in queries: raise KeyError('a\nb')
        if 'hang' in queries: self.release.wait()
        return BM.search(queries, k)


def test_one_query_is_a_numbered_list_and_several_are_blocks():
    tool = SearchTool(BM, 2, None)
    assert tool.run(['grey wolf']) == 'Doc 1 (Title: "Title 2") grey wolf\nDoc 2 (Title: "Title 1") grey fox sleeps'
    blocks = 'Query: red\nDoc 1 (Title: "Title 0") red fox runs\n\nQuery: zebra\nNo results.'
    assert tool.run(['red', 'zebra']) == blocks and tool.run(('red',)) == tool.run(['red'])
    # the cut is per passage and leaves titles
    assert SearchTool(BM, 3, 2).run(['fox']) == 'Doc 1 (Title: "Title 0") red fox\nDoc 2 (Title: "Title 1") grey fox'
    assert SearchTool(BM, 1, 8, count_tokens=len).run(['red']) == 'Doc 1 (Title: "Title 0") red fox'


@given(st.text(alphabet='ab \n\t', max_size=60), st.integers(1, 12), st.sampled_from([count_words, len]))
def test_a_cut_is_the_longest_beginning_that_fits_of_whole_words_or_into_one_too_long(text, limit, count):
    out = cut(text, limit, count)
    if count(text) <= limit:
        assert out == text
        return
    assert count(out) <= limit and text.startswith(out)
    assert out == '' or not out[-1].isspace()
    if out and not text[len(out)].isspace():                         # inside a word, which alone is too long
        word = out.split()[-1] + text[len(out):].split()[0]
        assert count(word) > limit and count(text[:len(out) + 1]) > limit
        return
    rest = text[len(out):].split()
    if rest: assert count(text[:text.index(rest[0], len(out)) + len(rest[0])]) > limit


def test_a_malformed_call_is_told_and_does_not_reach_the_retriever():
    for bad, said in (('red', 'list of strings'), (None, 'list of strings'), ({'q': 1}, 'list of strings'),
                      ([], 'no query'), ([''], 'non-empty'), (['red', 3], 'non-empty'), ([' '], 'non-empty')):
        (text, result), (good, ok) = SearchTool(stub := Stub(), 1, 9).call([bad, ['red']])
        assert text.startswith('Error: ') and said in text and result is Result.MALFORMED
        assert ok is Result.OK and 'red fox' in good and stub.searches == [['red']]
        assert SearchTool(stub, 1, 9).run(bad) == text and SearchTool(stub, 1, 9).call([bad]) == [(text, result)]


def test_one_failing_query_is_only_its_own_calls_error():
    out = SearchTool(Stub(), 1, 9).call([['red'], ['wolf', 'broken'], ['grey']])
    assert [r for _, r in out] == [Result.OK, Result.ERROR, Result.OK]
    assert out[1][0].startswith('Error: KeyError') and '\n' not in out[1][0]
    assert out[0] == SearchTool(BM, 1, 9).call([['red']])[0]


def test_any_failure_inside_is_an_observation():
    class Short:
        def search(self, queries, k): return []
    class Late:
        def search(self, queries, k): raise TimeoutError
    def render(results, empty): raise ZeroDivisionError('x' * 1000)
    text, result = SearchTool(Short(), 1, 9).call([['red']])[0]
    assert result is Result.ERROR and '0 results for 1' in text
    assert SearchTool(Late(), 1, 9).call([['red']])[0][1] is Result.TIMEOUT
    text, result = SearchTool(BM, 1, 9, render=render).call([['red']])[0]
    assert result is Result.ERROR and text.startswith('Error: ZeroDivisionError') and len(text) <= 300
    def count(text): raise ValueError('no tokenizer')
    assert SearchTool(BM, 1, 9, count_tokens=count).run(['red']) == 'Error: ValueError: no tokenizer'


def test_a_blocking_search_times_out_and_its_late_answer_is_thrown_away():
    stub = Stub()
    tool = SearchTool(stub, 1, 9, seconds=0.5)
    assert [r for _, r in tool.call([['red'], ['hang']])] == [Result.TIMEOUT] * 2
    assert tool.run(['hang']).startswith('Error: ') and len(stub.searches) == 2      # not asked again one by one
    stub.release.set()
    calls = SearchTool(stub, 1, 9, seconds=600).call([['red'], ['hang']])
    assert calls == SearchTool(BM, 1, 9).call([['red'], ['hang']])


def test_a_failing_batch_and_its_single_calls_share_one_time_limit():
    stub = Stub()
    out = SearchTool(stub, 1, 9, seconds=2.).call([['red'], ['broken'], ['hang'], ['wolf']])
    stub.release.set()
    assert [r for _, r in out] == [Result.OK, Result.ERROR, Result.TIMEOUT, Result.TIMEOUT]


def test_the_doors():
    for bad in (dict(k=0), dict(k=None), dict(k=.5), dict(k=2.), dict(max_tokens=0), dict(max_tokens='9'),
                dict(seconds=0), dict(seconds=-1)):
        with pytest.raises(ValueError, match=next(iter(bad))): SearchTool(BM, **{'k': 1, 'max_tokens': 9, **bad})
    for bad in (dict(seconds=0), dict(memory_mb=-1), dict(output_chars=0), dict(searches=0), dict(workers='2')):
        with pytest.raises(ValueError, match=next(iter(bad))): PythonTool(**bad)
    with pytest.raises(TypeError, match='search'): SearchTool(CORPUS, 1, 9)
    with pytest.raises(TypeError, match='SearchTool'): PythonTool(search=BM)
    for code in (None, 3, ['print(1)']): assert PYTHON.call([code])[0][1] is Result.MALFORMED


PYTHON = PythonTool(search=lambda query: f'found {query}', seconds=0.5, memory_mb=32, output_chars=300)
# where another limit is to be met first, on a busy machine too
PATIENT = PythonTool(search=lambda query: f'found {query}', seconds=30, memory_mb=32, output_chars=300)
LATE, LARGE = 'the code ran longer than 0.5 seconds', 'the code needed more than 32 MB'
LONG = 'the output is longer than 300'
HOSTILE = {  # Result: program: what its observation says behind 'Error: '
    Result.TIMEOUT: {
        'while True: pass': LATE, 'print(sum(range(10**12)))': LATE,
        'while True:\n    try:\n        while True: pass\n    except BaseException: pass': LATE,
        'def f(n): return 1 if n < 2 else f(n - 1) + f(n - 2)\nprint(f(90))': LATE,
        'raise TimeoutError("mine")': 'TimeoutError: mine'},
    Result.ERROR: {
        'x = [0] * 10**10': LARGE, 'x = []\nwhile True: x.append("a" * 1000)': LARGE, '"a" * 10**10': LARGE,
        '10 ** 10 ** 9': LARGE, 'print(f"{1:>1000000000}")': LARGE, 'x = {i: [i] * 100 for i in range(10**7)}': LARGE,
        'def f(n): return f(n + 1)\nf(0)': 'RecursionError', 'x = []\nfor _ in range(10**5): x = [x]\nprint(x)': '',
        'print("a" * 10**6)': f'{LONG} characters; it begins\naaa',
        'while True: print("flood")': f'{LONG} characters; it begins\nflood',
        'for i in range(10**6):\n    try: print("a" * 100)\n    except BaseException: pass': LONG,
        'open("/etc/passwd").read()': 'PermissionError', 'open("x.txt", "w").write("x")': 'PermissionError',
        'from pathlib import Path\nprint(Path("/etc/passwd").read_text())': 'PermissionError',
        'import os\nprint(os.listdir("/"))': 'PermissionError', 'import os\nprint(os.environ)': 'RuntimeError',
        'import os\nos.system("ls")': 'AttributeError', 'import os\nos.fork()': 'AttributeError',
        **{f'import {name}': 'ModuleNotFoundError' for name in ('socket', 'subprocess', 'multiprocessing', 'ctypes',
                                                                'urllib.request', 'credit_rl')},
        '__import__("os")': 'NameError', 'import importlib\nimportlib.import_module("os")': '',
        'exec("import socket")': 'ModuleNotFoundError', 'print((lambda: 0).__globals__)': 'AttributeError',
        'print(().__class__.__bases__[0].__subclasses__())': 'AttributeError', 'raise SystemExit': 'SystemExit',
        'exit()': 'NameError', 'input("who?")': 'NameError', 'nobody': "NameError: name 'nobody' is not defined",
        'print(1)\nprint(2)\n1 / 0': 'ZeroDivisionError: division by zero\n1\n2',
        'raise ValueError("a\\nb")': 'ValueError: a b', 'raise ValueError("x" * 10**5)': 'ValueError: xxx',
        'search()': 'TypeError: search() missing', 'search("a", k=0)': 'TypeError: search takes a query',
        **{f'search({x})': 'ValueError: a query must be a non-empty string' for x in ('3', '" "', '["a", "b"]')},
        'while True: search("a")': 'RuntimeError: more than 20 searches',
        'while True:\n    try: search("a")\n    except Exception: pass': 'the code called too often'},
    Result.MALFORMED: dict.fromkeys(['print(', 'So I search.', '\x00', 'print("\ud800")', '(' * 10**4], 'SyntaxError')}


def alive(tool):
    assert tool.run('print(6 * 7)') == '42'


def test_hostile_programs_are_observations_and_the_next_one_runs():
    for result, programs in HOSTILE.items():
        tool = PYTHON if result is Result.TIMEOUT else PATIENT
        *together, last = tool.call([*programs, 'print(6 * 7)'])
        for (code, said), (text, got) in zip(programs.items(), together, strict=True):
            assert text.startswith(f'Error: {said}') and got is result, code
            assert len(text) <= 300 + 300 + 1 and '\n' not in text.split(f'Error: {said}')[0], code
        assert last == ('42', Result.OK)
        alive(tool)


def test_programs_that_work():
    for code, text in (('6 * 7', 'No output.'), ('', 'No output.'), ('größe = 2\nprint(größe)', '2'),
                       ('print(1, end="")', '1'), ('print("a\\n\\n")', 'a'), ('print("  a ")', '  a '),
                       ('print(search(query="x"))', 'found x'),
                       ('s = search\nprint([s(q) for q in "ab"])', "['found a', 'found b']"),
                       ('import sys\nprint("log", file=sys.stderr)\nprint("out")', 'out')):
        assert PATIENT.call([code]) == [(text, Result.OK)], code
    assert PATIENT.run('secret = 1') == 'No output.' and PATIENT.run('print(secret)').startswith('Error: NameError')


@pytest.mark.parametrize('search, said, result', [
    ({}.__getitem__, "RuntimeError: the search failed: KeyError: 'broken'", Result.ERROR),
    (lambda q: 3, 'RuntimeError: the search failed: it gave int, not a text', Result.ERROR),
    (SearchTool(Stub(), 1, 9), "RuntimeError: KeyError: 'a\\nb'", Result.ERROR),
    (SearchTool(Stub(), 1, 9, seconds=0.05), 'TimeoutError: the search took too long', Result.TIMEOUT)])
def test_a_search_that_fails_is_an_exception_in_the_program(search, said, result):
    tool, query = PythonTool(search=search), 'hang' if result is Result.TIMEOUT else 'broken'
    assert tool.call([f'print("before")\nprint(search("{query}"))']) == [(f'Error: {said}\nbefore', result)]
    assert tool.run(f'try: search("{query}")\nexcept Exception: print("I go on")') == 'I go on'
    alive(tool)


def test_searches_of_programs_side_by_side_are_one_search_a_round():
    stub = Stub()
    tool = PythonTool(search=SearchTool(stub, 1, 9, render=render_plain))
    codes = ['print(search("red"))', 'a = search("grey wolf")\nprint(a, search("red"))', 'print(2)',
             'print(search("zebra"))', '1 / 0']
    texts = tool.run_batch(codes)
    assert texts == ['red fox runs', 'grey wolf red fox runs', '2', 'No results.',
                     'Error: ZeroDivisionError: division by zero']
    assert stub.searches == [['red', 'grey wolf', 'zebra'], ['red']]
    assert [tool.run(c) for c in codes] == texts and tool.call([]) == []
    few, stub.searches = PythonTool(search=tool.search, workers=3), []                  # than programs
    assert few.run_batch([f'print(search("red") and {i})' for i in range(8)]) == list('01234567')
    assert [len(s) for s in stub.searches] == [3, 3, 2]


def test_tools_are_used_from_several_threads():
    tool, out = PythonTool(workers=2), {}
    run = lambda i: out.update({i: tool.run_batch([f'print({i})'] * 3)})
    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert out == {i: [str(i)] * 3 for i in range(4)}


def workers_of(process):
    "Process ids of the interpreters that a process has started and that are not dead."
    out = []
    for stat in Path('/proc').glob('[0-9]*/stat'):
        try: text = stat.read_text()
        except (FileNotFoundError, ProcessLookupError): continue        # it ended while we looked
        name, rest = text[text.index('(') + 1:text.rindex(')')], text[text.rindex(')') + 2:].split()
        if name == 'monty' and int(rest[1]) == process and rest[0] != 'Z': out.append(int(stat.parent.name))
    return out


@pytest.mark.skipif(not Path('/proc/self/stat').exists(), reason='needs /proc to find the workers')
@pytest.mark.parametrize('times', [1, 2])
def test_a_killed_worker_is_replaced_and_its_program_run_once_more(times):
    "Whoever ended it (a host without memory, say), the agent did not; a program that ends two does so itself."
    before, killed = set(workers_of(os.getpid())), []
    def kill(query):
        for pid in set(workers_of(os.getpid())) - before - set(killed) if len(killed) < times else ():
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        return 'found'
    tool = PythonTool(search=kill)
    assert tool.call(['print("before")\nprint(search("x"))']) == [
        ('before\nfound', Result.OK) if times == 1 else ('Error: the interpreter crashed\nbefore', Result.ERROR)]
    assert len(killed) == times
    alive(tool)


@pytest.mark.skipif(not Path('/proc/self/stat').exists(), reason='needs /proc to find the workers')
def test_the_workers_end_with_the_tool():
    before = set(workers_of(os.getpid()))
    tool = PythonTool()
    tool.run_batch(['print(1)'] * 3)
    mine = set(workers_of(os.getpid())) - before
    assert len(mine) == 3
    del tool
    gc.collect()
    until = time.monotonic() + 60
    while mine & set(workers_of(os.getpid())) and time.monotonic() < until: time.sleep(.05)
    assert not mine & set(workers_of(os.getpid()))


def test_a_worker_that_hangs_is_ended_and_another_runs_the_program(monkeypatch):
    monkeypatch.setattr('credit_rl.tools._SILENCE', 12.)          # a busy machine starts a worker in more than 5
    before, tool = set(workers_of(os.getpid())), PythonTool(workers=1)
    assert tool.run('print(1)') == '1'
    worker, = set(workers_of(os.getpid())) - before
    os.kill(worker, signal.SIGSTOP)
    assert tool.call(['print(2)']) == [('2', Result.OK)]
    until = time.monotonic() + 60
    while worker in workers_of(os.getpid()) and time.monotonic() < until: time.sleep(.05)
    assert worker not in workers_of(os.getpid())


FORKED = '''
import os
from credit_rl.tools import PythonTool
tool = PythonTool()
assert tool.run('print(1)') == '1'
if os.fork() == 0:
    try: tool.run('print(1)')
    except RuntimeError as e: os._exit(7 if 'forked' in str(e) else 8)
    os._exit(9)
print(os.waitstatus_to_exitcode(os.wait()[1]), tool.run('print(2)'))
'''


def test_a_forked_process_is_refused_and_does_not_hang():
    done = subprocess.run([sys.executable, '-c', FORKED], capture_output=True, text=True)
    assert done.stdout == '7 2\n', done.stderr
