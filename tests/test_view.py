"""A rollout as HTML: nothing in its texts can become HTML, nothing is lost, and a browser lays it out as it should."""
import dataclasses
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from hypothesis import given, strategies as st

from credit_rl.metrics import normalize
from credit_rl.trajectory import Group, Question, Result, Stop, Trajectory, Turn, example_group
from credit_rl.view import gold_spans, show_group, show_rollout, telling_group

NAN = float('nan')
ATTACKS = [
    '<script>document.title="broken"</script>', '<img src=x onerror="document.title=\'broken\'">',
    '</div></section></style>', '"><b onmouseover=alert(1)>', '&lt;script&gt;', '<!-- x', '$x^2$ and $y$',
    '</details><mark>', '<tool_call> { </tool_call>'
]


def attempt(action='<think> a </think> <answer> b </answer>', observation='', answer='b', golds=('Budapest', ),
            text='Where?', stop='answer'):
    "A rollout of one turn with the given texts."
    question = Question('q', text, golds)
    return Trajectory(question, [0], [Turn('answer', [1, 2], [-.1, -.2], [3], action, observation, result=Result.OK)],
                      stop, answer)


class Reader(HTMLParser):
    "The tags and the text of a page as a browser would see them; `style` apart."
    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags, self.texts, self.open = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open.append(tag)
        assert not [name for name, _ in attrs if name.startswith('on')]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if 'style' not in self.open:
            self.texts.append(data)

    @property
    def text(self):
        return ''.join(self.texts)


OURS = {'div', 'span', 'section', 'style', 'b', 'i', 'mark', 'details', 'summary'}


def read(view):
    page = Reader(view.html)
    assert set(page.tags) <= OURS and not page.open
    return page.text


@pytest.mark.parametrize('attack', ATTACKS)
def test_every_text_is_shown_and_none_becomes_html(attack):
    for t in (attempt(action=attack), attempt(observation=attack), attempt(observation=attack + ' word' * 200),
              attempt(answer=attack), attempt(golds=[attack]), attempt(text=attack)):
        assert attack in read(show_rollout(t, [0.5]))
    assert attack in read(show_rollout(attempt(), title=attack))


@given(st.text(st.sampled_from('<>/&"\' ab_tool'), max_size=60), st.text(max_size=60))
def test_any_text_is_shown_whole(action, observation):
    turn = dataclasses.replace(attempt().turns[0], action_text=action, observation_text=observation)
    t = dataclasses.replace(attempt(), turns=[turn])
    text = read(show_rollout(t, [1.0]))
    for said in (action.strip(), observation):
        assert re.sub(r'\s', '', said) in re.sub(r'\s', '', text)


def test_tags_stay_readable():
    text = read(show_group(example_group()))
    for t in example_group().trajectories:
        for turn in t.turns:
            assert turn.action_text in text and turn.observation_text in text


def test_missing_and_zero_advantages_are_told_apart():
    t = example_group().trajectories[1]
    shown = show_rollout(t, [NAN, 0.0, -0.0, None])
    assert read(shown).count('missing') == 3 and 'nothing here is learned from' in read(shown)  # the legend says it too
    assert 'nan' not in re.sub(r'<style>.*?</style>', '', shown.html, flags=re.S).lower()
    assert 'inf' not in read(show_rollout(t, [1.0, float('inf'), 0, 0])).replace('+inf', '')


def test_what_was_measured_stands_under_its_turn():
    found = {'turn_rewards': [.5], 'values': [.25], 'belief': [.125, NAN], 'potential': [-2., -1.], 'step': 3}
    assert 'reward 0.5 · V 0.25 · belief 0.125 → missing · Φ -2 → -1' in read(show_rollout(attempt(), measured=found))
    with pytest.raises(ValueError, match='given 1 numbers as its belief; wanted 2'):
        show_rollout(attempt(), measured={'belief': [.1]})


def test_no_answer_no_golds_and_no_text():
    assert 'no answer' in read(show_rollout(attempt(answer=None, stop='turn_cap')))
    assert 'turn_cap' in read(show_rollout(attempt(stop='turn_cap')))
    assert 'gold: none' in read(show_rollout(attempt(golds=[])))
    assert read(show_rollout(attempt(action='', observation='', answer='')))


def test_rollouts_of_different_lengths_stand_in_one_grid():
    group = example_group()
    short = dataclasses.replace(group.trajectories[0], turns=group.trajectories[0].turns[:2], stop=Stop.LENGTH,
                                answer=None)
    shown = show_group(Group(group.question, [short, *group.trajectories[1:]]),
                       [[1, 1, 0, 0], [1, 1, NAN, NAN], [0] * 4])
    sections = re.findall(r'<section>(.*?)</section>', shown.html, re.S)
    assert [s.count('class="crl-turn"') for s in sections] == [2, 4, 4]
    with pytest.raises(ValueError, match='2 turns'):
        show_group(Group(group.question, [short]), [[1, 1, 1, 0]])


WORDS = ['Rome', 'romeo', 'the', 'New', 'York,', '"New', "York's", 'a', 'U.S.', '—', 'yes', 'foo-the-bar']
words = st.lists(st.sampled_from(WORDS), max_size=8)


@given(words, st.lists(st.sampled_from(['Rome', 'New York', 'the New York', 'US', 'yes', 'York', 'a']), max_size=3))
def test_gold_spans_agree_with_first_occurrence(text, golds):
    from credit_rl.folr import first_occurrence
    text = ' '.join(text)
    spans = gold_spans(text, golds)
    assert bool(spans) == (first_occurrence([text], golds) == 0)
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
    assert all(normalize(text[a:b]) for a, b in spans)


def test_in_a_browser(tmp_path):
    browser = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
    if browser is None:
        pytest.skip('no chromium or google-chrome is installed: the layout is not looked at')
    group = example_group()
    mean = dataclasses.replace(group.trajectories[1].turns[1], observation_text=' '.join(ATTACKS) + ' Budapest')
    lost = dataclasses.replace(group.trajectories[1], turns=[group.trajectories[1].turns[0], mean])
    page = show_group(Group(group.question, [group.trajectories[0], lost]),
                      [[1, -1, 0.5, 0], [0, -1, 0, 0]]).save(tmp_path / 'view.html')
    measure = """<script>document.title = document.title + JSON.stringify({
        cards: [...document.querySelectorAll('.crl-turn')].map(e => {
            const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.height]; }),
        stripes: [...document.querySelectorAll('.crl-turn')].map(e => getComputedStyle(e).borderLeftColor),
        marks: document.querySelectorAll('.crl-seen mark').length,
        wide: document.documentElement.scrollWidth})</script>"""
    page.write_text(page.read_text() + measure)
    done = subprocess.run([
        browser, '--headless', '--no-sandbox', '--disable-gpu', '--disable-background-networking', '--disable-sync',
        '--no-first-run', f'--user-data-dir={tmp_path}/profile', '--window-size=1000,900', '--dump-dom',
        page.as_uri()
    ], capture_output=True, text=True, timeout=120)
    title = re.search(r'<title>group casablanca(.*?)</title>', done.stdout)
    assert title, f'the title was changed, or nothing was shown:\n{done.stdout[:300]}\n{done.stderr[-500:]}'
    seen = json.loads(html.unescape(title[1]))
    left, top, right, height = zip(*seen['cards'])
    # turn beside turn
    assert len(seen['cards']) == 6 and top[0] == top[4] and top[1] == top[5] and top[0] < top[1] < top[2]
    assert left[0] < right[0] <= left[4] and height[1] == height[5] and seen['wide'] <= 1000
    assert len(set(seen['stripes'])) == 4 and seen['stripes'][1] == seen['stripes'][5] and seen['marks'] >= 3


def test_it_reads_well_without_its_style():
    "JupyterLab strips the style of a notebook that it does not trust, but not the attributes."
    t = example_group().trajectories[1]
    plain = re.sub(r'<style>.*?</style>', '', show_rollout(t, [.71, 0., -.5, NAN]).html, flags=re.S)
    plain = re.sub(r' class="[^"]*"', '', plain)
    text = Reader(plain).text
    for said in ('turn 0 · tool ok advantage  +0.71', 'advantage  0', 'advantage  −0.50', 'advantage  missing'):
        assert said in text, text
    numbers = re.findall(r'<b style="background-color:(rgba\([^)]*\))">', plain)
    assert len(numbers) == 4 and len(set(numbers)) == 3 and numbers[1] == numbers[3]        # blue, grey, orange, grey


def row(step, advantages, reward=0., question='q', kind='train'):
    return {'kind': kind, 'step': step, 'reward': reward, 'advantages': advantages,
            'trajectory': {'question': {'id': question}}}


def test_the_rollouts_that_are_shown_have_credit():
    differ, same = [row(3, [.5, -.5]), row(3, [-.1, -.1], 1.)], [row(4, [1., 1.], 1.), row(4, [-1., -1.])]
    grey, missing = [row(5, [0., 0.], 1.), row(5, [0., 0.], 1.)], [row(6, [None, NAN]), row(6, None)]
    after = [row(7, None, kind='after')]
    assert telling_group(differ + same + grey + missing + after) == differ[::-1]
    assert telling_group(same + grey + missing + after) == same
    assert telling_group(grey + after) == grey and telling_group(after) == []
    two = [row(3, [.5, -.5], question='a'), row(3, [.2, .2], question='b')]
    assert telling_group(two) == two[:1]                          # of one question, not of all of a step
