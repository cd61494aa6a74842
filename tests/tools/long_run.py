"""A long run of a tiny model, watched from outside: memory, file sizes and the time of a step from beginning to end.

    python tests/tools/long_run.py --steps 2000 --out FOLDER       prints a table; exits with 1 if something grew

Nothing is learned and every step updates, so that all steps do the same. After 200 steps the memory of all processes
may grow by 2 %, and the log of rollouts grows as `log_steps` says. How much processor time a step takes depends on what
else a machine does, so the last hundreds of steps are held against those of a run that began just before, at the same
time: they may take 5 % more."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
SETTLED = 200                    # steps after which memory should be flat
BESIDE = 'processor time of a step, of a young run and the old one at the same time, s'
SMALL = ['data=tiny', f'model={ROOT / "data" / "tiny_base"}', 'questions=200', 'dev_questions=4', 'test_questions=4',
         'questions_per_step=4', 'group_size=2', 'max_turns=3', 'turn_tokens=10', 'world={size: 200}', 'threads=1',
         'minibatches=1', 'collapse=0', 'seed=5', 'keep=1', 'method=tips', 'teacher_every=50', 'critic=shared',
         'learning_rate=1.0e-12', 'critic_rate=1.0e-12']    # no learning, and an update at each step: they are alike


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


class Watched:
    "A run as a process, and what was seen of it: rows (step, MiB, seconds of processor time, KiB by file, clock)."
    def __init__(self, run, steps, every, more=()):
        self.run, self.seen = run, []
        env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT), 'CUDA_VISIBLE_DEVICES': ''}
        words = ['-m', 'credit_rl.train', f'run={run}', *SMALL, f'steps={steps}', f'eval_every={every}', *more]
        with open(f'{run}.txt', 'wb') as out:
            self.process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=env, stdout=out, stderr=out)
        self.parent = psutil.Process(self.process.pid)

    def look(self):
        "Note how it stands. Returns whether it goes on."
        if self.process.poll() is not None: return False
        try:
            kib = sizes(self.run) if self.run.exists() else {}
            self.seen.append((last_step(self.run), *look(self.parent), kib, time.monotonic()))
        except (psutil.NoSuchProcess, FileNotFoundError): pass        # it ended, or wrote, while we looked
        return True

    def end(self):
        self.process.kill()
        self.process.wait()


def watched(run, steps, more=()):
    "A run to its end, and towards it a young one of the same settings beside it: rows of both."
    width, settled = spans(steps)
    old, young = Watched(run, steps, steps // 20, more), None
    try:
        while old.look():
            if young: young.look()
            elif old.seen and old.seen[-1][0] >= steps - settled - 3 * width:
                young = Watched(run.with_name('young'), settled + 3 * width, steps // 20, more)
            time.sleep(.2)
        if old.process.returncode: sys.exit(Path(f'{run}.txt').read_text()[-3000:])
        return old.seen, young.seen
    finally:
        for one in (old, young):
            if one: one.end()


def spans(steps):
    "How many steps are compared, and after how many a run has settled."
    return max(10, min(100, steps // 10)), min(SETTLED, steps // 4)


def between(seen, low, high): return [row for row in seen if low <= row[0] <= high]


def pace(part):
    "Seconds of processor time of a step, from the first of some rows to the last."
    return (part[-1][2] - part[0][2]) / max(1, part[-1][0] - part[0][0])


def beside(old, young, settled, steps):
    "Seconds of processor time of a step while both ran and the young one had settled: (of the young, of the old)."
    over = next((row[4] for row in old if row[0] >= steps - 1), old[-1][4])
    late = [row for row in young if row[0] >= settled and row[4] <= over]
    if len(late) < 9: sys.exit('the young run had not settled when the old one ended')
    return pace(late), pace([row for row in old if late[0][4] <= row[4] <= late[-1][4]])


def figures(seen, young, steps, run):
    "What a run took early and late: dict of name → (early, late)."
    width, settled = spans(steps)
    early, late = between(seen, settled, settled + width), between(seen, steps - width, steps - 1)
    lines = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
    clock = lambda low, high: statistics.median(x['seconds_step'] for x in lines if low < x['step'] <= high)
    return {'memory of all processes, MiB': (max(r[1] for r in early), max(r[1] for r in late)),
            BESIDE: beside(seen, young, settled, steps),
            'processor time of a step, s': (pace(early), pace(late)),
            'time of a step by the clock, median, s': (clock(settled, settled + width), clock(steps - width, steps)),
            **{f'{name}, KiB': (early[-1][3].get(name, 0.), size) for name, size in sizes(run).items()}}


def grown(found, steps):
    "What grew more than it may: list of names."
    rose = lambda name: found[name][1] / found[name][0] - 1
    wrong = [name for name, most in (('memory of all processes, MiB', .02), (BESIDE, .05))
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
    found = figures(*watched(run, given.steps, given.settings), given.steps, run)
    print(f'| {given.steps} steps | early | late | change |\n|---|---:|---:|---:|')
    for name, (early, late) in found.items():
        change = f'{100 * (late / early - 1):+.1f} %' if early else ''
        print(f'| {name} | {early:.3g} | {late:.3g} | {change} |' if late < 1000 else
              f'| {name} | {early:.0f} | {late:.0f} | {change} |')
    wrong = grown(found, given.steps)
    print('grew:', ', '.join(wrong) or 'nothing')
    return int(bool(wrong))


if __name__ == '__main__': sys.exit(main())
