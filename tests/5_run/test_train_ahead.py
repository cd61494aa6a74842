"""Playing ahead of learning: whose weights play what, that a run goes on after a kill, what weights weigh, refusals."""
import copy
import threading

import pytest
import torch
from test_train import DEATHS, SHORT, assert_same, logged, sit

from credit_rl import train as training
from credit_rl.engine import HFEngine, seed_of
from credit_rl.estimate import TrainingPlan, Sizes, memory
from credit_rl.learner import BadStep
from credit_rl.rollout import rollout
from credit_rl.runlog import latest_checkpoint, read_metrics, read_turns, same_metrics
from credit_rl.settings import make_config
from credit_rl.setup import draw_questions
from credit_rl.train import begin_run, train, train_step

AHEAD = {**SHORT, 'ahead': 1, 'correction': 'truncated', 'gap': 10., 'track': '', 'learning_rate': 2e-3}
quiet = lambda line: None


def ids(groups):
    turns = lambda t: [(x.action_ids, x.action_logps, x.observation_ids) for x in t.turns]
    return [[(t.prompt_ids, turns(t)) for t in g.trajectories] for g in groups]


@pytest.fixture
def ahead(finished):
    "A run one step off that nobody interrupted."
    return finished(**AHEAD)


@pytest.fixture
def begun(tmp_path):
    "A run one step off, before its first step."
    run = begin_run(make_config({**AHEAD, 'run': str(tmp_path / 'run')}), quiet)
    yield run
    run.close()


# ---- whose weights play what ----

def test_a_run_in_step_plays_nothing_in_advance(tmp_path, monkeypatch):
    "No thread, nothing kept, and not a word more in its metrics."
    monkeypatch.setattr(training, 'ThreadPoolExecutor', lambda *args: pytest.fail('something was played in advance'))
    run = train({**SHORT, 'steps': 1, 'run': str(tmp_path / 'run')}, say=quiet)
    assert not {'stale', 'seconds_ahead', 'sampler_weight'} & set(logged(run)[1])
    assert not list(run.glob('checkpoints/*/played*'))
    assert make_config({}).ahead == 0


def test_each_step_is_played_by_the_weights_before_the_one_it_was_played_in(begun):
    "Steps 1 and 2 by the base, step 3 by what step 1 made of it, step 4 by what step 2 made: played anew, id for id."
    actor, weights, played = begun.actor, [], []
    for step in (1, 2, 3):
        weights.append(copy.deepcopy(begun.setup.model))                # after step - 1
        metrics = train_step(begun, step)
        assert metrics['stale'] == (0 if step == 1 else 2)              # updates of one step: two mini-batches
        played += begun.ahead.batches
    assert [p.step for p in played] == [2, 3, 4] and begun.learner.updates == 6
    assert max((a - b).abs().max() for a, b in zip(weights[0].parameters(), weights[2].parameters())) > 1e-4
    for model, p in zip(weights, played):
        engine = HFEngine(model, begun.setup.chat.tokenizer, begun.engine.max_length)
        again = rollout(engine, begun.setup.environments['train'],
                        draw_questions(begun.setup.questions['train'], actor.questions_per_step, p.step, actor.seed),
                        actor.group_size, actor.sampling, seed_of(actor.seed, p.step))
        assert ids(again) == ids(p.groups)


def test_a_policy_that_stands_still_is_the_same_in_step_and_ahead(tmp_path):
    "The same games. Two ahead, the base plays steps 2 and 3, and what step 2 made plays 4 and 5."
    still = {**AHEAD, 'ahead': 2, 'learning_rate': 1e-12, 'log_steps': 500, 'log_rollouts': 4}
    train({**still, 'run': str(tmp_path / 'ahead')}, say=quiet)
    train({**still, 'ahead': 0, 'correction': None, 'run': str(tmp_path / 'step')}, say=quiet)
    said = [[[t['action_ids'] for t in row['trajectory']['turns']] for row in read_turns(tmp_path / name)]
            for name in ('ahead', 'step')]
    assert said[0] == said[1] and len(said[0]) > 64
    table, other = (read_metrics(tmp_path / name)[1:] for name in ('ahead', 'step'))
    assert table.reward.equals(other.reward) and table.logp_gap_max.lt(1e-4).all()
    assert table.stale.tolist() == [0, 2, 4, 2] and table.sampler_weight.sub(1).abs().lt(1e-4).all()


@pytest.mark.parametrize('method, more', [
    ('tips', {'teacher_every': 2}), pytest.param('dapo', {'options': {'draws': 3}}, marks=pytest.mark.nightly),
    pytest.param('grpo', {'measure': ['belief', 'entropy']}, marks=pytest.mark.nightly)])
def test_methods_that_need_the_learner_between(tmp_path, method, more):
    "The first step is that of a run in step; the others' rollouts are older by two updates."
    settings = {**AHEAD, 'method': method, 'steps': 3, **more}
    again = [('two', {})] * (method == 'dapo')                          # one that draws again
    for name, over in (('one', {}), *again, ('step', {'ahead': 0, 'correction': None, 'recompute': True})):
        train({**settings, **over, 'run': str(tmp_path / name)}, say=quiet)
    one, step = read_metrics(tmp_path / 'one'), read_metrics(tmp_path / 'step')
    if again: assert same_metrics(tmp_path / 'one', tmp_path / 'two') == []
    assert one.stale[1] == 0 and one.stale[3] > 0
    same = [n for n in step if n in one and not n.startswith('seconds') and step.notna()[n][1]]
    assert one.loc[1, same].tolist() == pytest.approx(step.loc[1, same].tolist(), rel=1e-3, abs=1e-5)
    assert {'loss', 'reward', 'grad_norm'} < set(same)


# ---- the same again ----


@pytest.mark.parametrize('steps, death', [
    (1, 'while the next step is played'), (3, 'in the middle of the metrics of step 2'),
    pytest.param(3, 'in the middle of the last rollouts', marks=pytest.mark.nightly)])
def test_a_killed_run_ends_as_if_it_had_not_been(finished, tmp_path, steps, death):
    "Three steps ahead, the checkpoint after step 2 holds steps 3 and 4."
    settings, whole = {**AHEAD, 'ahead': steps, 'run': str(tmp_path / 'killed')}, finished(**{**AHEAD, 'ahead': steps})
    assert death in DEATHS and sit(settings, death=death) < 0
    assert sit({**settings, 'resume': True}) == 0
    assert_same(whole, tmp_path / 'killed')


def test_more_steps_go_on_from_where_a_run_ended(ahead, tmp_path):
    "The last checkpoint holds the rollouts of a step that was not to come."
    settings = {**AHEAD, 'run': str(tmp_path / 'longer')}
    assert sit({**settings, 'steps': 2}) == 0
    path = latest_checkpoint(tmp_path / 'longer')[1] / training.AHEAD_FILE
    assert [b.step for b in training.read_ahead(path)] == [3]
    assert sit({**settings, 'resume': True}) == 0
    assert_same(ahead, tmp_path / 'longer')
    with pytest.raises(ValueError, match='before'):
        train({**settings, 'ahead': 0, 'correction': None, 'resume': True}, say=quiet)


def test_rollouts_played_ahead_are_kept_to_the_last_digit(begun, tmp_path):
    train_step(begun, 1)
    (batch,) = begun.ahead.batches
    training.write_ahead(tmp_path / 'played', [batch, training.AheadBatch(3, 5, batch.groups[:1])])
    read, other = training.read_ahead(tmp_path / 'played')
    assert read == batch and ids(read.groups) == ids(batch.groups) and len(other.groups) == 1
    assert [g.question.meta for g in read.groups] == [g.question.meta for g in batch.groups]
    assert training.read_ahead(tmp_path / 'nothing') == []
    (tmp_path / 'played').write_bytes((tmp_path / 'played').read_bytes()[:-40])
    with pytest.raises(ValueError, match='resume=True'):
        training.read_ahead(tmp_path / 'played')


# ---- weights ----

@pytest.mark.parametrize('kind, limits', [('truncated', [0., 1.02]), ('masked', [.98, 1.02])])
def test_what_older_weights_sampled_is_weighed(tmp_path, monkeypatch, kind, limits):
    "The advantages that the learner gets are the rule's times the ratio of its own to the sampler's probability, cut."
    run = begin_run(make_config({**AHEAD, 'correction': kind, 'limits': limits, 'run': str(tmp_path / 'run')}), quiet)
    found, honest = [], training.correct_credit
    monkeypatch.setattr(training, 'correct_credit',
                        lambda *args: found.append((args[0], *honest(*args))) or found[-1][1:])
    for step in (1, 2, 3): metrics = train_step(run, step)
    run.close()
    batch, credit, _ = found[-1]
    layout, before = batch.layout, batch.credit.advantages
    ratio = torch.where(layout.trained, batch.seen.logp - layout.logps, 0.).exp()
    assert (ratio - 1).abs()[layout.trained].mean() > 1e-3                  # the sampler is another policy
    wanted = ratio.clamp(max=1.02) if kind == 'truncated' else ratio * ((ratio >= .98) & (ratio <= 1.02))
    torch.testing.assert_close(credit.advantages, before * wanted)
    outside = (ratio > 1.02) | (ratio < limits[0])
    assert metrics['sampler_cut'] == pytest.approx(outside[layout.trained].float().mean().item()) and outside.any()
    assert metrics['logp_gap'] == pytest.approx((batch.seen.logp - layout.logps)[layout.trained].abs().mean().item())


def test_a_policy_that_runs_away_ends_the_run(tmp_path):
    with pytest.raises(RuntimeError, match='gap=1e-06'):
        train({**AHEAD, 'gap': 1e-6, 'run': str(tmp_path / 'run')}, say=quiet)


# ---- what goes wrong meanwhile ----

def alive(): return [t.name for t in threading.enumerate() if t.name.startswith('ahead')]


def test_where_learning_fails_the_play_is_called_off(begun, monkeypatch):
    "It ends at the next trajectory's end, long before all are played, and its thread with it."
    ended, called = [], threading.Event()
    honest = training.rollout

    def slowly(engine, env, questions, count, sampling, seed, progress, each):
        def heard(n):
            ended.append(n)
            called.wait(60)
            progress(n)
        return honest(engine, env, questions, count, sampling, seed, heard if alive() else progress, each)

    def fails(*args): raise BadStep('no')

    def kept(row, keep=begun.log.bad_step):         # the last thing that takes time before play is called off
        keep(row)
        called.set()
    monkeypatch.setattr(training, 'rollout', slowly)
    monkeypatch.setattr(begun.learner, 'step', fails)
    monkeypatch.setattr(begun.log, 'bad_step', kept)
    with pytest.raises(BadStep, match='step'): train_step(begun, 1)
    assert not alive() and sum(ended) < 16 and begun.ahead == training.AheadQueue(1)


def test_where_the_engine_fails_the_step_does(begun, monkeypatch):
    honest = training.rollout
    monkeypatch.setattr(training, 'rollout', lambda *args: honest(*args) if not alive() else 1 / 0)
    with pytest.raises(ZeroDivisionError): train_step(begun, 1)
    assert not alive()


@pytest.mark.parametrize('given, message', [
    (dict(correction=None), "'truncated'"), (dict(engine='vllm', vllm={}), 'own_process'),
    (dict(engine='vllm', vllm={'own_process': True, 'sleep_level': 1}), 'leave it at 0'),
    (dict(method='vine'), 'vine.*ahead'), (dict(ahead=0), "engine='vllm'"), (dict(correction='trunkated'), "'trunkated'"),
    (dict(limits=[.5, 2.]), 'low=0.5')])
def test_what_cannot_work_is_refused_before_any_compute(tmp_path, monkeypatch, given, message):
    monkeypatch.setattr(training, 'make_setup', lambda *args: pytest.fail('something was computed'))
    if 'vllm' in given:                # refused by this rule where vLLM can be had
        from credit_rl import settings
        monkeypatch.setattr(settings, 'check_vllm_settings', lambda *args: None)
    settings = {**AHEAD, **given, 'run': str(tmp_path / 'run')}
    for dry in (False, True):
        with pytest.raises(ValueError, match=message): train({**settings, 'dry_run': dry}, say=quiet)
    assert not (tmp_path / 'run').exists()


def test_a_dry_run_says_what_is_gained_and_what_it_takes(tmp_path):
    said = {}
    for name, over in (('ahead', {}), ('step', {'ahead': 0, 'correction': None})):
        said[name] = []
        train({**AHEAD, **over, 'tflops': .1, 'dry_run': True, 'run': str(tmp_path / 'run')}, say=said[name].append)
    assert [line for line in said['ahead'] if line.startswith('ahead: a step takes ')]
    assert any('acting copy' in line for line in said['ahead']) and not any('acting copy' in x for x in said['step'])
    assert not any(line.startswith('ahead') for line in said['step'])


# ---- the estimate ----


def test_memory_of_both_at_once():
    sizes = Sizes(1000, 2, 8, 16, 8, 4, 50)
    apart, both = (memory(sizes, TrainingPlan(copies=True, acting=100, row_tokens=100, both=x)) for x in (False, True))
    assert both['rank'] == apart['rank'] + apart['keys and values']
