"""What does the warm start of CARL's tiny base make? Makes one from nothing, or takes one, and plays the test
world's questions with it, under each prompt.

    python tests/bench/bench_code_base.py [--seed 411] [--base runs/carl_warm/bases/carl_warm/411]

The worlds are those of runs/params/carl_warm.yaml. Printed: seconds of the warm start, and for each kind of question
the share right and the share with a call, greedy and at temperature 1.
"""
import argparse
import tempfile
import time
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM

from credit_rl.engine import HFEngine, SamplingParams
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.rollout import rollout
from credit_rl.tiny import make_base, tiny_environment, tiny_tokenizer
from credit_rl.settings import make_config
from credit_rl.setup import known_worlds, tiny_worlds

# parametric, hops
KINDS = {
    'famous facts': (True, 1), '1 hop to look up': (False, 1), '2 hops': (False, 2), 'easy sums': (True, 0),
    'hard sums': (False, 0)
}


def share(trajectories):
    "Share right, and share with a call."
    n = len(trajectories)
    return (f'{sum(t.answer in t.question.answers for t in trajectories) / n:.2f} '
            f'({sum(len(t.turns) > 1 for t in trajectories) / n:.2f})')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seed', type=int, default=411)
    parser.add_argument('--base', help='folder of the base; none: made')
    given = parser.parse_args()
    seed = given.seed
    torch.set_num_threads(1)
    settings = yaml.safe_load((Path(__file__).resolve().parents[2] / 'runs' / 'params' / 'carl_warm.yaml').read_text())
    asked = ('world', 'questions', 'dev_questions', 'test_questions')
    worlds = tiny_worlds(make_config({n: settings[n] for n in asked}), seed)
    with tempfile.TemporaryDirectory() as folder:
        cpu, clock = time.process_time(), time.monotonic()
        base = given.base or make_base(folder + '/base', seed, protocol='carl-tiny', known=known_worlds(worlds))
        print(f'seed {seed}: warm start {time.process_time() - cpu:.0f} s of CPU, {time.monotonic() - clock:.0f} s by '
              'the clock', flush=True)
        model = AutoModelForCausalLM.from_pretrained(base).eval()
    tokenizer = tiny_tokenizer(numbers=True)
    model.set_attn_implementation('eager')
    for greedy in (True, False):
        for name in ('carl-tiny', 'carl-tiny-forced', 'carl-tiny-direct'):
            env = tiny_environment(worlds['test'], Chat(PROTOCOLS[name], tokenizer))
            played = [
                g.trajectories[0] for g in rollout(HFEngine(model, tokenizer), env, list(worlds['test'].questions), 1,
                                                   SamplingParams(greedy=greedy, max_tokens=40))
            ]
            of = {
                kind: [t
                       for t in played
                       if (t.question.meta['parametric'], t.question.meta['hops']) == wanted]
                for kind, wanted in KINDS.items()
            }
            print('greedy' if greedy else 'temperature 1', name,
                  '; '.join(f'{kind} {share(part)}' for kind, part in of.items()), sep=': ', flush=True)


if __name__ == '__main__': main()
