"""56_table_critic: the table in place of CARL's critic, against sums made one by one."""
import json
import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from credit_rl.engine import ScriptedEngine
from credit_rl.outcome import outcome_rewards
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.rollout import rollout
from credit_rl.table_critic import PARTS, SITUATIONS, situations, table_values, tally
from credit_rl.tiny import CODE_KNOWER, act_coder, memory_of, tiny_environment, tiny_tokenizer
from credit_rl.trajectory import Result, example_group
from credit_rl.world import world_of


@pytest.fixture(scope='module')
def games():
    tokenizer = tiny_tokenizer(numbers=True)
    world = world_of({'hops': (1, 2), 'twins': True, 'nothing': .2, 'sibling': .1, 'lost': .2}, 'train', 11, 60)
    engine = ScriptedEngine(lambda text, rng: act_coder(text, rng, CODE_KNOWER, memory_of(world)), tokenizer)
    return rollout(engine, tiny_environment(world, Chat(PROTOCOLS['carl-tiny'], tokenizer)), world.questions, 3, seed=2)


rollouts = st.lists(st.tuples(st.lists(st.integers(0, SITUATIONS - 1), min_size=1, max_size=4),
                              st.sampled_from([0., 1., math.nan])), min_size=1, max_size=12)


@given(rollouts, rollouts)
def test_a_situation_is_worth_the_mean_of_the_rollouts_that_were_in_it(now, before):
    earned, wide = defaultdict(list), lambda rows: torch.tensor([[*r, *[-1] * (4 - len(r))] for r, _ in rows])
    for row, outcome in now + before:
        for s in row: earned[s] += [outcome] * (not math.isnan(outcome))
    counts = sum(tally(wide(rows), torch.tensor([r for _, r in rows])) for rows in (now, before))
    found = table_values(wide(now), counts)
    for row, values in zip([r for r, _ in now], found.tolist()):
        assert all(math.isnan(v) for v in values[len(row):])
        for s, v in zip(row, values):
            assert math.isnan(v) if not earned[s] else abs(v - sum(earned[s]) / len(earned[s])) < 1e-6


def test_what_is_known_and_what_was_seen_are_read_off_the_games(games):
    found = situations(games)
    for row, t in zip(found.tolist(), (t for g in games for t in g.trajectories)):
        assert row[0] == 8 * (6 * t.question.meta['parametric'] + t.question.meta['hops'])
        assert [s % 2 for s in row[:len(t.turns)]] == [turn.kind == 'assimilate' for turn in t.turns]
        gold, = t.question.answers
        noted = [any(gold in turn.action_text and turn.result is not Result.LOST for turn in t.turns[:k])
                 for k in range(len(t.turns))]
        assert [s // 2 % 2 for s in row[:len(t.turns)]] == noted
        pages = [s // 8 % 6 for s in row[:len(t.turns)]]
        assert pages == sorted(pages, reverse=True)
    assert len(set(found.flatten().tolist())) > 12


def test_other_questions_are_refused():
    with pytest.raises(ValueError, match='world'): situations([example_group()])
    group = example_group()
    half = replace(group.question, meta={'parametric': True})
    played = [replace(t, question=half) for t in group.trajectories]
    with pytest.raises(ValueError, match='chain'): situations([replace(group, question=half, trajectories=played)])


def test_the_table_that_a_resumed_run_reads_is_the_one_that_was_kept(games):
    keeps, found = PARTS[0].keeps, situations(games)
    own = {'right': 'em', **{name: option.default for name, option in PARTS[0].options.items()}}
    earned = {'situations': found, 'tallied': outcome_rewards(games)}
    table = keeps.move(own, keeps.begin(own), earned, None)
    assert json.loads(json.dumps(table)) == table and len(table[1]) == SITUATIONS and sum(table[1]) > 16
