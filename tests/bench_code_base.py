"""What does the warm start of CARL's tiny base make? Makes one from nothing and plays the test world's questions with it, under each prompt.

    python tests/bench_code_base.py [--seed 0]

Printed: seconds of the warm start, and for each kind of question the share right and the share with a call, greedy and at temperature 1.
"""
import argparse
import tempfile
import time

import torch
from transformers import AutoModelForCausalLM

from credit_rl.engine import HFEngine, Sampling
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.rollout import rollout
from credit_rl.tiny import make_base, tiny_environment, tiny_tokenizer
from credit_rl.world import make_world

KINDS = {'famous facts': (True, 1), '1 hop to look up': (False, 1), '2 hops': (False, 2), 'easy sums': (True, 0), 'hard sums': (False, 0)}  # parametric, hops


def share(trajectories):
    "Share right, and share with a call."
    n = len(trajectories)
    return f'{sum(t.answer in t.question.answers for t in trajectories) / n:.2f} ({sum(len(t.turns) > 1 for t in trajectories) / n:.2f})'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seed', type=int, default=0)
    seed = parser.parse_args().seed
    torch.set_num_threads(1)
    worlds = [make_world('train', seed, questions=150, hops=(1, 2), famous=150, easy=100, hard=100), make_world('dev', seed, questions=60, hops=(1, 2), famous=40, easy=30, hard=30),
              make_world('test', seed, questions=150, hops=(1, 2), famous=400, easy=60, hard=60)]
    with tempfile.TemporaryDirectory() as folder:
        cpu, clock = time.process_time(), time.monotonic()
        make_base(folder + '/base', seed, protocol='carl-tiny', known=worlds)
        print(f'seed {seed}: warm start {time.process_time() - cpu:.0f} s of CPU, {time.monotonic() - clock:.0f} s by the clock', flush=True)
        model = AutoModelForCausalLM.from_pretrained(folder + '/base').eval()
    tokenizer = tiny_tokenizer(numbers=True)
    model.set_attn_implementation('eager')
    for greedy in (True, False):
        for name in ('carl-tiny', 'carl-tiny-forced', 'carl-tiny-direct'):
            env = tiny_environment(worlds[2], Chat(PROTOCOLS[name], tokenizer))
            played = [g.trajectories[0] for g in rollout(HFEngine(model, tokenizer), env, list(worlds[2].questions), 1, Sampling(greedy=greedy, max_tokens=40))]
            of = {kind: [t for t in played if (t.question.meta['parametric'], t.question.meta['hops']) == wanted] for kind, wanted in KINDS.items()}
            print('greedy' if greedy else 'temperature 1', name, '; '.join(f'{kind} {share(part)}' for kind, part in of.items()), sep=': ', flush=True)


if __name__ == '__main__': main()
