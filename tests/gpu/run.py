"""What a GPU is to show, by one command in ten minutes, in an environment that is there: no network, no papermill, no
vLLM, DeepSpeed where it is installed.

    python tests/gpu/run.py [same shapes trees learning deepspeed] [--out runs/gpu] [--device cuda] [--small] [--share 1.]

- `same`, 60 s: the card finds in float32 what the CPU finds in float64: log-probabilities, values, gold answers, credit
  and new weights of seven methods, the engine's ids; bfloat16 beside it; and planted faults are noticed.
- `shapes`, 150 s: writing, reading, scoring, learning at the shapes of Qwen2.5 with 0.5B, 3B and 7B, random weights.
- `trees`, 75 s: tokens that rows share read once, against rows of their own: seconds, bytes, compilations, gradients.
- `learning`, 150 s: TSPO from data/tiny_weak, stopped and resumed: exact match before and after. Where models/smollm2
  is at hand, demonstrations, fine-tuning and reinforcement of that instead.
- `deepspeed`, 120 s: one rank by NCCL at ZeRO 2 and 3, one of them resumed, steps as the library's own learner does.

Every number is in `OUT/SECTION.json` as soon as it is known, with card, versions and seconds. A section ends at its
deadline with what it has. The command ends with 1 where a section failed or was late; where one cannot run, with 1 if
CREDIT_RL_GPU=required, else with 0, or 2 if none ran. `--device cpu --small` tries the program itself: small models,
deadlines cut by ten."""
import argparse
import faulthandler
import importlib
import json
import os
import platform
import signal
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]   # a checkout will do

import torch

SECTIONS = {'same': 60, 'shapes': 150, 'trees': 75, 'learning': 150, 'deepspeed': 120}   # seconds of each; a module of that name, on_*
REQUIRED = os.environ.get('CREDIT_RL_GPU') == 'required'


class CannotRun(RuntimeError):
    "What a section needs is not here."


class Late(BaseException):
    "A section's time is over; no handler of ordinary errors may take this for one."


class Record:
    "What a section finds, in its file as soon as it is known. `until`: the time at which the section has to end."

    def __init__(self, path, about): self.path, self.found, self.since = path, {**about, 'numbers': {}}, time.time()

    def put(self, name, numbers):
        "Keep a number, or a dict of some, under a name; print it."
        self.found['numbers'][name] = numbers
        print(f'{name}: {json.dumps(_short(numbers))}', flush=True)
        self.write()

    def close(self, state, why=''):
        self.found |= {'state': state, 'why': why}
        self.write()

    def write(self):
        self.found['seconds'] = round(time.time() - self.since, 1)
        part = self.path.with_suffix('.part')
        part.write_text(json.dumps(self.found, indent=1) + '\n')
        part.replace(self.path)


def _short(x):
    if isinstance(x, dict): return {k: _short(v) for k, v in x.items()}
    return float(f'{x:.4g}') if isinstance(x, float) else x


def versions():
    "Versions of what is installed, None for what is not: dict."
    from importlib.metadata import PackageNotFoundError, version
    found = {'python': platform.python_version()}
    for name in ('torch', 'transformers', 'triton', 'peft', 'bm25s'):
        try: found[name] = version(name)
        except PackageNotFoundError: found[name] = None
    return found


def about(device):
    "The machine and what is installed on it: dict."
    card = torch.cuda.get_device_name() if device == 'cuda' else 'a CPU'
    return {'device': card, 'driver': _driver() if device == 'cuda' else None, 'cores': os.cpu_count(),
            'versions': versions(), 'started': time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())}


def _driver():
    try: return Path('/proc/driver/nvidia/version').read_text().split('\n')[0]
    except OSError: return torch.version.cuda


def _ring(*_): raise Late


def run_section(name, a, record, seconds):
    "Run a section up to its deadline: its state, 'done', 'late', 'cannot run' or 'failed', and why."
    signal.signal(signal.SIGALRM, _ring)
    faulthandler.dump_traceback_later(4 * seconds + 60, exit=True)      # a call that never returns to Python
    try:
        section = importlib.import_module(f'on_{name}').section
        signal.setitimer(signal.ITIMER_REAL, seconds)
        record.until = time.time() + seconds
        section(record, a)
    except Late: return 'late', f'{seconds:.0f} s were over'
    except (CannotRun, ImportError) as e: return 'cannot run', str(e)
    except Exception: return 'failed', traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        if a.device == 'cuda': torch.cuda.empty_cache()
    return 'done', ''


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('sections', nargs='*', metavar='section', help=', '.join(SECTIONS))
    parser.add_argument('--out', default=str(ROOT / 'runs' / 'gpu'))
    parser.add_argument('--device', default='cuda', choices=('cuda', 'cpu'))
    parser.add_argument('--small', action='store_true')
    parser.add_argument('--share', type=float, help='of the deadlines; 1, or .1 with --small')
    a = parser.parse_args(arguments)
    a.share = a.share or (.1 if a.small else 1.)
    if unknown := set(a.sections) - set(SECTIONS):
        parser.error(f'sections are {", ".join(SECTIONS)}, got {", ".join(unknown)}')
    if a.device == 'cuda' and not torch.cuda.is_available():
        sys.exit('this machine has no GPU that PyTorch can use (torch.cuda.is_available() is False)')
    Path(a.out).mkdir(parents=True, exist_ok=True)
    here, states = about(a.device), []
    print(json.dumps(here), flush=True)
    for name in a.sections or SECTIONS:
        record = Record(Path(a.out) / f'{name}.json', here)
        print(f'\n{name}:', flush=True)
        state, why = run_section(name, a, record, SECTIONS[name] * a.share)
        record.close(state, why)
        print(f'{state.upper()} {name}, {record.found["seconds"]} s {why}', flush=True)
        states.append(state)
    bad = {'failed', 'late'} | ({'cannot run'} if REQUIRED else set())
    sys.exit(1 if bad & set(states) else 0 if 'done' in states else 2)


if __name__ == '__main__':
    main()
