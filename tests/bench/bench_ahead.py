"""How many steps a minute does a run take in turn, one step off and two steps off (`ahead`), on two servers of vLLM's
own? In one process, in turns, the same games and updates in all (the policy's rate is too small to move a weight), with
longer and longer learning.

    .venv-vllm/bin/python tests/bench/bench_ahead.py [--epochs 1 4] [--steps 4] [--repeats 3] [--questions 24] [--group 8]
        [--library]

The servers have a thread each, as the learner has; `--library` takes `HFEngine` in a thread. Printed for each number of
epochs: the seconds of a step's acting, learning and transfer in turn; steps a minute by `ahead`, the median of the repeats
with the smallest and the largest; and what `ahead_seconds` makes of the acting, learning and transfer in turn, where
engines and learner have devices of their own (on fewer cores than processes they have not).
"""
import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault('VLLM_LOGGING_LEVEL', 'ERROR')
from credit_rl import train as training
from credit_rl.estimate import ahead_seconds
from credit_rl.runlog import metrics_by_step
from credit_rl.settings import make_config
from credit_rl.train import begin_run, train_step

ROOT = Path(__file__).resolve().parents[2]
SERVED = dict(engine='served', serve={'replicas': 2, 'arguments': {'enforce_eager': True}})


def begin(folder, a, ahead):
    "A run that can take steps."
    settings = dict(model=str(ROOT / 'data' / 'tiny_base'), questions_per_step=a.questions, group_size=a.group,
                    threads=1, learning_rate=1e-12, kl=.01, track='', log_kl=False, gap=10., run=str(folder), ahead=ahead,
                    correction='truncated' if ahead else None)
    run = begin_run(make_config({**settings, **({} if a.library else SERVED)}), lambda line: None)
    run.wake()
    return run


def take(run, first, count, epochs):
    "Clocks of some steps, list of dict, and how many a minute there were. Then nothing is played any more."
    run.learner.optimiser, since = dataclasses.replace(run.learner.optimiser, epochs=epochs), time.monotonic()
    for step in range(first, first + count):
        with run.log.timed('step'): metrics = train_step(run, step)
        run.log.metrics(step, **metrics)
    minute, rows = 60 * count / (time.monotonic() - since), metrics_by_step(run.log.folder)
    run.ahead.settle(run)
    return [rows[step] for step in range(first, first + count)], minute


def spread(values): return [round(f(values), 3) for f in (statistics.median, min, max)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (('--steps', 4), ('--repeats', 3), ('--questions', 24), ('--group', 8)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument('--epochs', type=int, nargs='+', default=[1, 4])
    parser.add_argument('--library', action='store_true')
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [begin(Path(folder) / 'ahead-0', a, 0)]
        if not a.library: training.start_engine = lambda *given: runs[0].engine   # one pair of servers for all three
        runs += [begin(Path(folder) / f'ahead-{k}', a, k) for k in (1, 2)]
        try:
            for run in runs: take(run, 1, 1, 1)                  # nothing of the first step is counted
            first = 2
            for epochs in a.epochs:
                clocks, minutes = [], {run.ahead.most: [] for run in runs}
                for _ in range(a.repeats):
                    for run in runs:
                        rows, minute = take(run, first, a.steps, epochs)
                        minutes[run.ahead.most].append(minute)
                        if not run.ahead.most: clocks += rows
                    first += a.steps
                acting, load = [r['seconds_rollout'] for r in clocks], [r['seconds_load'] for r in clocks]
                learning = [r['seconds_step'] - r['seconds_rollout'] - r['seconds_load'] for r in clocks]
                turn, off = ahead_seconds(acting, learning, statistics.mean(load))
                print('MEASURED', json.dumps({
                    'epochs': epochs, 'acting': spread(acting), 'learning': spread(learning), 'transfer': spread(load),
                    'steps a minute, by ahead': {k: spread(found) for k, found in minutes.items()},
                    'foretold in turn': round(60 / turn, 3), 'foretold ahead, own devices': round(60 / off, 3)}), flush=True)
        finally: runs[0].close()


if __name__ == '__main__': main()
