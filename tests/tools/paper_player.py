"""A player of the papers' protocols, and small files of the sets that they train on, so that a paper's settings can be
run as they are with a small random model; not a test file."""
import json
import re
from pathlib import Path

from credit_rl.benchmarks import get_benchmark
from credit_rl.datasets import load_corpus, load_questions
from credit_rl.engine import ScriptedEngine
from credit_rl.protocol import PROTOCOLS, byte_tokenizer
from random_models import save_small

SAMPLE = Path(__file__).resolve().parents[2] / 'data' / 'hotpotqa_sample.json'
SETS = ('nq', 'triviaqa', 'hotpotqa', '2wikimultihopqa', 'gsm8k')


def write_sets(folder, times=4):
    """Write train and dev questions of each set, our own ones asked several times in other words, and corpus.jsonl.
    Returns question → gold."""
    gold, asked = {}, [(q.text, q.answers[0]) for q in load_questions('hotpotqa', SAMPLE)]
    sums = [('How many trips are 3 a day for 5 days?', '15'), ('How cold is it, 11 degrees below 4?', '-7')]
    for name in SETS:
        (folder / name).mkdir()
        for split in ('train', get_benchmark(name).eval_split):
            rows = [{'id': f'{split}-{i}-{j}', 'question': f'({name}, {split} {i}) {q}', 'golden_answers': [a]}
                    for i in range(times) for j, (q, a) in enumerate(sums if name == 'gsm8k' else asked)]
            gold |= {row['question']: row['golden_answers'][0] for row in rows}
            (folder / name / f'{split}.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    pages = [{'title': p.title, 'text': p.text} for p in load_corpus('hotpotqa', SAMPLE)]
    (folder / 'corpus.jsonl').write_text('\n'.join(map(json.dumps, pages)))
    return gold


def write_model(folder, texts):
    "A small random model, and a tokenizer in whose tokens the protocols' prompts are short."
    prompts = [text for p in PROTOCOLS.values() for text in (p.user, p.system or '', json.dumps(p.tools))]
    tokenizer = byte_tokenizer(texts=[*prompts, *texts] * 2, merges=1500)
    save_small(folder, tokenizer, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
               max_position_embeddings=32768)
    return tokenizer


def thought(protocol, text): return f'<{protocol.think_tag}> {text} </{protocol.think_tag}>'


def call_of(protocol, query):
    "A message that searches."
    if protocol.call_style == 'code': return f'I look it up.\n```python\nprint(search({query!r}))\n```\n'
    call = query
    if protocol.call_style == 'json':
        (name,), (argument, kind) = protocol.tool_names, next(iter(
            protocol.tools[0]['function']['parameters']['properties'].items()))
        call = json.dumps({'name': name, 'arguments': {argument: [query] if kind['type'] == 'array' else query}})
    return f'{thought(protocol, "I look it up.")} <{protocol.call_tag}> {call} </{protocol.call_tag}>'


def answer_of(protocol, answer):
    "A message that answers."
    if protocol.answer_tag is None: return f'So it is \\boxed{{{answer}}}.'
    return f'{thought(protocol, "I know.")} <{protocol.answer_tag}> {answer} </{protocol.answer_tag}>'


class Player(ScriptedEngine):
    """What stands in the place of HFEngine: one who searches once or twice, for what is asked or something else, notes
    what came where the protocol has notes, and then answers. It is always wrong about every third question, the others
    it knows without tools, and yet is right in half of the rollouts, wrong or shapeless in the rest. The learner
    recomputes the log-probabilities."""

    def __init__(self, protocol, gold, tokenizer):
        self.protocol, self.gold, self.end = protocol, gold, tokenizer.eos_token
        self.opening = '```python' if protocol.call_style == 'code' else f'<{protocol.call_tag}>'
        super().__init__(self.play, tokenizer, max_length=32768)

    def play(self, text, rng):
        p, asked = self.protocol, re.search(r'\(\w+, \w+ \d\) ', text)
        (question,) = [q for q in self.gold if text.startswith(q, asked.start())]
        right, said = self.gold[question], text[asked.start() + len(question):]
        known, direct = list(self.gold).index(question) % 3, PROTOCOLS.get(f'{p.name}-direct')
        if direct and direct.system in text: return answer_of(p, right if known else 'Ellsmere') + self.end
        calls = said.count(self.opening)
        if p.context_tag and calls > said.count(f'</{p.context_tag}>'):
            return f'<{p.context_tag}> {right if rng.random() < .7 else "nothing"} </{p.context_tag}>'
        if calls == 0 or calls == 1 and rng.random() < .3:
            return call_of(p, question if rng.random() < .7 else 'a comet')
        chance = rng.random() if known else .8
        return (answer_of(p, right if chance < .5 else 'Ellsmere') if chance < .9 else 'I give up.') + self.end
