"""58_demonstrations: what the player may know, how it writes, what it reaches."""
import json
import random
from dataclasses import replace

import pytest

from credit_rl.demonstrations import answer_shown, demonstrate, demonstrate_all, next_queries, pages_shown, reach
from credit_rl.environment import Conversation, make_environment
from credit_rl.tspo import first_occurrence
from credit_rl.metrics import exact_match
from credit_rl.protocol import byte_tokenizer
from credit_rl.readers import Passage
from credit_rl.retrieval import BM25
from credit_rl.rollout import add_message
from credit_rl.trajectory import Question, Stop, Trajectory, Turn

SHORT = 'runs/params/protocols/short.yaml'
PAGES = [Passage('0', 'Harbour of Glass (film)', 'Harbour of Glass is a film that Ida Venn directed. '
                                                 'It was shot in Orvane.'),
         Passage('1', 'Ida Venn', 'Ida Venn is a director. She was born in Tolm.'),
         Passage('2', 'Tolm', 'Tolm is a town on the coast, north of Orvane.'),
         Passage('3', 'Wooden Bridge', 'Wooden Bridge is a film of 1950.')]
WHERE = Question('q', 'In which town was the director of Harbour of Glass born?', ['Tolm'], 'made up', {
    'hops': 2, 'supporting_facts': [['Harbour of Glass (film)', 0], ['Ida Venn', 0]]})


@pytest.fixture
def env(root, monkeypatch):
    monkeypatch.chdir(root)
    how = Conversation(SHORT, passages=1, max_tokens=4096, max_turns=4)
    return make_environment(byte_tokenizer(), BM25(PAGES), how)


def queries(trajectory):
    return [q for turn in trajectory.turns if turn.call for q in turn.call['queries']]


def test_a_page_is_asked_for_once_it_was_named(env):
    "Whatever is drawn, the second page's title is no query before a page has shown it, and nothing is asked twice."
    for seed in range(20):
        t = demonstrate(env, WHERE, seed)
        asked = queries(t)
        assert len({q.lower() for q in asked}) == len(asked) and exact_match(t.answer, ['Tolm'])
        for k, turn in enumerate(t.turns):
            if turn.call and 'Ida Venn' in turn.call['queries'][0]:
                assert any('Ida Venn' in before.observation_text for before in t.turns[:k])
        assert first_occurrence([turn.observation_text for turn in t.turns], ['Tolm']) is not None
    assert len({tuple(queries(demonstrate(env, WHERE, seed))) for seed in range(20)}) > 1


def test_an_answer_that_stands_by_chance_is_not_seen(env):
    "Orvane stands on the first page, where the film was shot; as the answer of two hops it counts on the second alone."
    orvane = replace(WHERE, answers=('Orvane', ))
    t = demonstrate(env, orvane, 1)
    assert queries(t) and t.answer == 'Orvane' and 'shot in Orvane' in t.turns[0].observation_text
    elsewhere = replace(WHERE, answers=('coast', ))                     # only on a page that the question does not name
    assert demonstrate(env, elsewhere, 1).answer is None


def test_pages_are_what_the_search_returned(root, monkeypatch):
    "A page of several lines counts whole; an echoed query or a quoted label is no page."
    monkeypatch.chdir(root)
    odd = [Passage('0', 'The "Glass" (film) and "Bay") of Ida', 'A film.\nIt was shot in Orvane.'),
           Passage('1', '', 'Ida Venn wrote: Doc 9 (Title: "Tolm") a town.')]
    how = Conversation('tspo', passages=2, max_tokens=4096, max_turns=4)
    env = make_environment(byte_tokenizer(), BM25(odd), how)
    t = Trajectory(replace(WHERE, answers=('Orvane', ), meta={}), env.chat.prompt_ids(WHERE.text), (), Stop.TURN_CAP)
    asked = json.dumps({'name': 'search', 'arguments': {'query_list': ['film Ida', 'Doc 8 (Title: "x") Orvane']}})
    t, _ = add_message(env, t, f'<think>so</think><tool_call>{asked}</tool_call>')
    assert set(pages_shown(t)) == {(p.title, p.text) for p in odd} and 'Query: Doc 8' in t.turns[0].observation_text
    assert answer_shown(t) == 'Orvane'
    before = replace(t, turns=tuple(replace(turn, returned=()) for turn in t.turns))      # from a file of before
    assert answer_shown(before) == 'Orvane'
    cut = Turn('tool', (), (), (0, ), '', 'Doc 1 (Title: "Ida Venn', {'name': 'search', 'queries': ['x']})
    assert pages_shown(replace(t, turns=(cut, ))) == [('Ida Venn', '')]


def test_a_comparison_looks_both_up(env):
    older = Question('c', 'Which film is older, Harbour of Glass or Wooden Bridge?', ['Wooden Bridge'], 'made up', {
        'hops': 2, 'type': 'comparison',
        'supporting_facts': [['Harbour of Glass (film)', 0], ['Wooden Bridge', 0]]})
    for seed in range(6):
        t = demonstrate(env, older, seed)
        shown = ' '.join(turn.observation_text for turn in t.turns)
        assert t.answer == 'Wooden Bridge' and 'Harbour of Glass is' in shown and 'film of 1950' in shown


def test_steps_are_asked_in_their_order():
    steps = Question('s', 'Where was the director of that film born?', ['Tolm'], 'musique', {
        'hops': 2, 'steps': [['Harbour of Glass >> director', 'Ida Venn'], ['#1 >> place of birth', 'Tolm']]})
    start = Trajectory(steps, (1, ), (), Stop.TURN_CAP)
    first = {next_queries(start, random.Random(i))[0] for i in range(30)}
    assert 'Harbour of Glass director' in first and 'Ida Venn place of birth' not in first
    seen = Turn('tool', (), (), (0, ), '', 'Doc 1 (Title: "A") Ida Venn made it.', {'name': 'search', 'queries': ['x']})
    assert next_queries(replace(start, turns=(seen, )), random.Random(0))[0] == 'Ida Venn place of birth'


def test_a_question_whose_answer_nothing_shows_ends_without_one(env):
    nowhere = Question('n', 'Where is the lighthouse?', ['Sarn'], 'made up', {'hops': 1})
    t = demonstrate(env, nowhere)
    assert t.answer is None and answer_shown(t) is None and len(t.turns) <= 4
    groups = demonstrate_all(env, [WHERE, nowhere], 2)
    assert reach(groups) == {'1': 0.0, '2': 1.0, 'all': 0.5}
    assert [[x.answer for x in g.trajectories] for g in groups] == [['Tolm'] * 2, [None] * 2]
