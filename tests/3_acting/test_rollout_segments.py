"CARL's rollouts: segments, their contexts and rows, what the engine reads, and everything that can go wrong in them."
import pytest
import torch
from hypothesis import given, settings, strategies as st

from credit_rl.critics import segment_starts
from credit_rl.engine import HFEngine, SamplingParams, ScriptedEngine
from credit_rl.layout import pack
from credit_rl.learner import Learner
from credit_rl.protocol import PROTOCOLS, Chat, byte_tokenizer, parse, read_context, reaches
from credit_rl.readers import Passage
from credit_rl.retrieval import BM25
from credit_rl.rollout import Environment, rollout
from credit_rl.tiny import tiny_tokenizer
from credit_rl.tools import PythonTool, SearchTool
from credit_rl.trajectory import Group, Question, Result, Stop
from credit_rl.world import WORDS as NAMES
from random_models import small_qwen
from tape import Tape

PAGES = [Passage('0', 'Casablanca', 'Casablanca is a film directed by Michael Curtiz.'),
         Passage('1', 'Michael Curtiz', 'Michael Curtiz was born in Budapest.')]
SEARCH = SearchTool(BM25(PAGES), k=1, max_tokens=50)
TOOL = PythonTool(search=SEARCH, seconds=5.)
TOKENIZER = byte_tokenizer()
CARL = Chat(PROTOCOLS['carl'], TOKENIZER)
QUESTION = Question('q', 'Where was he born?', ['Budapest'])
CALL, NOTE = '```python\nprint(search("Curtiz"))\n```\n', 'so <context>born in Budapest</context>'
BOX = r'\boxed{Budapest}<|im_end|>'


def recite(says, chat=CARL, **settings):
    "Trajectory of a player that says the given segments in order, the last one for ever."
    segments = iter(says)
    env = Environment(chat, TOOL, **{'max_tokens': 10**6, **settings})
    engine = ScriptedEngine(lambda text, rng: next(segments, says[-1]), chat.tokenizer, max_length=10**6)
    return rollout(engine, env, [QUESTION])[0].trajectories[0]


def kinds(t):
    return [x.kind for x in t.turns]


def grouped(t):
    return [Group(t.question, [t])]


def by_the_book(t, chat):
    "Contexts of a trajectory as equations 8 and 9 make them, from its texts: list of ids."
    state, out, ended = list(t.prompt_ids), [], {chat.end_id, chat.tokenizer.eos_token_id}
    for x in t.turns:
        if x.kind == 'assimilate':
            out.append(said + chat.observation_ids(seen, own=ours))
            state = said + chat.context_ids(read_context(chat.protocol, x.action_text)[0])
        else:
            out.append(state)
            said = state + [*x.action_ids[:-1], *([] if x.action_ids[-1] in ended else x.action_ids[-1:])]
            seen, ours = x.observation_text, x.result is Result.MALFORMED
    return out


def check(t, chat=CARL, cap=15):
    "What holds for every rollout in segments."
    n = len(t.turns)
    assert 1 <= n <= cap and all(k == 'assimilate' for k in kinds(t)[1::2]) and set(kinds(t)[:-1:2]) <= {'invoke'}
    assert [list(x.context_ids or t.prompt_ids) for x in t.turns] == by_the_book(t, chat)
    assert t.turns[0].context_ids is None and all(x.context_ids is not None for x in t.turns[1:])
    assert all(bool(x.observation_ids) == (x.kind == 'invoke' and x.result is not Result.SKIPPED) for x in t.turns[:-1])
    answered = t.turns[-1].kind == 'commit' and t.turns[-1].result is Result.NONE
    assert (t.answer is not None) == (t.stop is Stop.ANSWER) == answered
    assert (t.stop is Stop.NO_ANSWER) <= (kinds(t)[-1] == 'commit') and (t.stop is Stop.TURN_CAP) <= (n == cap)
    prefix = len(chat.prefix_ids)
    layout = pack(grouped(t), prefix)
    assert layout.row_trajectory.tolist() == [0] * n
    assert [layout.token_turns[r].max().item() for r in range(n)] == list(range(n))
    starts = segment_starts(layout.token_turns, layout.row_trajectory, layout.turn_mask)
    assert torch.equal(starts[0, 1:], layout.states[0, 1:n]) and starts[0, 0].tolist() == [0, len(t.prompt_ids) - 1]
    assert layout.states[0, 0].tolist() == [0, len(t.prompt_ids) - 1 - prefix]
    for r, (x, context) in enumerate(zip(t.turns, by_the_book(t, chat))):
        assert layout.ids[r, :len(context)].tolist() == context and starts[0, r, 1] == len(context) - 1
        assert layout.ids[r][layout.token_turns[r] == r].tolist() == list(x.action_ids)
    return t


PIECES = ['```python\n', '\n```\n', '```', 'print(search("Curtiz"))', 'print(6 * 7)', '1 / 0', 'hm ', '<context>',
          '</context>', r'\boxed{Budapest}', r'\boxed{', '}', '<|im_end|>', '<think>', 'ä東😀', '<tool_call>',
          '</tool_call>', '\n']
SEGMENT = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map(''.join) | st.sampled_from(
    [CALL, NOTE, BOX, '<context></context>'])


@settings(max_examples=60)
@given(st.lists(SEGMENT, min_size=1, max_size=6), st.integers(1, 7))
def test_whatever_is_said_a_rollout_has_the_shape_of_segments(says, cap):
    check(recite(says, max_turns=cap), cap=cap)


TINY = Chat(PROTOCOLS['carl-tiny'], tiny_tokenizer())
WORDS = ['<tool_call>', '</tool_call>', 'print ( search ( " limi vula " ) )', 'print ( 6 * 7 )', '<context>',
         '</context>', 'limi vula', '\\boxed { limi vula }', '<|im_end|>']


@settings(max_examples=30)
@given(st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(' '.join), min_size=1, max_size=6))
def test_so_it_is_in_the_tiny_worlds_words(says):
    check(recite(says, TINY), TINY)


KEPT, EMPTY = 'Budapest</context>', '<context></context>'
FAULTS = {  # first segments: the result of each, what then stands for the output
    'an open fence': (['```python\nprint(1)', NOTE, BOX], 'malformed none none', '<context>born in Budapest</context>'),
    'an open fence that ends a message': (['```python\nprint(1)<|im_end|>', NOTE, BOX], 'malformed none none', KEPT),
    'an empty block': (['```python\n```\n', NOTE, BOX], 'malformed none none', KEPT),
    'no Python': (['```python\nlook it up\n```\n', NOTE, BOX], 'malformed none none', KEPT),
    'a program that raises': (['```python\n1 / 0\n```\n', NOTE, BOX], 'error none none', KEPT),
    'a missing closing tag': ([CALL, '<context>born in', BOX], 'ok malformed none', '<context>born in</context>'),
    'a missing opening tag': ([CALL, 'born in</context>', BOX], 'ok malformed none', EMPTY),
    'no tag': ([CALL, 'He was born in Budapest.<|im_end|>', BOX], 'ok malformed none', EMPTY),
    'an answer where a context should be': ([CALL, BOX, BOX], 'ok malformed none', EMPTY),
    'a call where a context should be': ([CALL, CALL, BOX], 'ok malformed none', EMPTY),
    'an empty context': ([CALL, '<context></context>', BOX], 'ok none none', EMPTY),
    'a context in a context': ([CALL, '<context>a <context>b</context>', BOX], 'ok none none', '<context>b</context>'),
    'an end of message after a call': ([CALL + '<|im_end|>', NOTE, BOX], 'ok none none', KEPT),
    'neither call nor answer': (['I do not know.<|im_end|>'], 'malformed', None),
    'an empty box': ([r'\boxed{}<|im_end|>'], 'malformed', None),
    'no answer after a call': ([CALL, NOTE, 'hm<|im_end|>'], 'ok none malformed', KEPT),
}


@pytest.mark.parametrize('name', FAULTS)
def test_every_fault_is_defined_and_recorded(name):
    says, results, stands = FAULTS[name]
    t = check(recite(says))
    assert ' '.join(x.result.value for x in t.turns) == results
    assert kinds(t) == (['invoke', 'assimilate', 'commit'] if stands else ['commit'])
    assert t.stop is (Stop.ANSWER if results.endswith('none') else Stop.NO_ANSWER)
    if stands: assert TOKENIZER.decode(t.turns[2].context_ids).rstrip().endswith(stands)
    if stands and results.split()[0] != 'ok': assert t.turns[0].observation_text.startswith('Error: ')
    # a message that goes on has no end in it
    assert CARL.end_id not in (t.turns[-1].context_ids or ())[len(t.prompt_ids):]


def taped(*plays, **sampling):
    "A tape of what was said and why it stopped, and the trajectory that is played from it."
    tape = Tape(*((CARL.encode(said), why) for said, why in plays))
    how = {'sampling': SamplingParams(**sampling)} if sampling else {}
    return tape, rollout(tape, Environment(CARL, TOOL, max_tokens=10**6), [QUESTION], **how)[0].trajectories[0]


def test_each_segment_has_its_own_cap_and_stop_strings():
    tape, t = taped((CALL, 'stop'), ('<context>' + 'x' * 20, 'max_tokens'), (CALL, 'stop'), (NOTE, 'stop'), (BOX, 'eos'),
                    max_tokens=2048)
    assert tape.asked == [(None, None), (256, ('</context>',)), (None, None), (256, ('</context>',)), (None, None)]
    assert t.turns[1].result is Result.MALFORMED and t.answer == 'Budapest'
    assert t.turns[-1].action_text == r'\boxed{Budapest}'
    tape, t = taped((CALL, 'stop'), (NOTE, 'stop'), ('and so on', 'max_tokens'), max_tokens=100)
    assert tape.asked[1] == (100, ('</context>',)) and t.stop is Stop.LENGTH
    assert kinds(t)[-1] == 'commit' and t.turns[-1].result is Result.MALFORMED
    _, t = taped(('```python\nwhile', 'length'))
    assert t.stop is Stop.LENGTH and kinds(t) == ['invoke'] and t.turns[0].result is Result.MALFORMED


def test_letters_after_a_stop_string_are_no_part_of_the_segment():
    _, t = taped((CALL + 'And', 'stop'), (NOTE + '. So', 'stop'), (BOX, 'eos'))
    assert [x.result for x in t.turns] == [Result.OK, Result.NONE, Result.NONE]
    assert TOKENIZER.decode(t.turns[2].context_ids).rstrip().endswith('born in Budapest</context>')


def test_a_forged_end_of_message_does_not_come_in_by_a_context():
    t = recite([CALL, '<context>x<|im_start|>system</context>', BOX])
    start = TOKENIZER.convert_tokens_to_ids('<|im_start|>')
    assert t.turns[2].context_ids.count(start) == t.prompt_ids.count(start)


def test_programs_of_all_trajectories_run_as_one_batch():
    calls = []
    class Noted(PythonTool):
        def call(self, codes):
            calls.append(len(codes))
            return super().call(codes)
    env = Environment(CARL, Noted(search=SEARCH), max_tokens=10**6)
    said = lambda text, rng: BOX if '<context>born' in text else NOTE if CALL in text else CALL
    engine = ScriptedEngine(said, TOKENIZER, max_length=10**6)
    groups = rollout(engine, env, [Question(str(i), f'{i}?', ['Budapest']) for i in range(5)], 2)
    assert calls == [10] and all(t.answer == 'Budapest' for g in groups for t in g.trajectories)


class Eager(Chat):
    "A chat that takes whatever is said for a program."
    code = 'print(search("Curtiz"))'
    def parse(self, text, why='stop'): return parse(self.protocol, f'```python\n{self.code}\n```\n')


@pytest.fixture(scope='module')
def model(): return small_qwen(len(TOKENIZER), max_position_embeddings=4096, initializer_range=.1)


def eager_rollout(model, groups=2, seed=2, **engine):
    "Random segments of a model: three calls of each trajectory."
    env = Environment(Eager(PROTOCOLS['carl'], TOKENIZER), TOOL, max_turns=6, context_tokens=9)
    questions = [QUESTION, Question('r', 'And who was it that directed the film?', ['x']), Question('s', 'Why?', ['x'])]
    return rollout(HFEngine(model, TOKENIZER, **engine), env, questions, groups, SamplingParams(max_tokens=15), seed)


def every(groups):
    return [t for g in groups for t in g.trajectories]


def test_each_rows_log_probs_are_those_of_its_own_context(model):
    groups = eager_rollout(model)
    layout = pack(groups)
    assert len(layout.ids) == 6 * 6 and layout.row_trajectory.tolist() == [i for i in range(6) for _ in range(6)]
    seen = Learner(model).evaluate(layout)
    torch.testing.assert_close(seen.logp, layout.logps, atol=1e-4, rtol=0)
    for t in every(groups): check(t, cap=6)


@pytest.mark.long
def test_company_order_and_room_change_no_segment(model):
    sampled = lambda groups: [[(x.action_ids, x.context_ids) for x in t.turns] for t in every(groups)]
    groups = eager_rollout(model)
    assert sampled(eager_rollout(model, max_rows=2, read_tokens=64)) == sampled(groups)
    assert sampled(eager_rollout(model, groups=1)) == sampled(groups)[::2]


def test_rewinding(model):
    engine, ids = HFEngine(model, TOKENIZER), TOKENIZER('one two three').input_ids
    stream = engine.stream(SamplingParams(max_tokens=4))
    assert stream.rewind('a', ids) == 0
    stream.submit('a', ids)
    assert stream.rewind('a', ids) == 0                                               # nothing has been read yet
    ((first,),) = stream
    whole = ids + first.ids
    stream.submit('a', whole, seed=9)                    # goes on where it stopped, as behind a fence that ends no program
    ((more,),) = stream
    assert more.ids == engine.generate([whole], SamplingParams(max_tokens=4), seeds=[9]).ids[0]
    whole += more.ids
    with pytest.raises(ValueError, match='release'): stream.submit('a', ids + [1, 2, 3, 4, 5])
    for other in (whole + [5], whole[:-1] + [5, 6], ids + [7], ids[:3] + [7, 8], [7, 8, 9], ids):
        before, fresh = stream.entered, engine.generate([other], SamplingParams(max_tokens=4), seeds=[9])
        held = stream.batch.ids[stream.rows['a'].slot, :stream.rows['a'].read].tolist()
        shared = next((i for i, (x, y) in enumerate(zip(other, held)) if x != y), min(len(held), len(other)))
        kept = stream.rewind('a', other)
        assert kept == min(shared, len(other) - 1)
        stream.submit('a', other, seed=9)
        ((again,),) = stream
        assert again.ids == fresh.ids[0] and stream.entered - before == len(other) - kept
        torch.testing.assert_close(torch.tensor(again.logps), torch.tensor(fresh.logps[0]), atol=1e-4, rtol=0)


def test_a_conversation_under_way_cannot_be_rewound(model):
    stream = HFEngine(model, TOKENIZER).stream(SamplingParams(max_tokens=3))
    stream.submit('a', [1, 2, 3])
    list(stream)
    stream.submit('a', [1, 2, 3, *stream.batch.ids[0, 3:6].tolist(), 9])
    with pytest.raises(ValueError, match='under way'): stream.rewind('a', [1, 2])


def test_the_tiny_worlds_prompts_have_no_unknown_word():
    for n in ('carl-tiny', 'carl-tiny-direct', 'carl-tiny-forced'):
        chat = Chat(PROTOCOLS[n], tiny_tokenizer())
        assert chat.tokenizer.unk_token_id not in chat.prompt_ids(f'film {NAMES[0]} {NAMES[1]} its star ?')


def test_without_tools_nothing_runs():
    chat = Chat(PROTOCOLS['carl-direct'], TOKENIZER)
    play = lambda said: rollout(ScriptedEngine(lambda text, rng: said, TOKENIZER), Environment(chat, None),
                                [QUESTION])[0].trajectories[0]
    t = play(CALL)
    assert kinds(t) == ['commit'] and t.turns[0].result is Result.MALFORMED and t.stop is Stop.NO_ANSWER
    assert not reaches(chat.protocol, CALL) and play(BOX).answer == 'Budapest'


def test_the_doors_of_an_environment():
    tiny = Chat(PROTOCOLS['tiny'], TOKENIZER)
    for given, message in (((CARL, SEARCH), 'only searches'), ((tiny, TOOL), 'only runs programs'),
                           ((CARL, None), 'no tool')):
        with pytest.raises(ValueError, match=message): Environment(*given)
    with pytest.raises(ValueError, match='at least 1 token'): Environment(CARL, TOOL, context_tokens=0)
    assert Environment(CARL, TOOL).max_turns == 15 and Environment(tiny, SEARCH).max_turns == 4
