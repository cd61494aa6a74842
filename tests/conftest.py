"""Fixtures that every test may use, and how tests are marked, bounded and ordered (see pytest.ini)."""
import contextlib
import functools
import hashlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

os.environ.setdefault('OMP_WAIT_POLICY', 'passive')   # threads that wait sleep; before a test imports PyTorch
ROOT = Path(__file__).resolve().parents[1]
DURATIONS = ROOT / 'tests' / 'durations.json'   # test → [seconds of CPU time, of those that take one at least; alone]
LONG = 2                                        # seconds from which on a test may go to another worker than its file
BOUND = 540                                     # seconds for a process that a test starts, less than for the test


with contextlib.suppress(ImportError):            # the environment of vLLM's has none
    from hypothesis import settings
    settings.register_profile('tests', deadline=None, max_examples=40)      # on a busy machine as on another
    settings.load_profile('tests')


OPENED = ('nbs/000_tour.ipynb', 'nbs/1_rules/32_tspo.ipynb', 'nbs/figures/readme_2.png', 'runs/LOG.md',
          'runs/log/2026-11-20.md', 'runs/params/demo.yaml', 'runs/sweep/grpo-201/summary.json', 'runs/lab/exact.csv',
          'runs/study/bases.csv', 'runs/smollm2/rules/answers.csv', 'data/README.md', 'data/rows/gsm8k.jsonl',
          'data/tiny_base/config.json')


def leave_checkpoints():
    "Put JupyterLab's copies beside files of the checkout: no test may mind them. Returns what removes them."
    made = contextlib.ExitStack()
    for path in map(ROOT.joinpath, OPENED):
        copy = path.parent / '.ipynb_checkpoints' / f'{path.stem}-checkpoint{path.suffix}'
        if not path.exists() or copy.exists(): continue
        if not copy.parent.exists():
            copy.parent.mkdir()
            made.callback(shutil.rmtree, copy.parent, ignore_errors=True)
        shutil.copy(path, copy)
        made.callback(copy.unlink, missing_ok=True)
    return made.close


def pytest_configure(config):
    """Leave JupyterLab's copies about. Give SIGINT and SIGQUIT back what they do, for the processes that tests start
    too: a shell without job control starts what runs in its background with both ignored."""
    if not hasattr(config, 'workerinput'): config.add_cleanup(leave_checkpoints())
    if threading.current_thread() is threading.main_thread():
        for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
            if signal.getsignal(number) is signal.SIG_IGN: signal.signal(number, handler)


def pytest_addoption(parser):
    parser.addoption('--record', action='store_true', help=f'write into {DURATIONS.name} how long these tests take')
    parser.addoption('--below', type=float, metavar='SECONDS',
                     help='leave out tests that took so long or longer when recorded, and what is marked `long`')
    parser.addoption('--from', type=float, metavar='SECONDS', dest='at_least', help='only what --below leaves out')


# ---- which tests start processes ----

STARTS = re.compile(r'\b(subprocess|Popen|papermill|start_new_kernel|run_python|Process|Started)\b')


@functools.cache
def starts_processes(*functions):
    "Whether a test, a fixture that it asks for, or a function of tests/ that these name starts another Python."
    left, found = list(functions), set()
    while left:
        function = inspect.unwrap(left.pop())
        if function in found or ROOT / 'tests' not in Path(inspect.getfile(function)).parents: continue
        found.add(function)
        source = inspect.getsource(function)
        if STARTS.search(source): return True
        named = map(function.__globals__.get, re.findall(r'\b[a-z]\w*', source))
        left += [f for f in named if inspect.isfunction(f)]
    return False


# ---- order and durations ----

def read_durations():
    return json.loads(DURATIONS.read_text(encoding='utf-8')) if DURATIONS.exists() else {}


def is_alone(item):
    "Whether a test shares with no other of its file what a fixture sets up."
    found = [d for defs in item._fixtureinfo.name2fixturedefs.values() for d in defs]
    return not any(d.scope != 'function' and item.nodeid.startswith(f'{d.baseid}::') for d in found)


def unit_of(nodeid, recorded):
    "What a worker takes at once: a long test that can go alone, or what is left of its file."
    seconds, alone = recorded.get(nodeid, (0, False))
    return nodeid if alone and seconds >= LONG else nodeid.split('::')[0]


@pytest.hookimpl(optionalhook=True)               # where xdist is not installed there is nothing to deal out
def pytest_xdist_make_scheduler(config, log):
    "Deals out units of tests in the order in which `pytest_collection_modifyitems` of the workers puts them."
    from xdist.scheduler import LoadScopeScheduling
    class Units(LoadScopeScheduling):
        recorded = read_durations()
        def _split_scope(self, nodeid): return unit_of(nodeid, self.recorded)

        def remove_node(self, node):
            """The test in which a worker was lost, if one was; what it had not begun goes to others. xdist would deal
            out all its units again, the finished too, and wait for ever for the end of one that is empty."""
            left = {name: [test for test, done in unit.items() if not done]
                    for name, unit in self.assigned_work.pop(node).items()}
            lost = next((test for tests in left.values() for test in tests), None)
            for name, tests in left.items():
                rest = [test for test in tests if test != lost]
                if rest: self.workqueue[name] = dict.fromkeys(rest, False)
            if lost:
                for other in self.assigned_work: self._reschedule(other)
            return lost
    return Units(config, log)


def pytest_collection_modifyitems(config, items):
    """Mark what starts processes; leave out what the nightly job has, and what `--below` or `--from` excludes; on
    several workers, take the longest units first, so that all end together."""
    recorded, units = read_durations(), Counter()
    seconds = {name: took for name, (took, _) in recorded.items()}
    if not os.environ.get('NIGHTLY'): keep(config, items, lambda item: item.get_closest_marker('nightly') is None)
    asked = config.getoption('markexpr')
    for item in items:
        fixtures = [d.func for defs in item._fixtureinfo.name2fixturedefs.values() for d in defs]
        if 'process' in asked and starts_processes(item.function, *fixtures): item.add_marker('process')
        if 'open_tab' in item.function.__code__.co_names: item.add_marker('browser')
    below, at_least = config.getoption('below'), config.getoption('at_least')
    if below is not None: keep(config, items, lambda item: not takes_long(item, seconds, below))
    if at_least is not None:
        keep(config, items, lambda item: takes_long(item, seconds, at_least))
        unmarked = [i.nodeid for i in items if not i.get_closest_marker('long') and not is_alone(i)]
        if unmarked: raise pytest.UsageError(f'mark them, and what takes long with them, as `long`: {unmarked}')
    unit = {item: unit_of(item.nodeid, recorded) for item in items}
    for item in items: units[unit[item]] += seconds.get(item.nodeid, 0)
    if hasattr(config, 'workerinput'): items.sort(key=lambda item: -units[unit[item]])


def takes_long(item, seconds, most):
    "Whether a test took so long when recorded, or shares what takes long to set up with one that did (`long`)."
    return item.get_closest_marker('long') is not None or seconds.get(item.nodeid, 0) >= most


def keep(config, items, wanted):
    "Leave out of the collected tests all but those that are wanted."
    kept = [item for item in items if wanted(item)]
    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = kept


SHARED = []                                       # numbers of processes that several tests share: kernels


def forkservers():
    "The number of the process that forks others in multiprocessing's stead, if one does: it waits for them, not we."
    module = sys.modules.get('multiprocessing.forkserver')
    pid = module and module._forkserver._forkserver_pid
    return [pid] if pid else []


def cpu_seconds():
    "Used by this process, those that it waited for and those that its tests share, whatever else runs."
    used = sum(os.times()[:4])
    for pid in [*SHARED, *forkservers()]:
        import psutil                             # kernels need it too
        with contextlib.suppress(psutil.NoSuchProcess): used += sum(psutil.Process(pid).cpu_times()[:4])
    return used


BEFORE, TOOK, ALONE = [0.], Counter(), set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    BEFORE[0] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    "A report of setup, call or teardown tells what was used since the one before, and whether its test is alone."
    report, now = (yield), cpu_seconds()
    report.cpu, BEFORE[0] = now - BEFORE[0], now
    report.alone = is_alone(item)
    return report


def pytest_runtest_logreport(report):
    TOOK[report.nodeid] += getattr(report, 'cpu', 0.)   # a worker that died has told none
    if getattr(report, 'alone', False): ALONE.add(report.nodeid)


def pytest_sessionfinish(session):
    """Write durations where the controller, or the only process, ends: over those of the same files, or where only
    some tests of each were asked for, over those of the same tests."""
    option = session.config.getoption
    if option('record') and not hasattr(session.config, 'workerinput'):
        some = (any(option(name) not in (None, '') for name in ('below', 'at_least', 'keyword', 'markexpr'))
                or any('::' in argument for argument in session.config.args))
        which = lambda name: name if some else name.split('::')[0]
        ran = {*map(which, TOOK)}
        there = lambda name: (ROOT / name.split('::')[0]).exists()
        kept = {name: took for name, took in read_durations().items() if which(name) not in ran and there(name)}
        now = {name: [round(took, 1), name in ALONE] for name, took in TOOK.items() if took >= 1}
        lines = ',\n'.join(f'{json.dumps(name)}: {json.dumps(it)}' for name, it in sorted({**kept, **now}.items()))
        DURATIONS.write_text(f'{{\n{lines}\n}}\n', encoding='utf-8')


def pytest_terminal_summary(terminalreporter, config):
    "Name what was taken for short, since it has another name or more to do than when durations were recorded."
    below = config.getoption('below')
    slow = [f'{name} ({took:.0f} s)' for name, took in TOOK.items() if below and took >= max(2 * below, 5)]
    if slow: terminalreporter.write_line(f'not short, run them with --record: {", ".join(slow)}')


# ---- fixtures ----

@pytest.fixture(scope='session')
def root():
    "The top of the checkout."
    return ROOT


@pytest.fixture(scope='session')
def data():
    "The folder of real data sets, one sub-folder each."
    folder = os.environ.get('CREDIT_RL_DATA')
    if not folder:
        pytest.skip('CREDIT_RL_DATA is not set: no real data sets here')
    if not Path(folder).is_dir():
        pytest.fail(f'CREDIT_RL_DATA={folder} is not a folder')
    return Path(folder)


@pytest.fixture(scope='session')
def spoken(tmp_path_factory):
    "A Hugging Face folder with a small random Qwen2 and a tokenizer of bytes, so that any text can be said to it."
    from credit_rl.protocol import byte_tokenizer
    from random_models import save_small
    return save_small(tmp_path_factory.mktemp('spoken'), byte_tokenizer())


@pytest.fixture(scope='module')
def base(root):
    "The small base on the CPU, its tokenizer, and its folder."
    from credit_rl.models import load_model
    model, tokenizer = load_model(str(folder := root / 'data' / 'tiny_base'))
    return model.cpu(), tokenizer, folder


@pytest.fixture(scope='module')
def on_a_cpu():
    "PyTorch sees no GPU in this process: the same numbers everywhere."
    import torch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, 'is_available', lambda: False)
        yield


@pytest.fixture(scope='session')
def finished(tmp_path_factory):
    """A function of settings, beside those of a short run, to the folder of a run of theirs that is over. It is made
    once, for all workers, and is only read: who writes into it takes a copy. Its lines lie beside it, in `lines`."""
    place = tmp_path_factory.getbasetemp()
    if 'PYTEST_XDIST_WORKER' in os.environ: place = place.parent
    def run(**settings):
        import torch
        from filelock import FileLock
        from credit_rl.train import train
        from made_runs import SHORT
        text = json.dumps(settings := {**SHORT, **settings}, sort_keys=True)
        folder = place / 'finished' / hashlib.sha256(text.encode()).hexdigest()[:16] / 'run'
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / 'lock'), pytest.MonkeyPatch.context() as patch:
            if (folder.parent / 'lines').exists(): return folder
            patch.setattr(torch.cuda, 'is_available', lambda: False)
            train({**settings, 'run': str(folder)}, say=(lines := []).append)
            (folder.parent / 'lines').write_text('\n'.join(lines))
        return folder
    return run


@pytest.fixture
def start():
    "A function that starts a module as a process of its own (`Started`); what is left of it is ended after the test."
    from started import Started
    with contextlib.ExitStack() as left:
        def one(*command, **how):
            left.callback((process := Started(*command, **how)).kill_all)
            return process
        yield one


@pytest.fixture(scope='session')
def run_python():
    "Run this Python with some arguments in the checkout; fails the test on another exit code, or after BOUND seconds."
    def run(*args, code=0, env=None, cwd=ROOT):
        try:
            done = subprocess.run([sys.executable, *map(str, args)], cwd=cwd, env={**os.environ, **(env or {})},
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                  timeout=BOUND)
        except subprocess.TimeoutExpired as e:
            pytest.fail(f'{args[:2]} had not ended after {BOUND} s:\n{str(e.stdout)[-6000:]}')
        assert done.returncode == code, f'exit code {done.returncode}, wanted {code}:\n{done.stdout[-6000:]}'
        return done.stdout
    return run
