"Drift: how many ids of a rollout would change if its conversation were encoded again, against an exhaustive alignment."
import functools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from templates import family_tokenizer, FAMILIES

from credit_rl.engine import ScriptedEngine
from credit_rl.environment import NoSearch
from credit_rl.protocol import Chat, PROTOCOLS
from credit_rl.rollout import Environment, rollout
from credit_rl.step_metrics import _changes, mean_drift, reencoding_drift
from credit_rl.trajectory import Question
from credit_rl.view import show_rollout


def by_table(kept, other):
    "Fewest edits that read all of `kept` and a beginning of `other`: what is gone or new by them, in every such way."
    @functools.lru_cache(None)
    def best(i, j):      # edits, and gone - new, of kept[i:]
        if i == len(kept): return {(0, 0)}
        ways = {(d + 1, k + 1) for d, k in best(i + 1, j)}
        if j < len(other): ways |= {(d + 1, k - 1) for d, k in best(i, j + 1)}
        if j < len(other) and kept[i] == other[j]: ways |= best(i + 1, j + 1)
        least = min(d for d, _ in ways)
        return {way for way in ways if way[0] == least}
    return {max(d + k, d - k) // 2 for d, k in best(0, 0)}


@settings(deadline=None, max_examples=300)
@given(st.text('abc', max_size=7), st.text('abc', max_size=7))
def test_the_count_is_that_of_the_best_alignment(kept, other):
    assert _changes(kept, other, 99) in by_table(kept, other)


@settings(deadline=None, max_examples=60)
@given(st.text('abc', max_size=12), st.text('abc', max_size=12), st.integers(1, 4))
def test_a_limit_is_a_limit(kept, other, most):
    assert _changes(kept, other, most) == min(most, _changes(kept, other, 99))


def test_long_rows_are_counted_in_moments():
    import time
    kept, other = list(range(6000)), [*range(3000), -1, *range(3001, 6000), 7, 7]
    begun = time.process_time()
    assert _changes(kept, other, 200) == 1 and _changes(kept, [-1] * 6000, 200) == 200
    assert time.process_time() - begun < 5


def played(chat, text):
    engine = ScriptedEngine(lambda conversation, rng: text, chat.tokenizer)
    (group,) = rollout(engine, Environment(chat, NoSearch(), 1), [Question('q', 'Which city?', ['Paris'])])
    return group


@pytest.mark.parametrize('name', FAMILIES)
def test_what_was_encoded_as_a_whole_does_not_drift(name):
    "Qwen3's template writes an empty thought anew; of the plain one a merge with the line's end is another last id."
    chat = Chat(PROTOCOLS['igpo'], family_tokenizer(name, merges=0))
    group = played(chat, '<answer>Paris</answer>')
    added = len(chat.encode('<think>\n\n</think>\n\n')) if name == 'qwen3' else 0
    assert mean_drift(chat, [group]) == added and mean_drift(chat, []) != mean_drift(chat, [])
    if name != 'plain': return
    merged = Chat(PROTOCOLS['igpo'], family_tokenizer(name))
    assert mean_drift(merged, [played(merged, '<answer>Paris</answer>')]) == 1


def test_a_thought_that_a_template_drops_is_counted_and_shown():
    chat = Chat(PROTOCOLS['tips'], family_tokenizer('qwen3', merges=0), history='as-sampled')
    (t,) = played(chat, '<think>\nso\n</think>\n\n<answer>x</answer>').trajectories
    again = replace(t, turns=(replace(t.turns[0], kind='tool', observation_ids=(), observation_text=''), *t.turns))
    assert reencoding_drift(chat, t) == 0 and reencoding_drift(chat, again) > 0
    page = show_rollout(t, measured={'drift': 3}).html
    assert '3 of all ids would change if encoded again' in page and 'encoded again' not in show_rollout(t).html


def test_a_run_logs_its_drift_and_its_rollouts_have_theirs(finished):
    from credit_rl.runlog import METRICS, read_metrics, read_turns
    from credit_rl.view import show_run
    folder = finished(method='grpo')
    assert read_metrics(folder).drift[1] >= 0 and 'drift' in METRICS
    rows = [row for row in read_turns(folder) if row['kind'] == 'train']
    assert rows and all(isinstance(row['drift'], int) for row in rows)
    data = json.loads(show_run(folder).page.split('type="application/json">')[1].split('</script>')[0])
    assert all('drift' in r for g in data['groups'] for r in g['rollouts'] if g['kind'] == 'train')
