"""The traps of the field, seen in released code: what they would give, and that ours does not.

Each test holds the trap as a few wrong lines that give another number on the same input, so it cannot pass by being
blind. Traps that need engines or rollouts, or that another test shows, are tested beside those; `ELSEWHERE` says where.
"""
import ast, itertools, math
from pathlib import Path

import pytest, torch
from torch.testing import assert_close

from credit_rl.advantages import discounted_sum, mt_grpo_star, to_tokens, turn_normalize
from credit_rl.tspo import first_occurrence, folr_rewards
from credit_rl.groups import group_normalize
from credit_rl.layout import loss_weights
from credit_rl.metrics import normalize
from credit_rl.outcome import METRICS, outcome_rewards
from credit_rl.trajectory import Group, Question, Stop, Trajectory, Turn

ELSEWHERE = {
    're-tokenised text drifts from the sampled ids':
        'test_engine_and_layout.py::test_sampled_ids_are_kept_where_encoding_their_text_would_give_others',
    'padding is attended': 'test_engine_and_layout.py::test_padding_order_and_company_change_no_logp',
    'the loss mask is used as attention mask, so that observations are not read':
        'test_engine_and_layout.py::test_a_plain_forward_gives_the_sampled_logps',
    "a mask's sum is taken for the last position":
        'test_engine_and_layout.py::test_states_end_where_the_next_turn_has_not_begun',
    "the prompt's example counts as an answer": 'test_engine_and_layout.py::test_the_prompts_example_is_no_answer',
    'an observation counts as an answer': 'test_engine_and_layout.py::test_an_observation_is_no_answer',
    'an empty normalised gold matches everything, in the metrics':
        'test_metrics.py::test_a_gold_that_normalises_to_nothing_is_compared_unstripped_by_em_and_f1_alone',
    'zero variance is tested on the mean, or on a deviation that is rounded':
        'test_advantages.py::test_equal_rewards_give_exactly_zero',
    'a group without a difference is given advantages, in each method':
        'test_engine_and_layout.py::test_groups_without_a_difference_get_exactly_nothing',
    'a failed teacher call is scored 0.0, which is probability 1':
        'test_potentials.py::test_shaping_sums_to_the_potential_of_the_prompt',
    'micro-batches are averaged instead of summed':
        'test_losses.py::test_the_learners_batch_1_times_8_is_its_batch_8_times_1',
}
NAN = math.nan


def test_the_traps_are_still_tested_there():
    for trap, place in ELSEWHERE.items():
        file, name = place.split('::')
        (path,) = Path(__file__).parents[1].rglob(file)
        tree = ast.parse(path.read_text(encoding='utf-8'))
        assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, trap


def test_a_reward_that_is_not_zero_taken_for_a_turns_end():
    "A turn that gained exactly nothing keeps its own value; it doesn't melt into the next."
    gains = torch.tensor([[0.3, 0.0, 0.2]])
    token_turns = torch.tensor([[-1, 0, 0, -1, 1, 1, -1, 2, 2]])

    def trap(values):
        "Rewards stand on the last token of their turn; turns are found again by looking for them."
        ends = [max(j for j, k in enumerate(token_turns[0].tolist()) if k == turn) for turn in range(3)]
        rewards = torch.zeros(9).index_put((torch.tensor(ends),), values[0])
        nearest = [next((rewards[j] for j in range(t, 9) if rewards[j] != 0), rewards[-1]) for t in range(9)]
        return torch.where(token_turns >= 0, torch.stack(nearest), 0.0)

    full = torch.tensor([[0.3, 0.1, 0.2]])
    assert_close(to_tokens(full, token_turns), trap(full))             # where no gain is 0, nobody notices
    assert to_tokens(gains, token_turns)[0, 4:6].tolist() == [0, 0]
    assert trap(gains)[0, 4:6].tolist() == pytest.approx([0.2, 0.2])
    # γ counts the turn too
    assert_close(discounted_sum(gains, torch.ones(1, 3, dtype=torch.bool), 0.5), torch.tensor([[0.35, 0.1, 0.2]]))
    w = loss_weights(token_turns, torch.tensor([0]), 'segment-mean')
    assert w[0, 4] == w[0, 1] == 0.5                                   # and so does an average over turns


def test_per_turn_comparison_is_a_hidden_bonus_for_not_stopping():
    "The trap is a rule that is offered (`pad='none'`); the default and the pooled comparison are free of it."
    x = torch.tensor([[1., 1., NAN], [0.5, 0.5, 0.5], [0., 0., 0.]])   # the first rollout answered and stopped
    mask, groups = ~x.isnan(), torch.zeros(3, dtype=torch.long)
    assert turn_normalize(x, mask, groups, pad='none')[1, 2] > 0.99    # the middling one is praised for its third turn
    padded, pooled = turn_normalize(x, mask, groups), group_normalize(x, groups, mask)
    assert abs(padded[1, 2]) < 1e-6 and padded[0, 2] == 0
    assert (pooled[1] == pooled[1, 0]).all() and pooled[1, 0] > pooled[2, 0]  # one baseline for all of its turns
    calls = torch.tensor([[1., 9, NAN, NAN], [0.5, 0.5, 0.5, 9], [0., 0., 0., 9]])
    by_turn, together = (mt_grpo_star(calls, torch.ones(3), ~calls.isnan(), groups, norm=norm)
                         for norm in ('turn', 'pooled'))
    assert by_turn[1, 2] > 0.99 and (together[1, :3] == together[1, 0]).all()
    latent = folr_rewards(torch.zeros(3), torch.tensor([0, 1, -1]), mask)  # TSPO pads, so its third turn is silent
    assert not turn_normalize(latent, mask, groups)[:, 2].any()


def test_only_the_first_gold_scored_and_looked_for():
    answer = Turn('answer', [1], [-0.1], [], '', '')
    for metric in METRICS:
        golds = ['12', '7'] if metric == 'numeric' else ['Vienna', 'Budapest']
        question = Question('q', '?', golds)
        second = Group(question, [Trajectory(question, [0], [answer], Stop.ANSWER, golds[1])])
        assert METRICS[metric](golds[1], golds[:1]) == 0 and outcome_rewards([second], metric).tolist() == [1]
    seen = ['nothing', 'It is New York.']
    assert first_occurrence(seen, ['NYC', 'New York']) == 1 and first_occurrence(seen, ['NYC', 'New York'][:1]) is None


def test_an_empty_normalised_gold_is_seen_everywhere():
    "The trap: normalise, then look for the result in the text. Nothing is in every text."
    text = 'Vienna is the capital of Austria'
    for gold, short in itertools.product(('the', '!', 'A', '?!', ' an '), (False, True)):
        assert normalize(gold) in normalize(text)
        # nor in a text of which nothing is left
        assert first_occurrence([text, '', 'The'], [gold], match_short=short) is None
        assert first_occurrence([text], [gold, 'Austria'], match_short=short) == 0
