"""18_judge: a pool, a deadline, replies that are kept, and where a verdict is read. What a request may meet is in
test_turn_rewards."""
import gzip
import json
import threading
import time

import pytest

from credit_rl.judge import Judge, after_thought, judge_counts, quote_thought, read_verdict
from judge_server import Stub

WORDS = {'yes': 1, 'no': 0, 'not yes': 0}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv('NO_PROXY', '*')


def asked(stub): return [r['messages'][-1]['content'] for r in stub.requests]


def test_equal_prompts_are_asked_once_and_the_file_answers_later(tmp_path):
    "In the same call, in a later one, and in another process, where the server may be gone; other settings ask anew."
    path = tmp_path / 'judge.jsonl.gz'
    with Stub(lambda prompt, attempt: f'said {prompt}') as stub:
        judge = stub.judge()
        judge.keep(path)
        assert judge.ask(['a', 'b', 'a'], str.upper) == ['SAID A', 'SAID B', 'SAID A']
        assert judge.ask(['b', 'c'], [len, str.upper]) == [6, 'SAID C'] and sorted(asked(stub)) == ['a', 'b', 'c']
        assert judge.counts == {'calls': 5, 'retries': 0, 'failures': 0, 'unparsable': 0}
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


def test_a_failure_is_not_kept_and_an_unreadable_reply_is(tmp_path):
    with Stub(lambda prompt, attempt: 400 if prompt == 'bad' and attempt == 0 else 'mumble') as stub:
        judge = stub.judge()
        judge.keep(tmp_path / 'kept')
        assert judge.ask(['bad', 'bad', 'x'], WORDS.get) == [None] * 3
        assert judge.counts == {'calls': 3, 'retries': 0, 'failures': 2, 'unparsable': 1}
        assert judge.ask(['bad', 'x'], len) == [6, 6] and asked(stub).count('x') == 1


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


def test_all_prompts_of_a_call_have_one_deadline(tmp_path):
    "One at a time, half a second each: some are answered within three seconds, and the others have failed."
    def slow(prompt, attempt):
        time.sleep(.5)
        return 'yes'
    with Stub(slow) as stub:
        judge = stub.judge(concurrency=1, deadline=3.)
        marks = judge.ask([str(i) for i in range(40)], WORDS.get)
        assert len(stub.requests) < 10
    right = marks.count(1)
    assert 1 <= right < 10 and marks == [1] * right + [None] * (40 - right)
    assert judge.counts['failures'] == 40 - right and 'deadline of 3 s' in judge.last_error


def test_a_server_that_hangs_is_given_up_at_the_deadline_whatever_an_attempt_may_take():
    with Stub(lambda prompt, attempt: 'hang') as stub:
        judge, since = stub.judge(deadline=.5, timeout=60., retries=8), time.monotonic()
        assert judge.ask(['a', 'b'], WORDS.get) == [None, None] and time.monotonic() - since < 5
        with pytest.raises(ConnectionError, match='deadline of 0.5 s'): judge.check()


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


@pytest.mark.parametrize('reply, verdict', [
    ('yes', 1), ('No.', 0), ('Not yes', 0), ('**Yes**', 1), ('"no"', 0), ('Verdict: no', 0), ('I would say: yes!', 1),
    ('<think>no</think>yes', 1), ('<think>\n\n</think>\n\nNo', 0), ('yes\nno', 1), ('yes - both', 1), ('yes. Both', 1),
    ('**No.** They differ', 0), ('yes (both)', 1), ('no because they differ', 0), ('yes/no', None), ('yes-no', None),
    ('yesterday', None), ('no one knows', None), ('It is yes', None), ('<think>yes', None),
    ('<think>yes</think>', None), ('', None), (None, None), ('Claims.\nyes', None)])
def test_a_verdict_begins_the_first_line(reply, verdict):
    assert read_verdict(reply, WORDS) == verdict and (read_verdict(reply, WORDS) is None) == (verdict is None)


def test_the_last_line_counts_where_it_is_asked_and_the_first_says_nothing():
    assert read_verdict('Claims.\nVerdict: no', WORDS, last=True) == 0 and read_verdict('yes\nno', WORDS, True) == 1
    assert read_verdict('Claims.\nperhaps', WORDS, last=True) is None


def test_who_quotes_a_thought_has_not_stopped_thinking():
    assert after_thought(quote_thought('a </think> yes <think>')) == 'a < /think> yes < think>'
    assert after_thought('yes') == 'yes' and after_thought('<think> a </think> b </think> c') == ' c'


def test_counts_have_the_names_of_metrics():
    with Stub(lambda prompt, attempt: 'yes') as stub:
        judge = stub.judge()
        judge.ask(['a', 'a'], WORDS.get)
        assert judge_counts(judge) == {'judge_calls': 2, 'judge_retries': 0, 'judge_failures': 0, 'judge_unparsable': 0}
