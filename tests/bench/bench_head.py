"""The head in pieces beside the head at once: peak memory of a process, and seconds, for a forward and backward over
trained tokens of a large vocabulary. Each way runs in a process of its own.

    python tests/bench/bench_head.py                     8,192 tokens, 151,936 words (some 20 GB at once)
    python tests/bench/bench_head.py 2048 151936
"""
import json
import resource
import subprocess
import sys
import time

import torch

from credit_rl.layout import HeadPieces, head_logps

WIDTH = 64   # of the hidden states: the logits do not depend on it


def at_once(head, hidden, target):
    "As it was done before: the whole table of log-probabilities."
    logp = head(hidden).float().log_softmax(-1)
    return logp.gather(-1, target[:, None])[:, 0]


def measure(way, tokens, words):
    "Peak memory above what was there before, in GiB, seconds, and what came out: dict."
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(WIDTH, words, bias=False), torch.randn(tokens, WIDTH, requires_grad=True)
    target = torch.randint(words, (tokens,))
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    before, since = peak(), time.perf_counter()
    pieces = HeadPieces(max(HeadPieces.budget, 4096 * 896))                      # of a learner of a 0.5B model
    logp = at_once(head, hidden, target) if way == 'at once' else head_logps(head, hidden, target, pieces=pieces)
    logp.sum().backward()
    return {'way': way, 'GiB': round(peak() - before, 2), 'seconds': round(time.perf_counter() - since, 1),
            'logp': logp.sum().item(), 'gradient': head.weight.grad.norm().item()}


if __name__ == '__main__':
    if sys.argv[1:2] == ['one']: print(json.dumps(measure(sys.argv[2], *map(int, sys.argv[3:]))))
    else:
        tokens, words = map(int, sys.argv[1:] or (8192, 151_936))
        found = [json.loads(subprocess.check_output([sys.executable, __file__, 'one', way, str(tokens), str(words)]))
                 for way in ('in pieces', 'at once')]
        for row in found: print(f"{row['way']:10} {row['GiB']:6.2f} GiB {row['seconds']:6.1f} s")
        few, all = found
        for name in ('logp', 'gradient'): assert abs(few[name] - all[name]) <= 1e-5 * abs(all[name]), (name, found)
