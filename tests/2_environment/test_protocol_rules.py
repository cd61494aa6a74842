"""The rules of play that papers set differently: which answer ends a message, what follows a malformed turn, in whose
words a model is asked, and how long prompt and response may be."""
import json
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from credit_rl import evaluate as evaluating
from credit_rl.engine import HFEngine, SamplingParams, ScriptedEngine
from credit_rl.environment import Conversation, make_environment
from credit_rl.evaluate import check_evaluation, measure
from credit_rl.layout import pack
from credit_rl.learner import Learner
from credit_rl.outcome import extract_answer
from credit_rl.methods import compose
from credit_rl.parameters import from_settings
from credit_rl.protocol import PROTOCOLS, WORDS, Chat, byte_tokenizer, prompt_hash, reword
from credit_rl.prs import PRS_JUDGE_PROMPT
from credit_rl.readers import Passage
from credit_rl.retrieval import BM25
from credit_rl.rollout import Environment, check_prompts, rollout
from credit_rl.runlog import read_yaml
from credit_rl.settings import Acting, check, make_config
from credit_rl.tiny import tiny_environment
from credit_rl.tools import PythonTool, SearchTool
from credit_rl.train import judge_hashes, train
from credit_rl.trajectory import Question, Result, Stop
from credit_rl.turn_rewards import JUDGE_PROMPT
from credit_rl.warmup import with_prompt
from credit_rl.world import make_world
from made_runs import setup_of
from random_models import small_qwen

TOKENIZER = byte_tokenizer()
TOOL = SearchTool(BM25([Passage('0', 'Casablanca', 'Casablanca is a film directed by Michael Curtiz.')]), 1, 50)
QUESTION = Question('q', 'Who directed Casablanca?', ['Michael Curtiz'])
CALL, ANSWER = '<tool_call> Casablanca </tool_call>', '<answer> Rabat </answer>'


def chat_of(name='tiny', **changes):
    return Chat(replace(PROTOCOLS[name], **changes), TOKENIZER)


def play(says, chat=None, tool=TOOL, **rules):
    "A trajectory of a player that says the given messages in order."
    said = iter(says)
    engine = ScriptedEngine(lambda text, rng: next(said), TOKENIZER, max_length=10**6)
    return rollout(engine, Environment(chat or chat_of(), tool, **rules), [QUESTION])[0].trajectories[0]


def flat(groups): return [t for g in groups for t in g.trajectories]


def response(t): return [i for x in t.turns for ids in (x.action_ids, x.observation_ids) for i in ids]


# ---- which answer ends a message ----

PATIENT = replace(PROTOCOLS['tiny'], answer_stop='last')
PARTS = st.sampled_from(['<answer> a </answer>', '<answer>b</answer>', '<answer>', '</answer>', '<answer> </answer>',
                         CALL, '<tool_call> ; </tool_call>', '<tool_call>', ' so ', '\n'])
MESSAGES = st.lists(PARTS, max_size=6).map(''.join)


@given(st.lists(MESSAGES, min_size=4, max_size=4), st.sampled_from(['error', 'end']), st.integers(1, 4))
def test_the_last_well_formed_answer_of_the_models_messages_counts(says, malformed, turns):
    "As `extract_answer` reads the messages, however the trajectory ended."
    says = [text.partition('</tool_call>')[0] + '</tool_call>' * ('</tool_call>' in text) or 'x' for text in says]
    t = play(says, Chat(PATIENT, TOKENIZER), malformed=malformed, max_turns=turns)
    read = [extract_answer(x.action_text) for x in reversed(t.turns)]
    assert t.answer == next(filter(None, read), None)
    if t.stop is Stop.ANSWER: assert t.turns[-1].kind == 'answer' and read[0] == t.answer
    assert all(x.kind == 'tool' for x in t.turns[:-1]) and measure(t)['answer_rate'] == (t.answer is not None)


@pytest.fixture(scope='module')
def both(base):
    "Greedy games of the base where the first answer ends a message, and where the last one counts."
    model, tokenizer, _ = base
    world = make_world('train', seed=3, size=200, questions=24)
    engine, greedy = HFEngine(model, tokenizer, max_length=192), SamplingParams(greedy=True, max_tokens=24)
    chats = [Chat(p, tokenizer) for p in (PROTOCOLS['tiny'], PATIENT)]
    return [rollout(engine, tiny_environment(world, chat), world.questions, 1, greedy) for chat in chats]


def test_a_model_goes_on_after_its_answer_until_it_ends_its_message(base, both):
    "All is as with the first answer up to the answer's end; then its message goes on to its end or its cap."
    first, last = map(flat, both)
    ends, longer = {*HFEngine(*base[:2]).eos_ids.tolist()}, 0
    for a, b in zip(first, last):
        if a.answer is None: continue
        turn = b.turns[len(a.turns) - 1]
        assert response(b)[:len(response(a))] == response(a)
        longer += len(turn.action_ids) > len(a.turns[-1].action_ids)
        assert turn.action_ids[-1] in ends or len(turn.action_ids) == 24 or turn.action_text.endswith('</tool_call>')
    assert longer > 12 and sum(t.answer is not None for t in first) > 12
    layout = pack(both[1])
    assert (Learner(base[0]).evaluate(layout).logp - layout.logps).abs().max() < 1e-3


# ---- after a malformed turn ----

def test_what_a_tool_refuses_is_answered_under_either_rule():
    "And in segments a block that is not closed is answered, or the last."
    noted = ['<context>an error</context>', r'\boxed{1}']
    def segments(code, rule):
        t = play([code, *noted], chat_of('carl'), PythonTool(TOOL), malformed=rule, max_tokens=10**6)
        return [x.kind for x in t.turns], t
    for code, rule in (('```python\nlook it up\n```\n', 'error'), ('```python\nlook it up\n```\n', 'end'),
                       ('```python\nprint(1)', 'error')):
        kinds, t = segments(code, rule)
        assert kinds == ['invoke', 'assimilate', 'commit'] and t.answer == '1' and t.turns[0].result is Result.MALFORMED
    kinds, t = segments('```python\nprint(1)', 'end')
    assert kinds == ['invoke'] and (t.stop, t.answer) == (Stop.NO_ANSWER, None)


# ---- how long ----

@pytest.fixture(scope='module')
def chatter():
    "Function that plays a random model's greedy games, two questions, under some rules."
    model = small_qwen(len(TOKENIZER), max_position_embeddings=2048, initializer_range=.1, hidden_size=32,
                       num_hidden_layers=1)
    questions = [QUESTION, Question('r', 'And who was it?', ['x'])]

    def games(length=2048, **rules):
        env = Environment(chat_of(), TOOL, **{'max_tokens': 2048, **rules})
        engine = HFEngine(model, TOKENIZER, max_length=length)
        return flat(rollout(engine, env, questions, 1, SamplingParams(greedy=True, max_tokens=20)))
    return games


@pytest.mark.long
def test_a_response_is_cut_where_its_cap_is_and_is_as_long_as_that(chatter):
    "Model tokens and observations together, the prompt apart; up to there nothing is different."
    free = [response(t) for t in chatter()]
    for most in (1, 20, 150, 333):
        for whole, capped in zip(free, chatter(response_tokens=most)):
            part = response(capped)
            assert part == whole[:len(part)] and len(part) <= most
            # one id is left over where nothing could be read after it
            if len(whole) > most: assert capped.stop is Stop.LENGTH and len(part) >= most - 1
            else: assert len(part) == len(whole) or len(whole) + 1 > most
    assert min(map(len, free)) > 150
    room = len(chat_of().prompt_ids(QUESTION.text)) + 60                     # an observation that the engine cannot hold
    for t in chatter(length=room): assert t.stop is Stop.LENGTH and len(t.prompt_ids) + len(response(t)) <= room


def test_each_row_of_a_rollout_in_segments_has_the_cap():
    code = '```python\nprint(search("Casablanca"))\n```\n'
    says = [code, '<context>Curtiz</context>', code, '<context>Curtiz, again</context>', r'\boxed{Curtiz}']
    free = play(says, chat_of('carl'), PythonTool(TOOL), max_tokens=10**6)
    n = len(free.prompt_ids)
    rows = [len(x.context_ids or free.prompt_ids) + len(x.action_ids) - n for x in free.turns]
    assert play(says, chat_of('carl'), PythonTool(TOOL), max_tokens=10**6, response_tokens=max(rows) + 1) == free
    cut = play(says, chat_of('carl'), PythonTool(TOOL), max_tokens=10**6, response_tokens=max(rows) - 40)
    assert cut.stop is Stop.LENGTH and len(cut.turns) < 5


def test_a_long_prompt_is_refused_before_anything_is_played(root):
    env, length = Environment(chat_of(), TOOL), lambda question: len(chat_of().prompt_ids(question.text))
    questions = [QUESTION, Question('long', 'Who ' + 'really ' * 9 + 'did it?', ['x'])]
    n, long = map(length, questions)
    tight, engine = replace(env, prompt_tokens=n), ScriptedEngine(None, TOKENIZER)
    for refused in (lambda: check_prompts(tight, questions), lambda: rollout(engine, tight, questions)):
        with pytest.raises(ValueError, match=f"1 of . questions .*prompt_tokens={n} ids, such as 'long' with {long}"):
            refused()
    check_prompts(replace(env, prompt_tokens=long), questions)
    given = dict(model=str(root / 'data' / 'tiny_base'), questions=9, dev_questions=4, test_questions=4)
    with pytest.raises(ValueError, match='prompt_tokens=5'): setup_of(make_config({**given, 'prompt_tokens': 5}))
    stage = setup_of(make_config({**given, 'prompt_tokens': 60, 'response_tokens': 99, 'malformed': 'end'}))
    rules = {(e.prompt_tokens, e.response_tokens, e.max_tokens, e.malformed) for e in stage.environments.values()}
    assert rules == {(60, 99, 159, 'end')}


def test_caps_that_do_not_fit_together_are_refused():
    assert (Acting().max_tokens, Acting(prompt_tokens=4096, response_tokens=4096).max_tokens) == (192, 8192)
    assert make_config({'prompt_tokens': 7, 'response_tokens': 9}).max_tokens == 16
    assert Acting(max_tokens=15000, prompt_tokens=4096, response_tokens=4096).max_tokens == 15000
    for bad in (dict(max_tokens=8191, prompt_tokens=4096, response_tokens=4096), dict(response_tokens=4096)):
        with pytest.raises(ValueError, match='max_tokens='): Acting(**bad)
        with pytest.raises(ValueError, match='max_tokens='):
            check_evaluation(evaluating.Evaluation(**{'max_tokens': 192, **bad}))
    for name in ('prompt_tokens', 'response_tokens'):
        with pytest.raises(ValueError, match=f'{name} must be at least 1'): Acting(**{name: 0})
        with pytest.raises(ValueError, match=f'{name} must be at least 1'): Environment(chat_of(), TOOL, **{name: 0})


# ---- in whose words ----

@pytest.fixture
def file(tmp_path):
    "Function (text) -> path of a file that holds it."
    def file(text, name='prompt.txt'):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)
    return file


def test_prompts_are_texts_from_files(file):
    system, user = file('Be brief: \\boxed{answer}, {"a": 1}.\n', 's'), file('\nQ: {question}', 'u')
    tools = file('You have\n{tools}\nSay <{tag}>.', 't')
    chat = Chat(reword(PROTOCOLS['tips'], system, user, tools, 'last'), TOKENIZER)
    told, asked = chat.messages('Who {x}?')
    schema = json.dumps(PROTOCOLS['tips'].tools[0])
    assert told['content'] == f'Be brief: \\boxed{{answer}}, {{"a": 1}}.\n\nYou have\n{schema}\nSay <tool_call>.'
    assert asked['content'] == 'Q: Who {x}?' and chat.protocol.answer_stop == 'last'
    assert reword(PROTOCOLS['tips']) == PROTOCOLS['tips'] and len(WORDS) == 6


def test_a_prompt_says_a_day_and_its_tools(file):
    """IGPO's figure 8, after DeepResearcher: the day, and the tools in the midst of the system message, which no other
    text about tools follows. The day is a setting, since two runs on two days would else differ."""
    system, user = file('Today is {today}.\n{tools}\nCall: <{tag}>.\nBe brief.', 's'), file('{today}: {question}', 'u')
    own = reword(PROTOCOLS['tips'], system, user, today='2026-01-31')
    told, asked = Chat(own, TOKENIZER).messages('Who said {today}?')
    schema = json.dumps(PROTOCOLS['tips'].tools[0])
    assert told['content'] == f'Today is 2026-01-31.\n{schema}\nCall: <tool_call>.\nBe brief.'
    assert asked['content'] == '2026-01-31: Who said {today}?'
    assert prompt_hash(own) != prompt_hash(reword(PROTOCOLS['tips'], system, user, today='2026-02-01'))
    with pytest.raises(ValueError, match=r"holds \{today\}: say which day"): reword(PROTOCOLS['tips'], system)
    with pytest.raises(ValueError, match='<tool_call>'): reword(PROTOCOLS['tips'], file('{tools}', 't'))
    assert reword(PROTOCOLS['igpo'], file('On {today}.', 'd'), today='Monday').system == 'On Monday.'


def test_a_day_is_a_setting_of_every_kind_of_run(file, tmp_path):
    "As YAML reads it too, from a file or a command; CARL's other prompts say it as well."
    (tmp_path / 'run.yaml').write_text('today: 2026-01-31\n')
    given = {'protocol': 'tips', 'data': 'nq', 'corpus': 'http://x', 'system_prompt': file('On {today}.')}
    settings = {**given, **read_yaml(tmp_path / 'run.yaml')}
    assert make_config(settings).prompt_files.today == '2026-01-31'
    assert from_settings(evaluating.Evaluation, settings).words['today'] == '2026-01-31'
    with pytest.raises(ValueError, match='say which day'): check(make_config(given))
    how = Conversation('carl', prompt_files={'others': {'direct': file('Now, {today}.', 'n')}, 'today': '2026-01-31'})
    env = make_environment(TOKENIZER, TOOL.retriever, how)
    assert with_prompt(env, 'direct').chat.protocol.system == 'Now, 2026-01-31.'


def test_a_text_about_tools_stands_instead_of_the_templates_own(root, file):
    template = (root / 'tests' / 'fixtures' / 'templates' / 'qwen2_5.jinja').read_text()
    reworded = reword(PROTOCOLS['tips'], tool_prompt=file('search(query_list) by <tool_call>'))
    own, other = (Chat(p, byte_tokenizer(template)) for p in (PROTOCOLS['tips'], reworded))
    shown = [c.tokenizer.decode(c.prompt_ids('Who?')) for c in (own, other)]
    assert own.tools and '"query_list"' in shown[0]
    assert not other.tools and 'search(query_list) by <tool_call>' in shown[1] and '"query_list"' not in shown[1]


@pytest.mark.parametrize('protocol, key, text, wanted', [
    ('tips', 'user_prompt', 'Answer {query}', 'query'), ('tips', 'user_prompt', 'Answer it.', 'question'),
    ('tips', 'user_prompt', '{question} {question}', '2 times'),
    ('tips', 'system_prompt', 'Today is {date}, {question}.', r'\{date\} and \{question\}.*may hold: \{today\}'),
    ('igpo', 'system_prompt', '{tools}', r'holds \{tools\}'), ('tips', 'tool_prompt', 'Write <tool_call>.', 'or search'),
    ('tips', 'tool_prompt', '{tools}', 'or <tool_call>'), ('tips', 'tool_prompt', '{tools} {tag} {schemas}', 'schemas'),
    ('igpo', 'tool_prompt', '{tools} {tag}', 'user_prompt'), ('tips', 'system_prompt', ' \n', 'is empty')])
def test_a_prompt_that_cannot_be_used_is_refused_by_name(protocol, key, text, wanted, file):
    with pytest.raises(ValueError, match=wanted) as e: reword(PROTOCOLS[protocol], **{key: file(text)})
    assert key in str(e.value)
    given = {'protocol': protocol, key: file(text)}
    with pytest.raises(ValueError, match=wanted): check(make_config({'data': 'nq', 'corpus': 'http://x', **given}))
    with pytest.raises(ValueError, match=wanted): check_evaluation(from_settings(evaluating.Evaluation, given))


def test_a_prompt_that_is_not_there_is_refused():
    for key in WORDS[:3]:
        with pytest.raises(ValueError, match=f"{key} .*'nowhere.txt'"): reword(PROTOCOLS['tips'], **{key: 'nowhere.txt'})
    with pytest.raises(ValueError, match='answer'): reword(PROTOCOLS['carl'], answer_stop='last')


def test_sets_that_are_asked_directly_keep_their_words(file):
    how = Conversation('tips', prompt_files={'system': file('Be brief.')},
                       messages={'answer_stop': 'last', 'malformed': 'end'}, context_tokens=9)
    searched, direct = (make_environment(TOKENIZER, s, how) for s in (TOOL.retriever, None))
    assert searched.chat.protocol.system == 'Be brief.' and direct.chat.protocol.name == 'direct'
    assert direct.chat.protocol.system is None and '</answer>' not in (*direct.chat.stop, *searched.chat.stop)
    assert {(e.malformed, e.context_tokens) for e in (searched, direct)} == {('end', 9)}
    assert make_environment(TOKENIZER, None, replace(how, protocol='direct')).chat.protocol.system == 'Be brief.'


@pytest.mark.parametrize('spelling, reward', [('outcome+judge/calls', 'judge'), ('prs', 'prs')])
def test_the_hash_of_a_judges_words_stands_apart(spelling, reward, tmp_path):
    "Ours or a file's; of a reward that asks nobody there is none."
    path, form = tmp_path / 'judge.txt', {'form': 'long'} if spelling == 'prs' else {}
    path.write_text('Be strict. {question} {pairs}' if spelling != 'prs' else 'Be strict.')
    given = {'judge': {'base_url': 'http://localhost:8000/v1', 'model': 'm'}, **form}
    ours, file = (judge_hashes(compose(spelling).bind({**given, **more}))
                  for more in ({}, {'judge_prompt': str(path)}))
    assert ours == {reward: prompt_hash(JUDGE_PROMPT if reward == 'judge' else PRS_JUDGE_PROMPT)}
    assert file == {reward: prompt_hash(path.read_text())} != ours
    assert judge_hashes(compose('prs').bind({})) == judge_hashes(compose('outcome/group').bind({})) == {}


def test_a_run_keeps_its_protocol_and_the_hash_of_its_prompt(root, file, tmp_path, finished):
    "Another system message, in words that the tiny model has; words that it lacks are refused."
    given = dict(model=str(root / 'data' / 'tiny_base'), steps=0, questions=9, dev_questions=4, test_questions=4,
                 threads=1)
    prompt = file('film')
    other = train({**given, 'system_prompt': prompt, 'run': str(tmp_path / 'run')}, say=lambda line: None)
    for folder, protocol in ((finished(), PROTOCOLS['tiny']), (other, reword(PROTOCOLS['tiny'], system_prompt=prompt))):
        summary = json.loads((folder / 'summary.json').read_text())
        assert (summary['protocol'], summary['prompt_hash']) == ('tiny', prompt_hash(protocol))
        assert 'judge_prompt_hashes' not in summary
    with pytest.raises(ValueError, match="'tiny'"): setup_of(make_config({**given, 'system_prompt': file('Be brief.')}))


def test_other_prompts_of_carl_keep_the_words_that_are_given(file):
    "In a warm-up, which asks in several ways: the user's message in all, the system message in the one that it is of."
    given = reword(PROTOCOLS['carl'], file('Choose.', 's'), file('Now: {question}', 'u'))
    env = Environment(Chat(given, TOKENIZER), PythonTool(TOOL))
    same, forced = with_prompt(env, 'optional'), with_prompt(env, 'forced')
    assert same.chat.protocol == given and forced.chat.protocol == replace(PROTOCOLS['carl-forced'], user=given.user)
