"""Engines in processes of their own, for tests/machinery/test_vllm_engine.py. `python tests/tools/vllm_process.py NAME`
prints `MEASURED {…}` with `ok`."""
import copy
import dataclasses
import json
import re
import sys
import tempfile
import time
from pathlib import Path

import torch

from credit_rl.engine import HFEngine, SamplingParams
from credit_rl.layout import pack
from credit_rl.learner import Learner, Optimiser
from credit_rl.models import load_model
from credit_rl.parts import Loss
from credit_rl.protocol import PROTOCOLS, Chat, parse
from credit_rl.rollout import rollout
from credit_rl.tiny import tiny_environment, tiny_tokenizer
from credit_rl.vllm_engine import VLLMEngine, VLLMSettings, logp_gap, sync_gap
from credit_rl.world import make_world
from random_models import moved

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = VLLMSettings('float32', arguments={'enforce_eager': True})
ODD = [list(range(10, 10 + n)) for n in (5, 20, 60)]


def syncs(engine, model):
    "Gaps before and after a sync to other weights, and seconds of the sync."
    other = moved(model)
    first, apart = sync_gap(engine, model, ODD)['logp_gap_max'], sync_gap(engine, other, ODD)['logp_gap_max']
    start = time.perf_counter()
    engine.load(dict(other.named_parameters()))
    seconds = time.perf_counter() - start
    after = sync_gap(engine, other, ODD)['logp_gap_max']
    return {'before': first, 'unsynced': apart, 'after': after, 'load_seconds': round(seconds, 3),
            'ok': first < 1e-3 < .1 < apart and after < 1e-3}


def untied():
    "An output layer of its own."
    from transformers import Qwen2Config, Qwen2ForCausalLM
    tokenizer = tiny_tokenizer()
    config = Qwen2Config(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                         initializer_range=.1, tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = VLLMEngine(folder, tokenizer, max_length=192, max_rows=8, settings=SETTINGS)
    named = dict(model.named_parameters())
    try:
        engine.load({n: t for n, t in named.items() if n != 'lm_head.weight'})
        return {'ok': False, 'refused': False}
    except ValueError:
        return syncs(engine, model)


class Eager(Chat):
    "A chat that takes whatever is said for a program."
    def parse(self, text, why='stop'):
        return parse(self.protocol, '<tool_call> print ( 6 * 7 ) </tool_call>')


def carl():
    "Rollouts in segments, with edited contexts; the other engine plays the same, the learner reads what was sampled."
    model, tokenizer = load_model(str(ROOT / 'data' / 'tiny_base'))
    world = make_world('train', seed=3, size=200, questions=6)
    env = tiny_environment(world, Eager(PROTOCOLS['carl-tiny'], tokenizer), max_turns=6, max_tokens=256)
    env = dataclasses.replace(env, context_tokens=9)
    engine = VLLMEngine(ROOT / 'data' / 'tiny_base', tokenizer, max_length=256, max_rows=32, settings=SETTINGS)
    said = lambda groups: [[(x.kind, x.action_ids, x.context_ids) for x in t.turns] for g in groups for t in g.trajectories]
    greedy = SamplingParams(greedy=True, max_tokens=15)
    ours, theirs = (said(rollout(e, env, world.questions, 1, greedy))
                    for e in (engine, HFEngine(model, tokenizer, max_length=256)))
    layout = pack(rollout(engine, env, world.questions, 3, SamplingParams(max_tokens=15), seed=2))
    seen = Learner(model, Loss(), Optimiser()).evaluate(layout)
    gap = logp_gap(seen.logp, layout.logps, layout.trained)['logp_gap_max']
    kinds = [x[0] for t in ours for x in t]
    return {'gap': gap, 'segments': len(kinds), 'assimilate': kinds.count('assimilate'),
            'ok': ours == theirs and gap < 1e-3 and kinds.count('assimilate') > 6}


def adapter():
    "A LoRA adapter over the base: log-probabilities of the merged model; another one in its place; none again."
    from safetensors.torch import save_file
    model, tokenizer = load_model(str(ROOT / 'data' / 'tiny_base'))
    engine = VLLMEngine(ROOT / 'data' / 'tiny_base', tokenizer, max_length=192, max_rows=8,
                        settings=VLLMSettings('float32', arguments={'enforce_eager': True, 'enable_lora': True}))
    gaps = []
    for seed in (0, 1):
        merged, generator, saved = copy.deepcopy(model), torch.Generator().manual_seed(seed), {}
        for name, module in merged.named_modules():
            if name.endswith(('q_proj', 'v_proj')):
                a, b = (.1 * torch.randn(*shape, generator=generator)
                        for shape in ((4, module.in_features), (module.out_features, 4)))
                saved |= {f'base_model.model.{name}.lora_A.weight': a, f'base_model.model.{name}.lora_B.weight': b}
                with torch.no_grad():
                    module.weight += 2 * b @ a                      # lora_alpha / r = 8 / 4
        with tempfile.TemporaryDirectory() as folder:
            save_file(saved, f'{folder}/adapter_model.safetensors')
            Path(folder, 'adapter_config.json').write_text(json.dumps({
                'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'r': 4, 'lora_alpha': 8, 'lora_dropout': 0., 'bias': 'none',
                'target_modules': ['q_proj', 'v_proj']}))
            before = sync_gap(engine, merged, ODD)['logp_gap_max']
            engine.load_adapter(folder)
        gaps.append((before, sync_gap(engine, merged, ODD)['logp_gap_max']))
    engine.load_adapter(None)
    none = sync_gap(engine, model, ODD)['logp_gap_max']
    return {'gaps': gaps, 'none': none,
            'ok': all(before > .05 and after < 1e-3 for before, after in gaps) and none < 1e-3}


class Waiting:
    "A tool that waits until the engine said more of others under way, or a while has passed; `met` says which."
    def __init__(self, tool, engine): self.tool, self.engine, self.met = tool, engine, []

    def call(self, calls):
        said = self.engine.llm.engine_core.outputs_queue
        if self.engine.core.live:
            for _ in range(6000):
                if not said.empty(): break
                time.sleep(.01)
            self.met.append(not said.empty())
        return self.tool.call(calls)


def other_process():
    "The engine core in a process of its own, which goes on while tools run; weights go through a file."
    model, tokenizer = load_model(str(ROOT / 'data' / 'tiny_base'))
    engine = VLLMEngine(ROOT / 'data' / 'tiny_base', tokenizer, max_length=192, max_rows=32,
                        settings=dataclasses.replace(SETTINGS, own_process=True))
    measured = syncs(engine, model)
    engine.load(dict(model.named_parameters()))
    world = make_world('train', seed=3, size=200, questions=8)
    env = tiny_environment(world, Chat(PROTOCOLS['tiny'], tokenizer))
    greedy = SamplingParams(greedy=True, max_tokens=24)
    ours, theirs = (rollout(e, env, world.questions, 1, greedy)
                    for e in (engine, HFEngine(model, tokenizer, max_length=192)))
    said = lambda groups: [[x.action_ids for x in g.trajectories[0].turns] for g in groups]
    tool = Waiting(env.tool, engine)
    rollout(engine, dataclasses.replace(env, tool=tool), world.questions, 4, SamplingParams(max_tokens=24), seed=1)
    measured |= {'calls beside others': len(tool.met), 'others went on': sum(tool.met)}
    measured['ok'] &= said(ours) == said(theirs) and not engine.llm.has_unfinished_requests() and len(
        tool.met) > 0 and all(tool.met)
    engine.close()
    return measured


def notebook():
    "The cells of nbs/machinery/21_vllm_engine.ipynb, with vLLM there."
    cells = json.loads((ROOT / 'nbs' / 'machinery' / '21_vllm_engine.ipynb').read_text(encoding='utf-8'))['cells']
    space = {'__name__': '__main__'}
    for cell in cells:
        source = ''.join(cell['source'])
        if cell['cell_type'] == 'code':
            exec(compile(source, re.sub(r'\s+', ' ', source[:50]), 'exec'), space)
    return {'ok': space['VLLM'] is True}


if __name__ == '__main__':
    print('MEASURED', json.dumps(globals()[sys.argv[1]]()), flush=True)
