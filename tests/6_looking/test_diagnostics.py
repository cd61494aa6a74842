"What went wrong, by rule, for every protocol; the same agent with another search."
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from credit_rl.diagnostics import (ERRORS, error_category, error_table, retrieval_ablation, search_in,
                                   supporting_passages)
from credit_rl.engine import ScriptedEngine
from credit_rl.environment import NoSearch
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.readers import Passage
from credit_rl.retrieval import BM25
from credit_rl.rollout import Environment
from credit_rl.tiny import PERFECT, act, tiny_environment, tiny_tokenizer
from credit_rl.tools import PythonTool, SearchTool
from credit_rl.trajectory import Question, Result, Stop, Trajectory, Turn
from credit_rl.world import make_world

CALL = {'name': 'search', 'queries': ['q']}


def turn(kind, text, seen='', call=None, result=Result.OK):
    return Turn(kind, (1,), (-.1,), (2,) if seen else (), text, seen, call, result)


def played(*turns, answer=None, golds=('Orvane',), hops=None):
    meta = {} if hops is None else {'hops': hops}
    stop = Stop.TURN_CAP if answer is None else Stop.ANSWER
    return Trajectory(Question('q', 'Where?', golds, '', meta), (1,), turns, stop, answer)


FOUND, MISSED = turn('tool', 'a call', 'the port of Orvane .', CALL), turn('tool', 'a call', 'rain .', CALL)
END = turn('answer', 'so', result=Result.NONE)
BROKEN = turn('tool', 'neither', 'Error', result=Result.MALFORMED)


@pytest.mark.parametrize('name', ['tiny', 'tspo', 'tips', 'igpo', 'prs', 'search-r1'])
@pytest.mark.parametrize('trajectory, category', [
    (played(FOUND, END, answer='Orvane'), None),
    (played(END, answer='the orvane'), None),
    (played(FOUND, END, answer='Kell'), 'misread'),
    (played(MISSED, FOUND, MISSED, END, answer='Kell'), 'misread'),
    (played(MISSED, END, answer='Kell'), 'not found'),
    (played(END, answer='Kell'), 'no search'),
    (played(FOUND, MISSED), 'no answer'),
    (played(FOUND, BROKEN), 'malformed'),
    (played(BROKEN, MISSED, END, answer='Kell'), 'not found'),        # it went on and answered: that is not what failed
    (played(FOUND, END, answer='no', golds=('yes',)), 'undecided'),
    (played(turn('tool', 'a call', 'the Orvaneans .', CALL), END, answer='Kell'), 'not found'),      # whole words
])
def test_a_wrong_rollout_has_one_category_by_any_protocol(name, trajectory, category):
    assert error_category(trajectory, PROTOCOLS[name]) == category


def note(text): return turn('assimilate', f'so <context>{text}</context>', result=Result.NONE)


@pytest.mark.parametrize('name', ['carl', 'carl-tiny'])
def test_notes_that_drop_the_gold_are_told_from_answers_that_do(name):
    protocol, invoke = PROTOCOLS[name], turn('invoke', '```', 'the port of Orvane .', {'name': 'python', 'code': 'x'})
    commit = turn('commit', 'so', result=Result.NONE)
    kept, lost = note('born in Orvane'), note('a port')
    assert error_category(played(invoke, lost, commit, answer='Kell'), protocol) == 'lost in a note'
    assert error_category(played(invoke, kept, commit, answer='Kell'), protocol) == 'misread'
    assert error_category(played(invoke, lost, invoke, kept, commit, answer='Kell'), protocol) == 'misread'
    outside = turn('assimilate', 'Orvane <context>a port</context>', result=Result.NONE)     # what is kept is the note
    assert error_category(played(invoke, outside, commit, answer='Kell'), protocol) == 'lost in a note'
    assert error_category(played(invoke, lost, commit, answer='Orvane'), protocol) is None


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([None, 2, 3])), max_size=12))
def test_the_table_counts_every_wrong_rollout_once(chosen):
    kinds = [lambda h: played(FOUND, END, answer='Orvane', hops=h), lambda h: played(FOUND, END, answer='Kell', hops=h),
             lambda h: played(MISSED, END, answer='Kell', hops=h), lambda h: played(BROKEN, hops=h),
             lambda h: played(END, answer='Kell', hops=h)]
    table = error_table([kinds[i](h) for i, h in chosen], PROTOCOLS['tspo'])
    wrong = [(i, h) for i, h in chosen if i]
    assert list(table.index) == list(ERRORS) and table['all'].sum() == len(wrong)
    for error, i in (('misread', 1), ('not found', 2), ('malformed', 3), ('no search', 4)):
        assert table['all'][error] == sum(j == i for j, _ in wrong)
    for h in (2, 3):
        if any(x == h for _, x in wrong): assert table[f'{h} hops'].sum() == sum(x == h for _, x in wrong)
        else: assert f'{h} hops' not in table


def test_the_same_agent_with_other_searches():
    """Perfect play finds its page among all pages and among the supporting ones; where only the second page of three is
    its own, one passage a query is too few and three are enough."""
    chat, world = Chat(PROTOCOLS['tiny'], tiny_tokenizer()), make_world('dev', questions=30, mirrors=0.)
    env = tiny_environment(world, chat)
    inner = env.tool.retriever
    asked = []
    class Late:
        def search(self, queries, k):
            asked.append(k)
            return [(found[1:] + found[:1])[:k] if len(found) > 1 else found
                    for found in inner.search(queries, 2)]
    engine = ScriptedEngine(lambda text, rng: act(text, rng, PERFECT), chat.tokenizer)
    table = retrieval_ablation(engine, env, world.questions, {'all': inner, 'late': Late()}, ks=(1, 2))
    assert list(table.index) == [('all', 1), ('all', 2), ('late', 1), ('late', 2)]
    assert table.right['all', 1] == table['saw a gold']['all', 1] == 1 and set(asked) == {1, 2}
    assert table['saw a gold']['late', 1] < table['saw a gold']['late', 2] == 1
    assert env.tool.retriever is inner                                       # the agent's own search stays what it was


def test_oracle_passages_are_the_supporting_pages():
    passages = [Passage('0', 'Orvane', 'a'), Passage('1', 'Kell', 'b'), Passage('2', 'Orvane', 'c')]
    asked = [Question('q', '?', ('x',), '', {'supporting_facts': [['Orvane', 0], ['Tavistead', None]]})]
    assert [p.id for p in supporting_passages(asked, passages)] == ['0', '2']
    with pytest.raises(ValueError, match="questions'"): supporting_passages(asked, passages[1:2])


def test_search_inside_programs_is_replaced_and_nothing_else():
    chat = Chat(PROTOCOLS['carl-tiny'], tiny_tokenizer(numbers=True))
    first, second = (BM25([Passage('0', t, t)]) for t in ('one', 'two'))
    search = SearchTool(first, 3, 7, seconds=2, empty='none')
    env = Environment(chat, PythonTool(search, seconds=1.5, output_chars=99))
    other = search_in(env, second, 5)
    assert (other.tool.seconds, other.tool.output_chars) == (1.5, 99) and env.tool.search is search
    new = other.tool.search
    assert (new.retriever, new.k, new.max_tokens, new.seconds, new.empty) == (second, 5, 7, 2, 'none')
    direct = Environment(Chat(PROTOCOLS['tiny'], tiny_tokenizer()), NoSearch())
    for without in (replace(env, tool=PythonTool()), direct):
        with pytest.raises(TypeError, match='searched'): search_in(without, second, 5)
