"BM25 against its written-out formula, bm25s and rank_bm25; ties, doors, saving all or nothing; searching over HTTP."
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from credit_rl.datasets import load_corpus, load_questions
from credit_rl.readers import Passage
from credit_rl.retrieval import (BM25, PassageFile, RankBM25, Retriever, SearchClient, SearchError, SearchServer,
                                 bm25_reference, corpus_hash, document, words)
from credit_rl.tools import SearchTool
from credit_rl.trajectory import Result

DATA = os.environ.get('CREDIT_RL_DATA')
WORD = st.sampled_from('abcdefgh')
QUERY = st.lists(st.sampled_from('abcdefghxy'), max_size=6).map(' '.join)
VARIANTS = ['lucene', 'robertson', 'atire']


@st.composite
def corpora(draw):
    texts = draw(st.lists(st.lists(WORD, max_size=10).map(' '.join), min_size=1, max_size=14))
    if not any(texts): texts[0] = 'a'
    return [Passage(str(i), draw(st.sampled_from(['', 'a', 'B b'])), t) for i, t in enumerate(texts)]


PARAMETERS = st.tuples(st.sampled_from([0.9, 1.5, 0.1]), st.sampled_from([0.4, 0.75, 0.0, 1.0]))


@settings(deadline=None)
@given(corpora(), st.lists(QUERY, max_size=4), PARAMETERS, st.sampled_from(VARIANTS))
def test_scores_are_the_formula_and_bm25s_to_the_bit(corpus, queries, parameters, variant):
    import bm25s
    k1, b = parameters
    bm25 = BM25(corpus, k1, b, variant)
    by_table = bm25.scores(queries)
    bm25.table = None
    by_lists = bm25.scores(queries)
    assert by_table.shape == (len(queries), len(corpus)) and np.array_equal(by_table, by_lists)
    theirs = bm25s.BM25(k1=k1, b=b, method=variant)
    theirs.index([words(document(p)) for p in corpus], show_progress=False)
    for q, row in zip(queries, by_lists):
        assert np.allclose(row, bm25_reference(corpus, q, k1, b, variant), rtol=1e-5, atol=1e-6)
        if q: assert np.array_equal(row, theirs.get_scores(words(q)))


@settings(deadline=None)
@given(corpora(), QUERY.filter(bool), PARAMETERS)
def test_robertson_is_rank_bm25_up_to_k1_plus_1_where_no_word_is_common(corpus, query, parameters):
    k1, b = parameters
    ours, theirs = BM25(corpus, k1, b, 'robertson').scores([query])[0], RankBM25(corpus, k1, b).scores([query])[0]
    common = [w for w in words(query) if sum(w in words(document(p)) for p in corpus) > len(corpus) / 2]
    rare = ' '.join(w for w in words(query) if w not in common)
    if common: assert np.allclose(ours, bm25_reference(corpus, query, k1, b, 'robertson'), rtol=1e-5, atol=1e-6)
    else: assert np.allclose((k1 + 1) * ours, theirs, rtol=1e-5, atol=1e-6)
    # the common words weigh nothing here, so what is left is rank_bm25's score of the rare ones
    assert np.allclose((k1 + 1) * ours, RankBM25(corpus, k1, b).scores([rare])[0], rtol=1e-5, atol=1e-6)


@settings(deadline=None)
@given(corpora(), st.lists(QUERY, max_size=5), st.integers(1, 40))
def test_search_is_a_stable_sort_of_the_positive_scores(corpus, queries, k):
    bm25 = BM25(corpus)
    found = bm25.search(queries, k)
    assert len(found) == len(queries)
    for query, passages in zip(queries, found):
        scores = bm25.scores([query])[0]
        # sorted is stable
        order = [i for i in sorted(range(len(corpus)), key=lambda i: -scores[i]) if scores[i] > 0][:k]
        assert [p.id for p in passages] == [str(i) for i in order]
        assert [p.score for p in passages] == [float(scores[i]) for i in order]
        assert [p.text for p in passages] == [corpus[i].text for i in order]
        assert bm25.search([query], k)[0] == passages  # a batch changes nothing


@pytest.mark.parametrize('k', [2, 100])
def test_ties_go_by_the_place_in_the_corpus(k):
    corpus = [Passage(str(i), '', 'same text' if i % 2 else 'other thing') for i in range(50)]
    for retriever in (BM25(corpus), RankBM25(corpus + [Passage('x', '', 'filler')] * 60)):
        assert [p.id for p in retriever.search(['same'], k)[0]] == [str(i) for i in range(1, 50, 2)][:k]


def test_chunks_of_queries_do_not_change_the_result(monkeypatch):
    rng = np.random.default_rng(0)
    corpus = [Passage(str(i), '', ' '.join(rng.choice(list('abcdefghij'), 5))) for i in range(3000)]
    queries = [' '.join(rng.choice(list('abcdefghij'), 2)) for _ in range(90)] + ['a b'] * 400
    bm25 = BM25(corpus)
    assert 2 ** 20 // len(corpus) < len(queries)
    assert bm25.search(queries, 3) == [bm25.search([q], 3)[0] for q in queries]


def test_results_of_equal_queries_are_separate_lists():
    bm25 = BM25([Passage('0', '', 'a'), Passage('1', '', 'b')])
    first, second = bm25.search(['a', 'a'], 1)
    first.clear()
    assert len(second) == 1


def test_the_doors():
    corpus = [Passage('0', '', 'a b'), Passage('1', '', '?!')]
    for kind in (BM25, RankBM25):
        with pytest.raises(ValueError, match='empty'): kind([])
        with pytest.raises(ValueError, match='has a word'): kind(corpus[1:])
        with pytest.raises(TypeError, match='list of Passage'): kind(['a b'])
        retriever = kind(corpus)
        assert isinstance(retriever, Retriever)
        with pytest.raises(TypeError, match='list of strings'): retriever.search('a', 3)
        with pytest.raises(TypeError, match='list of strings'): retriever.search([3], 3)
        with pytest.raises(ValueError, match='at least 1'): retriever.search(['a'], 0)
        assert retriever.search([], 3) == [] and retriever.search(['', '!', 'zebra'], 3) == [[], [], []]
    with pytest.raises(ValueError, match='variant'): BM25(corpus, variant='bm25+')
    for k1, b in ((-1, 0.4), (0.9, -0.1), (0.9, 1.1)):
        with pytest.raises(ValueError, match='k1'): BM25(corpus, k1, b)
    assert not isinstance(corpus, Retriever)


def test_progress_is_shown_when_asked_for(capsys):
    corpus = [Passage('0', '', 'a b')]
    BM25(corpus)
    assert not capsys.readouterr().err
    BM25(corpus, progress=True)
    assert 'words' in capsys.readouterr().err
    many = corpus * 20_000                                          # from here on without being asked
    BM25(many[:-1])
    assert not capsys.readouterr().err
    BM25(many)
    assert 'words' in (said := capsys.readouterr().err) and '20000/20000' in said
    BM25(many, progress=False)
    assert not capsys.readouterr().err


@pytest.fixture
def corpus():
    return [
        Passage(f'id{i}', 'Tïtle "q"', f'text {i}\nnext line \ud800 {"odd" if i % 2 else "even"}') for i in range(7)
    ]


def test_save_and_load_give_the_same_search(corpus, tmp_path):
    bm25 = BM25(corpus, 1.2, 0.3, 'robertson')
    bm25.save(tmp_path / 'deep' / 'index')
    again = BM25.load(tmp_path / 'deep' / 'index')
    queries = ['odd', 'text 3', 'tïtle', 'zebra']
    assert again.search(queries, 3) == bm25.search(queries,
                                                   3) and (again.k1, again.b, again.variant) == (1.2, 0.3, 'robertson')
    assert isinstance(again.passages, PassageFile) and list(
        again.passages) == corpus and again.passages[1:3] == corpus[1:3]
    assert isinstance(again.index.scores['data'], np.memmap)
    again.save(tmp_path / 'copy')                                  # from one memory-mapped index to another folder
    assert BM25.load(tmp_path / 'copy').search(queries, 3) == bm25.search(queries, 3)
    with pytest.raises(IndexError): again.passages[7]


def test_an_interrupted_save_leaves_what_was_there(corpus, tmp_path, monkeypatch):
    folder = tmp_path / 'index'
    def fail(*args, **kwargs): raise OSError('disk full')
    monkeypatch.setattr(np, 'save', fail)
    with pytest.raises(OSError, match='disk full'): BM25(corpus).save(folder)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    BM25(corpus).save(folder)
    monkeypatch.setattr(np, 'save', fail)
    with pytest.raises(OSError, match='disk full'): BM25(corpus[:2]).save(folder)
    monkeypatch.undo()
    assert len(BM25.load(folder).passages) == 7 and [p.name for p in tmp_path.iterdir()] == ['index']


def test_a_failed_last_move_puts_the_old_index_back(corpus, tmp_path, monkeypatch):
    folder, rename = tmp_path / 'index', Path.rename
    BM25(corpus).save(folder)
    def fail(self, target):
        if self.name.endswith('.new'): raise OSError('no')
        return rename(self, target)
    monkeypatch.setattr(Path, 'rename', fail)
    with pytest.raises(OSError, match='no'): BM25(corpus[:2]).save(folder)
    monkeypatch.undo()
    assert len(BM25.load(folder).passages) == 7 and [p.name for p in tmp_path.iterdir()] == ['index']


def test_a_damaged_index_is_refused(corpus, tmp_path):
    with pytest.raises(FileNotFoundError, match='no saved index'): BM25.load(tmp_path)
    (tmp_path / 'mine.txt').write_text('notes')
    with pytest.raises(FileExistsError, match='not a saved index'): BM25(corpus).save(tmp_path)
    with pytest.raises(FileExistsError, match='not a saved index'): BM25(corpus).save(tmp_path / 'mine.txt')
    folder = tmp_path / 'index'
    BM25(corpus).save(folder)
    text = (folder / 'passages.jsonl').read_bytes()
    (folder / 'passages.jsonl').write_bytes(text[:-5])
    with pytest.raises(ValueError, match='cut off'): BM25.load(folder)
    (folder / 'passages.jsonl').write_bytes(text)
    about = json.loads((folder / 'index.json').read_text())
    (folder / 'index.json').write_text(json.dumps({**about, 'passages': 8}))
    with pytest.raises(ValueError, match='damaged'): BM25.load(folder)
    (folder / 'index.json').write_text(json.dumps({**about, 'format': 1}))
    with pytest.raises(ValueError, match='format'): BM25.load(folder)


def test_the_hash_is_of_ids_titles_and_texts_in_order(corpus, tmp_path):
    changed = [
        corpus[::-1], corpus[:-1], corpus + corpus[:1],
        *([replace(corpus[0], **{f: 'new'}), *corpus[1:]] for f in ('id', 'title', 'text'))
    ]
    assert len({corpus_hash(c) for c in (corpus, *changed)}) == 1 + len(changed)
    assert corpus_hash([replace(p, score=1.) for p in corpus]) == corpus_hash(iter(corpus)) == corpus_hash(corpus)
    assert corpus_hash([Passage('1', 'ab', 'c')]) != corpus_hash([Passage('1', 'a', 'bc')])
    BM25(corpus).save(tmp_path / 'index')
    assert BM25.load(tmp_path / 'index').corpus == BM25(corpus).corpus == corpus_hash(corpus)


def test_a_stale_index_is_refused(corpus, tmp_path):
    folder = tmp_path / 'index'
    BM25(corpus).save(folder)
    assert BM25.load(folder, corpus).search(['odd'], 2) == BM25.load(folder, corpus_hash(corpus)).search(['odd'], 2)
    edited = [*corpus[:3], replace(corpus[3], text='text 3, corrected'), *corpus[4:]]
    for other in (edited, corpus_hash(edited), corpus[::-1], []):
        with pytest.raises(ValueError, match=f'another corpus: 7 passages with hash {corpus_hash(corpus)}'):
            BM25.load(folder, other)
    BM25(edited).save(folder)
    assert BM25.load(folder, edited).passages[3].text == 'text 3, corrected'


# ---- over HTTP ----

FAST = dict(seconds=60, pause=0)


def post(url, value):
    "Status and JSON of a plain request, as any other client would send it."
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, {'Content-Type': 'application/json'}),
                                    timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as e: return e.code, json.loads(e.read())


class Canned(http.server.BaseHTTPRequestHandler):
    """Gives the server's `answers` (status, bytes), one after the other, the last one for ever; None hangs up, a
    number of seconds waits."""
    def do_POST(self):
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers['Content-Length']))))
        answer = self.server.answers[min(len(self.server.asked), len(self.server.answers)) - 1]
        if answer is None: return
        if isinstance(answer, float):
            self.server.wait.wait(30)
            return
        self.send_response(answer[0])
        self.send_header('Content-Length', str(len(answer[1])))
        self.end_headers()
        self.wfile.write(answer[1])

    def log_message(self, *args): pass


@pytest.fixture
def canned():
    "Function (answers) → url and the list of what is asked there."
    servers = []
    def start(*answers):
        server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Canned)
        server.answers, server.asked, server.wait, server.daemon_threads = answers, [], threading.Event(), True
        threading.Thread(target=server.serve_forever, kwargs={'poll_interval': .02}, daemon=True).start()
        servers.append(server)
        return f'http://127.0.0.1:{server.server_address[1]}/retrieve', server.asked
    yield start
    for server in servers:
        server.wait.set()
        server.shutdown()
        server.server_close()


def answer(*rows):
    return 200, json.dumps({'result': rows}).encode()


ENTRY = {'document': {'id': '4', 'contents': '"Orvane"\nA port.\nIt is old.'}, 'score': 1.5}


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.text(max_size=8), st.text(max_size=12)), min_size=1, max_size=6),
    st.lists(QUERY, max_size=4),
    st.integers(1, 9),
)
def test_what_comes_over_http_is_what_the_retriever_said(texts, queries, k):
    class Everything:
        def search(self, queries, k):
            return [[Passage(str(i), *pair, score=k / 7 + len(q)) for i, pair in enumerate(texts)][:k] for q in queries]
    with SearchServer(Everything()) as server:
        assert SearchClient(server.url, **FAST).search(queries, k) == Everything().search(queries, k)


def test_a_served_index_searches_like_the_index(corpus):
    bm25, queries = BM25(corpus), ['odd', 'text 3', 'tïtle', 'zebra', 'odd']
    with SearchServer(bm25) as server:
        client = SearchClient(server.url, **FAST)
        assert isinstance(client, Retriever) and client.search(queries, 3) == bm25.search(
            queries, 3) and client.search([], 3) == []
        assert SearchClient(server.url.removesuffix('/retrieve'), **FAST).search(['odd'], 1) == bm25.search(['odd'], 1)
        assert SearchTool(client, 2, None).run(['odd', 'even']) == SearchTool(bm25, 2, None).run(['odd', 'even'])
        first, again = client.search(['odd', 'odd'], 2)
        first.clear()
        assert again


def test_many_clients_at_once_get_their_own_answers(corpus):
    bm25, out = BM25(corpus), {}
    with SearchServer(bm25) as server:
        def ask(i):
            out[i] = [
                SearchClient(server.url, seconds=60).search([f'text {(i + j) % 7}'], 1)[0][0].id for j in range(5)
            ]
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
        for t in threads: t.start()
        for t in threads: t.join()
    assert out == {i: [bm25.search([f'text {(i + j) % 7}'], 1)[0][0].id for j in range(5)] for i in range(12)}


def test_the_server_speaks_search_r1(corpus):
    with SearchServer(BM25(corpus), k=2) as server:
        status, told = post(server.url, {'queries': ['odd', 'zebra'], 'topk': 1, 'return_scores': True})
        assert status == 200 and list(told) == ['result'] and len(told['result']) == 2 and told['result'][1] == []
        ((entry,), _) = told['result']
        assert set(entry) == {'document', 'score'} and isinstance(entry['score'], float)
        assert entry['document']['id'] == 'id1' and entry['document']['contents'] == ('"Tïtle "q""\ntext 1\nnext line '
                                                                                      '\ud800 odd')
        # no scores: bare documents; no topk: the server's k
        bare = post(server.url, {'queries': ['odd']})[1]['result'][0]
        assert len(bare) == 2 and all('contents' in d for d in bare)


@pytest.mark.parametrize(
    'body, said',
    [
        (b'{', 'JSONDecodeError'),
        (b'[]', 'wanted'),
        ({'queries': 'odd'}, 'list of strings'),
        ({'queries': [1]}, 'list of strings'),
        ({'queries': None}, 'list of strings'),
        ({'queries': ['a'], 'topk': 0}, 'at least 1'),
        ({'queries': ['a'], 'topk': '3'}, 'integer'),
        (b'[' * 100000, 'RecursionError|JSONDecodeError'),
    ],
)
def test_a_senseless_request_is_told_why(corpus, body, said):
    with SearchServer(BM25(corpus)) as server:
        status, value = post(server.url, body)
        assert status == 400 and re.search(said, value['error'])
        assert post(server.url, {'queries': ['odd']})[0] == 200                       # and nobody else suffers
        assert post(server.url + '/else', {'queries': ['odd']})[0] == 404


def test_a_retriever_that_raises_is_the_servers_error_and_is_asked_again():
    class Broken:
        calls = 0
        def search(self, queries, k):
            self.calls += 1
            raise RuntimeError('the index is on fire')
    broken = Broken()
    with SearchServer(broken) as server:
        with pytest.raises(SearchError, match='500.*the index is on fire'):
            SearchClient(server.url, tries=4, **FAST).search(['a'], 1)
        assert broken.calls == 4


def test_passing_failures_are_tried_again_and_refusals_are_not(canned):
    url, asked = canned((503, b'busy'), None, (429, b'slow down'), answer([ENTRY]))
    assert SearchClient(url, tries=4, **FAST).search(['q'], 3) == [[Passage('4', 'Orvane', 'A port.\nIt is old.', 1.5)]]
    assert asked == [{'queries': ['q'], 'topk': 3, 'return_scores': True}] * 4
    url, asked = canned((422, b'what?'))
    with pytest.raises(SearchError, match='422: what[?]'): SearchClient(url, tries=4, **FAST).search(['q'], 3)
    assert len(asked) == 1
    url, asked = canned(None)
    with pytest.raises(SearchError, match='cannot be reached'): SearchClient(url, tries=2, **FAST).search(['q'], 3)
    assert len(asked) == 2


def test_pauses_between_tries_double(canned, monkeypatch):
    from credit_rl import retrieval
    pauses = []
    monkeypatch.setattr(retrieval.time, 'sleep', pauses.append)
    url, _ = canned((503, b''))
    with pytest.raises(SearchError): SearchClient(url, tries=4, pause=.5).search(['q'], 1)
    assert pauses == [.5, 1, 2]


def test_a_server_that_hangs_is_a_timeout(canned):
    url, asked = canned(0.)
    with pytest.raises(TimeoutError, match='within 0.1 s'):
        SearchClient(url, seconds=.1, tries=2, pause=0).search(['q'], 1)
    assert len(asked) == 2
    (_, result), = SearchTool(SearchClient(url, seconds=.1, tries=1), 1, None).call([['q']])
    assert result is Result.TIMEOUT


def test_nobody_there_is_an_error_observation():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        url = f'http://127.0.0.1:{s.getsockname()[1]}'
    with pytest.raises(SearchError, match='is the server running'): SearchClient(url, tries=1).search(['q'], 1)
    (text, result), = SearchTool(SearchClient(url, tries=1), 1, None).call([['q']])
    assert result is Result.ERROR and text.startswith('Error: SearchError') and 'is the server running' in text


@pytest.mark.parametrize(
    'body',
    [
        b'<html>',
        b'[]',
        b'{}',
        b'{"result": 3}',
        b'{"result": []}',
        b'{"result": [[], []]}',
        b'{"result": [3]}',
        b'{"result": [["x"]]}',
        b'{"result": [[{"document": {"id": "1"}}]]}',
        b'{"result": [[{"document": {"contents": "a"}}]]}',
        b'{"result": [[{"document": {"id": "1", "contents": "a"}, "score": "high"}]]}',
    ],
)
def test_another_answer_is_refused_with_a_piece_of_it(canned, body):
    url, asked = canned((200, body))
    with pytest.raises(SearchError, match=f'(?s)something else.*{re.escape(body[:20].decode())}'):
        SearchClient(url, tries=3, **FAST).search(['q'], 1)
    assert len(asked) == 1


def test_more_than_k_is_cut_and_documents_may_come_without_scores(canned):
    bare = [{'id': i, 'contents': f'only text {i}'} for i in range(5)]
    url, asked = canned(answer(bare))
    assert SearchClient(url, **FAST).search(['q'],
                                            2) == [[Passage('0', '', 'only text 0'),
                                                    Passage('1', '', 'only text 1')]]
    url, _ = canned(
        answer([{'document': {'id': 3, 'title': 'T', 'text': 'x', 'contents': '"other"\ny'}, 'score': '2'}]))
    assert SearchClient(url, **FAST).search(['q'], 2) == [[Passage('3', 'T', 'x', 2.0)]]


def test_long_lists_go_in_several_requests_and_equal_queries_once(canned):
    url, asked = canned(answer([ENTRY], [ENTRY]))
    assert len(SearchClient(url, batch=2, **FAST).search(['a', 'b', 'a', 'c', 'd'], 1)) == 5
    assert [a['queries'] for a in asked] == [['a', 'b'], ['c', 'd']]


def test_the_http_door(corpus):
    for url in ('localhost:8000', '', None, 'ftp://x'):
        with pytest.raises(ValueError, match='url'): SearchClient(url)
    for bad in (dict(seconds=0), dict(tries=0), dict(pause=-1), dict(batch=0)):
        with pytest.raises(ValueError, match=next(iter(bad))): SearchClient('http://localhost', **bad)
    with pytest.raises(TypeError, match='search'): SearchServer(corpus)
    with pytest.raises(TypeError, match='list of strings'): SearchClient('http://localhost').search('q', 1)
    with SearchServer(BM25(corpus)) as server:
        with pytest.raises(OSError): SearchServer(BM25(corpus), port=server.server_address[1])


def test_a_proxy_of_the_environment_is_not_asked(corpus, monkeypatch):
    for name in ('http_proxy', 'HTTP_PROXY'): monkeypatch.setenv(name, 'http://127.0.0.1:9')
    monkeypatch.delenv('no_proxy', raising=False)
    with SearchServer(BM25(corpus)) as server: assert SearchClient(server.url, tries=1).search(['odd'], 1)[0]


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


@pytest.mark.skipif(not DATA, reason='CREDIT_RL_DATA is not set')
def test_real_questions_find_a_supporting_passage():
    folder = Path(DATA) / 'hotpotqa'
    questions, corpus = load_questions('hotpotqa', folder, 'dev'), load_corpus('hotpotqa', folder)
    found = BM25(corpus).search([q.text for q in questions], 10)
    hits = [{p.title for p in f} & {t for t, _ in q.meta['supporting_facts']} for q, f in zip(questions, found)]
    assert sum(map(bool, hits)) > 0.8 * len(questions)
