"BM25 against its written-out formula, bm25s and rank_bm25; ties, doors, saving all or nothing; building in shards."
import json
import os
import tempfile
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from credit_rl.readers import Passage
from credit_rl.retrieval import (BM25, PassageFile, RankBM25, bm25_reference, build_index, corpus_hash, document,
                                 read_index, words)

WORD = st.sampled_from('abcdefgh')
QUERY = st.lists(st.sampled_from('abcdefghxy'), max_size=6).map(' '.join)
VARIANTS = ['lucene', 'robertson', 'atire']


@st.composite
def corpora(draw):
    texts = draw(st.lists(st.lists(WORD, max_size=10).map(' '.join), min_size=1, max_size=14))
    if not any(texts): texts[0] = 'a'
    return [Passage(str(i), draw(st.sampled_from(['', 'a', 'B b'])), t) for i, t in enumerate(texts)]


PARAMETERS = st.tuples(st.sampled_from([0.9, 1.5, 0.1]), st.sampled_from([0.4, 0.75, 0.0, 1.0]))


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


def test_chunks_of_queries_do_not_change_the_result():
    rng = np.random.default_rng(0)
    corpus = [Passage(str(i), '', ' '.join(rng.choice(list('abcdefghij'), 5))) for i in range(3000)]
    queries = [' '.join(rng.choice(list('abcdefghij'), 2)) for _ in range(90)] + ['a b'] * 400
    bm25 = BM25(corpus)
    assert 2 ** 20 // len(corpus) < len(queries)
    alone = {q: bm25.search([q], 3)[0] for q in set(queries)}
    assert bm25.search(queries, 3) == [alone[q] for q in queries]


def test_the_doors():
    corpus = [Passage('0', '', 'a b'), Passage('1', '', '?!')]
    for kind in (BM25, RankBM25):
        retriever = kind(corpus)
        for call, error, said in (
                (lambda: kind([]), ValueError, 'empty'), (lambda: kind(corpus[1:]), ValueError, 'word'),
                (lambda: kind(['a b']), TypeError, 'Passage'), (lambda: retriever.search('a', 3), TypeError, 'strings'),
                (lambda: retriever.search([3], 3), TypeError, 'strings'),
                (lambda: retriever.search(['a'], 0), ValueError, 'least')):
            with pytest.raises(error, match=said): call()
        assert retriever.search([], 3) == [] and retriever.search(['', '!', 'zebra'], 3) == [[], [], []]
    with pytest.raises(ValueError, match='variant'): BM25(corpus, variant='bm25+')
    for k1, b in ((-1, 0.4), (0.9, -0.1), (0.9, 1.1)):
        with pytest.raises(ValueError, match='k1'): BM25(corpus, k1, b)


@pytest.fixture
def corpus():
    text = lambda i: f'text {i}\nnext line \ud800 {"odd" if i % 2 else "even"}'
    return [Passage(f'id{i}', 'Tïtle "q"', text(i)) for i in range(7)]


def test_a_memory_mapped_index_is_saved_to_another_folder(corpus, tmp_path):
    bm25, queries = BM25(corpus, 1.2, 0.3, 'robertson'), ['odd', 'text 3', 'tïtle', 'zebra']
    bm25.save(tmp_path / 'deep' / 'index')
    again = BM25.load(tmp_path / 'deep' / 'index')
    assert isinstance(again.passages, PassageFile) and again.passages[1:3] == corpus[1:3]
    assert isinstance(again.index.scores['data'], np.memmap)
    again.save(tmp_path / 'copy')
    assert BM25.load(tmp_path / 'copy').search(queries, 3) == again.search(queries, 3) == bm25.search(queries, 3)
    with pytest.raises(IndexError): again.passages[7]
    for other in (corpus_hash(corpus[1:]), corpus[::-1], []):
        with pytest.raises(ValueError, match=f'another corpus: 7 passages with hash {corpus_hash(corpus)}'):
            BM25.load(tmp_path / 'copy', other)


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


def test_an_index_behind_a_link_is_written_through(corpus, tmp_path):
    (tmp_path / 'disk').mkdir()
    (tmp_path / 'index').symlink_to(tmp_path / 'disk')
    for _ in range(3):
        BM25(corpus).save(tmp_path / 'index')
        assert (tmp_path / 'index').is_symlink() and (tmp_path / 'disk' / 'index.json').is_file()
    assert sorted(os.listdir(tmp_path)) == ['disk', 'index']


def test_a_damaged_index_is_refused(corpus, tmp_path):
    with pytest.raises(FileNotFoundError, match='saved'): BM25.load(tmp_path)
    (tmp_path / 'mine.txt').write_text('notes')
    for place in (tmp_path, tmp_path / 'mine.txt'):
        with pytest.raises(FileExistsError, match='saved'): BM25(corpus).save(place)
    folder = tmp_path / 'index'
    BM25(corpus).save(folder)
    text, about = (folder / 'passages.jsonl').read_bytes(), json.loads((folder / 'index.json').read_text())
    (folder / 'passages.jsonl').write_bytes(text[:-5])
    with pytest.raises(ValueError, match='cut off'): BM25.load(folder)
    (folder / 'passages.jsonl').write_bytes(text)
    for change, said in (({'passages': 8}, 'damaged'), ({'format': 1}, 'format')):
        (folder / 'index.json').write_text(json.dumps({**about, **change}))
        with pytest.raises(ValueError, match=said): BM25.load(folder)


@settings(max_examples=20)
@given(corpora(), PARAMETERS, st.sampled_from(VARIANTS), st.integers(1, 6), st.integers(1, 9))
def test_shards_and_blocks_of_any_size_give_the_index_of_all_at_once(corpus, parameters, variant, shard, most):
    k1, b = parameters
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder) / 'whole', Path(folder) / 'parts'
        BM25(corpus, k1, b, variant).save(whole)
        assert build_index(iter(corpus), parts, k1, b, variant, shard, most) == len(corpus)
        for array in ('data.csc.index.npy', 'indices.csc.index.npy', 'indptr.csc.index.npy', 'passages.start.npy'):
            assert np.array_equal(np.load(whole / array), np.load(parts / array)), array
        assert {p.name for p in whole.iterdir()} == {p.name for p in parts.iterdir()}
        for name in ('vocab.index.json', 'params.index.json', 'index.json'):
            assert json.loads((whole / name).read_text()) == json.loads((parts / name).read_text()), name
        assert (whole / 'passages.jsonl').read_bytes() == (parts / 'passages.jsonl').read_bytes()


def test_a_few_passages_at_a_time_are_held(tmp_path):
    alive, most = weakref.WeakSet(), []
    def stream():
        for i in range(2000):
            alive.add(p := Passage(str(i), '', f'word{i % 50} common {i}'))
            most.append(len(alive))
            yield p
    assert build_index(stream(), tmp_path / 'index', shard=300, most=500) == 2000
    assert max(most) < 10
    assert [p.id for p in BM25.load(tmp_path / 'index').search(['word7 1207'], 1)[0]] == ['1207']


def test_what_cannot_be_built_in_shards_leaves_nothing(tmp_path):
    good, folder = [Passage('0', '', 'a b'), Passage('1', '', 'c')], tmp_path / 'index'
    def breaking():
        yield good[0]
        raise OSError('the disk is gone')
    for passages, error, said in (([], ValueError, 'empty'), ([Passage('0', '', '?!')], ValueError, 'has a word'),
                                  (['a b'], TypeError, 'made of Passage'), (breaking(), OSError, 'disk is gone'),
                                  (good + good[:1], ValueError, "the id '0' of passage 3 stands twice")):
        with pytest.raises(error, match=said): build_index(passages, folder)
        assert not list(tmp_path.iterdir())
    for bad in (dict(variant='bm25+'), dict(k1=-1), dict(b=2), dict(shard=0), dict(most=0)):
        with pytest.raises(ValueError): build_index(good, folder, **bad)
    build_index(good, folder)
    with pytest.raises(OSError): build_index(breaking(), folder)              # and an older index stays
    assert BM25.load(folder, good).search(['c'], 1)[0][0].id == '1'
    assert read_index(folder)['passages'] == 2


@pytest.mark.parametrize('already', [False, True])
def test_jax_is_not_started(tmp_path, run_python, already):
    """bm25s starts JAX where that is installed, and JAX takes three quarters of a GPU: it is not imported on the way,
    and who has imported it keeps it."""
    (tmp_path / 'jax').mkdir()
    (tmp_path / 'jax' / '__init__.py').write_text('')
    (tmp_path / 'jax' / 'lax.py').write_text("raise SystemExit('JAX was started')\n")
    said = run_python('-c', 'import sys\n' + 'import jax\n' * already + '''
from credit_rl.readers import Passage
from credit_rl.retrieval import BM25
found = BM25([Passage('1', 'Paris', 'a city')]).search(['city'], 1)[0]
print(found[0].id, 'jax' in sys.modules, 'jax.lax' in sys.modules)
''', env={'PYTHONPATH': f'{tmp_path}{os.pathsep}{os.getcwd()}'})
    assert said.split() == ['1', str(already), 'False']
