"""What do tools cost a rollout with vLLM? Sampled tokens per second beside those of the same engine that samples as
many in each trajectory without tools, in one run and in turns.

    python tests/bench/bench_vllm.py [--questions 96] [--group 8] [--rows 256] [--block-size 32] [--own-process]
        [--library] [--tool-seconds 0.0] [--repeats 3]

By default 768 trajectories, three times as many as the engine has at once: a step of the papers has 1,280 and more.
With as many as it has at once (`--questions 32`), tools find it waiting for the last ones. `--tool-seconds` makes every
batch of calls wait; in a process of its own the engine goes on meanwhile. `--library` measures `HFEngine` instead; vLLM
needs `make test-vllm`."""
import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

import torch

from credit_rl.engine import HFEngine, SamplingParams
from credit_rl.models import load_model
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.rollout import rollout
from credit_rl.tiny import tiny_environment
from credit_rl.vllm_engine import VLLMEngine, VLLMSettings
from credit_rl.world import make_world

FOLDER = Path(__file__).resolve().parents[2] / 'data' / 'tiny_base'


class Slow:
    "A tool whose every batch of calls takes some seconds more."
    def __init__(self, tool, seconds):
        self.tool, self.seconds = tool, seconds

    def call(self, calls):
        time.sleep(self.seconds)
        return self.tool.call(calls)


def with_tools(engine, env, questions, group, seed):
    "Trajectories and seconds of a rollout."
    start = time.perf_counter()
    groups = rollout(engine, env, questions, group, SamplingParams(max_tokens=24), seed)
    return [t for g in groups for t in g.trajectories], time.perf_counter() - start


def without(engine, trajectories):
    "Tokens and seconds of sampling after each trajectory's prompt as many as were sampled in it, in one go."
    eos = engine.eos_ids
    engine.eos_ids = eos[:0] if torch.is_tensor(eos) else set()              # nothing ends it but its length
    stream, start, tokens = engine.stream(SamplingParams()), time.perf_counter(), 0
    for i, t in enumerate(trajectories):
        stream.submit(i, t.prompt_ids, seed=i, max_tokens=sum(len(x.action_ids) for x in t.turns))
    for batch in stream:
        for f in batch:
            tokens += len(f.ids)
            stream.release(f.key)
    engine.eos_ids = eos
    return tokens, time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind, default in (('--questions', int, 96), ('--group', int, 8), ('--rows', int, 256),
                                ('--block-size', int, 32), ('--tool-seconds', float, 0.), ('--repeats', int, 3)):
        parser.add_argument(name, type=kind, default=default)
    for name in ('--own-process', '--library'): parser.add_argument(name, action='store_true')
    a = parser.parse_args()
    model, tokenizer = load_model(str(FOLDER))
    world = make_world('train', seed=3, size=200, questions=a.questions)
    env = tiny_environment(world, Chat(PROTOCOLS['tiny'], tokenizer))
    env = dataclasses.replace(env, tool=Slow(env.tool, a.tool_seconds))
    if a.library: engine = HFEngine(model, tokenizer, max_length=192, max_rows=a.rows)
    else:
        arguments = {'enforce_eager': True, 'block_size': a.block_size}
        engine = VLLMEngine(FOLDER, tokenizer, max_length=192, max_rows=a.rows,
                            settings=VLLMSettings('float32', a.own_process, arguments=arguments))
    with_tools(engine, env, world.questions, 1, seed=0)              # compilation is not counted
    played = []                                                      # tokens, seconds with tools and without
    for repeat in range(a.repeats):
        trajectories, seconds = with_tools(engine, env, world.questions, a.group, seed=1 + repeat)
        tokens, free = without(engine, trajectories)
        assert tokens == sum(len(x.action_ids) for t in trajectories for x in t.turns)
        played.append((tokens, seconds, free))
    ratios = [free / seconds for _, seconds, free in played]
    print('MEASURED', json.dumps({
        'trajectories': len(trajectories), 'calls': sum(x.call is not None for t in trajectories for x in t.turns),
        'tokens_per_second_with_tools': round(statistics.median(tokens / seconds for tokens, seconds, _ in played)),
        'ratio': round(statistics.median(ratios), 3), 'ratios': [round(ratio, 3) for ratio in ratios]}))
    if not a.library: engine.close()


if __name__ == '__main__':
    main()
