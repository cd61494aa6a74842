"What went wrong, by rule, for every protocol."
import pytest

from credit_rl.diagnostics import error_category
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
