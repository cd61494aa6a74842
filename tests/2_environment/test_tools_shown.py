"How an observation is written and cut: lines or JSON, a passage or all of it."
import pytest

from credit_rl.demonstrations import pages_shown
from credit_rl.environment import Conversation, make_environment
from credit_rl.evaluate import _observation_style
from credit_rl.parameters import from_settings
from credit_rl.tspo import first_occurrence
from credit_rl.protocol import byte_tokenizer
from credit_rl.readers import Passage
from credit_rl.retrieval import BM25
from credit_rl.tools import SearchTool, observation_of, read_observation, render_json, returned_texts
from credit_rl.trajectory import Result, Stop, Trajectory, Turn, example_group

PAGES = [Passage('0', 'Watchmen (film)', 'Watchmen is a 2009 film by "Zack" Snyder.\nÅkerman stars.'),
         Passage('1', 'Production of Watchmen', 'Production began in 2006.')]
SAID = ('{"result": "Doc 1 (Title: \\"Watchmen (film)\\")\\nWatchmen is a 2009 film by \\"Zack\\" Snyder.\\nÅkerman '
        'stars.\\n\\nDoc 2 (Title: \\"Production of Watchmen\\")\\nProduction began in 2006."}')


class Index:
    def search(self, queries, k): return [PAGES[:k] if 'w' in q else [] for q in queries]


def turn(text, returned=()):
    return Turn('tool', (), (), (0,), '', text, {'name': 'search', 'queries': ['w']}, Result.OK, None, returned)
WHOLE = tuple(x for page in PAGES[:2] for x in (page.title, page.text))


def test_json_is_that_of_the_papers_figure():
    said = SearchTool(Index(), 2, None, render=render_json).run(['w'])
    assert said == SAID and said.returned() == WHOLE
    shown = Trajectory(example_group().question, (), [turn(SAID)], Stop.LENGTH)
    assert pages_shown(shown) == [(page.title, page.text) for page in PAGES[:2]]                # as demonstrations read it


def test_what_is_ours_in_json_is_no_find():
    "Neither labels nor an n of a line break, whether the turn says what it was returned or not."
    lines = tuple(line for field in WHOLE for line in field.split('\n'))           # as far as the text alone tells
    for t, fields in ((turn(SAID, WHOLE), WHOLE), (turn(SAID), lines)):
        assert returned_texts(t) == fields == observation_of(t).returned()
        assert first_occurrence([' | '.join(returned_texts(t))], ['Title'], match_short=True) is None
    assert read_observation(SAID[:40]).returned() == ('Watchmen (fi',)


def test_all_of_an_observation_is_cut_where_that_is_set():
    "Search-R1's 500 tokens are of the observation, titles and numbers too; a passage's cap leaves three of them."
    long = [Passage(str(i), f'Page {i}', 'needle ' + 'word ' * 300) for i in range(3)]
    tokens = byte_tokenizer()
    def said(**how):
        env = make_environment(tokens, BM25(long), from_settings(Conversation, {'protocol': 'tspo', **how}))
        return env.tool.call([['needle']])[0][0]
    count = lambda text: len(tokens(text).input_ids)
    assert count(said(passage_tokens=500)) > 1500 and count(said(observation_tokens=500)) <= 500
    assert said(observation_tokens=500) == said()[:len(said(observation_tokens=500))]
    assert said(observation_tokens=500).returned()[0] == 'Page 0'
    with pytest.raises(ValueError, match='observation_tokens'):
        SearchTool(Index(), 1, None, observation_tokens=0)


def test_the_setting_reaches_the_tool_and_the_manifest():
    env = make_environment(byte_tokenizer(), Index(), Conversation(protocol='tips', observation={'format': 'json'}))
    assert env.tool.call([['w']])[0][0].startswith('{"result": "Doc 1 (Title: ')
    assert _observation_style(None, 'lines') == {}                                       # as in manifests of before
    assert _observation_style(5, 'json') == {'observation_format': 'json', 'observation_tokens': 5}
    with pytest.raises(ValueError, match='lines'): Conversation(observation={'format': 'xml'})
    with pytest.raises(ValueError, match='programs'):
        make_environment(byte_tokenizer(), Index(), Conversation(protocol='carl', observation={'format': 'json'}))
