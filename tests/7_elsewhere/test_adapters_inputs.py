"What other trainers hand over beside the usual: other types of the same numbers, nothing, and things that are none."
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from credit_rl import adapters
from credit_rl.adapters import (_areal_credit, _list_turns, Arrays, assign_arrays, estimator, prime_credit, rewards_of_turns,
                                turns_from_mask)

MASK = torch.tensor([[1, 0, 1], [1, 0, 1]])
REWARDS = torch.tensor([[1., 0, 0], [0., 0, 0]])
WANTED = torch.tensor([[1., 0, 0], [-1., 0, 0]])


def close(a, b): assert_close(torch.as_tensor(a).float(), b, atol=1e-2, rtol=0)


@pytest.mark.parametrize('mask', [MASK.float(), MASK.bool(), MASK.int(), MASK.double()])
@pytest.mark.parametrize('rewards', [REWARDS, REWARDS.bfloat16(), REWARDS.double(), REWARDS.clone().requires_grad_()])
@pytest.mark.parametrize('index', [np.array(['a', 'a'], dtype=object), ['a', 'a'], np.array([7, 7]),
                                   torch.tensor([7, 7])])
def test_an_estimator_takes_the_types_that_trainers_have(mask, rewards, index):
    found, _ = estimator('tspo')(token_level_rewards=rewards, response_mask=mask, index=index, config=None)
    assert found.dtype == rewards.dtype and not found.requires_grad
    close(found, WANTED)


def test_an_empty_batch_is_an_empty_batch():
    none = torch.zeros(0, 3)
    for found in estimator('tspo')(token_level_rewards=none, response_mask=none.long(), index=[], config=None):
        assert found.shape == (0, 3)
    assert prime_credit('tspo', []) == [] and _areal_credit('tspo', []) == []


def test_an_index_of_another_length_is_refused():
    with pytest.raises(ValueError, match='rows'):
        estimator('tspo')(token_level_rewards=REWARDS, response_mask=MASK, index=['a'], config=None)


@pytest.mark.parametrize('given', [[1., None], (1, None), np.array([1., np.nan]), torch.tensor([1., float('nan')]),
                                   [np.float32(1.), None], ['1', None]])
def test_turn_rewards_are_read_in_the_types_that_environments_have(given):
    first, second = _list_turns({'turn_rewards': given})
    assert first == 1. and second != second


@pytest.mark.parametrize('info', [None, {}, {'turn_rewards': None}, {'turn_rewards': []}])
def test_a_rollout_may_have_none(info): assert _list_turns(info) == []


@pytest.mark.parametrize('given', ['x', {'a': 1}, 5, ['x'], [[1.]]])
def test_what_is_no_list_of_numbers_is_refused(given):
    with pytest.raises(ValueError, match='turn_rewards'): _list_turns({'turn_rewards': given})


def test_a_trace_without_a_reward_leaves_the_comparison():
    def trace(reward):
        nodes = [SimpleNamespace(sampled=True, mask=[True], advantages=None)]
        return SimpleNamespace(id='t', nodes=nodes, branches=[SimpleNamespace(trainable=True, nodes=nodes)],
                               reward=reward, info=None)
    found = prime_credit('grpo', [trace(None), trace(1.), trace(0.)])
    close(found, torch.tensor([[0.], [1.], [-1.]]))
    mask = torch.ones(3, 1)
    assert_close(assign_arrays('grpo', Arrays(mask, ['q'] * 3, [None, 1., 0.])).advantages.flatten(),
                 torch.tensor(found).flatten())


def test_a_reward_of_a_turn_that_the_mask_does_not_show_is_refused():
    "The mask joins two turns of the first rollout; zeros and NaN behind a rollout's turns are padding."
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 1, 0]])
    credit = lambda turns: assign_arrays('tspo', Arrays(mask, [0, 0], torch.zeros(2), torch.tensor(turns)))
    with pytest.raises(ValueError, match='trajectory 0 the mask shows 1'): credit([[0., 1., 0.], [0., 0., 0.]])
    with pytest.raises(ValueError, match='trajectory 1 the mask shows 2'): credit([[1., 0., 0.], [0., 0., .5]])
    close(credit([[1., 0., math.nan], [0., 0., 0.]]).advantages[0, :4], torch.ones(4))


def test_a_last_turn_of_one_token_leaves_earlier_turns_what_they_earned():
    "verl copies the outcome to the end of both rows of this rollout; what the last turn earned is added to it."
    class Row:
        def as_dict(self): return {'rm_scores': self.scores.clone(), 'response_mask': self.mask, 'extra_fields': {**self.extra}}
    rows = []
    for before, mask in ((0, [1, 1, 0, 1]), (2, [1])):
        row = type('Output', (adapters._OutputMixin, Row), {})()
        row.mask, row.scores = torch.tensor(mask), torch.tensor([*[0.] * (len(mask) - 1), 1.])
        row.extra = {'turns_before': before, 'turns_in_all': 3, 'turn_rewards': [.25, .5, .125]}
        rows.append(row.as_dict())
    pad = lambda name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True)
    mask, owner = pad('response_mask'), [0, 0]
    once = adapters._once(pad('rm_scores'), mask, owner)
    outcome, turns = rewards_of_turns(once, turns_from_mask(mask, owner), owner)
    assert outcome.tolist() == [1.125] and turns.tolist() == [[.25, .5, 0.]]
