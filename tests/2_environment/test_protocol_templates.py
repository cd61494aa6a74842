"""Ten chat templates of the shapes that today's models bring, in our own words, over tokenizers trained on the spot and
SmolLM2's where it is at hand, through every protocol: what is trained on are the ids that were sampled, and what the
model reads next is those ids, or what the template makes of the conversation where it rewrites one."""
import json
import math
import os
from pathlib import Path

import pytest
from templates import TEXTS

from credit_rl.engine import FinishedTurn, ScriptedEngine
from credit_rl.layout import pack
from credit_rl.protocol import byte_tokenizer, Chat, PROTOCOLS
from credit_rl.readers import Passage
from credit_rl.rollout import Environment, rollout
from credit_rl.step_metrics import reencoding_drift
from credit_rl.tools import PythonTool, SearchTool
from credit_rl.trajectory import Question, Stop

START, END = "{{ '<|im_start|>' ~ m.role ~ '\\n' }}", "{{ '<|im_end|>\\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
TURNS = ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation "
         "roles must alternate user/assistant/user/assistant/...') }}{% endif %}")
BARE = "{% set shown = m.content.split('</think>')[-1].lstrip('\\n') %}"   # without the thought
SHAPES = {
    # ChatML; what an assistant thought is dropped once a message stands behind it
    'thoughts dropped': "{% for m in messages %}" + BARE + START + "{{ m.content if m.role != 'assistant' or loop.last "
                        "else shown }}" + END + "{% endfor %}" + ASK,
    # the prefix opens the thought, and earlier thoughts are dropped
    'prefix thinks': "{% for m in messages %}" + BARE + START + "{{ shown if m.role == 'assistant' else m.content }}" +
                     END + "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}"
                     "{% endif %}",
    # Gemma's: no system message, user and model take turns, blanks around a message go
    'no system, turns alternate': NO_SYSTEM + TURNS + "{{ '<start_of_turn>' ~ ('model' if m.role == 'assistant' else "
        "m.role) ~ '\\n' ~ m.content | trim ~ '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<start_of_turn>model\\n' }}{% endif %}",
    # Mistral's: brackets, an eos behind an answer, nothing that opens one
    'brackets': NO_SYSTEM + TURNS + "{{ '[INST] ' ~ m.content ~ ' [/INST]' if m.role == 'user' else ' ' ~ m.content ~ "
                "'<|im_end|>' }}{% endfor %}",
    # a system message goes into the first user message
    'system in the first question': "{% set front = messages[0].content ~ '\\n\\n' if messages[0].role == 'system' "
        "else '' %}{% for m in messages if m.role != 'system' %}" + START + "{{ front if loop.first else '' }}"
        "{{ m.content }}" + END + "{% endfor %}" + ASK,
    # a role of its own for what tools say
    'tool role': "{% for m in messages %}" + START + "{{ m.content }}" + END + "{% endfor %}" + ASK,
    # Llama's: headers, tools speak as ipython, blanks around a message go
    'headers': "{{ '<|begin|>' }}{% for m in messages %}{{ '<|head|>' ~ ('ipython' if m.role == 'tool' else m.role) ~ "
               "'<|head|>\\n\\n' ~ m.content | trim ~ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}"
               "{{ '<|head|>assistant<|head|>\\n\\n' }}{% endif %}",
    # Qwen2.5's and SmolLM2's: words of their own where there is no system message
    'own system message': "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant."
        "<|im_end|>\\n' }}{% endif %}{% for m in messages %}" + START + "{{ m.content }}" + END + "{% endfor %}" + ASK,
    # empty thinking is written where it is switched off
    'empty thought': "{% for m in messages %}" + START + "{{ m.content }}" + END + "{% endfor %}{% if "
        "add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{% endif %}",
    # responses of tools that follow each other share a user message, marked by tags, as in Qwen's
    'tools speak as the user': "{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ '<|im_start|>user\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response><|im_end|>\\n' }}{% else %}" +
        START + "{{ m.content }}" + END + "{% endif %}{% endfor %}" + ASK}
SMOL = Path(os.environ.get('SMOLLM2', Path(__file__).parents[2] / 'models/smollm2'))


def smollm2():
    "SmolLM2's tokenizer: of a folder, or of the GGUF file in it."
    from transformers import AutoTokenizer
    if not SMOL.is_dir(): pytest.skip('models/smollm2 is not there: credit-rl fetch smollm2')
    files = [p.name for p in SMOL.glob('*.gguf')]
    return AutoTokenizer.from_pretrained(SMOL, **({'gguf_file': files[0]} if files else {}))


def trained(): return byte_tokenizer(special=('<|im_start|>', '<|begin|>', '<|head|>'), texts=TEXTS, merges=400)
def bytes_alone(): return byte_tokenizer(special=('<|im_start|>',))     # the other marks are texts like any


@pytest.fixture(scope='module')
def tokenizers(): return {}


def tokenizer_of(kind, tokenizers):
    if kind not in tokenizers: tokenizers[kind] = {'trained': trained, 'bytes': bytes_alone, 'smollm2': smollm2}[kind]()
    return tokenizers[kind]


THOUGHT = '<think>\nWho was it?\n</think>\n\n'


def call_of(p):
    "A call as a protocol writes it, after a thought."
    if p.call_style == 'code': return THOUGHT + 'I look.\n```python\nprint(search("Budapest"))\n```\n'
    inside = {'json': json.dumps({'name': p.tool_names[0], 'arguments': {'query': ['Budapest']}}),
              'python': 'print(search("Budapest"))'}.get(p.call_style, 'Budapest')
    return f'{THOUGHT}<{p.call_tag}>{inside}</{p.call_tag}>'


def answer_of(p): return THOUGHT + (f'<{p.answer_tag}>Paris</{p.answer_tag}>' if p.answer_tag else r'\boxed{Paris}')


class Pieces(ScriptedEngine):
    "Samples every letter as a token of its own, and keeps (ids read, ids written)."
    def __init__(self, protocol, tokenizer): super().__init__(None, tokenizer); self.p, self.seen = protocol, []
    def stream(self, sampling): return self

    def __iter__(self):
        while self.waiting:
            (key, ids, _), self.waiting = self.waiting[0], self.waiting[1:]
            turn, p = len(self.seen), self.p
            calls = 2 if p.call_style != 'none' else 0
            if p.context_tag and calls: texts = [call_of(p), f'<{p.context_tag}>Of Hungary.</{p.context_tag}>'] * 2
            else: texts = [call_of(p)] * calls
            text = [*texts, answer_of(p)][turn]
            own = [i for letter in text for i in self.tokenizer(letter, add_special_tokens=False).input_ids]
            self.seen.append((list(ids), own))
            yield [FinishedTurn(key, own, [math.nan] * len(own), 'stop')]


class Pages:
    def search(self, queries, k): return [[Passage('1', 'Budapest', 'It is the capital of Hungary.')]] * len(queries)


def play(chat):
    tool = SearchTool(Pages(), 1, None)
    if chat.protocol.runs_code: tool = PythonTool(search=tool)
    if chat.protocol.call_style == 'none': tool = None
    engine = Pieces(chat.protocol, chat.tokenizer)
    (group,) = rollout(engine, Environment(chat, tool, 8, 4000), [Question('q', 'Which city is it?', ['Paris'])])
    return group, engine.seen


# Each shape meets tokens with merges under every way of calling; the other protocols and tokenizers meet the shapes that
# rewrite, that take turns and that show tools.
CASES = [(shape, 'trained', p) for shape in SHAPES for p in ('tips', 'search-r1', 'carl')]
CASES += [(shape, 'trained', p) for shape in ('thoughts dropped', 'no system, turns alternate') for p in PROTOCOLS
          if p not in ('tips', 'search-r1', 'carl')]
CASES += [(shape, kind, p) for shape in ('prefix thinks', 'brackets', 'tools speak as the user')
          for kind in ('bytes', 'smollm2') for p in ('tspo', 'carl')]


@pytest.mark.parametrize('shape, kind, protocol', CASES)
def test_the_ids_that_were_sampled_are_the_ids_that_are_trained(shape, kind, protocol, tokenizers):
    chat = Chat(PROTOCOLS[protocol], tokenizer_of(kind, tokenizers), SHAPES[shape])
    group, seen = play(chat)
    (t,) = group.trajectories
    assert t.stop is Stop.ANSWER and t.answer == 'Paris' and len(t.turns) == len(seen) > 0
    reading = list(t.prompt_ids)
    for k, (turn, (read, wrote)) in enumerate(zip(t.turns, seen)):
        assert list(turn.action_ids) == wrote
        if turn.context_ids is not None: reading = list(turn.context_ids)
        assert read == reading, f'turn {k} read other ids than were kept'
        if turn.context_ids is not None and chat.history == 'template':
            assert read == chat.encode(chat.markup.render(chat.messages(t.question.text, t.turns[:k])))
        reading = [*read, *turn.action_ids, *turn.observation_ids]
    layout = pack([group])
    assert layout.ids[layout.trained].tolist() == [i for _, wrote in seen for i in wrote]
    if kind != 'bytes': assert reencoding_drift(chat, t) > 0          # an encoder would not have kept them


@pytest.mark.parametrize('shape', SHAPES)
def test_a_shapes_prompt_is_its_own_text_and_what_it_does_to_earlier_turns_is_noticed(shape, tokenizers):
    for protocol in PROTOCOLS.values():
        chat = Chat(protocol, tokenizer_of('trained', tokenizers), SHAPES[shape])
        text = chat.markup.render(chat.messages('Which city is it?'))
        assert chat.tokenizer.decode(chat.prompt_ids('Which city is it?')) == text
        assert text.count('Which city is it?') == 1 and bool(chat.rewrites) == (chat.history == 'template')
    chat = Chat(PROTOCOLS['tips'], tokenizer_of('trained', tokenizers), SHAPES[shape])
    assert (shape in ('thoughts dropped', 'prefix thinks')) <= bool(chat.rewrites)
