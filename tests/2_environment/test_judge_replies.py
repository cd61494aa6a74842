"""Judges' replies of our own writing, by kind, each with its reading: fixtures/judge_replies.jsonl."""
import json
from pathlib import Path

import pytest

from credit_rl.prs import parse_grounded, parse_verdict
from credit_rl.turn_rewards import parse_ratings

ROWS = [json.loads(line) for line in (Path(__file__).parents[1] / 'fixtures/judge_replies.jsonl').open(encoding='utf-8')]
READERS = {'reference': parse_verdict, 'grounded': parse_grounded, 'ratings': lambda reply: parse_ratings(reply, pairs=2)}


@pytest.mark.parametrize('kind', list(dict.fromkeys(row['kind'] for row in ROWS)))
def test_each_kind_of_reply_is_read_as_written_beside_it(kind):
    rows = [row for row in ROWS if row['kind'] == kind]
    read = [(row['reply'], READERS[row['asks']](row['reply'])) for row in rows]
    assert read == [(row['reply'], row['reading']) for row in rows]
