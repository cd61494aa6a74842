"SimpleTIR's filter: which turns are void, by every stop and result; what leaves the loss, inside a whole method."
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from credit_rl.adapters import Arrays, assign_arrays
from credit_rl.methods import compose
from credit_rl.parts import assign
from credit_rl.trajectory import Group, Result, Stop, example_group
from credit_rl.void_turns import void_rollouts, void_turns

GROUP = example_group()
RIGHT, NEAR, LOST = GROUP.trajectories


def credit(name, group):
    batch = assign(compose(name).bind(), [group], lambda layout, asks: None)
    return batch, batch.credit.advantages


def without_answer(t, stop=Stop.LENGTH):
    return replace(t, stop=stop, answer=None, turns=(*t.turns[:-1], replace(t.turns[-1], result=Result.MALFORMED)))


@pytest.mark.parametrize('stop, kind, call, void', [
    (Stop.ANSWER, 'answer', None, False), (Stop.ANSWER, 'commit', None, False),
    (Stop.LENGTH, 'tool', None, True), (Stop.NO_ANSWER, 'answer', None, True), (Stop.TURN_CAP, 'commit', None, True),
    (Stop.TURN_CAP, 'tool', {'name': 'search', 'queries': ['a']}, False),       # called, and had no turn left
    (Stop.LENGTH, 'invoke', {'name': 'python', 'code': '1'}, False), (Stop.LENGTH, 'assimilate', None, False)])
def test_a_last_turn_is_void_without_call_and_answer(stop, kind, call, void):
    last = replace(RIGHT.turns[-1], kind=kind, call=call)
    assert void_turns(replace(RIGHT, turns=(*RIGHT.turns[:-1], last), stop=stop)) == [False] * 3 + [void]


@pytest.mark.parametrize('result', list(Result))
def test_a_call_that_was_read_is_not_void_whatever_came_of_it(result):
    turns = [replace(turn, result=result) for turn in RIGHT.turns]
    assert void_turns(replace(RIGHT, turns=turns)) == [False] * 4


def test_the_whole_rollout_leaves_and_the_others_keep_their_advantage():
    group = Group(GROUP.question, [RIGHT, without_answer(NEAR), LOST])
    batch, found = credit('outcome/group/no-void', group)
    plain = credit('outcome/group', group)[1]
    rows = batch.layout.row_trajectory
    assert not found[rows == 1].any() and plain[rows == 1].any()
    assert_close(found[rows != 1], plain[rows != 1])
    assert compose('outcome/group/no-void').bind().metrics(batch)['void_rollouts'] == pytest.approx(1 / 3)


def test_a_trainers_arrays_have_no_text_and_are_refused():
    arrays = Arrays(torch.tensor([[1, 0, 1], [1, 0, 1]]), ['q', 'q'], [1., 0.])
    with pytest.raises(ValueError, match='looks'): assign_arrays('outcome/group/no-void', arrays)
    with pytest.raises(ValueError, match='pull up'): compose('outcome/group/no-void/llds')


def test_of_several_groups_each_rollout_has_its_own_mark():
    groups = [GROUP, Group(GROUP.question, [without_answer(LOST), RIGHT])]
    assert void_rollouts(groups).tolist() == [False, False, False, True, False]
