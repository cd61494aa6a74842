"""78_profile: what a run's folder says of its seconds and tokens."""
import pytest

from credit_rl.layout import pack
from credit_rl.profile import KINDS, kept_tokens, layout_tokens, line_seconds
from credit_rl.runlog import RunLog
from credit_rl.trajectory import Group, Question, Stop, Trajectory, Turn, to_json

QUESTION = Question('q', 'Who?', ('one',))


def played(*turns): return Trajectory(QUESTION, (1, 2, 3), list(turns), Stop.ANSWER)


def turn(ids, seen=(), kind='plain', context=None):
    return Turn(kind, ids, [-1.] * len(ids), seen, '', '', context_ids=context)


def segments():
    "Rows 1 2 3 | 4 5, then 1 2 3 4 5 9 9 9 | 6, then 1 2 3 4 5 6 | 7: 5, 9 and 7 tokens; 5 + 4 + 2 nodes."
    return played(turn((4, 5), (9, 9, 9), 'invoke'), turn((6,), (), 'assimilate', (1, 2, 3, 4, 5, 9, 9, 9)),
                  turn((7,), (), 'commit', (1, 2, 3, 4, 5, 6)))


def test_tokens_are_counted_by_kind():
    found = layout_tokens(pack([Group(QUESTION, [segments()])], tree=True))
    assert found == {'prompt': 3 + 8 + 6, 'sampled': 4, 'observed': 0, 'padded': 4 + 0 + 2, 'shared': 21 - 11}
    plain = played(turn((4, 5), (8, 8)), turn((6,)))
    found = layout_tokens(pack([Group(QUESTION, [plain, played(turn((4, 7)))])], tree=True))
    assert found == {'prompt': 6, 'sampled': 5, 'observed': 2, 'padded': 3, 'shared': 4}


def test_each_steps_rollouts_are_a_batch_of_their_own(tmp_path):
    log = RunLog(tmp_path / 'run')
    for step in (1, 2): log.turns(step, [{'kind': 'train', 'trajectory': to_json(segments())}])
    log.turns(2, [{'kind': 'after', 'trajectory': to_json(segments())}])             # a test question
    once = layout_tokens(pack([Group(QUESTION, [segments()])], tree=True))
    assert kept_tokens(log.folder) == ({name: 2 * once[name] for name in KINDS}, 2)
    with pytest.raises(ValueError, match='metrics'): line_seconds(log.folder)
