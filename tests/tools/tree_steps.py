"""Whole steps of a learner with rows of their own and with trees. As a program, one process per rank: `tree_steps.py
OUT.pt STAGE ...` writes what DeepSpeed's steps with trees found at each ZeRO stage."""
import sys

import torch
from deepspeed_steps import SPREAD_ALL, method_batch, model

from credit_rl.layout import pack
from credit_rl.learner import FrozenModels, Learner, Optimiser, make_critic
from credit_rl.parts import Credit, Golds, Loss, Needs
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.scoring import gold_templates
from credit_rl.sharded import DeepSpeedBackend
from credit_rl.tiny import tiny_tokenizer

SEES = ('logp', 'entropy', 'values', 'gold', 'teacher', 'ref_logp')


def learner_of(backend, critic, apart=True):
    policy = model(0, len(tiny_tokenizer()), True)
    kind = {} if critic is None else {'critic': make_critic(policy, critic)}
    return Learner(policy, Loss(kl=.1, entropy=.01), Optimiser(1e-2, minibatches=2, row_tokens=400, apart=apart),
                   frozen=FrozenModels(model(1, len(tiny_tokenizer()), True), teacher_every=0), backend=backend, **kind)


def two_steps(backend, tree, critic='own'):
    "What a learner says before and after two steps on the same credit, what it logs, and its weights."
    groups, chat = method_batch(), Chat(PROTOCOLS['tiny'], tiny_tokenizer())
    layout, templates = pack(groups, tree=tree), gold_templates(chat, groups)
    golds = {'gold': templates, 'teacher': templates}
    learner = learner_of(backend, critic)
    numbers = torch.Generator().manual_seed(0)
    credit = Credit(torch.randn(layout.ids.shape, generator=numbers) * layout.trained,
                    torch.rand(layout.ids.shape, generator=numbers) * layout.trained)
    sees = Needs(**{name: name != 'values' or bool(critic) for name in SEES})
    seen, logs = [learner.evaluate(layout, sees, golds),
                  learner.evaluate(layout, Needs(logp=True, gold=Golds()), golds)], []
    for _ in range(2): logs.append(learner.step(layout, seen[0], credit))
    seen.append(learner.evaluate(layout, sees, golds))
    return {'seen': [{n: x for n, x in vars(s).items() if x is not None} for s in seen], 'logs': logs,
            'weights': {n: w.detach().float().clone() for n, w in learner.weights().items()}}


def sharded(stage): return two_steps(DeepSpeedBackend(stage, settings=SPREAD_ALL), True)


if __name__ == '__main__':
    out, *stages = sys.argv[1:]
    found = {int(stage): sharded(int(stage)) for stage in stages}
    rank = torch.distributed.get_rank()
    torch.save(found, f'{out}.{rank}' if rank else out)
