"""The CPU in float64 against a device in float32: what models say, the credit that follows, the weights after a step,
and the engine's ids. A device that is right but for a planted fault must be noticed."""
import contextlib
import dataclasses

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import credit_rl.learner
from credit_rl.engine import HFEngine, SamplingParams, ScriptedEngine
from credit_rl.learner import FrozenModels, Learner, Optimiser, PlainBackend, make_critic
from credit_rl.methods import METHODS
from credit_rl.parts import assign
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.rollout import rollout
from credit_rl.scoring import gold_templates
from credit_rl.tiny import NOISY, act, tiny_environment, tiny_tokenizer
from credit_rl.trajectory import Group
from credit_rl.world import make_world

NAMES = ('grpo', 'tips', 'tspo', 'igpo', 'vspo', 'ppo', 'carl')
CLOSE = 1e-4     # largest difference, over 1 and the size of what is compared
SEES = ('logp', 'ref_logp', 'entropy', 'values', 'gold_logp', 'teacher_logp')


def model(seed, vocabulary):
    "A small Qwen2 whose weights are ten times as large as usual: what it says depends on what it reads."
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=.2, tie_word_embeddings=True, pad_token_id=None, bos_token_id=None,
        eos_token_id=None))


def groups_played(tokenizer, questions=4):
    "Groups of noisy games, right and wrong, one a question. The first's turns are read in contexts of their own."
    chat, world = Chat(PROTOCOLS['tiny'], tokenizer), make_world('train', 6, size=60, questions=questions)
    groups = rollout(ScriptedEngine(lambda text, rng: act(text, rng, NOISY), tokenizer), tiny_environment(world, chat),
                     world.questions, group_size=4, seed=1)
    apart = [dataclasses.replace(t, turns=[dataclasses.replace(turn, context_ids=t.prompt_ids) for turn in t.turns])
             for t in groups[0].trajectories]
    return [Group(groups[0].question, apart), *groups[1:]], chat


class PlainSGD(PlainBackend):
    "Gradient descent shows a gradient's size, which AdamW hides."
    def make_optimiser(self, groups, optimiser): return torch.optim.SGD(groups, lr=optimiser.learning_rate)


def step_of(name, groups, chat, device, dtype):
    "One `assign` and one step of a method: dict of tensors on the CPU."
    method, size = METHODS[name], len(chat.tokenizer)
    policy, other = (model(seed, size).to(device, getattr(torch, dtype)) for seed in (0, 1))
    critic = make_critic(policy, **method.critic) if method.critic else None
    if critic:
        torch.manual_seed(2)
        for p in critic.head.parameters(): p.data = torch.randn(p.shape).to(p) / 8      # or all values were alike
    learner = Learner(policy, dataclasses.replace(method.loss, kl=.1, entropy=.01),
                      Optimiser(.02, .01, minibatches=2, row_tokens=400), critic,
                      FrozenModels(other, teacher_every=0), backend=PlainSGD())
    golds = {who: gold_templates(chat, groups, asked.schema) for who, asked in method.needs.golds.items()}
    sees = dataclasses.replace(method.needs, logp=True, entropy=True, ref_logp=True, ends=False)
    batch = assign(method, groups, lambda layout, asks: learner.evaluate(layout, sees, golds),
                   torch.Generator().manual_seed(0))
    log = learner.step(batch.layout, batch.seen, batch.credit)
    found = {n: getattr(batch.seen, n) for n in SEES if getattr(batch.seen, n) is not None}
    weights = torch.cat([w.detach().flatten().double().cpu() for w in learner.weights().values()])
    return {n: x.detach().double().cpu() for n, x in found.items()} | {
        'advantages': batch.credit.advantages.double().cpu(), 'weights': weights,
        'loss': torch.tensor(log['loss']).double(), 'grad_norm': torch.tensor(log['grad_norm']).double()}


def apart(found, wanted):
    "Largest difference of each tensor, over 1 and the size of what was wanted: dict. NaN belongs where NaN is wanted."
    out = {}
    for name, w in wanted.items():
        f = found[name]
        if not torch.equal(f.isnan(), w.isnan()): raise AssertionError(f'{name}: other values are missing')
        out[name] = float(((f - w).abs() / (1 + w.abs())).nan_to_num().max())
    return out


@contextlib.contextmanager
def one_token_late():
    "The device reads every hidden state one token late."
    right = credit_rl.learner.hidden_states
    credit_rl.learner.hidden_states = lambda *args: right(*args).roll(1, -2)
    try: yield
    finally: credit_rl.learner.hidden_states = right


@contextlib.contextmanager
def positions_off_by_one():
    "From the middle of each row on, the device counts positions from one more."
    def off(module, args, kwargs):
        ids = kwargs['input_ids']
        at = kwargs.get('position_ids')
        at = torch.arange(ids.shape[1], device=ids.device)[None] if at is None else at
        return args, {**kwargs, 'position_ids': at + (torch.arange(at.shape[1], device=at.device) >= at.shape[1] // 2)}
    init = Qwen2ForCausalLM.__init__
    def hooked(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.model.register_forward_pre_hook(off, with_kwargs=True)
    Qwen2ForCausalLM.__init__ = hooked
    try: yield
    finally: Qwen2ForCausalLM.__init__ = init


FAULTS = {'one token late': one_token_late, 'positions off by one': positions_off_by_one}


def turns_of(chat, device, dtype):
    "Two kept turns of twelve conversations, then one that was rewound to the middle and went on: ids and logps."
    engine = HFEngine(model(0, len(chat.tokenizer)).to(device, getattr(torch, dtype)), chat.tokenizer, 400)
    generator = torch.Generator().manual_seed(3)
    draw = lambda n: torch.randint(len(chat.tokenizer), (n,), generator=generator).tolist()
    said, keys, ids, logps = [draw(10 + 7 * (i // 2)) for i in range(12)], list(range(12)), [], []
    for turn in range(3):
        if turn == 2:                                             # everyone forgets a part of what was said
            said = [s[:len(s) - 9] + draw(5) for s in said]
            for key, s in zip(keys, said): engine.kept.rewind(key, s)
        found = engine.generate(said, SamplingParams(max_tokens=20, temperature=2.), keys=keys,
                                seeds=[100 * turn + k for k in keys])
        ids += sum(found.ids, [])
        logps += sum(found.logps, [])
        said = [s + new + draw(4) for s, new in zip(said, found.ids)]
    return ids, torch.tensor(logps).double()


def section(record, a):
    groups, chat = groups_played(tiny_tokenizer(), 1 if a.small else 4)
    wanted = {}
    for name in NAMES:
        wanted[name] = step_of(name, groups, chat, 'cpu', 'float64')
        assert wanted[name]['advantages'].abs().max() > 0, name
        found = apart(step_of(name, groups, chat, a.device, 'float32'), wanted[name])
        record.put(f'{name}, float32', found)
        assert max(found.values()) <= CLOSE, f'{name}: {found}'
    for name in NAMES[-1:] if a.small else NAMES:
        record.put(f'{name}, bfloat16', apart(step_of(name, groups, chat, a.device, 'bfloat16'), wanted[name]))
    ids, logps = turns_of(chat, 'cpu', 'float64')
    others, values = turns_of(chat, a.device, 'float32')
    record.put('engine', {'tokens': len(ids), 'equal': sum(i == j for i, j in zip(ids, others)),
                          'logps': float((logps - values).abs().max())})
    assert ids == others and (logps - values).abs().max() <= CLOSE, 'the engine writes something else'
    for fault, planted in FAULTS.items():
        with planted(): found = apart(step_of('igpo', groups, chat, a.device, 'float32'), wanted['igpo'])
        record.put(f'planted: {fault}', found)
        assert max(found.values()) > 100 * CLOSE, f'a planted fault was not noticed: {fault}'
