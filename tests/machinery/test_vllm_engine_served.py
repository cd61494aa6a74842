"""vLLM's own servers, by fake ones (tests/tools/fake_vllm.py): who is asked, what a death costs, whose weights sample."""
import contextlib
import copy
import math
import subprocess
import sys
import time

import pytest
import torch
from fake_vllm import FakeServer
from test_vllm_engine_sync import runs

from credit_rl.engine import HFEngine, SamplingParams
from credit_rl.models import load_model
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.rollout import rollout
from credit_rl.tiny import tiny_environment
from credit_rl.vllm_engine import EngineLost, ServedEngine, ServeSettings, sync_gap
from credit_rl.world import make_world

TURN = SamplingParams(max_tokens=12)


@pytest.fixture(scope='module')
def base(root):
    folder = root / 'data' / 'tiny_base'
    model, tokenizer = load_model(str(folder))
    return model.cpu(), tokenizer, folder


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


def moved(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for i, p in enumerate(other.parameters()):
            p.add_(.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return other


def test_games_of_two_servers_are_one_engines_and_a_conversation_stays_where_it_is(base, games, alone):
    with served(base, {}, {}) as (engine, *servers):
        assert games(engine) == alone[0]
        first, second = map(turns, servers)
        begun = [ids for ids in first + second if not any(ids[:len(x)] == x != ids for x in first + second)]
        assert len(begun) == 12 and abs(len([x for x in begun if x in first]) - 6) <= 1
        for own, other in ((first, second), (second, first)):
            later = [ids for ids in own if ids not in begun]
            # a conversation's earlier turn has more in common with it than the prompt, which other attempts share
            assert later and all(any(ids[:len(x)] == x for x in own) for ids in later)


def test_a_turn_that_a_server_ends_early_is_asked_on(base, games, alone):
    with served(base, {'most': 3}) as (engine, server):
        assert games(engine, SamplingParams(greedy=True, max_tokens=12)) == alone[1]
        seeds = {body['sampling_params']['seed'] for path, body in server.asked if path == 'inference/v1/generate'}
        assert len(seeds) == len(turns(server)) > 12       # the rest of a turn is drawn anew, not from the same numbers


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
    with pytest.raises(ConnectionError, match='health'): ServedEngine(base[2], base[1], ['http://127.0.0.1:9'])
    from transformers import Qwen2Config, Qwen2ForCausalLM
    Qwen2ForCausalLM(Qwen2Config(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                 num_attention_heads=2, num_key_value_heads=1)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='shapes'), served(base, {'root': str(tmp_path)}): pass
    server = FakeServer(base[2])
    with pytest.raises(ValueError, match='max-model-len'): ServedEngine(base[2], base[1], [server.url], max_length=500)
    monkeypatch.setattr(FakeServer, 'inference_v1_generate', lambda self, body: {'choices': [{
        'token_ids': [5], 'logprobs': {'content': [{'logprob': -9999.}]}, 'weight_versions': [{'version': self.version}]}]})
    engine = ServedEngine(base[2], base[1], [server.url], max_length=192)
    with pytest.raises(ValueError, match='NaN'): engine.generate([[10]], TURN)
    server.close()
