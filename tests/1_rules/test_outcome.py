"""30_outcome: answers found in texts, what an outcome is, and penalties."""
import dataclasses

import pytest
from hypothesis import given, strategies as st

from credit_rl.groups import index_groups
from credit_rl.outcome import broke_format, extract_answer, outcome_rewards
from credit_rl.trajectory import Group, Result, Stop, Trajectory, Turn, example_group


nested = st.recursive(st.text('ab 1\\', max_size=3).map(lambda s: s.replace('\\', '\\\\')),
                      lambda inner: st.lists(inner, max_size=3).map(lambda parts: '{' + ''.join(parts) + '}'),
                      max_leaves=6)


@given(nested, st.text('xy{ ', max_size=5))
def test_balanced_boxes_come_back_whole(content, before):
    assert extract_answer(before + r'\boxed{' + content + '} and so on', 'boxed') == content.strip()


def test_outcomes_and_penalties():
    g = example_group()
    first = g.trajectories[0]
    thought, group_of = first.turns, lambda *turns: Group(g.question, [dataclasses.replace(first, turns=turns)])
    mute = Trajectory(g.question, first.prompt_ids, thought[:1], Stop.TURN_CAP)
    bad = Turn('tool', [1], [-0.1], [2], 'search(', '', result=Result.MALFORMED)
    clumsy = Trajectory(g.question, [0], [bad, thought[-1]], Stop.ANSWER, 'Budapest')
    group = Group(g.question, [*g.trajectories, mute, clumsy])
    assert outcome_rewards([group], 'f1', penalty=-2.0).tolist() == [1, 0, 0, -2, -2] and broke_format(clumsy)
    assert outcome_rewards([group], lambda p, golds: len(p) / 2).tolist() == [4, 3, 2.5, 0, 4]
    for lost in ('<think>', '</think>'):                                       # IGPO eq. 2: missing tags
        hasty = group_of(dataclasses.replace(thought[0], action_text=thought[0].action_text.replace(lost, '')), *thought[1:])
        assert outcome_rewards([hasty], 'f1', -2.0, 'think').tolist() == [-2]
        opened = outcome_rewards([hasty], 'f1', -2.0, 'think', '<think>')      # by the generation prefix, perhaps
        assert opened.tolist() == [1 if lost == '<think>' else -2]
    noted = dataclasses.replace(thought[1], kind='assimilate', action_text='<context> born in Budapest </context>')
    assert not broke_format(group_of(thought[0], noted, *thought[2:]).trajectories[0], 'think')
    mask, groups = index_groups([group, g])
    assert mask.sum(1).tolist() == [4, 4, 4, 1, 2, 4, 4, 4] and groups.tolist() == [0] * 5 + [1] * 3
    for wrong in (('em ',), ('f1', 1.0)):
        with pytest.raises(ValueError, match='metric|penalty'): outcome_rewards([group], *wrong)
