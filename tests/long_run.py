"""A long run of a tiny model, watched from outside: memory, file sizes and the time of a step from beginning to end.

    python tests/long_run.py --steps 2000 --out FOLDER       prints a table; exits with 1 if something grew

After 200 steps the memory of all processes may grow by 2 %; the log of rollouts grows as `log_steps` says; a step of
the last hundred may take 10 % more processor time than one of the first hundred after step 200."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
SETTLED = 200                    # steps after which memory should be flat
SMALL = ['data=tiny', f'model={ROOT / "data" / "tiny_base"}', 'questions=200', 'dev_questions=4', 'test_questions=4',
         'questions_per_step=4', 'group_size=2', 'max_turns=3', 'turn_tokens=10', 'world={size: 200}', 'threads=1',
         'minibatches=1', 'learning_rate=1.0e-12', 'collapse=0', 'seed=5', 'keep=1']   # no learning: steps are alike


def last_step(run):
    "The newest step in a run's metrics, 0 where there is none."
    path = run / 'metrics.jsonl'
    if not path.exists(): return 0
    with open(path, 'rb') as f:
        f.seek(max(0, path.stat().st_size - 8192))
        lines = [line for line in f.read().splitlines(keepends=True)[1:] if line.endswith(b'\n')]
    return json.loads(lines[-1])['step'] if lines else 0


def look(process):
    "MiB and seconds of processor time of a process and all that it started, now."
    held = took = 0.
    for p in (process, *process.children(recursive=True)):
        try:
            held += p.memory_info().rss / 2 ** 20
            took += sum(p.cpu_times()[:2])
        except psutil.NoSuchProcess: pass
    return held, took


def sizes(run):
    "KiB of what a run's folder holds, by name."
    kib = lambda path: sum(p.stat().st_size for p in path.rglob('*') if p.is_file() and not p.is_symlink()) / 1024 \
        if path.is_dir() else path.stat().st_size / 1024
    return {p.name: kib(p) for p in run.iterdir() if not p.name.startswith('.') and not p.is_symlink()}


def watched(words, run, every=.5):
    "Run a command to its end: list of (step, MiB, seconds of processor time, KiB by file)."
    seen, env = [], {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT), 'CUDA_VISIBLE_DEVICES': ''}
    with open(run.parent / 'out.txt', 'wb') as out:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)
    parent = psutil.Process(process.pid)
    while process.poll() is None:
        try: seen.append((last_step(run), *look(parent), sizes(run) if run.exists() else {}))
        except (psutil.NoSuchProcess, FileNotFoundError): pass        # it ended, or wrote, while we looked
        time.sleep(every)
    if process.returncode: sys.exit((run.parent / 'out.txt').read_text()[-3000:])
    return seen


def between(seen, low, high): return [row for row in seen if low <= row[0] <= high]


def pace(seen, low, high):
    "Seconds of processor time of a step, between two steps."
    part = between(seen, low, high)
    return (part[-1][2] - part[0][2]) / max(1, part[-1][0] - part[0][0])


def figures(seen, steps, run):
    "What a run took early and late: dict of name → (early, late)."
    width = max(10, min(100, steps // 10))
    settled = min(SETTLED, steps // 4)
    early, late = between(seen, settled, settled + width), between(seen, steps - width, steps - 1)
    lines = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
    clock = lambda low, high: statistics.median(x['seconds_step'] for x in lines if low < x['step'] <= high)
    return {'memory of all processes, MiB': (max(r[1] for r in early), max(r[1] for r in late)),
            'processor time of a step, s': (pace(seen, settled, settled + width), pace(seen, steps - width, steps - 1)),
            'time of a step by the clock, median, s': (clock(settled, settled + width), clock(steps - width, steps)),
            'of the first hundred by the clock, s': (clock(0, width), clock(steps - width, steps)),
            **{f'{name}, KiB': (early[-1][3].get(name, 0.), size) for name, size in sizes(run).items()}}


def grown(found, steps):
    "What grew more than it may: list of names."
    rose = lambda name: found[name][1] / found[name][0] - 1
    wrong = [name for name, most in (('memory of all processes, MiB', .02), ('processor time of a step, s', .1))
             if rose(name) > most]
    if found['checkpoints, KiB'][1] > 1.2 * found['checkpoints, KiB'][0]: wrong.append('checkpoints, KiB')
    if found['metrics.jsonl, KiB'][1] > 4 * steps: wrong.append('metrics.jsonl, KiB')
    return wrong


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--steps', type=int, default=2000)
    parser.add_argument('--out', type=Path, required=True, help='a new folder')
    parser.add_argument('settings', nargs='*', help='further settings of the run')
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True)
    run = given.out.resolve() / 'run'
    words = ['-m', 'credit_rl.train', f'run={run}', *SMALL, f'steps={given.steps}', f'eval_every={given.steps // 20}',
             *given.settings]
    found = figures(watched(words, run), given.steps, run)
    print(f'| {given.steps} steps | early | late | change |\n|---|---:|---:|---:|')
    for name, (early, late) in found.items():
        change = f'{100 * (late / early - 1):+.1f} %' if early else ''
        print(f'| {name} | {early:.3g} | {late:.3g} | {change} |' if late < 1000 else
              f'| {name} | {early:.0f} | {late:.0f} | {change} |')
    wrong = grown(found, given.steps)
    print('grew:', ', '.join(wrong) or 'nothing')
    return int(bool(wrong))


if __name__ == '__main__': sys.exit(main())
