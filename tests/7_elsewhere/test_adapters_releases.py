"""Our adapters against the releases themselves: the signatures that they rest on, read from the packages' source, and
their own functions where they can be imported. SEAMS holds what the releases named beside it have; the nightly workflow
installs the newest ones and fails when a signature is another."""
import asyncio
import inspect
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from tools import releases

from credit_rl import adapters
from credit_rl.adapters import estimator

SEAMS = {  # (module, function) → its arguments
    # verl 0.9.1
    ('verl.trainer.ppo.core_algos', 'register_adv_est'): ['name_or_enum'],
    ('verl.trainer.ppo.v1.utils', 'compute_advantage_for_multi_trajectories'): [
        'data', 'batch_keys', 'adv_estimator', 'gamma', 'lam', 'num_repeat', 'norm_adv_by_std_in_grpo', 'config'],
    ('verl.experimental.agent_loop.agent_loop', 'AgentLoopOutput.as_dict'): ['self'],
    ('verl.experimental.agent_loop.tool_agent_loop', 'ToolAgentLoop.run'): [
        'self', 'sampling_params', 'priority', '**kwargs'],
    # SkyRL 0.3.0
    ('skyrl.backends.skyrl_train.utils.ppo_utils', 'register_advantage_estimator'): ['name'],
    ('skyrl.backends.skyrl_train.utils.ppo_utils', 'compute_advantages_and_returns'): [
        'token_level_rewards', 'response_mask', 'index', 'adv_estimator', 'config', 'values', 'grpo_norm_by_std',
        'gamma', 'lambd', '**kwargs'],
    # OpenRLHF 0.11.2
    ('openrlhf.trainer.ppo_utils.experience_maker', 'RemoteExperienceMaker.compute_advantages_and_returns'): [
        'self', 'experiences'],
    ('openrlhf.trainer.ppo_utils.length_penalty', 'apply_length_penalties'): ['experiences', 'args'],
    # AReaL 1.0.4
    ('areal.trainer.ppo.actor', 'PPOActor.compute_advantages'): ['self', 'data'],
    # TRL 1.16
    ('trl.trainer.grpo_trainer', 'GRPOTrainer._generate_and_score_completions'): ['self', 'inputs'],
}
FIELDS = {  # (module, class) → what is read of it
    ('verl.experimental.agent_loop.agent_loop', 'AgentLoopOutput'): {'response_mask', 'extra_fields', 'reward_score'},
    ('openrlhf.trainer.ppo_utils.experience', 'Experience'): {
        'index', 'rewards', 'action_mask', 'values', 'advantages', 'returns', 'kl', 'info'},
    ('areal.trainer.ppo.actor', 'PPOActor'): {'kl_ctl'},
    ('verifiers.v1.graph', 'MessageNode'): {'sampled', 'mask', 'advantages', 'token_ids'},      # verifiers 0.4
    ('verifiers.v1.trace', 'Trace'): {'id', 'nodes', 'branches', 'reward', 'info', 'has_error', 'agent'},
    ('verifiers.v1.trace', 'Branch'): {'nodes', 'trainable'},
    ('verifiers.v1.trace', 'AgentInfo'): {'trainable'},
}
LINES = {  # module → texts in it that say how it calls us, or what it reads
    'verl.trainer.ppo.v1.trainer_base': ('compute_advantage_for_multi_trajectories(', 'batch_keys=batch.keys'),
    'verl.trainer.ppo.v1.agent_loop_tq': ('f"{uid}_{session_id}_{i}"', 'output.reward_score = final_output.reward'),
    'verl.trainer.ppo.ray_trainer': ('adv_estimator_fn(**adv_kwargs)', '"token_level_rewards"', '"response_mask"'),
    'skyrl.train.trainer': ('torch.ones_like(last_step_response_mask, dtype=torch.float)',
                            'index = np.array(data.metadata["uids"])', 'index=data.metadata["uids"]'),
    'openrlhf.trainer.ppo_utils.experience_maker': (
        'args.rollout.n_samples_per_prompt', 'args.algo.kl.use_loss', 'args.reward.clip_range', 'self.kl_ctl.value',
        'apply_length_penalties(experiences, args)'),
    'areal.trainer.ppo.actor': ('batched_call(self._compute_advantages, data)',
                                'torch.roll(loss_mask, shifts=-1, dims=-1)', '"begin_of_trajectory"'),
}


@pytest.mark.parametrize('module, name', SEAMS)
def test_a_release_has_the_signature_that_its_adapter_was_written_for(module, name):
    assert releases.arguments(module, name) == SEAMS[module, name]


@pytest.mark.parametrize('module, name', FIELDS)
def test_a_release_has_the_fields_that_its_adapter_reads(module, name):
    assert FIELDS[module, name] <= releases.members(module, name)


@pytest.mark.parametrize('module', LINES)
def test_a_release_calls_as_its_adapter_was_written_for(module):
    text = ' '.join(releases.source(module).split())
    assert [line for line in LINES[module] if line not in text] == []


@pytest.mark.parametrize('module, name, ours', [
    ('skyrl.backends.skyrl_train.utils.ppo_utils', 'compute_advantages_and_returns', estimator('grpo')),
    ('verl.trainer.ppo.v1.utils', 'compute_advantage_for_multi_trajectories',
     adapters._knowing_rollouts(None, 'ours', lambda **given: (1, 2)))])
def test_our_functions_take_what_the_signatures_say(module, name, ours):
    "Called with every argument of the pinned signature by its name."
    given = dict.fromkeys(x for x in SEAMS[module, name] if not x.startswith('*'))
    inspect.signature(ours, follow_wrapped=False).bind(**given)


# ---- the releases' own functions ----

def test_verls_trainer_gets_turns_of_all_rows(monkeypatch):
    "Registered with verl, called by verl's own function: a session of two rows, beside one of one row."
    algos, utils = releases.load('verl.trainer.ppo.core_algos'), releases.load('verl.trainer.ppo.v1.utils')
    monkeypatch.setitem(sys.modules, 'verl.trainer.ppo.v1.trainer_base', SimpleNamespace(
        compute_advantage_for_multi_trajectories=utils.compute_advantage_for_multi_trajectories))
    name = adapters.register_verl('tspo', 'credit_rl/test')
    assert algos.get_adv_estimator_fn(name)
    hook = sys.modules['verl.trainer.ppo.v1.trainer_base'].compute_advantage_for_multi_trajectories
    from verl.protocol import DataProto
    data = DataProto.from_dict(tensors={
        'response_mask': torch.tensor([[1, 0, 1], [1, 1, 0], [1, 0, 1]]),
        'token_level_rewards': torch.tensor([[0., 0., 0.], [1., 0., 0.], [0., 0., 0.]])},
        non_tensors={'uid': np.array(['q'] * 3, dtype=object)})
    found = hook(data, batch_keys=['q_0_1', 'q_0_0', 'q_1_0'], adv_estimator=name, config=None)
    wanted = torch.tensor([[0., 0., 0.], [1., 1., 0.], [-1., 0., 0.]])
    assert_close(found.batch['advantages'], wanted, atol=1e-5, rtol=0)
    plain = hook(data, batch_keys=['q_0_1', 'q_0_0', 'q_1_0'], adv_estimator='grpo')          # verl's own
    assert plain.batch['advantages'].shape == (3, 3)


@pytest.mark.parametrize('where', ['loop', 'reward function'])
def test_verls_own_outputs_carry_turn_rewards(where):
    "Two rows of a session with three turns; verl copies the score to both."
    loops = releases.load('verl.experimental.agent_loop.agent_loop')
    row = lambda mask: loops.AgentLoopOutput(prompt_ids=[1], response_ids=[2] * len(mask), response_mask=mask,
                                             metrics=loops.AgentLoopMetrics())
    class Loop:
        async def run(self, sampling_params, **kwargs): return [row([1, 1, 0, 1]), row([1])]
    outputs = asyncio.run(adapters.verl_loop(Loop)().run({}))
    for output in outputs:
        output.reward_score = 2.
        told = {'turn_rewards': [.5, None, 0.]}
        if where == 'reward function': output.extra_fields['reward_extra_info'] = {'acc': 1., **told}
        else: output.extra_fields.update(told)
    first, last = (output.as_dict() for output in outputs)
    assert first['rm_scores'][:3].tolist() == [.5, 0, 0] and first['rm_scores'][3].isnan()
    assert last['rm_scores'].tolist() == [2.]
    assert last['extra_fields'] == ({'reward_extra_info': {'acc': 1.}} if where == 'reward function' else {})
    for key in ('prompts', 'responses', 'response_mask'): assert isinstance(last[key], torch.Tensor)
    outputs[1].extra_fields['reward_extra_info'] = {'turn_rewards': [1.]}
    with pytest.raises(ValueError, match='numbers'): outputs[1].as_dict()
    outputs[0].reward_score = None
    outputs[0].extra_fields['reward_extra_info'] = {'turn_rewards': [0.] * 3}
    with pytest.raises(ValueError, match='score'):
        type(outputs[0]).model_construct(outputs[0].model_fields_set - {'reward_score'}, **dict(outputs[0])).as_dict()


def test_openrlhfs_own_experiences_get_credit_after_its_length_penalty(monkeypatch):
    "A truncated rollout's reward is scaled to 0 by OpenRLHF; then the pair is right and wrong."
    releases.stub(monkeypatch, 'flash_attn', 'vllm')
    releases.load('openrlhf.trainer.ppo_utils.experience_maker')
    from openrlhf.trainer.ppo_utils.experience import Experience
    Maker = adapters.openrlhf_maker('grpo')
    maker = Maker.__new__(Maker)
    names = SimpleNamespace
    maker.strategy = names(args=names(
        algo=names(kl=names(use_loss=True)), rollout=names(n_samples_per_prompt=2, max_new_tokens=8),
        reward=names(clip_range=(-10, 10), overlong_buffer_len=None, stop_properly_penalty_coef=0.)))
    maker.kl_ctl = names(value=0.)
    e = Experience(index=[0, 1], action_mask=torch.ones(2, 2).bool(), rewards=torch.ones(2),
                   truncated=torch.tensor([False, True]), info={'reward': torch.ones(2)})
    maker.compute_advantages_and_returns([e])
    assert_close(e.advantages, torch.tensor([[1., 1.], [-1., -1.]]), atol=1e-5, rtol=0)
    assert e.info['reward'].tolist() == [1., 0.]


def test_verifiers_own_traces_get_credit_on_their_nodes(monkeypatch):
    releases.stub(monkeypatch, 'renderers', 'prime_runs', 'prime_sandboxes', 'prime_tunnel', 'anthropic', 'openai',
                  'mcp', 'gepa', 'httpx2', 'h11', 'math_verify', 'tenacity', 'uvicorn')
    graph, trace = releases.load('verifiers.v1.graph'), releases.load('verifiers.v1.trace')
    from verifiers.v1.types import AssistantMessage, UserMessage
    said = lambda n: graph.MessageNode(message=AssistantMessage(content='x'), sampled=True, token_ids=[0] * (n + 1),
                                       mask=[False] + [True] * n, logprobs=[0.] * n)
    asked = lambda: graph.MessageNode(message=UserMessage(content='x'), token_ids=[0], mask=[False])
    def rollout(turns):
        nodes = [asked(), said(2), asked(), said(1)]
        for i, node in enumerate(nodes): node.parent = i - 1 if i else None
        branch = trace.Branch(index=0, nodes=nodes)
        return SimpleNamespace(id='t', nodes=nodes, branches=[branch], reward=0., info={'turn_rewards': turns}), branch
    pairs = [rollout([1., 0.]), rollout([0., 0.])]
    adapters.prime_credit('tspo', [t for t, _ in pairs])
    found = torch.tensor([branch.advantages for _, branch in pairs])
    assert_close(found, torch.tensor([[0., 0, 1, 1, 0, 0, 0], [0., 0, -1, -1, 0, 0, 0]]), atol=1e-5, rtol=0)
