"""Whole runs: what is refused before anything is computed, and that one killed anywhere ends as if it had not been."""
import contextlib
import dataclasses
import gzip
import importlib
import json
import math
import os
import re
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from credit_rl import dry_run, prepare as preparing, setup as staging, step_metrics, train as training
from credit_rl.diagnostics import training_curves
from credit_rl.estimate import kept_lengths, memory, read_sizes
from credit_rl.export import read_policy
from credit_rl.layout import pack
from credit_rl.learner import BadStep, Learner, saved_policy
from credit_rl.methods import extra_passes, get_method
from credit_rl.models import load_model
from credit_rl.parts import Batch, Credit, Loss, Measured
from credit_rl.search_service import SearchServer
from credit_rl.readers import Passage
from credit_rl.runlog import (Journal, RunLog, latest_checkpoint, named_checkpoint, read_metrics, read_params, saving,
                              read_summary, read_turns, same_metrics)
from credit_rl.settings import Config, make_config
from credit_rl.setup import plan_of
from credit_rl.train import begin_run, main, train
from credit_rl.trajectory import Group, Question, example_group, trajectory_from_json
from credit_rl.view import show_rollout
from credit_rl.warmup import WarmupRollouts
from made_runs import BASE, SHORT
from started import apart, typed

ROOT = Path(__file__).resolve().parents[2]
SHORT = {**SHORT, 'steps': 4}


def test_of_the_best_checkpoint_the_weights_stay(tmp_path, monkeypatch):
    "The base stays the best, and is no longer the newest: it answers the test questions again, and can be exported."
    means, play = iter([1., 0., 0.]), training.Run.evaluate
    def evaluate(run, part):
        scores, groups = play(run, part)
        return (scores if part == 'test' else {**scores, 'em': next(means)}), groups
    monkeypatch.setattr(training.Run, 'evaluate', evaluate)
    folder = train({**SHORT, 'steps': 2, 'eval_every': 1, 'keep': 1, 'chosen_by': 'em', 'dtype': 'bfloat16', 'track': '',
                    'learning_rate': 1e-2, 'run': str(tmp_path / 'run')}, say=lambda line: None)
    (step, best), (last, newest) = named_checkpoint(folder), latest_checkpoint(folder)
    assert (step, last) == (0, 2) and [p.name for p in best.iterdir()] == ['weights.pt']
    size = lambda path: sum(p.stat().st_size for p in path.iterdir())
    config = make_config(read_params(folder))
    promised = memory(read_sizes(config.model), plan_of(config))
    assert size(best) == pytest.approx(promised['best'], rel=.05) and size(newest) > 5 * size(best)
    summary, base = read_summary(folder), load_model(BASE, 'bfloat16', 'cpu')[0]
    assert summary['final'] == summary['base']
    same = lambda name: [torch.equal(a, b) for a, b in zip(read_policy(folder, name)[0].parameters(), base.parameters())]
    assert all(same('best')) and not all(same('newest'))
    shutil.rmtree(newest)
    with pytest.raises(ValueError, match='alone'):
        train({**vars(config), 'steps': 3, 'resume': True}, say=lambda line: None)


def test_after_three_steps_a_run_says_what_was_foretold(tmp_path, monkeypatch):
    "Of a model that is no toy: the parts of what was foretold of rollouts like its own, and their sum."
    asked = []
    def foretell(settings, lengths):
        asked.append(lengths)
        return {'acting': 2., 'reading': 0., 'learning': 3.}
    monkeypatch.setattr(training, 'foretell', foretell)
    monkeypatch.setattr(training, 'is_large', lambda model: True)
    said = []
    folder = train({**SHORT, 'steps': 3, 'eval_every': 3, 'questions_per_step': 2, 'group_size': 2, 'track': '',
                    'run': str(tmp_path / 'run')}, said.append)
    (line,) = [line for line in said if 'foretold' in line]
    assert re.fullmatch(r'a step takes [\d.]+ s; foretold were 5 s \(acting 2, learning 3\)', line)
    assert asked == [kept_lengths(folder)[:-6]]               # six more are kept at the end


# ---- the same again ----

@pytest.fixture
def whole(finished):
    "A run that nobody interrupted; its lines lie beside it."
    return finished(steps=4)


def results(folder):
    "The numbers of a run's summary, the clock's apart."
    return {k: v for k, v in json.loads((folder / 'summary.json').read_text()).items() if k != 'seconds'}


def logged(folder):
    "The lines of metrics.jsonl as they were written, the clocks apart."
    lines = map(json.loads, (folder / 'metrics.jsonl').read_text().splitlines())
    return [{k: v for k, v in line.items() if not k.startswith('seconds')} for line in lines]


def assert_same(a, b):
    assert same_metrics(a, b) == [] and logged(a) == logged(b)
    assert read_turns(a) == read_turns(b)
    assert results(a) == results(b)
    assert latest_checkpoint(a)[0] == latest_checkpoint(b)[0] and named_checkpoint(a)[0] == named_checkpoint(b)[0]


@pytest.mark.long
def test_a_run_tells_how_it_goes(whole):
    folder, lines = whole, (whole.parent / 'lines').read_text().splitlines()
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


@pytest.fixture
def alone(finished):
    "The folder of a run with one attempt a question."
    return finished(method='ppo', group_size=1, steps=2)


def test_one_attempt_per_question(alone):
    "As PPO's papers have it: nothing that compares within a group is needed, and of groups nothing is logged."
    table = read_metrics(alone)
    assert table.step.tolist() == [0, 1, 2] and table.reward[1:].notna().all() and table.grad_norm[1:].gt(0).all()
    groups = table[['groups_all_right', 'groups_mixed', 'groups_all_wrong']]
    assert table.trajectories[1:].tolist() == [4, 4] and groups.isna().all(axis=None)
    training_curves(alone)


# ---- killed, and resumed ----

def deadly(owner, name, count, matches=lambda *args: True, before=lambda *args: None):
    "Make the `count`-th call of `owner.name` that `matches` the process's last deed, after `before`(its arguments)."
    call, left = getattr(owner, name), [count]

    def counted(*args, **kwargs):
        if matches(*args):
            left[0] -= 1
            if left[0] == 0:
                before(*args)
                os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    setattr(owner, name, counted)


def half_written(log, name, step, rows):
    "Leave a file as a process does that dies while it writes an entry."
    path = log.folder / name
    whole = path.stat().st_size if path.exists() else 0
    Journal(path, packed=name.endswith('.gz')).append([{'step': step, **row} for row in rows])
    os.truncate(path, (whole + path.stat().st_size) // 2)


# The process dies ... each is called in the process that is to die.
DEATHS = {
    'before anything is logged': lambda: deadly(RunLog, '_append', 1),
    'in the middle of the first line of metrics': lambda: deadly(RunLog, '_append', 2, before=half_written),
    'in the middle of the rollouts of step 1': lambda: deadly(RunLog, '_append', 3, before=half_written),
    'in the middle of the metrics of step 2': lambda: deadly(RunLog, '_append', 6, before=half_written),
    'between the two renames of a checkpoint': lambda: deadly(
        os, 'rename', 2, lambda a, b: str(b).endswith(('step-000002', 'step-000000'))),
    'in the middle of the last rollouts': lambda: deadly(RunLog, '_append', 11, before=half_written),
    'with everything done but the summary': lambda: deadly(os, 'replace', 1, lambda a, b: str(b).endswith('summary.json')),
    'before the third best checkpoint gets its name': lambda: deadly(os, 'replace', 3, lambda a, b: str(b).endswith('best')),
    'while the next step is played': lambda: deadly(Learner, 'step', 3),   # where playing runs ahead
}
# those that every run meets; two of them by day
BY_DAY = 'in the middle of the metrics of step 2', 'with everything done but the summary'
ANYWHERE = [pytest.param(death, marks=[pytest.mark.nightly] * (death not in BY_DAY)) for death in DEATHS
            if 'third' not in death and 'next step' not in death]


def sitting(settings, death=None, rising=False):
    "A run, or the rest of one, in a process. `rising`: as if each step's dev score were better, so the best is new."
    if rising:
        evaluate = training.Run.evaluate

        def better(run, part):
            scores, groups = evaluate(run, part)
            return (scores | {'em': len(run.memory['rates']) / 10} if part == 'dev' else scores), groups
        training.Run.evaluate = better
    if death:
        DEATHS[death]()
    train(settings)


def sit(settings, **how): return apart(sitting, settings, **how)


@pytest.mark.parametrize('death', ANYWHERE)
@pytest.mark.long
def test_a_killed_run_ends_as_if_it_had_not_been(whole, tmp_path, death):
    settings = {**SHORT, 'run': str(tmp_path / 'killed')}
    assert sit(settings, death=death) == -signal.SIGKILL
    assert not (tmp_path / 'killed' / 'summary.json').exists()
    assert sit({**settings, 'resume': True}) == 0
    assert_same(whole, tmp_path / 'killed')


@pytest.mark.skipif(not hasattr(resource, 'prlimit'), reason='limits of another process are set on Linux alone')
@pytest.mark.long
def test_a_disk_that_takes_no_more_ends_a_run_in_a_line(start, whole, tmp_path):
    "File, reason and what stays are said; with room again the numbers are those of a whole run."
    settings = {**SHORT, 'run': str(tmp_path / 'run')}
    run = start('credit_rl.train', *typed({**settings, 'track': ''}), OMP_NUM_THREADS=None)
    run.read_until('base: EM')                                         # the first checkpoint is there
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (300_000, 300_000))
    code, said = run.end()
    kept = latest_checkpoint(tmp_path / 'run')[0]
    assert code == 1 and 'Traceback' not in said and not (tmp_path / 'run' / 'summary.json').exists(), said
    for words in (f'step-00000{kept + 2} could', 'GB free', 'limit is 0.3 MB', 'earlier checkpoints', 'resume=True'):
        assert words in said.splitlines()[-1], said
    assert kept < 4 and not [p for p in (tmp_path / 'run' / 'checkpoints').iterdir() if p.name.endswith('part')]
    assert sit({**settings, 'resume': True}) == 0
    assert_same(whole, tmp_path / 'run')


def test_another_failure_while_a_checkpoint_is_written_is_no_matter_of_the_disk(tmp_path):
    with pytest.raises(RuntimeError, match='^connection closed$'), saving(tmp_path / 'step-000002'):
        raise RuntimeError('connection closed')


@pytest.mark.long
@pytest.mark.nightly
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

    for name in ('make_setup', 'rollout', 'evaluate'): monkeypatch.setattr(training, name, refuse)
    for name in ('load_model', 'make_base', 'HFEngine', 'BM25'): monkeypatch.setattr(staging, name, refuse)


@pytest.mark.long
def test_a_finished_run_is_not_shown_as_another(whole, idle, tmp_path):
    folder = shutil.copytree(whole, tmp_path / 'copy', symlinks=True)
    with pytest.raises(ValueError, match="'tspo'"):
        train({**SHORT, 'run': str(folder), 'resume': True, 'method': 'grpo'})
    params = yaml.safe_load((folder / 'params.yaml').read_text())
    del params['stop.collapse']                                             # as if an older version had made it
    (folder / 'params.yaml').write_text(yaml.safe_dump(params))
    assert train({**SHORT, 'run': str(folder), 'resume': True}) == folder


# ---- bad input ----

HOTPOT = {'_id': 'a', 'question': 'Who?', 'answer': 'Ada', 'context': [['Ada', ['Ada was here.']]]}


@pytest.fixture
def bad(tmp_path):
    "Folders and files that a run can't use, by name."
    for name, left_out in (('no_tokenizer', ('tokenizer*', 'chat_template*')), ('no_weights', ('*.safetensors',))):
        shutil.copytree(BASE, tmp_path / name, ignore=shutil.ignore_patterns(*left_out))
    four = [{**HOTPOT, '_id': str(i), 'question': f'Who is {i}?'} for i in range(4)]
    files = {'empty_corpus/train.json': [HOTPOT], 'empty_corpus/dev.json': four, 'empty_corpus/corpus.json': [],
             'no_questions/corpus.json': [{'title': 'Ada', 'text': 'Ada was here.'}], 'one.json': [HOTPOT], 'file': 0}
    for name, rows in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(rows))
    RunLog(tmp_path / 'begun').write_params({'method': 'tspo'})
    return {p.name: str(p) for p in tmp_path.iterdir()} | {'below a file': str(tmp_path / 'file' / 'run')}


REFUSED = {
    'unknown option of the method': (dict(options={'alhpa': 1.0}), 'alpha'),
    'wrong kind of value': (dict(steps='many'), 'many'),
    'model folder without tokenizer': (dict(model='no_tokenizer'), 'tokenizer'),
    'model folder without model': (dict(model='empty_corpus'), 'config.json'),
    'model folder without weights': (dict(model='no_weights'), 'weights'),
    'nobody at the search server': (dict(data='hotpotqa', path='empty_corpus', corpus='http://127.0.0.1:9'), 'reached'),
    'no model folder': (dict(model='./nowhere'), 'nowhere'),
    'empty corpus': (dict(data='hotpotqa', path='empty_corpus'), 'rows'),
    'no questions': (dict(data='hotpotqa', path='no_questions'), 'questions'),
    'too few questions': (dict(data='hotpotqa', path='one.json'), 'least'),
    'no such path': (dict(data='hotpotqa', path='nowhere'), 'nowhere'),
    'real data, tiny model': (dict(data='hotpotqa', path='one.json', model='tiny'), 'folder'),
    'one attempt and a group norm': (dict(group_size=1), 'group_size'),
    'no turns': (dict(max_turns=0), 'max_turns'),
    'no mini-batch': (dict(minibatches=0), 'minibatches'),
    'unknown average': (dict(average='mean'), 'average'),
    'unknown world': (dict(world={'sise': 200}), 'sise'), 'a word for a size': (dict(world={'size': 'abc'}), 'size'),
    'no pool': (dict(log={'pool': 'nowhere'}), 'pool'),
    'run folder below a file': (dict(run='below a file'), 'is a file'),
    'run folder is a file': (dict(run='file'), 'is a file'),
    'run folder holds a run': (dict(run='begun'), 'resume=True'),
    'another run to resume': (dict(run='begun', resume=True), 'other'),
}


@pytest.mark.parametrize('name', REFUSED)
def test_bad_input_is_refused_before_any_compute(idle, bad, tmp_path, name):
    given, message = REFUSED[name]
    given = {k: bad.get(v, v) if isinstance(v, str) else v for k, v in given.items()}
    settings = {**SHORT, 'run': str(tmp_path / 'run'), **given}
    if 'data' in given: del settings['world']
    with pytest.raises((ValueError, OSError), match=message):
        train(settings, say=lambda line: pytest.fail(f'something was begun: {line}'))
    assert not (tmp_path / 'run' / 'params.yaml').exists()      # when the mistake is mended the folder serves


@pytest.mark.parametrize('arguments, message', [
    (['metod=grpo'], "'method'"), (['method=gpro'], "'igpo'"), (['--params', 'nowhere.yaml'], 'nowhere.yaml'),
    (['--params', 'params.yaml', 'metod=grpo'], "'method'"), (['learning_rate=fast'], 'learning_rate'),
    (['--params', 'list.yaml'], 'lines'), (['steps=[1'], 'parsing')])
def test_the_command_line_tells_mistakes_in_a_line(idle, tmp_path, monkeypatch, arguments, message):
    (tmp_path / 'params.yaml').write_text(yaml.safe_dump({'steps': 3}))
    (tmp_path / 'list.yaml').write_text('- steps')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as e:
        main(arguments)
    assert message in e.value.code and '\n' not in e.value.code
    assert sorted(os.listdir(tmp_path)) == ['list.yaml', 'params.yaml']


# ---- a dry run ----

def dry(**settings):
    "Lines of a dry run, and what it is refused for (None: nothing)."
    lines = []
    try: train({'model': BASE, 'dry_run': True, **settings}, say=lines.append)
    except ValueError as e: return lines, str(e)
    return lines, None


@pytest.fixture
def gpus(monkeypatch):
    "Let torch speak of GPUs that are not here: their number and bytes."
    def set(count, size=80e9):
        monkeypatch.setattr(torch.cuda, 'device_count', lambda: count)
        monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda i: SimpleNamespace(total_memory=size))
    set(0)
    return set


PAPER = dict(learner='deepspeed', ranks=8, stage=3, dtype='bfloat16')
SAMPLE = dict(data='hotpotqa', path=str(ROOT / 'data' / 'hotpotqa_sample.json'), dev_questions=1, test_questions=1)


def test_a_dry_run_asks_a_search_server(tmp_path, spoken):
    pytest.importorskip('fastapi', reason='the extra `serve` is not installed')
    settings = dict(run=str(tmp_path / 'run'), model=spoken, max_tokens=8192, **SAMPLE)
    assert 'a query was tried: http://127.0.0.1:9/retrieve' in dry(**settings, corpus='http://127.0.0.1:9')[1]
    asked = []

    class Search:
        def search(self, queries, k):
            asked.extend(queries)
            return [[] for _ in queries]
    with SearchServer(Search()) as server: assert dry(**settings, corpus=server.url)[1] is None
    assert len(asked) == 1


def test_a_run_goes_on_with_its_search_server_at_another_address(tmp_path, spoken):
    "Where it gives the answers to ten questions that the first one gave; any other setting is compared as ever."
    pytest.importorskip('fastapi', reason='the extra `serve` is not installed')
    class Search:
        def __init__(self, text): self.text = text
        def search(self, queries, k): return [[Passage('0', q, self.text, 1.)] for q in queries]
    def begin(server, **more):
        begin_run(Config(run=str(tmp_path / 'run'), model=spoken, max_tokens=8192, torch={'threads': 1}, track='',
                         corpus=server.url, **SAMPLE, **more), lambda line: None).close()
    with SearchServer(Search('so')) as first, SearchServer(Search('so')) as moved, SearchServer(Search('no')) as other:
        begin(first)
        kept = json.loads((tmp_path / 'run' / 'search.json').read_text())
        assert 1 <= len(kept['answers']) <= 10 and kept['url'].startswith(first.url)
        begin(moved, resume=True)
        assert read_params(tmp_path / 'run')['corpus'] == moved.url
        with pytest.raises(ValueError, match='answer'): begin(other, resume=True)
        with pytest.raises(ValueError, match='seed'): begin(moved, resume=True, seed=7)
        begin(first, resume=True)
        (tmp_path / 'run' / 'search.json').unlink()           # as of a run that an earlier version began
        with pytest.raises(ValueError, match='corpus'): begin(moved, resume=True)
        assert not (tmp_path / 'run' / 'search.json').exists()


def test_a_dry_run_says_where_there_is_no_gpu(tmp_path, gpus):
    "Two ranks on a CPU are allowed; that a paper's eight will not be happy there is said."
    lines, refused = dry(**PAPER, run=str(tmp_path / 'run'))
    assert refused is None and '8 ranks would share' in lines[-2] and 'everything else' in lines[-1], lines
    assert dry(**PAPER, run=str(tmp_path / 'run'), tflops=300)[0][-2].endswith('far longer than the estimate says')
    assert not any('no GPU' in line for line in dry(run=str(tmp_path / 'run'))[0])           # one process and a toy
    gpus(8)
    lines, refused = dry(**PAPER, run=str(tmp_path / 'run'))
    assert refused is None and lines[-1].startswith('everything is there'), lines


def lacking(config, needs):
    "What this host lacks for a run: list of str."
    vllm = config.vllm if config.engine == 'vllm' else None
    return dry_run.missing_room(Path(config.run), config.checkpoints.keep, config.here, needs, vllm)


def test_a_dry_run_weighs_gpus_and_memory(tmp_path, gpus, monkeypatch):
    run = str(tmp_path / 'run')
    gpus(4)
    assert '8 ranks need as many GPUs, but there are 4' in dry(**PAPER, run=run)[1]
    gpus(8, 1e6)
    assert re.findall(r'GPU (.) has 0.0 GB, but a rank needs at least 1.1 GB',
                      dry(**PAPER, run=run)[1]) == list('01234567')
    config = training.make_config({**PAPER, 'model': BASE, 'run': run})
    needs = {'checkpoint': 1, 'rank': 90e9, 'start': 90e9, 'host': 10e9, 'file': 1e15}
    gpus(8)
    monkeypatch.setattr(dry_run, '_free_memory', lambda: 79e9)
    memory, file, *others = lacking(config, needs)
    assert '79.0 GB free, but 8 ranks take at least 80.0 GB' in memory
    assert file.startswith('/dev/shm has ') and file.endswith('take 1000000.0 GB')
    assert [line.partition(',')[0] for line in others] == [f'GPU {i} has 80.0 GB' for i in range(8)]
    monkeypatch.setattr(dry_run, '_free_memory', lambda: 80e9)
    assert lacking(config, {**needs, 'rank': 80e9, 'file': 0}) == []


def test_the_start_is_weighed_beside_a_vllm_that_does_not_sleep(gpus):
    gpus(1)
    needs = {'checkpoint': 1, 'rank': 50e9, 'start': 50e9, 'acting copy': 10e9, 'weights': 5e9}
    config = lambda **vllm: training.make_config(
        dict(model=BASE, engine='vllm', vllm={'arguments': {'gpu_memory_utilization': .4}, **vllm}))
    assert lacking(config(sleep_level=1), needs) == []
    (lacks,) = lacking(config(), needs)
    assert 'vLLM takes 32.0 GB, but 50.0 GB' in lacks
    served = training.make_config(dict(model=BASE, engine='served', serve={'gpus': '1'}))
    assert lacking(served, needs) == []                                       # it is on another GPU
    (small,) = lacking(config(sleep_level=1), {**needs, 'keys and values': 23e9})
    assert '32.0 GB for vLLM' in small and 'take 33.0 GB' in small


def test_a_dry_run_of_a_warm_up_plays_nothing(monkeypatch, tmp_path, capsys, spoken):
    for name in ('make_setup', 'make_engine', 'collect', 'load_model'):
        monkeypatch.setattr(preparing, name, lambda *a, **k: pytest.fail('something was computed'))
    settings = dict(model=spoken, max_tokens=8192, run=str(tmp_path / 'run'), **SAMPLE, questions=100,
                    protocol='carl', max_turns=4, per_tier=10, warm_steps=7, warm_least=5, dry_run=True)
    preparing.main(typed(settings))
    said = capsys.readouterr().out
    # 101 · 5 tries, and of train and dev 20 each under 3 prompts
    for words in (f'{read_sizes(spoken).parameters:,} parameters', 'memory of a rank', '7 steps', '625 rollouts at most'):
        assert words in said, said
    assert not (tmp_path / 'run').exists()
    for wrong, message in (({'corpus': 'http://127.0.0.1:9'}, 'tried'), ({'warm_least': 8}, 'counts'),
                           ({'other_corpus': 'http://127.0.0.1:9'}, 'tried')):
        with pytest.raises((ValueError, OSError), match=message):
            preparing.prepare(settings | wrong, say=lambda line: None)


def test_a_warm_up_without_its_package_is_refused_first(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr('importlib.util.find_spec',
                        lambda name, *rest: name != 'sklearn' and found(name, *rest) or None)
    monkeypatch.setattr(preparing, '_prepare', lambda *a: pytest.fail('something was computed'))
    with pytest.raises(SystemExit, match='credit_rl.run'):
        preparing.main([f'model={BASE}', 'protocol=carl-tiny', f'run={tmp_path / "run"}'])


def test_a_large_warm_up_tells_first_what_it_needs(monkeypatch, tmp_path):
    def begin(c, say, ranks): raise KeyboardInterrupt
    monkeypatch.setattr(preparing, '_prepare', begin)
    monkeypatch.setattr(staging, 'is_large', lambda c: True)
    lines = []
    with pytest.raises(KeyboardInterrupt):
        preparing.prepare(dict(model=BASE, protocol='carl-tiny', run=str(tmp_path / 'run')), say=lines.append)
    assert any(line.startswith('before that, ') for line in lines) and any('memory of a rank' in line for line in lines)


# ---- vLLM, without one ----

def test_vllm_sleeps_while_the_learner_is_made(monkeypatch, tmp_path):
    "And wakes before the base is played; one that forgot its weights is given the learner's."
    told = []

    class Engine:
        hollow = False
        def __getattr__(self, name): return lambda *given: told.append(name)
    monkeypatch.setattr(staging, 'make_engine', lambda *given: told.append('made') or Engine())
    monkeypatch.setattr(training, 'make_learner',
                        lambda *given: told.append('learner') or SimpleNamespace(loss=Loss()))
    monkeypatch.setattr(training, 'hand_over', lambda *given: told.append('weights'))
    config = training.make_config({**SHORT, 'track': '', 'engine': 'vllm', 'run': str(tmp_path / 'run')})
    monkeypatch.setattr(training, 'RunLog', lambda *given: training.SilentLog(config.run))
    run = training.begin_run(config, lambda line: None)
    with monkeypatch.context() as no_room:
        no_room.setattr(training, 'make_learner', lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError): training.begin_run(config, lambda line: None)
    assert told[3:] == ['made', 'sleep', 'close']                   # nobody is left who could close the engine
    del told[3:]
    def play(run, part): raise KeyboardInterrupt
    monkeypatch.setattr(training.Run, 'evaluate', play)
    for hollow, last in ((False, 'wake'), (True, 'weights')):
        Engine.hollow = hollow
        with pytest.raises(KeyboardInterrupt): training._begin(run)
        assert told == ['made', 'sleep', 'learner', last]
        told.pop()


def test_each_rank_gives_its_vllm_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(staging, 'VLLMEngine', lambda folder, tokenizer, gpu, **given: gpu)
    for name, value in (('RANK', '2'), ('WORLD_SIZE', '8'), ('LOCAL_RANK', '2'), ('MASTER_ADDR', '127.0.0.1')):
        monkeypatch.setenv(name, value)
    def made(**given):
        s = training.make_config({
            'model': BASE, 'engine': 'vllm', **given, 'vllm': {'untried': True, **given.get('vllm', {})}})
        return staging.make_engine(s, BASE, None, None)
    assert made(ranks=8, learner='deepspeed') == '2' and made() is None


SERVED = {   # what is refused of vLLM's own servers, by a word of the message
    'either': {}, 'either ': {'serve': {'replicas': 1}, 'servers': ['http://127.0.0.1:9']}, 'serve has no': {'serve': {'tp': 2}},
    'replicas must': {'serve': {'gpus': '0', 'replicas': 'two'}}, 'own_process': {'engine': 'vllm', 'vllm': {'own_process': 'no'}},
    'tensor_parallel_size=2': {'serve': {'tensor_parallel_size': 2}}, 'sees 0 GPUs': {'serve': {'gpus': '0'}},
    'such as http': {'servers': ['127.0.0.1:9']}, 'lora': {'servers': ['http://127.0.0.1:9'], 'lora': {'r': 2}},
    'engine': {'engine': 'hf', 'servers': ['http://127.0.0.1:9']}, 'devices': {'engine': 'vllm', 'vllm': {'devices': '0'}},
    'sleep': {'serve': {'sleep_level': 1}, 'servers': ['http://127.0.0.1:9'], 'ahead': 1, 'correction': 'truncated'}}


@pytest.mark.parametrize('word', SERVED)
def test_servers_that_cannot_act_are_refused(word):
    config = training.make_config({'model': BASE, 'engine': 'served', **SERVED[word]})
    with pytest.raises(ValueError, match=word.strip()): staging.check(config)


@pytest.mark.parametrize('name', ['tensor_parallel_size', 'pipeline_parallel_size'])
def test_a_model_over_several_gpus_is_refused_where_a_rank_has_one(name):
    config = training.make_config(dict(model=BASE, engine='vllm', learner='deepspeed', ranks=2,
                                       vllm={'arguments': {name: 2}}))
    with pytest.raises(ValueError, match=f'has one GPU for its vLLM, got {name}=2'): staging.check(config)


def test_an_estimate_counts_what_vllm_makes_the_learner_read():
    def reading(**given):
        config = training.make_config({'model': BASE, 'method': 'grpo', 'kl': .01, 'tflops': 1, **given})
        return float(re.search(r'reading ([0-9.e+-]+)', '\n'.join(staging.forecast(config)))[1])
    assert reading(engine='vllm') == pytest.approx(2 * reading(), rel=.01) == reading(recompute=True)
    assert reading(recompute=True, measure=['entropy']) == pytest.approx(2 * reading(), rel=.01)
    # a forward for belief, and behind each row of 192 up to 16 gold answers of 24 ids before each of four turns
    assert reading(measure=['belief']) == pytest.approx((2 + 4 * 16 * 24 / 192) * reading(), rel=.01)


def test_a_gradient_that_is_not_finite_ends_a_run_and_keeps_what_made_it(tmp_path, monkeypatch):
    "At step 3: the weights of step 2 are the newest; resumed so that it skips such updates, the run goes on."
    honest, run = training.correct_credit, tmp_path / 'run'
    def too_large(batch, *how):
        credit, metrics = honest(batch, *how)
        large = credit.advantages.new_full(credit.advantages.shape, 1e38).where(batch.layout.trained, 0.)
        return (dataclasses.replace(credit, advantages=large) if steps.pop(0) == 3 else credit), metrics
    monkeypatch.setattr(training, 'correct_credit', too_large)
    settings, steps = {**SHORT, 'steps': 4, 'eval_every': 1, 'run': str(run), 'kl': .01}, [1, 2, 3]
    with pytest.raises(BadStep, match='update'):
        train(settings, say=lambda line: None)
    bad = json.loads((run / 'bad_step.json').read_text())
    assert bad['step'] == 3 and bad['error'].startswith('update') and 'loss' in bad['error']
    assert bad['rollouts'] and all(row['trajectory']['turns'] for row in bad['rollouts'])
    assert read_metrics(run).step.iloc[-1] == 2 and latest_checkpoint(run)[0] == 2
    assert not (run / 'summary.json').exists()
    assert all(w.isfinite().all() for w in saved_policy(latest_checkpoint(run)[1]).values())
    steps[:] = [3, 4]
    train({**settings, 'resume': True, 'on_bad_step': 'skip'}, say=lambda line: None)
    table = read_metrics(run).set_index('step')
    assert table.bad_updates[3] > 0 and math.isnan(table.bad_updates[4]) and (run / 'summary.json').exists()


# ---- collapse ----

@pytest.fixture
def wiped(monkeypatch):
    "A function of a step, after which the model is wiped and babbles evenly (0: before the first)."
    def after(last):
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
        step = training.train_step
        def wipe(run, number, *rest):
            if last: metrics = step(run, number, *rest)
            if number == (last or number):
                with torch.no_grad():
                    for p in run.setup.model.parameters(): p.zero_()
            return metrics if last else step(run, number, *rest)
        monkeypatch.setattr(training, 'train_step', wipe)
    return after


def test_a_collapsed_answer_rate_stops_the_run(wiped, monkeypatch, tmp_path):
    "After step 5 nothing is answered any more, and the run says so and ends. A resumed one knows."
    wiped(5)
    lines, settings = [], {**SHORT, 'run': str(tmp_path / 'run'), 'steps': 40, 'eval_every': 5, 'questions_per_step': 8,
                           'group_size': 2, 'log_kl': False}
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


def test_a_run_that_learns_nothing_says_so(wiped, tmp_path):
    "A model that babbles from the start: one loud line after five steps, with its cause, and the last line says it again."
    wiped(0)
    lines = []
    settings = {**SHORT, 'run': str(tmp_path / 'run'), 'steps': 7, 'eval_every': 7, 'questions_per_step': 2, 'group_size': 2,
                'log_kl': False}
    train(settings, say=lines.append)
    (loud,) = [line for line in lines if line.startswith('NOTHING IS LEARNED')]
    assert 'no step of 5' in loud and 'answer_rate 0.00' in loud and 'credit-rl demos' in loud
    assert lines[-1].startswith('nothing was learned') and 'no step of 7' in lines[-1]
    kept = results(tmp_path / 'run')['nothing_learned']
    assert kept.partition(':')[2] == lines[-1].partition(':')[2]


# ---- what is recorded ----

ALL = {**SHORT, 'kl': None, 'steps': 2, 'log_rollouts': 99, 'track': '', 'log_kl': False}
BELIEF = {'belief_auc', 'belief_shown', 'belief_unshown', 'belief_shown_states', 'belief_unshown_states'}
MEASURED = {'belief': {'gold_entropy_start', 'gold_entropy_end', *BELIEF}, 'entropy': {'entropy'}}


def first_rows(run):
    "The kept training rollouts of step 1."
    return [row for row in read_turns(run, 1) if row['kind'] == 'train']


@pytest.fixture
def quiet(finished):
    "A function of settings to the folder of a run, and its kept training rollouts of step 1."
    def play(**settings): return (run := finished(**{**ALL, **settings})), first_rows(run)
    return play


def played(rows):
    "The trajectories of kept rows."
    return [trajectory_from_json(row['trajectory']) for row in rows]


@pytest.mark.parametrize('method, more', [
    ('igpo', {'recompute': True}), pytest.param('tips', {}, marks=pytest.mark.nightly), ('ppo', {'critic': 'shared'})])
def test_what_is_measured_changes_no_update(quiet, method, more):
    "The same weights after two steps and the same metrics, with and without; what was asked for is there besides."
    runs = [quiet(method=method, **asked, **more)[0] for asked in ({}, {'measure': ['belief', 'entropy']})]
    without, with_all = (saved_policy(latest_checkpoint(run)[1]) for run in runs)
    assert max((without[name] - with_all[name]).abs().max() for name in without) < 1e-6
    timeless = lambda row: row[[name for name in row.index if not name.startswith('seconds')]]
    few, many = (timeless(read_metrics(run).iloc[-1].dropna()) for run in runs)
    changed = {name for name in few.index if few[name] != many[name]}
    assert changed <= {'read_tokens', *MEASURED['belief']} and 'surprisal' in few
    assert {*many.index} - {*few.index} <= {'missing_states', *MEASURED['belief'], *MEASURED['entropy']}
    assert {*MEASURED['belief'], 'entropy'} <= {*many.index} and 'entropy' not in few


@pytest.mark.parametrize('method, settings', [
    ('grpo', {'measure': ['belief']}), ('igpo', {'measure': ['belief', 'entropy'], 'recompute': True}),
    ('carl', {'measure': ['entropy']})])
def test_the_forwards_of_what_is_measured_are_counted(tmp_path, method, settings):
    config = training.make_config({**ALL, 'steps': 60, 'method': method, **settings, 'run': str(tmp_path / 'run')})
    run = training.begin_run(config, lambda line: None)
    groups, rewards = training.play_step(run.actor, run.method, 1)
    look = run.look()
    training.assign(run.method, groups, look, prefix=run.prefix, rewards=rewards)
    assert dict(look.passes) == extra_passes(run.method, None, False, config.recompute, 0, config.measure)


@pytest.mark.parametrize('method, more, most', [('igpo', {'options': {'golds': 2}}, 2), ('igpo', {}, None),
                                                ('grpo', {'measure': ['belief']}, None)])
def test_accepted_answers_that_are_not_scored_are_counted(tmp_path, monkeypatch, method, more, most):
    "A run says so where its questions have more than golds allows, sixteen unless it is set; else it says nothing."
    config = training.make_config({**ALL, 'method': method, **more, 'run': str(tmp_path / 'run')})
    run, play = training.begin_run(config, lambda line: None), training.play_step
    names = list(dict.fromkeys(a for q in run.setup.questions['train'] for a in q.answers))[:most and 5 or 19]
    answers = {True: names, False: None}
    def with_answers(*given):
        groups, rewards = play(*given)
        keep = lambda g: dataclasses.replace(g.question, answers=answers[many] or g.question.answers)
        return [dataclasses.replace(g, question=keep(g)) for g in groups], rewards
    monkeypatch.setattr(training, 'play_step', with_answers)
    for step, many in ((1, True), (2, False)):
        metrics = training.train_step(run, step)
        assert metrics.get('golds_left_out') == (3 * run.actor.questions_per_step if many else None)


def test_grpo_measures_the_gold_as_igpo_does(quiet):
    "From the same base both play the same rollouts at step 1, and find the gold as probable."
    (asked, _), (own, _) = quiet(method='grpo', measure=['belief', 'entropy']), quiet(method='igpo')
    for name in MEASURED['belief']:
        assert read_metrics(asked)[name][1] == pytest.approx(read_metrics(own)[name][1], abs=1e-5)
    rows = [[row['belief'] for row in first_rows(run)] for run in (asked, own)]
    for one, other in zip(*rows, strict=True):
        assert one == pytest.approx(other, abs=1e-6, nan_ok=True)
    logs = torch.tensor([[row[0], row[-2]] for row in rows[0]]).log().mean(0)
    assert read_metrics(asked).gold_entropy_end[1] == pytest.approx(-logs[1].item(), rel=1e-4)


def listened(folder, **settings):
    "What a run of two steps from the small base says, and the metrics that it writes."
    lines = []
    run = train({**ALL, 'model': BASE, 'eval_every': 1, 'questions_per_step': 12, 'group_size': 4, **settings,
                 'run': str(folder)}, say=lines.append)
    return lines, read_metrics(run)


@pytest.mark.parametrize('settings, believes', [
    ({'method': 'tips'}, True), ({'method': 'igpo', 'options': {'schema': 'igpo'}}, False),
    pytest.param({'method': 'igpo', 'gold_schema': ['<answer> ', '']}, False, marks=pytest.mark.nightly)], ids=str)
def test_a_run_tells_whether_its_belief_is_one(tmp_path, monkeypatch, settings, believes):
    "At each step, and in a line where it is none. Words that a tokenizer lacks are told before."
    monkeypatch.chdir(ROOT)
    lines, table = listened(tmp_path / 'run', **settings)
    assert BELIEF <= {*table.columns} and table[[*BELIEF]][1:].notna().all(axis=None)
    row, warned = table.iloc[1], [line for line in lines if line.startswith('belief in the gold answer is ')]
    assert row.belief_shown_states + row.belief_unshown_states == pytest.approx(row.turns * row.trajectories)
    if believes: assert row.belief_auc > .9 and row.belief_shown > .4 and not warned
    else: assert row.belief_shown < .05 and len(warned) == 2 and 'set gold_schema' in warned[0]
    unknown = [i for i, line in enumerate(lines) if "has no words for 'Now'" in line]
    assert len(unknown) == (settings.get('options') == {'schema': 'igpo'}) and unknown in ([], [0])


@pytest.mark.parametrize('settings, told', [
    ({'method': 'igpo'}, 0), ({'method': 'igpo', 'options': {'schema': 'igpo'}}, 1),
    ({'method': 'grpo', 'measure': ['belief'], 'gold_schema': ['Finally : ', '']}, 1)])
@pytest.mark.parametrize('model', ['tiny', BASE])
def test_a_dry_run_tells_of_words_that_the_model_does_not_know(tmp_path, monkeypatch, settings, told, model):
    monkeypatch.chdir(ROOT)
    lines = []
    train({**SHORT, **settings, 'model': model, 'run': str(tmp_path / 'run'), 'dry_run': True}, say=lines.append)
    assert sum('has no words for' in line and 'gold_schema' in line for line in lines) == told


def test_surprisal_is_of_the_samples_and_entropy_of_the_distributions(quiet):
    "Before the first update a loss's entropy term logs what measuring it says."
    run, rows = quiet(method='grpo', measure=['belief', 'entropy'])
    logps = [p for t in played(rows) for turn in t.turns for p in turn.action_logps]
    table = read_metrics(run)
    assert table.surprisal[1] == pytest.approx(-sum(logps) / len(logps), rel=1e-5)
    bonus, _ = quiet(method='grpo', loss={'entropy': .01}, minibatches=1, measure=['entropy'])
    assert read_metrics(bonus).entropy[1] == pytest.approx(table.entropy[1], rel=1e-4)
    assert read_metrics(bonus).entropy[1] != pytest.approx(table.surprisal[1], rel=1e-3)
    assert 'entropy' not in read_metrics(quiet(method='grpo')[0])


def test_kept_rollouts_tell_of_their_turns_and_states(quiet):
    "By TIPS a turn earns α times the step of Φ. What is missing is null in the file, NaN when read."
    run, rows = quiet(method='tips', options={'alpha': .5}, measure=['belief'])
    for row in rows:
        turns, phi = len(row['trajectory']['turns']), row['potential']
        assert [len(row[k]) for k in ('advantages', 'turn_rewards', 'values')] == [turns] * 3
        assert len(phi) == len(row['belief']) == turns + 1 and all(0 < p < 1 for p in row['belief'][:-1])
        assert math.isnan(phi[-1]) and math.isnan(row['belief'][-1]) and all(map(math.isfinite, row['values']))
        steps = [.5 * (b - a) for a, b in zip(phi, [*phi[1:-1], 0.])]
        assert row['turn_rewards'] == pytest.approx(steps, abs=1e-5)
    later = [row for row in read_turns(run) if 'token_advantages' in row]   # at first, a critic that begins at 0 tells
    for row in later:                                       # no tokens apart; then each has its own (TIPS figure 5)
        own = row['token_advantages']
        assert [len(x) for x in own] == [len(t['action_ids']) for t in row['trajectory']['turns']]
        assert [sum(x) / len(x) for x in own] == pytest.approx(row['advantages'], abs=1e-3)
    assert later
    with gzip.open(run / 'turns.jsonl.gz', 'rt') as f:
        line = next(line for line in f if '"train"' in line)
    assert json.loads(line)['potential'][-1] is None and 'NaN' not in line
    assert show_rollout(played(rows)[0], rows[0]['advantages'], measured=rows[0]).html.count('reward ') >= len(
        rows[0]['turn_rewards'])
    assert (read_metrics(run)[['seconds_teacher', 'seconds_evaluate']][1:] > 0).all(axis=None)
    other, rows = quiet(method='grpo')
    assert 'seconds_teacher' not in read_metrics(other)
    assert all('belief' not in row and 'values' not in row and not any(row['turn_rewards']) for row in rows)
    assert not any('token_advantages' in row for row in rows)   # by GRPO a turn's tokens have one


def test_a_kept_potential_is_the_one_that_is_paid():
    "Two golds at -1 and -3 nats: TIPS with the mean pays the steps of -2, not of their log-sum, -0.873."
    group = example_group()
    layout = pack([group])
    n, k = layout.turn_mask.shape
    golds = torch.tensor([-1., -3.]).expand(n, k + 1, 2)
    seen = Measured(teacher_logp=golds, teacher_tokens=torch.ones(n, k + 1, 2, dtype=torch.long))
    for reduce, phi in (('mean', -2.), ('logsumexp', -.8730720)):
        method = get_method('tips').bind({'alpha': .5, 'reduce': reduce})
        rewards = method.model_rewards({'turns': torch.zeros(n, k), 'outcome': torch.zeros(n)}, layout, seen)
        kept, credit = [], Credit(layout.trained.float())
        log = SimpleNamespace(turns=lambda step, rows: kept.extend(rows))
        batch = Batch([group], {}, layout, torch.arange(n), rewards, seen, credit)
        training.keep_rollouts(log, 1, batch)
        assert len(kept) == n
        for row in kept:
            assert row['potential'] == pytest.approx([phi] * len(row['potential']))
            assert row['turn_rewards'][-1] == pytest.approx(-.5 * row['potential'][-2])       # what is left at the end


@pytest.mark.parametrize('method', ['tspo', pytest.param('turn-ppo', marks=pytest.mark.nightly)])
def test_tokens_with_credit_of_every_step(quiet, method):
    "Those of the turns whose advantage is not 0, once in each of two epochs; nothing is counted before the first step."
    run, rows = quiet(method=method, epochs=2)
    table = read_metrics(run).set_index('step')
    expected = 2 * sum(len(turn.action_ids) for t, row in zip(played(rows), rows)
                       for turn, a in zip(t.turns, row['advantages']) if a)
    assert table.trained_tokens[1] == expected > 0 and math.isnan(table.trained_tokens[0])


def test_shared_states_of_every_step(quiet, alone):
    "The share of states behind a first turn that two rollouts of a question have in common; none where one is alone."
    run, rows = quiet(method='grpo', questions_per_step=6)
    starts = []
    for t in played(rows):
        context = t.prompt_ids
        for k, turn in enumerate(t.turns):
            starts.append((t.question.id, context, k))
            context += turn.action_ids + turn.observation_ids
    later = [s for s in starts if s[2]]
    share = sum(starts.count(s) > 1 for s in later) / len(later)
    assert read_metrics(run).anchor_share[1] == pytest.approx(share) and 0 < share
    assert read_metrics(alone).anchor_share.isna().all() and read_metrics(alone)['o-p-'][1] >= 0


def test_tool_rate_by_tier_where_tiers_are_known(tmp_path, monkeypatch, quiet):
    "As a warm-up's rollouts tell; without tiers nothing is logged."
    group = example_group()
    one = WarmupRollouts([group.question], torch.tensor([2]), [Group(group.question, group.trajectories[:1])],
                         torch.tensor([3]), ['forced'])
    one.save(tmp_path / 'rollouts-train.jsonl.gz')
    assert step_metrics.known_tiers(str(tmp_path)) == {(group.question.source, group.question.id): 2}
    assert step_metrics.known_tiers(str(tmp_path / 'nowhere')) == {}
    none, rows = quiet(method='grpo')
    assert not [name for name in read_metrics(none) if 'tier' in name]
    ids = [*dict.fromkeys(('tiny', t.question.id) for t in played(rows))]
    tiers = {key: 1 + i % 2 for i, key in enumerate(ids)}
    monkeypatch.setattr(training, 'known_tiers', lambda folder, part='train': tiers)
    run = train({**ALL, 'method': 'grpo', 'run': str(tmp_path / 'run')}, say=lambda line: None)
    assert first_rows(run) == rows and len(ids) > 1
    for tier in (1, 2):
        called = [any(turn.call is not None for turn in t.turns) for t in played(rows)
                  if tiers['tiny', t.question.id] == tier]
        assert read_metrics(run)[f'tool_rate_tier_{tier}'][1] == pytest.approx(sum(called) / len(called))


def test_a_world_that_says_what_is_taught_sorts_its_questions_for_every_rule(tmp_path, monkeypatch):
    "Before what a warm-up found, so that rules with one and without are compared on the same questions."
    monkeypatch.setattr(training, 'known_tiers', lambda *_: {('tiny', f'train-0-{i}'): 1 for i in range(99)})
    run = train({**ALL, 'method': 'grpo', 'world': {'size': 200, 'parametric': .5}, 'questions_per_step': 6,
                 'run': str(tmp_path)}, say=lambda line: None)
    for tier in (1, 2):
        called = [any(turn.call is not None for turn in t.turns) for t in played(first_rows(run))
                  if t.question.meta['parametric'] == (tier == 2)]
        assert called and read_metrics(run)[f'tool_rate_tier_{tier}'][1] == pytest.approx(sum(called) / len(called))


# ---- logs that do not grow without bound ----


def test_a_teachers_period_counts_steps_that_teach_nothing(tmp_path, monkeypatch):
    ticked = []
    monkeypatch.setattr(training, 'assign', lambda *rest: SimpleNamespace(empty=True))      # no group is kept
    monkeypatch.setattr(Learner, 'tick', lambda self, step: ticked.append(step))
    settings = {**SHORT, 'method': 'tips', 'teacher_every': 2, 'steps': 2, 'run': str(tmp_path / 'run')}
    train(settings, say=lambda line: None)
    assert ticked == [1, 2]


@pytest.mark.parametrize('name', ['memory.json', 'written.json', 'learner.pt'])
@pytest.mark.long
def test_a_checkpoint_that_was_cut_says_how_to_go_on(whole, tmp_path, name):
    "It is named, and that removing it helps."
    run = Path(shutil.copytree(whole, tmp_path / 'run', symlinks=True))
    (run / 'params.yaml').write_text((run / 'params.yaml').read_text().replace(str(whole), str(run)))
    (run / 'summary.json').unlink()
    last = latest_checkpoint(run)[1]
    os.truncate(last / name, (last / name).stat().st_size - 3)
    with pytest.raises(ValueError, match=f'{last}.*remove'): train({**SHORT, 'run': str(run), 'resume': True})


@pytest.mark.parametrize('tf32, precision', [(None, 'highest'), (True, 'high')])
@pytest.mark.parametrize('module, name', [('train', 'begin_run'), ('sft', 'make_setup'), ('audit', 'make_setup'),
                                          ('studies.competence', 'read_policy')])
def test_commands_take_threads_and_tf32(tmp_path, monkeypatch, module, name, tf32, precision):
    "A training, a fine-tuning, an audit, and an examination of a run with these settings; PyTorch's own unless set."
    class Enough(Exception): "What is set is set before anything is loaded."
    def stop(*given): raise Enough
    module, before = importlib.import_module(f'credit_rl.{module}'), torch.get_num_threads()
    config = make_config({'protocol': 'carl-tiny', 'tf32': tf32, 'threads': before + 1, 'run': str(tmp_path / 'run')})
    begin = {'train': lambda: train(config), 'sft': lambda: module.rejection_sft(config),
             'audit': lambda: module.run_audit(config, module.AuditChoice()),
             'competence': lambda: module.open_agent(tmp_path)}[module.__name__.rpartition('.')[2]]
    if 'competence' in module.__name__: monkeypatch.setattr(module, 'read_params', lambda run: vars(config))
    monkeypatch.setattr(module, name, stop)
    try:
        with pytest.raises(Enough): begin()
        assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == (precision, before + 1)
    finally:
        torch.set_float32_matmul_precision('highest')
        torch.set_num_threads(before)


def test_more_steps_keep_the_period_of_a_teacher(tmp_path):
    "Two fifths of a run: of sixty steps 24, of a hundred and twenty 48."
    asked = dict(run=str(tmp_path), method='tips', critic='own', resume=True)
    (tmp_path / 'params.yaml').write_text('steps: 60\n')
    def look(**more):
        s = make_config({**asked, **more})
        return training._check_teacher(s, get_method('tips'))
    with pytest.raises(ValueError, match='steps=120'):
        look(steps=120)
    assert look(steps=60) is None and look(steps=120, teacher_every=24) is None


@pytest.mark.parametrize('best, tests', [(0, 3), (1, 2)])
def test_the_last_policy_answers_the_test_questions_once_where_it_is_the_best(tmp_path, monkeypatch, best, tests):
    "Beside the base; another best is asked too."
    asked, evaluate = [], training.Actor.evaluate
    def scored(actor, part):
        asked.append(part)
        groups = evaluate(actor, part)
        if part == 'test': return groups
        right = (asked.count('dev') == 2) == bool(best)
        answers = [g.question.answers[0] if right else None for g in groups]
        return [Group(g.question, [dataclasses.replace(g.trajectories[0], answer=answer)])
                for g, answer in zip(groups, answers)]
    monkeypatch.setattr(training.Actor, 'evaluate', scored)
    train({**SHORT, 'steps': 1, 'eval_every': 1, 'run': str(tmp_path / 'run')}, say=lambda line: None)
    summary = json.loads((tmp_path / 'run/summary.json').read_text())
    assert summary['best_step'] == best and asked.count('test') == tests
    assert best == 0 or summary['last_em'] == summary['final_em']


def test_the_base_attempts_questions_of_all_sets():
    "Dev questions of two sets that stand one behind the other."
    questions = [Question(f'{name}{i}', 'q', ('a',), source=name) for name in ('nq', 'musique') for i in range(20)]
    played, setup = [], SimpleNamespace(questions={'dev': questions})
    ranks = SimpleNamespace(each=lambda share, play: played.extend(share))
    training.Actor.attempt_dev(SimpleNamespace(setup=setup, ranks=ranks, seed=0), 8)
    assert {q.source for q in played} == {'nq', 'musique'} and len(played) == 8


def test_of_a_step_whose_first_group_was_not_kept_rollouts_are_written(monkeypatch):
    rows = []
    monkeypatch.setattr(training, 'rollout_rows', lambda batch, shown: [{'place': i} for i in shown])
    batch = SimpleNamespace(layout=SimpleNamespace(groups=torch.tensor([1, 1, 2, 2, 4, 4])))
    training.keep_rollouts(SimpleNamespace(turns=lambda step, found: rows.extend(found)), 1, batch, most=2)
    assert [row['place'] for row in rows] == [0, 1, 2, 3]


def test_where_dev_is_not_measured_the_base_is_the_best_until_something_is(monkeypatch):
    scores, saved = iter([math.nan, math.nan, -2., -3., math.nan]), []
    monkeypatch.setattr(training, 'dev_metrics', lambda scores: {})
    run = SimpleNamespace(
        log=SimpleNamespace(timed=lambda what: contextlib.nullcontext(), metrics=lambda step, **more: None), gated=False,
        chosen_by=None, memory={'best': -1., 'best_step': 0}, evaluate=lambda part: ({'em': next(scores)}, None),
        checkpoint=lambda step, name: saved.append((step, name)))
    for step in range(5): training._evaluate_dev(run, step, {})
    assert saved == [(0, 'best'), (1, None), (2, 'best'), (3, None), (4, None)] and run.memory['best_step'] == 2


def test_a_run_whose_best_checkpoint_was_removed_takes_the_one_that_it_goes_on_from(tmp_path, monkeypatch):
    named = []
    monkeypatch.setattr(training, 'log_lines', lambda folder: [])
    run = SimpleNamespace(ranks=SimpleNamespace(once=lambda find: ((20, tmp_path / 'step-20'), None)), restore=lambda path: None,
                          log=SimpleNamespace(folder=tmp_path, cut=lambda step: None), memory={'best': .5, 'best_step': 10},
                          checkpoint=lambda *given: named.append(given), say=lambda line: None)
    assert training._begin(run) == 21 and named == [(20, 'best')] and run.memory == {'best': -1., 'best_step': 20}
