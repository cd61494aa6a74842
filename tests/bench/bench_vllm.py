"""How much do tools cost a rollout with vLLM? It is compared, in one run and in turns, with the same engine that
generates without tools:

- `whole`: the same length for each trajectory, so those ids that were observed are sampled then. Trajectories per
second, and sampled tokens per second:
  the first credits a rollout with what it reads, the second does not.
- `sampled`: only as many ids for each as were sampled in it, so nothing takes the place of what was read, and the
trajectories are shorter.

    python tests/bench/bench_vllm.py [--questions 96] [--group 8] [--rows 256] [--block-size 32] [--own-process]
        [--library]
    [--tool-seconds 0.0] [--repeats 3]

By default 768 trajectories, three times as many as the engine has at once: a step of the papers has 1,280 and more.
With as many as it has at once
(`--questions 32`), tools find it waiting for the last ones. `--tool-seconds` makes every batch of calls wait; in a
process of its own the engine goes on meanwhile. `--library` measures `HFEngine` instead; vLLM needs
`make test-vllm`.
Also printed: the seconds of a weight sync, and how many of a rollout's samples stay the same in other company.
"""
import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

import torch

from credit_rl.engine import HFEngine, SamplingParams, seed_of
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


def without(engine, trajectories, length):
    "Tokens and seconds of generating after each trajectory's prompt `length(trajectory)` tokens in one go."
    # nothing ends it but its length
    eos, engine.eos_ids = engine.eos_ids, torch.tensor([], dtype=torch.long) if isinstance(
        engine.eos_ids, torch.Tensor) else set()
    stream, start, tokens = engine.stream(SamplingParams()), time.perf_counter(), 0
    for i, t in enumerate(trajectories):
        stream.submit(i, t.prompt_ids, seed=i, max_tokens=length(t))
    for batch in stream:
        for f in batch:
            tokens += len(f.ids)
            stream.release(f.key)
    engine.eos_ids = eos
    return tokens, time.perf_counter() - start


LENGTHS = {
    'whole': lambda t: sum(len(x.action_ids) + len(x.observation_ids) for x in t.turns), 'sampled':
    lambda t: sum(len(x.action_ids) for x in t.turns)
}


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
    rates = []
    for repeat in range(a.repeats):
        trajectories, seconds = with_tools(engine, env, world.questions, a.group, seed=1 + repeat)
        length = {name: sum(map(of, trajectories)) for name, of in LENGTHS.items()}
        free = {name: without(engine, trajectories, of) for name, of in LENGTHS.items()}
        assert {name: tokens for name, (tokens, _) in free.items()} == length
        rates.append({
            'tokens_per_second_with_tools':
            length['sampled'] / seconds, 'whole, trajectories per second':
            free['whole'][1] / seconds, 'whole, sampled tokens per second':
            length['sampled'] / seconds / (length['whole'] / free['whole'][1]), 'sampled, trajectories per second':
            free['sampled'][1] / seconds
        })
    start = time.perf_counter()
    engine.load(dict(model.named_parameters()))
    load_seconds = time.perf_counter() - start
    prompts = env.chat.prompt_ids([q.text for q in world.questions]) * a.group
    seeds = [seed_of('bench', i) for i in range(len(prompts))]
    one = engine.generate(prompts, SamplingParams(max_tokens=24), seeds=seeds).ids
    other = engine.generate(prompts[::-2], SamplingParams(max_tokens=24), seeds=seeds[::-2]).ids
    median = lambda name: statistics.median(r[name] for r in rates)
    print('MEASURED', json.dumps({
        'trajectories': len(trajectories), 'calls': sum(x.call is not None for t in trajectories for x in t.turns),
        **length,
        'tokens_per_second_with_tools': round(median('tokens_per_second_with_tools')),
        'ratio': {name: round(median(name), 3) for name in rates[0] if ',' in name},
        'ratios': {name: [round(r[name], 3) for r in rates] for name in rates[0] if ',' in name},
        'load_seconds': round(load_seconds, 3),
        'same_samples_in_other_company': f'{sum(x == y for x, y in zip(one[::-2], other))} of {len(other)}'}))
    if not a.library: engine.close()


if __name__ == '__main__':
    main()
