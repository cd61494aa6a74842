"""Prompting and retrieval baselines: known scores in the tiny world, the nine real slices by name, and what is
refused."""
import json

import pytest

from credit_rl import evaluate as evaluation
from credit_rl.studies.baselines import Script
from credit_rl.benchmarks import BENCHMARKS
from credit_rl.datasets import load_corpus, load_questions
from credit_rl.engine import ScriptedEngine
from credit_rl.environment import Conversation, PromptFiles, make_environment
from credit_rl.evaluate import (Evaluation, check_evaluation, evaluate, main, read_manifest, read_scores,
                                replay_evaluation, run_evaluation)
from credit_rl.parameters import from_settings
from credit_rl.prompting import BASELINES
from credit_rl.protocol import byte_tokenizer
from credit_rl.readers import Passage
from credit_rl.retrieval import BM25
from credit_rl.runlog import read_turns
from credit_rl.world import fact_chain, make_world
from paper_player import SAMPLE, write_model

QUICK = dict(max_turns=3, turn_tokens=8, context_tokens=8, max_tokens=20000, passages=2)
SEVEN = tuple(n for n, b in BENCHMARKS.items() if b.has_corpus)
ROWS = SAMPLE.parent / 'rows'


pytestmark = pytest.mark.usefixtures('on_a_cpu')


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    "A small random model whose tokenizer says the baselines' prompts in few tokens."
    folder = tmp_path_factory.mktemp('model')
    write_model(folder, [b.protocol.user for b in BASELINES.values()])
    return str(folder)


@pytest.fixture(scope='module')
def tiny():
    "A world, its search, and the facts that the player knows by heart."
    world = make_world('test', seed=8, size=200, questions=48, parametric=.3)
    search = BM25([Passage(name, name, text) for name, text in world.pages.items()])
    return world, search, {fact: world.facts[fact] for fact in world.known}


def played(tiny, name, **script):
    "The trajectories of a baseline's script, one a question."
    world, search, _ = tiny
    tokenizer = byte_tokenizer()
    env = make_environment(tokenizer, search, Conversation(max_tokens=20000), baseline=name)
    player = ScriptedEngine(Script(BASELINES[name], **script), tokenizer, max_length=20000)
    return [g.trajectories[0] for g in evaluate(player, env, world.questions)[1]]


def calls(trajectory): return [turn.call for turn in trajectory.turns if turn.call]


@pytest.mark.parametrize('name', ['direct', 'cot', 'rag', 'cot-rag'])
def test_without_calls_it_is_right_where_it_knows_or_was_shown(tiny, name):
    "A prompt's three passages are those that the search gives here; who answers at once knows one hop alone."
    world, search, known = tiny
    found = name.endswith('rag')
    for t in played(tiny, name, known=known):
        q = t.question
        chain, shown = fact_chain(q), {p.id for p in search.search([q.text], 3)[0]} if found else set()
        right = all(fact in known or fact[0] in shown for fact in chain)
        assert (t.answer in q.answers) == (right and (name.startswith('cot') or len(chain) == 1))
        assert len(t.turns) == 1 and not calls(t)
        prompt = byte_tokenizer().decode(t.prompt_ids)
        assert {n for n, page in world.pages.items() if page in prompt} >= shown and ('Doc 1' in prompt) == found


def test_a_rag_prompt_shows_more_than_is_known(tiny):
    "Neither nobody nor everybody is right, and passages and reasoning both help: the test above could fail."
    share = {n: sum(t.answer in t.question.answers for t in played(tiny, n, known=tiny[2]))
             for n in ('direct', 'cot', 'rag', 'cot-rag')}
    assert 0 < share['direct'] < share['cot'] < share['cot-rag'] < 48 and share['direct'] < share['rag']


@pytest.mark.parametrize('name', ['ircot', 'search-o1', 'tools-always', 'tools-selective'])
def test_with_calls_it_is_right_everywhere(tiny, name):
    trajectories = played(tiny, name, known=tiny[2])
    assert all(t.answer in t.question.answers for t in trajectories)
    unknown = {t.question.id for t in trajectories if not t.question.meta['parametric']}
    asked = {t.question.id for t in trajectories if calls(t)}
    if name == 'tools-always': assert len(asked) == len(trajectories)
    elif name == 'ircot': assert asked < unknown                              # the question itself finds some
    else: assert asked == unknown
    assert 0 < len(unknown) < len(trajectories)


def test_search_o1_goes_on_after_its_note_alone(tiny):
    "What was found is in the segment that writes the note, and in no later context."
    tokenizer = byte_tokenizer()
    t = max(played(tiny, 'search-o1'), key=lambda t: len(t.turns))
    read = [tokenizer.decode(turn.context_ids) for turn in t.turns if turn.context_ids is not None]
    assert [turn.kind for turn in t.turns[:3]] == ['invoke', 'assimilate', 'invoke'] and t.turns[-1].kind == 'commit'
    assert ['Doc 1' in text for text in read] == [k % 2 == 0 for k in range(len(read))]
    assert read[-1].count('</context>') == 1 + len(calls(t))                          # one stands in the prompt


@pytest.mark.long
def test_what_was_not_noted_is_lost(tiny):
    for name in ('search-o1', 'tools-always'):
        for t in played(tiny, name, drops=('founder',)):
            assert (t.answer is None) == ('founder' in t.question.meta['relations'])


@pytest.mark.parametrize('name', ['cot', 'rag', 'ircot', 'search-o1', 'tools-selective'])
def test_a_baseline_runs_with_search_and_without(name, model, tmp_path):
    "Sets of a corpus, of numbers, and of pages that a question brings along."
    paths = {'hotpotqa': str(SAMPLE), 'gsm8k': str(ROWS / 'gsm8k.jsonl'), 'finqa': str(ROWS / 'finqa.json')}
    main([f'{k}={json.dumps(v)}' for k, v in {
        **QUICK, 'model': model, 'data': ','.join(paths), 'path': paths, 'run': str(tmp_path), 'questions': 1,
        'baseline': name}.items()])
    base, scores = BASELINES[name], read_scores(tmp_path)
    assert set(scores) == set(paths)
    for dataset in scores:
        manifest, (row,) = read_manifest(tmp_path / dataset), read_turns(tmp_path / dataset)
        assert manifest['baseline'] == {'name': name, 'when': base.when, 'max_turns': base.max_turns}
        searched = base.searches and dataset in SEVEN
        assert (manifest['retriever'] is not None) == searched
        alone = base.searches and not base.protocol.runs_code and not searched        # as a chain of thought
        assert manifest['protocol']['name'] == ('direct' if alone else base.protocol.name)
        prompt = evaluation.load_tokenizer(model).decode(row['trajectory']['prompt_ids'])
        assert ('Doc 2' in prompt) == (searched and base.when in ('question', 'lines'))
        assert row['question'].strip()[-30:] in prompt and 1 <= row['turns'] <= (base.max_turns or 3)


def test_a_baseline_is_played_again_as_it_was(model, tmp_path):
    settings = {**QUICK, 'model': model, 'data': 'hotpotqa', 'path': str(SAMPLE), 'run': str(tmp_path / 'run'),
                'baseline': 'ircot'}
    run_evaluation(settings, say=lambda line: None, progress=False)
    rows = read_turns(tmp_path / 'run' / 'hotpotqa')
    (again,) = replay_evaluation(tmp_path / 'run', say=lambda line: None, progress=False).values()
    assert again.same and again.questions == len(rows) == 6
    (other,) = replay_evaluation(tmp_path / 'run', changes={'baseline': 'rag'}, say=lambda line: None,
                                 progress=False).values()
    assert any(line.startswith('baseline.when') for line in other.inputs) and len(other.rows) == 6


def test_a_template_that_rewrites_keeps_the_passages(model):
    "As Qwen3's: the passages are in the contexts that the template makes, too."
    questions = load_questions('hotpotqa', SAMPLE)
    tokenizer = evaluation.load_tokenizer(model)
    chat = make_environment(tokenizer, BM25(load_corpus('hotpotqa', SAMPLE)), baseline='cot-rag').chat
    rendered = chat.markup.render(chat.messages(questions[0].text))
    assert 'Doc 3' in rendered and chat.prompt_ids(questions[0].text) == chat.encode(rendered)
    assert chat.prompt_ids([q.text for q in questions]) == [chat.prompt_ids(q.text) for q in questions]


def test_a_wrong_baseline_is_refused():
    for given, message in (({'baseline': 'ragg'}, "did you mean 'rag'"), ({'baseline': 'serch-o1'}, "'search-o1'"),
                           ({'baseline': 'rag', 'protocol': 'tips'}, "protocol='tips'")):
        with pytest.raises(ValueError, match=message): check_evaluation(from_settings(Evaluation, given))


def test_each_rank_of_a_baseline_is_an_evaluation(model, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr('credit_rl.launch.launch', lambda command, *rest, **more: asked.append(command))
    settings = {**QUICK, 'model': model, 'data': 'hotpotqa', 'path': str(SAMPLE), 'ranks': 2}
    for name in ('rag', None): run_evaluation({**settings, 'baseline': name, 'run': str(tmp_path / str(name))})
    named = [[w for w in map(str, command) if w.startswith('credit_rl.')] for command in asked]
    assert named == [['credit_rl.evaluate']] * 2


def test_own_words_are_asked_or_named_where_nothing_is_searched(tmp_path):
    (tmp_path / 'own.yaml').write_text('name: mine\nuser: "MY OWN WORDS. {question}"\ncall_style: none\nanswer_tag: answer\n')
    env = make_environment(byte_tokenizer(), None, Conversation(protocol=str(tmp_path / 'own.yaml')))
    assert env.chat.protocol.user.startswith('MY OWN WORDS')
    (tmp_path / 'user.txt').write_text('MINE: {question}')
    files = PromptFiles(user=str(tmp_path / 'user.txt'))
    with pytest.warns(UserWarning, match='user.txt is not read'):
        env = make_environment(byte_tokenizer(), None, Conversation(prompt_files=files))
    assert env.chat.protocol.name == 'direct'
    assert make_environment(byte_tokenizer(), None, Conversation('direct', prompt_files=files)).chat.protocol.user == 'MINE: {question}'
