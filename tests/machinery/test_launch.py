"""Runs on several ranks: the numbers of one process, and what happens when a rank, the disk or the caller fails."""
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from credit_rl.estimate import memory, read_sizes
from credit_rl.export import export_run, read_policy
from credit_rl.launch import is_rank
from credit_rl.models import load_model
from credit_rl.runlog import latest_checkpoint, read_metrics, read_params, read_turns, same_metrics
from credit_rl.settings import make_config
from credit_rl.setup import plan_of
from credit_rl import train as training
from credit_rl.train import train
from made_runs import SHORT
from started import Started, ranks_of

if not importlib.util.find_spec('deepspeed'):
    pytest.skip('deepspeed is not installed: pip install credit_rl[train]', allow_module_level=True)
psutil = pytest.importorskip('psutil')

ROOT = Path(__file__).resolve().parents[2]
# an odd number of questions, so that ranks have unequal shares
SHORT = {**SHORT, 'questions_per_step': 3, 'dev_questions': 7, 'test_questions': 7, 'learning_rate': 1e-4}
# a critic on a backbone of which only additions are trained; played by older weights while the learner learns
ADAPTED, AHEAD = dict(method='carl', lora={'r': 4}, learning_rate=1e-3), dict(ahead=1, correction='truncated', gap=10.)
THREE = dict(learner='deepspeed', stage=3, ranks=2)
KINDS = {
    'plain': {}, 'one rank, stage 2': dict(learner='deepspeed', stage=2),
    'two ranks, stage 2': dict(learner='deepspeed', stage=2, ranks=2),
    'plain, checkpointing': dict(gradient_checkpointing=True),
    'two ranks, stage 3': {**THREE, 'gradient_checkpointing': True,
                           'deepspeed': {'zero_optimization': {'stage3_param_persistence_threshold': 0}}},
    'plain, adapted': ADAPTED, 'two ranks, stage 3, adapted': {**ADAPTED, **THREE},
    'plain, ahead': AHEAD, 'two ranks, stage 3, ahead': {**AHEAD, **THREE}}
OTHERS = [kind for kind in KINDS if not kind.startswith('plain') or 'checkpointing' in kind]


def plain_of(kind): return next((f'plain, {how}' for how in ('adapted', 'ahead') if how in kind), 'plain')


TAUGHT = dict(method='tips', teacher_every=2)     # by a copy of the policy that is made anew, and kept
TEACHERS = {'plain, taught': TAUGHT, 'one rank, stage 3, taught': dict(learner='deepspeed', stage=3, **TAUGHT)}

# a run on one rank, from its second step on by two
MORE = 'one rank, stage 2, then two'


@pytest.fixture(autouse=True, scope='module')
def on_a_cpu():
    "This process and what it starts."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, 'is_available', lambda: False)
        patch.setenv('CUDA_VISIBLE_DEVICES', '')
        yield


def by_ranks(kinds):
    "Kinds of runs as parameters; those of two ranks are made together, which takes long."
    return [pytest.param(kind, marks=[pytest.mark.long] * ('two ranks' in kind)) for kind in kinds]


def gone(processes, seconds=60):
    "Whether processes end (a long time is given: it is only used up if they don't)."
    return not psutil.wait_procs(processes, seconds)[1]


def cut_back(whole, run):
    "A copy of a run as it was after its second step."
    shutil.copytree(whole, run, symlinks=True)
    (run / 'summary.json').unlink()
    shutil.rmtree(run / 'checkpoints' / 'step-000003')


def ask_two(folder, wanted):
    "Let two ranks make whole runs, a list of their settings, one after the other."
    folder.mkdir()
    (folder / 'runs.json').write_text(json.dumps(wanted))
    code, said = Started('tests.tools.ranks', folder, folder / 'runs.json').end(540)
    assert code == 0, said


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    "Folders of whole runs by kind; one of two ranks is made with all of these, any other when it is first asked for."
    made, place = {}, tmp_path_factory.mktemp('runs')
    asked = {**KINDS, **TEACHERS, MORE: {**KINDS['one rank, stage 2'], 'ranks': 2, 'resume': True}}
    folder = lambda kind: place / kind.replace(', ', '-').replace(' ', '-')
    def get(kind):
        if kind not in made and 'ranks' in asked[kind]:
            cut_back(get('one rank, stage 2'), folder(MORE))
            pairs = {kind: folder(kind) for kind in asked if 'ranks' in asked[kind]}
            ask_two(place / 'two', [{**SHORT, **asked[kind], 'run': str(run)} for kind, run in pairs.items()])
            made.update(pairs)
        elif kind not in made:
            made[kind] = train({**SHORT, **asked[kind], 'run': str(folder(kind))}, say=lambda line: None)
        return made[kind]
    return get


def results(folder):
    return {k: v for k, v in json.loads((folder / 'summary.json').read_text()).items() if k not in ('seconds', 'code')}


@pytest.mark.parametrize('kind', by_ranks(OTHERS))
@pytest.mark.long
def test_a_run_has_the_numbers_of_the_plain_one(runs, kind):
    plain, folder = runs(plain_of(kind)), runs(kind)
    first, second = read_metrics(plain), read_metrics(folder)
    assert [line for line in same_metrics(plain, folder, 1e-4) if 'grad_norm' not in line] == []
    # its size is in the hundreds
    assert first.grad_norm.tolist() == pytest.approx(second.grad_norm.tolist(), rel=1e-4, nan_ok=True)
    # what was played is the same, not nearly
    for name in ('reward', 'em', 'answer_rate', 'turns', 'tokens', 'updates', 'zero_advantage'):
        assert first[name].dropna().tolist() == second[name].dropna().tolist(), name
    assert first.updates[1:].gt(0).all() and first.loss[1:].abs().gt(0).all()
    ids = lambda f: [[turn['action_ids'] for turn in row['trajectory']['turns']] for row in read_turns(f)]
    assert ids(plain) == ids(folder)
    assert results(folder) == results(plain)
    if 'ahead' in kind:                              # each rank played its share, and step 4 lies in the checkpoint
        assert second.stale.dropna().tolist() == [0, 2, 2]
        (played,) = training.read_ahead(latest_checkpoint(folder)[1] / training.AHEAD_FILE)
        assert (played.step, played.updates) == (4, 4)


@pytest.mark.long
@pytest.mark.parametrize('kind', by_ranks(kind for kind in KINDS if 'ahead' not in kind and kind != 'plain, checkpointing'))
def test_what_a_run_made_can_be_exported(runs, tmp_path, kind):
    "Weights put together, additions merged: any reader of Hugging Face models loads the plain run's."
    folder, model = runs(kind), load_model(SHORT['model'])[0]
    plain = read_policy(runs(plain_of(kind)), 'newest')[0]
    made, tokenizer = load_model(str(export_run(folder, tmp_path / 'model', 'newest')))
    assert tokenizer.get_vocab() == load_model(SHORT['model'])[1].get_vocab()
    moved = 0.
    for (name, w), (_, wanted), (_, base) in zip(made.named_parameters(), plain.named_parameters(),
                                                 model.named_parameters()):
        torch.testing.assert_close(w, wanted, atol=1e-4, rtol=0, msg=lambda text: f'{name}: {text}')
        moved = max(moved, (w - base).abs().max().item())
    assert moved > 1e-4


@pytest.mark.long
def test_only_additions_are_trained(runs):
    state = torch.load(latest_checkpoint(runs('plain, adapted'))[1] / 'learner.pt', weights_only=True)['scorer']
    base = dict(load_model(SHORT['model'])[0].named_parameters())
    kept = {name.removeprefix('model.').replace('.base_layer', ''): w for name, w in state.items() if 'lora_' not in name}
    assert all(torch.equal(kept[name], w) for name, w in base.items())
    assert all(w.abs().max() > 0 for name, w in state.items() if 'lora_B' in name)       # they began as zero


@pytest.mark.long
def test_a_run_on_one_rank_makes_no_rank_of_what_comes_next(runs):
    "DeepSpeed wants LOCAL_RANK, by which accelerate sets RANK: that makes a rank of nothing, of no child either."
    from accelerate import PartialState
    runs('one rank, stage 2')
    with mock.patch.dict(os.environ):                        # put back afterwards
        PartialState._reset_state()
        PartialState(cpu=True)
        PartialState._reset_state()
        assert 'RANK' in os.environ and not is_rank()
        code = 'from credit_rl.launch import is_rank; print(is_rank())'
        assert subprocess.check_output([sys.executable, '-c', code], text=True) == 'False\n'


@pytest.mark.long
@pytest.mark.parametrize('kind', by_ranks(['plain', 'one rank, stage 2', 'two ranks, stage 2', 'two ranks, stage 3',
                                           *TEACHERS]))
def test_a_checkpoint_is_as_large_as_was_estimated(runs, kind):
    written = sum(p.stat().st_size for p in latest_checkpoint(runs(kind))[1].rglob('*') if p.is_file())
    config = make_config({**SHORT, **{**KINDS, **TEACHERS}[kind]})
    promised = memory(read_sizes(config.model), plan_of(config))['checkpoint']
    assert written == pytest.approx(promised, rel=.05)


@pytest.mark.long
@pytest.mark.parametrize('kind, ranks', [
    ('two ranks, stage 2', 1), ('two ranks, stage 3, adapted', 1), ('one rank, stage 2', 2)])
def test_a_run_goes_on_on_another_number_of_ranks(runs, tmp_path, kind, ranks):
    "Policy, critic, optimiser and order are there from its second step: a whole run's numbers."
    whole, run = runs(kind), runs(MORE) if ranks == 2 else tmp_path / 'run'
    if ranks == 1:
        cut_back(whole, run)
        train({**SHORT, **KINDS[kind], 'ranks': 1, 'resume': True, 'run': str(run)}, (lines := []).append)
        assert 'resumed after step 2' in lines
    assert read_params(run)['ranks'] == ranks
    assert [line for line in same_metrics(whole, run, 1e-4) if 'grad_norm' not in line] == []
    assert read_metrics(run).grad_norm.tolist() == pytest.approx(
        read_metrics(whole).grad_norm.tolist(), rel=1e-4, nan_ok=True)
    assert results(whole) == results(run)


def ended(process):
    try: return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess: return True


def end_by(process, how):
    "Send a signal to a caller whose two ranks run; all that it started ends, first if it has time to see to it."
    family = psutil.Process(process.pid).children(recursive=True)
    assert sorted(ranks_of(process.pid)) == [0, 1]
    process.send_signal(how)
    process.communicate()
    assert process.returncode != 0 and (how == signal.SIGKILL or all(map(ended, family))) and gone(family)


@pytest.mark.parametrize('how', [pytest.param(signal.SIGTERM, marks=pytest.mark.nightly), signal.SIGINT, signal.SIGKILL],
                         ids=lambda how: how.name)
@pytest.mark.long
def test_ending_the_caller_ends_the_ranks(start, tmp_path, how):
    "Also where the caller has no time to end them itself."
    process = start('tests.tools.ranks', tmp_path)
    process.read_until('all are here')
    end_by(process, how)


@pytest.mark.long
def test_ranks_end_with_their_launcher(start, tmp_path):
    process = start('tests.tools.ranks', tmp_path)
    process.read_until('all are here')
    ranks, (launcher,) = ranks_of(process.pid), psutil.Process(process.pid).children()
    assert sorted(ranks) == [0, 1] and launcher.pid not in [p.pid for p in ranks.values()]
    launcher.kill()
    assert gone(list(ranks.values()))
    code, said = process.end()
    assert code != 0 and 'ended without summary.json' in said


@pytest.mark.long
def test_ranks_that_are_killed_at_once_are_all_named(start, tmp_path):
    process = start('tests.tools.ranks', tmp_path)
    process.read_until('all are here')
    ranks = list(ranks_of(process.pid).values())
    for rank in ranks: rank.send_signal(signal.SIGKILL)
    code, said = process.end()
    assert code != 0 and gone(ranks)
    assert 'rank 0 was ended by SIGKILL' in said and 'rank 1 was ended by SIGKILL' in said, said


@pytest.mark.parametrize('zombie', [False, True], ids=['gone', 'a zombie'])
def test_a_rank_ends_with_the_one_that_asked_for_the_run(zombie):
    "Also if its launcher stays, or nobody asks how the one that asked for it ended."
    asked = subprocess.Popen(['sleep', '600'])
    code = 'import time\nfrom credit_rl.launch import _end_with_parent\n_end_with_parent()\nprint("here", flush=True)\n'
    rank = subprocess.Popen([sys.executable, '-c', f'{code}time.sleep(600)'], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                            env={**os.environ, 'CREDIT_RL_CALLER': str(asked.pid)})
    try: assert rank.stdout.readline() == 'here\n' and rank.poll() is None
    finally: asked.kill()
    if not zombie: asked.wait()
    assert rank.wait(60) == -signal.SIGKILL
    if zombie: assert psutil.Process(asked.pid).status() == psutil.STATUS_ZOMBIE


# ---- what is refused before anything starts ----

@pytest.mark.parametrize('settings, message', [
    (dict(ranks=2), 'one process'), (dict(learner='deep'), 'plain'), (dict(learner='deepspeed', stage=4), 'stage'),
    (dict(deepspeed={'a': 1}), 'learner is'), (dict(learner='deepspeed', dtype='float16'), "'bfloat16'"),
    (dict(ranks=0), 'ranks'), (dict(learner='deepspeed', ranks=2, hostfile='hosts'), 'endpoint')])
def test_what_cannot_work_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message): train({**SHORT, **settings, 'run': str(tmp_path / 'run')})
    assert not (tmp_path / 'run').exists()


def test_a_folder_with_another_run_is_refused_before_ranks_are_started(tmp_path):
    (tmp_path / 'summary.json').write_text('{"steps": 99, "collapsed": false}')
    with pytest.raises(FileExistsError, match='already holds a run'):
        train({**SHORT, **KINDS['two ranks, stage 2'], 'run': str(tmp_path)})
    assert not (tmp_path / 'ranks.log').exists()
