"""18_judge: a pool, a deadline, replies that are kept, and where a verdict is read. What a request may meet is in
test_turn_rewards."""
import gzip
import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from credit_rl.judge import Judge, make_judge, read_key, read_verdict
from credit_rl.prs import parse_grounded, parse_verdict
from credit_rl.turn_rewards import parse_ratings
from judge_server import Stub, counted, no_proxy  # noqa: F401

# replies of our own writing, by kind, each with its reading
REPLIES = [json.loads(line) for line in (Path(__file__).parents[1] / 'fixtures/judge_replies.jsonl').open(encoding='utf-8')]
READERS = {'reference': parse_verdict, 'grounded': parse_grounded, 'ratings': lambda reply: parse_ratings(reply, pairs=2)}
WORDS = {'yes': 1, 'no': 0}
MATCH, GROUNDED = dict(words={'match': 1}, plain=True), dict(words={'grounded': 1, 'invented': 0})


def asked(stub): return [r['messages'][-1]['content'] for r in stub.requests]


def test_equal_prompts_are_asked_once_and_the_file_answers_later(tmp_path):
    "In the same call, in a later one, and in another process, where the server may be gone; other settings ask anew."
    path = tmp_path / 'judge.jsonl.gz'
    with Stub(lambda prompt, attempt: f'said {prompt}') as stub:
        judge = stub.judge()
        judge.keep(path)
        assert judge.ask(['a', 'b', 'a'], str.upper) == ['SAID A', 'SAID B', 'SAID A']
        assert judge.ask(['b', 'c'], [len, str.upper]) == [6, 'SAID C'] and sorted(asked(stub)) == ['a', 'b', 'c']
        assert judge.counts == counted(5)
        other = stub.judge(options={'temperature': 1.})
        other.keep(path)
        assert other.ask(['a'], str.upper) == ['SAID A'] and len(stub.requests) == 4
        later = stub.judge(retries=0)
    later.keep(path)
    assert later.ask(['a', 'b', 'c', 'd'], str.upper) == ['SAID A', 'SAID B', 'SAID C', None]
    assert later.counts['failures'] == 1
    rows = [json.loads(line) for line in gzip.open(path, 'rt')]
    assert [(r['model'], r['messages'][0]['content'], r['reply']) for r in rows] == [
        ('stub', x, f'said {x}') for x in 'abca'] and len({r['key'] for r in rows}) == 4


def test_a_failure_is_not_kept_and_an_unreadable_reply_is_asked_for_again(tmp_path):
    "Once in the call, and once in each later one; also by another process, which finds it in the file."
    path, says = tmp_path / 'kept', ['mumble']
    with Stub(lambda prompt, attempt: 400 if prompt == 'bad' and attempt == 0 else says[0]) as stub:
        judge = stub.judge()
        judge.keep(path)
        assert judge.ask(['bad', 'bad', 'x', 'x'], WORDS.get) == [None] * 4
        assert judge.counts == counted(4, failures=2, unparsable=2) and asked(stub).count('x') == 2
        assert judge.ask(['bad', 'x'], len) == [6, 6] and asked(stub).count('x') == 2     # another parser reads it
        assert judge.ask(['x'], WORDS.get) == [None] and asked(stub).count('x') == 3
        says[0] = 'yes'
        later = stub.judge()
        later.keep(path)
        assert later.ask(['x', 'x'], WORDS.get) == [1, 1] and asked(stub).count('x') == 4
        assert later.counts == counted(2)
        last = stub.judge(retries=0)
    last.keep(path)
    assert last.ask(['x'], WORDS.get) == [1]


@pytest.mark.parametrize('text, finish, kind', [('yes', 'length', 'cut'), ('', 'length', 'cut'), (None, 'stop', 'empty'),
                                                (' \n', 'stop', 'empty'), ('mumble', 'stop', None)])
def test_what_could_not_be_read_is_counted_by_kind_and_never_final(text, finish, kind, tmp_path):
    "A cut-off reply is not read, whatever its beginning says; once the judge does better, its word counts."
    bad = {'choices': [{'message': {'role': 'assistant', 'content': text}, 'finish_reason': finish}]}
    with Stub(lambda prompt, attempt: bad if attempt < (2 if prompt == 'a' else 1) else 'no') as stub:
        judge = stub.judge()
        judge.keep(tmp_path / 'kept')
        assert judge.ask(['a'], WORDS.get) == [None] and len(stub.requests) == 2
        assert judge.counts == counted(1, unparsable=1, **{kind: 1} if kind else {})
        later = stub.judge()
        later.keep(tmp_path / 'kept')
        assert later.ask(['a'], WORDS.get) == [0] and len(stub.requests) == 3 and later.counts == counted(1)
        once = stub.judge()                                                      # one bad reply costs one more request
        assert once.ask(['b', 'c', 'b'], WORDS.get) == [0, 0, 0] and once.counts == counted(3)
        assert sorted(asked(stub)[3:]) == ['b', 'b', 'c', 'c']


def test_replies_of_a_judge_that_moved_are_read_though_they_were_kept_by_its_address(tmp_path):
    "As earlier versions wrote them: the key was made of the address, and no finish_reason was kept."
    row = {'key': '0' * 32, 'model': 'stub', 'messages': [{'role': 'user', 'content': 'a'}], 'reply': 'yes'}
    (tmp_path / 'kept').write_bytes(gzip.compress(json.dumps(row).encode() + b'\n'))
    moved = Judge('http://127.0.0.1:9/v1', 'stub', retries=0)
    moved.keep(tmp_path / 'kept')
    assert moved.ask(['a', 'b'], WORDS.get) == [1, None] and moved.counts == counted(2, failures=1)
    other = Judge('http://127.0.0.1:9/v1', 'another model', retries=0)
    other.keep(tmp_path / 'kept')
    assert other.ask(['a'], WORDS.get) == [None]


def test_a_file_that_was_cut_off_keeps_what_stands_before(tmp_path):
    "As a kill in the middle of writing leaves it: the last entry is dropped, and the next one stands behind the rest."
    path = tmp_path / 'kept'
    with Stub(lambda prompt, attempt: 'yes') as stub:
        for prompts in (['a'], ['b'], ['c']):
            judge = stub.judge()
            judge.keep(path)
            judge.ask(prompts, WORDS.get)
        whole = path.read_bytes()
        path.write_bytes(whole[:-5])
        judge = stub.judge()
        judge.keep(path)
        assert judge.ask(['a', 'b', 'c'], WORDS.get) == [1, 1, 1] and asked(stub) == ['a', 'b', 'c', 'c']
    assert [json.loads(line)['messages'][0]['content'] for line in gzip.open(path, 'rt')] == ['a', 'b', 'c']
    path.write_bytes(b'no gzip')
    with pytest.raises(ValueError, match='damaged'): judge.keep(path)


def test_what_was_answered_is_kept_though_the_rest_is_interrupted(tmp_path):
    "Replies are paid for: 64 at a time they go to the file, and the others where a call is interrupted."
    path, many = tmp_path / 'kept', [str(i) for i in range(100)]
    def script(prompt, attempt):
        if prompt == '90': raise_at.set()
        return 'yes'
    raise_at = threading.Event()
    with Stub(script) as stub:
        judge = stub.judge(concurrency=1)
        judge.keep(path)
        one = judge._one
        def interrupted(talk, deadline):
            if raise_at.is_set(): raise KeyboardInterrupt
            return one(talk, deadline)
        judge._one = interrupted
        with pytest.raises(KeyboardInterrupt): judge.ask(many, WORDS.get)
    assert len([*gzip.open(path, 'rt')]) >= 90


def test_all_prompts_of_a_call_have_one_deadline():
    "One at a time, a quarter of a second each: some are answered within a second and a half, and the others have failed."
    def slow(prompt, attempt):
        time.sleep(.25)
        return 'yes'
    with Stub(slow) as stub:
        judge = stub.judge(concurrency=1, deadline=1.5)
        marks = judge.ask([str(i) for i in range(40)], WORDS.get)
        assert len(stub.requests) < 10
    right = marks.count(1)
    assert 1 <= right < 10 and marks == [1] * right + [None] * (40 - right)
    assert judge.counts['failures'] == 40 - right and 'deadline of 1' in judge.last_error


def test_a_server_that_hangs_is_given_up_at_the_deadline_whatever_an_attempt_may_take():
    with Stub(lambda prompt, attempt: 'hang') as stub:
        judge, since = stub.judge(deadline=.5, timeout=60., retries=8), time.monotonic()
        assert judge.ask(['a', 'b'], WORDS.get) == [None, None] and time.monotonic() - since < 5
        with pytest.raises(ConnectionError, match='deadline'): judge.check()


def test_sixteen_requests_are_under_way_at_a_time():
    "The first are held until as many have come."
    under_way, most, lock, full = [0], [0], threading.Lock(), threading.Event()
    def script(prompt, attempt):
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
            if under_way[0] == 16: full.set()
        full.wait(60)
        with lock: under_way[0] -= 1
        return 'yes'
    with Stub(script) as stub:
        judge = Judge(f'http://127.0.0.1:{stub.server.server_port}/v1', 'stub')
        assert judge.concurrency == 16 and judge.deadline == 600
        judge.ask([str(i) for i in range(48)], WORDS.get)
    assert most[0] == 16


def test_a_key_that_a_reply_repeats_is_not_kept(tmp_path):
    with Stub(lambda prompt, attempt: 'yes, sk-secret') as stub:
        judge = stub.judge(api_key='sk-secret')
        judge.keep(tmp_path / 'kept')
        assert judge.ask(['a'], str.upper) == ['YES, …']
    assert b'sk-secret' not in gzip.decompress((tmp_path / 'kept').read_bytes())
    (place := tmp_path / 'key').write_text('sk-secret')
    one, same = (make_judge({'base_url': 'http://localhost:1/v1', 'model': 'm', 'key_from': at}) for at in (place, str(place)))
    assert one is same and read_key(place) == 'sk-secret'


MARKUP = st.sampled_from(['{}', '**{}**', '"{}"', '[{}]', '`{}`', '<{}>', '{}.', ' {} ', '<verdict>{}</verdict>',
                          '<answer>\n{}\n</answer>', '\\boxed{{{}}}', '_{}_'])
LABELS = st.sampled_from(['', 'Verdict: ', 'Rating: ', 'Final verdict: ', '**Verdict:**\n\n', 'Evaluation Rating:\n',
                          '<Evaluation Rating>: ', 'My reading. Verdict: ', 'I would say: '])
BEFORE = st.sampled_from(['', '', '<think>Match? Mismatch? grounded? invented?</think>\n', 'Both are named.\n\n'])
BEHIND = st.sampled_from(['', '', '\n', '\nThe reference says so.', ' - the reference says so',
                          ', because it is the same', ' (both name Orvane)', ': same city', '. Both name Orvane.'])
AGAINST = st.sampled_from([' - not really', ': not the same city', ', but the year is missing', ' (no)', ' in part',
                           '? Not quite', ': unclear', ' or {other}', '/{other}', ': 0.5', '. Rather {other}',
                           '\nVerdict: {other}', '\n{other}', ' and no'])
FIELDS = st.sampled_from(['{key}: {value}', '{{"{key}": {value}}}', '{{"{key}": "{value}"}}', '{key} = {value}',
                          '```json\n{{\n  "{key}": {value}\n}}\n```', '<{key}>{value}</{key}>', '**{key}:** {value}',
                          '{key}? {value}', '{{"is_{key}": {value}}}', "{{'{key}': {value}}}",
                          '{key}: {value}, see above'])
NO = {'match': ['Mismatch', 'not a match', 'No match', 'not match', 'does not match', "doesn't match", 'Non-match',
                'Partial match', 'partly match', 'not an exact match', 'MISMATCH'],
      'grounded': ['invented', 'not grounded', 'ungrounded', 'Not fully grounded', 'partly grounded', 'un-grounded',
                   "isn't grounded", 'mostly grounded']}
YES = {'match': ['Match', 'MATCH', 'match', 'a match', 'It is a match', 'Exact match', 'not a mismatch'],
       'grounded': ['grounded', 'Grounded', 'fully grounded', 'not invented', 'The answer is grounded']}
VALUES = {1: ['yes', 'true', '1', 'True', 'Yes'], 0: ['no', 'false', '0', 'False', 'NO']}


@st.composite
def replies(draw):
    "A reply that is built from a verdict: its reader's settings, its text, what it means (None: it takes itself back)."
    name, meant = draw(st.sampled_from(['match', 'grounded'])), draw(st.sampled_from([0, 1]))
    words = draw(st.sampled_from((YES if meant else NO)[name]))
    form = draw(st.sampled_from(['word', 'field', 'both', 'whatever']))
    if form == 'field':
        value = draw(st.sampled_from([*VALUES[meant], words]))
        text = draw(FIELDS).format(key=draw(st.sampled_from([name, name.title(), 'verdict', 'rating'])), value=value)
    elif form == 'whatever':
        tail = draw(st.one_of(AGAINST.filter(lambda x: '{' not in x), BEHIND))
        text, meant = draw(st.sampled_from(NO[name][:5])) + tail, 0
    elif form == 'both':
        text, meant = draw(st.sampled_from([name, name.title()])) + draw(AGAINST).format(other=NO[name][0]), None
    else: text = draw(LABELS) + draw(MARKUP).format(words) + draw(BEHIND)
    before = draw(BEFORE) if form != 'both' else ''
    return (MATCH if name == 'match' else GROUNDED), before + text, meant


@settings(max_examples=150)
@given(replies())
def test_a_reply_is_read_as_it_was_meant_or_not_at_all(case):
    reader, text, meant = case
    assert read_verdict(text, **reader) in (meant, None)


@settings(max_examples=100)
@given(st.text('matchismnogrude:/?!,.0 1{}"<>\n', max_size=40))
def test_any_text_is_read_as_one_of_the_two_or_not_at_all(text):
    assert read_verdict(text, **MATCH) in (0, 1, None) and read_verdict(text, **GROUNDED) in (0, 1, None)


def test_long_replies_do_not_hold_a_run_up():
    for text in ('_', 'it ', 'not ', ':', '</', 'a:', 'match: ', 'verdict:', "n't", '?'):
        since = time.process_time()
        assert read_verdict(text * 4000, **MATCH) is None and time.process_time() - since < 2, text


@pytest.mark.parametrize('kind', list(dict.fromkeys(row['kind'] for row in REPLIES)))
def test_each_kind_of_reply_is_read_as_written_beside_it(kind):
    rows = [row for row in REPLIES if row['kind'] == kind]
    read = [(row['reply'], READERS[row['asks']](row['reply'])) for row in rows]
    assert read == [(row['reply'], row['reading']) for row in rows]
