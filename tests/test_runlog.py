"""The run folder under real kills: a process is ended, without any clean-up, at each of its file operations in turn."""
import importlib.util
import math

import pytest

from credit_rl.runlog import RunLog

# argv: how many file operations to let pass, the run folder. The process dies at the next one and exits 9; if none is left it exits 0.
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
    from credit_rl.runlog import atomic_write

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
        atomic_write(folder / 'a', lambda path: path.write_text('next'))  # what the dead process left does not get in the way
        assert [p.name for p in folder.iterdir()] == ['a']
    assert set(seen) == {OLD, NEW}


@pytest.mark.parametrize('step', [20, 30], ids=['same step again', 'next step'])
def test_saving_a_checkpoint_leaves_whole_ones(run_python, tmp_path, step):
    from credit_rl.runlog import RunLog, latest_checkpoint, named_checkpoint, save_checkpoint

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
    log = RunLog(tmp_path / 'run', resume=True, trackers=['tensorboard'])
    log.cut(1)
    log.metrics(2, reward=9.)
    board = EventAccumulator(str(tmp_path / 'run' / 'tensorboard'))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars('reward')] == [(0, 0.), (1, .25), (2, 9.)]
    assert set(board.Tags()['scalars']) == {'reward', 'seconds'}


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
    assert any(p.is_file() for p in (*tmp_path.glob('tracked/**/*'), *tmp_path.glob('run/wandb/**/*')))
