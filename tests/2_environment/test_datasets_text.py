"Text that is not ASCII: lines, marks before a text, other encodings, accents in two spellings, minus signs, no bounds."
import json
import random
import unicodedata
from types import SimpleNamespace

import pytest
from hypothesis import example, given, strategies as st

from credit_rl import evaluate, readers
from credit_rl.studies import longform
from credit_rl.benchmarks import get_benchmark, read_question
from credit_rl.datasets import load_corpus, load_questions
from credit_rl.dumps import read_dump
from credit_rl.demonstrations import answer_shown, next_queries
from credit_rl.tspo import first_occurrence
from credit_rl.information_gain import set_f1
from credit_rl.judge import read_key, judge_text
from credit_rl.metrics import cover_match, exact_match, f1, normalize, numeric_match, parse_number
from credit_rl.models import read_template
from credit_rl.protocol import PROTOCOLS, reword
from credit_rl.readers import Passage, RowError
from credit_rl.retrieval import BM25, words
from credit_rl.runlog import read_json, read_yaml
from credit_rl.search_service import SearchCache, SearchError, _read_answer
from credit_rl.tools import Observation
from credit_rl.trajectory import Question, Result, Stop, Trajectory, Turn
from credit_rl.turn_rewards import rule_rewards

BREAKS = ['\u2028', '\u2029', '\x85', '\x0b', '\x0c', '\x1c']     # str.splitlines cuts at these, JSON lines do not
BOM = b'\xef\xbb\xbf'


def test_lines_end_at_line_feeds_alone(tmp_path):
    path = tmp_path / 'a.jsonl'
    for mark in BREAKS:
        said = f'Who was{mark}Ada?'
        row = {'input': said, 'output': f'<answer> Ada{mark}L. </answer>', 'gts': ['Ada L.']}
        raw = mark if ord(mark) > 31 else json.dumps(mark)[1:-1]       # as json.dumps(ensure_ascii=False) leaves it
        path.write_text((json.dumps(row) + '\n').replace(json.dumps(mark)[1:-1], raw) * 2, encoding='utf-8')
        dump = read_dump(path, 'search-r1')
        assert [t.question.text for g in dump.groups for t in g.trajectories] == [said] * 2
        rows = [{'id': i, 'question': said, 'golden_answers': ['Ada']} for i in 'ab']
        path.write_text(''.join(json.dumps(r, ensure_ascii=False) + '\r\n' for r in rows), encoding='utf-8')
        assert [q.text for q in load_questions('nq', path)] == [said.strip()] * 2


def test_data_files_may_begin_with_a_mark(tmp_path):
    for name, text in (('a.json', '[{"id": 1, "text": "é", "title": "T"}]'), ('a.csv', 'text,id,title\né,1,T\n'),
                       ('a.jsonl', '{"id": 1, "text": "é", "title": "T"}\n'), ('a.tsv', 'text\tid\ttitle\né\t1\tT\n')):
        (tmp_path / name).write_bytes(BOM + text.encode())
        assert load_corpus('nq', tmp_path / name) == [Passage('1', 'T', 'é')]


def marked(path, text):
    path.write_bytes(BOM + text.encode())
    return str(path)


def test_every_text_that_is_read_may_begin_with_a_mark(tmp_path):
    "Prompts, templates, keys, words for a judge, JSON, YAML, dumps, kept searches."
    file = lambda text: marked(tmp_path / 'a.jsonl', text)
    assert reword(PROTOCOLS['tspo'], system_prompt=file('Be brief.\n')).system == 'Be brief.'
    assert read_template(file('{{ messages }}')) == '{{ messages }}' and read_key(file('secret\n')) == 'secret'
    assert judge_text(file('Ja?'), '') == 'Ja?'
    assert read_json(file('{"a": 1}')) == read_yaml(file('a: 1')) == {'a': 1}
    row = {'input': 'Who?', 'output': '<answer> Ada </answer>', 'gts': ['Ada']}
    assert len(read_dump(file(json.dumps(row)), 'search-r1').groups) == 1


def test_what_is_not_utf_8_is_refused_by_its_name(tmp_path):
    latin = tmp_path / 'latin.txt'
    latin.write_bytes('Montréal {question}'.encode('latin1'))
    for read in (lambda place: reword(PROTOCOLS['tspo'], user_prompt=place), read_template, read_key,
                 lambda place: judge_text(place, ''), read_json):
        with pytest.raises(ValueError, match='UTF-8'): read(str(latin))
    for name in ('a.jsonl', 'a.json', 'a.csv'):
        (tmp_path / name).write_bytes('{"text": "Montréal"}'.encode('latin1'))
        for read in (lambda path: load_corpus('nq', path), read_dump):
            with pytest.raises(ValueError, match=f'{name} cannot be read.*no text in UTF-8'): read(tmp_path / name)


NFD = lambda text: unicodedata.normalize('NFD', text)


def test_both_spellings_are_one_word():
    "What a model writes (NFC) and what a corpus may hold (NFD): matched, found, paid, and words as they are written."
    for name in ('Montréal', 'Ångström', 'Việt Nam', 'Łódź', '東京ガス', '한국어', 'हिन्दी', 'ภาษาไทย'):
        apart = NFD(name)
        assert exact_match(name, [apart]) == exact_match(apart, [name]) == f1(apart, [name]) == 1
        assert set_f1(apart, [name]) == set_f1(name, [apart]) == 1
        assert cover_match(f'in {apart} once', [name]) == 1 and first_occurrence([f'in {apart} once'], [name]) == 0
        assert words(apart) == words(name) == normalize(name).split()
        corpus = [Passage('0', '', 'Alma, Rea'), Passage('1', apart, f'{apart} is a place'), Passage('2', '', 'Montre al')]
        for query, gold in ((name, apart), (apart, name)):
            assert [p.id for p in BM25(corpus).search([query], 3)[0]] == ['1']
            assert rule_rewards([f'in {query} once'], [gold], [True]) == [.25]


@given(st.text(max_size=30))
@example('\u037ea')
@example('e.\u0301')
def test_normalisation_does_not_depend_on_the_spelling_and_ends(text):
    assert normalize(normalize(text)) == normalize(text) == normalize(NFD(text))


MINUS = ['-', '\u2010', '\u2011', '\u2012', '\u2013', '\u2014', '\u2212', '\ufe63', '\uff0d']


def test_a_minus_by_any_of_its_signs():
    for sign in MINUS:
        assert parse_number(f'{sign}12.5%') == (-12.5, True) and parse_number(f'it fell by {sign}$3') == (-3, False)
        assert numeric_match(f'{sign}12.5%', ['12.5%']) == 0 and numeric_match(f'{sign}12.5%', ['-12.5%']) == 1
        assert parse_number(f'{sign}2.5e{sign}3') == (-.0025, False)
        assert parse_number(f'$ {sign}3') == (-3, False) and parse_number(f'10{sign}12') is None    # a span is no number
        row = {'question': 'How much?', 'final_result': -.125, 'answer': f'{sign}12.5%', 'table': []}
        assert read_question(get_benchmark('finqa'), row)[0].answers == ('-0.125', f'{sign}12.5%')
    for dash in '\u2013\u2014':                                                       # between words it is no minus
        assert parse_number(f'the answer {dash} 12') == (12, False) and parse_number(f'profit{dash}12') == (12, False)


ODD = {'half': ('{"id": 1, "text": "a\\ud83d"}', 'half of a surrogate pair'),
       'deep': ('{"id": 1, "text": ' + '[' * 60_000 + ']' * 60_000 + '}', 'nested too deep'),
       'long': ('{"id": ' + '9' * 5_000 + ', "text": "a"}', 'digits')}


@pytest.mark.parametrize('kind', ODD)
def test_a_row_without_bounds_is_a_row_error(tmp_path, kind):
    line, said = ODD[kind]
    path = tmp_path / 'a.jsonl'
    path.write_text('{"id": 0, "text": "\\ud83d\\ude00"}\n' + line + '\n{"id": 2, "text": "b"}\n')
    with pytest.raises(RowError, match=f'a.jsonl, line 2.*{said}'): load_corpus('nq', path)
    with pytest.warns(UserWarning, match='skipped'):
        assert [p.text for p in load_corpus('nq', path, on_error='skip')] == ['\U0001f600', 'b']
    row = json.dumps({'input': 'Who?', 'output': '<answer> Ada </answer>', 'gts': ['Ada']})
    path.write_text(row + '\n' + line + '\n')
    with pytest.raises(ValueError, match=f'a.jsonl, line 2.*{said}'): read_dump(path, 'search-r1')
    whole = tmp_path / 'a.json'
    whole.write_text('[{"id": 0, "text": "a"},\n' + line + ']')
    with pytest.raises(RowError, match=f'a.json, (line 2|row 1).*{said}'): load_corpus('nq', whole)


def test_a_files_text_is_searched_once_however_many_rows_it_has(tmp_path, monkeypatch):
    rows, searched = [json.dumps({'id': i, 'text': f'page {i}'}) for i in range(200)], []
    monkeypatch.setattr(readers, '_HALF', SimpleNamespace(search=lambda text: searched.append(len(text))))
    for ending, text in (('json', '[' + ', '.join(rows) + ']'), ('jsonl', '\n'.join(rows))):
        searched.clear()
        (path := tmp_path / f'a.{ending}').write_text(text)
        assert len(load_corpus('nq', path)) == 200 and sum(searched) == path.stat().st_size


def test_kept_searches_are_read_whatever_they_hold(tmp_path):
    class Search:
        def search(self, queries, k): return [[Passage('1', f'T{m}', 'é')] for m in BREAKS[:len(queries)]]
    queries = [f'q{m}' for m in BREAKS]
    SearchCache(tmp_path / 'kept.jsonl', Search()).search(queries, 1)
    assert [p.title for (p,) in SearchCache(tmp_path / 'kept.jsonl').search(queries, 1)] == [f'T{m}' for m in BREAKS]
    marked(tmp_path / 'kept.jsonl', (tmp_path / 'kept.jsonl').read_text(encoding='utf-8'))
    assert len(SearchCache(tmp_path / 'kept.jsonl').search(queries, 1)) == len(queries)


@pytest.mark.parametrize('mine, theirs', [(str, NFD), (NFD, str)])
def test_a_player_that_shows_how_knows_both_spellings(mine, theirs):
    "What it searched, what a page is called and what a question names."
    facts = [[mine(name), 0] for name in ('Orléans', 'Nîmes (city)')]
    text = theirs('Orléans is older.')
    found = Observation(f'Doc 1 (Title: "{theirs("Orléans")}") {text}', [(15, 15 + len(theirs('Orléans')))])
    turn = Turn('tool', (1,), [0.], (2,), '', str(found), {'name': 'search', 'queries': [theirs('Nîmes')]}, Result.OK)
    asked = Question('q', mine('Is Orléans older than Nîmes?'), [mine('Orléans')], 's',
                     {'type': 'comparison', 'supporting_facts': facts})
    played = Trajectory(asked, (1,), [turn], Stop.NO_ANSWER, None)
    assert answer_shown(played) == mine('Orléans')
    left = next_queries(played, random.Random(0))
    assert NFD('Orléans') in map(NFD, left) and NFD('Nîmes') not in map(NFD, left)


def test_json_in_a_cell_without_bounds_is_a_row_error(tmp_path):
    "A table keeps lists as texts: answers of PopQA, pages of HotpotQA."
    for kind, cell in (('half', '["a\\ud83d"]'), ('deep', '[' * 60_000), ('long', '[' + '9' * 5_000 + ']')):
        (tmp_path / 'a.tsv').write_text(f'id\tquestion\tpossible_answers\n0\tq\t["b"]\n1\tq\t{cell}\n')
        with pytest.raises(RowError, match=f"a.tsv, line 3.*'possible_answers'.*{ODD[kind][1]}"):
            load_questions('popqa', tmp_path / 'a.tsv')
        rows = [{'question': 'q', 'answer': 'a', 'context': text} for text in ('[["T", ["b"]]]', cell)]
        (tmp_path / 'a.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
        with pytest.raises(RowError, match=f"a.jsonl, line 2.*'context'.*{ODD[kind][1]}"):
            load_corpus('hotpotqa', tmp_path / 'a.jsonl')


def test_a_search_without_bounds_is_refused_in_words(tmp_path):
    "In an answer of a server, and among kept searches."
    path = tmp_path / 'kept.jsonl'
    for kind, said in (('deep', 'recursion'), ('long', 'digits')):
        document = ODD[kind][0].replace('"text"', '"title": "", "text"')
        with pytest.raises(SearchError, match=f'answered something else.*{said}'):
            _read_answer('url', f'{{"result": [[{document}]]}}'.encode(), 1, 1)
        SearchCache(path, BM25([Passage('1', 'T', 'é')])).search(['q'], 1)
        whole = path.read_bytes()
        path.write_bytes(whole + ODD[kind][0].encode() + b'\n')
        with pytest.raises(ValueError, match=f'kept.jsonl .*{said}'): SearchCache(path)
        path.write_bytes(whole)
    path.write_bytes(whole + b'{"query": "\xe9"}\n')
    with pytest.raises(ValueError, match='utf-8'): SearchCache(path)
    for document in ('{"id": null, "title": "", "text": "x"}', '{"id": {"a": 1}, "title": "", "text": "x"}',
                     '{"document": {"id": 1, "contents": "x"}, "score": ' + '9' * 400 + '}'):
        with pytest.raises(SearchError, match='answered'):
            _read_answer('url', f'{{"result": [[{document}]]}}'.encode(), 1, 1)


def test_verdicts_of_a_judge_are_read_whatever_an_id_holds(tmp_path, monkeypatch):
    for mark in BREAKS:
        rows = [{'id': f'{i}{mark}x', 'reference_pass': i} for i in (0, 1)]
        longform._write_lines(tmp_path / 'judged.jsonl', rows)
        monkeypatch.setattr(evaluate, 'read_turns', lambda folder: rows)
        assert evaluate.right_rows(tmp_path) == rows[1:]
