"""What does turn-level credit cost, against the least that anything per token can cost: one gather with an index
made beforehand?

    python tests/bench/bench_credit.py [--trajectories 1280] [--tokens 4096] [--threads 1]

Each rule starts from rewards per turn and ends with an advantage for every token, on the same rectangle of tokens,
in one run. Turn-level rules are meant to stay within 12 gathers. What works on tokens, TIPS's placed rewards and
PPO's GAE, is apart.
"""
import argparse
import json
import time

import torch

from credit_rl.advantages import (discounted_sum, gae, gigpo, group_normalize, mt_grpo_star, reinforce_pp, rloo,
                                  to_tokens)
from credit_rl.tspo import tspo_advantages
from credit_rl.information_gain import igpo_advantages, information_gain, with_outcome
from credit_rl.potentials import answer_potential, shaping_rewards
from credit_rl.carl import segment_advantages
from credit_rl.turn_rewards import place_rewards
from credit_rl.vspo import choose_groups

LIMIT = 12   # times a bare gather


def against(function, unit, repeat):
    "Time of a function in units of another, run in turns, the fastest of each; and the unit in seconds."
    fastest = [float('inf')] * 2
    for _ in range(repeat + 1):
        for i, f in enumerate((function, unit)):
            start = time.perf_counter()
            f()
            fastest[i] = min(fastest[i], time.perf_counter() - start)
    return fastest[0] / fastest[1], fastest[1]


def batch(n, length, turns, members, generator):
    """Token-turn map (N, T) of trajectories with 1 to `turns` turns: half of a turn's tokens are trained, half are its
    observation."""
    counts = torch.randint(1, turns + 1, (n,), generator=generator)
    span = length // turns
    t = torch.arange(length)
    trained = (t % span < span // 2) & (t // span < counts[:, None])
    token_turns = torch.where(trained, (t // span).expand(n, length), -1)
    return token_turns, torch.arange(turns) < counts[:, None], torch.arange(n) // members


def rules(token_turns, mask, groups, generator):
    "Name → function that makes (R, T) advantages from turn rewards: turn-level rules, token-level rules."
    n, k = mask.shape
    outcome = torch.randint(0, 2, (n,), generator=generator).float()
    per_turn = torch.rand(n, k, generator=generator)
    first = torch.minimum(torch.randint(-1, k, (n,), generator=generator), mask.sum(1) - 1)
    anchors = torch.randint(0, 50, (n, k), generator=generator)
    logps = -torch.rand(n, k + 1, 2, generator=generator) * 20
    flat = lambda a: to_tokens(a[:, None].expand(mask.shape), token_turns)
    values = torch.rand(token_turns.shape, generator=generator)
    trained = token_turns >= 0

    def shaped():
        rewards = shaping_rewards(answer_potential(logps), mask, 0.1)
        return rewards + torch.where(mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1)), outcome[:, None], 0.0)

    def igpo():
        gains = with_outcome(information_gain(logps[..., 0] / 10, mask), outcome, mask)
        return to_tokens(igpo_advantages(gains, mask, groups), token_turns)

    def vspo():
        kept, weights = choose_groups(outcome, groups, generator=torch.Generator().manual_seed(0))
        of_group = torch.zeros(n).masked_scatter(torch.isin(groups, torch.tensor(kept)), weights)
        return flat(group_normalize(outcome, groups) * of_group)

    turn_level = {
        'GRPO': lambda: flat(group_normalize(outcome, groups)), 'RLOO': lambda: flat(rloo(outcome, groups)),
        'REINFORCE++': lambda: flat(reinforce_pp(outcome, groups)), 'discounted returns':
        lambda: to_tokens(discounted_sum(torch.where(mask, per_turn, 0.0), mask, 0.95), token_turns), 'TSPO':
        lambda: to_tokens(tspo_advantages(outcome, first, mask, groups), token_turns), 'IGPO': igpo,
        'TIPS shaping, returns per turn': lambda: to_tokens(discounted_sum(shaped(), mask, 1.0), token_turns),
        'MT-GRPO*': lambda: to_tokens(mt_grpo_star(per_turn, outcome, mask, groups), token_turns), 'GiGPO':
        lambda: to_tokens(gigpo(per_turn, anchors, mask, groups), token_turns), 'CARL':
        lambda: to_tokens(segment_advantages(per_turn, mask, outcome), token_turns), 'VSPO on GRPO': vspo
    }
    rewards = place_rewards(shaped(), token_turns)
    return turn_level, {'TIPS shaping, placed on last tokens': lambda: place_rewards(shaped(), token_turns),
                        'GAE, λ = 0.95': lambda: gae(rewards, values, trained, 1.0, 0.95)[0],
                        'TIPS in PPO: shaping, GAE, λ = 1':
                            lambda: gae(place_rewards(shaped(), token_turns), values, trained, 1.0, 1.0)[0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (('trajectories', 1280), ('tokens', 4096), ('turns', 8), ('members', 5), ('repeat', 5),
                        ('threads', 1)):
        parser.add_argument(f'--{name}', type=int, default=value)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    generator = torch.Generator().manual_seed(0)
    token_turns, mask, groups = batch(a.trajectories, a.tokens, a.turns, a.members, generator)
    turn_level, token_level = rules(token_turns, mask, groups, generator)

    table, index = torch.rand(a.trajectories, a.turns + 1, generator=generator), token_turns + 1
    gather_alone = lambda: table.gather(1, index)
    table[:, 0] = 0
    assert torch.equal(gather_alone(), to_tokens(table[:, 1:], token_turns)), 'the gather does not do the same work'
    measured = {name: against(rule, gather_alone, a.repeat) for name, rule in (turn_level | token_level).items()}
    ratio, gather = {name: round(r, 1) for name, (r, _) in measured.items()}, min(s for _, s in measured.values())
    worst = max(turn_level, key=ratio.get)
    print(
        json.dumps(
            {
                'trajectories': a.trajectories, 'tokens': a.tokens, 'turns': a.turns, 'threads': a.threads,
                'gather_ms': round(gather * 1e3, 1), 'times_a_gather': {name: ratio[name] for name in turn_level},
                'worst': {worst: ratio[worst]}, 'limit': LIMIT, 'within': ratio[worst] <= LIMIT,
                'token_level_times_a_gather': {name: ratio[name] for name in token_level}
            }, indent=1, ensure_ascii=False))


if __name__ == '__main__':
    main()
