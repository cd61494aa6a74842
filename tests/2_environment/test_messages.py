"""A corpus of messages and programs as instruct models write them, by kind, each with its reading, through every
protocol: `tests/fixtures/messages.tsv`, of our own writing, and the programs of test_protocol_programs.py. In a message {C:a}
is a call for "a" as the protocol writes it, {T:…} a thought, {A:…} an answer, {F:…} a tool's answer, {c} {/c} and the like
their tags alone, {q:a} the inside of a call. A reading is "call QUERIES", "program CODE", "answer TEXT", "keeps NOTE, what
is wrong", or "error" with words of which its message has one.

    python tests/2_environment/test_messages.py         prints the table of kinds"""
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from credit_rl.dumps import _calls_of
from credit_rl.outcome import extract_answer
from credit_rl.prompting import BASELINES
from credit_rl.protocol import PROTOCOLS, Chat, byte_tokenizer, get_protocol, parse, read_context

ROOT = Path(__file__).resolve().parents[2]
ESCAPES = {r'\n': '\n', r'\r': '\r', r'\t': '\t', '\\\\': '\\'}
TOKENIZER = byte_tokenizer()


def read_corpus():
    "The rows of the corpus: dict by column."
    head, *rows = (ROOT / 'tests' / 'fixtures' / 'messages.tsv').read_text().split('\n')[:-1]
    unescape = lambda text: re.sub(r'\\[nrt\\]', lambda m: ESCAPES[m[0]], text)
    return [dict(zip(head.split('\t'), map(unescape, row.split('\t')), strict=True)) for row in rows]


CORPUS = read_corpus()
OWN = {**PROTOCOLS, 'short': get_protocol(str(ROOT / 'runs/params/protocols/short.yaml')),
       'search-o1': BASELINES['search-o1'].protocol}
TAGGED = [n for n, p in OWN.items() if p.call_style in ('json', 'query', 'text') and p.answer_tag]
FOR = {'tags': TAGGED, 'json': [n for n in TAGGED if OWN[n].call_style == 'json'],
       'code': [n for n, p in OWN.items() if p.call_style == 'code'],
       'python': [n for n, p in OWN.items() if p.call_style == 'python'],
       'note': [n for n, p in OWN.items() if p.context_tag],
       'direct': [n for n, p in OWN.items() if p.call_style == 'none' and not p.answer_tag]}


def written(protocol, text):
    "A message of the corpus as a protocol writes it."
    p, tool = protocol, protocol.tool_names[0]
    seen, think = p.response_tag or 'tool_response', p.think_tag or 'think'
    call = lambda query: json.dumps({'name': tool, 'arguments': {'query': query}}) if p.call_style == 'json' else query
    tags = {'c': p.call_tag, 'a': p.answer_tag, 't': think, 'f': seen}
    made = {'C': lambda x: f'<{p.call_tag}>{call(x)}</{p.call_tag}>', 'T': lambda x: f'<{think}>{x}</{think}>', 'q': call,
            'A': lambda x: f'<{p.answer_tag}>{x}</{p.answer_tag}>', 'F': lambda x: f'<{seen}>{x}</{seen}>'}
    text = text.replace('{tool}', tool)
    text = re.sub(r'\{(/?)([catf])\}', lambda m: f'<{m[1]}{tags[m[2]]}>', text)
    hide = lambda made: made.replace('{', '\1').replace('}', '\2')              # its braces are no placeholder's
    inner = re.compile(r'\{([CTqAF]):([^{}]*)\}')
    while inner.search(text): text = inner.sub(lambda m: hide(made[m[1]](m[2])), text)
    return text.replace('\1', '{').replace('\2', '}')


def said(protocol, action):
    "An `Action` as the corpus writes readings."
    if action.error: return f'error {action.error}'
    if action.answer is not None: return f'answer {action.answer}'
    return f'program {action.call["code"].strip()}' if 'code' in action.call else f'call {" | ".join(action.call["queries"])}'


def agrees(wanted, got):
    if not wanted.startswith('error '): return wanted == got
    return got.startswith('error ') and any(word.lower() in got.lower() for word in wanted[6:].split(','))


def readings(row, name):
    "(wanted, read, text) of a row under a protocol: where the model ends its message itself, and where a tag ends it."
    protocol, own = OWN[name], row['ended by the model']
    text, tag = written(protocol, row['message']), own if row['ended by a tag'] == '=' else row['ended by a tag']
    if row['for'] == 'note':
        kept, wrong = read_context(protocol, text)
        yield own, f'keeps {kept}' + (f', {wrong[wrong.index("not closed"):] if "not closed" in wrong else "no <context>"}'
                                      if wrong else ''), text
        return
    yield tag, said(protocol, Chat(protocol, TOKENIZER).parse(text)), text
    if protocol.response_role: yield own, said(protocol, Chat(replace(protocol, call_stop='message'), TOKENIZER).parse(text)), text
    elif protocol.runs_code: yield own, said(protocol, parse(protocol, text)), text


@pytest.mark.parametrize('name', sorted({n for names in FOR.values() for n in names}))
def test_each_message_is_read_as_the_corpus_says(name):
    "Whoever ends the message; the readers of outcomes and of others' rollouts agree."
    read = 0
    for row in CORPUS:
        if name not in FOR[row['for']]: continue
        for wanted, got, text in readings(row, name):
            assert agrees(wanted, got), (row['kind'], text, got)
            read += 1
            if got.startswith('answer '):
                form = 'answer' if OWN[name].answer_tag else 'boxed'
                upto = text[:text.index('</answer>') + 9] if form == 'answer' else text
                assert extract_answer(upto, form) == got[7:], text
            if got.startswith('call '):
                calls, broken = _calls_of(OWN[name], text, None)
                if not broken and wanted == row['ended by the model']:
                    assert ' | '.join(q for c in calls for q in c['queries']) == got[5:], text
    assert read


def test_every_protocol_is_read_and_the_corpus_is_as_large_as_it_says():
    assert set(OWN) == {n for names in FOR.values() for n in names}
    assert len(CORPUS) >= 230 and {row['is'] for row in CORPUS} == {'right', 'wrong', 'ambiguous'}
    assert len({(row['for'], row['message']) for row in CORPUS}) >= len(CORPUS) - 2


if __name__ == '__main__':
    kinds = Counter((r['for'], r['kind'], r['is'], r['ended by the model'], r['ended by a tag']) for r in CORPUS)
    print('| for | kind | is | read, the model ends its message | read, a tag ends it | messages |\n|---|---|---|---|---|---|')
    for kind, n in kinds.items(): print('| ' + ' | '.join(x.replace(' | ', ', ') for x in kind) + f' | {n} |')
