"""One training step at the true shape of a model, with random weights, so that no network is needed: acting,
reading, packed scoring, learning.

    python tests/gpu/measure.py [qwen2.5-0.5b qwen2.5-3b qwen2.5-7b] [--device cuda] [--rows 16] [--tokens 2048]
                                [--dtype bfloat16]

Needs torch and transformers. Prints `MEASURED {…}` for each shape, and at the end lines for runs/log. Ends with
an error where a number is not finite, engine and learner disagree, packed and separate scoring disagree, or a step
moves nothing. A shape whose estimated memory is more than the device has is left out, and said to be.
"""
import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))   # a checkout will do
from credit_rl.engine import HFEngine, SamplingParams
from credit_rl.estimate import TrainingPlan, Sizes, memory
from credit_rl.layout import hidden_states, pack, token_logps
from credit_rl.learner import Learner, Optimiser
from credit_rl.parts import Credit, Loss
from credit_rl.scoring import AnswerTemplate, acting_states, answer_logps, answer_logps_separate
from credit_rl.trajectory import Group, Question, Stop, Trajectory, Turn
from credit_rl.trees import node_numbers, plant

# layers, width, width of the feed-forward layer, heads, key heads, vocabulary, whether the output layer shares the
# embedding
SHAPES = {
    'toy': (2, 64, 128, 4, 2, 512, True), 'qwen2.5-0.5b': (24, 896, 4864, 14, 2, 151936, True), 'qwen2.5-3b':
    (36, 2048, 11008, 16, 2, 151936, True), 'qwen2.5-7b': (28, 3584, 18944, 28, 4, 152064, False)
}
GAP = {'float32': 1e-3, 'bfloat16': .1}      # largest mean difference of engine and learner, in nats per token
# largest difference of a gold answer's summed log-probability, packed and separate, in nats
APART = {'float32': 1e-3, 'bfloat16': 2.}


class Ids:
    "A tokenizer of as many ids as the model has, each the text of its number; nothing ends a turn but its length."
    eos_token_id = None
    def decode(self, ids): return ''.join(f'<{int(i)}>' for i in ids)
    def batch_decode(self, rows): return [self.decode(row) for row in rows]


def random_model(shape, device, dtype, depth=None):
    layers, hidden, intermediate, heads, kv, vocabulary, tied = SHAPES[shape]
    layers = depth or layers
    config = Qwen2Config(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=intermediate,
                         num_attention_heads=heads, num_key_value_heads=kv, vocab_size=vocabulary,
                         tie_word_embeddings=tied, max_position_embeddings=32768, eos_token_id=None, bos_token_id=None,
                         pad_token_id=None, dtype=getattr(torch, dtype))
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device(device): model = Qwen2ForCausalLM(config)
    torch.set_default_dtype(before)
    return model.eval()


class Clock:
    "Seconds and peak memory of what stands in its block, everything on the device done."
    def __init__(self, device): self.cuda = device == 'cuda'
    def __enter__(self):
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.start = time.perf_counter()
        return self
    def __exit__(self, *_):
        if self.cuda: torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.start
        self.bytes = torch.cuda.max_memory_allocated() if self.cuda else None


def trajectories(model, a, generator):
    """Groups of two: a prompt, four turns with an observation, an answer; together `tokens` ids, the sampled ones by
    the engine. And tokens a second and the clock."""
    engine, part = HFEngine(model, Ids(), max_length=a.tokens, max_rows=a.rows), a.tokens // 10
    draw = lambda n: torch.randint(model.config.vocab_size, (n,), generator=generator).tolist()
    prompts, turns = [draw(2 * part) for _ in range(a.rows)], [[] for _ in range(a.rows)]
    said, stream, sampled = [list(p) for p in prompts], engine.stream(SamplingParams(max_tokens=part)), 0
    with Clock(a.device) as clock:
        for i, ids in enumerate(said): stream.submit(i, ids, seed=i)
        for batch in stream:
            for f in batch:
                last = len(turns[f.key]) == 3
                observation = [] if last else draw(part)
                turns[f.key].append(Turn('answer' if last else 'tool', f.ids, f.logps, observation, '', ''))
                said[f.key] += [*f.ids, *observation]
                sampled += len(f.ids)
                if last: stream.release(f.key)
                else: stream.submit(f.key, said[f.key], seed=len(said[f.key]))
    question = Question('q', 'What?', ['gold'])
    made = [Trajectory(question, p, t, Stop.ANSWER) for p, t in zip(prompts, turns)]
    return [Group(question, made[i:i + 2]) for i in range(0, len(made), 2)], sampled, clock


def scoring(model, layout, a, generator):
    "Gold answers at every state, packed and one by one: seconds of each and how far apart they are."
    draw = lambda n: torch.randint(model.config.vocab_size, (n,), generator=generator).tolist()
    few = min(4, a.rows)
    rows = layout.ids[:few].to(a.device), layout.lengths[:few].to(a.device)
    states = acting_states(layout.states, layout.turn_mask)[:few].to(a.device)
    golds = [[AnswerTemplate(draw(10), 3, 10) for _ in range(2)] for _ in range(few)]
    with torch.no_grad():
        answer_logps(model, rows, states, golds, 'packed', budget=4 * a.row_tokens)
        with Clock(a.device) as packed:
            fast = answer_logps(model, rows, states, golds, 'packed', budget=4 * a.row_tokens)
        with Clock(a.device) as separate: slow = answer_logps_separate(model, rows, states, golds)
    there = fast.tokens > 0
    apart = (fast.sums - slow.sums)[there].abs().max().item()
    assert there.any() and fast.missing == 0 and apart <= APART[a.dtype], ('packed and separate scoring differ by '
                                                                           f'{apart} nats')
    return {
        'states': int((states[..., 0] >= 0).sum()), 'seconds_packed': packed.seconds, 'seconds_separate':
        separate.seconds, 'separate_over_packed': separate.seconds / packed.seconds, 'largest_difference_nats': apart
    }


def measure(shape, a):
    "All numbers of a shape: dict."
    model, generator = random_model(shape, a.device, a.dtype), torch.Generator().manual_seed(1)
    groups, sampled, acting = trajectories(model, a, generator)
    layout, learner = pack(groups), Learner(model, Loss(),
                                            Optimiser(learning_rate=1e-4, minibatches=1, row_tokens=a.row_tokens))
    if a.checkpointing: model.gradient_checkpointing_enable({'use_reentrant': False})
    with Clock(a.device) as reading: seen = learner.evaluate(layout, ('logp',))
    gap = (seen.logp - layout.logps)[layout.trained].abs().mean().item()
    assert gap <= GAP[a.dtype], f'engine and learner differ by {gap} nats per token'
    scored = scoring(model, layout, a, generator)
    credit = Credit(torch.where(layout.trained, (layout.row_trajectory % 2 * 2. - 1)[:, None], 0.))
    before = next(model.parameters()).detach().flatten()[:4096].clone()
    learner.step(layout, seen, credit)                                     # AdamW's states are made; not counted
    with Clock(a.device) as learning: stats = learner.step(layout, learner.evaluate(layout, ('logp',)), credit)
    assert stats['updates'] == 1 and all(v == v and abs(v) < float('inf') for v in stats.values()), stats
    assert not torch.equal(before, next(model.parameters()).detach().flatten()[:4096]), 'two steps moved nothing'
    tokens, needs = int(layout.lengths.sum()), memory(sizes(shape), plan(a))
    return {
        'shape': shape, 'parameters': sum(p.numel() for p in model.parameters()), 'device': name(a.device), 'dtype':
        a.dtype, 'rows': a.rows, 'tokens_each': int(layout.lengths.max()), 'acting_tokens_per_second':
        sampled / acting.seconds, 'acting_bytes': acting.bytes, 'reading_tokens_per_second': tokens / reading.seconds,
        'learning_tokens_per_second': tokens / learning.seconds, 'learning_bytes': learning.bytes, 'estimated_bytes':
        needs['rank'], 'logp_gap': gap, **scored
    }


def tree_against_rows(shape, device, prompt, response, layers=None):
    """How far a tree (by flex attention on a GPU) is from rows of their own, in float32: the largest difference of a
    log-probability, in nats, the norm of the difference of the gradients over the norm of these, and seconds and peak
    bytes of both, forward and backward, the second time that it is done. `layers`: of the shape, None for all."""
    model = random_model(shape, device, 'float32', layers).train()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 500, (5, prompt + response), generator=generator)
    ids[:4, :prompt] = ids[0, :prompt]                                           # the fifth shares nothing
    ids[3, :prompt + response // 2] = ids[2, :prompt + response // 2]
    lengths = torch.tensor([prompt + response, prompt + response - 7, prompt + response, prompt + response, prompt])
    tree = plant(ids, node_numbers(ids, lengths)).to(device)
    trained = ((torch.arange(ids.shape[1]) < lengths[:, None]) & (torch.arange(ids.shape[1]) >= prompt // 2)).to(device)
    ids, found, out = ids.to(device), [], {'tokens': int(lengths.sum()), 'nodes': tree.work[0]}
    parameters = [p for n, p in model.named_parameters() if 'layers' in n]
    for name, how in (('rows', None), ('tree', tree)):
        for again in range(2):                                                   # the first one compiles
            with Clock(device) as clock:
                logp = token_logps(model, ids, trained, hidden=hidden_states(model, ids, how), place=how and how.place)
                gradients = torch.autograd.grad(logp.sum() / trained.sum(), parameters)
        out |= {f'{name}_seconds': clock.seconds, f'{name}_bytes': clock.bytes}
        found.append((logp.detach(), gradients))
    (rows, own), (columns, other) = found
    norm = lambda tensors: sum(float(t.double().norm()) ** 2 for t in tensors) ** .5
    apart = norm(a - b for a, b in zip(own, other)) / norm(own)
    return {'nats_apart': float((rows - columns).abs().max()), 'gradients_apart': apart, **out}


def sizes(shape):
    layers, hidden, intermediate, heads, kv, vocabulary, tied = SHAPES[shape]
    width = hidden // heads
    parameters = layers * (hidden * (3 * intermediate + 2 * hidden + 2 * kv * width) + hidden + 2 * kv * width +
                           2 * hidden) + hidden + (1 if tied else 2) * vocabulary * hidden
    return Sizes(parameters, layers, hidden, intermediate, hidden, kv * width, vocabulary)


def plan(a):
    return TrainingPlan(width=4 if a.dtype == 'float32' else 2, row_tokens=a.row_tokens, checkpointing=a.checkpointing,
                acting=a.rows * a.tokens)


def name(device): return torch.cuda.get_device_name() if device == 'cuda' else 'a CPU'


def line(m):
    "A line of an entry in runs/log."
    gb = lambda x: 'not measured' if x is None else f'{x / 1e9:.1f} GB'
    return (f"- {m['shape']}, {m['dtype']}, {m['rows']} trajectories of {m['tokens_each']} tokens on {m['device']}: "
            f"acting {m['acting_tokens_per_second']:,.0f} sampled tokens/s "
            f"({gb(m['acting_bytes'])}), reading {m['reading_tokens_per_second']:,.0f} tokens/s, learning "
            f"{m['learning_tokens_per_second']:,.0f} tokens/s ({gb(m['learning_bytes'])}; "
            f"{gb(m['estimated_bytes'])} estimated); packed scoring {m['separate_over_packed']:.1f} times as fast as "
            f"separate; engine and learner {m['logp_gap']:.2g} nats apart.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('shapes', nargs='*', default=[s for s in SHAPES if s != 'toy'])
    for option, kind, value in (('device', str, 'cuda'), ('rows', int, 16), ('tokens', int, 2048),
                                ('row-tokens', int, 8192), ('dtype', str, 'bfloat16')):
        parser.add_argument(f'--{option}', type=kind, default=value)
    parser.add_argument('--no-checkpointing', dest='checkpointing', action='store_false')
    a = parser.parse_args()
    if a.device == 'cuda' and not torch.cuda.is_available():
        sys.exit('this machine has no GPU that PyTorch can use (torch.cuda.is_available() is False)')
    if unknown := [s for s in a.shapes if s not in SHAPES]:
        sys.exit(f'shapes are {", ".join(SHAPES)}, got {", ".join(unknown)}')
    lines = []
    for shape in a.shapes:
        needs, there = memory(
            sizes(shape),
            plan(a))['rank'], torch.cuda.get_device_properties(0).total_memory if a.device == 'cuda' else float('inf')
        if needs > there:
            print(f'LEFT OUT {shape}: it needs {needs / 1e9:.1f} GB, the device has {there / 1e9:.1f} GB', flush=True)
            continue
        measured = measure(shape, a)
        print('MEASURED',
              json.dumps({k: float(f'{v:.4g}') if isinstance(v, float) else v for k, v in measured.items()}),
              flush=True)
        lines.append(line(measured))
        if a.device == 'cuda': torch.cuda.empty_cache()
    if not lines: sys.exit('no shape fits this device: nothing was measured')
    print('\nFor runs/log:\n', *lines, sep='\n')


if __name__ == '__main__':
    main()
