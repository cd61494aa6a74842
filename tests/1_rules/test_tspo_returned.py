"""32_tspo: what a tool returned is evidence, and nothing else in an observation; golds that are no find; the quick
search for golds against the slow one."""
import dataclasses
import math
import re
import string
import unicodedata
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from credit_rl.diagnostics import error_category
from credit_rl.tspo import (chance_occurrence, evidence_golds, evidence_words, first_occurrence, first_turns,
                            gold_in_question)
from credit_rl.information_gain import shown_states
from credit_rl.methods import get_method
from credit_rl.metrics import normalize
from credit_rl.protocol import PROTOCOLS
from credit_rl.readers import BLANKLESS, marks
from credit_rl.tools import observation_of, render_json
from credit_rl.trajectory import Group, Question, Result, Trajectory, Turn, example_group, group_from_json, to_json
from credit_rl.turn_rewards import rule_turn_rewards
from credit_rl.warmup import gate_again, gold_shown, sign_pairs


QUERIES = ['Is it Lyon or Paris?', 'capital of France']
ECHO = f'Query: {QUERIES[0]}\nNo results.\n\nQuery: {QUERIES[1]}\nDoc 1 (Title: "France") A country in Europe.'
HIT = ECHO.replace('A country in Europe.', 'Its capital is Paris.')


def group(turns, golds=('Paris',), text='What is the capital of France?'):
    question = Question('q', text, list(golds))
    turns = [*turns, Turn('answer', [1], [-1.], [], '', '')]
    return Group(question, [Trajectory(question, [0], turns, 'answer', 'Rome')])


def turn(text, queries=QUERIES, result=Result.OK, **more):
    return Turn('tool', [1], [-1.], [2], '', text, {'name': 'search', 'queries': list(queries)}, result, **more)


def test_what_the_policy_or_we_wrote_is_no_find():
    "An echoed query, our labels and our words for nothing pay in no measure of a turn."
    for gold in ('Paris', 'Lyon', 'Doc', 'Title', 'Query', 'No results'):
        asked = group([turn(ECHO)], [gold])
        assert first_turns([asked]).tolist() == [-1] and not shown_states([asked]).any()
        assert rule_turn_rewards([asked])[0, 0].item() == pytest.approx(.1)
        assert error_category(asked.trajectories[0], PROTOCOLS['tspo']) == 'not found'
    for gold in ('Paris', 'France'):                                                # titles and texts are finds
        found = group([turn(HIT)], [gold])
        assert first_turns([found]).tolist() == [0] and shown_states([found]).tolist() == [[False, True]]
        assert rule_turn_rewards([found])[0, 0].item() == pytest.approx(.25)
        assert error_category(found.trajectories[0], PROTOCOLS['tspo']) == 'misread'
    told = turn("Error: there is no tool named 'Paris', only 'search'", result=Result.MALFORMED)
    failed = turn('Error: KeyError: Paris', result=Result.ERROR)
    assert first_turns([group([told, failed])]).tolist() == [-1]


def test_what_a_program_printed_is_a_find_and_its_error_is_none():
    code = {'name': 'python', 'code': 'print(search("Paris"))'}
    say = lambda text, result=Result.OK: dataclasses.replace(turn(text, result=result), call=code, kind='invoke')
    assert first_turns([group([say('Paris')])]).tolist() == [0]
    assert first_turns([group([say('Doc 1 (Title: "Paris") x')])]).tolist() == [0]
    assert first_turns([group([say("Error: NameError: name 'Paris' is not defined", Result.ERROR)])]).tolist() == [-1]
    assert first_turns([group([say('Error: the code ran too long\nParis', Result.TIMEOUT)])]).tolist() == [0]
    note = Turn('assimilate', [1], [-1.], [], '<context>Paris</context>', '')
    last = Turn('commit', [1], [-1.], [], '', '')
    said = lambda text: gold_shown(group([say(text), note, last]).trajectories[0])
    assert said('Paris') == [(1, True)] and said("Error: name 'Paris' is not defined") == []


def test_what_a_note_keeps_is_read_by_its_own_protocols_tag():
    own = dataclasses.replace(PROTOCOLS['carl'], context_tag='memory')
    found = dataclasses.replace(turn('Paris', result=Result.OK), kind='invoke', call={'name': 'python', 'code': 'search()'})
    note = Turn('assimilate', [1], [-1.], [], '<memory>Paris</memory>', '')
    played = [group([found, note])]
    values = torch.tensor([[.2, .3, .7]])
    assert sign_pairs(played, values, own)[:, 1].tolist() == [1.] and sign_pairs(played, values)[:, 1].tolist() == [0.]
    assert gate_again(played, [2], values, protocol=own).sign_accuracy == 1.


def test_what_is_stored_counts_before_what_can_be_read():
    "`returned` goes through JSON; a file from before has none, and is read; a field is searched by itself."
    whole = group([turn('text of another format', returned=['New', 'York City'])], ['New York'])
    again = group_from_json(to_json(whole))
    assert again == whole and again.trajectories[0].turns[0].returned == ('New', 'York City')
    assert first_turns([again]).tolist() == [-1]                                  # on no single field
    assert first_turns([group([turn('', returned=['x', 'In Paris.'])])]).tolist() == [0]
    old = to_json(group([turn(HIT)]))
    for t in old['trajectories']:
        for x in t['turns']: del x['returned']
    assert first_turns([group_from_json(old)]).tolist() == [0]
    assert first_occurrence([('New', 'York'), ('x', 'New York')], ['New York']) == 1


def test_years_and_letters():
    for text, gold, found in (('The war (1914-18) ended.', '1914', 0), ('On 2010-11-05.', '2010', None),
                              ('ab-1914-1918', '1914', None), ('Caf\u00e9 Flore', 'Cafe\u0301 Flore', 0)):
        assert first_occurrence([text], [gold]) == found, text


PIECES = ['a', 'an', 'the', 'The', 'new', 'New', 'york', 'us', '“', '”', '–', '-', '’', '.', ' ', ' ', '\n', '\xa0',
          '\u2003', '1914', '1918', '18', 'é', 'e\u0301', 'İ', '_', '\x00', '\x1c', "'s", 'क', 'ं', '一', '𠀀']
TEXTS = st.lists(st.sampled_from(PIECES) | st.characters(), max_size=14).map(''.join)


@settings(max_examples=200)
@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=3))
def test_the_quick_search_is_the_slow_one(text, golds):
    nfc = lambda x: unicodedata.normalize('NFC', x)
    plain = nfc(nfc(text).lower().translate(str.maketrans('', '', string.punctuation)))
    no_mark = '' if plain.isascii() else f'(?![{marks()}])'          # an article under a mark is another letter
    assert normalize(text) == ' '.join(re.sub(rf'\b(?:a|an|the)\b{no_mark}', ' ', plain).split())
    border = lambda letter: '' if re.match(f'[{BLANKLESS}]', letter) else ' '        # such scripts show no borders
    slow = any(f'{border(g[0])}{g}{border(g[-1])}' in f' {evidence_words(text)} ' for g in evidence_golds(golds, True))
    assert (first_occurrence([text], golds, True) == 0) == slow


def test_shares_of_nothing_are_nan():
    assert all(map(math.isnan, (gold_in_question([Question('q', 'Yes?', ['yes'])]), gold_in_question([]))))
    assert math.isnan(chance_occurrence([group([turn(HIT)])]))


def test_unseen_is_an_option_of_folr():
    g = example_group()
    asked = dataclasses.replace(g.question, text='Was he born in Budapest?')
    wrong = Group(asked, [dataclasses.replace(t, question=asked) for t in g.trajectories[1:]])
    for unseen, paid in ((False, 2.), (True, 0.)):
        method = get_method('tspo').bind({'unseen': unseen})
        assert method.text_rewards([wrong])['turns'].sum().item() == paid


def test_a_field_inside_json_is_searched_as_it_was_and_a_cut_label_is_ours():
    "A tab or a line break hides no gold; however short an observation is cut, our words are no find."
    page = SimpleNamespace(title='A "b"', text='Seat:\tParis\nin New\nYork')
    whole = render_json([('q', [page] * 2)], 'none')
    assert whole.returned() == (page.title, page.text) * 2 and str(page.text) not in whole
    asked = group([turn(str(whole), returned=whole.returned())], ['New York'])
    assert first_turns([asked]).tolist() == first_turns([group([turn(str(whole))], ['Paris'])]).tolist() == [0]
    assert len(observation_of(asked.trajectories[0].turns[0]).spans) == 4
    for n in range(len(whole[:whole.index('Doc')]), len(whole)):
        for gold in ('Doc', 'Title', 'result'):
            assert first_turns([group([turn(whole[:n])], [gold])]).tolist() == [-1], whole[:n]
    assert whole.first(whole.index('Paris') - 1).returned() == (page.title, 'Seat:')    # in the middle of an escape
