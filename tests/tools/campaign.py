"""A campaign of faults: runs of every kind are struck at random moments, taken up again by the same command, and held
against a run that was left alone.

    python tests/tools/campaign.py --faults 200 --seed 0 --out FOLDER [--jobs training sft] [--kinds kill disk]
        [--minutes 60]

Each fault is drawn by its number and the seed: which job, which fault, at which moment. What is over stands in
FOLDER/faults.jsonl, so the same command goes on where it ended. What can come of a fault:

    same    the results are those of the run that was left alone (floats exactly; clocks and paths are left out)
    told    it ended with a message and without a traceback, and so did the same command again
    wrong   other results, and nothing said
    lost    something complete is gone or was made anew
    broken  a traceback in place of a message
    hung    it did not end, or left processes behind

The last four are failures; their folders are kept. It needs psutil and, for disks and folders that cannot be written,
the right to mount (as root on Linux); these faults are left out otherwise."""
import argparse
import atexit
import contextlib
import csv
import ctypes
import gzip
import hashlib
import json
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from credit_rl.launch import free_port

ROOT = Path(__file__).resolve().parents[2]
MARK = 'CREDIT_RL_CAMPAIGN'      # environment variable of all that a fault starts: its number
FAILURES = ('wrong', 'lost', 'broken', 'hung')
BASE, CODER = ROOT / 'data' / 'tiny_base', ROOT / 'data' / 'tiny_carl'


# ---- what there is to strike ----

@dataclass(frozen=True)
class Job:
    "One kind of run."
    command: object               # function of a Place → list of words after `python`
    weight: int = 1               # how often it is drawn
    resume: tuple = ()            # words that the same command takes when it is given again
    child: str = None             # word in the command line of a process that it starts, which may die or hang
    server: str = None            # 'search' or 'judge': a server that it asks, which may do the same
    prepare: object = None        # function of a Place, before the command
    files: tuple = ()             # patterns of the files that may be cut short
    needs: str = None             # module without which it is left out
    python: str = sys.executable


@dataclass(frozen=True)
class Place:
    "Where one run lies, and what it is given."
    folder: Path                  # of this run alone
    shared: Path                  # models, indexes and runs that all are given
    ports: dict                   # of the servers

    @property
    def run(self): return self.folder / 'files' / 'run'

    @property
    def begun(self): return any(self.run.parent.iterdir())


SMALL = ['questions=50', 'dev_questions=6', 'test_questions=6', 'threads=1', 'seed=3']
TRAIN = [*SMALL, 'steps=4', 'eval_every=2', 'questions_per_step=4', 'group_size=4', 'max_turns=3', 'turn_tokens=12',
         'world={size: 200}', 'track=""']
TWINS = '{hops: [1, 2], twins: true, nothing: .125, sibling: .125, lost: .1}'
CARL = ['questions=480', 'dev_questions=120', 'test_questions=6', 'threads=1', 'seed=412', 'protocol=carl-tiny',
        f'model={CODER}', 'turn_tokens=40', f'world={TWINS}', 'track=""']      # whose facts tiny_carl knows
WARM = ['per_tier=[6, 6]', 'tries=2', 'sorted_questions=480', 'clusters=2', 'warm_steps=6', 'warm_least=6',
        'warm_every=2', 'warm_batch=16', 'warm_rise=1', 'must_pass=false']
RUN_FILES = ('metrics.jsonl', 'turns.jsonl.gz', 'params.yaml', 'summary.json', 'checkpoints/step-*/**/*')
SETS = {'hotpotqa': ROOT / 'data' / 'hotpotqa_sample.json',
        **{name: next((ROOT / 'data' / 'rows').glob(f'{name}.*')) for name in ('musique', '2wikimultihopqa', 'gsm8k')}}
ASKED = [f'data={", ".join(SETS)}', 'path=' + json.dumps({k: str(v) for k, v in SETS.items()}), 'max_turns=3',
         'turn_tokens=24', 'max_tokens=16384', 'passages=2', 'threads=1']


def trained(place, *more):
    return ['-m', 'credit_rl.train', f'run={place.run}', *TRAIN, f'model={BASE}', *more]


def judged(place):
    judge = {'base_url': f'http://127.0.0.1:{place.ports["judge"]}/v1', 'model': 'stub', 'timeout': 2, 'retries': 1}
    options = json.dumps({'judge': judge})
    return trained(place, 'method=outcome+judge/calls', f'options={options}')


def served(place):
    "Nothing but hotpotqa, whose passages are asked of a server, by a player that searches."
    return ['-m', 'campaign', 'play', f'run={place.run}', f'corpus=http://127.0.0.1:{place.ports["search"]}/retrieve']


def play(arguments):
    "An evaluation of a program that searches twice and answers by what it found: as `credit_rl.evaluate`, not as fast."
    from credit_rl.engine import ScriptedEngine
    from credit_rl.evaluate import run_evaluation
    from credit_rl.protocol import byte_tokenizer
    def act(text, rng):
        time.sleep(.1)
        found = re.findall(r'Title: "(\w+)"', text)
        if len(found) > 5: return f'<think> so </think><answer> {found[-1]} </answer>'
        return f'<think> ask </think><search> {" ".join(found[-1:])} {rng.choice(["aeb", "dou", "gik"])} </search>'
    settings = dict(word.split('=', 1) for word in arguments)
    settings |= {'data': 'hotpotqa', 'path': str(SETS['hotpotqa']), 'max_turns': 4, 'passages': 3, 'threads': 1}
    try: print(run_evaluation(settings, ScriptedEngine(act, byte_tokenizer(), 8192), progress=False))
    except (ValueError, OSError, ImportError) as e: sys.exit(f'campaign.py: {e}')
    except KeyboardInterrupt: sys.exit(130)


def compared(place):
    params = place.folder / 'params.yaml'
    given = dict(model=str(BASE), data='tiny', questions=50, dev_questions=6, test_questions=6, threads=1, steps=2,
                 eval_every=1, questions_per_step=4, group_size=4, max_turns=3, turn_tokens=12, world={'size': 200},
                 track='')
    params.write_text(json.dumps(given))
    return ['-m', 'credit_rl.compare', '--methods', 'grpo', 'tspo', '--seeds', '1', '--workers', '1',
            '--params', str(params), '--out', str(place.run)]


def exported(place): return ['-m', 'credit_rl.export', str(place.folder / 'source'), str(place.run)]


def vllm_python():
    "An interpreter that has vLLM; None where there is none."
    own = next((p for p in (os.environ.get('CREDIT_RL_VLLM_PYTHON'), ROOT / '.venv-vllm' / 'bin' / 'python')
                if p and Path(p).exists()), None)
    return own and str(own)


VLLM = ['engine=vllm', 'vllm={own_process: true, dtype: float32, arguments: {enforce_eager: true, block_size: 32}}']
JOBS = {
    'training': Job(lambda p: trained(p, 'method=tips', 'teacher_every=2'), 6, ('resume=true',), files=RUN_FILES),
    'training, programs': Job(lambda p: ['-m', 'credit_rl.train', f'run={p.run}', *CARL, 'method=grpo', 'steps=3',
                                         'eval_every=1', 'questions_per_step=4', 'group_size=2'],
                              3, ('resume=true',), child='monty', files=RUN_FILES, needs='pydantic_monty'),
    'training, judge': Job(judged, 3, ('resume=true',), server='judge', files=RUN_FILES, needs='openai'),
    'training, two ranks': Job(lambda p: trained(p, 'method=grpo', 'learner=deepspeed', 'ranks=2'), 1, ('resume=true',),
                               child='credit_rl.train', files=RUN_FILES, needs='deepspeed'),
    'training, vLLM': Job(lambda p: trained(p, 'method=grpo', *VLLM), 1, ('resume=true',), child='spawn_main',
                          files=RUN_FILES, python=vllm_python()),
    'warm-up': Job(lambda p: ['-m', 'credit_rl.prepare', f'run={p.run}', *CARL, *WARM], 3, ('resume=true',),
                   child='monty', files=(*RUN_FILES, 'rollouts-*.jsonl.gz'), needs='pydantic_monty'),
    'fine-tuning': Job(lambda p: ['-m', 'credit_rl.sft', f'run={p.run}', *SMALL, f'model={BASE}', 'sft.questions=24',
                                  'sft.attempts=8', 'sft.epochs=1', 'track=""'], 3, ('resume=true',),
                       files=RUN_FILES, needs='trl'),
    'evaluation': Job(lambda p: ['-m', 'credit_rl.evaluate', f'run={p.run}', f'model={p.shared / "model"}', *ASKED], 4,
                      files=('*/*.json', '*/*.jsonl.gz', 'summary.json')),
    'evaluation, search server': Job(served, 3, server='search', files=('*/*.json', '*/*.jsonl.gz', 'summary.json')),
    'audit': Job(lambda p: ['-m', 'credit_rl.audit', f'run={p.run}', *SMALL, f'model={BASE}', 'rules=[grpo, tspo]',
                            'asked=2', 'attempts=2', 'plays=2', 'teach=0'], 2, files=('audit.*', 'solver.csv')),
    'comparison': Job(compared, 1, child='ipykernel', files=('grpo-1/metrics.jsonl', 'grpo-1/checkpoints/step-*/*')),
    'index': Job(lambda p: ['-m', 'credit_rl.command', 'index', str(p.shared / 'corpus.jsonl'), str(p.run)], 3,
                 needs='bm25s'),
    'export': Job(exported, 2, files=('../../source/checkpoints/*/learner.pt', '../../source/params.yaml'),
                  prepare=lambda p: shutil.copytree(p.shared / 'trained', p.folder / 'source', symlinks=True)),
}
KINDS = ('kill', 'terminate', 'interrupt', 'interrupt, ignored', 'stop', 'disk', 'read-only', 'cut', 'child dies',
         'child hangs', 'server dies', 'server hangs')


def fits(kind, job, mounts):
    "Whether a job can meet a kind of fault."
    if kind in ('disk', 'read-only'): return mounts
    if kind.startswith('child'): return job.child is not None
    if kind.startswith('server'): return job.server is not None
    return kind != 'cut' or bool(job.files)


# ---- what all are given ----

def own_mounts():
    "Give this process mounts of its own, which end with it. Returns whether it may mount."
    if not hasattr(os, 'geteuid') or os.geteuid() != 0: return False
    if ctypes.CDLL(None, use_errno=True).unshare(0x00020000) != 0: return False          # CLONE_NEWNS
    return subprocess.run(['mount', '--make-rprivate', '/'], capture_output=True).returncode == 0


def mounted(path):
    "How many mounts lie on a folder."
    return [line.split()[4] for line in Path('/proc/self/mountinfo').read_text().splitlines()].count(str(path))


def mount(*words, check=True): return subprocess.run(['mount', *map(str, words)], check=check, capture_output=True)


def environment(number):
    here = {k: v for k, v in os.environ.items() if k not in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')}
    return {**here, MARK: str(number), 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': '', 'HF_HUB_OFFLINE': '1',
            'PYTHONPATH': f'{ROOT}:{ROOT / "tests" / "tools"}', 'PYTHONUNBUFFERED': '1', 'DS_ACCELERATOR': 'cpu'}


def make_model(folder):
    "A small random Qwen2 with a tokenizer of bytes."
    from credit_rl.protocol import byte_tokenizer
    from random_models import save_small
    save_small(folder, byte_tokenizer(), hidden_size=32, intermediate_size=64)


def make_shared(out, jobs):
    "What runs are given, made once: models, a corpus, an index, a run to export. Returns its folder."
    shared = out / 'shared'
    shared.mkdir(parents=True, exist_ok=True)
    if 'evaluation' in jobs and not (shared / 'model' / 'config.json').exists(): make_model(shared / 'model')
    if not (shared / 'corpus.jsonl').exists():
        rng = random.Random(0)
        word = lambda: ''.join(rng.choice('aeioubdgklmnprst') for _ in range(5))
        rows = [{'id': str(i), 'title': word(), 'text': ' '.join(word() for _ in range(30))} for i in range(20000)]
        (shared / 'corpus.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    if 'evaluation, search server' in jobs and not (shared / 'index').exists():
        quiet(['-m', 'credit_rl.command', 'index', str(shared / 'corpus.jsonl'), str(shared / 'index')])
    if 'export' in jobs and not (shared / 'trained' / 'summary.json').exists():
        shutil.rmtree(shared / 'trained', ignore_errors=True)
        quiet(['-m', 'credit_rl.train', f'run={shared / "trained"}', *TRAIN, f'model={BASE}', 'method=grpo'])
    return shared


def quiet(words): subprocess.run([sys.executable, *words], check=True, cwd=ROOT, env=environment('shared'),
                                 capture_output=True)


# ---- servers ----

class SearchServer:
    "`credit-rl serve` as a process, at a port that stays the same."
    def __init__(self, place): self.place, self.process = place, None

    def start(self):
        words = ['-m', 'credit_rl.command', 'serve', str(self.place.shared / 'index'), '--port',
                 str(self.place.ports['search'])]
        self.process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment('server'),
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if 'passages at' not in self.process.stdout.readline(): raise RuntimeError('the search server did not start')

    def die(self): self.process.kill()
    def hang(self): self.process.send_signal(signal.SIGSTOP)

    def close(self):
        if self.process is None: return
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


class JudgeServer:
    "A judge that gives every pair a grade by its prompt; it may refuse all requests, or answer none."
    def __init__(self, place): self.place, self.stub, self.hangs = place, None, False

    def reply(self, prompt, attempt):
        pairs = len(set(re.findall(r'^Pair (\d+)$', prompt, re.M)))
        grade = hashlib.sha256(prompt.encode()).digest()[0] % 3
        return 'hang' if self.hangs else f'ratings_by_pair={json.dumps([[grade, 1, 1]] * max(1, pairs))}'

    def start(self):
        from judge_server import Stub
        self.hangs, self.stub = False, Stub(self.reply, self.place.ports['judge'])
        self.stub.__enter__()

    def die(self): self.close()
    def hang(self): self.hangs = True

    def close(self):
        if self.stub: self.stub.__exit__()
        self.stub = None


SERVERS = {'search': SearchServer, 'judge': JudgeServer}


# ---- what a run left ----

SKIPPED = re.compile(r'(^|/)(\.[^/]*|log\.txt|ranks\.log|launch\.yaml|written\.json|errors/.*|notebook\.ipynb|'
                     r'report\.ipynb|probe|figures/.*|tensorboard/.*|.*\.png|bases/.*)$')
CLOCKS = re.compile(r'seconds|^time$|^since$|minutes|^created')


def without_clocks(x):
    if isinstance(x, dict): return {k: without_clocks(v) for k, v in x.items() if not CLOCKS.search(str(k))}
    return [without_clocks(v) for v in x] if isinstance(x, list) else x


def digest(path, folder):
    "What a file says, clocks and its folder's name left out, in a form that can be compared: str."
    data, name = path.read_bytes(), path.name.removesuffix('.gz')
    if path.suffix == '.pt':
        import torch
        return repr(tensors(torch.load(path, map_location='cpu', weights_only=True)))
    data = (gzip.decompress(data) if path.suffix == '.gz' else data).replace(str(folder).encode(), b'PLACE')
    if name.endswith('.json'): return json.dumps(without_clocks(json.loads(data)), sort_keys=True)
    if name.endswith('.jsonl'):
        return '\n'.join(json.dumps(without_clocks(json.loads(line)), sort_keys=True) for line in data.splitlines())
    if name.endswith('.csv'):
        head, *rows = csv.reader(data.decode().splitlines())
        return repr([[x for x, name in zip(row, head) if not CLOCKS.search(name)] for row in rows])
    if name == 'table.md':
        head, *rows = ([cell.strip() for cell in line.split('|')] for line in data.decode().splitlines())
        return repr([[x for x, name in zip(row, head) if not CLOCKS.search(name)] for row in (head, *rows)])
    if name == 'params.yaml': data = re.sub(rb'resume: \w+', b'', data)
    return hashlib.sha256(data).hexdigest()


def readable(path, folder):
    "`digest`, or what is wrong with the file."
    try: return digest(path, folder)
    except Exception as e: return f'unreadable: {type(e).__name__}: {e}'


def tensors(x):
    "Nested values with each tensor as its shape and bytes' hash."
    if isinstance(x, dict): return {str(k): tensors(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)): return [tensors(v) for v in x]
    if hasattr(x, 'numpy'): return tuple(x.shape), hashlib.sha256(x.detach().float().numpy().tobytes()).hexdigest()
    return x


def results(place):
    "What came of a run: dict of the name of a file → what it says. What ranks hold in pieces is put together."
    found, run = {}, place.run
    if not run.exists(): return found
    for path in sorted(run.rglob('*')):
        name = str(path.relative_to(run))
        if path.is_symlink(): found[name] = os.readlink(path)
        elif path.is_file() and not SKIPPED.search(name) and '/deepspeed/' not in name and path.name != 'latest':
            found[name] = readable(path, place.folder)
        elif path.name == 'deepspeed':
            from credit_rl.learner import saved_policy
            try: found[name] = repr(tensors(saved_policy(path.parent)))
            except Exception as e: found[name] = f'unreadable: {type(e).__name__}: {e}'
    return found


def step_of(line): return json.loads(line)['step']


def complete(run):
    "What is complete in a run's folder and must stay: dict of a name → bytes."
    found = {}
    for path in run.rglob('summary.json') if run.is_dir() else ():
        if (path.parent / 'params.yaml').exists(): found[str(path.relative_to(run))] = path.read_bytes()
    for path in run.rglob('scores.json') if run.is_dir() else (): found[str(path.relative_to(run))] = path.read_bytes()
    for path in run.glob('rollouts-*.jsonl.gz'): found[path.name] = path.read_bytes()
    for path in run.rglob('metrics.jsonl') if run.is_dir() else ():
        steps = [int(p.name[5:]) for p in (path.parent / 'checkpoints').glob('step-*') if p.name[5:].isdigit()]
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b'\n') and step_of(line) <= max(steps, default=-1):
                found[f'{path.relative_to(run)}, step {step_of(line)}'] = line
    return {name: data for name, data in found.items() if not SKIPPED.search(name)}


# ---- one fault ----

PRELOADED = ['transformers.models.qwen2.modeling_qwen2', 'credit_rl.train', 'credit_rl.prepare', 'credit_rl.sft',
             'credit_rl.audit', 'credit_rl.compare', 'credit_rl.search_service', 'credit_rl.export',
             'pandas', 'seaborn', 'tqdm.auto']


def enact(words, env, out, ignoring):
    "What a forked process does: it becomes `python WORDS`, but for what is imported already."
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignoring else signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = [words[1], *words[2:]]
    os.chdir(ROOT)
    fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)          # that it is there says that faults may come
    for to in (1, 2): os.dup2(fd, to)
    try: runpy.run_module(words[1], run_name='__main__', alter_sys=True)
    finally: atexit._run_exitfuncs()


class Forked:
    "A process that begins where the library has been imported, which saves most of a short run's time."
    def __init__(self, words, env, out, ignoring):
        context = multiprocessing.get_context('forkserver')
        context.set_forkserver_preload(PRELOADED)
        self.process = context.Process(target=enact, args=(words, env, str(out), ignoring))
        self.process.start()
        self.pid = self.process.pid
        if not wait_for(out.exists, 120): raise RuntimeError('no process was forked')

    def poll(self): return self.process.exitcode

    def wait(self, seconds=None):
        self.process.join(seconds)
        if self.process.exitcode is None: raise subprocess.TimeoutExpired(self.pid, seconds)
        return self.process.exitcode


class Started:
    "The same as a program of its own."
    def __init__(self, python, words, env, out, ignoring):
        handler = signal.SIG_IGN if ignoring else signal.default_int_handler
        with open(out, 'wb') as file:
            self.process = subprocess.Popen([python, *words], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=file,
                                            stderr=subprocess.STDOUT, start_new_session=True,
                                            preexec_fn=lambda: signal.signal(signal.SIGINT, handler))
        self.pid, self.poll, self.wait = self.process.pid, self.process.poll, self.process.wait

@dataclass
class Sitting:
    "A command under way."
    job: Job
    place: Place
    number: object
    anew: bool = False                            # each command is a program of its own, not a fork
    process: object = None
    log: list = field(default_factory=list)       # one file of output for each start
    code: int = None

    def start(self, resume=False, ignoring=False):
        words = [*self.job.command(self.place), *(self.job.resume if resume else ())]
        self.log.append(self.place.folder / f'out-{len(self.log)}.txt')
        own = environment(self.number), self.log[-1], ignoring
        alone = self.job.python != sys.executable or self.anew
        self.process = Started(self.job.python, words, *own) if alone else Forked(words, *own)
        self.code = None

    def wait(self, seconds):
        "Whether it ended within so many seconds."
        try: self.code = self.process.wait(max(0., seconds))
        except subprocess.TimeoutExpired: return False
        return True

    @property
    def said(self): return self.log[-1].read_text(errors='replace')

    def family(self):
        "All processes that this fault started and that are alive."
        found = {}
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(self.process.pid)
            found = {p.pid: p for p in [own, *own.children(recursive=True)] if p.status() != psutil.STATUS_ZOMBIE}
        for p in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if p.environ().get(MARK) == str(self.number) and p.status() != psutil.STATUS_ZOMBIE: found[p.pid] = p
        return list(found.values())

    def children(self):
        "Those that may die or hang."
        out = []
        for p in self.family():
            with contextlib.suppress(psutil.Error):
                if p.pid != self.process.pid and self.job.child in ' '.join(p.cmdline()) and \
                        'torch.distributed.run' not in p.cmdline(): out.append(p)
        return sorted(out, key=lambda p: p.pid)

    def end(self):
        for p in self.family():
            with contextlib.suppress(psutil.Error): p.kill()
        if self.process: self.process.wait()


def wait_for(condition, seconds, every=.02):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition(): return True
        time.sleep(every)
    return False


def size_of(folder): return sum(p.stat().st_size for p in folder.rglob('*') if p.is_file() and not p.is_symlink())


def strike(kind, sitting, reference, rng, stop):
    "Wait for a moment and let a fault happen. Returns what was done, as text."
    place, began = sitting.place, time.monotonic()
    early = rng.random() < .15 and kind != 'cut'              # before there is a folder
    chance = .3 + .7 * rng.random() if kind == 'cut' else rng.random()
    at = chance * reference['began']
    if not early:
        wait_for(lambda: place.begun or sitting.process.poll() is not None, 4 * reference['seconds'] + 30)
        at = chance * (reference['seconds'] - reference['began'])
    sitting.wait(at)
    if kind.startswith('child'): wait_for(lambda: sitting.children() or sitting.process.poll() is not None, 120)
    when = f'after {time.monotonic() - began:.1f} s'
    signals = {'kill': signal.SIGKILL, 'cut': signal.SIGKILL, 'terminate': signal.SIGTERM, 'interrupt': signal.SIGINT,
               'interrupt, ignored': signal.SIGINT}
    if kind in signals:
        if sitting.process.poll() is None: os.kill(sitting.process.pid, signals[kind])
    elif kind == 'stop':
        family = sitting.family()
        for p in family:
            with contextlib.suppress(psutil.Error): p.suspend()
        time.sleep(stop)
        for p in family:
            with contextlib.suppress(psutil.Error): p.resume()
    elif kind == 'read-only':
        mount('--bind', place.run.parent, place.run.parent)
        closed = lambda: mount('-o', 'remount,ro,bind', place.run.parent, check=False).returncode == 0
        if not wait_for(closed, 20): raise RuntimeError(f'{place.run.parent} is written to all the time')    # busy
    elif kind.startswith('child'):
        found = sitting.children()
        if not found: return 'it had no child any more'
        chosen = rng.choice(found)
        with contextlib.suppress(psutil.Error): chosen.kill() if kind == 'child dies' else chosen.suspend()
        when += f', {sitting.job.child}'
    return when


def cut_short(sitting, rng):
    "Cut the end of one file that the run left: its name in the run, None where there is none yet, and what was cut."
    files = [p for pattern in sitting.job.files for p in sorted(sitting.place.run.glob(pattern))
             if p.is_file() and not p.is_symlink() and p.stat().st_size]
    if not files: return None, 'nothing to cut'
    path = rng.choice(files)
    size = path.stat().st_size
    lost = min(size, rng.randint(1, 1024))
    os.truncate(path, size - lost)
    name = os.path.relpath(path, sitting.place.run)
    return name, f'{name}: {lost} of {size} bytes'


def mended(kind, sitting, server):
    "Undo what a fault did to disk, folder or server."
    files = sitting.place.run.parent
    if kind == 'disk': mount('-o', 'remount,size=2G', files)
    if kind == 'read-only' and mounted(files): subprocess.run(['umount', str(files)], check=True)
    if server and kind.startswith('server'):
        server.close()
        server.start()


def last_line(text):
    lines = [line.strip() for line in re.sub(r'\x1b\[[0-9;]*[A-Za-z]', '', text).splitlines() if line.strip()]
    return lines[-1][-400:] if lines else ''


def differing(found, wanted):
    "Names whose content is not what it should be: text."
    names = [n for n in sorted(found.keys() | wanted.keys()) if found.get(n) != wanted.get(n)]
    state = lambda n: 'missing' if n not in found else 'new' if n not in wanted else 'other'
    return ', '.join(f'{n or "the file"} {state(n)}' for n in names[:6])


def first_sitting(kind, sitting, server, reference, rng, stop):
    "Start, strike, and wait for the end. Returns (outcome or None, what happened)."
    bound = 3 * reference['seconds'] + 60
    sitting.start(ignoring=kind == 'interrupt, ignored')
    if kind.startswith('server'):
        wait_for(lambda: sitting.process.poll() is not None, rng.random() * reference['seconds'])
        server.die() if kind == 'server dies' else server.hang()
        note = ''
    elif kind == 'disk': note = ''
    else: note = strike(kind, sitting, reference, rng, stop)
    patience = min(bound, 30 + stop) if kind == 'child hangs' else bound + 120 * kind.startswith('server')
    if not sitting.wait(patience):
        if kind != 'child hangs': return 'hung', f'{note}; not over after {patience:.0f} s'
        note += ', ended by hand'                             # as one does who sees that nothing goes on
        os.kill(sitting.process.pid, signal.SIGINT)
        if not sitting.wait(90): return 'hung', f'{note}; not over 90 s after an interrupt'
    if not wait_for(lambda: not sitting.family(), 60, .2):
        return 'hung', f'{note}; left {[" ".join(p.cmdline())[:90] for p in sitting.family()]}'
    if kind not in ('kill', 'terminate', 'cut') and 'Traceback (most recent' in sitting.said:
        return 'broken', f'{note}; {last_line(sitting.said)}'
    return None, note


def second_sitting(kind, sitting, server, reference, note, rng):
    "Take up a run that a fault ended, and judge what comes of it. Returns (outcome, what happened)."
    bound, first = 3 * reference['seconds'] + 60, '' if sitting.code is None else last_line(sitting.said)
    mended(kind, sitting, server)
    spoiled = None
    if kind == 'cut':
        spoiled, what = cut_short(sitting, rng)
        note += f'; {what}'
    kept = {} if kind == 'cut' else complete(sitting.place.run)
    if sitting.code != 0 or kind == 'cut':
        sitting.start(resume=True)
        if not sitting.wait(bound): return 'hung', f'{note}; the same command again is not over after {bound:.0f} s'
        if 'Traceback (most recent' in sitting.said: return 'broken', f'{note}; again: {last_line(sitting.said)}'
    now = complete(sitting.place.run)
    if gone := [name for name, data in kept.items() if now.get(name) != data]:
        return 'lost', f'{note}; {", ".join(gone[:4])}'
    # what nobody reads any more may stay as the fault left it
    found = {name: said for name, said in results(sitting.place).items() if name != spoiled}
    differs = differing(found, {name: said for name, said in reference['results'].items() if name != spoiled})
    said = f'{note}; {first[:200]}'
    if not differs: return 'same', said
    if sitting.code: return 'told', f'{note}; {last_line(sitting.said)}'
    if kind.startswith(('server', 'child')) and (counts := told_by_counts(sitting.place.run)):
        return 'told', f'{note}; {counts}'
    return 'wrong', f'{said}; {differs}'


def told_by_counts(run):
    "What a run's log says of prompts that a judge never answered, and of programs that were stopped from outside."
    lines = (run / 'metrics.jsonl').read_text().splitlines() if (run / 'metrics.jsonl').exists() else []
    failed = max((json.loads(line).get('judge_failures') or 0 for line in lines), default=0)
    rows = gzip.decompress((run / 'turns.jsonl.gz').read_bytes()) if (run / 'turns.jsonl.gz').exists() else b''
    stopped = rows.count(b'stopped from outside')
    return f'judge_failures={failed}' if failed else f'{stopped} programs stopped from outside' if stopped else ''


def one_fault(number, name, kind, place, reference, given):
    "Make a fault and judge what came of it: dict for a line of faults.jsonl."
    rng, job, began = random.Random(f'{given.seed} {number} moment'), JOBS[name], time.monotonic()
    shutil.rmtree(place.folder, ignore_errors=True)
    place.run.parent.mkdir(parents=True)
    if kind == 'disk':
        size = max(8192, int(reference['bytes'] * rng.uniform(.02, .9)))
        mount('-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', place.run.parent)
    server = SERVERS[job.server](place) if job.server else None
    sitting = Sitting(job, place, f'{place.folder}-{given.seed}', given.exec)
    try:
        if server: server.start()
        if job.prepare: job.prepare(place)
        outcome, note = first_sitting(kind, sitting, server, reference, rng, given.stop)
        if outcome is None: outcome, note = second_sitting(kind, sitting, server, reference, note, rng)
    finally:
        sitting.end()
        if server: server.close()
        while mounted(place.run.parent):
            if kind == 'disk': shutil.copytree(place.run.parent, place.folder / 'kept', symlinks=True)
            subprocess.run(['umount', '-l', str(place.run.parent)], check=True)
    if outcome not in FAILURES: shutil.rmtree(place.folder)
    return {'number': number, 'job': name, 'kind': kind, 'outcome': outcome, 'note': note.strip('; '),
            'seconds': round(time.monotonic() - began, 1)}


# ---- the campaign ----

def reference_of(name, out, shared, ports):
    "A run that is left alone, made once: its results, how long it took, when its folder was there, how large it is."
    path, job = out / 'references' / (re.sub(r'\W+', '-', name) + '.json'), JOBS[name]
    if path.exists(): return json.loads(path.read_text())
    place = Place(out / 'work' / re.sub(r'\W+', '-', name), shared, ports)
    shutil.rmtree(place.folder, ignore_errors=True)
    place.run.parent.mkdir(parents=True)
    server = SERVERS[job.server](place) if job.server else None
    sitting = Sitting(job, place, f'reference-{name}')
    try:
        if server: server.start()
        if job.prepare: job.prepare(place)
        began = time.monotonic()
        sitting.start()
        wait_for(lambda: place.begun or sitting.process.poll() is not None, 600)
        there = time.monotonic() - began
        if not sitting.wait(1200) or sitting.code: raise RuntimeError(f'{name}, left alone: {sitting.said[-3000:]}')
        seconds = time.monotonic() - began
    finally:
        sitting.end()
        if server: server.close()
    found = {'results': results(place), 'seconds': seconds, 'began': there, 'bytes': size_of(place.run.parent)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    shutil.rmtree(place.folder)
    return found


def drawn(number, seed, pairs):
    "The job and the kind of a fault by its number."
    return random.Random(f'{seed} {number}').choices(list(pairs), list(pairs.values()))[0]


def pairs_of(jobs, kinds, mounts):
    """Pairs of a job and a kind that go together, and how often each is drawn: the kinds of a job share its weight."""
    out = {}
    for name in jobs:
        own = [kind for kind in kinds if fits(kind, JOBS[name], mounts)]
        out |= {(name, kind): JOBS[name].weight / len(own) for kind in own}
    return out


def missing(job):
    "Why a job cannot be made here; '' where it can."
    import importlib.util
    if job.python is None: return 'no interpreter with vLLM: make test-vllm, or set CREDIT_RL_VLLM_PYTHON'
    return f'{job.needs} is not installed' if job.needs and importlib.util.find_spec(job.needs) is None else ''


def table(rows):
    "Markdown: what was struck how often, and what came of it; a row for each kind and each job."
    lines = ['| fault | number | same | told | failed | why not |', '|---|---:|---:|---:|---:|---|']
    for key in ('kind', 'job'):
        for value in dict.fromkeys(row[key] for row in sorted(rows, key=lambda r: r[key])):
            own = [row for row in rows if row[key] == value]
            counts = Counter(row['outcome'] for row in own)
            failed = [row for row in own if row['outcome'] in FAILURES]
            why = '; '.join(f'{n} {what}' for what, n in Counter(row['outcome'] for row in failed).items())
            lines.append(f'| {value} | {len(own)} | {counts["same"]} | {counts["told"]} | {len(failed)} | {why} |')
    counts = Counter(row['outcome'] for row in rows)
    return '\n'.join([*lines, f'| all | {len(rows)} | {counts["same"]} | {counts["told"]} | '
                      f'{sum(counts[f] for f in FAILURES)} | |'])


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def campaign(given, say=print):
    "Make the faults that are not over yet. Returns the rows of all."
    out, mounts, began = Path(given.out).resolve(), own_mounts(), time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    if not mounts: say('no right to mount here: full disks and read-only folders are left out')
    absent = {name: why for name in given.jobs if (why := missing(JOBS[name]))}
    for name, why in absent.items(): say(f'{name} is left out: {why}')
    jobs = [name for name in given.jobs if name not in absent]
    pairs, path = pairs_of(jobs, given.kinds, mounts), out / 'faults.jsonl'
    shared = make_shared(out, jobs)
    ports_file = out / 'ports.json'
    if not ports_file.exists(): ports_file.write_text(json.dumps({name: free_port() for name in SERVERS}))
    ports, done = json.loads(ports_file.read_text()), {row['number'] for row in read_rows(path)}
    for number in range(given.faults):
        if number in done: continue
        if given.minutes and time.monotonic() - began > 60 * given.minutes: break
        name, kind = drawn(number, given.seed, pairs)
        reference = reference_of(name, out, shared, ports)
        place = Place(out / 'work' / f'{number:04d}', shared, ports)
        row = one_fault(number, name, kind, place, reference, given)
        with open(path, 'a') as f: f.write(json.dumps(row) + '\n')
        say(f'{number}: {row["outcome"]}: {name}: {kind}: {row["note"]}  ({row["seconds"]:.0f} s)')
    return read_rows(path)


def main(arguments=None):
    if (sys.argv[1:] if arguments is None else arguments)[:1] == ['play']: return play(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--faults', type=int, default=200)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--out', required=True)
    parser.add_argument('--jobs', nargs='+', default=list(JOBS), choices=list(JOBS))
    parser.add_argument('--kinds', nargs='+', default=list(KINDS), choices=list(KINDS))
    parser.add_argument('--exec', action='store_true', help='each command is a program of its own, not a fork of one '
                        'that has imported the library')
    parser.add_argument('--minutes', type=float, help='no new fault is begun after so many')
    parser.add_argument('--stop', type=float, default=60., help='seconds for which processes are stopped')
    given = parser.parse_args(arguments)
    say = lambda line: print(line, flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))      # what a fault started is ended too
    rows = campaign(given, say)
    say(table(rows))
    return int(any(row['outcome'] in FAILURES for row in rows))


if __name__ == '__main__': sys.exit(main())
