"""Whole runs: what is refused before anything is computed, that a run repeats itself, and that one killed anywhere ends as if it had not been."""
import errno
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from credit_rl import train as training
from credit_rl.runlog import RunLog, latest_checkpoint, named_checkpoint, read_metrics, read_turns, same_metrics
from credit_rl.train import main, train

ROOT = Path(__file__).resolve().parents[1]
BASE = str(ROOT / 'data' / 'tiny_base')
# a run of two seconds with checkpoints in it; the KL term makes it update at every step, so that a state that is not restored shows
SHORT = dict(model=BASE, steps=4, eval_every=2, questions_per_step=4, group_size=4, questions=50, dev_questions=8, test_questions=8,
             max_turns=3, turn_tokens=12, kl=.01, world={'size': 200}, threads=1)


def command(settings):
    "The run as one types it."
    return [sys.executable, '-m', 'credit_rl.train', *(f'{k}={json.dumps(v)}' for k, v in settings.items())]


def on_a_cpu():
    "The environment of a run on the CPU: the same numbers everywhere."
    return {**os.environ, 'CUDA_VISIBLE_DEVICES': '', 'PYTHONUNBUFFERED': '1'}


# ---- the same again ----

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "A run by the command line that nobody interrupted, and the seconds it took; its lines lie beside it."
    folder = tmp_path_factory.mktemp('runs') / 'whole'
    since = time.monotonic()
    done = subprocess.run(command({**SHORT, 'run': str(folder)}), cwd=ROOT, env=on_a_cpu(), stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    (folder / 'lines').write_text(done.stdout)
    return folder, time.monotonic() - since


def results(folder):
    "The numbers of a run's summary, the clock's apart."
    return {k: v for k, v in json.loads((folder / 'summary.json').read_text()).items() if k != 'seconds'}


def logged(folder):
    "The lines of metrics.jsonl as they were written, the clocks apart."
    return [{k: v for k, v in json.loads(line).items() if not k.startswith('seconds')} for line in (folder / 'metrics.jsonl').read_text().splitlines()]


def assert_same(a, b):
    assert same_metrics(a, b) == [] and logged(a) == logged(b)
    assert read_turns(a) == read_turns(b)
    assert results(a) == results(b)
    assert latest_checkpoint(a)[0] == latest_checkpoint(b)[0] and named_checkpoint(a)[0] == named_checkpoint(b)[0]


def test_a_run_tells_how_it_goes(whole):
    folder, _ = whole
    lines = (folder / 'lines').read_text().splitlines()
    for said in ('ceiling', 'base: EM', 'step 1/4', 'step 4/4', 'final: EM'):
        assert any(said in line for line in lines), said
    table = read_metrics(folder)
    assert table.step.tolist() == [0, 1, 2, 3, 4]
    assert table.dev_em.notna().tolist() == [True, False, True, False, True]
    assert table.updates[1:].eq(2).all() and table.grad_norm[2:].gt(0).all() and table.reward[1:].between(0, 1).all()
    assert table.zero_advantage[1:].lt(1).any()
    assert table.logp_gap.dropna().max() < 1e-4
    summary = results(folder)
    assert summary['steps'] == 4 and summary['questions'] == 8 and not summary['collapsed']
    assert {row['kind'] for row in read_turns(folder)} == {'before', 'train', 'after'}
    assert all(len(row['advantages']) == len(row['trajectory']['turns']) for row in read_turns(folder) if row['kind'] == 'train')


def test_the_same_settings_give_the_same_run(whole, tmp_path):
    "Another process, after other work, in another folder: the same metrics and the same rollouts."
    context.Process(target=sitting, args=({**SHORT, 'run': str(tmp_path / 'again')},)).start()
    (child,) = multiprocessing.active_children()
    child.join()
    assert child.exitcode == 0
    assert_same(whole[0], tmp_path / 'again')


# ---- killed, and resumed ----

context = multiprocessing.get_context('forkserver')
context.set_forkserver_preload(['credit_rl.train', 'transformers.models.qwen2.modeling_qwen2'])


def deadly(owner, name, count, matches=lambda *args: True, before=lambda *args: None):
    "Make the `count`-th call of `owner.name` that `matches` the process's last deed; `before` is called with its arguments."
    call, left = getattr(owner, name), [count]

    def counted(*args, **kwargs):
        if matches(*args):
            left[0] -= 1
            if left[0] == 0:
                before(*args)
                os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    setattr(owner, name, counted)


def half_written(log, name, step, data):
    with open(log.folder / name, 'ab') as f:
        f.write(data[:len(data) // 2])


# The process dies ... each is called in the process that is to die.
DEATHS = {
    'before anything is logged': lambda: deadly(RunLog, '_append', 1),
    'in the middle of the first line of metrics': lambda: deadly(RunLog, '_append', 2, before=half_written),
    'in the middle of the rollouts of step 1': lambda: deadly(RunLog, '_append', 3, before=half_written),
    'in the middle of the metrics of step 2, before its checkpoint': lambda: deadly(RunLog, '_append', 6, before=half_written),
    'between the two renames of a checkpoint': lambda: deadly(os, 'rename', 2, lambda a, b: str(b).endswith('step-000002') or str(b).endswith('step-000000')),
    'in the middle of the last rollouts': lambda: deadly(RunLog, '_append', 11, before=half_written),
    'with everything done but the summary': lambda: deadly(os, 'replace', 1, lambda a, b: str(b).endswith('summary.json')),
    'before the third best checkpoint gets its name': lambda: deadly(os, 'replace', 3, lambda a, b: str(b).endswith('best')),
}
ANYWHERE = [death for death in DEATHS if 'third' not in death]             # those that every run meets


def sitting(settings, death=None, rising=False):
    "A run, or the rest of one, in a process of its own. `rising`: pretend that the dev score rises with each step, so that each checkpoint is the best."
    sys.stdout = sys.stderr = open(os.devnull, 'w')
    torch.cuda.is_available = lambda: False
    if rising:
        evaluate = training._Run.evaluate

        def better(run, part):
            scores, groups = evaluate(run, part)
            return (scores | {'em': len(run.memory['rates']) / 10} if part == 'dev' else scores), groups
        training._Run.evaluate = better
    if death:
        DEATHS[death]()
    train(settings)


def sit(settings, **how):
    "Exit code of a sitting."
    child = context.Process(target=sitting, args=(settings,), kwargs=how)
    child.start()
    child.join()
    return child.exitcode


@pytest.mark.parametrize('death', ANYWHERE)
def test_a_killed_run_ends_as_if_it_had_not_been(whole, tmp_path, death):
    settings = {**SHORT, 'run': str(tmp_path / 'killed')}
    assert sit(settings, death=death) == -signal.SIGKILL
    assert not (tmp_path / 'killed' / 'summary.json').exists()
    assert sit({**settings, 'resume': True}) == 0
    assert_same(whole[0], tmp_path / 'killed')


def test_killed_at_random_moments_again_and_again(whole, tmp_path):
    "Each sitting lives for a while; the run still arrives."
    settings, rng, killed = {**SHORT, 'run': str(tmp_path / 'killed')}, random.Random(), 0
    for life in [rng.uniform(.1, 1) for _ in range(3)] + [600]:
        child = context.Process(target=sitting, args=({**settings, 'resume': True},))
        child.start()
        child.join(life * min(5, whole[1]))
        if child.exitcode is None:
            child.kill()
            killed += 1
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL)
    assert_same(whole[0], tmp_path / 'killed'), f'killed {killed} times'


def test_the_command_is_killed_and_resumed(whole, tmp_path):
    settings = {**SHORT, 'run': str(tmp_path / 'killed')}
    run = subprocess.Popen(command(settings), cwd=ROOT, env=on_a_cpu(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in run.stdout:
        if line.startswith('step 3/4'):
            break
    run.kill()
    run.communicate()
    assert run.returncode == -signal.SIGKILL
    assert latest_checkpoint(tmp_path / 'killed')[0] == 2 and not (tmp_path / 'killed' / 'summary.json').exists()
    assert sit({**settings, 'resume': True}) == 0
    assert_same(whole[0], tmp_path / 'killed')


@pytest.mark.skipif(not hasattr(resource, 'prlimit'), reason='limits of another process are set on Linux alone')
def test_a_disk_that_takes_no_more_ends_a_run_in_a_line(whole, tmp_path):
    "Said are the file, what stands in the way and what stays; with room again the run goes on, to the very numbers of a whole one."
    settings = {**SHORT, 'run': str(tmp_path / 'run')}
    run = subprocess.Popen(command({**settings, 'track': ''}), cwd=ROOT, env=on_a_cpu(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in run.stdout:
        if line.startswith('base: EM'):                                # the first checkpoint is there
            resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (300_000, 300_000))
            break
    said = run.communicate()[0]
    kept = latest_checkpoint(tmp_path / 'run')[0]
    message = said.splitlines()[-1]
    assert run.returncode == 1 and 'Traceback' not in said and not (tmp_path / 'run' / 'summary.json').exists(), said
    assert message.startswith(f'credit_rl.train: the checkpoint {tmp_path}/run/checkpoints/step-00000{kept + 2} could not be written (RuntimeError: '), said
    for words in ('GB free', 'the file size limit is 0.3 MB', 'earlier checkpoints are kept', 'resume=True'): assert words in message, said
    assert kept < 4 and not [p for p in (tmp_path / 'run' / 'checkpoints').iterdir() if p.name.endswith('part')]
    assert sit({**settings, 'resume': True}) == 0
    assert_same(whole[0], tmp_path / 'run')


def test_another_failure_while_a_checkpoint_is_written_is_no_matter_of_the_disk(tmp_path):
    with pytest.raises(RuntimeError, match='^connection closed$'), training._saving(tmp_path / 'step-000002'): raise RuntimeError('connection closed')
    with pytest.raises(OSError, match=r'step-000002 could not be written \(OSError: .* No space left on device\); its disk has [0-9.e+]+ GB free; earlier'), training._saving(tmp_path / 'step-000002'):
        raise OSError(errno.ENOSPC, 'No space left on device')


def test_killed_between_a_best_checkpoint_and_its_name(tmp_path):
    "The checkpoint that is the best so far is on the disk, but its name still points to the one before."
    assert sit({**SHORT, 'run': str(tmp_path / 'whole')}, rising=True) == 0
    assert results(tmp_path / 'whole')['best_step'] == 4
    settings = {**SHORT, 'run': str(tmp_path / 'killed')}
    assert sit(settings, rising=True, death='before the third best checkpoint gets its name') == -signal.SIGKILL
    assert latest_checkpoint(tmp_path / 'killed')[0] == 4 and named_checkpoint(tmp_path / 'killed')[0] == 2
    assert sit({**settings, 'resume': True}, rising=True) == 0
    assert_same(tmp_path / 'whole', tmp_path / 'killed')


# ---- finished ----

@pytest.fixture
def idle(monkeypatch):
    "Fail the test if anything is computed: no model, no world to play in, no rollout."
    def refuse(*args, **kwargs):
        pytest.fail('something was computed')
    for name in ('set_stage', 'load_model', 'make_base', 'rollout', 'evaluate', 'HFEngine', 'BM25'):
        monkeypatch.setattr(training, name, refuse)


def test_a_finished_run_is_only_shown_again(whole, idle, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / 'copy', symlinks=True)
    before = {p: p.read_bytes() for p in folder.rglob('*') if p.is_file()}
    assert train({**SHORT, 'run': str(folder), 'resume': True}) == folder
    assert {p: p.read_bytes() for p in folder.rglob('*') if p.is_file()} == before


def test_a_finished_run_is_not_shown_as_another(whole, idle, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / 'copy', symlinks=True)
    with pytest.raises(ValueError, match="method: 'tspo' before, 'grpo' now"):
        train({**SHORT, 'run': str(folder), 'resume': True, 'method': 'grpo'})
    params = yaml.safe_load((folder / 'params.yaml').read_text())
    del params['collapse']                                             # as if an older version had made it
    (folder / 'params.yaml').write_text(yaml.safe_dump(params))
    assert train({**SHORT, 'run': str(folder), 'resume': True}) == folder


def test_more_steps_go_on_from_where_a_run_ended(whole, tmp_path):
    "Two steps, then two more: the run of four. What the first sitting said at its end is gone."
    settings = {**SHORT, 'run': str(tmp_path / 'longer')}
    assert sit({**settings, 'steps': 2}) == 0
    assert sit({**settings, 'resume': True}) == 0
    assert_same(whole[0], tmp_path / 'longer')


# ---- bad input ----

HOTPOT = {'_id': 'a', 'question': 'Who?', 'answer': 'Ada', 'context': [['Ada', ['Ada was here.']]]}


@pytest.fixture
def bad(tmp_path):
    "Folders and files that a run can't use, by name."
    no_tokenizer = tmp_path / 'no_tokenizer'
    shutil.copytree(BASE, no_tokenizer, ignore=shutil.ignore_patterns('tokenizer*', 'chat_template*'))
    empty_corpus = tmp_path / 'empty_corpus'
    empty_corpus.mkdir()
    for name, rows in (('train.json', [HOTPOT]), ('dev.json', [{**HOTPOT, '_id': str(i)} for i in range(4)]), ('corpus.json', [])):
        (empty_corpus / name).write_text(json.dumps(rows))
    no_questions = tmp_path / 'no_questions'
    no_questions.mkdir()
    (no_questions / 'corpus.json').write_text(json.dumps([{'title': 'Ada', 'text': 'Ada was here.'}]))
    one_question = tmp_path / 'one.json'
    one_question.write_text(json.dumps([HOTPOT]))
    file = tmp_path / 'file'
    file.write_text('a file, not a folder')
    begun = tmp_path / 'begun'
    RunLog(begun).write_params({'method': 'tspo'})
    return {p.name: str(p) for p in (no_tokenizer, empty_corpus, no_questions, one_question, file, begun)} | {'below a file': str(file / 'run')}


REFUSED = {
    'unknown method': (dict(method='tsop'), "no method 'tsop'; did you mean 'tspo'"),
    'unknown parameter': (dict(metod='grpo'), "no setting 'metod'; did you mean 'method'"),
    'unknown option of the method': (dict(options={'alhpa': 1.}), "no option 'alhpa'; did you mean 'alpha'"),
    'wrong kind of value': (dict(steps='many'), "steps must be a int, got 'many'"),
    'model folder without tokenizer': (dict(model='no_tokenizer'), 'has no tokenizer: save one into it'),
    'model folder without model': (dict(model='empty_corpus'), 'has no config.json'),
    'no model folder': (dict(model='./nowhere'), 'neither a folder here nor a name'),
    'empty corpus': (dict(data='hotpotqa', path='empty_corpus'), 'has no rows'),
    'no questions': (dict(data='hotpotqa', path='no_questions'), 'has no hotpotqa questions'),
    'too few questions': (dict(data='hotpotqa', path='one.json'), 'each part needs one at least'),
    'no such path': (dict(data='hotpotqa', path='nowhere'), "path 'nowhere' does not exist"),
    'unknown data set': (dict(data='hotpotqua'), "no data set 'hotpotqua'; did you mean 'hotpotqa'"),
    'real data, tiny model': (dict(data='hotpotqa', path='one.json', model='tiny'), 'needs a model folder'),
    'one attempt and a group norm': (dict(group_size=1), 'group_size must be at least 2, got 1'),
    'no turns': (dict(max_turns=0), 'max_turns must be at least 1, got 0'),
    'no steps to speak of': (dict(steps=-1), 'steps must be at least 0, got -1'),
    'no mini-batch': (dict(minibatches=0), 'minibatches must be at least 1, got 0'),
    'cut-off sampling': (dict(top_p=.9), 'training takes top_p=1'),
    'frozen sampling': (dict(temperature=0.), 'temperature must be above 0'),
    'unknown average': (dict(average='mean'), "average must be one of token-mean, .*, got 'mean'"),
    'unknown world': (dict(world={'sise': 200}), "world takes size, .*, got 'sise'"),
    'impossible world': (dict(world={'size': 3}), 'size must be at least 50'),
    'run folder below a file': (dict(run='below a file'), 'cannot be written'),
    'run folder is a file': (dict(run='file'), 'is a file; a run needs a folder'),
    'run folder holds a run': (dict(run='begun'), r'already holds a run \(params.yaml\): pass resume=True'),
    'another run to resume': (dict(run='begun', resume=True), 'was begun with other parameters'),
}


@pytest.mark.parametrize('name', REFUSED)
def test_bad_input_is_refused_before_any_compute(idle, bad, tmp_path, name):
    given, message = REFUSED[name]
    settings = {**SHORT, 'run': str(tmp_path / 'run'), **{k: bad.get(v, v) if isinstance(v, str) else v for k, v in given.items()}}
    with pytest.raises((ValueError, OSError), match=message):
        train(settings, say=lambda line: pytest.fail(f'something was begun: {line}'))
    assert not (tmp_path / 'run' / 'params.yaml').exists()             # so that the same folder can be used when the mistake is mended


def test_a_tiny_model_is_not_made_for_a_mistake(idle, tmp_path):
    with pytest.raises(ValueError, match='group_size'):
        train({'run': str(tmp_path / 'run'), 'group_size': 1})


@pytest.mark.parametrize('arguments, message', [
    (['metod=grpo'], "no setting 'metod'; did you mean 'method'"), (['method=gpro'], "no method 'gpro'; did you mean 'igpo' or 'gspo' or 'grpo'"),
    (['--params', 'nowhere.yaml'], 'nowhere.yaml'), (['--params', 'params.yaml', 'metod=grpo'], 'did you mean'), (['learning_rate=fast'], 'learning_rate must be a float'),
])
def test_the_command_line_tells_mistakes_in_a_line(idle, tmp_path, monkeypatch, arguments, message):
    (tmp_path / 'params.yaml').write_text(yaml.safe_dump({'steps': 3}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as e:
        main(arguments)
    assert message in e.value.code and '\n' not in e.value.code
    assert os.listdir(tmp_path) == ['params.yaml']


def test_a_setting_without_a_value_shows_the_usage(idle, capsys):
    with pytest.raises(SystemExit) as e:
        main(['steps'])
    assert e.value.code == 2 and "written name=value, got 'steps'" in capsys.readouterr().err


# ---- collapse ----

def test_a_collapsed_answer_rate_stops_the_run(monkeypatch, tmp_path):
    "After step 5 the model is wiped and babbles evenly; nothing is answered any more, and the run says so and ends. A resumed one knows."
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    step = training.train_step

    def wipe(number, config, method, stage, *rest):
        told = step(number, config, method, stage, *rest)
        if number == 5:
            with torch.no_grad():
                for p in stage.model.parameters():
                    p.zero_()
        return told
    monkeypatch.setattr(training, 'train_step', wipe)
    lines, settings = [], {**SHORT, 'run': str(tmp_path / 'run'), 'steps': 40, 'eval_every': 5, 'questions_per_step': 8, 'group_size': 2, 'log_kl': False}
    train(settings, say=lines.append)
    table = read_metrics(tmp_path / 'run')
    assert table.answer_rate[1:6].mean() > .2 and table.answer_rate[6:].mean() < .03
    assert table.step.max() == 10
    (stopped,) = [line for line in lines if line.startswith('stopped')]
    assert 'answer rate' in stopped and 'step 10' in stopped and 'learning rate' in stopped
    summary = results(tmp_path / 'run')
    assert summary['collapsed'] and summary['best_step'] <= 5 and summary['final_em'] >= summary['last_em'] == 0

    monkeypatch.setattr(training, 'train_step', lambda *args: pytest.fail('it trained on'))
    (tmp_path / 'run' / 'summary.json').unlink()                       # killed just before it was written
    train({**settings, 'resume': True}, say=lines.append)
    assert results(tmp_path / 'run') == summary
    assert train({**settings, 'resume': True}) == tmp_path / 'run'
