"""How weak is a base, and in which way? Plays dev and train questions of one seed with it.

    python tests/bench/bench_bases.py data/tiny_base data/tiny_weak [--seed 14]

Printed for each base: greedy exact match on 210 dev questions; of 8 rollouts at temperature 1 for each of 96
training questions the share right, the shares of groups that are all right, mixed and all wrong, and of the wrong
rollouts the share that had been shown an answer.
"""
import argparse
import sys
from pathlib import Path

import torch

from credit_rl.engine import HFEngine, SamplingParams
from credit_rl.evaluate import evaluate
from credit_rl.tspo import first_turns
from credit_rl.groups import group_share
from credit_rl.outcome import outcome_rewards
from credit_rl.rollout import rollout
from credit_rl.settings import make_config

sys.path.append(str(Path(__file__).resolve().parents[1] / 'tools'))
from pieces import setup_of                                                                      # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('bases', nargs='+')
    parser.add_argument('--seed', type=int, default=14)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for base in given.bases:
        stage = setup_of(make_config({'model': base, 'seed': given.seed}))
        engine = HFEngine(stage.model, stage.chat.tokenizer, max_length=192)
        greedy, _ = evaluate(engine, stage.environments['dev'], stage.questions['dev'])
        groups = rollout(engine, stage.environments['train'], stage.questions['train'][:96], 8,
                         SamplingParams(max_tokens=24), 1)
        right, index = outcome_rewards(groups), torch.arange(96).repeat_interleave(8)
        shares = ', '.join(f'{k.replace("_", " ")} {v:.3f}' for k, v in group_share(right, index).items()
                           if k != 'collapsed')
        shown = (first_turns(groups)[right == 0] >= 0).float().mean()
        print(f'{base}: greedy EM {greedy["em"]:.3f}; sampled {right.mean():.3f}; groups {shares}; shown in '
              f'{shown:.3f} of the wrong', flush=True)


if __name__ == '__main__': main()
