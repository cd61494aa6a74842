"""TSPO from data/tiny_weak by `credit_rl.train`, stopped half-way and resumed: exact match before and after on the test
questions, with 95 % intervals. It must gain, and end within the intervals of the stored runs on a CPU."""
import json
import re
import tempfile
from pathlib import Path

import yaml

from credit_rl.train import train

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / 'runs' / 'sweep_weak'
SEED = 201


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


def section(record, a):
    if a.device == 'cpu' and not a.small: raise SystemExit('on a CPU use --small, or compare')
    asked = settings(a.small)
    with tempfile.TemporaryDirectory() as folder:
        def stopped(line):
            print(line, flush=True)
            found = re.match(r'step (\d+)/', line)
            if found and int(found[1]) >= asked['steps'] // 2: raise Stop
        try: train({**asked, 'run': f'{folder}/run'}, stopped)
        except Stop: pass
        else: raise AssertionError('the run was not stopped')
        train({**asked, 'run': f'{folder}/run', 'resume': True}, lambda line: print(line, flush=True))
        summary = json.loads((Path(folder) / 'run' / 'summary.json').read_text())
    n = summary['questions']
    before, after = interval(summary['base_em'], n), interval(summary['final_em'], n)
    found = {name: summary[name] for name in ('steps', 'questions', 'base_em', 'final_em', 'last_em', 'seconds')}
    stored = [json.loads(path.read_text()) for path in sorted(STORED.glob('tspo-*/summary.json'))]
    ends = [interval(s['final_em'], s['questions']) for s in stored]
    low, high = min(e[0] for e in ends), max(e[1] for e in ends)
    record.put('TSPO', {**found, 'base_interval': before, 'final_interval': after,
                        'stored_final_em': [s['final_em'] for s in stored], 'stored_interval': (low, high)})
    if a.small: return
    assert before[1] < after[0], 'nothing was gained'
    assert low <= summary['final_em'] <= high, 'the stored runs on a CPU ended elsewhere'
