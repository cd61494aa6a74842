"""Our rules inside other trainers: the same advantage of a token. What is not installed is called as it calls us."""
import asyncio
import json
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.testing import assert_close

from credit_rl import adapters
from credit_rl.adapters import Arrays, assign_arrays, estimator, response_arrays, rewards_of_turns, turns_from_mask
from credit_rl.layout import pack
from credit_rl.methods import get_method
from credit_rl.parts import Measured, assign
from credit_rl.scoring import acting_states
from credit_rl.trajectory import Group, Result, Stop, example_group

# ---- the contract: one toy batch, the same advantages everywhere ----

# without a critic, which compare in groups
CREDITED = ('tspo', 'igpo', 'grpo', 'rloo', 'mt-grpo*', 'vspo', 'dapo', 'igpo-ig')


def toy():
    "Two groups: the running example, and its wrong rollouts again with one that stops a turn earlier."
    first = example_group()
    wrong = [replace(t, question=replace(t.question, id='again')) for t in first.trajectories[1:]]
    unread = replace(wrong[0].turns[2], observation_ids=(), observation_text='', result=Result.SKIPPED)
    short = replace(wrong[0], turns=(*wrong[0].turns[:2], unread), stop=Stop.TURN_CAP, answer=None)
    return [first, Group(wrong[0].question, [*wrong, short])]


def belief(layout, asks):
    "What a policy would have said of the golds: some log-probabilities, the same each time."
    values = -(torch.arange(layout.states[..., 0].numel()) % 5 + 1.).view(layout.states.shape[:2])
    states = acting_states(layout.states, layout.turn_mask)
    there = states[..., 0] >= 0
    return Measured(gold_logp=torch.where(there, values, torch.nan)[..., None], gold_tokens=there.long()[..., None])


@pytest.fixture(scope='module', params=CREDITED)
def judged(request):
    "Groups, method, what our own `assign` gave them, and the same rewards as other trainers' tensors."
    groups, method = toy(), get_method(request.param).bind()
    batch = assign(method, groups, belief, torch.Generator().manual_seed(0))
    n, k = pack(groups).turn_mask.shape
    outcome, turns = torch.zeros(n), torch.zeros(n, k)
    outcome[batch.chosen] = batch.rewards['outcome']
    turns[batch.chosen, :batch.rewards['turns'].shape[1]] = batch.rewards['turns']
    tensors = response_arrays(groups, outcome, turns)
    mask, ours = tensors['response_mask'], torch.zeros(tensors['response_mask'].shape)
    ours[batch.chosen] = torch.zeros(ours[batch.chosen].shape).masked_scatter(
        mask[batch.chosen].bool(), batch.credit.advantages[batch.layout.trained])
    assert ours.any(1).sum() >= 2
    return SimpleNamespace(groups=groups, method=method, name=request.param, ours=ours, tensors=tensors, mask=mask,
                           outcome=outcome, turns=turns, index=np.array(tensors['index'], dtype=object))


def close(a, b): assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_verl_gets_our_advantages(judged):
    "SkyRL, which calls the same function with arguments of its own, is in test_adapters_releases."
    given = {k: judged.tensors[k] for k in ('token_level_rewards', 'response_mask')}
    advantages, returns = estimator(judged.name)(**given, index=judged.index, config={'gamma': 1.})
    close(advantages, judged.ours)
    close(returns, judged.ours)
    shuffled = torch.randperm(len(judged.ours), generator=torch.Generator().manual_seed(1))      # verl balances rows
    given = {k: x[shuffled] for k, x in given.items()}
    close(estimator(judged.name)(**given, index=judged.index[shuffled.numpy()], config=None)[0], judged.ours[shuffled])


def openrlhf_maker(name, n=2, use_loss=True, clip=None, penalize=lambda experiences, args: None):
    "A maker of experiences that credits by a method. OpenRLHF's arguments are nested as since 0.11."
    maker = type('Maker', (adapters.ExperienceMixin,), {'credited': (name, {})})()
    args = SimpleNamespace(algo=SimpleNamespace(kl=SimpleNamespace(use_loss=use_loss)), reward=SimpleNamespace(
        clip_range=clip), rollout=SimpleNamespace(n_samples_per_prompt=n))
    maker.strategy, maker.kl_ctl, maker.penalize = SimpleNamespace(args=args), SimpleNamespace(value=.1), penalize
    return maker


def test_openrlhf_gets_our_advantages(judged):
    def experience(rows):
        width = int(judged.mask[rows].sum(0).nonzero().max()) + 1
        return SimpleNamespace(index=rows, action_mask=judged.mask[rows, :width].bool(), values=None, kl=torch.ones(1),
                               rewards=judged.outcome[rows], info={'turn_rewards': judged.turns[rows]})
    parts = [[5, 0], [3], [1, 2, 4]]                                                # as dynamic batches cut them
    experiences = [experience(rows) for rows in parts]
    assert openrlhf_maker(judged.name, 3).compute_advantages_and_returns(experiences) is experiences
    for rows, e in zip(parts, experiences):
        close(e.advantages, judged.ours[rows, :e.advantages.shape[1]])
        assert e.advantages.shape == e.action_mask.shape and e.kl is None
        assert_close(e.info['return'], judged.outcome[rows])
        assert 'turn_rewards' not in e.info


def test_openrlhfs_length_penalty_and_clipping_come_before_credit():
    "A reward of 3 is clipped to 1 and a truncated one set to 0, so the pair is a right and a wrong rollout."
    def penalize(experiences, args):
        for e in experiences: e.rewards[1] = 0.
    e = SimpleNamespace(index=[0, 1], action_mask=torch.ones(2, 2), values=None, kl=None, info={},
                        rewards=torch.tensor([3, 3]))
    openrlhf_maker('grpo', clip=(-1., 1.), penalize=penalize).compute_advantages_and_returns([e])
    close(e.advantages, torch.tensor([[1., 1.], [-1., -1.]]))
    assert e.info['return'].tolist() == [1., 0.]


def slime_sample(index, rollout, mask, reward, turns, group=0):
    return SimpleNamespace(index=index, rollout_id=rollout, group_index=group, loss_mask=mask, response_length=len(mask),
                           metadata={'turn_rewards': turns}, get_reward_value=lambda args: reward)


def test_slime_gets_our_advantages(judged):
    masks = [row[:int(row.nonzero().max()) + 1].int().tolist() for row in judged.mask]
    samples = [slime_sample(i, None, mask, float(judged.outcome[i]), judged.turns[i].tolist(), i // 3)
               for i, mask in enumerate(masks)]
    raw, credit = adapters.slime_rewards(judged.name)(None, [samples[:3], samples[3:]])
    assert raw == judged.outcome.tolist() and all(isinstance(x, torch.Tensor) for x in credit)
    shard = [0, 3, 4]                                                                # a rank's share cuts groups
    data = {'rewards': [credit[i] for i in shard], 'loss_masks': [torch.tensor(samples[i].loss_mask) for i in shard]}
    adapters.slime_advantages(SimpleNamespace(context_parallel_size=1), data)
    for i, a, r in zip(shard, data['advantages'], data['returns']):
        close(a, judged.ours[i, :len(a)])
        assert_close(a, r)


def trace(mask, reward, turn_rewards):
    "A rollout as verifiers' Trace: a node for every message, that of the model with its header before it."
    turns, nodes = turns_from_mask(mask[None])[0], []
    for k in range(int(turns.max()) + 1):
        nodes.append(SimpleNamespace(sampled=False, mask=[False] * 2, advantages=None))
        nodes.append(SimpleNamespace(sampled=True, mask=[False, *[True] * int((turns == k).sum())], advantages=None))
    listed = None if turn_rewards is None else turn_rewards[:int(turns.max()) + 1]
    return SimpleNamespace(id='t', nodes=nodes, branches=[SimpleNamespace(trainable=True, nodes=nodes)], reward=reward,
                           info={'turn_rewards': listed}, has_error=False, agent=SimpleNamespace(trainable=True))


def credit_of(trace): return torch.tensor(sum((n.advantages for n in trace.nodes if n.advantages is not None), []))


def test_prime_rl_and_verifiers_get_our_advantages(judged):
    traces = [trace(row, float(r), turns) for row, r, turns in zip(judged.mask, judged.outcome, judged.turns.tolist())]
    given = []
    algorithm = type('Credit', (adapters.AlgorithmMixin,), {
        'credited': (judged.name, {}), 'annotate': staticmethod(lambda trace, values: given.append((trace, values)))})()
    episodes = [SimpleNamespace(traces=[t]) for t in traces]
    if judged.method.sampling.selects:
        with pytest.raises(ValueError, match='group'): asyncio.run(algorithm.score_group(episodes[:3]))
        return
    for part in (episodes[:3], episodes[3:]): asyncio.run(algorithm.score_group(part))
    for (t, values), row, ours in zip(given, judged.mask.bool(), judged.ours):
        close(torch.tensor(values), ours[row])
        close(credit_of(t), ours[row])


def test_areal_gets_our_advantages(judged):
    "Every row behind a prompt of one token, its mask shifted to the token before, as AReaL's own hook leaves it."
    class Base:
        kl_ctl = 0.
        def compute_advantages(self, data):
            return [{**d, 'loss_mask': d['loss_mask'].roll(-1, 1), 'advantages': None} for d in data]
    actor = type('Actor', (adapters.ActorMixin, Base), {'credited': (judged.name, {})})()
    mask = torch.nn.functional.pad(judged.mask, (1, 0))
    data = [{'loss_mask': mask[rows], 'rewards': judged.outcome[rows], 'turn_rewards': judged.turns[rows]}
            for rows in ([0, 1, 2], [3, 4, 5])]
    found = torch.cat([d['advantages'] for d in actor.compute_advantages(data)])
    close(found, torch.nn.functional.pad(judged.ours, (0, 1)))


def test_trl_gets_our_advantages(judged, monkeypatch):
    from credit_rl import trl_trainer
    chat = SimpleNamespace(encode=lambda text: [])
    monkeypatch.setattr(trl_trainer, 'answer_header', lambda chat: '')
    monkeypatch.setattr(trl_trainer, 'policy_look', lambda model, chat: belief)
    monkeypatch.setattr(trl_trainer, 'seed_of', lambda *parts: 0)
    method = replace(judged.method, loss=replace(judged.method.loss, average='token-mean'))
    credit = trl_trainer.TurnCredit(method, SimpleNamespace(chat=chat))
    credit.groups, credit.rows, credit.first = judged.groups, [None] * 6, 0
    credit.rewards = method.text_rewards(judged.groups)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(unwrap_model=lambda model: model), model=None,
                              state=SimpleNamespace(global_step=0))
    # DAPO's mean goes over the groups that it keeps, TRL's over all
    kept = judged.mask[judged.ours.any(1)].sum() if judged.name == 'dapo' else judged.mask.sum()
    wanted = judged.ours * judged.mask.sum() / kept
    close(credit.advantages({'completion_ids': judged.mask}, trainer), wanted)
    credit.first = 3                                                           # the second of two processes
    close(credit.advantages({'completion_ids': judged.mask[3:]}, trainer), wanted[3:])


def test_arrays_of_a_rollout_in_several_rows_get_our_advantages():
    "CARL's way: the second and third turn were sampled in contexts of their own."
    first = example_group()
    cut = lambda t: replace(t, turns=(t.turns[0], replace(t.turns[1], context_ids=t.prompt_ids + (1,)), *t.turns[2:3],
                                      replace(t.turns[3], context_ids=t.prompt_ids)))
    group = Group(first.question, [cut(first.trajectories[0]), *first.trajectories[1:]])
    layout = pack([group])
    for name in ('tspo', 'carl', 'ppo', 'turn-ppo', 'gigpo'):
        values = torch.rand(layout.ids.shape, generator=torch.Generator().manual_seed(2))
        ours = assign(get_method(name).bind(), [group], lambda layout, asks: Measured(values=values))
        arrays = Arrays(layout.trained, ['q'] * 3, ours.rewards['outcome'], ours.rewards['turns'],
                        layout.row_trajectory, values, layout.ids)
        found = assign_arrays(name, arrays)
        close(found.advantages, ours.credit.advantages)
        if ours.credit.returns is not None: close(found.returns, ours.credit.returns)
    assert layout.ids.shape[0] == 5


@pytest.mark.parametrize('call, way_out', [
    (lambda: openrlhf_maker('tspo', use_loss=False).compute_advantages_and_returns([]), '--algo.kl.use_loss'),
    (lambda: type('Actor', (adapters.ActorMixin,), {'kl_ctl': .1})().compute_advantages([]), 'actor.kl_ctl=0'),
    (lambda: estimator('grpo')(**LEAST, config={'use_kl_in_reward': True}), 'use_kl_in_reward=false'),
    (lambda: estimator('grpo')(**LEAST, config=SimpleNamespace(use_kl_in_reward=True)), 'use_kl_in_reward=false')])
def test_a_kl_penalty_in_the_reward_is_refused(call, way_out):
    estimator('grpo')(**LEAST, config=SimpleNamespace())
    with pytest.raises(ValueError, match=way_out): call()


LEAST = dict(token_level_rewards=torch.zeros(2, 2), response_mask=torch.ones(2, 2), index=['q', 'q'])


def test_areal_refuses_rollouts_of_several_rows():
    row = {'loss_mask': torch.ones(2, 2), 'rewards': torch.zeros(2)}
    for data, words in (([{**row, 'begin_of_trajectory': torch.tensor([1, 0])}], 'several'),
                        ([{**row, 'turn_rewards': torch.zeros(2, 1)}, row], 'questions')):
        with pytest.raises(ValueError, match=words): adapters._areal_credit('tspo', data)


# ---- what arrays say ----

def test_rewards_lie_on_their_turn_or_behind_it():
    turns = turns_from_mask(torch.tensor([[0, 1, 1, 0, 0, 1, 0]]))
    for at in (1, 2, 3, 4):
        rewards = torch.zeros(1, 7)
        rewards[0, at], rewards[0, 6] = .5, 1.
        outcome, table = rewards_of_turns(rewards, turns)
        assert outcome.tolist() == [1.] and table.tolist() == [[.5, 0.]]
    with pytest.raises(ValueError, match='before'): rewards_of_turns(torch.ones(1, 7), turns)
    with pytest.raises(ValueError, match='like'): rewards_of_turns(torch.ones(1, 6), turns)


@pytest.mark.parametrize('name', ['tspo', 'mt-grpo', 'mt-grpo*', 'igpo'])
def test_a_rule_of_turns_is_refused_outcomes_alone(name):
    "It would be GRPO, or nothing. Zeros that somebody hands over are turns that earned nothing."
    mask = torch.tensor([[1., 0., 1.], [1., 0., 1.]])
    alone = {'token_level_rewards': torch.tensor([[0., 0., 1.], [0., 0., 0.]]), 'response_mask': mask}
    with pytest.raises(ValueError, match='turn'): estimator(name)(**alone, index=['q', 'q'])
    with pytest.raises(ValueError, match='turn'): assign_arrays(name, Arrays(mask, ['q', 'q'], [1., 0.]))
    zeros = assign_arrays(name, Arrays(mask, ['q', 'q'], [1., 0.], [[0., 0.], [0., 0.]])).advantages
    assert_close(estimator(name, zeros=True)(**alone, index=['q', 'q'])[0], zeros)
    assert estimator(name)(mask.new_tensor([[0., 0., 1.], [.5, 0., 0.]]), mask, ['q', 'q'])[0].any()
    assert estimator('grpo')(**alone, index=['q', 'q'])[0].any()


@pytest.mark.parametrize('given, words', [
    (dict(groups=['a']), 'outcomes'), (dict(turns=[[1.]] * 2), 'hide'),
    (dict(values=torch.zeros(2, 4)), 'mask'), (dict(row_trajectory=[0, 0]), 'trajectory')])
def test_arrays_that_do_not_fit_are_refused(given, words):
    arrays = dict(mask=torch.tensor([[1, 0, 1], [1, 0, 0]]), groups=['a', 'a'], outcome=[1., 0.])
    with pytest.raises(ValueError, match=words): assign_arrays('grpo', Arrays(**arrays | given))


def test_a_reward_of_its_own_for_a_last_turn_is_refused():
    with pytest.raises(ValueError, match='trajectory'):
        response_arrays(toy(), torch.zeros(6), torch.ones(6, 4))


# ---- registries, as the trainers' own code has them ----

def module(monkeypatch, name, **names):
    parts = name.split('.')
    for i in range(1, len(parts) + 1): monkeypatch.setitem(sys.modules, '.'.join(parts[:i]), ModuleType('x'))
    for key, value in names.items(): setattr(sys.modules[name], key, value)


@pytest.mark.parametrize('register, place, decorator', [
    (adapters.register_verl, 'verl.trainer.ppo.core_algos', 'register_adv_est'),
    (adapters.register_skyrl, 'skyrl_train.utils.ppo_utils', 'register_advantage_estimator')])
def test_a_registered_method_has_its_name_and_needs_groups(monkeypatch, register, place, decorator):
    "That it credits as it should: test_adapters_pages."
    with pytest.raises(ImportError, match='installed'): register('tspo')
    found = {}
    module(monkeypatch, place, **{decorator: lambda name: lambda function: found.update({name: function})})
    assert register('tspo') == 'credit_rl/tspo' and register('tspo', 'mine', {'strategy': 'all'}) == 'mine'
    assert set(found) == {'credit_rl/tspo', 'mine'}
    nameless = LEAST | {'index': None, 'response_mask': torch.ones(2, 2).long()}
    with pytest.raises(ValueError, match='index'): found['mine'](**nameless, config=None)
    with pytest.raises(ValueError, match='mean'): register('tspo', options={'strategie': 'all'})


def test_a_trainer_that_cannot_import_its_own_parts_says_so(monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == 'verl': raise ModuleNotFoundError("No module named 'ray'", name='ray')
    monkeypatch.setattr(sys, 'meta_path', [Broken(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match='ray'): adapters.register_verl('tspo')


def test_slime_knows_a_rollout_of_several_samples_and_refuses_what_it_cannot_do():
    samples = [slime_sample(0, 'a', [1, 0, 1], 0., [1., 0., 0.]), slime_sample(1, 'a', [1, 1], 0., None),
               slime_sample(2, 'b', [1, 0, 1], 0., [0., 0.])]
    raw, credit = adapters.slime_rewards('tspo')(None, samples)
    # turn 0 is compared as (1, 0); turns 1 and 2 do not differ; the second sample holds turn 2 alone
    close(torch.cat(credit), torch.tensor([1., 0., 0., -1., 0.]))
    data = {'rewards': credit, 'loss_masks': [torch.tensor(s.loss_mask) for s in samples]}
    with pytest.raises(ValueError, match='context-parallel-size'):
        adapters.slime_advantages(SimpleNamespace(context_parallel_size=2), data)
    with pytest.raises(ValueError, match='slime_rewards'):
        adapters.slime_advantages(SimpleNamespace(context_parallel_size=1), {**data, 'rewards': raw})
    for given in (None, [.5], [.5, .6, .7]):
        with pytest.raises(ValueError, match='rollout 1 has .* for 2 turns'):
            adapters.slime_rewards('igpo')(None, [samples[0], samples[1], slime_sample(2, 'b', [1, 0, 1], 0., given)])


def test_prime_rl_checks_turn_rewards_and_reads_none_as_missing():
    rollout = lambda reward, turns: trace(torch.tensor([1, 0, 1]), reward, turns)
    longer = rollout(0., None)
    longer.info = {'turn_rewards': [1., 0., 0.]}
    with pytest.raises(ValueError, match='numbers'): adapters.prime_credit('tspo', [longer])
    longer.info = {}
    with pytest.raises(ValueError, match='1 has 0'): adapters.prime_credit('tspo', [rollout(0., [1., 0.]), longer])
    group = [rollout(0., [1., 0.]), rollout(0., [0., 0.]), rollout(0., [None, 0.])]
    found = adapters.prime_credit('tspo', group)
    close(torch.tensor(found), torch.tensor([[1., 0], [-1, 0], [0, 0]]))
    assert adapters.prime_credit('tspo', [rollout(1., [1., 0.])]) == [[0., 0.]]
    assert adapters.prime_credit('grpo', []) == []
    for name in ('reinforce++', 'ppo', 'dapo'):
        with pytest.raises(ValueError, match='group'): adapters.prime_credit(name, group)


def test_a_trace_that_forks_has_its_turns_once_and_leaves_out_what_is_not_trained():
    "Two branches share the first turn; the second turn of the first branch is an agent's that is not trained."
    one, two = trace(torch.tensor([1, 0, 1]), 0., [1., 0.]), trace(torch.tensor([1, 0, 1, 0, 1]), 0., [0., 0., 7.])
    shared, other, third = (two.nodes[:2], two.nodes[2:4], two.nodes[4:])
    two.branches = [SimpleNamespace(trainable=False, nodes=[*shared, *third]),
                    SimpleNamespace(trainable=True, nodes=[*shared, *other])]
    found = adapters.prime_credit('tspo', [one, two])
    assert [len(x) for x in found] == [2, 2] and third[1].advantages is None
    close(torch.tensor(found), torch.tensor([[1., 0.], [-1., 0.]]))


# ---- verl: several rows of a rollout, turn rewards ----

def verl_batch(mask, rewards, uid, **others):
    return SimpleNamespace(batch={'response_mask': mask, 'token_level_rewards': rewards, **others},
                           non_tensor_batch={'uid': np.array(uid, dtype=object)})


@pytest.mark.parametrize('name', ['tspo', 'igpo', 'grpo', 'carl'])
def test_rows_of_a_verl_session_are_one_rollout(name):
    "The same rollouts in one row each and, shuffled, in two; verl copies the outcome to the end of every row."
    mask = torch.tensor([[1, 1, 0, 1, 0, 1, 0, 0], [1, 0, 1, 0, 1, 1, 0, 0]])
    rewards = torch.tensor([[.5, 0, 0, .25, 0, 1., 0, 0], [0, 0, .25, 0, 0, 0, 0, 0]])
    values = torch.rand(2, 8, generator=torch.Generator().manual_seed(3))
    whole, returns = estimator(name)(rewards, mask, index=['q', 'q'], values=values)
    cut = lambda x, end: torch.stack([torch.cat([x[0, :4], torch.zeros(4)]), torch.cat([x[1, :6], torch.zeros(2)]),
                                      torch.cat([torch.zeros(2), x[0, 4:6], torch.zeros(4)])]) + end
    copies = torch.zeros(3, 8)
    copies[0, 3] = 1.                                            # the outcome of the last row, on the first row's end
    data = verl_batch(cut(mask.float(), 0), cut(rewards, copies), ['q'] * 3, values=cut(values, 0))
    data.batch = {k: x[[2, 1, 0]] for k, x in data.batch.items()}
    hook = adapters._knowing_rollouts(None, 'ours', estimator(name))
    hook(data, batch_keys=['q_0_1', 'q_1_0', 'q_0_0'], adv_estimator='ours', config=None)
    for given, wanted in ((data.batch['advantages'], whole), (data.batch['returns'], returns)):
        close(given[[2, 1, 0]], cut(wanted, 0))


def test_other_estimators_of_verl_are_left_alone():
    compute = lambda data, batch_keys, adv_estimator, **settings: (data, batch_keys, adv_estimator, settings)
    hook = adapters._knowing_rollouts(compute, 'ours', None)
    assert hook(1, batch_keys=['a_0_0'], adv_estimator='grpo', gamma=.5) == (1, ['a_0_0'], 'grpo', {'gamma': .5})


def test_skyrls_last_steps_are_refused_and_whole_rows_are_not():
    estimate = adapters._whole_rollouts(estimator('grpo'))
    last = dict(token_level_rewards=torch.zeros(2, 2), response_mask=torch.ones(2, 2), index=np.array(['q', 'q']))
    with pytest.raises(ValueError, match='step_wise_trajectories=false'): estimate(**last)
    estimate(**{**last, 'index': ['q', 'q']})                       # one turn each, equally long
    estimate(**{**last, 'response_mask': torch.tensor([[1., 1.], [1., 0.]])})


# ---- TRL, trained end to end ----

TINY = {'model': 'data/tiny_base', 'average': 'token-mean', 'track': '', 'keep': 1, 'seed': 201, 'steps': 1,
        'minibatches': 1, 'eval_every': 1, 'dev_questions': 4, 'test_questions': 4, 'questions': 300,
        'questions_per_step': 6, 'log_kl': False}


@pytest.fixture(autouse=True)
def quiet(monkeypatch): monkeypatch.setenv('TRL_EXPERIMENTAL_SILENCE', '1')


@pytest.fixture
def trl():
    pytest.importorskip('trl', reason='pip install credit_rl[train]')
    from credit_rl import trl_trainer
    return trl_trainer


def weights(model): return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize('method', ['tspo', 'igpo'])
def test_a_step_under_trl_is_a_step_of_our_own_loop(trl, method, tmp_path, monkeypatch):
    "Same seed, same rollouts, same advantages, one update: the weights that come out are the same."
    from credit_rl.settings import make_config
    from credit_rl.train import begin_run, train_step
    # two averages: a mean over tokens is TRL's own, the other is part of the advantages
    settings = {**TINY, 'method': method, 'average': {'tspo': 'token-mean', 'igpo': 'sequence-mean-token-mean'}[method]}
    run = begin_run(make_config({**settings, 'run': str(tmp_path / 'ours')}), lambda line: None)
    run.wake()
    before, metrics = weights(run.setup.model), train_step(run, 1)
    ours, kept = weights(run.setup.model), {}
    original = trl.make_setup
    monkeypatch.setattr(trl, 'make_setup', lambda *a: kept.setdefault('stage', original(*a)))
    make = trl.credit_trainer
    def watched():
        class Watched(make()):
            def _compute_loss(self, model, inputs):
                kept.setdefault('shapes', []).append((inputs['advantages'].shape, inputs['completion_ids'].shape))
                kept['credit'] = self.turn_credit
                return super()._compute_loss(model, inputs)
        return Watched
    monkeypatch.setattr(trl, 'credit_trainer', watched)
    trl.trl_run({**settings, 'run': str(tmp_path / 'theirs')}, lambda line: None)
    theirs = weights(kept['stage'].model)
    assert metrics['trained_tokens'] > 0 and kept['credit'].batch.credit.advantages.any()
    for advantages, ids in kept['shapes']: assert advantages == ids and len(ids) == 2
    moved = torch.cat([(ours[n] - before[n]).flatten() for n in before])
    gap = torch.cat([(ours[n] - theirs[n]).flatten() for n in before])
    assert moved.norm() > .1 and gap.norm() < .03 * moved.norm(), (moved.norm(), gap.norm())


def test_trl_trains_for_a_few_steps_and_keeps_its_dev_scores(trl, tmp_path):
    said = []
    folder = trl.trl_run({**TINY, 'method': 'igpo', 'steps': 3, 'minibatches': 2, 'dev_questions': 40, 'tree': True,
                          'run': str(tmp_path / 'run')}, said.append)
    assert 'tree=True' in said[0]                                     # what only our loop heeds is said
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    assert [row['step'] for row in rows] == [0, 1, 2, 3] and all(0 <= row['dev_em'] <= 1 for row in rows)
    assert len({row['dev_em'] for row in rows}) > 1 and 'step 3/3' in said[-1]
    assert 'method: igpo' in (folder / 'params.yaml').read_text()


def test_trl_refuses_what_it_cannot_serve(trl, tmp_path):
    run = lambda **given: trl.trl_run({**TINY, 'run': str(tmp_path / 'x'), **given}, lambda line: None)
    with pytest.raises(ValueError, match='critic'): run(method='ppo')
    for given in ({'lora': {'r': 8}}, {'resume': True}, {'learner': 'deepspeed'}):
        with pytest.raises(ValueError, match=f'does not heed {[*given][0]}='): run(method='tspo', **given)
    with pytest.raises(ValueError, match='further'): run(method='tspo', loss={'entropy': .1})
    rows = [{'prompt': 'a', 'question': json.dumps({'id': i, 'text': 'a', 'answers': ['b']})} for i in 'aab']
    with pytest.raises(ValueError, match='groups'): trl.play_rows(None, None, rows, None, 0)
    edited = replace(example_group().trajectories[0])
    edited = replace(edited, turns=(replace(edited.turns[0], context_ids=(1,)), *edited.turns[1:]))
    with pytest.raises(ValueError, match='one row for each'):
        trl.trl_rollouts([Group(edited.question, [edited])])
    class Base:
        def __init__(self, **settings): self.args = SimpleNamespace(loss_type='grpo', temperature=1.)
    credit = trl.TurnCredit(get_method('tspo').bind(), None)
    cold = trl.TurnCredit(get_method('tspo').bind(), None, trl.SamplingParams(.5))
    with pytest.raises(ValueError, match='temperature'):
        type('T', (trl.CreditMixin, Base), {})(credit=cold)
    with pytest.raises(ValueError, match="'dapo'"): type('T', (trl.CreditMixin, Base), {})(credit=credit)
    with pytest.raises(ValueError, match='credit'):
        type('T', (trl.CreditMixin, Base), {})(credit=credit, tools=[print])


def test_a_missing_outcome_is_none_to_trl(trl):
    credit = trl.TurnCredit(get_method('tspo').bind(), None)
    credit.rewards, credit.first = {'outcome': torch.tensor([1., torch.nan, 0.])}, 1
    assert credit.outcome(['a', 'b']) == [None, 0.]


# ---- what a trainer did with the rewards of turns ----

PAID = Arrays(torch.tensor([[1, 1, 0, 1], [1, 0, 0, 1], [1, 0, 1, 0], [1, 0, 1, 1]]), ['q'] * 4, [1., 0., 0., 0.],
              [[0., 0.], [1., 0.], [.5, 0.], [0., 0.]])


@pytest.mark.parametrize('made, words', [
    (lambda: assign_arrays('grpo', replace(PAID, turns=None)).advantages, ('grpo on outcomes alone', 'dropped')),
    (lambda: assign_arrays('grpo', replace(PAID, turns=None, outcome=[1., 1., .5, 0.])).advantages * .5,
     ('grpo times 0.5', 'sums of all rewards', 'same')),
    (lambda: assign_arrays('igpo', PAID).advantages, ('igpo on what each turn earned',)),
    (lambda: torch.where(PAID.mask, 0., 0.), ('All advantages are 0', '2 of 2 turns', 'trained at 0')),
    (lambda: torch.tensor([[2., 2, 0, 2], [1., 0, 0, 1], [3., 0, 3, 0], [-1., 0, -1, -1]]),
     ('No rule of ours', 'All turns of a rollout get the same')),
    (lambda: torch.tensor([[2., 1, 5, 2], [1., 0, 0, 1], [3., 0, 0, 0], [-1., 0, -1, 1]]),
     ('No rule of ours', '2 of 8 turns tokens differ', '1 tokens that the model did not write'))])
def test_what_a_trainer_did_with_turn_rewards_is_said(made, words):
    said, table = adapters.explain_advantages(PAID, made())
    for word in words: assert word in said, said
    assert table.earned.tolist() == [0., 0., 1., 0., .5, 0., 0., 0.] and table.tokens.sum() == 10


def test_turn_ids_part_turns_that_a_mask_joins():
    "Two turns side by side, the second with a hole: as if a token of the environment stood between."
    apart = Arrays([[1, 1, 0, 1, 1], [1, 1, 0, 1, 1]], ['q', 'q'], [0., 0.], [[1., 0.], [0., .5]])
    joined = replace(apart, mask=[[1, 1, 1, 0, 1], [1, 1, 1, 0, 1]], turn_ids=[[4, 4, 9, 9, 9]] * 2)
    ours, wanted = (assign_arrays('igpo', x).advantages for x in (joined, apart))
    torch.testing.assert_close(ours[:, [0, 1, 2, 4]], wanted[:, [0, 1, 3, 4]])
    said, table = adapters.explain_advantages(joined, ours)
    assert 'igpo on what each turn earned' in said and table.turn.tolist() == [0, 1, 0, 1]
    assert table.tokens.tolist() == [2] * 4 and table.earned.tolist() == [1., 0., 0., .5]
    with pytest.raises(ValueError, match='turn_ids'): replace(joined, turn_ids=[[1, 1]])
    with pytest.raises(ValueError, match='earlier'): replace(joined, turn_ids=[[1, 2, 1, 1, 1]] * 2).token_turns


def test_a_batch_in_a_file_is_explained(tmp_path, capsys):
    "With rewards of turns in a column of their own, or on tokens whose turns are named."
    listed = [{'response_mask': [1, 0, 1], 'uid': 'q', 'reward': r, 'turn_rewards': t, 'advantages': [a, 0., a]}
              for r, t, a in ((1., [0., 0.], 1.), (0., [1., 0.], -1.))]
    named = [{'response_mask': [1, 1, 1], 'turn_ids': [3, 3, 5], 'uid': 'q', 'advantages': [a, a, b],
              'token_level_rewards': [0., r, end]} for r, end, a, b in ((1., 0., 1., 0.), (0., 0., -1., 0.))]
    verl = [{**row, 'token_level_rewards': [0., 0., row.pop('reward')]} for row in map(dict, listed)]  # beside turn_rewards
    for rows, said in ((listed, 'grpo on outcomes alone'), (verl, 'grpo on outcomes alone'), (named, 'what each turn earned')):
        (tmp_path / 'batch.jsonl').write_text('\n'.join(map(json.dumps, rows)))
        adapters.main([str(tmp_path / 'batch.jsonl')])
        assert said in capsys.readouterr().out
    pd.DataFrame(listed).to_csv(tmp_path / 'batch.csv', index=False)
    adapters.main([str(tmp_path / 'batch.csv')])
    assert 'grpo on outcomes alone' in capsys.readouterr().out
    for line, words in (('{"response_mask": [1]}', 'advantages'), (json.dumps({**listed[0], 'uid': None}), 'uid'),
                        ('{"response_mask": [1, 0', 'is not JSON'), (json.dumps(named[0]), 'turn_ids'),
                        (json.dumps({**listed[0], 'turn_rewards': [1.]}), 'rollout 1 has 1 turn_rewards for 2 turns')):
        (tmp_path / 'batch.jsonl').write_text(f'{json.dumps(listed[0])}\n{line}')
        with pytest.raises(SystemExit): adapters.main([str(tmp_path / 'batch.jsonl')])
        assert words in capsys.readouterr().err
    (tmp_path / 'batch.jsonl').write_text('\n'.join(json.dumps({**row, 'turn_rewards': [0., 0.]}) for row in named))
    with pytest.raises(SystemExit): adapters.main([str(tmp_path / 'batch.jsonl')])
    assert 'leave one out' in capsys.readouterr().err


def test_levels_are_averaged_where_a_rule_gives_all_turns_one_credit():
    "As `assign` on the texts: a wrong rollout that found something does not come before a right one."
    levels = torch.tensor([[0., 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    batch = Arrays([[1, 0, 1, 0, 1, 0, 1]] * 3, [0, 0, 0], torch.tensor([1., 0, 0]), turns=levels)
    for name in ('outcome+folr/group', 'outcome+folr/mean'):
        ours = assign(get_method(name), [example_group()], lambda layout, needs: None).credit.advantages
        wanted = [ours[i][ours[i] != 0].unique().tolist() or [0.] for i in range(3)]
        assert assign_arrays(name, batch).advantages[:, 0].tolist() == pytest.approx([x for (x,) in wanted], abs=1e-6)


def test_turns_that_follow_one_another_were_answered_too():
    batch = Arrays([[1, 1, 1, 1]] * 2, [0, 0], [0., 0.], turns=[[1., 0.], [0., 0.]], turn_ids=[[0, 0, 1, 1]] * 2)
    apart = Arrays([[1, 1, 0, 1, 1]] * 2, [0, 0], [0., 0.], turns=[[1., 0.], [0., 0.]])
    for name in ('mt-grpo', 'mt-grpo*'):
        found, wanted = (assign_arrays(name, x).advantages for x in (batch, apart))
        assert found.abs().sum() > 0 and torch.equal(found, wanted[:, [0, 1, 3, 4]])


def test_whole_numbers_are_credited_as_decimal_ones():
    rewards, mask = torch.tensor([[0, 1], [0, 0]]), torch.ones(2, 2, dtype=torch.long)
    found = estimator('grpo')(rewards, mask, index=[0, 0])[0]
    assert found.abs().min() > .9 and torch.equal(found, estimator('grpo')(rewards.float(), mask, index=[0, 0])[0])


def test_rollouts_of_three_turns_are_explained_though_a_rule_of_two_refuses_them():
    batch = Arrays([[1, 0, 1, 0, 1]] * 2, [0, 0], torch.tensor([1., 0.]), turns=[[0., 0, 0], [1, 0, 0]])
    said, table = adapters.explain_advantages(batch, assign_arrays('grpo', replace(batch, turns=None)).advantages)
    assert 'grpo' in str(table) + said
