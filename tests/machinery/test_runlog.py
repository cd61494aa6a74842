"""The run folder under real kills: a process is ended, without any clean-up, at each of its file operations in turn."""
import contextlib
import importlib.util
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from credit_rl import runlog
from credit_rl.command import main as command
from credit_rl.runlog import (FolderInUse, Hold, RunFolders, RunLog, atomic_folder, atomic_write, changed_modules,
                              check_secrets, code_hashes, imported_modules, latest_checkpoint, metrics_by_step,
                              named_checkpoint, read_yaml, save_checkpoint, source_hash, writing)

# argv: how many file operations to let pass, the run folder. The process dies at the next one and exits 9; if none is
# left it exits 0.
DIES_AT = """
import os, sys
left = [int(sys.argv[1])]
def deadly(name):
    call = getattr(os, name)
    def counted(*args, **kwargs):
        if left[0] == 0: os._exit(9)
        left[0] -= 1
        return call(*args, **kwargs)
    setattr(os, name, counted)
for name in ('rename', 'replace', 'fsync', 'rmdir', 'unlink', 'symlink', 'mkdir'): deadly(name)
"""
OLD, NEW = 'old' * 1000, 'new' * 1000


def deaths(run_python, script, prepare):
    "Give the folder after the death at each file operation, until the script comes through."
    for n in range(100):
        folder = prepare(n)
        try:
            run_python('-c', DIES_AT + script, n, folder, code=9)
        except AssertionError:
            run_python('-c', DIES_AT + script, n, prepare(1000 + n))
            return
        yield folder
    raise AssertionError('the script never came to its end')


def test_replacing_a_file_leaves_the_old_or_the_new_one(run_python, tmp_path):
    def prepare(n):
        (tmp_path / str(n)).mkdir()
        (tmp_path / str(n) / 'a').write_text(OLD)
        return tmp_path / str(n)

    script = f"""
from credit_rl.runlog import atomic_write
from pathlib import Path
atomic_write(Path(sys.argv[2])/'a', lambda path: path.write_text({NEW!r}))
"""
    seen = []
    for folder in deaths(run_python, script, prepare):
        seen.append((folder / 'a').read_text())
        # what the dead process left does not get in the way
        atomic_write(folder / 'a', lambda path: path.write_text('next'))
        assert [p.name for p in folder.iterdir()] == ['a']
    assert set(seen) == {OLD, NEW}


@pytest.mark.parametrize('step', [20, 30], ids=['same step again', 'next step'])
def test_saving_a_checkpoint_leaves_whole_ones(run_python, tmp_path, step):
    def prepare(n):
        for s in (10, 20):
            save_checkpoint(tmp_path / str(n), s, lambda path: (path / 'weights').write_text(OLD), name='best')
        return tmp_path / str(n)

    script = f"""
from credit_rl.runlog import save_checkpoint
save_checkpoint(sys.argv[2], {step}, lambda path: (path/'weights').write_text({NEW!r}), keep=1, name='best')
"""
    seen = set()
    for folder in deaths(run_python, script, prepare):
        RunLog(folder, resume=True)
        at, path = latest_checkpoint(folder)
        text = (path / 'weights').read_text()
        assert (at, text) in {(20, OLD), (step, NEW)}
        assert (named_checkpoint(folder)[1] / 'weights').read_text() in (OLD, NEW)
        assert not [p for p in (folder / 'checkpoints').iterdir() if p.name.startswith('.')]
        seen.add(text)
    assert seen == {OLD, NEW}


# ---- trackers ----

def test_tensorboard_is_told_what_the_file_holds(tmp_path):
    "A resumed run hides what an earlier sitting told of later steps; NaN is not told, words neither."
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    log = RunLog(tmp_path / 'run', trackers=['tensorboard'])
    log.write_params({'steps': 4})
    for step in range(4): log.metrics(step, reward=step / 4, kl=math.nan)
    log.close()
    time.sleep(1.1)   # the second begins a file's name, files are read by name, and sittings lie further apart
    log = RunLog(tmp_path / 'run', resume=True, trackers=['tensorboard'])
    log.cut(1)
    log.metrics(2, reward=9.)
    board = EventAccumulator(str(tmp_path / 'run' / 'tensorboard'))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars('reward')] == [(0, 0.), (1, .25), (2, 9.)]
    assert set(board.Tags()['scalars']) == {'reward', 'seconds'}


def test_a_closed_run_leaves_no_thread_of_a_tracker(tmp_path):
    "Neither one that ends, nor one that goes back; and the folder is given back where a tracker's end fails."
    before = set(threading.enumerate())
    more = lambda: set(threading.enumerate()) - before
    for i in range(3):
        with RunLog(tmp_path / str(i), trackers=['tensorboard']) as log:
            for step in range(2): log.metrics(step, reward=step)
            assert more()
            log.cut(0)
            assert not more()
            log.metrics(1, reward=2)
    assert not more()
    log = RunLog(tmp_path / 'failing')
    log._trackers.opened = [(None, lambda: 1 / 0)]
    with pytest.raises(ZeroDivisionError): log.close()
    RunLog(tmp_path / 'failing', resume=True).close()


@pytest.mark.parametrize('name', ['wandb', 'trackio'])
def test_other_trackers_where_they_are_installed(tmp_path, name, monkeypatch):
    "Where the package is missing, the run is refused before it begins; where it is there, it is told, offline."
    if importlib.util.find_spec(name) is None:
        with pytest.raises(ImportError, match=f'pip install {name}'): RunLog(tmp_path / 'run', trackers=[name])
        assert not (tmp_path / 'run').exists()
        return
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('TRACKIO_DIR', str(tmp_path / 'tracked'))
    log = RunLog(tmp_path / 'run', trackers=[name])
    log.write_params({'steps': 2})
    for step in range(2): log.metrics(step, reward=step / 2)
    log.close()
    assert any(p.is_file() for p in (*tmp_path.glob('tracked/**/*'), *tmp_path.glob('run/wandb/**/*')))


# ---- which code made a run ----

SOURCE = '''
"What the module is for."
import math
def area(r):
    "Give the area."
    return math.pi * r ** 2
class Circle:
    def size(self): return f'{area(1):.2f}'
'''


@pytest.mark.parametrize('old, new, same', [
    ('What the module is for.', 'Another purpose.', True), ('    "Give the area."\n', '', True),
    ('import math\n', '\n# of the standard library\nimport math\n\n\n', True), ('r ** 2', 'r ** 3', False),
    ('return math.pi * r ** 2', 'return (math.pi * r) ** 2', False), (':.2f', ':.3f', False),
    ('import math', 'import cmath as math', False), ('def size(self):', 'def size(self, unit=1):', False),
    ('def area(r)', '@staticmethod\ndef area(r)', False), ('import math\n', 'import math\n"no docstring"\n', False)])
def test_a_hash_follows_what_the_code_does(old, new, same):
    assert SOURCE.count(old) == 1 and (source_hash(SOURCE) == source_hash(SOURCE.replace(old, new))) == same


@pytest.fixture
def package(tmp_path, monkeypatch):
    "Modules that stand for this library's, in a folder: a dict name -> source that can be written again."
    class Package(dict):
        def __setitem__(self, name, source):
            super().__setitem__(name, source)
            (tmp_path / f'{name}.py').write_text(source)
            runlog._read_module.cache_clear()

    def find(name):
        file = tmp_path / f'{name.removeprefix("credit_rl.")}.py'
        return type('Spec', (), {'origin': str(file)}) if file.exists() else None

    monkeypatch.setattr(runlog.importlib.util, 'find_spec', find)
    return Package()


def test_imports_are_followed_wherever_they_stand(package):
    package['start'] = ('from credit_rl.first import f\nimport credit_rl.second\nfrom credit_rl import third\nimport '
                        'os\n')
    package['first'] = 'def f():\n    from .lazy import g\n    return g()\n'
    package['lazy'] = 'from .start import f\n'                       # round in a circle
    package['second'] = 'try: from . import fourth\nexcept ImportError: pass\n'
    for name in ('third', 'fourth', 'stranger'): package[name] = 'x = 1\n'
    assert imported_modules('start') == ['first', 'fourth', 'lazy', 'second', 'start', 'third']
    recorded = code_hashes('start')
    assert changed_modules(recorded) == []
    package['stranger'] = 'x = 2\n'
    package['third'] = '# the same\nx = 1\n'
    assert changed_modules(recorded) == []
    # what is reached from now on shows where it is imported
    package['lazy'] = 'from .start import f\nfrom .stranger import x\n'
    assert changed_modules(recorded) == ['lazy'] and 'stranger' in code_hashes('start')


# ---- one writer ----

# argv: a folder, what to do with it once it is held; says so, and stays
WRITER = """
import os, sys, time
from credit_rl.runlog import Hold, RunLog
log = RunLog(sys.argv[1], resume=True)
log.write_params({'seed': 1})
log.metrics(0, reward=.5)
if sys.argv[2] == 'share': log.share()
if sys.argv[2] == 'fork' and os.fork() == 0: os.setsid()
os.write(1, f'{os.getpid()}{os.linesep}'.encode())                  # a whole line, also of two processes
time.sleep(600)
"""


@pytest.fixture
def start(root):
    "Starts a process that does what a script says of a folder: (Popen, the process id that it printed)."
    started = []
    def one(script, *args, **env):
        process = subprocess.Popen([sys.executable, '-c', script, *map(str, args)], cwd=root, text=True,
                                   env={**os.environ, **env}, stdout=subprocess.PIPE, start_new_session=True)
        started.append(process)
        return process, [int(process.stdout.readline()) for _ in range(2 if 'fork' in args else 1)]
    yield one
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def contents(folder): return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.mark.parametrize('state, resume', [('running', True), ('stopped', False)])
def test_a_second_writer_is_refused_by_the_name_of_the_first(start, tmp_path, state, resume):
    "Also where the first is only stopped; nothing in the folder is touched."
    process, (pid,) = start(WRITER, tmp_path, 'alone')
    if state == 'stopped': process.send_signal(signal.SIGSTOP)
    before = contents(tmp_path)
    wanted = rf'{tmp_path} is being written by process {pid} on {socket.gethostname()}, since \d{{4}}-\d\d-\d\d \d\d:'
    for _ in range(2):
        with pytest.raises(FolderInUse, match=wanted): RunLog(tmp_path, resume)
    assert contents(tmp_path) == before


@pytest.mark.parametrize('how', ['alone', 'fork'])
def test_what_a_killed_writer_held_is_taken_over(start, tmp_path, how):
    "Also where a process that it forked, which does not write, outlives it."
    process, pids = start(WRITER, tmp_path, how)
    process.kill()
    process.wait()
    try:
        with RunLog(tmp_path, resume=True) as log: log.metrics(1, reward=1.)
    finally:
        for pid in set(pids) - {process.pid}: os.kill(pid, signal.SIGKILL)
    assert list(metrics_by_step(tmp_path)) == [0, 1] and not (tmp_path / '.writer').exists()


def test_a_process_is_refused_its_own_folder_until_it_lets_go(tmp_path):
    log = RunLog(tmp_path / 'run')
    with pytest.raises(FolderInUse): RunLog(tmp_path / '..' / tmp_path.name / 'run', resume=True)     # by another name
    del log                                                              # no longer used
    with RunLog(tmp_path / 'run', resume=True): pass
    for broken in ('{"step": 0, "rew\n', '{"step": 1}\n'):               # the first is refused, and frees the folder
        (tmp_path / 'run' / 'metrics.jsonl').write_text(broken)
        with contextlib.suppress(ValueError): kept = RunLog(tmp_path / 'run', resume=True)
    assert kept.folder == tmp_path / 'run' and os.listdir(kept.folder) != ['metrics.jsonl']


def test_what_is_refused_for_another_reason_leaves_no_lock(tmp_path):
    with RunLog(tmp_path) as log: log.write_params({'seed': 1})
    with pytest.raises(FileExistsError): RunLog(tmp_path)
    assert os.listdir(tmp_path) == ['params.yaml']


@pytest.mark.parametrize('words', [
    ['audit', 'run=RUN', 'model=data/tiny_base'], ['export', 'runs/compare/tspo-101', 'RUN']], ids=lambda words: words[0])
def test_whatever_else_writes_a_folder_is_refused_too(root, tmp_path, monkeypatch, words):
    "Before it computes anything; and what is refused leaves no folder behind that it made."
    monkeypatch.chdir(root)
    with Hold(tmp_path), pytest.raises(SystemExit, match=rf'{tmp_path} is being written by process {os.getpid()}'):
        command([word.replace('RUN', str(tmp_path)) for word in words])
    assert os.listdir(tmp_path) == []
    with contextlib.suppress(ValueError), writing(tmp_path / 'new'): raise ValueError
    assert os.listdir(tmp_path) == []


RANK = """
import os, sys, time
from credit_rl.runlog import RunLog
log = RunLog(sys.argv[1], resume=True)
log.metrics(1, reward=.5)
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_rank_shares_the_folder_with_the_one_that_started_it(start, tmp_path):
    "It alone; and the folder is in use as long as one of the two is there, whichever goes first."
    caller, (pid,) = start(WRITER, tmp_path, 'share')
    def refused():
        with pytest.raises(FolderInUse): RunLog(tmp_path, resume=True)
    refused()
    with pytest.raises(ValueError): start(RANK, tmp_path, CREDIT_RL_CALLER=str(os.getpid()))   # another's rank
    rank, _ = start(RANK, tmp_path, CREDIT_RL_CALLER=str(pid))
    refused()
    caller.kill()
    caller.wait()
    with pytest.raises(FolderInUse, match=f'process {rank.pid} on'): RunLog(tmp_path, resume=True)
    rank.kill()
    rank.wait()
    RunLog(tmp_path, resume=True).close()


@pytest.mark.parametrize('first', ['rank', 'caller'])
def test_the_file_goes_with_the_last_of_those_who_share(tmp_path, start, first):
    hold = Hold(tmp_path)
    hold.share()
    rank, _ = start(RANK, tmp_path, CREDIT_RL_CALLER=str(os.getpid()))
    if first == 'rank':
        rank.kill()
        rank.wait()
        hold.close()
        assert not (tmp_path / '.writer').exists()
        return
    hold.close()
    assert (tmp_path / '.writer').exists()
    with pytest.raises(FolderInUse): Hold(tmp_path)


def test_without_locks_of_the_file_system_the_file_is_believed(tmp_path, monkeypatch, start):
    "The one it names counts while it runs; one of another host counts until somebody removes the file."
    monkeypatch.setattr(runlog, '_flock', lambda fd, shared=False: None)
    file = tmp_path / '.writer'
    claim = lambda pid, host: file.write_text(json.dumps({'pid': pid, 'host': host, 'since': 'today'}))
    process, (pid,) = start(WRITER, tmp_path / 'other', 'alone')
    claim(pid, socket.gethostname())
    with pytest.raises(FolderInUse, match=f'process {pid} .* no locks.*remove {file}'): Hold(tmp_path)
    process.kill()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)                    # a zombie: nobody has asked yet how it ended
    with Hold(tmp_path) as held:
        with pytest.raises(FolderInUse, match='process'): Hold(tmp_path)
    assert not file.exists() and held
    claim(pid, 'elsewhere')
    with pytest.raises(FolderInUse, match=f'process {pid} on elsewhere, since today; .*remove {file}'): Hold(tmp_path)
    for nonsense in ('', 'half', '[1]', '{"pid": "x"}', '[' * 400, '{"pid": -1}'):
        file.write_text(nonsense)
        Hold(tmp_path).close()


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / 'precious').write_text('mine')
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / '.writer').symlink_to(tmp_path / 'precious')
    with pytest.raises(OSError, match='written'): RunLog(tmp_path / 'run')
    assert (tmp_path / 'precious').read_text() == 'mine'


def test_many_at_once_and_one_writes(root, tmp_path):
    "Of four that start together, and let go, and start again, never two hold the folder."
    script = """
import os, sys, time
from credit_rl.runlog import FolderInUse, Hold
end, count = time.monotonic() + 1., 0
while time.monotonic() < end:
    try: hold = Hold(sys.argv[1])
    except FolderInUse: continue
    with hold:
        os.close(os.open(f'{sys.argv[1]}/alone', os.O_CREAT | os.O_EXCL))      # fails where another is here
        count += 1
        os.unlink(f'{sys.argv[1]}/alone')
print(count)
"""
    all_of_them = [subprocess.Popen([sys.executable, '-c', script, str(tmp_path)], cwd=root, text=True,
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(4)]
    said = [p.communicate()[0] for p in all_of_them]
    assert all(p.returncode == 0 for p in all_of_them), said
    assert sum(map(int, said)) > 4 and os.listdir(tmp_path) == []


# ---- files that lost their end ----

def run_of_three(folder):
    "A run with a checkpoint after each of its three steps."
    with RunLog(folder) as log:
        log.write_params({'seed': 1})
        for step in range(3):
            log.turns(step, [{'kind': 'train', 'text': f'said {step}'}])
            log.metrics(step, loss=step)
            save_checkpoint(folder, step, lambda path: (path / 'weights').write_text('w'))
    return folder


@pytest.mark.parametrize('name', ['metrics.jsonl', 'turns.jsonl.gz'])
def test_a_run_does_not_go_on_over_a_gap(tmp_path, name):
    "Cut anywhere: the checkpoint is beyond what the file tells."
    run = run_of_three(tmp_path / 'run')
    whole = (run / name).read_bytes()
    for lost in [1, 2, *range(7, len(whole), 29), len(whole)]:
        (run / name).write_bytes(whole[:-lost])
        with RunLog(run, resume=True) as log, pytest.raises(ValueError, match=f'{name} has .* its end is gone'):
            log.cut(2)
    (run / name).write_bytes(whole)
    with RunLog(run, resume=True) as log: log.cut(2)
    assert (run / name).read_bytes() == whole


def test_the_ways_to_go_on_without_the_end_of_a_file(tmp_path):
    run = run_of_three(tmp_path / 'run')
    lines = (run / 'metrics.jsonl').read_bytes().splitlines(keepends=True)
    (run / 'metrics.jsonl').write_bytes(b''.join(lines[:2]))
    shutil.rmtree(run / 'checkpoints' / 'step-000002')            # the checkpoint before, whose lines are all there
    with RunLog(run, resume=True) as log: log.cut(1)
    (run / 'metrics.jsonl').write_bytes(lines[0])
    (run / 'checkpoints' / 'step-000001' / 'written.json').unlink()
    with RunLog(run, resume=True) as log: log.cut(1)


def test_parameters_that_lost_their_end_say_how_to_go_on(tmp_path):
    with RunLog(tmp_path) as log: log.write_params({'seed': 1, 'options': {'alpha': [1, 2]}})
    whole = (tmp_path / 'params.yaml').read_bytes()
    for lost in range(1, len(whole)):
        (tmp_path / 'params.yaml').write_bytes(whole[:-lost])
        with RunLog(tmp_path, resume=True) as log:
            try: log.write_params({'seed': 1, 'options': {'alpha': [1, 2]}})
            except ValueError as e: assert 'restore' in str(e) and 'choose another name' in str(e)
            else: assert (tmp_path / 'params.yaml').read_bytes() == whole      # what was lost said nothing


def test_weights_that_find_no_room_say_so(tmp_path):
    class SafetensorError(Exception): pass
    with pytest.raises(OSError, match='written'):
        with atomic_folder(tmp_path / 'model'): raise SafetensorError('I/O error: No space left on device')
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize('what', ['file', 'link to a file', 'loop'])
def test_what_is_no_folder_is_refused_before_one_is_written_in_its_place(tmp_path, what):
    (tmp_path / 'a').write_text('kept')
    if what == 'link to a file': (tmp_path / 'b').symlink_to(tmp_path / 'a')
    if what == 'loop': (tmp_path / 'b').symlink_to(tmp_path / 'b')
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(NotADirectoryError, match='folder'):
        with atomic_folder(tmp_path / ('a' if what == 'file' else 'b')): pytest.fail('begun')
    assert sorted(os.listdir(tmp_path)) == before and (tmp_path / 'a').read_text() == 'kept'


@pytest.mark.parametrize('given', ['{model: m, api_key: sk-mine}', '{"judge": {"base_url": "https://me:sk-mine@h/v1"}}',
                                   "['{api_key: sk-mine}']"])
def test_a_key_in_a_text_is_found_too(given, tmp_path):
    "As papermill's -p hands a dict over."
    with pytest.raises(ValueError) as refusal: check_secrets({'judge': given}, tmp_path)
    assert 'sk-mine' not in str(refusal.value)
    check_secrets({'judge': '{model: m, key_from: MY_KEY}', 'about': 'api_key: {', 'file': 'my_api_key.txt'}, tmp_path)


def test_settings_are_written_in_utf_8_whatever_the_host_speaks(tmp_path, run_python):
    code = "import sys; from credit_rl.runlog import RunLog; RunLog(sys.argv[1]).write_params({'path': 'caf\\u00e9'})"
    run_python('-X', 'utf8=0', '-c', code, str(tmp_path / 'run'), env={'LC_ALL': 'C', 'PYTHONCOERCECLOCALE': '0'})
    assert read_yaml(tmp_path / 'run' / 'params.yaml')['path'] == 'caf\u00e9'


@pytest.mark.parametrize('endpoint, writes', [('127.0.0.1:29500', 'the first'), ('nowhere.invalid:29500', 'none')])
def test_a_run_on_several_hosts_has_one_notebook(tmp_path, run_python, endpoint, writes):
    "By the first of two papermills; the run has begun when the second comes."
    folder = tmp_path / 'runs' / 'one'
    text = lambda who: json.dumps({
        'cells': [{'cell_type': 'code', 'source': f"run = ''\nresume = False  # {who}", 'execution_count': None,
                   'metadata': {'tags': ['parameters']}}],
        'metadata': {'papermill': {'parameters': {'run': str(folder), 'hosts': 2, 'endpoint': endpoint}}}})
    code = 'import sys\nfrom credit_rl.runlog import RunFolders\nRunFolders.write(*sys.argv[1:])'
    RunFolders.write(text('first'), folder / 'notebook.ipynb')
    folder.mkdir(parents=True, exist_ok=True)
    with RunLog(folder) as log:
        log.write_params({'steps': 1})
        run_python('-c', code, text('second'), str(folder / 'notebook.ipynb'))
    found = (folder / 'notebook.ipynb').read_text() if (folder / 'notebook.ipynb').exists() else None
    assert found == (text('first') if writes == 'the first' else None)
