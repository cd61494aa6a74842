"""Values by continuation, exact values, the solver's, and the rows that train on them."""

import dataclasses
import math

import pytest
import torch
from torch.testing import assert_close

from credit_rl.engine import HFEngine, ScriptedEngine
from credit_rl.groups import index_groups
from credit_rl.layout import pack
from credit_rl.methods import METHODS, compose
from credit_rl.metrics import exact_match
from credit_rl.outcome import outcome_rewards
from credit_rl.parts import Measured, assign
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.rollout import continuations, add_message, rollout
from credit_rl.settings import make_config
from credit_rl.tiny import PERFECT_CODER, Player, act, act_coder, player_state, tiny_environment, tiny_tokenizer
from credit_rl.train import train
from credit_rl.runlog import read_metrics
from credit_rl.true_credit import (continuation_values, distinct_states, exact_values, next_texts, note_values,
                                   solver_rates, solver_values, turn_credit)
from credit_rl.world import make_world, world_of

WEAK = Player(one_word=.3, restart=.2, near_miss=.4, early=.1)
CHAT = Chat(PROTOCOLS['tiny'], tiny_tokenizer())


def by(player): return ScriptedEngine(lambda text, rng: act(text, rng, player), CHAT.tokenizer)


@pytest.fixture(scope='module')
def played():
    "An environment, and games of a weak player: 8 questions with 4 attempts each."
    world = make_world('train', 7, size=120, questions=8, hops=(1, 2, 2))
    env = tiny_environment(world, CHAT)
    return env, rollout(by(WEAK), env, list(world.questions), 4, seed=3)


def test_what_was_said_stays_and_the_rest_is_played(played):
    env, groups = played
    t = max((t for g in groups for t in g.trajectories), key=lambda t: len(t.turns))
    for k in range(len(t.turns)):
        (group,) = continuations(by(WEAK), env, [(t, k)], 5, seed=k)
        assert all(u.turns[:k] == t.turns[:k] and len(u.turns) > k for u in group.trajectories)
        assert all(len(u.turns) <= env.max_turns for u in group.trajectories)


def test_a_continuation_does_not_depend_on_its_company(played):
    env, groups = played
    states, _ = distinct_states(groups)
    alone = [continuations(by(WEAK), env, [s], 3, seed=5)[0] for s in states[:6]]
    assert continuations(by(WEAK), env, states, 3, seed=5)[:6] == alone
    assert continuations(by(WEAK), env, states[:1], 2, seed=6) != continuations(by(WEAK), env, states[:1], 2, seed=5)


def test_a_model_plays_on_with_caps_and_without_those_of_others(base, played):
    "By the small model: a value is the mean over its own continuations, each within the run's tokens and turns."
    env, groups = played
    engine = HFEngine(*base[:2], max_length=env.max_tokens, max_rows=40)
    states, index = distinct_states(groups[:2])
    on = continuations(engine, env, states, 4, seed=1)
    assert all(len(u.turns) <= env.max_turns for g in on for u in g.trajectories)
    values, errors = continuation_values(engine, env, groups[:2], 4, seed=1)
    assert_close(values[0, 0], outcome_rewards(on[:1], exact_match).mean())
    assert values.isnan().equal(index < 0) and (errors[index >= 0] > 0).all()


def test_segments_go_on_where_they_were():
    "CARL's contexts are edited: from each segment the perfect coder ends with the same answer, its rows as they were."
    tokenizer = tiny_tokenizer(numbers=True)
    chat, world = Chat(PROTOCOLS['carl-tiny'], tokenizer), make_world('train', 5, size=120, questions=4, hops=(2,))
    engine = ScriptedEngine(lambda text, rng: act_coder(text, rng, PERFECT_CODER), tokenizer)
    env = tiny_environment(world, chat)
    for g in rollout(engine, env, list(world.questions)):
        (t,) = g.trajectories
        for k, (group,) in enumerate(continuations(engine, env, [(t, k)], 1) for k in range(len(t.turns))):
            assert group.trajectories[0].turns == t.turns and group.trajectories[0].answer == t.answer, k
    with pytest.raises(ValueError, match='contexts'):
        add_message(env, t, '<context> x </context>')


def test_exact_values_are_expectations(played):
    "V(S) is the mean of V over what may be said: one turn of the recursion, by hand."
    env, groups = played
    policy = lambda text, rng: act(text, rng, WEAK)
    exact, t = exact_values(policy, env, groups[:1], state=player_state), groups[0].trajectories[0]
    start, total = dataclasses.replace(t, turns=(), answer=None), 0.
    for said, p in next_texts(policy, CHAT.tokenizer.decode(list(t.prompt_ids))).items():
        after, over = add_message(env, start, said)
        assert not over                                                  # a weak player never answers at once
        then = dataclasses.replace(after, turns=(*after.turns, t.turns[-1]))    # any turn: its state is what counts
        group = dataclasses.replace(groups[0], trajectories=(then,))
        total += p * float(exact_values(policy, env, [group], state=player_state)[0, len(after.turns)])
    assert math.isclose(total, float(exact[0, 0]), rel_tol=1e-5)
    with pytest.raises(ValueError, match='guess'):
        exact_values(lambda text, rng: act(text, rng, Player(guess=.5)), env, groups[:1])


@pytest.mark.parametrize('name', ['vine', 'oracle'])
def test_rows_of_true_credit_give_turns_what_they_earned(played, name):
    env, groups = played
    there, _ = index_groups(groups)
    values = continuation_values(by(WEAK), env, groups, 8)[0]
    method = METHODS[name].bind({'scale': 'none'})
    batch = assign(method, groups, lambda layout, asks: Measured(state_values=values))
    rates = solver_rates(groups, outcome_rewards(groups, exact_match))
    if name == 'oracle': values = solver_values(groups, 4, rates)
    wanted, layout = turn_credit(values, batch.rewards['outcome'], there), pack(groups)
    trained = layout.token_turns >= 0
    got, tokens = batch.credit.advantages, wanted[layout.row_trajectory].gather(1, layout.token_turns.clamp(min=0))
    assert_close(got[trained], tokens[trained])
    earned = {'vine': 'continuations', 'oracle': 'solver'}[name]
    with pytest.raises(ValueError, match='sum'): compose(f'outcome+{earned}/group')


def test_a_run_on_true_credit(tmp_path, root):
    "Two steps of `vine`: the policy plays on, which has a clock of its own, and the weights move."
    run = train(make_config(dict(run=str(tmp_path / 'vine'), method='vine', options={'m': 2}, steps=2, eval_every=2,
                                 model=str(root / 'data' / 'tiny_base'), questions=20, dev_questions=4,
                                 test_questions=4, questions_per_step=4, group_size=4, threads=1)),
                say=lambda line: None)
    table = read_metrics(run)
    assert (table.seconds_play_on[1:] > 0).all() and (table.updates[1:] > 0).all() and (table.kl.iloc[-1] > 0)


@pytest.fixture(scope='module')
def listed():
    "Games of a weak player, whose questions have two or three independent parts."
    world = world_of({'size': 120, 'parts': [2, 3]}, 'train', 7, 8)
    return rollout(by(WEAK), tiny_environment(world, CHAT, max_turns=4), world.questions, 4, seed=3)


def test_checked_notes_move_the_outcome_and_add_nothing(listed, played):
    "A rule that sums over turns sees the outcome alone; one that does not gives another credit."
    options = {'metric': 'parts'}
    credit = {name: assign(compose(name).bind(options), listed, lambda layout, asks: None).credit.advantages
              for name in ('outcome/group', 'outcome+notes/group', 'outcome/mean', 'outcome+notes/mean')}
    assert credit['outcome/group'].any()
    for rule in ('group', 'mean'): assert_close(credit[f'outcome+notes/{rule}'], credit[f'outcome/{rule}'])
    own = compose('outcome+notes/accumulate').bind(options | {'norm': 'per-turn', 'gamma': 0.})
    batch = assign(own, listed, lambda layout, asks: None)
    assert not torch.allclose(batch.credit.advantages, credit['outcome/group'], atol=.1)
    assert_close((batch.rewards['turns'].sum(1)), torch.zeros(32), atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match='none'): note_values(played[1])                     # questions without parts
    with pytest.raises(ValueError, match='telescope'): compose('outcome+notes/calls')
