"""Rollouts as others write them: marks of templates, calls in every form, scores that are none. All are read."""
import json
import math
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_rl.command import main
from credit_rl.dumps import dump_credit, dump_recording, read_dump, view_main
from credit_rl.tiny import tiny_tokenizer
from credit_rl.trajectory import Result, Stop

CALL = '<tool_call>{"name": "search", "arguments": {"query_list": ["%s"]}}</tool_call>'
SEEN, DONE = '<tool_response>\np\n</tool_response>', '<answer>x</answer>'
GOLD = {'ground_truth': ['x']}


def only(row, protocol='tspo'):
    dump = read_dump([{**row, **GOLD}], protocol)
    return dump.groups[0].trajectories[0], dump.rewards[0].item()


def talk(*messages): return {'messages': [{'role': 'user', 'content': 'Q?'}, *messages]}


def said(content, **more): return {'role': 'assistant', 'content': content, **more}


MARKED = {
    'ChatML': ('<|im_end|>\n<|im_start|>user\n', '<|im_end|>\n<|im_start|>assistant\n', '<|im_end|>'),
    'a tool role': ('<|im_end|>\n<|im_start|>tool\n', '<|im_end|>\n<|im_start|>assistant\n', '<|im_end|>\n'),
    'headers': ('<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n',
                '<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n', '<|eot_id|>'),
    'Mistral': ('</s>[TOOL_RESULTS]', '[/TOOL_RESULTS]', '</s>'),
    'Gemma': ('<end_of_turn>\n<start_of_turn>user\n', '<end_of_turn>\n<start_of_turn>model\n', '<end_of_turn>\n<eos>'),
    'wide bars': ('<｜end▁of▁sentence｜><｜User｜>', '<｜Assistant｜>', '<｜end▁of▁sentence｜>'),
    'an environment': ('<|im_end|>\n<|im_start|>environment\n', '<|im_end|>\n<|im_start|>assistant\n', '<|im_end|>'),
    'roles alone': ('\nuser\n', '\nassistant\n', ''), 'blanks': ('\n', '\n\n', ''), 'nothing': ('', '', '')}


@pytest.mark.parametrize('marks', MARKED)
@pytest.mark.parametrize('apart', [True, False])
@pytest.mark.parametrize('protocol, call, block', [
    ('tspo', CALL % 'a', 'tool_response'), ('search-r1', '<search>a</search>', 'information')])
def test_adjacent_results_are_one_turns_whatever_the_template_left_between(marks, apart, protocol, call, block):
    "Two results in a message, or in a message each: one turn, none invented, none without its call."
    before, after, end = MARKED[marks]
    seen = f'<{block}>\np\n</{block}>'
    text = call + before + seen + (before if apart else '\n') + seen + after + DONE + end
    t, _ = only({'input': 'Q?', 'output': text}, protocol)
    assert [(turn.kind, turn.result, turn.observation_text) for turn in t.turns] == [
        ('tool', Result.OK, 'p\np'), ('answer', Result.NONE, '')]
    assert [turn.action_text for turn in t.turns] == [call, DONE] and t.answer == 'x'
    assert len(only({'input': 'Q?', 'output': f'<{block}>given</{block}>{text}'}, protocol)[0].turns) == 2


def test_what_a_model_wrote_between_marks_is_kept():
    t, _ = only({'input': 'Q?', 'output': 'I use <|x|> here. ' + CALL % 'a' + SEEN + '<answer>a <|x|> b</answer>'})
    assert '<|x|>' in t.turns[0].action_text and t.answer == 'a <|x|> b'


@pytest.mark.parametrize('text', ['', ' \n', None, '<|im_end|>'])
def test_a_rollout_that_says_nothing_is_one_turn_without_an_answer(text):
    t, _ = only({'input': 'Q?', 'output': text})
    assert len(t.turns) == 1 and t.stop is Stop.NO_ANSWER and t.answer is None


FUNCTION = {'name': 'search', 'arguments': '{"query_list": ["a", "b"]}'}
ONE, OPEN = {'name': 'search', 'arguments': {'query': 'a'}}, {'name': 'open', 'arguments': {'page': 3}}
BROKEN, BOTH = {'name': 'search', 'arguments': '{"query": '}, {'name': 'search', 'queries': ['a', 'b']}


@pytest.mark.parametrize('given, call', [
    ({'tool_calls': [{'function': FUNCTION}]}, BOTH), ({'tool_calls': json.dumps([{'function': FUNCTION}])}, BOTH),
    ({'tool_calls': {'function': FUNCTION}}, BOTH), ({'tool_calls': FUNCTION}, BOTH),
    ({'function_call': FUNCTION}, BOTH), ({'function_call': json.dumps(FUNCTION)}, BOTH),
    ({'tool_calls': [ONE, {'function': {**FUNCTION, 'arguments': '{"query": "b"}'}}]}, BOTH),
    ({'tool_calls': [ONE, {'function': BROKEN}]}, {'name': 'search', 'queries': ['a']}),
    ({'tool_calls': [ONE, OPEN]}, {'name': 'search', 'queries': ['a', '3'], 'calls': [
        {'name': 'search', 'queries': ['a']}, {'name': 'open', 'queries': ['3']}]})])
def test_calls_are_read_in_every_form_that_is_about(given, call):
    t, _ = only(talk(said(None, **given), {'role': 'tool', 'content': 'p'}, said(DONE)))
    assert t.turns[0].call == call and t.turns[0].result is Result.OK and len(t.turns) == 2


@pytest.mark.parametrize('given', [
    {'tool_calls': 'no JSON'}, {'tool_calls': '[' * 60_000}, {'tool_calls': [None]}, {'tool_calls': [5]},
    {'tool_calls': [{}]}, {'tool_calls': ['search']}, {'tool_calls': [{'function': BROKEN}]}, {'function_call': '{"na'},
    *({'tool_calls': [{'function': {'name': 'search', 'arguments': given}}]}
      for given in ('[1]', 7, {'query': None}, json.dumps('{"query": "a"}'), '[' * 60_000, '9' * 5_000)),
    {'tool_calls': [{'function': {'name': ['search'], 'arguments': '{"query": "a"}'}}]},
    {'tool_calls': [{'function': {'name': 7, 'arguments': {'query': 'a'}}}]},
    {'tool_calls': [{'function': {'name': 'search', 'arguments': '{"query": "\\ud83d"}'}}]},
    {'tool_calls': [{'function': {'name': 'search', 'arguments': '{"query": ' + '9' * 5_000 + '}'}}]}])
def test_a_call_that_cannot_be_read_is_a_malformed_turn(given):
    "The file is read; the turn counts as one, as it does in our own rollouts."
    for found in ('p', ''):
        t, _ = only(talk(said('', **given), {'role': 'tool', 'content': found}, said(DONE)))
        assert t.turns[0].call is None and t.turns[0].result is Result.MALFORMED and t.turns[0].kind == 'tool'
        assert t.answer == 'x'


@pytest.mark.parametrize('text, queries', [
    (CALL % 'a' + CALL % 'b', ['a', 'b']), (CALL % 'a' + ' and then ' + CALL % 'b', ['a', 'b']),
    ('First ' + CALL % 'a' + '\nI also want\n' + CALL % 'b' + '\n' + CALL % 'c', ['a', 'b', 'c']),
    ('<think>say ' + CALL % 'no' + '?</think>' + CALL % 'a', ['a']),            # a thought is no call
    ('<tool_call>{bad</tool_call>' + CALL % 'a', ['a'])])
def test_all_calls_of_a_message_are_kept_in_their_order(text, queries):
    t, _ = only(talk(said(text), {'role': 'tool', 'content': 'p'}, said(DONE)))
    assert t.turns[0].call['queries'] == queries


def test_calls_and_parts_of_a_message_in_other_words():
    "Search-R1's two calls in a text; and a call in a message that comes in parts, some of them null."
    t, _ = only(talk(said('I look. <search>one</search>\n<search>two</search>'), said(DONE)), 'search-r1')
    assert t.turns[0].call == {'name': 'search', 'queries': ['one', 'two']}
    parts = [{'type': 'text', 'text': '<search>one</search>'}, {'text': None}, ' ']
    assert only(talk(said(parts), said(DONE)), 'search-r1')[0].turns[0].call['queries'] == ['one']


@pytest.mark.parametrize('score, wanted', [(None, None), ('', None), ('null', None), ('None', None), (' NaN ', None),
                                           ('N/A', None), ('<NA>', None), (float('nan'), None),
                                           ('1.5', 1.5), (True, 1.), (0, 0.), (-2.5, -2.5)])
def test_a_score_is_a_number_or_missing(score, wanted):
    for given in ({'score': score}, {'reward': score}, {'reward': None, 'score': score}):
        found = only({'input': 'Q?', 'output': DONE, **given})[1]
        assert found != found if wanted is None else found == wanted


@pytest.mark.parametrize('content, text', [
    ({'result': ['é']}, '{"result": ["é"]}'), (5, '5'), (None, ''), ([{'type': 'text', 'text': 'a'}, 'b', None], 'ab'),
    ([{'type': 'image'}, {'text': 'c'}, {'page': 1}], 'c{"page": 1}')])
def test_what_a_tool_said_is_kept_in_whatever_form(content, text):
    t, _ = only(talk(said(CALL % 'a'), {'role': 'tool', 'content': content}, said(DONE)))
    assert t.turns[0].observation_text == text and t.answer == 'x'


def test_marks_in_a_message_are_no_part_of_it():
    t, _ = only(talk(said(CALL % 'a' + '<|im_end|>'), {'role': 'tool', 'content': 'p'}, said(DONE + '</s>')))
    assert t.turns[0].call['queries'] == ['a'] and t.answer == 'x' and t.turns[1].action_text == DONE


@pytest.mark.parametrize('golds', [
    {'answers': ['x', None]}, {'answers': [None], 'target': ['x']}, {'answer': {'target': ['x']}},
    {'answer': float('nan'), 'gts': 'x'}, {'answer': ' ', 'ground_truth': {'target': 'x'}}])
def test_an_answer_that_is_null_is_none(golds):
    dump = read_dump([{'input': 'Q?', 'output': DONE, **golds}], 'tspo')
    assert dump.groups[0].question.answers == ('x',)


@pytest.mark.parametrize('golds', [{'answers': [None]}, {'answer': float('nan')}, {'ground_truth': {'target': []}},
                                   {'answer': ''}])
def test_a_row_whose_answers_are_all_null_is_refused(golds):
    row = {'input': 'Q?', 'output': DONE, **golds}
    with pytest.raises(ValueError, match='accepted'): read_dump([row])


def test_groups_that_are_null_are_told_apart_by_their_questions():
    rows = [{'uid': float('nan'), 'input': q, 'output': DONE, 'answers': [q]} for q in 'ab']
    assert [g.question.id for g in read_dump(rows).groups] == ['a', 'b']


@pytest.mark.parametrize('none', [None, [], '', 'null', 'None', float('nan')])
def test_tool_calls_that_say_there_are_none_are_no_broken_call(none):
    t, _ = only(talk(said('<answer>x</answer>', tool_calls=none)))
    assert [(turn.kind, turn.result) for turn in t.turns] == [('answer', Result.NONE)]


Q, LOOK = {'role': 'user', 'content': 'Q?'}, [said('<search>a</search>'), {'role': 'tool', 'content': 'p'}, said(DONE)]
WHOLE = {'messages': [Q, *LOOK], **GOLD}


@pytest.mark.parametrize('row, reward', [
    ({'prompt': [Q], 'completion': LOOK, 'step': 1, 'accuracy_reward': 1.}, None),                          # TRL's
    ({'example_id': 3, 'prompt': [Q], 'completion': LOOK, 'answer': 'x', 'reward': 1.}, 1.),                # prime-rl's
    ({'prompt': [{**Q, 'content': 'Like?'}, said('<answer>y</answer>'), Q], 'completion': LOOK}, None),  # an example
    ({'prompt': 'Q?', 'answer': 'x', 'completion': '<search>a</search><information>p</information>' + DONE}, None)])
def test_the_layouts_of_trainers_become_groups(row, reward):
    t, found = only(row, 'search-r1')
    assert t.turns[0].call == {'name': 'search', 'queries': ['a']} and (t.question.text, t.answer) == ('Q?', 'x')
    assert [turn.observation_text for turn in t.turns] == ['p', ''] and t.stop == Stop.ANSWER
    assert found != found if reward is None else found == reward


@pytest.mark.parametrize('row, words', [
    ({'text': 'x', **GOLD}, 'columns'), ({'messages': [Q, *LOOK]}, 'answers='), ({'messages': LOOK, **GOLD}, 'user'),
    ({'messages': 'Who?', **GOLD}, 'dict'), ({**WHOLE, 'ground_truth': ['y']}, 'row 1'),
    ({'prompt_ids': [1], 'completion_ids': [2], 'completion_mask': [1], **GOLD}, 'token'),
    ({**WHOLE, 'reward': 'good'}, 'convert'), ({**WHOLE, 'reward': [1.]}, 'number')])
def test_bad_rows_are_refused_by_their_number(row, words):
    with pytest.raises(ValueError, match=f'row 2: .*{words}'): read_dump([WHOLE, row], 'search-r1')


@pytest.mark.parametrize('text, words', [(json.dumps(WHOLE) + '\n{"messages": \n', 'line'), ('[1]\n', 'object'),
                                         ('', 'rollouts')])
def test_bad_lines_and_empty_files_are_refused(tmp_path, text, words):
    (tmp_path / 'dump.jsonl').write_text(text)
    with pytest.raises(ValueError, match=words): read_dump(tmp_path / 'dump.jsonl', 'search-r1')


def test_answers_can_be_handed_over_and_steps_keep_groups_apart():
    rows = [{'messages': [Q, *LOOK], 'step': step} for step in (1, 1, 2, math.nan, math.nan)]
    assert [len(g.trajectories) for g in read_dump(rows, 'search-r1', answers={'Q?': ['x']}).groups] == [2, 1, 2]
    assert read_dump(rows, Path('search-r1'), answers={'Q?': 1969.}).groups[0].question.answers == ('1969',)


# ---- values of other kinds, files of other kinds ----

ROW = {'input': 'Q?', 'output': DONE, 'score': 1.}
KEPT = [lambda g: g, np.array, lambda g: np.array(g, dtype=object), tuple, pd.array, pd.Series, json.dumps, repr,
        '<|answer_split|>'.join, lambda g: {'target': g}, lambda g: {'target': np.array(g)},
        lambda g: json.dumps({'target': g}), lambda g: [np.str_(x) for x in g], lambda g: [*g, None, pd.NA],
        lambda g: str(np.array(g)), lambda g: f'[{" ".join(map(repr, g))}]']


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text('abC é0.', min_size=1, max_size=6).map(str.strip).filter(bool), min_size=1, max_size=3,
                unique=True), st.sampled_from(KEPT), st.sampled_from(['answers', 'ground_truth', 'reward_model']))
def test_golds_in_whatever_they_are_kept_are_these_golds_or_refused(golds, keep, name):
    "An array, a JSON text, verl's separator: never one false gold, by which every rule gives 0."
    row = {**ROW, name: {'ground_truth': keep(golds)} if name == 'reward_model' else keep(golds)}
    try: dump = read_dump([row], 'tspo')
    except ValueError as e: assert 'answers' in str(e) and len(golds) > 1
    else: assert dump.groups[0].question.answers == tuple(golds)


@pytest.mark.parametrize('score', [np.float32(.5), np.float64(.5), np.array(.5), torch.tensor(.5), Decimal('.5'), '.5'])
def test_a_reward_of_any_kind_of_number_is_read(score):
    assert read_dump([{**ROW, 'answers': ['x'], 'score': score}]).rewards.tolist() == [.5]


@pytest.mark.parametrize('suffix', ['.jsonl', '.json', '.csv', '.tsv', '.parquet', '.jsonl.gz'])
def test_a_file_is_read_by_its_suffix_through_the_readers(tmp_path, suffix):
    rows, path = [{**ROW, 'answers': ['x', 'y']}, {**ROW, 'answers': ['x', 'y'], 'score': 0.}], tmp_path / f'd{suffix}'
    frame = pd.DataFrame(rows)
    if suffix == '.parquet': frame.to_parquet(path)
    elif suffix == '.json': frame.to_json(path, orient='records')
    elif 'jsonl' in suffix: frame.to_json(path, orient='records', lines=True)
    else: frame.to_csv(path, index=False, sep='\t' if suffix == '.tsv' else ',')
    for read in (read_dump(path), read_dump(str(path)), read_dump(frame)):
        assert read.groups[0].question.answers == ('x', 'y') and read.rewards.tolist() == [1., 0.]


def test_conversations_and_ids_in_a_table_are_read(tmp_path):
    said = [{'role': 'user', 'content': 'Q?'}, {'role': 'assistant', 'content': DONE}]
    pd.DataFrame([{'messages': json.dumps(said), 'answer': 'x', 'reward': 1}]).to_csv(tmp_path / 'd.csv', index=False)
    assert read_dump(tmp_path / 'd.csv').groups[0].trajectories[0].answer == 'x'
    frame = pd.DataFrame([{'messages': np.array(said, dtype=object), 'answer': np.array(['x']), 'uid': np.int64(3)}])
    assert read_dump(frame).groups[0].question.id == '3'
    with pytest.raises(ValueError, match='suffixes'): read_dump(tmp_path / 'd.log')
    ids = {'prompt_ids': [5], 'completion_ids': [5, 6, 7], 'completion_mask': [1] * 3, 'tool_mask': [1, 0, 1], **GOLD}
    t = read_dump([ids], tokenizer=tiny_tokenizer()).groups[0].trajectories[0]
    assert [turn.action_ids for turn in t.turns] == [(5,), (7,)]


# ---- formats of others ----

def atif_trajectory(answer, rewards):
    "One of ATIF's own models: a search, what it found, an answer; the steps' rewards in their `extra`."
    atif = pytest.importorskip('atif', reason='pip install credit_rl[dev]')
    found = atif.Observation(results=[atif.ObservationResult(source_call_id='1', content='It is x.')])
    call = atif.ToolCall(tool_call_id='1', function_name='search', arguments={'query': 'a'})
    steps = [atif.Step(step_id=1, source='user', message='Q?'),
             atif.Step(step_id=2, source='agent', message='', reasoning_content='look', tool_calls=[call],
                       observation=found, extra=rewards[0]),
             atif.Step(step_id=3, source='agent', message=f'<answer> {answer} </answer>', extra=rewards[1])]
    return atif.Trajectory(schema_version='ATIF-v1.8', agent=atif.Agent(name='a', version='1'), steps=steps,
                           extra={'answer': 'x', 'reward': float(answer == 'x')}).to_json_dict()


def test_trajectories_of_atif_are_read_with_what_their_steps_earned(tmp_path):
    rows = [atif_trajectory('x', [{'reward': .5}, None]), atif_trajectory('y', [{'reward': 1.}, {'reward': 0.}])]
    (tmp_path / 'rollouts.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    dump = read_dump(tmp_path / 'rollouts.jsonl')
    (group,) = dump.groups
    first, second = group.trajectories
    assert [turn.result for turn in first.turns] == [Result.OK, Result.NONE] and first.turns[0].call['queries'] == ['a']
    assert (first.answer, second.answer) == ('x', 'y') and dump.rewards.tolist() == [1., 0.]
    assert first.turns[0].observation_text == 'It is x.' and 'look' in first.turns[0].action_text
    assert dump.turns[1].tolist() == [1., 0.] and dump.turns[0, 0] == .5 and dump.turns[0, 1].isnan()


def test_a_forked_trace_is_its_last_branch_with_the_rewards_of_its_own_nodes():
    "The second attempt at the first call goes on; a demonstration in the prompt is no turn."
    def node(role, content, parent, sampled=False):
        return {'parent': parent, 'sampled': sampled, 'message': {'role': role, 'content': content}}
    nodes = [node('user', 'Q?', None), node('assistant', 'shown', 0), node('user', 'Q2?', 1),
             node('assistant', CALL % 'lost', 2, True), node('assistant', CALL % 'kept', 2, True),
             node('tool', 'p', 4), node('assistant', DONE, 5, True)]
    row = {'task': {'type': 'T', 'data': {'answer': 'x'}, 'hash': 'h'}, 'nodes': nodes,
           'info': {'turn_rewards': [1, 2, 3]}, 'rewards': {'a': {'score': 1., 'weight': .5}, 'b': None}}
    dump = read_dump([row])
    (t,) = dump.groups[0].trajectories
    assert t.question.text == 'Q2?' and t.question.id == 'h'
    assert [turn.call and turn.call['queries'] for turn in t.turns] == [['kept'], None]
    assert dump.turns.tolist() == [[2., 3.]] and dump.rewards.tolist() == [.5]
    with pytest.raises(ValueError, match='numbers'): read_dump([row | {'info': {'turn_rewards': [1, 2]}}])


@pytest.mark.parametrize('given', [{'turn_rewards': [.5, None]}, {'step_rewards': [.5, None]},
                                   {'info': {'turn_rewards': [.5, None]}}, {'metadata': {'turn_rewards': [.5, None]}}])
def test_turn_rewards_are_read_under_the_keys_that_others_use(given):
    row = talk(said(CALL % 'a'), {'role': 'tool', 'content': 'p'}, said(DONE)) | GOLD | {'reward': 1.}
    dump = read_dump([row | given, row | {'turn_rewards': math.nan}])
    assert dump.turns[0, 0] == .5 and dump.turns.isnan().sum() == 3
    with pytest.raises(ValueError, match='turns'): read_dump([row | {'turn_rewards': [1.]}])


def test_what_a_file_says_that_turns_earned_is_credited_by_the_formula():
    "Two wrong rollouts, of which one saw the answer in its first turn: TSPO gives ±1 to the first turns, by hand."
    row = talk(said(CALL % 'a'), {'role': 'tool', 'content': 'p'}, said(DONE)) | GOLD | {'reward': 0.}
    dump = read_dump([row | {'turn_rewards': [1., 0.]}, row | {'turn_rewards': [0., 0.]}])
    torch.testing.assert_close(dump_credit(dump, 'tspo'), torch.tensor([[1., 0.], [-1., 0.]]), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match='earned'): dump_credit(read_dump([row, row]), 'tspo')
    with pytest.raises(ValueError, match='reward'): dump_credit(read_dump([row | {'reward': None}] * 2), 'grpo')


# ---- credit without training: the command ----

def atif(reward, *earned):
    "A trajectory of ATIF that has no accepted answers."
    steps = [{'source': 'user', 'message': 'Mend it.'}] + [
        {'source': 'agent', 'message': f'step {k}', 'extra': {'reward': x},
         'observation': {'results': [{'content': 'ran'}]}} for k, x in enumerate(earned)]
    return {'schema_version': 'ATIF-v1.7', 'steps': steps, 'extra': {'reward': reward, 'group_id': 'mend'}}


def test_rollouts_without_golds_are_credited_by_what_they_earned(tmp_path, capsys):
    path = tmp_path / 'rollouts.jsonl'
    path.write_text('\n'.join(map(json.dumps, (atif(1., 0., 1.), atif(0., 0., 0.)))))
    main(['assign', str(path), 'igpo'])
    assert 'by what the file says' in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / 'rollouts.jsonl.igpo.jsonl').read_text().splitlines()]
    assert [row['row'] for row in rows] == [1, 2] and rows[0]['advantages'][1] > rows[1]['advantages'][1]
    torch.testing.assert_close(torch.tensor([row['advantages'] for row in rows]), dump_credit(read_dump(path), 'igpo'))
    for arguments in (['assign', str(path), 'gigpo'], ['assign', str(path), 'igpo', '--protocol', 'tipz']):
        with pytest.raises(SystemExit): main(arguments)
    assert 'golds' in capsys.readouterr().err


def test_a_page_of_a_file_shows_rewards_and_says_what_rules_lack(tmp_path):
    path = tmp_path / 'rollouts.jsonl'
    path.write_text('\n'.join(map(json.dumps, (atif(1., 0., 1.), atif(0., 0., 0.)))))
    main(['view', str(path), '--rules', 'grpo', 'tspo'])
    page = path.with_suffix('.html').read_text()
    assert '"earned":[0.0,1.0]' in page and page.count('needs accepted answers') >= 2
    path.write_text(json.dumps({'input': 'Q?', 'output': CALL % 'a' + SEEN + DONE, 'gts': ['x'], 'score': 1.}) + '\n' +
                    json.dumps({'input': 'Q?', 'output': CALL % 'b' + SEEN, 'gts': ['x'], 'score': 0.}))
    main(['view', str(path), '--rules', 'grpo'])
    page = path.with_suffix('.html').read_text()
    assert 'needs accepted answers' not in page and '"credit":[[1.0,1.0]]' in page


def test_the_newest_of_a_file_are_shown_and_thoughts_apart_are_read(tmp_path):
    said = [{'role': 'user', 'content': 'Where?'}, {'role': 'assistant', 'content': '<answer> Rome </answer>', 'reasoning_content': 'so'}]
    (tmp_path / 'r.jsonl').write_text(''.join(
        json.dumps({'messages': said, 'answer': 'Rome', 'reward': 1., 'group_id': i // 2}) + '\n' for i in range(10)))
    dump = read_dump(str(tmp_path / 'r.jsonl'))
    assert {t.turns[0].action_text for g in dump.groups for t in g.trajectories} == {'<think> so </think> <answer> Rome </answer>'}
    for most, kept in ((5, 4), (1, 2), (None, 10)):
        found = dump_recording(dump, 'r.jsonl', most)
        assert (found.rollouts, found.left_out) == (kept, 10 - kept)
    view_main([str(tmp_path / 'r.jsonl'), '--most', '4'])
    assert '6 older rollouts' in (tmp_path / 'r.html').read_text()


def test_an_audit_of_a_file_compares_rules_by_what_it_says(tmp_path, capsys):
    "A rule of turn rewards where the file has them, and none that reads golds where there are none."
    talks = [talk(said(CALL % q), {'role': 'tool', 'content': 'p'}, said(DONE)) | {'reward': float(q == 'a')} for q in 'abc']
    for turns, there in ((None, False), ([1., 0.], True)):
        rows = [row | ({'turn_rewards': turns} if turns else {}) | {'group_id': 'g'} for row in talks]
        (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
        assert not main(['audit', str(tmp_path / 'rows.jsonl')])
        out = capsys.readouterr().out
        assert '1 questions, 3 rollouts' in out and '\ngrpo ' in out and ('\nmt-grpo* ' in out) == there
