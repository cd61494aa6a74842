"""The traps of the field, seen in released code: what they would give, and that ours does not.

Each test holds the trap as a few wrong lines that give another number on the same input, so it cannot pass by being
blind. Traps whose tests need engines, rollouts or a metric's own cases are tested beside those; `ELSEWHERE` says where.
"""
import ast, itertools, math
from pathlib import Path

import pytest, torch
from torch.testing import assert_close

from credit_rl.advantages import discounted_sum, mt_grpo_star, to_tokens, turn_normalize
from credit_rl.tspo import first_occurrence, folr_rewards
from credit_rl.groups import at_last_turn, group_normalize, group_share
from credit_rl.layout import loss_weights, pack, token_logps
from credit_rl.metrics import normalize
from credit_rl.outcome import METRICS, outcome_rewards
from credit_rl.trajectory import Group, Question, Stop, Trajectory, Turn, example_group
from random_models import small_qwen

ELSEWHERE = {
    're-tokenised text drifts from the sampled ids':
        'test_engine_and_layout.py::test_sampled_ids_are_kept_where_encoding_their_text_would_give_others',
    'padding is attended':
        'test_engine_and_layout.py::test_padding_order_and_company_change_no_logp',
    "the prompt's example counts as an answer":
        'test_engine_and_layout.py::test_the_prompts_example_is_no_answer',
    'an observation counts as an answer':
        'test_engine_and_layout.py::test_an_observation_is_no_answer',
    'an empty normalised gold matches everything, in the metrics':
        'test_metrics.py::test_a_gold_that_normalises_to_nothing_is_compared_unstripped_by_em_and_f1_alone',
    'a group without a difference is given advantages, in each method':
        'test_engine_and_layout.py::test_groups_without_a_difference_get_exactly_nothing',
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


# ---------------------------------------------------------------- masks

@pytest.fixture(scope='module')
def model():
    "A small Qwen2 with sharp random weights, which minds what it reads."
    return small_qwen(100, intermediate_size=96, initializer_range=.2)


@torch.no_grad()
def test_loss_mask_used_as_attention_mask(model):
    "Observations are read, though never trained on."
    layout = pack([example_group()])

    class Blind:
        "The trap: the forward is given the loss mask as attention mask."
        get_output_embeddings = model.get_output_embeddings
        def base_model(self, input_ids, use_cache):
            return model.base_model(input_ids, attention_mask=(layout.trained | prompt).long(), use_cache=use_cache)

    P = len(example_group().trajectories[0].prompt_ids)
    prompt = torch.arange(layout.ids.shape[1]).expand_as(layout.ids) < P
    ours, trap = (token_logps(m, layout.ids, layout.trained) for m in (model, Blind()))
    for i, n in enumerate(layout.lengths.tolist()):                    # the truth: the row alone, nothing hidden
        ids = layout.ids[i, :n]
        truth = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        own = layout.trained[i, 1:n]
        assert_close(ours[i, 1:n][own], truth[own], atol=1e-4, rtol=0)
        first = layout.token_turns[i, 1:n][own] == 0
        assert_close(trap[i, 1:n][own][first], truth[own][first], atol=1e-4, rtol=0)
        assert (trap[i, 1:n][own][~first] - truth[own][~first]).abs().max() > 0.1


def test_mask_sum_minus_one_taken_for_the_last_position():
    "Positions are counted from the front, through prompts, observations and the padding of others."
    layout = pack([example_group()], prefix=1)
    trap = layout.trained.sum(1) - 1
    last = torch.where(layout.trained, torch.arange(layout.ids.shape[1]), -1).amax(1)
    for i, t in enumerate(example_group().trajectories):
        # an answer's last token
        assert layout.ids[i, last[i]] == t.turns[-1].action_ids[-1] and layout.states[i, -1, 1] == last[i]
        assert layout.trained[i, trap[i] + 1:].any()                   # the trap stops short
        for k, turn in enumerate(t.turns[:-1]):  # S_{k+1} ends with the observation, before the next prefix
            assert layout.ids[i, layout.states[i, k + 1, 1] + 1] == turn.observation_ids[-1]
    # counting turns is right without holes only, so they are refused
    holed = torch.tensor([[True, False, True], [True, True, False]])
    with pytest.raises(ValueError, match='hole'): at_last_turn(torch.ones(2), holed)
    whole = torch.tensor([[True, True, True], [True, True, False]])
    assert at_last_turn(torch.tensor([5., 7.]), whole).tolist() == [[0, 0, 5], [0, 7, 0]]


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


# ---------------------------------------------------------------- comparisons

def test_zero_variance_tested_on_the_mean_not_on_the_spread():
    """Whether a group says anything is a question about its spread: neither its mean nor a deviation that is rounded
    can tell."""
    def trap(x): return (x.mean() == 0) | (x.mean() == 1)              # "all wrong or all right"
    by_mean = torch.tensor([-1., 1.])  # a penalty and a success: mean 0, and a clear lesson
    pair = torch.zeros(2, dtype=torch.long)
    assert trap(by_mean) and group_normalize(by_mean, pair).tolist() == pytest.approx([-1, 1], abs=1e-5)
    share = group_share(by_mean, pair)
    assert share['collapsed'] == 0 and share['mixed'] == 1

    equal, many = torch.full((11,), 0.7), torch.zeros(11, dtype=torch.long)
    centered = equal - equal.sum() / 11  # float32 cannot even average eleven equal numbers
    assert not trap(equal) and (centered / (centered.pow(2).mean().sqrt() + 1e-6)).abs().max() > 0.01
    assert not group_normalize(equal, many).any() and group_share(equal, many)['collapsed'] == 1
    assert not turn_normalize(equal[:, None], torch.ones(11, 1, dtype=torch.bool), many).any()


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


# ---------------------------------------------------------------- answers

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
