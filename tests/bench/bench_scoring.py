"""What share of a step does scoring gold answers take? On one thread, of processor time, so that company does not
matter; what a packed forward costs beside separate ones, bench_peers says.

    python tests/bench/bench_scoring.py [--trajectories 8] [--threads 1] [--repeats 2]

A random Qwen2 of about 15 M parameters, float32, 2 golds of 10 tokens, header included. The engine plays (its cache
kept, observations of random ids appended), old log-probabilities are recomputed, golds scored, and a learner takes two
updates. When the policy is the teacher, one forward serves the old log-probabilities and the golds, and scoring adds
the difference to a forward for the log-probabilities alone; another teacher pays for a forward of its own. The rows end
as the paper's do, with states at 250, 500, …, 1,500 tokens and an answer of 100 after the last.
"""
import argparse
import json
import statistics
import time

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from credit_rl.engine import HFEngine, SamplingParams
from credit_rl.layout import pack
from credit_rl.learner import Learner, Optimiser
from credit_rl.parts import Credit
from credit_rl.protocol import byte_tokenizer
from credit_rl.scoring import AnswerTemplate, acting_states, answer_logps, joint_logps
from credit_rl.trajectory import Group, Question, Stop, Trajectory, Turn

VOCABULARY, HEADER, GOLD = 8192, 3, 7   # a gold and its header are 10 tokens


def random_model():
    "A random Qwen2 of about 15 M parameters."
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1152, num_hidden_layers=7,
                    num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=4096,
                    tie_word_embeddings=True, initializer_range=.05, eos_token_id=None, bos_token_id=None,
                    pad_token_id=None)).eval()


def ids(*shape):
    return torch.randint(300, VOCABULARY, shape)


def golds(number):
    return [AnswerTemplate(ids(HEADER + GOLD).tolist(), HEADER, HEADER + GOLD) for _ in range(number)]


def seconds(function):
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    out = function()
    return clock() - start, out


def play(engine, a):
    """Let the engine play: prompts of 250 ids, five times 100 sampled and 150 appended, an answer of 100. Returns
    groups of two."""
    stream = engine.stream(SamplingParams(max_tokens=100))
    prompts = [ids(250).tolist() for _ in range(a.trajectories // 2) for _ in range(2)]
    so_far, turns = [list(p) for p in prompts], [[] for _ in prompts]
    for i, text in enumerate(so_far):
        stream.submit(i, text, seed=i)
    for batch in stream:
        for f in batch:
            last = len(turns[f.key]) == 5
            observation = [] if last else ids(150).tolist()
            turns[f.key].append(Turn('answer' if last else 'tool', f.ids, f.logps, observation, '', ''))
            so_far[f.key] += [*f.ids, *observation]
            if last:
                stream.release(f.key)
            else:
                stream.submit(f.key, so_far[f.key], seed=len(so_far[f.key]))
    made = []
    for b in range(a.trajectories // 2):
        question = Question(str(b), 'What?', ['gold'])
        made.append(
            Group(question, [Trajectory(question, prompts[i], turns[i], Stop.ANSWER) for i in (2 * b, 2 * b + 1)]))
    return made


def whole_step(model, a):
    "Seconds of every part of a step, and the shares of scoring."
    engine = HFEngine(model, byte_tokenizer(), max_length=4096)
    engine.eos_ids = engine.eos_ids[:0]                                # turns end by length
    learner = Learner(model, optimiser=Optimiser(learning_rate=1e-6, row_tokens=8192))
    parts = []
    for _ in range(a.repeats):
        took = {}
        took['rollout'], groups = seconds(lambda: play(engine, a))
        layout = pack(groups)
        rows, states = (layout.ids, layout.lengths), acting_states(layout.states, layout.turn_mask)
        answers = [golds(2) for _ in range(a.trajectories)]
        budget = 4 * learner.optimiser.row_tokens                       # as the learner's own evaluate
        took['old log-probabilities'], seen = seconds(lambda: learner.evaluate(layout))
        took['together with golds'], (logp, scores) = seconds(lambda: joint_logps(
            model, rows, layout.trained, states, answers, method='packed', budget=budget))
        took['golds alone'], alone = seconds(lambda: answer_logps(model, rows, states, answers, 'packed', budget=budget
                                                                  ))
        assert (logp - seen.logp).abs().max() < 1e-3 and scores.missing == 0 and (
            scores.sums - alone.sums).abs().nan_to_num(0).max() < 1e-3
        credit = Credit(torch.randn(layout.ids.shape[0], 1) * layout.trained)
        took['updates'], _ = seconds(lambda: learner.step(layout, seen, credit))
        parts.append(took)
    took = {name: statistics.median(p[name] for p in parts) for name in parts[0]}
    rest = took['rollout'] + took['old log-probabilities'] + took['updates']
    added = statistics.median(p['together with golds'] - p['old log-probabilities'] for p in parts)
    return {
        'trajectories': a.trajectories, 'tokens_each': int(layout.lengths.max()), 'sampled_each':
        int(layout.trained[0].sum()), 'seconds': {k: round(v, 2) for k, v in took.items()}, 'share_of_scoring': {
            'policy is the teacher': round(added / (rest + added), 3), 'another teacher':
            round(took['golds alone'] / (rest + took['golds alone']), 3)
        }
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (('trajectories', 8), ('threads', 1), ('repeats', 2)):
        parser.add_argument(f'--{name}', type=int, default=value)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    model = random_model()
    torch.manual_seed(1)
    print(json.dumps({'parameters_in_millions': round(model.num_parameters() / 1e6, 1), 'threads': a.threads,
                      'whole_step': whole_step(model, a)}, indent=1))


if __name__ == '__main__':
    main()
