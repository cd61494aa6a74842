"""CARL end to end: programs, segments, a critic that was warmed up or not, in the tiny world and on real sets."""
import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy
import pytest
import torch
from safetensors.torch import load_file

from credit_rl.benchmarks import get_benchmark
from credit_rl.evaluate import run_evaluation, summarize
from credit_rl.parts import first_tokens
from credit_rl.protocol import PROTOCOLS, Chat, byte_tokenizer, prompt_hash
from credit_rl.runlog import RunLog, latest_checkpoint, read_metrics, read_turns, same_metrics
from credit_rl.tiny import tiny_model, tiny_tokenizer
from credit_rl.tools import PythonTool, SearchTool
from credit_rl import prepare as preparing, setup as staging, step_metrics, train as training, warmup
from credit_rl.studies import competence
from credit_rl.studies.competence import examine_run, examine_runs
from credit_rl.critics import at_states, expected_calibration_error, segment_starts
from credit_rl.engine import ScriptedEngine
from credit_rl.layout import pack, token_logps
from credit_rl.diagnostics import competence_table, hop_table
from credit_rl.launch import Ranks
from credit_rl.learner import BadStep
from credit_rl.metrics import benchmark_metric
from credit_rl.models import load_model, load_tokenizer
from credit_rl.outcome import outcome_rewards
from credit_rl.rollout import rollout
from credit_rl.prepare import gate_table, prepare
from credit_rl.tiny import NOISY_CODER, PERFECT_CODER, act_coder, memory_of, tiny_environment
from credit_rl.world import world_of
from credit_rl.settings import check, make_config
from credit_rl.setup import tiny_worlds
from credit_rl.train import train
from credit_rl.trajectory import (example_group, Group, Question, Result, Stop, to_json, Trajectory,
                                  trajectory_from_json, Turn)
from credit_rl.warmup import GATE, GateReport, context_values, gold_shown, make_pairs, read_collected, read_warmed
from papermilled import papermill, shown
from made_runs import learner_of, setup_of
from started import typed

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / 'data' / 'rows'
ON_A_CPU = {'PYTHONPATH': str(ROOT), 'DS_ACCELERATOR': 'cpu', 'CUDA_VISIBLE_DEVICES': ''}
WORLD = dict(size=300, hops=[1, 2], famous=dict(train=30, dev=15, test=15), easy=5, hard=5)
TINY = dict(protocol='carl-tiny', method='carl', world=WORLD, steps=2, eval_every=2, questions=20, dev_questions=6,
            test_questions=6, questions_per_step=4, group_size=4, learning_rate=1e-3, recompute=True, threads=1,
            track='')
SETS = {'gsm8k': 'gsm8k.jsonl', 'finqa': 'finqa.json', 'hotpotqa': '../hotpotqa_sample.json',
        '2wikimultihopqa': '2wikimultihopqa.json', 'musique': 'musique.jsonl'}
REAL = dict(protocol='carl', method='carl', steps=1, eval_every=1, questions_per_step=2, group_size=2, questions=6,
            dev_questions=1, test_questions=1, turn_tokens=8, max_tokens=12000, context_tokens=6, passages=2,
            passage_tokens=60, kl=.01, threads=1, track='')


pytestmark = pytest.mark.usefixtures('on_a_cpu')
needs_deepspeed = pytest.mark.skipif(not importlib.util.find_spec('deepspeed'), reason='pip install credit_rl[train]')
IN_PIECES = {'learner': 'deepspeed', 'stage': 3,
             'deepspeed': {'zero_optimization': {'stage3_param_persistence_threshold': 0}}}


@pytest.fixture(scope='module')
def rows(tmp_path_factory):
    "A function set name -> a file of eight questions or more: our own rows, each asked several times in other words."
    folder = tmp_path_factory.mktemp('rows')
    def of(name):
        source = ROWS / SETS[name]
        by_line, text = source.suffix == '.jsonl', source.read_text()
        found = list(map(json.loads, text.splitlines())) if by_line else json.loads(text)
        def again(row, i):
            if not isinstance(row, dict): return row
            return {k: f'{v}-{i}' if k in ('id', '_id') else f'({i}) {v}' if k == 'question' else again(v, i)
                    for k, v in row.items()}
        many = [again(row, i) for i in range(6) for row in found]
        path = folder / f'{name}{source.suffix}'
        path.write_text('\n'.join(map(json.dumps, many)) if by_line else json.dumps(many))
        return str(path)
    return of


def quiet(settings): return train(settings, say=lambda line: None)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    "A Hugging Face folder with a small random model of the tiny world's words."
    folder, tokenizer = tmp_path_factory.mktemp('tiny'), tiny_tokenizer(numbers=True)
    tiny_model(tokenizer, width=32, heads=1, feedforward=64).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class Coder(ScriptedEngine):
    "A scripted coder, for the random model would never call. All but the sampling is real: the learner reads it again."
    def __init__(self, model, tokenizer, worlds, **limits):
        memory = {text: answer for w in worlds.values() for text, answer in memory_of(w).items()}
        super().__init__(lambda text, rng: act_coder(text, rng, NOISY_CODER, memory), tokenizer)


@pytest.fixture
def scripted(monkeypatch, model):
    "Training and warm-up play by the scripted coder."
    config = make_config({**TINY, 'model': model})
    worlds = tiny_worlds(config.world, config.sizes, config.seed)
    monkeypatch.setattr('credit_rl.setup.HFEngine', lambda m, tokenizer, **limits: Coder(m, tokenizer, worlds))
    return worlds


# ---- what an agent of CARL lives in ----

LOOKED = {'gsm8k': ('print((3 * 125) * 5.6)', '2100.0'), 'finqa': ('print((2100 - 1750) / 1750)', '0.2'),
          **dict.fromkeys(('hotpotqa', '2wikimultihopqa', 'musique'), ('print(search("river Ossel"))', 'Doc 1 (Title: '))}


@pytest.mark.parametrize('name', SETS)
def test_a_program_is_run_on_each_set_and_its_output_becomes_a_context(spoken, rows, name):
    """GSM8K and FinQA can calculate and nothing else; the others can search as well. Three segments: a call, a note of
    what came, an answer that no longer sees the output."""
    stage = setup_of(make_config(
        {**REAL, 'data': name, 'path': rows(name), 'model': spoken, 'turn_tokens': 400, 'context_tokens': 200}))
    env, (code, seen) = stage.environments['test'], LOOKED[name]
    assert isinstance(env.tool, PythonTool) and (env.max_turns, env.context_tokens) == (15, 200) and stage.ceiling is None
    searches = name not in ('gsm8k', 'finqa')
    assert ('search' in env.chat.protocol.system) == searches == isinstance(env.tool.search, SearchTool)
    assert env.tool.search or env.tool.run('search("x")').startswith('Error: ')
    def act(text, rng):
        if code not in text: return f'I look it up.\n```python\n{code}\n```\n'
        if 'as noted' not in text:
            return f'<context>{seen if seen in text.split(code)[1] else "nothing"} as noted</context>'
        return f'So \\boxed{{{seen} as noted}}' + stage.chat.tokenizer.eos_token

    groups = rollout(ScriptedEngine(act, stage.chat.tokenizer, max_length=12000), env,
                     stage.questions['test'] + stage.questions['train'], 2)
    played = [t for g in groups for t in g.trajectories]
    assert len(played) >= 10
    for t in played:
        assert [x.kind for x in t.turns] == ['invoke', 'assimilate', 'commit']
        assert (t.stop, t.answer) == (Stop.ANSWER, f'{seen} as noted')
        assert t.turns[0].call and t.turns[0].result is Result.OK and t.turns[0].observation_text.startswith(seen)
        last = stage.chat.tokenizer.decode(t.turns[2].context_ids)              # the note is there, the output is not
        assert last.split(code)[1].count(seen) == 1 and f'<context>{seen} as noted</context>' in last
    assert summarize(groups)['calls'] == 1


@pytest.mark.parametrize('name', [n if n == 'hotpotqa' else pytest.param(n, marks=pytest.mark.nightly) for n in SETS])
@pytest.mark.long
def test_each_set_trains_and_is_evaluated_by_programs(spoken, rows, tmp_path, name):
    "On the published files where they are, else on rows of our own."
    path = str(Path(os.environ['CREDIT_RL_DATA']) / name) if os.environ.get('CREDIT_RL_DATA') else rows(name)
    run = quiet({**REAL, 'data': name, 'path': path, 'model': spoken, 'train_split': get_benchmark(name).eval_split,
                 'run': str(tmp_path / 'run')})
    step = read_metrics(run).iloc[-1]
    assert step.updates == 2 and step.trajectories == 4 and math.isfinite(step.loss) and step.logp_gap < 1e-4
    folder = run_evaluation(
        dict(model=spoken, data=name, path=path, protocol='carl', questions=2, turn_tokens=8, context_tokens=6,
             max_tokens=12000, run=str(tmp_path / 'eval'), threads=1), say=lambda line: None, progress=False)
    manifest = json.loads((folder / name / 'manifest.json').read_text())
    assert manifest['limits'] == {'max_turns': 15, 'turn_tokens': 8, 'max_tokens': 12000, 'context_tokens': 6,
                                  'output_chars': 16000} and manifest['protocol']['name'] == 'carl'
    assert (manifest['corpus'] is None) == (name in ('gsm8k', 'finqa')) and len(read_turns(folder / name)) == 2


def metric_of(config):
    "What a run by CARL is scored by."
    return staging.bound_method(config).metric


@pytest.mark.long
def test_sets_that_are_scored_differently_train_together(spoken, rows, tmp_path):
    "GSM8K's questions are scored as numbers, HotpotQA's by exact match, within one batch."
    for name, file in (('gsm8k', '{}.jsonl'), ('hotpotqa', 'hotpot_{}.json')):
        (tmp_path / 'sets' / name).mkdir(parents=True)
        for split in ('train', 'test') if name == 'gsm8k' else ('train', 'dev_distractor'):
            shutil.copy(rows(name), tmp_path / 'sets' / name / file.format(split))
    settings = {**REAL, 'data': 'hotpotqa+gsm8k', 'path': str(tmp_path / 'sets'), 'corpus': rows('hotpotqa'),
                'model': spoken, 'questions': 10 ** 6, 'questions_per_step': 8, 'run': str(tmp_path / 'run')}
    metric = metric_of(make_config(settings))
    right = {name: score('12.5', ['-12.5']) for name, score in metric.items()}     # SQuAD's exact match drops the sign
    assert right == {'hotpotqa': 1, 'gsm8k': 0}
    table = read_metrics(quiet(settings))
    assert table.updates.iloc[-1] == 2 and table.reward[1:].notna().all()
    assert table.dev_right.notna().any()
    last, summary = table.iloc[-1], json.loads((tmp_path / 'run' / 'summary.json').read_text())
    counts = summary['questions_by_set']
    assert set(counts) == {'hotpotqa', 'gsm8k'} and sum(counts.values()) == summary['questions']
    for kind in ('em', 'right'):
        assert 0 <= min(last[f'dev_{kind}_gsm8k'], last[f'dev_{kind}_hotpotqa']) <= last[f'dev_{kind}'] <= max(
            last[f'dev_{kind}_gsm8k'], last[f'dev_{kind}_hotpotqa'])
        for scores in (summary['base'], summary['final']):
            mixed = sum(n * scores[f'{kind}_{name}'] for name, n in counts.items()) / summary['questions']
            assert scores[kind] == pytest.approx(mixed)
    played = {trajectory_from_json(r['trajectory']).question.source for r in read_turns(tmp_path / 'run')}
    assert played == {'hotpotqa', 'gsm8k'}
    # these are scored alike
    assert callable(metric_of(make_config({**settings, 'data': 'hotpotqa+musique'})))


def wrong_sign(t):
    question = dataclasses.replace(t.question, answers=('-12.5', ), source='gsm8k')
    return dataclasses.replace(t, question=question, answer='12.5')


def test_the_measures_are_of_the_runs_own_metric():
    "Off by a sign is right by exact match, not by GSM8K's; CARL's match takes a gold inside an answer."
    t = wrong_sign(example_group().trajectories[0])
    metric = {'gsm8k': benchmark_metric('gsm8k')}
    assert competence_table([t], [1]).EM[1] == 1 and competence_table([t], [1], metric).EM[1] == 0 == competence_table(
        [t], [1], 'numeric').EM[1]
    assert competence_table([t], [1], metric)['wrong, answered'][1] == 1
    hops = dataclasses.replace(t, question=dataclasses.replace(t.question, meta={'hops': 2}))
    assert hop_table([hops]).EM[2] == 1 and hop_table([hops], metric).EM[2] == 0
    longer = dataclasses.replace(t, question=dataclasses.replace(t.question, answers=('New York', )),
                                 answer='New York City')
    assert (competence_table([longer], [1]).EM[1], competence_table([longer], [1])['CARL match'][1]) == (0, 1)


def chooser(monkeypatch, settings, question, played):
    "A run that evaluates on one question, whose rollouts are given one after the other; what it logs."
    played, logged, config = iter(played), [], make_config(settings)
    monkeypatch.setattr(training, 'evaluate', lambda *a, **k: (None, [Group(question, [next(played)])]))
    run = object.__new__(training.Run)
    run.memory, run.metric = {'best': -1., 'best_step': 0}, staging.bound_method(config).metric
    run.gated, run.chosen_by = False, config.checkpoints.chosen_by
    setup = SimpleNamespace(questions={'dev': [question]}, environments={'dev': None})
    run.log = SimpleNamespace(timed=lambda part: contextlib.nullcontext(), metrics=lambda step, **m: logged.append(m))
    run.checkpoint = lambda step, name: None
    run.ahead = training.AheadQueue()
    run.actor = training.Actor(None, setup, config.sampling, 4, 8, 0, Ranks(), run.log)
    return run, logged


@pytest.mark.parametrize('data, best', [('gsm8k', 0.), ('hotpotqa+gsm8k', 0.), ('hotpotqa', 1.), ('tiny', 1.)])
def test_a_checkpoint_is_the_best_by_what_the_data_are_scored_by(data, best, monkeypatch):
    "A dev answer off by its sign, of runs on GSM8K, on HotpotQA and in the tiny world."
    t = wrong_sign(example_group().trajectories[0])
    run, logged = chooser(monkeypatch, {'data': data, 'method': 'carl', 'protocol': 'carl'}, t.question, [t])
    assert training._evaluate_dev(run, 3, {}) == 1 and run.memory['best'] == best and logged[0]['dev_em'] == 1
    assert logged[0].get('dev_right', 1.) == best and ('dev_right' in logged[0]) == ('gsm8k' in data)


@pytest.mark.parametrize('chosen_by, best, step', [(None, 0., 1), ('em', 0., 1), ('f1', .8, 2)])
def test_a_checkpoint_is_the_best_by_word_f1_where_a_run_says_so(chosen_by, best, step, monkeypatch):
    "Two evaluations, none exactly right: no answer, and then one with a word too many (2 of 3 and of 2: 0.8)."
    t, question = example_group().trajectories[0], Question('q', 'Where?', ('New York', ))
    played = [dataclasses.replace(t, question=question, answer=answer) for answer in (None, 'New York City')]
    run, logged = chooser(monkeypatch, {'method': 'igpo', 'chosen_by': chosen_by}, question, played)
    for at in (1, 2): training._evaluate_dev(run, at, {})
    assert (run.memory['best'], run.memory['best_step'], [m['dev_f1'] for m in logged]) == (best, step, [0., .8])


# ---- training ----

def spy_steps(monkeypatch):
    "What each step of a training sees and credits: a list that fills with (layout, seen, credit, rewards)."
    kept, real = [], training.assign
    def watched(*arguments):
        batch = real(*arguments)
        kept.append((batch.layout, batch.seen, batch.credit, batch.rewards))
        return batch
    monkeypatch.setattr(training, 'assign', watched)
    return kept


@pytest.mark.long
def test_segments_sum_to_what_the_critic_did_not_expect(model, scripted, tmp_path, monkeypatch):
    "At lambda 0 the advantages of a rollout's segments sum to R - V(s_0), over rows of their own."
    steps = spy_steps(monkeypatch)
    run = quiet({**TINY, 'model': model, 'steps': 3, 'run': str(tmp_path / 'run')})
    assert len(steps) == 3
    for layout, seen, credit, rewards in steps:
        states = segment_starts(layout.token_turns, layout.row_trajectory, layout.turn_mask)
        start = at_states(seen.values, states)[:, 0]
        own = torch.zeros(layout.turn_mask.shape)
        for n, k in layout.turn_mask.nonzero().tolist():
            values = credit.advantages[layout.row_trajectory == n][layout.token_turns[layout.row_trajectory == n] == k]
            assert (values == values[0]).all()  # one advantage for all tokens of a segment
            own[n, k] = values[0]
        torch.testing.assert_close(own.sum(1), rewards['outcome'] - start, atol=1e-5, rtol=0)
        assert layout.turn_mask.sum(1).max() >= 3 and rewards['outcome'].unique().tolist() == [0., 1.]
    # cold, then it moved
    assert steps[0][1].values[steps[0][1].values != 0].unique().tolist() == [.5] and len(
        steps[2][1].values.unique()) > 3
    table = read_metrics(run)
    for name in ('tool_rate', 'value_start', 'sign_kept', 'context_tokens'): assert table[name][1:].notna().all(), name
    assert table.sign_lost.notna().any()
    # ties are wrong signs
    assert table.sign_kept[1] == 0 and table.value_start[1] == .5 and table.tool_rate[1:].between(.1, 1).all()


def test_explained_variance_is_of_the_outcome_at_the_states_before_segments():
    """By hand: values .5, .9 and .5 at three states whose rollouts came to 1, 1 and 0. Var(R) = 2/9; R - V is .5, .1,
    -.5, of variance .51/3 - 1/900 = .152/.9; so 1 - .76 = .24."""
    turn = lambda kind, ids: Turn(kind, ids, [0.] * len(ids), (), '', '')
    question = Question('q', '', ('a',))
    asked = dataclasses.replace(turn('invoke', (1, 2)), observation_ids=(3, ))
    turns = [asked, turn('commit', (4, 5))], [turn('commit', (6, 7, 8))], [turn('commit', (6, ))]
    layout = pack([Group(question, [Trajectory(question, (0, ), own, Stop.ANSWER, 'a') for own in turns])])
    values = torch.full(layout.ids.shape, 9.)  # of the tokens inside segments nobody asks
    for (row, position), value in zip((first_tokens(layout.token_turns)).nonzero().tolist(), (.5, .9, .5, .1)):
        values[row, position] = value
    # the last one's outcome is not known
    assert abs(step_metrics._explained_outcome(values, torch.tensor([1., 0., math.nan]), layout) - .24) < 1e-6
    assert math.isnan(step_metrics._explained_outcome(values, torch.ones(3), layout))


@pytest.mark.parametrize('settings', [
    dict(method='grpo'), dict(method='ppo', critic='shared', critic_mix=0.0, options={'lam': 0.95}),
    dict(options={'lam': 1.0})], ids=['grpo', 'ppo', 'lambda 1'])
def test_matched_baselines_run_by_other_settings(model, scripted, tmp_path, settings):
    table = read_metrics(quiet({**TINY, 'model': model, 'kl': .01, 'run': str(tmp_path / 'run'), **settings}))
    assert table.updates[1:].eq(2).all() and table.loss[1:].notna().all() and table.tool_rate[1:].notna().all()
    # GRPO has no critic, PPO none that was warmed up: they are asked nothing
    assert GATES & set(table) == (set() if 'method' in settings else GATES)
    assert ('value_start' in table) == ('explained_outcome' in table) == (settings.get('method') != 'grpo')
    # cold: one value everywhere
    if settings.get('method') == 'ppo': assert table.explained_outcome[1] == 0 and table.explained_variance[1] == 0
    # the outcome is what CARL's critic is taught
    if not settings.get('method'): assert table.explained_outcome[1:].tolist() == table.explained_variance[1:].tolist()


@pytest.mark.long
def test_a_resumed_run_is_the_whole_one(model, tmp_path):
    settings = {**TINY, 'model': model, 'eval_every': 1, 'turn_tokens': 12, 'kl': .01}
    whole = quiet({**settings, 'run': str(tmp_path / 'whole')})
    quiet({**settings, 'steps': 1, 'run': str(tmp_path / 'parts')})
    parts = quiet({**settings, 'resume': True, 'run': str(tmp_path / 'parts')})
    assert same_metrics(whole, parts) == [] and read_turns(whole) == read_turns(parts)


REFUSED = {'a protocol whose words it lacks': (dict(model='tiny', protocol='carl'), 'words'),
           'a part that is missing': (dict(world={'famous': {'train': 3}}), 'each'),
           'more facts than there are': (dict(world={'size': 100, 'famous': 5000}), 'size'),
           'no room for a context': (dict(context_tokens=0), 'context_tokens'),
           'a warm-up that is none': (dict(critic_from='nowhere'), 'finished'),
           'a warm-up for a method without critic': (dict(method='grpo', critic_from='nowhere'), 'critic')}


@pytest.mark.parametrize('name', REFUSED)
def test_bad_settings_are_refused_before_anything_is_computed(model, tmp_path, name):
    settings, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        check(make_config({**TINY, 'model': model, 'run': str(tmp_path / 'run'), **settings}))
    assert not (tmp_path / 'run').exists()


# ---- a critic that was warmed up ----

WARM = {**{k: v for k, v in TINY.items() if k not in ('steps', 'eval_every')}, 'per_tier': 20, 'clusters': 4,
        'warm_steps': 40, 'warm_least': 20, 'warm_every': 10, 'warm_batch': 64, 'warm_rise': 5, 'head_rate': 3e-3,
        'backbone_rate': 1e-3}


@pytest.fixture
def easy_gate(monkeypatch):
    "A gate that a small model passes within seconds; the bars are constants of the paper."
    for name in GATE: monkeypatch.setitem(GATE, name, (.02 if name == 'explained_variance' else .2, .8))


@pytest.mark.long
def test_a_warm_up_that_passes_teaches(model, scripted, tmp_path, easy_gate):
    lines = []
    warm = prepare({**WARM, 'model': model, 'run': str(tmp_path / 'warm')}, say=lines.append)
    summary, table = json.loads((warm / 'summary.json').read_text()), gate_table(warm)
    assert summary['passed'] and 20 <= summary['step'] <= 40 and (table['short by'] == 0).all()
    assert (table.before['auc'], table.before['explained_variance']) == (.5, 0)
    assert any('Tier 2' in line and line.startswith('train') for line in lines)
    chances, outcomes = torch.tensor(summary['calibration']).T     # the pairs are kept, for the figure
    assert expected_calibration_error(chances, outcomes) == pytest.approx(summary['ece'], abs=1e-3)
    warmed, base = read_warmed(warm), load_model(model)[0]
    moved = load_model(warmed.folder)[0]
    assert isinstance(warmed.report, GateReport) and warmed.report.passed
    assert any(not torch.equal(a, b) for a, b in zip(moved.parameters(), base.parameters()))
    data = read_collected(warm / 'rollouts-dev.jsonl.gz')
    layout = pack([g for g, prompt in zip(data.groups, data.prompts) if prompt == 'optional'][:64])
    with torch.no_grad():
        before, after = (token_logps(m, layout.ids, layout.trained)[layout.trained] for m in (base, moved))
    # of the base's rollouts: how much less likely they became
    assert abs(summary['drift']) > 1e-3 and math.isclose(summary['drift'], (before - after).mean().item(), abs_tol=1e-4)
    config = make_config({**TINY, 'model': model, 'critic_from': str(warm), 'run': str(tmp_path / 'run')})
    stage = setup_of(config)
    learner = learner_of(config, stage.model)
    same = lambda a, b: all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    # the policy starts from the moved backbone, and its KL counts from the base
    assert same(stage.model, moved) and same(learner.reference.model, base)
    head = learner.critic.head.state_dict()
    assert all(torch.equal(v, head[k]) for k, v in torch.load(warmed.folder / 'head.pt').items())
    run = read_metrics(quiet(config))
    assert run.kl.dropna().iloc[0] > 0 and run.value_start[1] != .5
    own = dataclasses.replace(config, critic={**vars(config.critic), 'kind': 'own'})
    learner = learner_of(own, setup_of(own).model)
    assert same(learner.scorer.model, base) and same(learner.critic.model, moved)
    for change, message in ((dict(model=str(ROOT / 'data' / 'tiny_base')), 'model='),
                            (dict(protocol='carl-tiny-forced'), 'protocol='), (dict(method='ppo'), 'linear')):
        with pytest.raises(ValueError, match=message): check(dataclasses.replace(config, **change))


GATES = {'gate_auc', 'gate_sign', 'gate_explained'}


@pytest.fixture
def warm_up(model, scripted, tmp_path):
    "A function of settings, beside WARM's, and of a folder's name to the folder of a warm-up that said nothing."
    return lambda name='warm', **more: prepare({**WARM, 'model': model, **more, 'run': str(tmp_path / name)},
                                               say=lambda line: None)


@pytest.fixture
def warm(warm_up, easy_gate):
    "Folder of a warm-up whose critic passed."
    return warm_up()


@pytest.mark.long
def test_the_gate_is_read_again_on_what_the_policy_plays(model, warm, scripted, tmp_path, monkeypatch):
    """At every evaluation of a run whose critic was to pass: checked by hand on the rollouts that were played for it.
    All else is what it is where the gate is not read, and no other run reads it."""
    given, examine = [], training.gate_again
    monkeypatch.setattr(training, 'gate_again', lambda *of: given.append(of) or examine(*of))
    settings = {**TINY, 'model': model, 'critic_from': str(warm), 'eval_every': 1}
    run, data = quiet({**settings, 'run': str(tmp_path / 'run')}), read_collected(warm / 'rollouts-dev.jsonl.gz')
    tiers = {q.id: t for q, t in zip(data.questions, data.tier.tolist())}
    table = read_metrics(run)
    assert len(given) == 3 == len(table)
    for (groups, tier, values, metric, _), row in zip(given, table.itertuples()):
        assert [g.question.id for g in groups] == [q.id for q in scripted['dev'].questions]
        assert tier == [tiers.get(g.question.id, 0) for g in groups] and {1, 2} <= set(tier)
        known, unknown = ([v for v, t in zip(values[:, 0].tolist(), tier) if t == of] for of in (2, 1))
        order = [(a > b) + (a == b) / 2 for a in known for b in unknown]
        assert math.isclose(row.gate_auc, sum(order) / len(order), abs_tol=1e-6)
        mask = values.isfinite()
        came = outcome_rewards(groups, metric)[:, None].expand(mask.shape)[mask]
        left = (came - values[mask]).var(correction=0) / came.var(correction=0)
        assert math.isclose(row.gate_explained, 1 - left.item(), abs_tol=1e-5)
        changes = [(values[i, k + 1] - values[i, k]).item() * (1 if kept else -1) > 0 for i, g in enumerate(groups)
                   for k, kept in gold_shown(g.trajectories[0])]
        assert changes and math.isclose(row.gate_sign, sum(changes) / len(changes))
    monkeypatch.setattr(training, '_gate_metrics', lambda *given: {})
    without = quiet({**settings, 'run': str(tmp_path / 'without')})
    assert {line.split(': ')[1].split()[0] for line in same_metrics(run, without)} == GATES
    monkeypatch.undo()


@pytest.mark.long
def test_of_a_cold_critic_what_nothing_tells_is_missing(model, scripted, tmp_path):
    "A cold critic says .5 everywhere; only a world can say what the base was taught."
    table = read_metrics(quiet({**TINY, 'model': model, 'run': str(tmp_path / 'cold')}))
    assert table.gate_auc[0] == .5 and abs(table.gate_explained[0]) < 1e-6 and table.gate_sign[0] == 0
    silent = {**TINY, 'model': model, 'world': {'size': 200}, 'run': str(tmp_path / 'silent')}
    assert read_metrics(quiet(silent)).gate_auc.isna().all()


@pytest.mark.long
def test_a_warm_up_that_fails_ends_with_a_report_and_may_not_teach(model, scripted, tmp_path):
    settings = {**WARM, 'model': model, 'warm_steps': 4, 'warm_least': 2, 'warm_every': 2, 'run': str(tmp_path / 'warm')}
    lines = []
    warm = prepare(settings, say=lines.append)
    assert lines[-1].startswith('NOT passed') and (gate_table(warm)['short by'] > 0).any()
    with pytest.raises(ValueError, match='steps') as refused:
        quiet({**TINY, 'model': model, 'critic_from': str(warm), 'run': str(tmp_path / 'run')})
    failed = json.loads((warm / 'summary.json').read_text())['failed']
    assert failed and all(f'{name} by {gap:.3f}' in str(refused.value) for name, gap in failed.items())
    assert not (tmp_path / 'run').exists()
    # an ablation says that it need not pass
    allowed = prepare({**settings, 'must_pass': False, 'run': str(tmp_path / 'allowed')}, say=lines.append)
    check(make_config({**TINY, 'model': model, 'critic_from': str(allowed)}))
    cold = prepare({**settings, 'collected': 'cold', 'run': str(tmp_path / 'cold')}, say=lines.append)
    summary = json.loads((cold / 'summary.json').read_text())
    assert (summary['step'], summary['drift'], summary['report']['auc']) == (0, 0., .5)
    protocol = PROTOCOLS[settings['protocol']]
    assert (summary['protocol'], summary['prompt_hash']) == (protocol.name, prompt_hash(protocol))


@pytest.mark.long
def test_a_warm_up_whose_gradient_is_not_finite_ends_and_keeps_what_made_it(model, scripted, tmp_path, monkeypatch):
    "One state's return is absurd; resumed so that it skips the steps that meet it, the warm-up comes to its end."
    def with_one(*args):
        pairs = make_pairs(*args)
        pairs.returns[:4] = 1e38
        return pairs
    monkeypatch.setattr(preparing, 'make_pairs', with_one)
    run = tmp_path / 'warm'
    settings = {**WARM, 'model': model, 'warm_steps': 8, 'warm_least': 2, 'warm_every': 2, 'must_pass': False,
                'warm_batch': 16, 'run': str(run)}
    with pytest.raises(BadStep, match='warm-up'):
        prepare(settings, say=lambda line: None)
    bad = json.loads((run / 'bad_step.json').read_text())
    assert bad['step'] >= 1 and 'loss' in bad['error'] and max(state['outcome'] for state in bad['states']) > 1e37
    assert len(bad['states']) == 16 and all('<|im_start|>' in state['text'] for state in bad['states'])
    assert not (run / 'summary.json').exists() and latest_checkpoint(run)[0] < bad['step']
    prepare({**settings, 'resume': True, 'on_bad_step': 'skip'}, say=lambda line: None)
    assert all(w.isfinite().all() for w in load_model(run / 'critic')[0].parameters())


class Killed(BaseException):
    "A kill, in process."


@pytest.mark.long
@pytest.mark.parametrize('how', ['killed at an examination', 'killed', 'asked to end', 'asked while it plays'])
def test_a_warm_up_that_ends_on_its_way_goes_on_to_the_same_numbers(model, scripted, tmp_path, monkeypatch, how):
    settings = {**WARM, 'model': model, 'warm_steps': 6, 'warm_least': 6, 'warm_every': 2}
    teach, taught, play, played = warmup._teach, [], warmup.rollout, []
    monkeypatch.setattr(warmup, 'rollout', lambda *args: played.append(args) or play(*args))
    whole, count = prepare({**settings, 'run': str(tmp_path / 'whole')}, say=lambda line: None), len(played)
    settings |= {'run': str(tmp_path / 'parts'), **({'save_every': 1e-9} if how == 'killed' else {})}
    played.clear()
    def teaches(*args):
        taught.append(teach(*args))
        if len(taught) == 3 and how == 'asked to end': os.kill(os.getpid(), signal.SIGTERM)
        if len(taught) == 4 and how == 'killed': raise Killed
        return taught[-1]
    def plays(*args):
        played.append(args)
        if len(played) == 2 and how == 'asked while it plays': os.kill(os.getpid(), signal.SIGTERM)
        return play(*args)
    def said(line):
        if line.startswith('step 4') and how == 'killed at an examination': raise Killed
    with monkeypatch.context() as patch:
        patch.setattr(warmup, '_teach', teaches)
        patch.setattr(warmup, 'rollout', plays)
        with pytest.raises(Killed if 'killed' in how else SystemExit) as ended: prepare(settings, say=said)
        assert 'killed' in how or ended.value.code == 128 + signal.SIGTERM
    found = latest_checkpoint(tmp_path / 'parts')
    assert found is None if 'plays' in how else found[0] == {'killed at an examination': 2}.get(how, 3)
    assert not (tmp_path / 'parts' / 'summary.json').exists()
    with pytest.raises(ValueError, match='finished'): read_warmed(tmp_path / 'parts')
    with pytest.raises(FileExistsError): prepare(settings, say=lambda line: None)
    assert len(played) == (2 if 'plays' in how else count)
    parts = prepare({**settings, 'resume': True}, say=lambda line: None)
    assert len(played) == count and not (parts / 'played').exists()                 # nothing is played a second time
    assert same_metrics(whole, parts) == [] and read_metrics(parts).step.tolist() == [0, 2, 4, 6]
    one, other = (json.loads((folder / 'summary.json').read_text()) for folder in (whole, parts))
    assert one == other
    for a, b in zip(load_model(whole / 'critic')[0].parameters(), load_model(parts / 'critic')[0].parameters()):
        assert torch.equal(a, b)


@pytest.mark.long
@needs_deepspeed
def test_ranks_warm_up_as_one_process_does(model, scripted, tmp_path, run_python):
    "ZeRO-3 on two ranks, resumed by one: the numbers and the critic of a plain warm-up."
    settings = {**WARM, 'model': model, 'warm_steps': 6, 'warm_least': 6, 'warm_every': 2, 'must_pass': False}
    whole = prepare({**settings, 'run': str(tmp_path / 'whole')}, say=lambda line: None)
    (tmp_path / 'parts').mkdir()
    # the scripted players are of this process
    for rollouts in whole.glob('rollouts-*'): shutil.copy(rollouts, tmp_path / 'parts')
    spread = {**settings, **IN_PIECES, 'run': str(tmp_path / 'parts')}
    run_python('-m', 'credit_rl.prepare', *typed({**spread, 'ranks': 2, 'warm_steps': 4, 'warm_least': 4}), env=ON_A_CPU)
    prepare({**spread, 'warm_least': 4, 'resume': True}, say=lambda line: None)
    assert same_metrics(whole, tmp_path / 'parts', 1e-3) == [] and read_metrics(whole).step.tolist() == [0, 2, 4, 6]
    for name in ('critic/model.safetensors', 'critic/head.pt'):
        a, b = (load_file(f / name) if name.endswith('safetensors') else torch.load(f / name)
                for f in (whole, tmp_path / 'parts'))
        for key in a: torch.testing.assert_close(a[key], b[key], atol=2e-4, rtol=0)


@pytest.mark.long
def test_random_rollouts_and_a_linear_head_for_the_matched_baseline(model, warm_up, tmp_path):
    ppo = dict(method='ppo', critic='shared', critic_mix=0.)
    warm = warm_up(**ppo, collected='random', backbone_rate=0., warm_steps=4, warm_least=4, warm_every=4,
                   must_pass=False)
    warmed, base = read_warmed(warm), load_model(model)[0]
    # a frozen backbone
    assert warmed.head == 'linear' and all(
        torch.equal(a, b) for a, b in zip(load_model(warmed.folder)[0].parameters(), base.parameters()))
    run = read_metrics(quiet({**TINY, **ppo, 'model': model, 'critic_from': str(warm), 'options': {'lam': .95},
                              'run': str(tmp_path / 'run')}))
    assert run.value_start[1] != 0 and run.kl.dropna().iloc[0] >= 0


@pytest.mark.long
def test_three_questions_in_ten_are_looked_up_in_another_corpus(spoken, rows, tmp_path, monkeypatch):
    "In both parts and under both prompts that call; the others' programs find the set's own."
    path, corpus, code = rows('hotpotqa'), tmp_path / 'corpus.jsonl', 'print(search("river Ossel"))'
    corpus.write_text(''.join(
        json.dumps({'title': f'Elsewhere {i}', 'text': 'The river Ossel.'}) + '\n' for i in range(4)))
    many = [{**row, '_id': f'{row["_id"]}-{n}', 'question': f'{row["question"]} [{n}]'}
            for row in json.loads(Path(path).read_text()) for n in range(9)]             # a fifth of them is for dev
    (path := tmp_path / 'many.json').write_text(json.dumps(many))
    gold = {row['question']: row['answer'] for row in many}
    def act(text, rng):
        asked = next(q for q in gold if q in text)
        # it knows every second one
        if 'without tools' in text:
            return f'\\boxed{{{gold[asked] if int(asked[1]) % 2 else "?"}}}' + byte_tokenizer().eos_token
        if code not in text: return f'```python\n{code}\n```\n'
        return '\\boxed{as noted}' + byte_tokenizer().eos_token if 'as noted' in text else '<context>as noted</context>'
    monkeypatch.setattr(staging, 'HFEngine',
                        lambda model, tokenizer, **limits: ScriptedEngine(act, tokenizer, max_length=12000))
    settings = {k: v for k, v in REAL.items() if k not in ('steps', 'eval_every')} | {
        'turn_tokens': 400, 'context_tokens': 200, 'questions': 20, 'dev_questions': 10, 'test_questions': 6}
    given = {**settings, 'data': 'hotpotqa', 'path': str(path), 'model': spoken, 'collected': 'cold',
             'must_pass': False, 'clusters': 2, 'other_corpus': str(corpus)}
    warmed = lambda name, **more: prepare({**given, **more, 'run': str(tmp_path / name)}, say=lambda line: None)
    data, where = read_collected(warmed('warm') / 'rollouts-dev.jsonl.gz'), {}       # a cold critic is taught nothing
    for g, prompt in zip(data.groups, data.prompts):
        seen = [turn.observation_text for turn in g.trajectories[0].turns if turn.call]
        assert len(seen) == (prompt != 'direct')
        for text in seen: where.setdefault(g.question.id, set()).add('Elsewhere' in text)
    assert len(where) == len(data.questions) >= 8 and all(len(x) == 1 for x in where.values())
    assert sum(x == {True} for x in where.values()) == round(.3 * len(where))
    # tiers from a pool are those that the warm-up would play
    pool = run_evaluation(
        dict(model=spoken, data='hotpotqa', path=str(path), protocol='carl-direct', greedy=False, tries=2, turn_tokens=400,
             max_tokens=12000, run=str(tmp_path / 'pool')), say=lambda line: None, progress=False,
        engine=ScriptedEngine(act, load_tokenizer(spoken), max_length=12000))
    again = read_collected(warmed('pooled', pool=str(pool)) / 'rollouts-dev.jsonl.gz')
    assert again.tier.tolist() == data.tier.tolist() and set(again.tier.tolist()) == {1, 2}
    file = pool / 'hotpotqa' / 'manifest.json'
    file.write_text(file.read_text().replace('"prompt_hash": "', '"prompt_hash": "0'))
    with pytest.raises(ValueError, match='prompt'): warmed('other', pool=str(pool))


MINILM = 'sentence-transformers/all-MiniLM-L6-v2'


def test_a_failed_look_up_falls_back_on_memory_as_often_as_it_should():
    w = world_of({'hops': (1, 2), 'twins': True, 'nothing': 1.}, 'test', 1, 80)
    chat, memory = Chat(PROTOCOLS['carl-tiny'], tiny_tokenizer(numbers=True)), memory_of(w)
    right = {}
    for share in (0., .5, 1.):
        coder = dataclasses.replace(PERFECT_CODER, recall=0., fallback=share)
        engine = ScriptedEngine(lambda text, rng: act_coder(text, rng, coder, memory), chat.tokenizer)
        played = rollout(engine, tiny_environment(w, chat), w.questions, 4)
        right[share] = {known: [t.answer in g.question.answers for g in played for t in g.trajectories
                                if g.question.meta['parametric'] == known] for known in (True, False)}
        assert not any(right[share][False])
    assert not any(right[0.][True]) and all(right[1.][True])
    assert .4 < sum(right[.5][True]) / len(right[.5][True]) < .6


@pytest.mark.parametrize('embed', [MINILM, None])
def test_questions_are_clustered_by_the_named_model(warm_up, scripted, monkeypatch, embed):
    "By the vectors of `embed`, else by words: a topic rare in them is drawn as often as a frequent one."
    loaded, asked, fair = [], [], []
    rare = lambda text: sum(map(ord, text)) % 5 == 0                          # no word tells it
    class Encoder:
        def __init__(self, name, trust_remote_code): loaded.append((name, trust_remote_code))
        def encode(self, texts):
            asked.append(list(texts))
            return numpy.array([[float(rare(t)), 1.] for t in texts])
    stub = ModuleType('sentence_transformers')
    stub.SentenceTransformer = Encoder
    monkeypatch.setitem(sys.modules, 'sentence_transformers', stub)
    warm = warm_up(collected='cold', must_pass=False, per_tier=8, clusters=2, embed=embed)
    data, pool = read_collected(warm / 'rollouts-dev.jsonl.gz'), scripted['dev'].questions
    for tier in (1, 2):
        drawn = sum(rare(q.text) for q, t in zip(data.questions, data.tier.tolist()) if t == tier)
        there = sum(rare(q.text) for q in pool if q.meta['parametric'] == (tier == 2))
        fair.append(drawn == min(4, there))
    assert all(fair) == bool(embed)
    if embed: assert loaded == [(MINILM, False)] and [*map(sorted, asked)] == [sorted(q.text for q in pool)]
    else: assert loaded == asked == []


def test_a_model_that_cannot_be_loaded_is_told_before_anything_is_played(model, scripted, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'sentence_transformers', None)
    monkeypatch.setattr(preparing, 'collect', lambda *a, **k: pytest.fail('played'))
    with pytest.raises(ImportError, match="embed='sentence-transformers/all-MiniLM-L6-v2'"):
        prepare({**WARM, 'model': model, 'embed': MINILM, 'run': str(tmp_path / 'warm')}, say=lambda line: None)


@pytest.mark.long
def test_the_notebook_shows_a_warm_up_and_ends_with_an_error_where_it_failed(model, scripted, tmp_path):
    "`92_warmup` on two that are over: figure, table and report; why one may not teach."
    settings = {**WARM, 'model': model, 'warm_steps': 2, 'warm_least': 1, 'warm_every': 1}
    for name, must in (('allowed', False), ('failed', True)):
        prepare({**settings, 'must_pass': must, 'run': str(tmp_path / name)}, say=lambda line: None)
        given = {**settings, 'must_pass': must, 'resume': True, 'run': str(tmp_path / name)}
        code, text, notebook = papermill(tmp_path / name / 'notebook.ipynb', settings=given, cwd=tmp_path,
                                         notebook='92_warmup')
        assert code == int(must), text[-3000:]
        assert len(shown(notebook, 'image/png')) == 1 and (tmp_path / name / 'figures' / 'gate.png').exists()
        assert any('short by' in page for page in shown(notebook, 'text/html'))
        assert ('did not pass its gate in 2 steps' in text) == must and 'sign_accuracy' in text


def test_a_model_that_knows_nothing_cannot_be_warmed_up(model, tmp_path):
    with pytest.raises(ValueError, match='Tier 1'):
        prepare({**WARM, 'model': model, 'run': str(tmp_path / 'warm')}, say=lambda line: None)


# ---- does it know when to ask? ----

@pytest.mark.long
def test_finished_runs_are_examined_once_and_reported(model, warm_up, tmp_path, monkeypatch):
    "A critic on the policy's backbone, one of its own, and none; then the report by papermill."
    warm = warm_up('runs/curated-0', warm_steps=2, warm_least=1, warm_every=1, must_pass=False)
    for name, more in (('carl-0', dict(critic_from=str(warm), log_rollouts=4)), ('ppo-0', dict(method='ppo')),
                       ('grpo-0', dict(method='grpo'))):
        run = quiet({**TINY, 'model': model, 'run': str(tmp_path / 'runs' / name), **more})
        found, best = examine_run(run, say=lambda line: None), json.loads((run / 'summary.json').read_text())['best_step']
        assert found['tiers'] == {'1': 11, '2': 20} and found['step'] == best and found['known_before'] == 1
        assert found['greedy']['2']['tool rate'] < .8 < found['greedy']['1']['tool rate']
        assert found['greedy']['2']['n'] == 20 and (found['critic'] is None) == (name == 'grpo-0')
    assert examine_run(run, lambda line: None, 'newest')['step'] == latest_checkpoint(run)[0]
    examine_run(run, lambda line: None)  # the best again
    says = {name: critic for name, _, found in examine_runs(tmp_path / 'runs') if (critic := found['critic'])}
    assert len(says['carl']['chances']) == 31 and len(set(says['carl']['chances'])) > 5
    assert 0 < says['carl']['brier'] < 1 and set(says['ppo']['signs']) == {'kept', 'lost'}
    row, t = next((r, t) for r in read_turns(tmp_path / 'runs' / 'carl-0') if r['kind'] == 'train'
                  and gold_shown(t := trajectory_from_json(r['trajectory'])))
    k = gold_shown(t)[0][0]                                       # a rollout that was shown the gold; here it loses it
    turns = [dataclasses.replace(x, action_text='<context> </context>') if i == k else x for i, x in enumerate(t.turns)]
    lost = {**row, 'step': 3, 'trajectory': to_json(dataclasses.replace(t, turns=turns)),
            'advantages': [{k - 1: .3, k: -.4}.get(i, 0.) for i in range(len(turns))]}
    RunLog(tmp_path / 'runs' / 'carl-0', resume=True).turns(3, [lost])
    names, older = ('carl-0', 'ppo-0', 'grpo-0'), {}
    for name in names:
        place = tmp_path / 'runs' / name / 'summary.json'
        summary = json.loads(place.read_text())
        older[name] = {k: v for k, v in summary['competence'].items() if k != 'first credit'}
        # as it was kept when less was asked
        summary['competence'] = {k: v for k, v in older[name].items() if k not in ('base', 'no tools')}
        place.write_text(json.dumps(summary))
    assert not any(label.startswith('base') for label in competence.asking_table(tmp_path / 'runs').index)
    assert competence.play_table(tmp_path / 'runs')['note precision, base'].isna().all()
    assert competence.resilience_table(tmp_path / 'runs')[['no tool, all', 'no tool, all, base']].isna().all(axis=None)
    asked, whole = [], []
    for name, kept in (('examine_base', asked), ('examine_agent', whole)):
        monkeypatch.setattr(competence, name,
                            lambda *a, of=getattr(competence, name), kept=kept, **k: kept.append(a) or of(*a, **k))
    competence.main([str(tmp_path / 'runs')])  # anew; one base, asked once for the three
    found = {f'{m}-{seed}': {k: v for k, v in found.items() if k != 'first credit'}
             for m, seed, found in examine_runs(tmp_path / 'runs')}
    assert len(asked) == 1 and len(whole) == 3 and found == older
    monkeypatch.setattr(competence, 'open_agent', lambda *a: pytest.fail('examined twice'))
    competence.main([str(tmp_path / 'runs')])  # the warm-up is left out
    given = {'folders': str(tmp_path / 'runs'), 'out': str(tmp_path / 'out')}
    code, text, notebook = papermill(tmp_path / 'report.ipynb', settings=given, cwd=tmp_path, notebook='96_competence')
    assert code == 0, text[-3000:]
    tables = shown(notebook, 'text/html')
    for wanted in ('base, no tools', 'note precision, base', 'reaches 0.6 at step'):
        assert sum(wanted in page for page in tables) == 1
    assert len(tables) >= 7 and any('carl − grpo' in page for page in tables)
    drawn = {'asking.png', 'calibration.png', 'course.png', 'reliability.png'}
    assert drawn <= set(os.listdir(tmp_path / 'out' / 'figures'))
    # a good call and a bad note
    assert any('carl-0, step 3' in page and 'assimilate' in page and '0.40' in page for page in tables)


@pytest.mark.long
@needs_deepspeed
@pytest.mark.parametrize('more', [{}, pytest.param(dict(method='ppo', critic='frozen', options={'penalty': -1.0}),
                                                   marks=pytest.mark.nightly)], ids=['shared', 'frozen'])
def test_a_critic_in_the_pieces_of_deepspeed_is_examined(model, scripted, tmp_path, more):
    "Both learners' critics agree on every state, and the examination asks that of the pieces."
    settings = {**TINY, 'model': model, 'log_kl': False, **more}
    (whole, _), (pieces, _) = (competence.open_agent(quiet({**settings, **host, 'run': str(tmp_path / name)}), 'newest')
                               for name, host in (('plain', {}), ('pieces', IN_PIECES)))
    assert not (latest_checkpoint(tmp_path / 'pieces')[1] / 'learner.pt').exists()
    assert any(w.abs().max() > 1e-4 for n, w in whole.critic[1].state_dict().items() if n.startswith('out.'))
    for a, b in zip(whole.critic[1].parameters(), pieces.critic[1].parameters()):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=0)
    contexts = whole.env.chat.prompt_ids([q.text for q in whole.questions])
    torch.testing.assert_close(context_values(*whole.critic, contexts), context_values(*pieces.critic, contexts),
                               atol=1e-3, rtol=0)
    if not more:
        found = examine_run(tmp_path / 'pieces', lambda line: None, 'newest')
        assert found['critic'] and 0 <= found['critic']['brier'] <= 1 and len(found['critic']['chances']) == 31
    else:                                                                                           # it never learned
        assert all(torch.equal(a, b) for a, b in zip(pieces.critic[0].parameters(), load_model(model)[0].parameters()))


def test_who_cannot_be_examined_is_told_why(finished, tmp_path):
    run = shutil.copytree(finished(method='grpo'), tmp_path / 'run', symlinks=True)
    with pytest.raises(ValueError, match='leaves'): examine_run(run)
    (run / 'summary.json').unlink()
    with pytest.raises(FileNotFoundError, match='finished'): examine_run(run)
    with pytest.raises(FileNotFoundError, match='finished'): examine_runs(run)
