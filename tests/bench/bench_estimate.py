"""The estimate of a step (04_estimate) beside what a step takes: tokens, FLOPs and memory of random models of 15, 60
and 150 million parameters, in plain PyTorch and on two ranks at each ZeRO stage, on this host's processor.

    python tests/bench/bench_estimate.py [15 60 150] [--how plain 0 1 2 3] [--json FILE]

FLOPs are those of the operations that PyTorch ran, forward and backward, by the shapes of their arguments; so a busy
machine changes nothing. Memory is the most that a rank's process had in main memory over what it had before it made its
model, where large blocks go back to the system at once (glibc's MALLOC_MMAP_THRESHOLD_), so that freed tensors do not
count. Both are of two steps, in each of which a rank learns from two rows: the second has all of the optimiser's
state."""
import argparse
import copy
import json
import multiprocessing
import os
import random
import socket
import sys
from pathlib import Path

MALLOC = {'MALLOC_MMAP_THRESHOLD_': '65536', 'MALLOC_TRIM_THRESHOLD_': '65536', 'MALLOC_ARENA_MAX': '1'}
if __name__ == '__main__' and not MALLOC.items() <= os.environ.items():     # read when a process starts
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC, 'OMP_NUM_THREADS': '1'})

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))   # a checkout will do
from credit_rl.estimate import TrainingPlan, Sizes, forward_flops, memory
from credit_rl.layout import pack
from credit_rl.learner import Learner, Optimiser
from credit_rl.parts import Credit
from credit_rl.sharded import DeepSpeedBackend
from credit_rl.trajectory import Group, Question, Stop, Trajectory, Turn

VOCABULARY, ROWS = 8192, 2         # words; rows of each rank
# width, layers, feed-forward; tokens of a row
SHAPES = {15: (320, 9, 1120, 384), 60: (640, 10, 2240, 256), 120: (896, 11, 3136, 128), 150: (896, 14, 3136, 128)}
ALL = ('plain', '0', '1', '2', '3')


def sizes_of(size):
    width, layers, intermediate, _ = SHAPES[size]
    made = Sizes(0, layers, width, intermediate, width, 64, VOCABULARY)
    with torch.device('meta'): return Sizes(**{**vars(made), 'parameters': model(size).num_parameters()})


def model(size):
    width, layers, intermediate, _ = SHAPES[size]
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=VOCABULARY, hidden_size=width, intermediate_size=intermediate, num_hidden_layers=layers,
                    num_attention_heads=width // 64, num_key_value_heads=1, tie_word_embeddings=True,
                    max_position_embeddings=8192, eos_token_id=None, bos_token_id=None, pad_token_id=None))


def batch(ranks, length):
    "Two trajectories for each rank, all of one length: a prompt of 16 tokens, and one turn that is trained."
    rng, question = random.Random(0), Question('q', 'Who?', ('one',))
    ids = lambda n: tuple(rng.randrange(VOCABULARY) for _ in range(n))
    turn = lambda: Turn('plain', ids(length - 16), [-9.] * (length - 16), (), '', '')
    return pack([Group(question, [Trajectory(question, ids(16), [turn()], Stop.ANSWER) for _ in range(ROWS * ranks)])])


def attention(query, key, *args, causal=False, **more):
    "FLOPs of attention on a processor: two products for each pair of tokens; half of the pairs where it is causal."
    (b, h, s, d), t = query, key[-2]
    return 4 * b * h * s * t * d // (2 if causal else 1)


def forward_attention(query, key, value, dropout=0., is_causal=False, *args, out_shape=None, **more):
    return attention(query, key, causal=is_causal)


def backward_attention(gradient, query, key, value, out, logsumexp, dropout, is_causal, *args, out_shape=None, **more):
    return attention(query, key, causal=is_causal) * 5 // 2       # the scores once more, and four products


OURS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: forward_attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward_attention}


def status(name):
    "Bytes of this process by the kernel: 'VmRSS' now, 'VmHWM' at most."
    line = next(line for line in Path('/proc/self/status').read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def join(rank, ranks, port):
    "Meet the other ranks."
    torch.set_num_threads(1)
    os.environ |= {'RANK': str(rank), 'LOCAL_RANK': str(rank), 'WORLD_SIZE': str(ranks), 'MASTER_PORT': str(port),
                   'MASTER_ADDR': '127.0.0.1', 'GLOO_SOCKET_IFNAME': 'lo'}
    torch.distributed.init_process_group('gloo')


def on_ranks(ranks, target, *what, seconds=600):
    "What each of some processes puts: `target(rank, ranks, port, out, *what)`."
    context = multiprocessing.get_context('fork')
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    out = context.SimpleQueue()
    family = [context.Process(target=target, args=(rank, ranks, port, out, *what)) for rank in range(ranks)]
    for process in family: process.start()
    for process in family: process.join(seconds)
    if any(process.exitcode != 0 for process in family):
        for process in family: process.kill()
        raise RuntimeError(f'{what}: a rank ended without a result')
    return [out.get() for _ in family]


def take(rank, ranks, port, out, size, how):
    "Two steps of a rank; puts what it measured."
    torch.set_num_threads(1)
    if how != 'plain': join(rank, ranks, port)
    layout, read = batch(ranks, SHAPES[size][-1]), []
    import deepspeed  # noqa: F401: what it takes is not the model's
    torch.manual_seed(0)
    Path('/proc/self/clear_refs').write_text('5')                 # the most begins anew
    before = status('VmRSS')
    policy = model(size)
    acting = copy.deepcopy(policy).eval() if how == '3' else None  # noqa: F841: as a run has it
    learner = Learner(policy, optimiser=Optimiser(minibatches=1, row_tokens=ROWS * SHAPES[size][-1]),
                      backend=None if how == 'plain' else DeepSpeedBackend(int(how)))
    start = status('VmHWM') - before
    credit = Credit(torch.ones(layout.ids.shape) * layout.trained)
    count = lambda module, args, kwargs: read.append(args[0].numel())
    learner.scorer.register_forward_pre_hook(count, with_kwargs=True)
    learner.step(layout, None, credit)
    read.clear()
    with FlopCounterMode(display=False, custom_mapping=OURS) as counter: learner.step(layout, None, credit)
    out.put({'tokens': sum(read), 'FLOPs': counter.get_total_flops(), 'memory': status('VmHWM') - before,
             'start': start})


def measure(size, how):
    "What ranks of their own measure: dict, the mean over ranks of FLOPs and tokens, the most of memory."
    ranks = 1 if how == 'plain' else 2
    found = on_ranks(ranks, take, size, how)
    return {k: (max if k in ('memory', 'start') else lambda v: sum(v) / ranks)([f[k] for f in found]) for k in found[0]}


def predict(size, how):
    "The same by 04_estimate."
    sizes, length, ranks = sizes_of(size), SHAPES[size][-1], 1 if how == 'plain' else 2
    plan = TrainingPlan(None if how == 'plain' else int(how), ranks, length=length, row_tokens=ROWS * length)
    found = memory(sizes, plan)
    return {'tokens': ROWS * length, 'FLOPs': 3 * forward_flops(sizes, ROWS * length, length),
            'memory': found['filled'], 'start': found['start']}


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('sizes', nargs='*', type=int, default=[15, 60, 150], help='millions of parameters')
    parser.add_argument('--how', nargs='+', choices=ALL, default=ALL, help='plain PyTorch, and ZeRO stages')
    parser.add_argument('--json', help='file that gets all numbers')
    given, rows = parser.parse_args(), []
    os.environ['DS_ACCELERATOR'] = 'cpu'
    print(f'{"":12}{"tokens":>8}{"predicted":>11}{"ratio":>7}   {"GFLOPs":>8}{"predicted":>11}{"ratio":>7}   {"MB":>8}'
          f'{"predicted":>11}{"ratio":>7}')
    for size in given.sizes:
        for how in given.how:
            found, said = measure(size, how), predict(size, how)
            cells = [f'{found[k] / unit:8,.1f}{said[k] / unit:11,.1f}{said[k] / found[k]:7.2f}'
                     for k, unit in (('tokens', 1), ('FLOPs', 1e9), ('memory', 1e6))]
            print(f'{size:4} M {how if how == "plain" else f"ZeRO {how}":6}' + '   '.join(cells), flush=True)
            rows.append({'size': size, 'how': how, 'measured': found, 'predicted': said})
    worst = max((max(r['predicted'][k] / r['measured'][k], r['measured'][k] / r['predicted'][k]) - 1, k, r['size'],
                 r['how']) for r in rows for k in ('tokens', 'FLOPs', 'memory'))
    print(f'furthest apart: {worst[1]} of {worst[2]} M, {worst[3]}, by {worst[0]:.0%}')
    if given.json: Path(given.json).write_text(json.dumps(rows, indent=1))
