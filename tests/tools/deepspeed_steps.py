"""A few updates of a learner on two small batches. As a program, one process per rank: `deepspeed_steps.py OUT.pt
OTHER STAGE ...`; OTHER is the OUT.pt of another number of ranks, whose checkpoints are gone on from."""
import contextlib
import dataclasses
import faulthandler
import gc
import os
import sys
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from credit_rl.engine import ScriptedEngine
from credit_rl.layout import pack, take
from credit_rl.learner import BadStep, FrozenModels, Learner, Optimiser, PlainBackend, make_critic, saved_policy
from credit_rl.parts import Loss, Needs, assign
from credit_rl.methods import METHODS
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.rollout import rollout
from credit_rl.scoring import gold_templates
from credit_rl.sharded import DeepSpeedBackend, SavedPieces
from credit_rl.tiny import NOISY, act, tiny_environment, tiny_tokenizer
from credit_rl.trajectory import Group, example_group
from credit_rl.world import make_world

STEPS = 5
RATES = (.1, .03)  # of policy and critic under SGD
ADAM = (1e-3, 3e-3)  # of both under AdamW
# or these small weights would never be spread
SPREAD_ALL = {'zero_optimization': {'stage3_param_persistence_threshold': 0}}


LETTER = ('tips', 'carl')  # each by AdamW and by SGD, in mini-batches of which the last is one trajectory
UNTIED = 'carl, untied'  # output embeddings of its own, which the critic's loss doesn't reach; weights decay fast
# gold answers; a critic of its own and a teacher that is refreshed; a shared critic, twice
METHOD_CASES = {'igpo': None, 'tips': 2, 'carl': None, UNTIED: None}  # teacher_every


def model(seed, vocabulary, tied=False):
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                    num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied, pad_token_id=None,
                    bos_token_id=None, eos_token_id=None))


def played(tokenizer):
    "Groups of 4, 2, 3 and 4 noisy games; the second's third turn is read in a context of its own, so in two rows."
    chat = Chat(PROTOCOLS['tiny'], tokenizer)
    world = make_world('train', 6, size=60, questions=4)
    groups = rollout(ScriptedEngine(lambda text, rng: act(text, rng, NOISY), tokenizer), tiny_environment(world, chat),
                     world.questions, group_size=4, seed=1)
    groups = [Group(g.question, g.trajectories[:n]) for g, n in zip(groups, (4, 2, 3, 4))]
    first, second, *others = groups[0].trajectories
    turns = [dataclasses.replace(t, context_ids=second.prompt_ids) if k == 1 else t for k, t in enumerate(second.turns)]
    return [Group(groups[0].question, [first, dataclasses.replace(second, turns=turns), *others]), *groups[1:]]


def adapted(seed, vocabulary, targets=('q_proj', 'v_proj', 'down_proj')):
    "A model of which only low-rank additions are trained, which begin as zero."
    from peft import LoraConfig, inject_adapter_in_model
    made = inject_adapter_in_model(LoraConfig(r=4, target_modules=list(targets)),
                                   model(seed, vocabulary))
    for name, p in made.named_parameters(): p.requires_grad_('.lora_' in name)
    return made


def grpo():
    "The running example: two mini-batches of two and one trajectories, in micro-batches of one row."
    batch = assign(METHODS['grpo'], [example_group()], look=lambda layout, asks: None)
    parts = dict(loss=Loss(average='token-mean'), optimiser=Optimiser(learning_rate=1e-3, minibatches=2, row_tokens=1))
    return batch.layout, batch.credit, Needs(logp=True), lambda: dict(model=model(0, 100), **parts)


def tspo(**changes):
    "Unequal groups and rows, some micro-batches, warm-up, KL, entropy, a weight per trajectory, and tied embeddings."
    tokenizer, method = tiny_tokenizer(), METHODS['tspo'].bind({'strategy': 'all'})
    batch = assign(method, played(tokenizer), look=lambda layout, asks: None)
    layout = batch.layout
    credit = dataclasses.replace(batch.credit, trajectory_weight=torch.linspace(.5, 1.5, len(layout.groups)))
    optimiser = Optimiser(**dict(learning_rate=1e-3, warmup=6, minibatches=2, row_tokens=2 * layout.ids.shape[1],
                                 clip=.5) | changes)
    parts = dict(loss=Loss(average='group-mean-token-sum', kl=.1, entropy=.01), optimiser=optimiser)
    return layout, credit, Needs(logp=True, ref_logp=True), lambda: dict(
        model=model(0, len(tokenizer), True), frozen=FrozenModels(model(1, len(tokenizer), True)), **parts)


def low_rank(base):
    "GRPO's batch and additions alone; `base`: what the KL is measured from, 'base' or None for a second model."
    *batch, _ = grpo()
    parts = dict(loss=Loss(average='token-mean', kl=.1), optimiser=Optimiser(learning_rate=1e-2, minibatches=2,
                                                                             row_tokens=1))
    return batch[0], batch[1], Needs(logp=True, ref_logp=True), lambda: dict(
        model=adapted(0, 100), frozen=FrozenModels(base or model(0, 100)), **parts)


class SGD:
    "Plain gradient descent in place of AdamW: shows a gradient's size, which AdamW hides."
    def make_optimiser(self, groups, optimiser): return torch.optim.SGD(groups, lr=optimiser.learning_rate)


class PlainSGD(SGD, PlainBackend): pass
class DeepSpeedSGD(SGD, DeepSpeedBackend): pass


def make_learner(parts, backend=None, offload=()):
    "A learner of some parts, some models offloaded. Behind a backend its models read the head in several pieces."
    frozen = dataclasses.replace(parts.get('frozen', FrozenModels()), offload=offload)
    learner = Learner(**{**parts, 'frozen': frozen}, backend=backend)
    for scorer in (learner.scorer, learner.reference, learner.teacher) if backend else ():
        if scorer: scorer.pieces = dataclasses.replace(scorer.pieces, budget=2400)
    return learner


def steps(learner, layout, credit, sees, count=STEPS):
    return [learner.step(layout, learner.evaluate(layout, sees) if sees else None, credit) for _ in range(count)]


def follow(learner, layout, credit, sees, count=STEPS):
    "Logs over some steps, one with a single trajectory's credit and one with none; what it says of rows; weights."
    logs = steps(learner, layout, credit, sees, count)
    for rows in (layout.row_trajectory == 0, layout.row_trajectory < 0):
        logs += steps(learner, layout, dataclasses.replace(credit, advantages=credit.advantages * rows[:, None]), sees,
                      1)
    return {'logs': logs, 'logp': learner.evaluate(layout).logp, 'one': learner.evaluate(take(layout, [0])).logp,
            'weights': weights_of(learner)}


def method_batch():
    "Five trajectories, right and wrong, in six rows of unequal lengths; two, two and one a mini-batch."
    first, second, *_ = played(tiny_tokenizer())
    return [Group(first.question, first.trajectories[1:]), second]


def learn(backend, name, folder=None, rates=ADAM, offload=(), start=None, **how):
    """Five steps of a method; with a folder, from the fourth on by a fresh learner that restored what was saved; with
    `start`, only those from the fourth on, from what was saved there. Then what it says of all and of one trajectory.
    By AdamW policy and critic step apart, by SGD together. In the second step of UNTIED only the critic learns, so
    that the two have steps of their own to count."""
    untied, tokenizer, method = name == UNTIED, tiny_tokenizer(), METHODS[name.split(',')[0]]
    groups, chat = method_batch(), Chat(PROTOCOLS['tiny'], tokenizer)
    golds = {n: gold_templates(chat, groups, g.schema) for n, g in method.needs.golds.items()}
    sees, longest = dataclasses.replace(method.needs, logp=True, ends=False), pack(groups).ids.shape[1]

    def fresh():
        policy = model(0, len(tokenizer), not untied)
        return Learner(policy, dataclasses.replace(method.loss, value_clip=.2),
                       Optimiser(*rates, weight_decay=5. * untied, minibatches=3, row_tokens=2 * longest,
                                 backbone_rate=5e-4, critic_clip=.1, apart=rates == ADAM),
                       make_critic(policy, **method.critic) if method.critic else None,
                       FrozenModels(teacher_every=METHOD_CASES[name], offload=offload), backend=backend(**how))
    learner, logs, seens = fresh(), [], []
    if start: learner.restore(start)
    for step in range(4 if start else 1, STEPS + 1):
        if folder and step == 4:
            learner.save(folder)
            learner = fresh()
            learner.restore(folder)
        batch = assign(method, groups, look=lambda layout, asks: learner.evaluate(layout, sees, golds))
        alone = untied and step == 2
        credit = dataclasses.replace(batch.credit, advantages=0 * batch.credit.advantages) if alone else batch.credit
        logs.append(learner.step(batch.layout, batch.seen, credit))
        learner.tick(step)
        seens.append(batch.seen)
    layout, first = batch.layout, {n: g[:1] for n, g in golds.items()}
    seens += [learner.evaluate(layout, sees, golds), learner.evaluate(take(layout, [0]), sees, first)]
    return {'logs': logs, 'seen': [{n: v for n, v in vars(seen).items() if v is not None} for seen in seens],
            'weights': weights_of(learner),
            'head': {n: w.clone() for n, w in learner.head_weights().items()} if method.critic else {}}


def another_critic(backend, folder, **how):
    "How a learner of UNTIED whose critic leaves the backbone alone refuses the checkpoint of one that moves it."
    policy = model(0, len(tiny_tokenizer()))
    learner = Learner(policy, optimiser=Optimiser(apart=True), backend=backend(**how),
                      critic=make_critic(policy, **{**METHODS['carl'].critic, 'mix': 0.}))
    try: learner.restore(folder)
    except ValueError as e: return str(e)


def weights_of(learner): return {n: w.detach().float().clone() for n, w in learner.weights().items()}


def bad_step(backend):
    "Credit so large that a mini-batch's gradient is not finite: logs when skipped, weights, why another stops."
    layout, credit, sees, parts = grpo()
    broken = dataclasses.replace(credit, advantages=credit.advantages * torch.tensor([[1e38], [1.], [1.]]))
    def learner_that(does):
        how = parts()
        return make_learner({**how, 'optimiser': dataclasses.replace(how['optimiser'], on_bad_step=does)}, backend())
    goes_on, stops, why = learner_that('skip'), learner_that('stop'), None
    logs = steps(goes_on, layout, broken, sees, 1) + steps(goes_on, layout, credit, sees, 1)
    try: steps(stops, layout, broken, sees, 1)
    except BadStep as e: why = str(e), list(e.trajectories)
    return {'logs': logs, 'weights': weights_of(goes_on), 'why': why,
            'finite': all(w.isfinite().all() for w in weights_of(stops).values())}


class Harm:
    "What a stranger's file might hold: whoever reads it calls a function of his choice."
    def __init__(self, mark): self.mark = mark
    def __reduce__(self): return os.mkdir, (str(self.mark),)


def strangers_files(folder, read, mark):
    """Put harm into each file of a checkpoint in turn and read it in some ways: file and way → what was said, and None
    where it was read; whether the harm was done stands under 'harmed'."""
    said = {}
    for path in list(Path(folder, 'deepspeed').glob('*.pt')):
        honest = path.read_bytes()
        torch.save({**torch.load(path, weights_only=False), 'more': Harm(mark)}, path)
        for name, way in read.items():
            try: said[path.name, name] = way(folder)
            except ValueError as e: said[path.name, name] = str(e)
        path.write_bytes(honest)
    return {**said, 'harmed': os.path.exists(mark)}


def cases(adamw, sgd, offload=(), **how):
    "Name, learner and batch of each case, for two backends."
    base = None if adamw is PlainBackend else 'base'
    for name, backend, (*batch, parts) in (('tspo', adamw, tspo()), ('sgd', sgd, tspo(learning_rate=.3, epochs=2)),
                                           ('additions', adamw, low_rank(base)), ('grpo', adamw, grpo())):
        yield name, make_learner(parts(), backend(**how), offload), batch, 2 if name == 'sgd' else STEPS


def plain():
    "What the plain learner does in every case."
    return {**{name: follow(learner, *batch, count) for name, learner, batch, count in cases(PlainBackend, PlainSGD)},
            **{(name, 'adamw'): learn(PlainBackend, name) for name in METHOD_CASES},
            **{(name, 'sgd'): learn(PlainSGD, name, rates=RATES) for name in LETTER}, 'bad': bad_step(PlainBackend)}


def go_on(stage, folder):
    "What follows checkpoints of another number of ranks: a step and weights; of critics apart two steps."
    *batch, parts = grpo()
    learner = make_learner(parts(), DeepSpeedBackend(stage, settings=SPREAD_ALL))
    learner.restore(folder)
    after = steps(learner, *batch, 1), weights_of(learner)
    apart = {name: learn(DeepSpeedBackend, name, start=f'{folder}/{name}', stage=stage, settings=SPREAD_ALL)
             for name in ('carl', UNTIED)}
    exact = learn(DeepSpeedBackend, 'carl', start=f'{folder}/exact', stage=stage, settings=SPREAD_ALL, dtype='bfloat16')
    return {'other number of ranks': after, 'apart, other number of ranks': apart,
            'exact, other number of ranks': exact}


def offloaded(stage, folder):
    """TSPO's batch with the optimiser in the host's memory: five steps, the last two once more by a fresh learner that
    restored what was saved before them; five steps without that. Then UNTIED, whose last two are taken by a fresh
    one."""
    *batch, parts = tspo()
    settings = {'zero_optimization': {**SPREAD_ALL['zero_optimization'], 'offload_optimizer': {'device': 'cpu'}}}
    learner, fresh, here = (make_learner(parts(), DeepSpeedBackend(stage, settings=how))
                            for how in (settings, settings, SPREAD_ALL))
    logs = steps(learner, *batch, 3)
    os.makedirs(folder, exist_ok=True)
    learner.save(folder)
    logs += steps(learner, *batch, 2)
    fresh.restore(folder)
    where = str(learner.backend.engine.zero_offload_optimizer().device)
    return {'where': where, 'logs': logs, 'weights': weights_of(learner), 'again': steps(fresh, *batch, 2),
            'logs here': steps(here, *batch), 'weights here': weights_of(here),
            'weights again': weights_of(fresh),
            'untied': learn(DeepSpeedBackend, UNTIED, folder, stage=stage, settings=settings)}


def sharded(stage, folder, others=None, offload=()):
    """The same through DeepSpeed at a ZeRO stage; besides, what follows a checkpoint, twice, also one of another
    number of ranks where a folder of these is given, and a run in bfloat16; under 'exact' one with a critic."""
    how, out = dict(stage=stage, settings=SPREAD_ALL), {}
    for name, learner, batch, count in cases(DeepSpeedBackend, DeepSpeedSGD, offload, **how):
        out[name] = follow(learner, *batch, count)
    for name in METHOD_CASES:
        os.makedirs(f'{folder}/{name}', exist_ok=True)
        out[name, 'adamw'] = learn(DeepSpeedBackend, name, f'{folder}/{name}', offload=offload, **how)
    if others is None:
        ways = {'learner': lambda place: make_learner(parts(), DeepSpeedBackend(**how)).restore(place),
                'policy': lambda place: saved_policy(place) and None}
        if stage: ways['other ranks'] = lambda place: SavedPieces(place) and None
        *_, parts = grpo()
        learner.save(folder)
        out['stranger'] = strangers_files(folder, ways, f'{folder}/harm')
    os.makedirs(f'{folder}/exact', exist_ok=True)
    out['exact'] = learn(DeepSpeedBackend, 'carl', f'{folder}/exact', dtype='bfloat16', **how)
    out['bad'] = bad_step(lambda: DeepSpeedBackend(**how))
    out['bad bfloat16'] = bad_step(lambda: DeepSpeedBackend(dtype='bfloat16', **how))
    out['refused'] = another_critic(DeepSpeedBackend, f'{folder}/{UNTIED}', **how)
    for name in LETTER if stage > 1 else ():
        out[name, 'sgd'] = learn(DeepSpeedSGD, name, rates=RATES, offload=offload, **how)
    *batch, parts = grpo()
    learner.save(folder)  # the last case's
    before = steps(learner, *batch, 1)
    out['went on'] = before, weights_of(learner)
    fresh = make_learner(parts(), DeepSpeedBackend(**how), offload)
    fresh.restore(folder)
    out['resumed'] = before, steps(fresh, *batch, 1)
    if others and os.path.isdir(others): out |= go_on(stage, others)
    if stage > 1: out['offloaded'] = offloaded(stage, f'{folder}/offloaded')
    half, again = (make_learner(parts() | {'frozen': FrozenModels(model(0, 100))},
                                DeepSpeedBackend(dtype='bfloat16', **how), offload) for _ in range(2))
    seen = half.evaluate(batch[0], Needs(logp=True, ref_logp=True))      # the reference is the same model
    out['bfloat16'] = {'apart': float((seen.logp - seen.ref_logp).abs().max()), 'logs': steps(half, *batch),
                       'buffers': sorted({str(b.dtype) for b in half.scorer.buffers() if b.is_floating_point()})}
    os.makedirs(f'{folder}/half', exist_ok=True)
    half.save(f'{folder}/half')
    again.restore(f'{folder}/half')
    out['bfloat16'] |= {'counted': sorted({float(state['step']) for state in half.backend.adamw.state.values()}),
                        'went on': steps(half, *batch, 1), 'resumed': steps(again, *batch, 1)}
    os.makedirs(f'{folder}/light', exist_ok=True)
    if half.backend.rank == 0: half.lighten(f'{folder}/half', f'{folder}/light')
    torch.distributed.barrier()
    half.restore_policy(f'{folder}/half')
    again.restore_policy(f'{folder}/light')
    try: again.restore(f'{folder}/light')
    except ValueError: out['light'] = weights_of(half), weights_of(again)
    return out


@contextlib.contextmanager
def what_is_here_stays():
    "DeepSpeed looks for garbage at each start of stage 3, among all the objects of all modules: now not among these."
    gc.collect()
    gc.freeze()
    try: yield
    finally: gc.unfreeze()


def at_stages(stages, target, other=None, offload=()):
    "What happens at each stage, whose checkpoints stand beside the file `target`: stage → what `sharded` returns."
    found = {}
    with what_is_here_stays():
        for stage in stages:
            os.makedirs(f'{target}-{stage}', exist_ok=True)
            found[stage] = sharded(stage, f'{target}-{stage}', other and f'{other}-{stage}', offload)
    return found


if __name__ == '__main__':
    faulthandler.dump_traceback_later(3000, exit=True)  # a rank that waits for ever ends here
    torch.set_num_threads(1)
    target, other = sys.argv[1:3]
    results = at_stages(map(int, sys.argv[3:]), target, other)
    rank = torch.distributed.get_rank()
    results |= {'rank': rank, 'ranks': torch.distributed.get_world_size()}
    torch.save(results, f'{target}.{rank}')
    torch.distributed.barrier()
    if rank == 0: os.replace(f'{target}.0', target)  # judged by this file: gloo may still fall over at exit
    torch.distributed.destroy_process_group()
