"Tables and fields as others write them: long cells, lone quotes, blanks in headers, ids that are null, titles."
import csv
import io
import json
import math

import pytest
from hypothesis import given, strategies as st

from credit_rl.benchmarks import get_benchmark, read_passages, read_question
from credit_rl.datasets import load_corpus, load_questions
from credit_rl.readers import Passage, RowError, read_contents, read_rows
from credit_rl.retrieval import BM25, contents
from credit_rl.search_service import build, read_corpus

HEADER = 'id\tquestion\tpossible_answers\n'
GOLDS = '["Ada"]'


def rows_of(path): return [(where, row) for where, row in read_rows(path)]


@pytest.mark.parametrize('suffix, delimiter', [('csv', ','), ('tsv', '\t')])
def test_a_cell_may_be_longer_than_the_csv_module_allows(tmp_path, suffix, delimiter):
    "By default it reads 128 KiB; an article of a quarter of a mebibyte is read whole."
    out, article = io.StringIO(), 'word "quoted", ' * 20_000
    table = csv.writer(out, delimiter=delimiter)
    table.writerows([['id', 'text', 'title'], ['1', article, 'Long'], ['2', 'short', 'Short']])
    (path := tmp_path / f'a.{suffix}').write_text(out.getvalue())
    assert len(article) > 2 * 2 ** 17
    assert load_corpus('nq', path) == [Passage('1', 'Long', article), Passage('2', 'Short', 'short')]


def test_a_lone_quote_in_a_tsv_without_quoting_names_both_lines(tmp_path):
    "Two rows whose cells begin and end with a quote would be read as one row of as many columns as any other."
    path = tmp_path / 'a.tsv'
    path.write_text(HEADER + f'1\tWho?\t{GOLDS}\n2\t"Heroes" is whose?\t{GOLDS}\n3\t"Heroes\tx\n'
                    f'4\tWho sang it"\ty\n5\tWhen?\t{GOLDS}\n')
    found = rows_of(path)
    assert [where for where, _ in found] == ['a.tsv, line 2', 'a.tsv, line 3', 'a.tsv, lines 4 to 5', 'a.tsv, line 6']
    assert [isinstance(row, RowError) for _, row in found] == [False, True, True, False]
    with pytest.raises(RowError, match='line'): load_questions('popqa', path)
    with pytest.warns(UserWarning, match='skipped'):
        assert [q.id for q in load_questions('popqa', path, on_error='skip')] == ['1', '5']
    path.write_text(HEADER + '3\t"Heroes\tx\n4\tWho sang it"\ty\n')
    with pytest.raises(RowError, match='closes'): load_questions('popqa', path)
    path.write_text('1\t"one\ta\n2\ttwo"\tb\n')                                    # no header
    (where, row), = rows_of(path)
    assert where == 'a.tsv, lines 1 to 2' and isinstance(row, RowError)
    path.write_text(HEADER + '3\t"Heroes\nx\n4\tWho sang it"\ty\tz\n')
    with pytest.raises(RowError, match='columns'): load_questions('popqa', path)


def test_a_quote_that_nothing_closes_in_a_tsv_without_quoting_is_a_row_error(tmp_path):
    "The rows before it are kept; what follows is one record, of which both lines are named."
    (path := tmp_path / 'a.tsv').write_text(HEADER + f'1\tWho?\t{GOLDS}\n2\t"Heroes\tx\n3\tWhen?\ty\n')
    with pytest.raises(RowError, match='closes'): load_questions('popqa', path)
    with pytest.warns(UserWarning, match='skipped'):
        assert [q.id for q in load_questions('popqa', path, on_error='skip')] == ['1']


@pytest.mark.parametrize('header', ['id, question ,possible_answers', ' id ,question\t, possible_answers'])
def test_blanks_around_the_names_of_a_header_do_not_count(tmp_path, header):
    (tmp_path / 'a.csv').write_text(f'{header}\n7, Who? ,"[""Ada""]"\n')
    (q,) = load_questions('popqa', tmp_path / 'a.csv')
    assert (q.id, q.text, q.answers) == ('7', 'Who?', ('Ada',))
    assert rows_of(tmp_path / 'a.csv')[0][1]['question'] == ' Who? '               # those of a cell do


@pytest.mark.parametrize('ids, wanted', [({'_id': None, 'id': 'a'}, 'a'), ({'_id': 'b', 'id': None}, 'b'),
                                         ({'_id': '', 'id': 'c'}, 'c'), ({'id': 5}, '5'), ({'_id': None}, None)])
def test_an_id_that_is_null_is_none(ids, wanted):
    row = {'question': 'Who?', 'answer': 'Ada', 'supporting_facts': [], 'context': [], **ids}
    q, given = read_question(get_benchmark('hotpotqa'), row)
    assert given == (wanted is not None) and (q.id == wanted or not given and q.id.startswith('hotpotqa-'))
    passage = {'text': 'a', **ids}
    assert read_passages(get_benchmark('nq'), passage) == [(wanted, '', 'a')]


@pytest.mark.parametrize('bad', [['a'], {'a': 1}, True])
def test_ids_and_titles_that_are_no_texts_are_row_errors(tmp_path, bad):
    with pytest.raises(RowError, match="'id'"):
        read_question(get_benchmark('nq'), {'question': 'Who?', 'golden_answers': ['Ada'], 'id': bad})
    for row in ({'title': bad, 'text': 'a'}, {'id': bad, 'text': 'a'}):
        (tmp_path / 'a.jsonl').write_text(json.dumps({'title': 'T', 'text': 'good'}) + '\n' + json.dumps(row) + '\n')
        with pytest.raises(RowError, match='line'): load_corpus('nq', tmp_path / 'a.jsonl')
        with pytest.warns(UserWarning, match='skipped'):
            assert len(load_corpus('nq', tmp_path / 'a.jsonl', on_error='skip')) == 1
    evidence = {'question': 'Who?', 'question_id': 'q', 'answer': {'value': 'Ada', 'aliases': []},
                'entity_pages': {'title': [bad], 'wiki_context': ['Ada was here.']}}
    with pytest.raises(RowError, match="'title'"): read_passages(get_benchmark('triviaqa'), evidence)


TEXT = st.text(st.characters(codec='utf-8'), max_size=30)


@given(TEXT.filter(lambda t: '\n' not in t), TEXT, st.text('"', max_size=3))
def test_contents_come_back(title, text, quotes):
    "Whatever quotes a title has: those that `contents` puts around it are taken off, and no others."
    for name in (title, quotes + title, title + quotes, quotes + title + quotes):
        passage = Passage('7', name, text)
        assert Passage(*read_contents({'id': '7', 'contents': contents(passage)})) == passage


def test_an_index_skips_malformed_rows_where_it_is_told_to(tmp_path, capsys):
    rows = tmp_path / 'rows.jsonl'
    rows.write_text('{"title": "T", "text": "one"}\nno json\n{"title": ["T"], "text": "two"}\n'
                    '{"title": "U", "text": "three"}\n')
    with pytest.raises(SystemExit): build([str(rows), str(tmp_path / 'index')])
    assert 'rows.jsonl, line 2' in capsys.readouterr().err and not (tmp_path / 'index').exists()
    with pytest.warns(UserWarning, match='skipped'):
        build([str(rows), str(tmp_path / 'index'), '--on-error', 'skip'])
    assert [p.id for p in BM25.load(tmp_path / 'index').passages] == ['0', '1']
    rows.write_text('no json\n')
    with pytest.raises(ValueError, match='malformed'): list(read_corpus('nq', rows, 'skip'))


@pytest.mark.parametrize('name, mark', [('a.csv', ','), ('a.tsv', '\t')])
def test_a_header_that_has_a_name_twice_is_refused(tmp_path, name, mark):
    "Columns without a name are nobody's."
    (tmp_path / name).write_text(f'id{mark} text{mark}text \n1{mark}a{mark}b\n')
    with pytest.raises(ValueError, match=f"{name}: the header has the column 'text' twice"):
        load_corpus('nq', tmp_path / name)
    (tmp_path / name).write_text(f'{mark}id{mark}text{mark}\n0{mark}1{mark}a{mark}\n')
    assert [p.text for p in load_corpus('nq', tmp_path / name)] == ['a']


def test_an_id_that_is_not_a_number_is_none(tmp_path):
    "What pandas makes of a column of numbers that has a null: 'nan' was the id of all of them."
    rows = '{"id": NaN, "_id": 3, "text": "a"}', '{"id": NaN, "text": "b"}', '{"id": NaN, "text": "c"}'
    (tmp_path / 'a.jsonl').write_text('\n'.join(rows))
    assert [p.id for p in load_corpus('nq', tmp_path / 'a.jsonl')] == ['3', '1', '2']


def test_golds_of_ones_own_are_read_as_they_were_meant(tmp_path):
    "A list that pandas wrote, whole numbers that it made floats; what is no answer is refused."
    def golds(answer, **more):
        (path := tmp_path / 'mine.jsonl').write_text(json.dumps({'question': 'Who?', 'answer': answer, **more}))
        return load_questions(str(path))[0]
    for written, meant in (("['Paris', 'it\\'s']", ['Paris', "it's"]), (1969., ['1969']), ([2., 1.5], ['2', '1.5']),
                           ('[sic] x', ['[sic] x'])):
        assert list(golds(written).answers) == meant
    assert golds('a', hops=2.).meta['hops'] == 2 and not golds('a', hops='²').meta
    for written in ("['Paris' 'Lutetia']", "['Paris', None]", math.nan, [math.nan, 'b'], True):
        with pytest.raises(RowError, match='answer'): golds(written)


def test_rows_of_ones_own_stay_whatever_they_say_of_their_source(tmp_path, monkeypatch):
    "A known set's name in them drops none; neither does a file of one's own, loaded before, drop those of a known set."
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({'question': f'{i}?', 'answer': 'a', 'data_source': of}) for i, of in enumerate(('nq', 'web', '問'))]
    for name in ('web.jsonl', '問.jsonl'): (tmp_path / name).write_text('\n'.join(rows))
    assert len(load_questions('web.jsonl')) == len(load_questions('問.jsonl')) == 3
    verl = {'prompt': [{'role': 'user', 'content': 'Who?'}], 'reward_model': {'ground_truth': {'target': ['a']}}}
    (tmp_path / 'nq_dev.jsonl').write_text('\n'.join(json.dumps({**verl, 'data_source': of, 'id': of}) for of in ('nq', 'web', 'popqa')))
    assert len(load_questions('nq', 'nq_dev.jsonl')) == 2                                   # PopQA's row is of another set
    with pytest.raises(ValueError, match='no data set'): get_benchmark('日本')
