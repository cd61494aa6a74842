"""22_rollout and 13_tools: a turn keeps what its tool returned, field by field, as the model was shown it."""
import json
import pickle
import re
from types import SimpleNamespace as Is

import pytest

from credit_rl import rollout as rollouts
from credit_rl.engine import ScriptedEngine
from credit_rl.tspo import first_turns
from credit_rl.protocol import PROTOCOLS, Chat, byte_tokenizer
from credit_rl.readers import Passage
from credit_rl.rollout import Environment, rollout
from credit_rl.runlog import RunLog, read_turns
from credit_rl.tools import (Observation, PythonTool, SearchTool, observation_of, read_observation, render_documents,
                             render_plain, returned_texts)
from credit_rl.trajectory import Question, Result, Turn, to_json, trajectory_from_json

PAGES = [Passage('0', 'France', 'Its capital is Paris.'), Passage('1', 'Paris', 'A city (old).\nIn two lines.')]
BOTH = ('France', 'Its capital is Paris.', 'Paris', 'A city (old).\nIn two lines.')


class Index:
    def __init__(self, pages): self.pages = pages
    def search(self, queries, k): return [self.pages[:k] for _ in queries]


def call(*queries, name='search'):
    body = json.dumps({'name': name, 'arguments': {'query_list': list(queries)}})
    return f'<think> I look. </think> <tool_call> {body} </tool_call>'


def play(tool, *says, **caps):
    turns = iter([*says, '<answer> Rome </answer>'])
    chat = Chat(PROTOCOLS['tspo'], byte_tokenizer())
    env = Environment(chat, tool, **{'max_tokens': 20000, **caps})
    engine = ScriptedEngine(lambda text, rng: next(turns), chat.tokenizer)
    return rollout(engine, env, [Question('q', 'What is the capital of France?', ['Paris'])])


@pytest.mark.parametrize('says', [call('Is it Lyon or Paris?', 'x'), call('Paris', 'Paris'), call('x', name='Paris'),
                                  '<tool_call> Paris </tool_call>'])
def test_an_empty_index_shows_nothing_whatever_is_asked(says):
    "The policy's own words come back in the observation, and are no find."
    groups = play(SearchTool(Index([]), 2, None), says)
    (first, _), = (t.turns for t in groups[0].trajectories)
    assert 'Paris' in first.observation_text or first.result is Result.MALFORMED
    assert first.returned == () and first_turns(groups).tolist() == [-1]


def test_a_turn_keeps_fields_in_their_order_and_files_keep_them(tmp_path):
    groups = play(SearchTool(Index(PAGES), 2, None), call('a', 'b'))
    first = groups[0].trajectories[0].turns[0]
    assert first.returned == BOTH * 2 and type(first.observation_text) is str
    with RunLog(tmp_path/'run') as log: log.turns(1, [{'trajectory': to_json(groups[0].trajectories[0])}])
    row, = read_turns(tmp_path/'run')
    assert trajectory_from_json(row['trajectory']).turns[0].returned == first.returned
    assert observation_of(first).returned() == first.returned


def test_a_tool_of_ones_own_that_returns_plain_text_is_read():
    class Own:
        def call(self, calls): return [('Doc 1 (Title: "Paris") A city.', Result.OK) for _ in calls]
    assert play(Own(), call('a'))[0].trajectories[0].turns[0].returned == ('Paris', 'A city.')


def test_programs_return_what_they_print_without_our_labels():
    tool = PythonTool(SearchTool(Index(PAGES), 1, None))
    (text, result), (nothing, _), (failed, _) = tool.call(['print(search("x"))', 'y = 1', 'print("so far")\nParis'])
    assert text == 'Doc 1 (Title: "France") Its capital is Paris.' and text.returned() == BOTH[:2]
    assert result is Result.OK
    assert nothing == 'No output.' and nothing.returned() == ()
    assert failed.startswith('Error: NameError') and failed.returned() == ('so far',)


@pytest.mark.parametrize('render', [render_documents, render_plain])
@pytest.mark.parametrize('found', [[PAGES], [PAGES, []], [[], PAGES], [[], []]])
def test_what_is_read_from_a_stored_text_is_what_was_returned(render, found):
    "Files from before have no fields: they are read by taking labels and echoes off."
    queries = ['Doc 1 (Title: "Lyon") or\nParis?', 'Paris'][:len(found)]
    said = render(list(zip(queries, found)), 'No results.')
    assert pickle.loads(pickle.dumps(said)).spans == said.spans
    old = Turn('tool', [1], [-1.], [2], '', str(said), {'name': 'search', 'queries': queries}, Result.OK)
    wanted = (BOTH if render is render_documents else BOTH[1::2]) * sum(map(bool, found))     # plain: no titles
    assert said.returned() == wanted
    if render is render_documents: assert returned_texts(old) == wanted


def test_cut_labels_and_echoes_are_no_fields():
    text = 'Query: Lyon or Paris\nDoc 1 (Title: "France") x\n\nQuery: Paris now'
    for n in (m.end() for m in re.finditer(r'\S+', text)):              # a text is cut after a whole word
        fields = read_observation(text[:n], ['Lyon or Paris', 'Paris now']).returned()
        assert fields in ((), ('France',), ('France', 'x')), (text[:n], fields)
    assert Observation('abc', [(0, 2)]).first(1).returned() == ('a',)


def test_a_call_that_no_room_is_left_for_is_not_run():
    "What would be recorded as skipped must not happen."
    env, call = Is(malformed='error', max_turns=5), Is(call={'queries': ['x']}, error='')
    draft = Is(turns=[], ids=[0] * 10, limit=14)
    batch = [Is(stop='stop', ids=[1]), Is(stop='stop', ids=[1, 2]), Is(stop='stop', ids=[1, 2, 3]), Is(stop='length', ids=[1])]
    assert rollouts._readable(env, [draft] * 4, [call] * 4, batch) == [0, 1]
