"""How much faster a learner is where shared prefixes are computed once: seconds of processor time of `step` and of
`evaluate` with rows of their own over those with trees, on one thread, beside what counts predict.

    python tests/bench/bench_tree.py [carl grpo continuations] [--repeats 3] [--scale 1.0] [--row-tokens 16384]
        [--check]

A random Qwen2 of some million parameters. Both ways are timed in turns, so that a busy machine slows both; the spread
is that of the ratios of neighbours. `--scale` makes all lengths shorter."""
import argparse
import copy
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))   # a checkout will do
from credit_rl.estimate import Sizes, sharing_gain
from credit_rl.layout import pack, rows_of
from credit_rl.learner import Learner, Optimiser, micro_batches
from credit_rl.parts import Credit
from credit_rl.trajectory import Group, Question, Stop, Trajectory, Turn
from credit_rl.trees import plant

VOCABULARY = 4096
QUESTION = Question('q', 'Who?', ('one',))


def model(width=192, layers=3):
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
                    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
                    max_position_embeddings=8192, eos_token_id=None, bos_token_id=None, pad_token_id=None))


def sizes(model):
    c = model.config
    return Sizes(model.num_parameters(), c.num_hidden_layers, c.hidden_size, c.intermediate_size, c.hidden_size,
                 c.hidden_size // 2, c.vocab_size)


def ids(rng, n): return tuple(rng.randrange(VOCABULARY) for _ in range(n))


def turn(kind, action, seen=(), context=None):
    return Turn(kind, action, [-8.] * len(action), seen, '', '', context_ids=context)


def carl(rng, scale):
    """One trajectory of 15 segments: a prompt of 2,048 tokens; seven times 200 of reasoning and code, 700 of output
    and 256 of notes that stand in its place afterwards; 200 of the answer. The longest row has 5,940 tokens, of 6,144
    that prompt and response may have."""
    prompt, invoke, output, notes, answer = (max(1, int(n * scale)) for n in (2048, 200, 700, 256, 200))
    base, turns = ids(rng, prompt), []
    first = base
    for k in range(7):
        action, seen = ids(rng, invoke), ids(rng, output)
        turns.append(turn('invoke', action, seen, base if k else None))
        written = ids(rng, notes)
        turns.append(turn('assimilate', written, (), (*base, *action, *seen)))
        base = (*base, *action, *written)
    turns.append(turn('commit', ids(rng, answer), (), base))
    return [Group(QUESTION, [Trajectory(QUESTION, first, turns, Stop.ANSWER)])]


def grpo(rng, scale):
    """Sixteen rollouts after a prompt of 512 tokens: three turns of 100 tokens, after two of which a search says 300,
    all lengths half more or less."""
    about = lambda n: max(1, int(n * scale * rng.uniform(.5, 1.5)))
    prompt = ids(rng, int(512 * scale))
    played = [[turn('plain', ids(rng, about(100)), ids(rng, about(300)) if k < 2 else ()) for k in range(3)]
              for _ in range(16)]
    return [Group(QUESTION, [Trajectory(QUESTION, prompt, turns, Stop.ANSWER) for turns in played])]


def continuations(rng, scale):
    "Sixteen rollouts that part only in their last turn of 100 tokens: after a prompt of 512 and two turns of 400."
    n = lambda count: ids(rng, max(1, int(count * scale)))
    prompt, before = n(512), [turn('plain', n(100), n(300)) for _ in range(2)]
    return [Group(QUESTION, [Trajectory(QUESTION, prompt, [*before, turn('plain', n(100))], Stop.ANSWER)
                             for _ in range(16)])]


def predicted(sizes, apart, tree, budget):
    "The gain by counts of what each way's forwards hold: padded rectangles, and the nodes of trees."
    work = torch.zeros(2, 2)
    for layout, k in ((apart, 0), (tree, 1)):
        for part in micro_batches(layout, range(len(layout.groups)), budget)[0]:
            rows = rows_of(layout, part)
            n = int(layout.lengths[rows].max())
            found = plant(layout.ids[rows], layout.nodes[rows]).work if k else (len(rows) * n, len(rows) * n * n / 2)
            work[k] += torch.tensor(found, dtype=torch.float32)
    return sharing_gain(sizes, *(tuple(w.tolist()) for w in work))


def seconds(what):
    since = time.process_time()
    result = what()
    return time.process_time() - since, result


def measure(case, repeats, scale, budget, check):
    groups = {'carl': carl, 'grpo': grpo, 'continuations': continuations}[case](random.Random(0), scale)
    layouts = [pack(groups, tree=tree) for tree in (False, True)]
    base = model()
    learners = [Learner(copy.deepcopy(base), optimiser=Optimiser(minibatches=1, row_tokens=budget)) for _ in layouts]
    advantages = torch.randn(layouts[0].ids.shape, generator=torch.Generator().manual_seed(0)) * layouts[0].trained
    times = {'step': ([], []), 'evaluate': ([], [])}
    for _ in range(repeats):
        losses = []
        for i, (learner, layout) in enumerate(zip(learners, layouts)):
            took, seen = seconds(lambda: learner.evaluate(layout))
            times['evaluate'][i].append(took)
            took, log = seconds(lambda: learner.step(layout, seen, Credit(advantages)))
            times['step'][i].append(took)
            losses.append(log['loss'])
        if check: torch.testing.assert_close(*losses, atol=1e-4, rtol=0)
    out = {'case': case, 'rows': len(layouts[0].lengths), 'tokens of rows': int(layouts[0].lengths.sum()),
           'nodes': plant(layouts[1].ids, layouts[1].nodes).work[0], 'parameters': base.num_parameters(),
           'predicted': round(predicted(sizes(base), *layouts, budget), 2)}
    for name, (apart, tree) in times.items():
        ratios = [a / b for a, b in zip(apart, tree)]
        out[name] = {'ratio': round(statistics.median(ratios), 2), 'from': round(min(ratios), 2),
                     'to': round(max(ratios), 2), 'seconds': [round(statistics.median(x), 2) for x in (apart, tree)]}
    return out


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('cases', nargs='*', default=['carl', 'grpo', 'continuations'])
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--scale', type=float, default=1.)
    parser.add_argument('--row-tokens', type=int, default=16384)
    parser.add_argument('--check', action='store_true', help='compare the losses of both ways')
    a = parser.parse_args()
    torch.set_num_threads(1)
    for case in a.cases: print(json.dumps(measure(case, a.repeats, a.scale, a.row_tokens, a.check)), flush=True)
