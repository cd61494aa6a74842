"""TSPO from data/tiny_weak by `credit_rl.train`, stopped half-way and resumed: exact match before and after on the test
questions, with 95 % intervals. It must gain, and end within the intervals of the stored runs on a CPU.

Where models/smollm2 is at hand (`credit-rl fetch smollm2`), instead what `make real` does: demonstrations, fine-tuning,
which must gain, and as many steps of TSPO as there is time for."""
import json
import re
import tempfile
import time
from pathlib import Path

import yaml

from credit_rl.runlog import read_summary, stored_folders
from credit_rl.sft import Imitation, rejection_sft, write_demos
from credit_rl.train import train

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / 'runs' / 'sweep_weak'
SEED = 201
REAL = ROOT / 'models' / 'smollm2'


class Stop(BaseException):
    "The run is to end here, as by a kill."


def interval(share, n, z=1.96):
    "Wilson's interval of a share of n: (low, high)."
    middle, half = share + z * z / (2 * n), z * (share * (1 - share) / n + z * z / (4 * n * n)) ** .5
    return max(0., (middle - half) / (1 + z * z / n)), min(1., (middle + half) / (1 + z * z / n))


def settings(small):
    "Of the stored runs, seed 201: dict."
    own = yaml.safe_load((ROOT / 'runs' / 'params' / 'sweep_weak.yaml').read_text())
    own.pop('methods')
    few = dict(steps=2, eval_every=1, questions=30, dev_questions=6, test_questions=12, questions_per_step=2,
               group_size=2, world={'size': 60}) if small else dict(eval_every=20)
    return {**own, 'method': 'tspo', 'seed': SEED, 'model': str(ROOT / own['model']), **few}


def say(line): print(line, flush=True)


def summary_of(run): return json.loads((Path(run) / 'summary.json').read_text())


def measured(summary):
    "What a summary says: dict."
    n, names = summary['questions'], ('steps', 'questions', 'base_em', 'final_em', 'last_em', 'seconds')
    return {**{name: summary[name] for name in names}, 'base_interval': interval(summary['base_em'], n),
            'final_interval': interval(summary['final_em'], n)}


def real_settings():
    "Of `make real`: dict."
    own = yaml.safe_load((ROOT / 'runs' / 'params' / 'real.yaml').read_text())
    return {**own, 'model': str(REAL), 'protocol': str(ROOT / own['protocol'])}


def real(record, folder, asked, until):
    "Demonstrations, fine-tuning, and steps until a time after which a checkpoint is the last; numbers of both parts."
    demos = write_demos({**asked, 'run': f'{folder}/demos'}, say=say)
    how = Imitation(demos=str(demos), epochs=1, batch=8, learning_rate=3e-4, compute='fastest')
    tuned = summary_of(rejection_sft({**asked, 'run': f'{folder}/sft'}, how, say))
    record.put('fine-tuning', tuned := {**measured(tuned), 'demonstrations': tuned['rows']})
    asked, done = {**asked, 'run': f'{folder}/tspo', 'model': f'{folder}/sft/model', 'method': 'tspo'}, []
    def stopped(line):
        say(line)
        found = re.match(r'step (\d+)/', line)
        if found and int(found[1]) % asked['eval_every'] == 0:                    # a checkpoint was written
            done.append(int(found[1]))
            if time.time() > until: raise Stop
    try: train({**asked, 'steps': 1000}, stopped)
    except Stop: pass
    record.put('TSPO', measured(summary_of(train({**asked, 'steps': done[-1], 'resume': True}, say))))
    return tuned


def section(record, a):
    if a.device == 'cpu' and not a.small: raise SystemExit('on a CPU use --small, or compare')
    if REAL.is_dir() and not a.small:
        with tempfile.TemporaryDirectory() as folder:         # the last fifth is for the test questions
            tuned = real(record, folder, real_settings(), record.until - .2 * (record.until - time.time()))
        assert tuned['base_interval'][1] < tuned['final_interval'][0], 'nothing was gained'
        return
    asked = settings(a.small)
    with tempfile.TemporaryDirectory() as folder:
        def stopped(line):
            say(line)
            found = re.match(r'step (\d+)/', line)
            if found and int(found[1]) >= asked['steps'] // 2: raise Stop
        try: train({**asked, 'run': f'{folder}/run'}, stopped)
        except Stop: pass
        else: raise AssertionError('the run was not stopped')
        summary = summary_of(train({**asked, 'run': f'{folder}/run', 'resume': True}, say))
    stored = [read_summary(run) for run in stored_folders(STORED, 'tspo-*/summary.json')]
    ends = [interval(s['final_em'], s['questions']) for s in stored]
    low, high = min(e[0] for e in ends), max(e[1] for e in ends)
    record.put('TSPO', found := {**measured(summary), 'stored_final_em': [s['final_em'] for s in stored],
                                 'stored_interval': (low, high)})
    if a.small: return
    assert found['base_interval'][1] < found['final_interval'][0], 'nothing was gained'
    assert low <= summary['final_em'] <= high, 'the stored runs on a CPU ended elsewhere'
