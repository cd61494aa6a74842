"What other trainers hand over beside the usual: other types of the same numbers, nothing, and things that are none."
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from credit_rl.adapters import _areal_credit, _list_turns, Arrays, assign_arrays, estimator, prime_credit

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
