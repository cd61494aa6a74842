"""What instruct models write under CARL: fifty programs for tasks of GSM8K and FinQA, fences of all kinds, searches that
are read as a text or as passages, answers and programs in the place of notes."""
import contextlib
import io
import random
import re

import numpy as np
import pytest

from credit_rl.engine import ScriptedEngine
from credit_rl.environment import Conversation, make_environment
from credit_rl.protocol import CARL_PROMPTS, PROTOCOLS, Chat, byte_tokenizer, without_search
from credit_rl.readers import Passage
from credit_rl.retrieval import BM25
from credit_rl.rollout import Environment, rollout
from credit_rl.step_metrics import note_shares
from credit_rl.tools import PythonTool, SearchTool
from credit_rl.trajectory import Question, Result, Stop
from credit_rl.warmup import with_prompt

TOKENIZER = byte_tokenizer()
PAGES = [Passage('0', 'Casablanca', 'Casablanca is a film directed by Michael Curtiz.'),
         Passage('1', 'Michael Curtiz', 'Michael Curtiz was a director born in Budapest.')]
SEARCH = SearchTool(BM25(PAGES), 2, None)
NOT_THERE = {'gsm8k equation, sympy': 'sympy', 'finqa cabinets, pandas': 'pandas', 'finqa surplus, numpy': 'round'}


@pytest.fixture(scope='module')
def programs(root):
    parts = re.split(r'(?m)^# (.*)\n', (root / 'tests' / 'fixtures' / 'programs.txt').read_text())[1:]
    return dict(zip(parts[::2], parts[1::2]))


@pytest.fixture(scope='module')
def python(): return PythonTool(SEARCH, seconds=5)


def test_fifty_programs_print_what_cpython_prints(programs, python):
    "But for three: two want modules that are not there, one a method of numpy's numbers; they are told which."
    assert len(programs) == 50
    for (name, code), (said, result) in zip(programs.items(), python.call(list(programs.values()))):
        if name in NOT_THERE:
            assert result is Result.ERROR and NOT_THERE[name] in said
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed: exec(code, {'__name__': '__main__'})
        assert said == printed.getvalue().rstrip('\n'), name


REAL = '\n'.join((
    'print(round(2.675, 2), round(0.5), round(-2.675, 2), round(1234, -2), round(2.5), round(7, 1), round(1.005, 2))',
    'import math, statistics as s',
    'print(s.median([3, 1, 2, 10]), s.mode("aab"), s.pstdev([2, 4]), s.variance([1, 2, 3, 4]))',
    'print(math.pi, s.fmean([1, 2]), s.multimode([1, 1, 2, 2]))', 'from fractions import Fraction as F',
    'print(F(3, -6), F("0.25") * 3, 2 - F(1, 3), F(1, 3) ** 2, float(F(1, 8)))',
    'print(F(0.5), repr(F(4, 6)), sum([F(1, 6)] * 3), -F(1))', 'import numpy as np\na = np.array([1, 2, 3])',
    'print(a, a / 2, 1 / a, a ** 2, a.sum(), a.mean(), a[1:], len(a), 2 in a)', 'm = np.array([[1, 2], [3, 4.5]])',
    'print(m, m.sum(axis=0), m.mean(axis=1), m[0, 1], m[:, 0], m.shape)', 'import numpy',
    'print(numpy.percentile([1, 2, 3, 10], 25), numpy.std([1, 2, 3], ddof=1), numpy.round([2.345, 1], 1))',
    'print(np.cumsum([1, 2, 3]), np.diff([1, 4, 9]), np.arange(0, 6, 2), np.dot([1, 2], [3, 4]), np.sqrt(16))'))


def test_modules_of_the_sandbox_agree_with_the_real_ones(python):
    with contextlib.redirect_stdout(io.StringIO()) as printed: exec(REAL, {})
    assert python.run(REAL) == printed.getvalue().rstrip('\n')


def test_arrays_are_printed_as_numpy_prints_them_and_not_compared_wrongly(python):
    draw, values = random.Random(0), (0., 1., -2.5, 3e-7, 1e-9, 123456.789, 2e9, 2000.5, 1 / 3)
    rows = [[draw.choice([*values, draw.random() * 10 ** draw.randint(-6, 9)]) for _ in range(draw.randint(1, 4))]
            for _ in range(60)]
    rows += [[row, [-2 * x for x in row]] for row in rows[:20]]
    said = python.call([f'import numpy as np\nprint(np.array({row!r}))' for row in rows])
    assert [text for text, _ in said] == [str(np.array(row)) for row in rows]
    for code in ('print(a == 3)', 'print(np.mean(a != 3))', 'print(a[a == 3])'):
        text, result = python.call([f'import numpy as np\na = np.array([1, 3, 3])\n{code}'])[0]
        assert result is Result.ERROR and 'elements' in text


def test_the_sandboxs_modules_stay_within_its_limits():
    brisk = PythonTool(seconds=.5, memory_mb=16)
    for code in ('import numpy as np\nwhile True: np.sum([1])', 'import numpy as np\nnp.zeros(10 ** 9)',
                 'import statistics\nstatistics.mean([10 ** 10 ** 8])'):
        said, result = brisk.call([code])[0]
        assert result in (Result.ERROR, Result.TIMEOUT) and said.startswith('Error: ')
    for code in ('import numpy.linalg', 'from numpy import *', 'import os, numpy\nprint(os.listdir("/"))'):
        assert brisk.call([code])[0][1] is Result.ERROR


SEARCHES = {
    'print(search("Casablanca film"))': str(SEARCH.run(['Casablanca film'])),
    'for p in search("Casablanca film"): print(p.title)': 'Casablanca',
    'for p in search("Michael Curtiz"): print(p["title"], "-", p["text"][:7])': 'Michael Curtiz - Michael\n'
                                                                                'Casablanca - Casabla',
    'r = search("Michael Curtiz")\nprint(len(r), len(search("Michael Curtiz", k=1)))': '2 1',
    'print(search(query="Casablanca film")[0].text)': PAGES[0].text,
    'for p in search("Michael Curtiz")[:1]: print(p.title)': 'Michael Curtiz',
    'print(search("Casablanca film")[:16])': 'Doc 1 (Title: "C',
    'r = search("Casablanca film")\nprint("Curtiz" in r, r.lower().count("film"), r.split()[0], "> " + r == "> " + str(r))':
        'True 1 Doc True',
    'print([p.title for p in search("Michael Curtiz")], f"{search(chr(67) + chr(97))}"[:2])':
        "['Michael Curtiz', 'Casablanca'] No",
    'import re\nprint(re.findall(r"born in (\\w+)", str(search("Michael Curtiz"))))': "['Budapest']",
    'print("\\n".join(str(p) for p in search("Michael Curtiz", 1)))': 'Michael Curtiz: ' + PAGES[1].text}


def test_a_search_is_a_text_and_its_passages(python):
    assert dict(zip(SEARCHES, python.call([*SEARCHES]))) == {code: (said, Result.OK) for code, said in SEARCHES.items()}
    for got, result in python.call(['search("a", k="two")', 'search("a", k=0)', 'search()', 'search("")']):
        assert result is Result.ERROR and got.startswith('Error: ')


def test_searches_of_programs_with_one_k_are_one_search():
    asked = []
    class Counting:
        def search(self, queries, k):
            asked.append((len(queries), k))
            return BM25(PAGES).search(queries, k)
    PythonTool(SearchTool(Counting(), 2, None)).call(['search("film")', 'search("director")', 'search("film", k=1)'])
    assert sorted(asked) == [(1, 1), (2, 2)]


CODE = PROTOCOLS['carl']


def play(says, **rules):
    said, tool = iter(says), rules.pop('tool', PythonTool(SEARCH))
    engine = ScriptedEngine(lambda text, rng: next(said), TOKENIZER, max_length=10 ** 6)
    env = Environment(Chat(CODE, TOKENIZER), tool, max_tokens=10 ** 6, **rules)
    return rollout(engine, env, [Question('q', 'Six times seven?', ['42'])])[0].trajectories[0]


def test_a_message_goes_on_behind_a_fence_that_ends_no_program():
    "Ids, log-probabilities and text of all its parts are one segment; a bare program stops at its own end."
    t = play(['```latex\n6 \\cdot 7\n```\n', 'and\n```\nprint(6 * 7)\n```\n', '<context>42</context>', r'\boxed{42}'])
    assert [x.kind for x in t.turns] == ['invoke', 'assimilate', 'commit'] and t.answer == '42'
    assert t.turns[0].action_text == '```latex\n6 \\cdot 7\n```\nand\n```\nprint(6 * 7)\n```\n'
    assert len(t.turns[0].action_ids) == len(t.turns[0].action_logps) == len(TOKENIZER(t.turns[0].action_text).input_ids)
    t = play(['```\n', 'print(6 * 7)\n```\n', '<context>42</context>', r'\boxed{42}'])
    assert t.turns[0].observation_text == '42' and t.turns[0].call['code'] == 'print(6 * 7)\n'
    chat = Chat(CODE, TOKENIZER)
    t = play(['It is:\n```\n\\boxed{42}\n```\n' + TOKENIZER.decode([chat.end_id]), r'\boxed{2}'])
    assert t.answer == '42' and len(t.turns) == 1                              # its end-of-turn token ends it


def test_a_message_in_a_notes_place_goes_on_behind_a_fence_too():
    t = play([PROGRAM, 'It printed:\n```\n', '42\n```\n\\boxed{42}', r'\boxed{0}'], notes='read')
    assert ([x.kind for x in t.turns], t.answer) == (['invoke', 'commit'], '42')
    t = play([PROGRAM, '<context>\n```\n', '42\n```\n</context>', r'\boxed{42}'], notes='read')
    assert [x.kind for x in t.turns] == ['invoke', 'assimilate', 'commit'] and t.turns[1].result is Result.NONE


PROGRAM = '```python\nprint(6 * 7)\n```\n'


def test_what_stands_in_a_notes_place_is_lost_or_read():
    answered = [PROGRAM, r'It is \boxed{42}.', r'\boxed{0}']
    lost, read = play(answered), play(answered, notes='read')
    assert ([x.kind for x in lost.turns], lost.answer) == (['invoke', 'assimilate', 'commit'], '0')
    assert ([x.kind for x in read.turns], read.answer, read.stop) == (['invoke', 'commit'], '42', Stop.ANSWER)
    t = play([PROGRAM, PROGRAM, '<context>42</context>', r'\boxed{42}'], notes='read')
    assert [x.kind for x in t.turns] == ['invoke', 'invoke', 'assimilate', 'commit']
    assert t.turns[1].observation_text == '42'
    last = TOKENIZER.decode(t.turns[-1].context_ids)
    after = last[last.index('print(6'):]
    assert after.count('print(6 * 7)') == 2 and '<context></context>' in after and '<context>42</context>' in after
    assert not re.search(r'(?m)^42$', after)                                    # no output is left
    for text in ('I am not sure.', '```python\nprint(', '<context>so \\boxed{1}</context>'):     # as ever
        same = [play([PROGRAM, text, r'\boxed{42}'], notes=rule) for rule in ('asked', 'read')]
        assert same[0] == same[1] and same[0].turns[1].kind == 'assimilate'


def test_shares_of_notes_are_counted_alike():
    from credit_rl.trajectory import Group
    question = Question('q', 'Six times seven?', ['42'])
    for rule in ('asked', 'read'):
        played = [play([PROGRAM, text, r'\boxed{42}', r'\boxed{42}', r'\boxed{42}'], notes=rule) for text in
                  ('<context>42</context>', r'\boxed{42}', PROGRAM, 'hm')]
        shares = note_shares([Group(question, played)])
        outputs = 4 + (rule == 'read')                              # the second program's output is read as well
        assert shares['notes_missing'] == (3 + (rule == 'read')) / outputs and shares['notes_program'] == 1 / outputs


def test_notes_are_read_only_where_they_are_asked_for():
    with pytest.raises(ValueError, match='notes'): Environment(Chat(PROTOCOLS['tips'], TOKENIZER), SEARCH, notes='read')
    with pytest.raises(ValueError, match='notes'): play(['x'], notes='never')


def test_a_set_without_passages_is_not_told_of_a_search():
    how = Conversation('carl', program={'seconds': 1, 'memory_mb': 8, 'searches': 2}, max_tokens=10 ** 6)
    found, none = (make_environment(TOKENIZER, search, how) for search in (SEARCH.retriever, None))
    assert 'search(query)' in found.chat.protocol.system and 'search' not in none.chat.protocol.system
    assert (none.tool.seconds, none.tool.memory_mb, none.tool.searches) == (1, 8, 2) == (
        found.tool.seconds, found.tool.memory_mb, found.tool.searches)
    for mode in ('forced', 'multi-hop', 'optional'):
        assert 'search' in with_prompt(found, mode).chat.protocol.system
        own = with_prompt(none, mode).chat.protocol.system
        assert 'search' not in own and 'python' in own
    assert without_search(PROTOCOLS['carl-tiny']) == PROTOCOLS['carl-tiny'] and 'search' not in CARL_PROMPTS['direct']
    with pytest.raises(ValueError, match='second'): Conversation('carl', program={'second': 1})
