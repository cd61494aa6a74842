"""A rollout as HTML: nothing in its texts can become HTML, nothing is lost, and a browser lays it out as it should."""
import dataclasses
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import nbformat
import pytest
from browser import Tab, find_browser, open_lab, open_tab, targets
from hypothesis import given, settings, strategies as st
from nbformat.v4 import new_code_cell, new_notebook, new_output

from credit_rl.metrics import normalize
from credit_rl.recorded import read_recording
from credit_rl.runlog import RunLog
from credit_rl.trajectory import Group, Question, Result, Stop, Trajectory, Turn, example_group, to_json
from credit_rl.view import _first, gold_spans, main, show_group, show_rollout, show_run, telling_group

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


@settings(deadline=None)
@given(st.text(st.sampled_from('<>/&"\' ab_tool'), max_size=60), st.text(max_size=60))
def test_any_text_is_shown_whole(action, observation):
    turn = dataclasses.replace(attempt().turns[0], action_text=action, observation_text=observation)
    t = dataclasses.replace(attempt(), turns=[turn])
    text = read(show_rollout(t, [1.0]))
    for said in (action.strip(), observation):
        assert re.sub(r'\s', '', said) in re.sub(r'\s', '', text)


def test_no_answer_no_golds_and_no_text():
    assert 'no answer' in read(show_rollout(attempt(answer=None, stop='turn_cap')))
    assert 'turn_cap' in read(show_rollout(attempt(stop='turn_cap')))
    assert 'gold: none' in read(show_rollout(attempt(golds=[])))
    assert read(show_rollout(attempt(action='', observation='', answer='')))


WORDS = ['Rome', 'romeo', 'the', 'New', 'York,', '"New', "York's", 'a', 'U.S.', '—', 'yes', 'foo-the-bar']
words = st.lists(st.sampled_from(WORDS), max_size=8)


@settings(deadline=None)
@given(words, st.lists(st.sampled_from(['Rome', 'New York', 'the New York', 'US', 'yes', 'York', 'a']), max_size=3))
def test_gold_spans_agree_with_first_occurrence(text, golds):
    from credit_rl.tspo import first_occurrence
    text = ' '.join(text)
    spans = gold_spans(text, golds)
    assert bool(spans) == (first_occurrence([text], golds) == 0)
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
    assert all(normalize(text[a:b]) for a, b in spans)


def test_in_a_browser(tmp_path):
    group = example_group()
    mean = dataclasses.replace(group.trajectories[1].turns[1], observation_text=' '.join(ATTACKS) + ' Budapest')
    lost = dataclasses.replace(group.trajectories[1], turns=[group.trajectories[1].turns[0], mean])
    page = show_group(Group(group.question, [group.trajectories[0], lost]),
                      [[1, -1, 0.5, 0], [0, -1, 0, 0]]).save(tmp_path / 'view.html')
    measure = """({title: document.title,
        cards: [...document.querySelectorAll('.crl-turn')].map(e => {
            const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.height]; }),
        stripes: [...document.querySelectorAll('.crl-turn')].map(e => getComputedStyle(e).borderLeftColor),
        marks: document.querySelectorAll('.crl-seen mark').length,
        wide: document.documentElement.scrollWidth})"""
    with open_tab(tmp_path) as tab:
        tab.size(1000, 900)
        tab.open(page.as_uri(), 'document.readyState === "complete" && document.querySelector(".crl-turn")')
        seen = tab.ask(measure)
    assert seen['title'] == 'group casablanca' and not tab.errors
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


def row(step, advantages, reward=0., kind='train'):
    return {'kind': kind, 'step': step, 'reward': reward, 'advantages': advantages, 'trajectory': {'question': {'id': 'q'}}}


def test_the_rollouts_that_are_shown_have_credit():
    differ, same = [row(3, [.5, -.5]), row(3, [-.1, -.1], 1.)], [row(4, [1., 1.], 1.), row(4, [-1., -1.])]
    grey, missing = [row(5, [0., 0.], 1.), row(5, [0., 0.], 1.)], [row(6, [None, NAN]), row(6, None)]
    after = [row(7, None, kind='after')]
    assert telling_group(same + grey + missing + after) == same and telling_group(after) == []
    rounded = [row(5, [.77459514, .77459508, .77459502], 1.), row(5, [-1.2909917, -1.2909916])]     # of one number
    assert telling_group(differ + rounded) == differ[::-1]


# ---- a whole run, on one page ----

TURNED = 'abc \u202e gold \u2066 txt \u200f'
HOSTILE = [*ATTACKS, '</script><script>document.title="broken"</script>', '\u2028\u2029\x00', TURNED]


def kept(folder, rows, **params):
    "A run's folder with rows of one step."
    log = RunLog(folder)
    if params: log.write_params(params)
    log.turns(1, rows)
    return folder


def kept_rows(trajectories, rewards, **more):
    return [{'kind': 'train', 'trajectory': to_json(t), 'reward': r, **{n: x[i] for n, x in more.items()}}
            for i, (t, r) in enumerate(zip(trajectories, rewards))]


def example_run(folder, **more):
    return kept(folder, kept_rows(example_group().trajectories, (1., 0., 0.), **more), method='tspo', group_size=3)


def page_json(page):
    "The data of a page, and its other text."
    before, data, after = re.fullmatch(r'(.*<script id="data" type="application/json">)(.*?)(</script>.*)', page,
                                       re.S).groups()
    assert '<' not in data
    return json.loads(data), before + after


def test_a_page_is_whole_and_nothing_in_it_is_fetched(tmp_path):
    belief = [[.1, .2, .8, .9, NAN]] * 3
    page = show_run(example_run(tmp_path / 'run', belief=belief, advantages=[[.5, -.5, 0., None]] * 3)).page
    data, rest = page_json(page)
    assert not re.search(r'(?:src|href)=(?!"data:,")|url\(|@import|https?://(?!www\.w3\.org/2000/svg)', rest)
    assert "default-src 'none'" in rest and rest.count('<script') == 2
    [group] = data['groups']
    assert group['hops'] == 2 and group['golds'] == ['Budapest']
    assert group['rollouts'][0]['credit'][0] == [.5, -.5, 0., None] and data['rules'][0]['name'] == 'as trained'
    assert group['rollouts'][0]['belief'] == [.1, .2, .8, .9, None]
    seen = [turn['seen'] for turn in group['rollouts'][0]['turns']]
    assert seen[1] == ['Michael Curtiz was a director born in ', 'Budapest', '. He made films in Vienna.']


def test_the_scale_of_bars_is_a_percentile_and_not_one_wild_value(tmp_path):
    "150 rollouts of 4 turns at ±1 and one turn at 500: its bar is cut, and all others can be seen."
    trajectories = [example_group().trajectories[0]] * 150
    advantages = [[500. if i == 0 else 1., -1., 1., -1.] for i in range(150)]
    folder = kept(tmp_path / 'run', kept_rows(trajectories, [1.] * 150, advantages=advantages))
    assert page_json(show_run(folder, ['grpo']).page)[0]['rules'][0]['limit'] == 1.


def test_long_texts_are_cut_and_say_so(tmp_path):
    t = attempt(observation='x' * 1_000_000 + ' Budapest')
    folder = kept(tmp_path / 'run', kept_rows([t], [0.]))
    page = show_run(folder, ['reinforce++']).page
    [turn] = page_json(page)[0]['groups'][0]['rollouts'][0]['turns']
    assert len(page) < 200_000 and turn['size'] == 1_000_009 and turn['more'] == 980_009 and turn['marks'] == 1
    whole = page_json(show_run(folder, ['reinforce++'], characters=2_000_000).page)[0]
    assert whole['groups'][0]['rollouts'][0]['turns'][0]['seen'][1] == 'Budapest'


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    folder = example_run(tmp_path / 'run')
    for wrong, said in (([str(tmp_path / 'none')], 'holds no turns.jsonl.gz'), ([str(folder), '--rules', 'grop'], 'grpo'),
                        ([str(folder), '--most', '0'], '--most'), ([str(folder), '--protocol', 'tips'], '--protocol')):
        with pytest.raises(SystemExit) as end: main(wrong)
        assert end.value.code == 1 and said in capsys.readouterr().err


DRAWN = 'document.documentElement.dataset.drawn === "yes"'


def hostile_run(folder):
    "A run in which every text is an attack, one with a million characters in one line among them."
    texts = [*HOSTILE, 'y' * 1_000_000]
    trajectories = [attempt(action=x, observation=x, answer=x, golds=[x], text=x) for x in texts]
    rows = [{**r, 'trajectory': {**r['trajectory'], 'question': {**r['trajectory']['question'], 'id': x}}}
            for x, r in zip(texts, kept_rows(trajectories, [0.] * len(texts)))]
    for r in rows: r['trajectory']['turns'][0] |= {'action_text': r['trajectory']['question']['text']}
    return kept(folder, rows)


def test_nothing_that_was_said_becomes_part_of_the_page(tmp_path):
    path = show_run(hostile_run(tmp_path / 'run'), ['reinforce++'], characters=2_000_000).save(tmp_path / 'view.html')
    with open_tab(tmp_path) as tab:
        tab.open(path.as_uri() + '#open=true', DRAWN)
        title = tab.ask('document.title')
        for i in range(len(HOSTILE) + 1):
            tab.ask(f'state.group = {i}; draw()')
            wanted = ('y' * 1_000_000) if i == len(HOSTILE) else HOSTILE[i]
            said = tab.ask('document.querySelector("#main .say").textContent')
            plain = re.sub('U\\+(20..)', lambda m: chr(int(m[1], 16)), said)
            squeezed = lambda text: re.sub(r'\s|\x00|\ufffd', '', text)
            assert squeezed(wanted) in squeezed(plain), (i, said[:80])
        assert tab.ask('document.title') == title and not tab.errors
        assert tab.ask('document.querySelectorAll("img, iframe, script:not(#data)").length') == 1
        assert tab.ask('document.scripts.length') == 2


def test_marks_of_direction_are_shown_by_number(tmp_path):
    path = show_run(hostile_run(tmp_path / 'run'), ['reinforce++']).save(tmp_path / 'view.html')
    with open_tab(tmp_path) as tab:
        tab.open(f'{path.as_uri()}#group={HOSTILE.index(TURNED)}', DRAWN)
        assert tab.ask('document.querySelector("h2").textContent') == 'abc U+202E gold U+2066 txt U+200F'
        assert not re.search('[\u202a-\u202e\u2066-\u2069]', tab.ask('document.body.innerText'))


def rich_run(folder):
    "Two groups of three rollouts, of 2 and 3 hops; one rollout was cut; belief, values and potentials."
    group, rows = example_group(), []
    for i, hops in enumerate((2, 3)):
        question = dataclasses.replace(group.question, id=f'q{hops}', meta={'hops': hops, 'tier': i + 1})
        played = [dataclasses.replace(t, question=question) for t in group.trajectories]
        if i: played[2] = dataclasses.replace(played[2], stop=Stop.LENGTH, answer=None)
        rows += kept_rows(played, (0., 1., .5), belief=[[.1, .2, .8, .9, NAN]] * 3, values=[[.1, .2, .3, .4]] * 3,
                          potential=[[-9., -5., -2., -1., NAN]] * 3,
                          advantages=[[1., -1., 1., -1.], [.5, .5, .5, .5], [-2., 2., -2., 2.]])
    return kept(folder, rows, method='igpo', group_size=3)


def test_a_page_is_sorted_filtered_and_driven_by_keys(tmp_path):
    path = show_run(rich_run(tmp_path / 'run'), ['grpo', 'igpo', 'ppo']).save(tmp_path / 'view.html')
    with open_tab(tmp_path) as tab:
        tab.size(1000, 800)
        tab.open(path.as_uri() + '#group=0', DRAWN)
        titles = lambda: tab.ask('[...document.querySelectorAll(".title > b")].map((e) => e.textContent)')
        hops = lambda: tab.ask('document.querySelector(".facts").textContent.match(/(.) hops/)[1]')
        assert titles() == ['rollout 0', 'rollout 1', 'rollout 2'] and hops() == '2'
        assert tab.ask('document.documentElement.scrollWidth') <= 1000
        tab.key('j')
        assert hops() == '3'
        tab.key('ArrowUp')
        assert hops() == '2'
        tab.key('s')                                                    # by reward
        assert titles() == ['rollout 1', 'rollout 2', 'rollout 0']
        tab.key('s')                                                    # by disagreement
        numbers = tab.ask('[...document.querySelectorAll("section")].map((s) => +s.querySelector('
                          '".number:last-child").textContent.split(" ")[1])')
        assert numbers == sorted(numbers, reverse=True) and numbers[0] > numbers[-1]
        tab.ask('$("stop").value = "length"; $("stop").dispatchEvent(new Event("change"))')
        assert titles() == ['rollout 2'] and hops() == '3' and '2 of 3 hidden' in tab.ask('document.body.innerText')
        tab.key('c')
        assert len(titles()) == 3 and tab.ask('document.querySelectorAll("#hops option").length') == 3
        tab.ask('$("tier").value = "1"; $("tier").dispatchEvent(new Event("change"))')
        assert hops() == '2' and tab.ask('document.querySelectorAll("#list button").length') == 1
        tab.key('l')
        assert tab.ask('[...document.querySelectorAll("section")].findIndex((s) => s.className === "here")') == 1
        tab.key('?')
        assert tab.ask('$("help").open')
        tab.key('?')
        bars = tab.ask('[...document.querySelectorAll(".rule > span:first-child")].map((e) => e.textContent)')
        assert set(bars) == {'as trained', 'grpo', 'igpo'}
        assert tab.ask('document.querySelector("[data-rule=\\"3\\"]").disabled')
        assert tab.ask('document.querySelectorAll(".trace circle").length') == 12         # 3 rollouts × 4 known states
        assert 'sort=disagreement' in tab.ask('location.hash') and not tab.errors


def test_500_rollouts_open(tmp_path):
    "No limit on time: that nothing hangs is what is tested."
    trajectories = example_group().trajectories
    log = RunLog(tmp_path / 'run')
    for step in range(167): log.turns(step, kept_rows(trajectories, (1., 0., 0.)))
    path = show_run(read_recording(tmp_path / 'run', None), ['grpo', 'tspo']).save(tmp_path / 'view.html')
    with open_tab(tmp_path) as tab:
        tab.open(path.as_uri(), DRAWN)
        assert '501 rollouts of 501, 167 groups' in tab.ask('document.body.innerText') and not tab.errors


def test_in_a_real_jupyterlab(tmp_path):
    "A trusted notebook shows the page in a frame, one that is not says why there is none; neither reports an error."
    find_browser()
    work = tmp_path / 'notebooks'
    work.mkdir()
    page = show_run(rich_run(tmp_path / 'run'), ['grpo', 'igpo'])
    said = new_output('execute_result', {'text/html': page._repr_html_(), 'text/plain': repr(page)}, execution_count=1)
    for name in ('trusted', 'plain'):
        cell = new_code_cell(f'{name} = page', execution_count=1, outputs=[said])
        nbformat.write(new_notebook(cells=[cell]), work / f'{name}.ipynb')
    output = 'document.querySelector(".jp-OutputArea-output")'
    with open_lab(work, tmp_path) as (url, env), open_tab(tmp_path) as tab:
        subprocess.run([sys.executable, '-m', 'jupyter', 'trust', str(work / 'trusted.ipynb')], env=env, check=True,
                       capture_output=True, timeout=120)
        tab.size(1000, 900)
        tab.open(f'{url}lab/tree/plain.ipynb?token=x&reset', output)
        assert tab.ask(f'{output}.innerText').startswith('run run: a notebook that is not trusted shows no pages')
        tab.open(f'{url}lab/tree/trusted.ipynb?token=x&reset', f'{output} && {output}.querySelector("iframe")')
        [frame] = [Tab(address, tab.seconds, tab.port) for address in targets(tab.port, 'iframe', tab.seconds)]
        frame.wait(DRAWN)
        assert frame.ask('document.querySelectorAll(".rule").length') == 3 * 4 * 3      # rollouts × turns × rules
        frame.key('s')
        assert frame.ask('document.querySelector(".title > b").textContent') == 'rollout 1' and not frame.errors
        frame.socket.close()
        assert not [e for e in tab.errors if 'beforeunload' not in e]    # Chromium's word on leaving a notebook


def test_the_page_opens_where_rules_disagree_most():
    "Each rule on its own scale: the second group, where one praises what the other blames."
    group = lambda *credit: {'rollouts': [{'credit': list(credit)}]}
    groups = [group([1., 1.], [2., 2.]), group([1., 1.], [-2., 2.]), group([1., 0.], [2., 0.])]
    assert _first(groups, {0: 1., 1: 2.}) == 1 and _first(groups, {0: 1.}) == 2
    assert _first([group([0., 0.], None), group([0., None], None)], {0: 1., 1: None}) == 0 and _first([], {}) == 0
