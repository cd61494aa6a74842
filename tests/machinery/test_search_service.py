"Searching over HTTP: the protocol, many clients, broken requests, dying workers; answers that are kept and replayed."
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from urllib3.connection import HTTPConnection

from credit_rl.environment import open_search
from credit_rl.evaluate import Evaluation
from credit_rl.parameters import from_settings
from credit_rl.readers import Passage
from credit_rl.retrieval import BM25, Retriever
from credit_rl.search_service import (SearchCache, SearchClient, SearchError, SearchLost, SearchServer, build,
                                      is_kept_searches, open_retriever, read_corpus, search_app)
from credit_rl.settings import make_config
from credit_rl.setup import real_search
from credit_rl.tools import PythonTool, SearchTool
from credit_rl.runlog import MAY_CHANGE
from serving import Serving

pytest.importorskip('fastapi', reason='the extra `serve` is not installed')
pytest.importorskip('uvicorn', reason='the extra `serve` is not installed')
QUERY = st.lists(st.sampled_from('abcdefghxy'), max_size=6).map(' '.join)


@pytest.fixture
def corpus():
    return [Passage(f'id{i}', 'Tïtle "q"', f'text {i}\nnext line \ud800 {"odd" if i % 2 else "even"}') for i in range(7)]


FAST = dict(seconds=60, pause=0)


def post(url, value):
    "Status and JSON of a plain request, as any other client would send it."
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, {'Content-Type': 'application/json'}),
                                    timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as e: return e.code, json.loads(e.read())


@pytest.fixture
def canned():
    """Function (answers) → url and the list of what is asked there. Answers come one after the other, the last for ever;
    None hangs up, HANG waits."""
    over = threading.Event()
    with contextlib.ExitStack() as servers:
        def start(*answers):
            asked = []
            def said(path, value, headers):
                if path != '/retrieve': return 404, ''
                asked.append(value)
                found = answers[min(len(asked), len(answers)) - 1]
                return found if found != HANG else over.wait(30) and None
            return f'{servers.enter_context(Serving(said)).url}/retrieve', asked
        yield start
        over.set()


def answer(*rows): return 200, {'result': rows}


HANG = 'hang'


ENTRY = {'document': {'id': '4', 'contents': '"Orvane"\nA port.\nIt is old.'}, 'score': 1.5}


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=12)), min_size=1, max_size=6),
       st.lists(QUERY, max_size=4), st.integers(1, 9))
@example([('\r', '')], [''], 1)                            # a title of white space alone is one all the same
def test_what_comes_over_http_is_what_the_retriever_said(texts, queries, k):
    class Everything:
        def search(self, queries, k):
            return [[Passage(str(i), *pair, score=k / 7 + len(q)) for i, pair in enumerate(texts)][:k] for q in queries]
    with SearchServer(Everything()) as server:
        assert SearchClient(server.url, **FAST).search(queries, k) == Everything().search(queries, k)


SENSELESS = [
    (b'{', 'JSONDecodeError'), (b'[]', 'wanted'), ({'queries': 'odd'}, 'list of strings'),
    ({'queries': [1]}, 'list of strings'), ({'queries': None}, 'list of strings'), ({'queries': ['a'], 'topk': 0}, 'least'),
    ({'queries': ['a'], 'topk': '3'}, 'integer'), ({'queries': ['a'], 'topk': True}, 'integer'),
    ({'queries': ['a'], 'topk': 10 ** 9}, '1000 at most'), ({'queries': ['a'], 'return_scores': 'yes'}, 'true or false'),
    ({'queries': ['a'], 'top_k': 3}, "no field 'top_k'"), (b'\xff\xfe\xfd', 'Error'),
    (b'[' * 100000, 'RecursionError|JSONDecodeError')]


def test_a_senseless_request_is_told_why(corpus):
    with SearchServer(BM25(corpus)) as server:
        for body, said in SENSELESS:
            status, value = post(server.url, body)
            assert status == 400 and re.search(said, value['error']), body
            assert post(server.url, {'queries': ['odd']})[0] == 200                   # and nobody else suffers
        assert post(server.url + '/else', {'queries': ['odd']})[0] == 404


def test_passing_failures_are_tried_again_and_refusals_are_not(canned):
    url, asked = canned((503, b'busy'), None, (429, b'slow down'), answer([ENTRY]))
    assert SearchClient(url, tries=4, **FAST).search(['q'], 3) == [[Passage('4', 'Orvane', 'A port.\nIt is old.', 1.5)]]
    assert asked == [{'queries': ['q'], 'topk': 3, 'return_scores': True}] * 4
    url, asked = canned((422, b'what?'))
    with pytest.raises(SearchError, match='422: what[?]'): SearchClient(url, tries=4, **FAST).search(['q'], 3)
    assert len(asked) == 1
    url, asked = canned(None)
    with pytest.raises(SearchError, match='reached'): SearchClient(url, tries=2, **FAST).search(['q'], 3)
    assert len(asked) == 2


def test_a_server_that_hangs_ends_the_run_that_asks_it(canned):
    url, asked = canned(HANG)
    with pytest.raises(SearchLost, match='within 1 s'):
        SearchClient(url, seconds=1., tries=2, pause=0).search(['q'], 1)
    assert len(asked) == 2
    with pytest.raises(ConnectionError, match='ends'):
        SearchTool(SearchClient(url, seconds=.1, tries=1), 1, None).call([['q']])


def test_all_tries_and_requests_of_a_search_have_one_deadline(canned):
    "However many tries are left, and however long one may take; what the server last said is told."
    url, asked = canned((503, b'busy'))
    since = time.monotonic()
    with pytest.raises(SearchLost, match='busy'):                                  # it does not serve: no agent's mistake
        SearchClient(url, tries=99, pause=2., batch=1, deadline=5.).search(['a', 'b'], 1)
    assert len(asked) == 2 and {a['queries'][0] for a in asked} == {'a'} and time.monotonic() - since < 30
    url, asked = canned(HANG)
    with pytest.raises(SearchLost, match='within [123]'):
        SearchClient(url, seconds=60., tries=9, deadline=3.).search(['q'], 1)
    assert len(asked) == 1
    client = SearchClient(url, deadline=1e-9)
    with pytest.raises(SearchLost, match='deadline'): client.search(['q'], 1)


def test_a_run_says_how_long_a_server_is_waited_for(canned, monkeypatch):
    "Five answers of a server that starts again: too few for the three tries of the default."
    from credit_rl import search_service
    pauses = []
    monkeypatch.setattr(search_service.time, 'sleep', pauses.append)
    down, up = [(503, b'starting')] * 5, (200, b'{"result": [[]]}')
    url, asked = canned(*down, up)
    task = make_config({'data': 'nq', 'corpus': url, 'patience': {'tries': 6, 'pause': 10}})
    how = real_search(task, 'tspo').patience
    assert how.tries == 6 and len(asked) == 6 and pauses == [10, 20, 40, 80, 160]
    assert (how.seconds, how.batch) == (30, 1024)
    url, asked = canned(*down, up)
    given = from_settings(Evaluation, {'data': 'nq', 'corpus': url, 'patience': '{seconds: 7, tries: 6}'})
    assert open_search('nq', corpus=url, settings=given.search_settings)[0].patience.seconds == 7 and len(asked) == 6
    url, asked = canned(*down, up)
    with pytest.raises(ConnectionError, match='answered'): open_search('nq', corpus=url)
    assert len(asked) == 3
    with pytest.raises(ValueError, match="'tries'"):
        make_config({'patience': {'trys': 6}})
    assert 'patience' in MAY_CHANGE and 'dense' not in MAY_CHANGE           # a run that lost its server is gone on with


@pytest.mark.parametrize('program', [False, True])
def test_nobody_there_ends_the_run_that_asks(program):
    "As an observation an outage would be taken for what the agent did, in training as in evaluation."
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        url = f'http://127.0.0.1:{s.getsockname()[1]}'
    with pytest.raises(SearchError, match='running'): SearchClient(url, tries=1).search(['q'], 1)
    tool = SearchTool(SearchClient(url, tries=1), 1, None)
    with pytest.raises(ConnectionError, match='server'):
        PythonTool(tool).call(['print(search("q"))']) if program else tool.call([['q'], ['r']])


SOMETHING_ELSE = [
    b'<html>', b'[]', b'{}', b'{"result": 3}', b'{"result": []}', b'{"result": [[], []]}', b'{"result": [3]}',
    b'{"result": [["x"]]}', b'{"result": [[{"document": {"id": "1"}}]]}', b'{"result": [[{"document": {"contents": "a"}}]]}',
    b'{"result": [[{"document": {"id": "1", "contents": "a"}, "score": "high"}]]}']


def test_another_answer_is_refused_with_a_piece_of_it(canned):
    url, asked = canned(*((200, body) for body in SOMETHING_ELSE))
    for body in SOMETHING_ELSE:
        with pytest.raises(SearchError, match=f'(?s)something else.*{re.escape(body[:20].decode())}'):
            SearchClient(url, tries=3, **FAST).search(['q'], 1)
    assert len(asked) == len(SOMETHING_ELSE)


def test_more_than_k_is_cut_and_documents_may_come_without_scores(canned):
    bare = [{'id': i, 'contents': f'only text {i}'} for i in range(5)]
    url, asked = canned(answer(bare))
    assert SearchClient(url, **FAST).search(['q'], 2) == [[Passage(str(i), '', f'only text {i}') for i in range(2)]]
    url, _ = canned(answer([{'document': {'id': 3, 'title': 'T', 'text': 'x', 'contents': '"other"\ny'}, 'score': '2'}]))
    assert SearchClient(url, **FAST).search(['q'], 2) == [[Passage('3', 'T', 'x', 2.0)]]


def test_long_lists_go_in_several_requests_and_equal_queries_once(canned):
    url, asked = canned(answer([ENTRY], [ENTRY]))
    found = SearchClient(url, batch=2, **FAST).search(['a', 'b', 'a', 'c', 'd'], 1)
    found[0].clear()
    assert [*map(len, found)] == [0, 1, 1, 1, 1]                               # each has a list of its own
    assert [a['queries'] for a in asked] == [['a', 'b'], ['c', 'd']]


def test_the_http_door(corpus):
    for url in ('localhost:8000', '', None, 'ftp://x'):
        with pytest.raises(ValueError, match='url'): SearchClient(url)
    for bad in (dict(seconds=0), dict(tries=0), dict(pause=-1), dict(batch=0), dict(deadline=0)):
        with pytest.raises(ValueError, match=next(iter(bad))): SearchClient('http://localhost', **bad)
    with pytest.raises(TypeError, match='search'): SearchServer(corpus)
    with pytest.raises(TypeError, match='strings'): SearchClient('http://localhost').search('q', 1)
    with SearchServer(BM25(corpus)) as server:
        with pytest.raises(OSError): SearchServer(BM25(corpus), port=server.server_address[1])


def test_a_proxy_of_the_environment_is_not_asked(corpus, monkeypatch):
    for name in ('http_proxy', 'HTTP_PROXY'): monkeypatch.setenv(name, 'http://127.0.0.1:9')
    monkeypatch.delenv('no_proxy', raising=False)
    with SearchServer(BM25(corpus)) as server:
        assert SearchClient(server.url.removesuffix('/retrieve'), tries=1).search(['odd'], 1)[0]


def test_a_saved_index_is_served_from_the_command_line(corpus, tmp_path, root):
    BM25(corpus).save(tmp_path / 'index')
    # a background job's children are born deaf to SIGINT; no preexec_fn, for which all of this process is copied
    hearing = ('import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); '
               "runpy.run_module('credit_rl.retrieval', run_name='__main__')")
    process = subprocess.Popen([sys.executable, '-c', hearing, str(tmp_path / 'index'), '--port', '0'], cwd=root,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        line = process.stdout.readline()
        url = re.fullmatch(r'7 passages at (http://127\.0\.0\.1:\d+/retrieve)\n', line)[1]
        assert SearchClient(url).search(['odd'], 3) == BM25(corpus).search(['odd'], 3)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0 and process.stdout.read() == ''
    finally:
        if process.poll() is None: process.kill()
        process.stdout.close()


# ---- what the server bears ----

def test_search_r1s_own_requests_are_answered(corpus):
    "The payload of its rollout, that of its README, and a bare one; with scores and without, in its own fields."
    bm25 = BM25(corpus)
    with SearchServer(bm25, k=2) as server:
        ask = lambda url=server.url, **how: post(url, {'queries': ['odd', 'zebra'], **how})
        _, scored = ask(topk=2, return_scores=True)
        plain = [ask(topk=2, return_scores=False), ask(), ask(topk=None, return_scores=None), ask(server.url + '/')]
        assert post(server.url, {'queries': []}) == (200, {'result': []})
        assert post(server.url, {'queries': ['', ' ']}) == (200, {'result': [[], []]})
    scored = scored['result']
    assert plain == [(200, {'result': [[e['document'] for e in row] for row in scored]})] * 4 and scored[1] == []
    expected = bm25.search(['odd'], 2)[0]
    assert [(e['document']['id'], e['score']) for e in scored[0]] == [(p.id, p.score) for p in expected]
    assert [e['document']['contents'] for e in scored[0]] == [f'"{p.title}"\n{p.text}' for p in expected]


def test_health_says_what_is_searched_while_searches_wait(corpus):
    class Slow:
        go = threading.Event()
        def search(self, queries, k):
            self.go.wait(30)
            return [[] for _ in queries]
    slow = Slow()
    with SearchServer(slow, about=BM25(corpus).about()) as server:
        waiting = [threading.Thread(target=post, args=(server.url, {'queries': ['a']})) for _ in range(12)]
        for t in waiting: t.start()
        with urllib.request.urlopen(server.url.replace('retrieve', 'health'), timeout=10) as answer:
            said = json.loads(answer.read())
        slow.go.set()
        for t in waiting: t.join()
        assert SearchClient(server.url).about() == {'name': 'SearchClient', 'url': server.url, 'passages': 7,
                                                    'corpus': BM25(corpus).corpus}
    assert said['status'] == 'ok' and said['passages'] == 7 and said['pid'] == os.getpid()


def test_huge_requests_are_answered_or_refused(corpus):
    bm25 = BM25(corpus)
    with SearchServer(bm25) as server:
        long = 'odd ' * 250_000
        assert SearchClient(server.url).search([long], 3) == bm25.search([long], 3)
        many = [f'text {i % 7} {i}' for i in range(3000)]
        assert SearchClient(server.url).search(many, 1) == bm25.search(many, 1)
        status, value = post(server.url, b'{"queries": ["' + b'x' * 2 ** 26 + b'"]}')
        assert status == 413 and f'at most {2 ** 26} bytes' in value['error']
        assert post(server.url, {'queries': ['odd']})[0] == 200


def test_a_body_without_a_length_is_counted_as_it_comes(corpus):
    with SearchServer(BM25(corpus)) as server:
        for pieces, status in (([b'{"queries": ', b'["odd"]}'], 200), ([b'[' * 2 ** 20] * 65, 413)):
            connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
            connection.request('POST', '/retrieve', body=iter(pieces), encode_chunked=True,
                               headers={'Transfer-Encoding': 'chunked'})
            answer = connection.getresponse()
            assert answer.status == status and json.loads(answer.read())
            connection.close()


def test_a_client_that_says_half_a_sentence_keeps_nobody_waiting(corpus):
    with SearchServer(BM25(corpus)) as server:
        halves = [socket.create_connection(server.server_address[:2], timeout=10) for _ in range(20)]
        for s in halves: s.sendall(b'POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"quer')
        assert SearchClient(server.url, tries=1).search(['odd'], 1)[0]
        start = time.monotonic()
    assert time.monotonic() - start < 20            # and closing does not wait for them for ever
    for s in halves: s.close()


def test_answers_come_on_one_connection_and_wait_for_no_acknowledgement(corpus, monkeypatch):
    "An answer in two packets whose second waits for the first's acknowledgement takes 40 ms, every one."
    opened, connect = [], HTTPConnection.connect
    monkeypatch.setattr(HTTPConnection, 'connect', lambda self: opened.append(self) or connect(self))
    with SearchServer(BM25(corpus)) as server:
        client, delays = SearchClient(server.url), []
        for _ in range(60):
            start = time.monotonic()
            client.search(['odd'], 3)
            delays.append(time.monotonic() - start)
    assert min(delays[30:]) < .03, sorted(delays[30:])
    assert len(opened) == 1


def test_the_extra_is_named_where_it_is_missing(corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, 'fastapi', None)
    for call in (lambda: SearchServer(BM25(corpus)), lambda: search_app(BM25(corpus))):
        with pytest.raises(ImportError, match='install'): call()


# ---- several processes ----

@contextlib.contextmanager
def running(root, *arguments):
    "The url of `credit-rl serve ARGUMENTS`, and its process, which is ended."
    command = [sys.executable, '-m', 'credit_rl.command', 'serve', *map(str, arguments), '--port', '0']
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        found = re.search(r'http://127\.0\.0\.1:\d+/retrieve', line := process.stdout.readline())
        assert found, line + process.stdout.read()
        yield found[0], process
    finally:
        if process.poll() is None: process.terminate()
        try: process.wait(30)
        except subprocess.TimeoutExpired: process.kill()
        process.stdout.close()


def workers(url, number):
    "Process ids of `number` workers, asked for until so many have answered."
    found, end = set(), time.monotonic() + 60
    while len(found) < number and time.monotonic() < end:
        try:
            with urllib.request.urlopen(url.replace('retrieve', 'health'), timeout=10) as answer:
                found.add(json.loads(answer.read())['pid'])
        except OSError: time.sleep(.05)
    assert len(found) >= number
    return found


def test_many_clients_lose_nothing_when_a_worker_is_killed(tmp_path, root):
    "Every query of forty clients gets its own right answer while one of two workers is killed in the middle."
    rng = np.random.default_rng(0)
    passages = [Passage(str(i), f'title{i}', ' '.join(f'w{j}' for j in rng.integers(0, 900, 30))) for i in range(3000)]
    bm25 = BM25(passages)
    bm25.save(tmp_path / 'index')
    mine = lambda i: [f'title{(31 * i + j) % 3000} w{(7 * i + j) % 900}' for j in range(6)]
    out = {}
    with running(root, tmp_path / 'index', '--workers', '2') as (url, process):
        alive = workers(url, 2)
        def ask(i):
            client = SearchClient(url, seconds=60, tries=5, pause=.1)
            for j, q in enumerate(mine(i)): out[i, j] = client.search([q], 3)
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(40)]
        for t in threads: t.start()
        while len(out) < 40: time.sleep(.005)
        os.kill(min(alive), signal.SIGKILL)
        for t in threads: t.join(120)
        assert not any(t.is_alive() for t in threads)
        assert min(alive) not in workers(url, 2)                               # and another has taken its place
    assert out == {(i, j): bm25.search([q], 3) for i in range(40) for j, q in enumerate(mine(i))}


def test_workers_end_with_their_parent(corpus, tmp_path, root):
    BM25(corpus).save(tmp_path / 'index')
    with running(root, tmp_path / 'index', '--workers', '2') as (url, process):
        pids = workers(url, 2)
        process.kill()
        process.wait(10)
        end = time.monotonic() + 20
        while time.monotonic() < end and any(os.path.exists(f'/proc/{pid}') for pid in pids): time.sleep(.05)
        assert not any(os.path.exists(f'/proc/{pid}') for pid in pids)
        with pytest.raises(SearchError, match='running'): SearchClient(url, tries=1).search(['odd'], 1)


# ---- answers that are kept ----

class Counting:
    "A retriever that notes what it is asked: `n` passages for each query at most."
    def __init__(self, n=9): self.n, self.asked = n, []
    def search(self, queries, k):
        self.asked.append((list(queries), k))
        return [[Passage(f'{q}{i}', '', q, float(9 - i)) for i in range(min(k, self.n))] for q in queries]


def test_a_query_is_asked_once_and_replayed_without_a_network(tmp_path, monkeypatch):
    path, search = tmp_path / 'deep' / 'kept.jsonl', Counting()
    cache = SearchCache(path, search)
    first = cache.search(['a', 'b', 'a'], 3)
    assert cache.search(['b', 'c'], 2) == Counting().search(['b', 'c'], 2)
    assert search.asked == [(['a', 'b'], 3), (['c'], 2)]
    assert cache.search(['c'], 3) == Counting().search(['c'], 3) and search.asked[2:] == [(['c'], 3)]   # more: again
    again = Counting()
    assert SearchCache(path, again).search(['a', 'b', 'a'], 3) == first and again.asked == []
    monkeypatch.setattr(socket, 'socket', lambda *a, **k: pytest.fail('a socket was opened'))
    replay = open_retriever(path)
    assert replay.search(['a', 'b', 'a'], 3) == first and replay.search(['c'], 1) == Counting().search(['c'], 1)
    for query, k in (('new', 1), ('a', 4)):
        with pytest.raises(SearchError, match=f"'{query}' for {k} passages is not among the kept searches of .*kept"):
            replay.search(['a', query], k)
    assert isinstance(replay, Retriever) and replay.about()['name'] == 'SearchCache'


def test_an_answer_that_was_short_by_itself_serves_more(tmp_path):
    "Two hits where three were asked for are all that there are, so that five would give the same two."
    few = Counting(2)
    SearchCache(tmp_path / 'kept', few).search(['a', 'none'], 3)
    assert SearchCache(tmp_path / 'kept').search(['a'], 5) == Counting(2).search(['a'], 5)
    nothing = Counting(0)
    SearchCache(tmp_path / 'kept', nothing).search(['zebra'], 3)
    assert SearchCache(tmp_path / 'kept').search(['zebra'], 9) == [[]]


def test_a_line_that_was_cut_off_is_dropped_and_a_damaged_one_refused(tmp_path):
    path = tmp_path / 'kept'
    SearchCache(path, Counting()).search(['a', 'b'], 2)
    whole = path.read_bytes()
    for cut in (1, 20, len(whole.splitlines()[-1]) + 1):
        path.write_bytes(whole[:-cut])
        with pytest.raises(SearchError): SearchCache(path).search(['b'], 2)
        search = Counting()
        assert SearchCache(path, search).search(['a', 'b'], 2) == Counting().search(['a', 'b'], 2)
        assert search.asked == [(['b'], 2)] and path.read_bytes() == whole
    for short in (b'', whole[:5]):
        path.write_bytes(short)
        SearchCache(path, Counting()).search(['a', 'b'], 2)
        assert path.read_bytes() == whole
    path.write_bytes(whole.replace(b'"k": 2', b'"q": 2', 1))
    with pytest.raises(ValueError, match='search'): SearchCache(path)
    path.write_text('{"id": "1", "contents": "mine"}\n')
    with pytest.raises(ValueError, match='search'): SearchCache(path, Counting())
    for text in ('{"mine": 1}', '{"mine": 1,\n"too": 2}'):              # of something else, without a last line end
        path.write_text(text)
        with pytest.raises(ValueError, match='search'): SearchCache(path, Counting())
        assert path.read_text() == text


def test_a_smaller_answer_leaves_the_larger_one(tmp_path):
    "Two processes with one file: one was asked for five passages, the other, which does not know of it, for three."
    first, other = (SearchCache(tmp_path / 'kept', Counting()) for _ in range(2))
    first.search(['a'], 5)
    other.search(['a'], 3)
    assert SearchCache(tmp_path / 'kept').search(['a'], 5) == Counting().search(['a'], 5)


def test_kept_searches_are_known_as_they_are_read(tmp_path):
    SearchCache(tmp_path / 'kept', Counting()).search(['a'], 1)
    whole = (tmp_path / 'kept').read_bytes()
    for written in (whole, b'\xef\xbb\xbf' + whole, whole.replace(b'\n', b'\r\n')):
        (tmp_path / 'other').write_bytes(written)
        assert is_kept_searches(tmp_path / 'other') and SearchCache(tmp_path / 'other').search(['a'], 1)


def test_several_processes_may_keep_in_one_file(tmp_path, root):
    code = ('import sys; from credit_rl.search_service import SearchCache; from credit_rl.readers import Passage\n'
            'class Own:\n'
            '    def search(self, queries, k): return [[Passage(q, "", "x" * 5000, 1.0)] for q in queries]\n'
            'cache = SearchCache(sys.argv[1], Own())\n'
            'for i in range(100): cache.search([f"{sys.argv[2]}-{i}"], 1)\n')
    started = [subprocess.Popen([sys.executable, '-c', code, str(tmp_path / 'kept'), str(n)], cwd=root)
               for n in range(3)]
    assert [p.wait(120) for p in started] == [0, 0, 0]
    queries = [f'{n}-{i}' for n in range(3) for i in range(100)]
    assert [hits[0].id for hits in SearchCache(tmp_path / 'kept').search(queries, 1)] == queries
    assert len((tmp_path / 'kept').read_text().splitlines()) == 301


def test_a_server_keeps_what_another_answers_and_replays_it(corpus, tmp_path, root):
    bm25, queries = BM25(corpus), ['odd', 'text 3', 'zebra']
    with SearchServer(bm25, about=bm25.about()) as server:
        with running(root, server.url, '--keep', tmp_path / 'kept') as (url, process):
            assert SearchClient(url).search(queries, 3) == bm25.search(queries, 3)
            assert SearchClient(url).about()['corpus'] == bm25.corpus
    with SearchServer(open_retriever(tmp_path / 'kept')) as server:
        assert SearchClient(server.url).search(queries, 2) == bm25.search(queries, 2)
        with pytest.raises(SearchError, match='searches'): SearchClient(server.url, tries=1).search(['even'], 2)


# ---- an index from a shell ----

def test_an_index_is_made_of_rows_as_they_come(tmp_path, capsys):
    rows = tmp_path / 'rows.jsonl'
    rows.write_text(''.join(json.dumps({'id': i, 'contents': f'"T{i}"\nword{i} common'}) + '\n' for i in range(9)))
    build([str(rows), str(tmp_path / 'index')])
    assert capsys.readouterr().out.startswith('9 passages in ')
    bm25 = BM25.load(tmp_path / 'index')
    assert bm25.search(['word4'], 3)[0][0].id == '4' and list(bm25.passages) == list(read_corpus('nq', rows))
    def refused(*arguments):
        with pytest.raises(SystemExit): build(list(map(str, arguments)))
        return capsys.readouterr().err
    assert 'is there already' in refused(rows, tmp_path / 'index')
    rows.write_text('{"id": "1", "contents": "a"}\n{"id": "1", "contents": "b"}\n')
    assert "the id '1' of passage 2 stands twice" in refused(rows, tmp_path / 'other')
    rows.write_text('{"id": "1", "contents": "a"}\n{"id": "2"}\n')
    assert 'rows.jsonl, line 2' in refused(rows, tmp_path / 'other')
    assert 'no file' in refused(tmp_path / 'none.jsonl', tmp_path / 'other')
    assert {p.name for p in tmp_path.iterdir()} == {'rows.jsonl', 'index'}


class Slow:
    "Counts its searches, which take a while; one query breaks it."
    def __init__(self): self.sizes = []

    def search(self, queries, k):
        self.sizes.append(len(queries))
        time.sleep(.05)
        if 'broken' in queries: raise RuntimeError('the index is on fire')
        return [[Passage(q, q, f'about {q}', float(k))] for q in queries]


def test_what_waits_is_one_search_and_a_request_that_fails_fails_alone():
    "Forty clients at a time, of two numbers of passages; each gets its own answer."
    index, asked = Slow(), [(f'q{i}' if i != 7 else 'broken', 1 + i % 2) for i in range(40)]
    with SearchServer(index) as server, ThreadPoolExecutor(40) as pool:
        client = SearchClient(server.url, tries=1)
        def ask(question):
            try: return client.search([question[0]], question[1])[0][0]
            except SearchError as e: return str(e)
        found, before = list(pool.map(ask, asked)), len(index.sizes)
        with pytest.raises(SearchError, match='index'): SearchClient(server.url, tries=4, **FAST).search(['broken'], 1)
        assert len(index.sizes) == before + 4                                  # an error of the server's: asked again
    assert 'on fire' in found[7]
    assert all((p.id, p.score) == (q, k) for i, (p, (q, k)) in enumerate(zip(found, asked)) if i != 7)
    alone = 20                                       # requests of the batch that broke are searched one by one
    assert before <= alone + 10 and max(index.sizes) >= 5


def test_kept_answers_are_not_given_for_other_passages(tmp_path):
    old, new = (BM25([Passage('0', 'A', text)]) for text in ('cats live here', 'dogs and cats'))
    SearchCache(tmp_path / 'kept.jsonl', old).search(['cats'], 1)
    assert SearchCache(tmp_path / 'kept.jsonl').search(['cats'], 1)[0][0].text == 'cats live here'        # replayed
    with pytest.raises(ValueError, match='other passages'): SearchCache(tmp_path / 'kept.jsonl', new)
