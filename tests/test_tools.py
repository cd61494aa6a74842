"The search tool: texts, cuts, isolation of failures, time limits."
import threading
import time

import pytest
from hypothesis import given, strategies as st

from credit_rl.datasets import Passage
from credit_rl.retrieval import BM25
from credit_rl.tools import SearchTool, count_words, cut, render_documents, render_plain, within
from credit_rl.trajectory import Result

CORPUS = [Passage(str(i), f'Title {i}', text) for i, text in enumerate(['red fox runs', 'grey fox sleeps', 'grey wolf'])]
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
    assert tool.run(['red', 'zebra']) == 'Query: red\nDoc 1 (Title: "Title 0") red fox runs\n\nQuery: zebra\nNo results.'
    assert tool.run(('red',)) == tool.run(['red'])


def test_plain_texts_and_another_word_for_nothing():
    tool = SearchTool(BM, 2, None, render=render_plain, empty='nothing')
    assert tool.run(['grey wolf']) == 'grey wolf grey fox sleeps'
    assert tool.run(['wolf', 'zebra']) == 'grey wolf nothing'
    assert render_plain([], 'x') == '' and render_documents([('q', [])], 'x') == 'x'


@given(st.text(alphabet='ab \n\t', max_size=60), st.integers(1, 12), st.sampled_from([count_words, len]))
def test_a_cut_is_the_longest_beginning_of_whole_words_that_fits(text, limit, count):
    out = cut(text, limit, count)
    if count(text) <= limit:
        assert out == text
        return
    assert count(out) <= limit and text.startswith(out)
    assert out == '' or (not out[-1].isspace() and (len(out) == len(text) or text[len(out)].isspace()))
    rest = text[len(out):].split()
    if rest: assert count(text[:text.index(rest[0], len(out)) + len(rest[0])]) > limit


def test_the_cut_is_per_passage_and_leaves_titles():
    tool = SearchTool(BM, 3, 2)
    assert tool.run(['fox']) == 'Doc 1 (Title: "Title 0") red fox\nDoc 2 (Title: "Title 1") grey fox'
    assert SearchTool(BM, 1, 8, count_tokens=len).run(['red']) == 'Doc 1 (Title: "Title 0") red fox'


@pytest.mark.parametrize('bad, said', [('red', 'list of strings'), (None, 'list of strings'), ({'q': 1}, 'list of strings'), ([], 'no query'),
                                       ([''], 'non-empty'), (['red', 3], 'non-empty'), ([' '], 'non-empty')])
def test_a_malformed_call_is_told_and_does_not_reach_the_retriever(bad, said):
    stub = Stub()
    (text, result), (good, ok) = SearchTool(stub, 1, 9).call([bad, ['red']])
    assert text.startswith('Error: ') and said in text and result is Result.MALFORMED
    assert ok is Result.OK and 'red fox' in good and stub.searches == [['red']]
    assert SearchTool(stub, 1, 9).run(bad) == text
    assert SearchTool(Stub(), 1, 9).call([bad]) == [(text, result)]


def test_a_batch_is_one_search_and_equals_single_calls():
    stub, calls = Stub(), [['red'], ['grey', 'wolf'], ['zebra'], ['red']]
    tool = SearchTool(stub, 2, 9)
    texts = tool.run_batch(calls)
    assert stub.searches == [['red', 'grey', 'wolf', 'zebra', 'red']]
    assert texts == [tool.run(c) for c in calls]
    assert {r for _, r in tool.call(calls)} == {Result.OK}
    assert tool.call([]) == [] and tool.run_batch([]) == []


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
    tool = SearchTool(stub, 1, 9, seconds=0.05)
    assert [r for _, r in tool.call([['red'], ['hang']])] == [Result.TIMEOUT] * 2
    assert tool.run(['hang']).startswith('Error: ') and len(stub.searches) == 2      # not asked again one by one
    stub.release.set()
    calls = SearchTool(stub, 1, 9, seconds=600).call([['red'], ['hang']])
    assert calls == SearchTool(BM, 1, 9).call([['red'], ['hang']])


def test_a_failing_batch_and_its_single_calls_share_one_time_limit():
    stub = Stub()
    out = SearchTool(stub, 1, 9, seconds=0.2).call([['red'], ['broken'], ['hang'], ['wolf']])
    stub.release.set()
    assert [r for _, r in out] == [Result.OK, Result.ERROR, Result.TIMEOUT, Result.TIMEOUT]


def test_within():
    assert within(lambda: 1, None) == within(lambda: 1, time.monotonic() + 600) == 1
    with pytest.raises(KeyError): within(lambda: {}['x'], time.monotonic() + 600)
    with pytest.raises(TimeoutError): within(lambda: 1, time.monotonic() - 1)
    with pytest.raises(KeyError): within(lambda: {}['x'], None)


@pytest.mark.parametrize('arguments', [dict(k=0), dict(k=None), dict(k=-1), dict(max_tokens=0), dict(max_tokens='9'), dict(seconds=0),
                                       dict(seconds=-1)])
def test_the_door(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))): SearchTool(BM, **{'k': 1, 'max_tokens': 9, **arguments})
    with pytest.raises(TypeError, match='search'): SearchTool(CORPUS, 1, 9)
