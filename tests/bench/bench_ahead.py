"""How much faster is a step whose rollouts are played while the step before is learned from (`ahead=1`)? In one run,
in turns, by one machine: blocks of steps in step and one step off, the same games and updates in both (the policy's
rate is too small to move a weight), with longer and longer learning.

    python tests/bench/bench_ahead.py [--epochs 1 2 4] [--steps 4] [--repeats 3] [--questions 24] [--group 8]
        [--library]

The engine is vLLM in a process of its own (`make test-vllm`), with one thread, as the learner has; `--library` takes
`HFEngine` in a thread. Printed for each number of epochs: the seconds of a step's acting, learning and transfer in
step; the seconds of a step in step and ahead, and their ratio, each the median of the repeats with the smallest and
the largest; and what `ahead_seconds` predicts from the first row of numbers. `slower`, by how much both slow each
other down, is taken from the first number of epochs alone, so that the others check it; `own devices` is the same with
1 in its place.
"""
import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from pathlib import Path

os.environ.setdefault('VLLM_LOGGING_LEVEL', 'ERROR')
from credit_rl.estimate import ahead_seconds
from credit_rl.runlog import metrics_by_step
from credit_rl.settings import make_config
from credit_rl.train import begin_run, train_step

ROOT = Path(__file__).resolve().parents[2]
VLLM = dict(engine='vllm', vllm={'dtype': 'float32', 'own_process': True,
                                 'arguments': {'enforce_eager': True, 'block_size': 32}})


def begin(folder, a, **over):
    "A run that can take steps."
    settings = dict(model=str(ROOT / 'data' / 'tiny_base'), questions_per_step=a.questions, group_size=a.group,
                    threads=1,
                    learning_rate=1e-12, kl=.01, track='', log_kl=False, gap=10., run=str(folder))
    run = begin_run(make_config({**settings, **({} if a.library else VLLM), **over}), lambda line: None)
    run.wake()
    return run


def take(run, first, count, epochs):
    "Clocks of some steps: list of dict."
    run.learner.optimiser = dataclasses.replace(run.learner.optimiser, epochs=epochs)
    for step in range(first, first + count):
        with run.log.timed('step'): metrics = train_step(run, step)
        run.log.metrics(step, **metrics)
    rows = metrics_by_step(run.log.folder)
    return [rows[step] for step in range(first, first + count)]


def spread(values):
    return [round(f(values), 3) for f in (statistics.median, min, max)]


def measure(runs, first, a, epochs):
    "Seconds of acting, learning, transfer; seconds of a step in step and ahead, and their ratio, of each repeat."
    acting, learning, transfer, step, ahead = [], [], [], [], []
    for repeat in range(a.repeats):
        at = first + repeat * a.steps
        rows, off = (take(run, at, a.steps, epochs) for run in runs)
        acting += [r['seconds_rollout'] for r in rows]
        learning += [r['seconds_step'] - r['seconds_rollout'] - r['seconds_load'] for r in rows]
        transfer += [r['seconds_load'] for r in rows]
        step.append(statistics.mean(r['seconds_step'] for r in rows))
        ahead.append(statistics.mean(r['seconds_step'] for r in off))
    return acting, learning, statistics.mean(transfer), step, ahead


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (('--steps', 4), ('--repeats', 3), ('--questions', 24), ('--group', 8)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument('--epochs', type=int, nargs='+', default=[1, 2, 4])
    parser.add_argument('--library', action='store_true')
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [begin(Path(folder)/'step', a, correction=None), begin(Path(folder)/'ahead', a, correction='truncated',
                                                                      ahead=1)]
        for run in runs: take(run, 1, 1, 1)                  # nothing of the first step is counted
        first, slower = 2, None
        for epochs in a.epochs:
            acting, learning, transfer, step, ahead = measure(runs, first, a, epochs)
            first += a.repeats * a.steps
            if slower is None: slower = fit(acting, learning, transfer, statistics.median(ahead))
            print('MEASURED', json.dumps({
                'epochs': epochs, 'acting': spread(acting), 'learning': spread(learning),
                'transfer': round(transfer, 3),
                'in step': spread(step), 'ahead': spread(ahead), 'ratio': spread([x / y for x, y in zip(step, ahead)]),
                'predicted in step': round(ahead_seconds(acting, learning, transfer)[0], 3),
                'predicted ahead': round(ahead_seconds(acting, learning, transfer, slower)[1], 3),
                'own devices': round(ahead_seconds(acting, learning, transfer)[1], 3), 'slower': round(slower, 3)}),
                flush=True)
        for run in runs: run.close()


def fit(acting, learning, transfer, seconds):
    "The `slower`, at least 1, with which ahead_seconds gives so many seconds ahead: they grow evenly with it."
    one, two = (ahead_seconds(acting, learning, transfer, x)[1] for x in (1, 2))
    return max(1., 1 + (seconds - one) / (two - one))


if __name__ == '__main__': main()
