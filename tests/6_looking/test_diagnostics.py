"What went wrong, by rule, for every protocol."
import pytest
from hypothesis import given, settings, strategies as st

from credit_rl.diagnostics import ERRORS, error_category, error_table
from credit_rl.protocol import PROTOCOLS
from credit_rl.trajectory import Question, Result, Stop, Trajectory, Turn

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
