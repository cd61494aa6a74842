"""What does VSPO cost? Tokens that go through a model in one training step (old and reference log-probabilities, then
the
update), for GRPO on the whole batch, VSPO by weights, and VSPO by literal copies of the drawn groups, in one run.

    python tests/bench/bench_vspo.py [--groups 32] [--members 5] [--tokens 160]

The claim: by weights it costs the forward passes of the groups that are not silent, and takes the same step as the
copies.
"""
import argparse
import copy
import json
import math
import time

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from credit_rl.groups import group_normalize
from credit_rl.layout import pack
from credit_rl.learner import FrozenModels, Learner, Optimiser
from credit_rl.parts import Credit, Loss, Needs
from credit_rl.trajectory import Group, Question, Trajectory, Turn
from credit_rl.vspo import choose_groups, vspo_weights

VOCABULARY = 64


def rollouts(groups, members, tokens, generator):
    "Groups of rollouts of two turns with made-up ids (none is 0, the padding), of about `tokens` tokens each."
    ids = lambda n: torch.randint(1, VOCABULARY, (n,), generator=generator).tolist()
    length = lambda: int(torch.randint(tokens // 8, tokens // 3, (1,), generator=generator))

    def turn(kind):
        n = length()
        return Turn(kind, ids(n), [-math.log(VOCABULARY)] * n, ids(length()) if kind == 'tool' else (), '', '')

    attempt = lambda q: Trajectory(q, ids(12), [turn('tool'), turn('answer')], 'answer', '')
    return [
        Group(q, [attempt(q) for _ in range(members)]) for q in (Question(f'q{b}', '', ['a']) for b in range(groups))
    ]


def step(model, groups, rewards, omega, share, kl):
    """One training step of a copy of the model, advantages times ω, terms of rows times their share of the batch:
    tokens forwarded, seconds, what the learner logged."""
    seen = []
    learner = Learner(copy.deepcopy(model), Loss(average='sequence-mean-token-mean', kl=kl),
                      Optimiser(minibatches=1, row_tokens=8192), frozen=FrozenModels(copy.deepcopy(model)))
    count = lambda module, args, kw: seen.append(int((kw['input_ids'] != 0).sum()))
    for module in (learner.scorer.model, learner.reference.model):
        module.base_model.register_forward_pre_hook(count, with_kwargs=True)
    start, layout = time.perf_counter(), pack(groups)
    own = group_normalize(rewards.flatten(), layout.groups) * omega
    advantages = own[layout.row_trajectory][:, None] * layout.trained
    logged = learner.step(layout, learner.evaluate(layout, Needs(logp=True, ref_logp=True)),
                          Credit(advantages, trajectory_weight=torch.full((len(layout.groups),), share)))
    return sum(seen), time.perf_counter() - start, logged


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (('groups', 32), ('members', 5), ('tokens', 160), ('width', 128), ('layers', 2), ('seed', 0),
                        ('threads', 1)):
        parser.add_argument(f'--{name}', type=int, default=value)
    parser.add_argument('--kl', type=float, default=0.001)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    generator = torch.Generator().manual_seed(a.seed)
    groups = rollouts(a.groups, a.members, a.tokens, generator)
    chance = torch.rand(a.groups, 1, generator=generator) ** 4                    # most questions are hard
    rewards = (torch.rand(a.groups, a.members, generator=generator) < chance).float()
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, hidden_size=a.width, intermediate_size=2 * a.width,
                                         num_hidden_layers=a.layers, num_attention_heads=4, num_key_value_heads=4))

    draw = dict(generator=torch.Generator().manual_seed(a.seed))
    kept, weights = choose_groups(rewards.flatten(),
                                     torch.arange(a.groups).repeat_interleave(a.members), clip=False, **draw)
    draw['generator'].manual_seed(a.seed)
    places = vspo_weights(rewards, clip=False, **draw)[1]
    copies = [b for b in range(a.groups) for _ in range(int(places[b]))]
    assert 0 < len(kept) < a.groups and len(copies) == a.groups, ('no group, or every group, is silent: take another '
                                                                  'seed')
    batches = {
        'grpo, all groups': (range(a.groups), 1.), 'vspo by weights': (kept, weights), 'vspo by copies': (copies, 1.)
    }
    done = {name: step(model, [groups[b] for b in chosen], rewards[list(chosen)], w, len(chosen) / a.groups, a.kl)
            for name, (chosen, w) in batches.items()}

    own = int(pack([groups[b] for b in kept]).lengths.sum())
    (cost, _, ours), (_, _, theirs) = done['vspo by weights'], done['vspo by copies']
    assert cost == 3 * own, 'more or less than three passes over the groups that are not silent'
    for name in ('loss', 'grad_norm'):
        assert math.isclose(ours[name], theirs[name], rel_tol=1e-3, abs_tol=1e-6), (name, ours, theirs)
    base_tokens, base_seconds, _ = done['grpo, all groups']
    print(
        json.dumps(
            {
                'groups': a.groups, 'not_silent': len(kept), 'share_not_silent': round(len(kept) / a.groups, 3),
                'tokens_forwarded': {name: tokens for name, (tokens, _, _) in done.items()}, 'tokens_of_grpo': {
                    name: round(tokens / base_tokens, 3) for name, (tokens, _, _) in done.items()
                }, 'seconds_of_grpo': {name: round(s / base_seconds, 3) for name, (_, s, _) in done.items()},
                'same_step_as_copies': {name: [ours[name], theirs[name]] for name in ('loss', 'grad_norm')}
            }, indent=1))


if __name__ == '__main__':
    main()
