"""Trouble that people reported of others, tried on our readers (reports: runs/log/2026-11-28.md)."""
import json

import pytest

from credit_rl.benchmarks import get_benchmark, read_question
from credit_rl.metrics import numeric_match, parse_number
from credit_rl.parameters import make_parser, read_settings
from credit_rl.readers import read_rows
from credit_rl.settings import make_config
from credit_rl.turn_rewards import parse_ratings


@pytest.mark.parametrize('text, value', [
    ('the meeting is at 7:30', None), ('the grid is 2x3', None),                   # a piece of a time, of a size
    ('8{,}000', 8000.), (r'\boxed{8,000}', 8000.), ('100,000 dollars', 100000.),    # cut at the separator
    ('The answer is 72, in total, so he earns that much.', 72.),                     # swallowed by a comma
    (r'\$460', 460.), (r'ANSWER: \$27.00', 27.),                                    # LaTeX's currency
    ('minus 3', -3.), ('-3', -3.)])                                                  # a lost sign
def test_a_number_in_an_answer(text, value):
    found = parse_number(text)
    assert found is None if value is None else found == (value, False)


def test_trailing_zeros_and_a_signed_gold():
    assert numeric_match('$29.00', ['29']) == 1 and numeric_match('29', ['29.0']) == 1
    question, _ = read_question(get_benchmark('gsm8k'), {'question': 'q', 'answer': 'From 2 it falls by 5.\n#### -3'})
    assert question.answers == ('-3',) and numeric_match('3', question.answers) == 0


def test_a_rate_without_a_point_is_a_number(tmp_path):
    (tmp_path / 'p.yaml').write_text('learning_rate: 1e-6\nkl: 7e-6\n')
    config = make_config(read_settings(make_parser('x', 'y'), ['--params', str(tmp_path / 'p.yaml')])[0])
    assert (config.learning_rate, config.kl) == (1e-6, 7e-6)


@pytest.mark.parametrize('mark', ['\u2028', '\u2029', '\x85', '\v', '\f'])
def test_a_line_ends_with_a_newline_alone(tmp_path, mark):
    (tmp_path / 'a.jsonl').write_text(json.dumps({'text': f'a{mark}b'}, ensure_ascii=False) + '\n', encoding='utf-8')
    assert [row for _, row in read_rows(tmp_path / 'a.jsonl')] == [{'text': f'a{mark}b'}]


@pytest.mark.parametrize('name', ['a.jsonl', 'a.json', 'a.csv'])
def test_a_mark_of_byte_order_is_no_part_of_the_first_row(tmp_path, name):
    text = {'a.jsonl': '{"text": "é"}\n', 'a.json': '[{"text": "é"}]', 'a.csv': 'text\né\n'}[name]
    (tmp_path / name).write_text(text, encoding='utf-8-sig')
    assert [row for _, row in read_rows(tmp_path / name)] == [{'text': 'é'}]


def test_a_rating_out_of_ten_is_not_read_as_one_of_two():
    for reply in ('Rating: 8/10', 'ratings_by_pair=[[8/10,1,1]]', 'ratings_by_pair=[[8,1,1]]'):
        assert parse_ratings(reply) is None
    assert parse_ratings('ratings_by_pair=[[2,1,1]]') == [[2, 1, 1]]
