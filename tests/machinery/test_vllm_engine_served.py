"""vLLM's own servers, by fake ones (tests/tools/fake_vllm.py): who is asked, what a death costs, whose weights sample."""
import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from fake_vllm import FakeServer
from test_vllm_engine_sync import runs

from credit_rl.engine import HFEngine, SamplingParams
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.rollout import rollout
from credit_rl.runlog import read_metrics, read_turns
from credit_rl.tiny import tiny_environment
from credit_rl.train import train
from credit_rl.vllm_engine import EngineLost, ServedEngine, ServeSettings, Serving, check_served, sync_gap
from credit_rl.world import make_world
from random_models import moved, small_qwen

TURN = SamplingParams(max_tokens=12)


@pytest.fixture(scope='module')
def games(base):
    "Plays the same games with an engine: their ids, and how each ends."
    world = make_world('train', seed=3, size=200, questions=4)
    env = tiny_environment(world, Chat(PROTOCOLS['tiny'], base[1]))
    def play(engine, sampling=TURN):
        groups = rollout(engine, env, world.questions, 3, sampling, seed=5)
        return [(t.stop, [(x.action_ids, x.observation_ids) for x in t.turns]) for g in groups for t in g.trajectories]
    return play


@pytest.fixture(scope='module')
def alone(base, games):
    "What the library's engine plays, sampled and greedily."
    engine = HFEngine(base[0], base[1], max_length=192)
    return games(engine), games(engine, SamplingParams(greedy=True, max_tokens=12))


@contextlib.contextmanager
def served(base, *fakes, **how):
    "An engine of fake servers, each made by its arguments."
    servers = [FakeServer(base[2], **given) for given in fakes]
    engine = ServedEngine(base[2], base[1], [s.url for s in servers], max_length=192, **how)
    try: yield (engine, *servers)
    finally:
        for server in servers: server.dies = None
        engine.close()
        for server in servers: server.close()


def turns(server): return [body['token_ids'] for path, body in server.asked if path == 'inference/v1/generate']


@pytest.mark.long
def test_games_of_two_servers_are_one_engines_and_a_conversation_stays_where_it_is(base, games, alone):
    with served(base, {}, {}) as (engine, *servers):
        assert games(engine) == alone[0]
        before, stream, again = [len(turns(s)) for s in servers], engine.stream(TURN), set()
        for i in range(6): stream.submit(i, [10 + i, 11])
        for batch in stream:
            for f in batch:
                if f.key in again: stream.release(f.key)
                else: stream.submit(f.key, [10 + f.key, 11, *f.ids, 9], seed=7)
                again.add(f.key)
        first, second = ([ids[0] for ids in turns(s)[n:]] for s, n in zip(servers, before))
        assert len(first) == len(second) == 6 and len(set(first)) == len(set(second)) == 3 and not set(first) & set(second)


@pytest.mark.long
def test_a_turn_that_a_server_ends_early_is_asked_on(base, games, alone):
    with served(base, {'most': 3}) as (engine, server):
        assert games(engine, SamplingParams(greedy=True, max_tokens=12)) == alone[1]
        seeds = {body['sampling_params']['seed'] for path, body in server.asked if path == 'inference/v1/generate'}
        assert len(seeds) == len(turns(server)) > 12       # the rest of a turn is drawn anew, not from the same numbers


@pytest.mark.long
def test_a_dead_servers_turns_are_asked_elsewhere_and_it_comes_back_with_new_weights(base, games, alone):
    other = moved(base[0])
    with served(base, {}, {'dies': 3}) as (engine, first, second):
        with pytest.warns(UserWarning, match='lost'): assert games(engine) == alone[0]
        second.dies, before = None, len(second.asked)      # it is there again, with nobody knows what weights
        assert games(engine) == alone[0] and len(second.asked) == before
        engine.load(dict(other.named_parameters()))
        assert second.version == first.version
        assert games(engine) == games(HFEngine(other, base[1], max_length=192)) != alone[0]
        assert len(turns(second)) > 6
        second.version = 'default'                         # somebody started it anew between two transfers
        with pytest.warns(UserWarning, match="version default"): games(engine)
        first.dies = 0
        with pytest.raises(EngineLost, match='none'): games(engine)


def test_weights_come_while_servers_stand_still_and_versions_must_advance(base):
    other = moved(base[0])
    with served(base, {}, {}) as (engine, first, second):
        before = first.version
        engine.load(dict(other.named_parameters()))
        assert sync_gap(engine, other, [[10, 11, 12], [13]], tolerance=1e-4)['logp_gap'] < 1e-5
        assert first.version != before and [p.split('?')[0] for p, _ in second.asked if 'generate' not in p][-7:] == [
            'health', 'pause', 'collective_rpc', 'reset_prefix_cache', 'update_weight_version', 'resume', 'weight_info']
        first.stuck = True
        with pytest.raises(RuntimeError, match='version'): engine.load(dict(base[0].named_parameters()))
    with pytest.raises(RuntimeError, match='version'), served(base, {'stuck': True}): pass


def test_sleeping_servers(base):
    for level in (1, 2):
        with served(base, {}, settings=ServeSettings(sleep_level=level)) as (engine, server):
            engine.sleep()
            assert server.asked[-1][0] == f'sleep?level={level}' and engine.hollow == (level == 2)
            with pytest.raises(RuntimeError, match='asleep'): engine.stream(TURN)
            engine.load(dict(base[0].named_parameters()))
            assert 'wake_up' in [path for path, _ in server.asked] and not engine.hollow
            engine.generate([[10, 11]], TURN)


def test_what_is_given_up_is_called_off(base):
    with served(base, {}) as (engine, server):
        server.goes.clear()
        stream = engine.stream(TURN)
        for i in range(2): stream.submit(i, [10, 11, i + 5])
        stream.release(0)
        engine.stream(TURN)
        server.goes.set()
        until = time.monotonic() + 10
        while sum(path == 'abort_requests' for path, _ in server.asked) < 2 and time.monotonic() < until: time.sleep(.02)
        assert not engine.core.live and sum(engine.core.open.values()) == 0
        assert {body['request_ids'][0].split('-')[-1] for path, body in server.asked if path == 'abort_requests'} == {'0', '1'}


def test_servers_that_cannot_serve_are_refused(base, tmp_path, monkeypatch):
    with pytest.raises(ConnectionError, match='answers'): ServedEngine(base[2], base[1], ['http://127.0.0.1:9'])
    small_qwen(20, hidden_size=8, intermediate_size=8, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='shapes'), served(base, {'root': str(tmp_path)}): pass
    server = FakeServer(base[2])
    with pytest.raises(ValueError, match='max-model-len'): ServedEngine(base[2], base[1], [server.url], max_length=500)
    monkeypatch.setattr(FakeServer, 'inference_v1_generate', lambda self, body: {'choices': [{
        'token_ids': [5], 'logprobs': {'content': [{'logprob': -9999.}]}, 'weight_versions': [{'version': self.version}]}]})
    engine = ServedEngine(base[2], base[1], [server.url], max_length=192)
    with pytest.raises(ValueError, match='NaN'): engine.generate([[10]], TURN)
    server.close()


@pytest.mark.parametrize('serve, ranks', [({'gpus': '0', 'sleep_level': 1, 'transfer': 'ipc'}, 2),
                                          ({'gpus': '0', 'sleep_level': 1, 'transfer': 'nccl'}, 1),
                                          ({'gpus': '1', 'transfer': 'ipc'}, 1)])
def test_a_way_that_does_not_reach_a_gpu_is_refused(monkeypatch, serve, ranks):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    with pytest.raises(ValueError, match='transfer: file'): check_served(serve, [], TURN, ranks, ranks)


# ---- servers that are started ----

SERVES = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
    def log_message(self, *given): pass
print(os.getpid(), flush=True)
http.server.HTTPServer(('127.0.0.1', int(sys.argv[-1])), Handler).serve_forever()
"""
STARTS = """
import sys
from credit_rl.vllm_engine import Serving
serving = Serving([({}, [sys.executable, '-c', sys.argv[1]])] * 2, sys.argv[2])
print('there', flush=True)
sys.stdin.read()
"""


def gone(pids, seconds=30):
    until = time.monotonic() + seconds
    while any(map(runs, pids)) and time.monotonic() < until: time.sleep(.05)
    return not any(map(runs, pids))


def test_servers_end_with_the_process_that_started_them(root, tmp_path):
    process = subprocess.Popen([sys.executable, '-c', STARTS, SERVES, str(tmp_path)], cwd=root, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == 'there\n'
    pids = [int((tmp_path / f'server-{i}.log').read_text()) for i in range(2)]
    assert all(map(runs, pids))
    process.kill()
    process.communicate()
    assert gone(pids)


def test_a_server_that_ended_is_started_again_and_one_that_cannot_start_says_why(tmp_path):
    serving = Serving([({}, [sys.executable, '-c', SERVES])], tmp_path, 60)
    try:
        first, urls = int((tmp_path / 'server-0.log').read_text()), serving.urls
        os.kill(first, signal.SIGKILL)
        serving.begun[urls[0]].wait(30)
        serving.revive()
        serving.wait(60)
        second = int((tmp_path / 'server-0.log').read_text().split()[1])
        assert serving.urls == urls and runs(second) and not runs(first)
    finally: serving.close()
    assert gone([second])
    with pytest.raises(EngineLost, match='no room'):
        Serving([({}, [sys.executable, '-c', 'raise SystemExit("no room")'])], tmp_path, 60)
    with pytest.raises(EngineLost, match='in time'):
        Serving([({}, [sys.executable, '-c', 'import time; time.sleep(60)'])], tmp_path, 1)


# ---- runs ----

RUN = dict(steps=3, eval_every=3, questions_per_step=4, group_size=2, questions=50, dev_questions=4, test_questions=4,
           max_turns=3, turn_tokens=12, kl=.01, world={'size': 200}, threads=1, track='', correction='truncated', gap=10.,
           log_rollouts=4, learning_rate=1e-4, ahead=2, ranks=2, learner='deepspeed', stage=3)


@pytest.mark.nightly
def test_two_ranks_learn_two_steps_off_from_what_two_servers_play(base, tmp_path):
    "The first rank plays for both: the games of a run that plays by its own model, whose ranks share them."
    pytest.importorskip('deepspeed')
    servers = [FakeServer(base[2]) for _ in range(2)]
    settings = {**RUN, 'model': str(base[2])}
    train({**settings, 'run': str(tmp_path / 'own')}, say=lambda line: None)
    train({**settings, 'engine': 'served', 'servers': [s.url for s in servers], 'run': str(tmp_path / 'served')},
          say=lambda line: None)
    for server in servers: server.close()
    assert read_metrics(tmp_path / 'served').stale.dropna().tolist() == [0, 2, 4]
    said = [[turn['action_ids'] for row in read_turns(tmp_path / name) for turn in row['trajectory']['turns']]
            for name in ('own', 'served')]
    assert said[0] == said[1] and all(len(turns(server)) > 50 for server in servers)
    reward = [read_metrics(tmp_path / name).reward.dropna().tolist() for name in ('own', 'served')]
    assert reward[0] == pytest.approx(reward[1]) and len(reward[0]) == 3


def test_a_dry_run_says_which_servers_it_would_start_or_ask(base, tmp_path, monkeypatch):
    from credit_rl import settings as settings_
    monkeypatch.setattr(settings_, 'check_served', lambda *given: None)                 # vLLM need not be installed
    said, common = [], {**RUN, 'model': str(base[2]), 'engine': 'served', 'dry_run': True, 'tflops': .1,
                        'run': str(tmp_path / 'run')}
    train({**common, 'serve': {'replicas': 2}}, say=said.append)
    assert sum(line.startswith('starts a server of vLLM') and '--enable-scale-out' in line for line in said) == 2
    with pytest.raises(ValueError, match='answers'): train({**common, 'servers': ['http://127.0.0.1:9']}, say=said.append)
