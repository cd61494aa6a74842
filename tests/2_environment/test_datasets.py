("Loaders: ten sets in every layout, corpora, splits, mixtures, malformed rows, no network; real slices where "
 "CREDIT_RL_DATA points to them.")
import copy
import csv
import gzip
import hashlib
import io
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from credit_rl import benchmarks, datasets
from credit_rl.benchmarks import BENCHMARKS, CANARY, Benchmark, encrypt, get_benchmark, register
from credit_rl.datasets import load_corpus, load_questions, subsample
from credit_rl.readers import Passage, RowError, read_rows
from credit_rl.retrieval import BM25
from credit_rl.trajectory import Question
from hub import Hub
from hub_rows import FILES, OWN, SAMPLE, columns, hub_files, hub_row, own_rows

ROOT = Path(__file__).parents[2]
ROWS = json.loads(SAMPLE.read_text(encoding='utf-8'))


def write(path, rows, encoding='utf-8'):
    text = json.dumps(rows) if path.suffix == '.json' else '\n'.join(map(json.dumps, rows)) + '\n'
    if path.suffix == '.gz': path.write_bytes(gzip.compress(text.encode(encoding)))
    else: path.write_text(text, encoding=encoding)
    return path


def write_parquet(path, rows):
    pa = pytest.importorskip('pyarrow')
    import pyarrow.parquet
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def strict(load, *args, **kwargs):
    "Load, with every warning an error."
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        return load(*args, **kwargs)


def same(a, b):
    return a == b and [q.meta for q in a] == [q.meta for q in b]


# ---- the invented rows: one file for each set, in its original format ----

EXPECTED = {  # id, the end of the text, golds, what meta says among other things; of the row of that number
    ('nq', 1): (None, 'when was the orvane lighthouse completed', ('1874', 'in 1874'), {}),
    ('triviaqa', 0): ('cal_1', 'from 1874?', ('Orvane', 'Orvane, Calder Island', 'Port of Orvane'), {}),
    ('popqa', 0): ('7001', "What is Teodor Vannick's occupation?", ('film director', 'movie director', 'director'),
                   {'type': 'occupation', 's_pop': 120, 'o_pop': 9000}),
    ('2wikimultihopqa', 0): ('calder01', 'born?', ('Orvane',), {'hops': 2, 'type': 'compositional'}),
    ('2wikimultihopqa', 1): ('calder02', 'or Salt Road?', ('Harbour of Glass',),
                             {'hops': 4, 'type': 'bridge_comparison'}),
    ('musique', 0): (
        '2hop__11_12', 'born?', ('Orvane', 'Port of Orvane'),
        {'hops': 2, 'type': '2hop', 'supporting_facts': [['Harbour of Glass (film)', None], ['Teodor Vannick', None]],
         'steps': [['Harbour of Glass >> director', 'Teodor Vannick'], ['#1 >> place of birth', 'Orvane']]}),
    ('musique', 1): ('3hop1__11_13_14', 'lies the birthplace of the director of Harbour of Glass?', ('Calder Island',),
                     {'hops': 3, 'type': '3hop1'}),
    ('bamboogle', 0): (None, 'Harbour of Glass?', ('Anton Vannick', 'A. Vannick'), {'hops': 2}),
    ('bamboogle', 1): (None, 'completed?', ('1874',), {'hops': 2}),  # the cell holds a line break
    ('gsm8k', 0): (None, 'in a day?', ('2100',), {}),  # '#### 2,100'
    ('gsm8k', 1): (None, 'at night?', ('-7',), {'solution': 'At night it was 4 - 11 = <<4-11=-7>>-7 degrees.'}),
    ('finqa', 0): ('OSL/2019/page_4.pdf-1', 'Question: by what percentage did revenue grow from 2018 to 2019?',
                   ('0.25', '25.0%'), {'program': 'subtract(1250, 1000), divide(#0, 1000)'}),
    ('finqa', 1): ('OSL/2019/page_4.pdf-2', 'from 2019 to 2018?', ('-250',), {}),  # the annotator lost the sign
    ('finqa', 2): ('OSL/2019/page_4.pdf-3', 'than in 2018?', ('yes',),
                   {'question': 'was revenue higher in 2019 than in 2018?'}),
}


@pytest.mark.parametrize('name, i', EXPECTED)
def test_an_original_row(name, i):
    ident, end, golds, meta = EXPECTED[name, i]
    questions = strict(load_questions, name, OWN[FILES[name]])
    q = questions[i]
    assert q.id == ident if ident else q.id.startswith(name + '-')
    assert q.text.endswith(end) and q.answers == golds and q.source == name and meta.items() <= q.meta.items()
    json.dumps([q.meta for q in questions])
    assert len({q.id for q in questions}) == len(questions) == len(own_rows(name)) and not questions.skipped


def test_hops_of_2wiki_go_by_the_kind_of_question():
    for kind in ('comparison', 'inference'):
        q, _ = benchmarks.read_question(get_benchmark('2wiki'), broken('2wikimultihopqa', type=kind))
        assert q.meta['hops'] == 2


def test_finqas_page_is_in_the_question():
    text = load_questions('finqa', OWN['finqa.json'])[0].text
    assert text.startswith('ossel shipping inc . the following table shows our revenue .\n\n| 2019 | 2018\nrevenue |')
    assert text.endswith('the company paid no dividend in 2019 .\n\nQuestion: by what percentage did revenue grow from '
                         '2018 to 2019?')


@given(st.floats(-1e5, 1e5).map(lambda x: round(x, 5)), st.integers(0, 3), st.booleans())
def test_finqas_written_answer_is_a_gold_only_if_it_is_the_result_rounded(result, decimals, percent):
    shown, step = (100 * result if percent else result), 10.0 ** -decimals
    def golds(number, comma=''):
        return benchmarks._finqa_golds(result, f'{number:{comma}.{decimals}f}' + '%' * percent, 'exe_ans')
    # []: it is the result itself
    for comma in ('', ','): assert golds(shown, comma)[1:] in ([f'{shown:{comma}.{decimals}f}' + '%' * percent], [])
    assert len(golds(shown)) == 2 or golds(shown)[0] == f'{shown:.{decimals}f}'
    for off in (1.6, -1.6, 40.):  # far enough from the result, and from 100 times it
        wrong = round(shown + off * step, decimals)
        if all(abs(wrong - x) > .55 * step for x in (result, 100 * result)): assert len(golds(wrong)) == 1


def test_ids_made_from_the_question_are_the_same_in_a_slice_and_tell_twins_apart(tmp_path):
    rows = own_rows('nq')
    ids = {q.text: q.id for q in load_questions('nq', OWN['nq.jsonl'])}
    assert {q.text: q.id
            for q in load_questions('nq', write(tmp_path / 'slice.jsonl', rows[1:]))}.items() <= ids.items()
    a, b = load_questions('nq', write(tmp_path / 'twins.jsonl', [rows[0], rows[0]]))
    assert (a.id, b.id) == (ids[a.text], ids[a.text] + '-2')
    other = {**rows[0], 'answer': ['somebody else']}
    assert len({q.id for q in load_questions('nq', write(tmp_path / 'golds.jsonl', [rows[0], other]))}) == 2


# ---- the same rows in other layouts and files ----

def test_encrypted_questions_are_read_by_the_canary_of_the_release_or_of_their_row(tmp_path):
    question, answer = 'Which port has the oldest light — and why?', 'Orvane'
    def row(canary, more={}):
        page = {'docid': encrypt('5', canary), 'text': encrypt('Orvane has a light.', canary)}
        other = {'docid': encrypt('6', canary), 'text': encrypt('Rain.', canary)}
        return {'query_id': '7', 'query': encrypt(question, canary), 'answer': encrypt(answer, canary),
                'gold_docs': [page], 'evidence_docs': [page], 'negative_docs': [other], **more}
    for given in (row(CANARY), row('my own', {'canary': 'my own'})):
        path = write(tmp_path / 'a.jsonl', [given])
        (q,) = load_questions('BrowseComp-Plus', path)
        assert (q.id, q.text, q.answers, q.meta['gold_docs']) == ('7', question, (answer,), ['5'])
        assert [p.text for p in load_corpus('browsecomp', path)] == ['Orvane has a light.', 'Rain.']
    for bad, said in (({'answer': 'Orvane'}, 'answer'), ({'canary': 'another'}, 'another'), ({'query': None}, 'query'),
                      ({'gold_docs': [{'docid': 'x'}]}, 'gold_docs')):
        with pytest.raises(RowError, match=said):
            load_questions('browsecompplus', write(tmp_path / 'bad.jsonl', [row(CANARY, bad)]))
    released = write(tmp_path / 'corpus.jsonl', [{'docid': '81', 'text': 'A light.', 'url': 'https://pages.example'}])
    assert load_corpus('browsecompplus', released) == [Passage('81', '', 'A light.')]


@pytest.mark.parametrize('name', ['hotpotqa', '2wikimultihopqa', 'musique', 'finqa', 'popqa', 'nq'])
def test_parquet_and_gzip_say_the_same(tmp_path, name):
    "Parquet as the hub has it, and with nested fields as JSON: a copy of 2Wiki is so."
    rows, original = own_rows(name), load_questions(name, OWN[FILES[name]])
    paths = [write(tmp_path / 'a.jsonl.gz', rows), write_parquet(tmp_path / 'b.parquet', [hub_row(name, r) for r in rows])]
    if name == '2wikimultihopqa':
        texts = [{k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows]
        paths.append(write_parquet(tmp_path / 'dev.parquet', texts))
    for path in paths:
        assert same(load_questions(name, path), original)
        if BENCHMARKS[name].paragraphs: assert load_corpus(name, path) == load_corpus(name, OWN[FILES[name]])


@pytest.mark.parametrize('name, layout, encoding', [('a.json', columns, 'utf-8-sig'), ('a.jsonl', columns, 'utf-8'),
                                                    ('a.jsonl', dict, 'utf-8-sig')])
def test_layouts_and_files_say_the_same(tmp_path, name, layout, encoding):
    path = write(tmp_path / name, [layout(r) for r in ROWS], encoding)
    assert same(load_questions('hotpotqa', path), load_questions('hotpotqa', SAMPLE))
    assert load_corpus('hotpotqa', path) == load_corpus('hotpotqa', SAMPLE)


def test_flashrag_rows_of_any_set(tmp_path):
    for name in FILES:
        original = load_questions(name, OWN[FILES[name]])
        rows = [{'id': f'test_{i}', 'question': q.text, 'golden_answers': list(q.answers), 'metadata': None}
                for i, q in enumerate(original)]
        again = strict(load_questions, name, write(tmp_path / 'test.jsonl', rows))
        wanted = [(f'test_{i}', q.text, q.answers) for i, q in enumerate(original)]
        assert [(q.id, q.text, q.answers) for q in again] == wanted, name


def test_flashrags_metadata_is_read(tmp_path):
    assert load_questions('popqa', OWN['flashrag.jsonl'])[1].meta == {
        'type': 'occupation', 'supporting_facts': [['Teodor Vannick', None]], 's_pop': 120, 'o_pop': 9000}
    hub = columns(ROWS[0])
    for second in ('sentences', 'content'):
        context = {'title': hub['context']['title'], second: hub['context']['sentences']}
        metadata = {**{k: hub[k] for k in ('type', 'level', 'supporting_facts')}, 'context': context}
        row = {'id': 'dev_0', 'question': ROWS[0]['question'], 'golden_answers': ['Orvane'], 'metadata': metadata}
        path = write(tmp_path / 'dev.jsonl', [row])
        assert load_questions('hotpotqa', path)[0].meta == load_questions('hotpotqa', SAMPLE)[0].meta
        assert [p.title for p in load_corpus('hotpotqa', path)] == [t for t, _ in ROWS[0]['context']]


def verl(asked, truth, **row):
    return {'data_source': 'nq', 'prompt': [{'role': 'user', 'content': asked}], 'ability': 'qa',
            'reward_model': {'style': 'rule', 'ground_truth': truth}, **row}


def test_search_r1_rows():
    questions = strict(load_questions, 'nq', OWN['search_r1.jsonl'])
    assert [(q.id, q.text, q.answers, q.source) for q in questions] == [
        ('train_0', 'who directed the film harbour of glass?', ('Teodor Vannick', 'Vannick'), 'nq'),
        ('train_1', 'when was the orvane lighthouse completed?', ('1874',), 'nq')]
    with pytest.raises(ValueError, match='hotpotqa'): load_questions('musique', OWN['search_r1.jsonl'])


TRUTHS = ({'target': ['A', 'B']}, {'target': 'A<|answer_split|>B'}, ['A', 'B'], 'A<|answer_split|>B', ['A', ' B ', 'A'])


def test_forms_of_verls_ground_truth_and_where_its_question_stands(tmp_path):
    for truth in TRUTHS:
        row = verl('Think first.\nQuestion: Who was it?\n', truth, extra_info={'index': 7, 'split': 'test'})
        for path in (write(tmp_path / 'a.jsonl', [row]), write_parquet(tmp_path / 'a.parquet', [row])):
            (q,) = load_questions('nq', path)
            assert (q.id, q.text, q.answers) == ('test_7', 'Who was it?', ('A', 'B'))
    def text(**row):
        asked = verl('Question: from the prompt', ['A'], **row)
        return load_questions('nq', write(tmp_path / 'a.jsonl', [asked]))[0].text
    assert text() == text(question=' ') == text(extra_info=None) == 'from the prompt'
    assert text(extra_info={'question': 'from extra'}) == 'from extra'
    assert text(question='own', extra_info={'question': 'from extra'}) == 'own'
    with pytest.raises(RowError, match='message'): text(prompt=[{'role': 'system', 'content': 'Question: x'}])


def test_data_sources_that_other_projects_write(tmp_path):
    rows = [verl(f'q{i}?', ['A'], data_source=s, extra_info={'index': f'{i}_3hop1__1_2'})
            for i, s in enumerate(['tq', '2wiki', 'Bamboogle', 'bdsaglam/musique', 'our_own'])]
    path = write(tmp_path / 'a.jsonl', rows)
    # a source that nobody knows is taken for what was asked
    assert [q.id[0] for q in load_questions('triviaqa', path)] == ['0', '4']
    assert [(q.id[0], q.meta['hops']) for q in load_questions('musique', path)] == [('3', 3), ('4', 3)]


# ---- malformed rows ----

def test_rows_without_context_or_id(tmp_path):
    rows = [{'question': 'Who?', 'answer': ' Ada '}, {'question': 'Where?', 'answer': 'Orvane', 'context': None}]
    path = write(tmp_path / 'fullwiki.json', rows)
    questions = load_questions('hotpotqa', path)
    assert len({q.id for q in questions}) == 2 and questions[0].answers == ('Ada',) and questions[0].meta == {'hops': 2}
    with pytest.raises(ValueError, match='paragraphs'): load_corpus('hotpotqa', path)


def broken(name='hotpotqa', i=1, **changes):
    "A row of a set with some fields replaced (...: deleted; a key of two names: inside the first)."
    row = copy.deepcopy(own_rows(name)[i])
    for k, v in changes.items():
        inside, _, last = k.rpartition('__')
        part = row[inside] if inside else row
        if v is ...: del part[last]
        else: part[last] = v
    return row


MALFORMED = [
    ('hotpotqa', broken(answer=None), 'answer'), ('hotpotqa', broken(_id='sample-0'), 'id'),
    ('hotpotqa', broken(supporting_facts={'title': ['a'], 'sent_id': []}), 'supporting_facts'),
    ('hotpotqa', broken(supporting_facts='[["cut'), 'supporting_facts'), ('hotpotqa', 'text', '(row)'),
    ('hotpotqa', ['a', 'list'], 'question'), ('nq', {'question': 'Who?', 'answer': 'Ada'}, 'answer'),
    ('nq', {'question': 'Who?', 'answer': []}, 'answer'), ('nq', {'question': '', 'answer': ['Ada']}, 'question'),
    ('triviaqa', broken('triviaqa', Answer__Value=...), 'Answer.Value'),
    ('triviaqa', broken('triviaqa', Answer__Aliases=[1]), 'Answer.Aliases'),
    ('triviaqa', {'question': 'Who?', 'answer': {'value': '<unk>', 'aliases': []}}, 'answer.value'),
    ('popqa', {'question': 'Who?', 'possible_answers': '3'}, 'possible_answers'),
    ('2wikimultihopqa', broken('2wikimultihopqa', type='bridge'), 'type'),
    ('musique', broken('musique', answerable=False), 'answerable'),
    ('musique', broken('musique', answer_aliases='x'), 'answer_aliases'),
    ('musique', broken('musique', paragraphs='x'), 'paragraphs'),
    ('musique', broken('musique', question_decomposition=[{'question': 'Who?'}]), 'question_decomposition[0].answer'),
    ('bamboogle', {'Question': 'Who?', 'Answer': ' '}, 'Answer'), ('bamboogle', ['Who?', '', ''], 4),
    ('bamboogle', ['', '', '', '', 'Ada', '', ''], 'column 0'), ('bamboogle', ['Who?', *[''] * 6], 'columns 4 and 5'),
    ('gsm8k', {'question': 'How many?', 'answer': 'It is 7.'}, 'answer'),
    ('gsm8k', {'question': 'How many?', 'answer': 7}, 'answer'), ('finqa', broken('finqa', qa=...), 'qa'),
    ('finqa', broken('finqa', qa__exe_ans=float('nan')), 'qa.exe_ans'),
    ('finqa', broken('finqa', qa__exe_ans=True), 'qa.exe_ans'), ('finqa', broken('finqa', table=[[1, 2]]), 'table'),
    ('finqa', broken('finqa', pre_text=[3]), 'pre_text'),
    ('nq', {'question': 'Who?', 'golden_answers': 'Ada'}, 'golden_answers'),
    ('nq', verl('Who?', []), 'reward_model.ground_truth'), ('nq', verl('Who?', {}), 'reward_model.ground_truth.target'),
    ('nq', verl('Who?', 3), 'reward_model.ground_truth'), ('nq', verl(' ', ['A']), 'prompt'),
    ('nq', verl('Who?', ['A'], reward_model={}), 'reward_model.ground_truth'),
    ('nq', verl('Who?', ['A'], reward_model='x'), 'reward_model')]


@pytest.mark.parametrize('name, row, field', MALFORMED,
                         ids=[f'{name}-{field}-{i}' for i, (name, _, field) in enumerate(MALFORMED)])
def test_a_malformed_question_names_file_row_and_field(tmp_path, name, row, field):
    first, *_ = good = own_rows(name)
    for file, place in (('a.json', 'a.json, row 1'), ('a.jsonl', 'a.jsonl, line 2')):
        path = write(tmp_path / file, [first, row, *good[2:]])
        with pytest.raises(RowError) as e: load_questions(name, path)
        assert e.value.field == field and place in str(e.value) and repr(field) in str(e.value)
        with pytest.warns(UserWarning, match=f'skipped 1 of .*{place}'):
            kept = load_questions(name, path, on_error='skip')
        assert len(kept) == len(good) - 1 and [(e.field, e.where) for e in kept.skipped] == [(field, place)]


def test_a_row_of_no_known_layout_says_which_are_known(tmp_path):
    for name, row, missing in (('nq', {'q': 'Who?'}, 'question'), ('bamboogle', {'x': 1}, 'Question'),
                               ('finqa', {'asked': 'Who?', 'table': []}, 'qa')):
        with pytest.raises(RowError, match=f'layouts of {name}.*golden_answers') as e:
            load_questions(name, write(tmp_path / 'a.jsonl', [row]))
        assert e.value.field == missing and str(sorted(row)) in str(e.value)


@given(st.sampled_from(sorted(FILES)), st.data())
@settings(max_examples=100)
def test_whatever_a_row_holds_it_is_a_question_or_a_row_error(name, data):
    "Any JSON value in any place of a row: a `Question`, or a RowError that names a field."
    row = copy.deepcopy(data.draw(st.sampled_from(own_rows(name) + own_rows('nq') + [verl('Who?', ['A'])])))
    junk = st.recursive(st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=4),
                        lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=2),
                        max_leaves=5)
    part = row
    while True:
        key = data.draw(st.sampled_from(sorted(part) if isinstance(part, dict) else range(len(part))))
        if isinstance(part[key], (dict, list)) and part[key] and data.draw(st.booleans()): part = part[key]
        else: break
    part[key] = data.draw(junk)
    try: q, _ = benchmarks.read_question(get_benchmark(name), row)
    except RowError as e: assert e.field is not None and repr(e.field) in str(e)
    else:
        assert isinstance(q, Question) and q.text.strip() and q.answers and all(
            isinstance(a, str) and a.strip() for a in q.answers)
        json.dumps(q.meta)
    try: benchmarks.read_passages(get_benchmark(name), row)
    except RowError as e: assert repr(e.field) in str(e)


@pytest.mark.parametrize('name', ['hotpotqa', '2wikimultihopqa'])
def test_a_malformed_paragraph_names_its_field(tmp_path, name):
    first = own_rows(name)[0]
    for context in ([['title']], {'title': ['a', 'b'], 'sentences': [['x']]}, [['a', 'not a list']], [['a', [3]]],
                    [[3, ['x']]], 'text'):
        path = write(tmp_path / 'a.json', [first, broken(name, context=context)])
        with pytest.raises(RowError, match="'context'"): load_corpus(name, path)
        with pytest.warns(UserWarning, match='skipped'): corpus = load_corpus(name, path, on_error='skip')
        assert len(corpus) == len(first['context']) and [e.field for e in corpus.skipped] == ['context']


def test_files_that_are_not_what_they_were_taken_for(tmp_path):
    cut = tmp_path / 'cut.json'
    cut.write_text(SAMPLE.read_text()[:500])
    with pytest.raises(ValueError, match='JSON'): load_questions('hotpotqa', cut, on_error='skip')
    with pytest.raises(ValueError, match='rows'): load_questions('hotpotqa', write(tmp_path / 'empty.json', []))
    with pytest.raises(ValueError, match='malformed'), warnings.catch_warnings():
        load_questions('hotpotqa', write(tmp_path / 'other.json', [{'text': 'a'}, {'text': 'b'}]), on_error='skip')
    for what in ({'version': 1}, 3, {}):
        with pytest.raises(ValueError, match='neither'):
            load_questions('hotpotqa', write(tmp_path / 'object.json', what))
    with pytest.raises(ValueError, match='suffixes'): read_rows(tmp_path / 'a.xml')
    with pytest.raises(FileNotFoundError): load_questions('hotpotqa', tmp_path / 'none.json')
    with pytest.raises(FileNotFoundError): read_rows(tmp_path / 'none.json')
    with pytest.raises(ValueError, match='on_error'): load_questions('hotpotqa', SAMPLE, on_error='ignore')


def test_files_that_break_off(tmp_path):
    rows = (json.dumps({'question': f'q{i * 7919}?', 'answer': [str(i ** 3)]}) for i in range(2000))
    whole = gzip.compress('\n'.join(rows).encode())
    (tmp_path / 'a.jsonl.gz').write_bytes(whole[:len(whole) // 2])
    with pytest.raises(ValueError, match=r'a.jsonl.gz cannot be read after .*(line \d+|beginning).*fetch'):
        load_questions('nq', tmp_path / 'a.jsonl.gz')
    for name, file, text in (('nq', 'b.jsonl.gz', '{}'), ('bamboogle', 'c.csv', 'Who?,,,,"Ada,,\n'),
                             ('nq', 'e.parquet', 'no')):
        if file.endswith('parquet'): pytest.importorskip('pyarrow')
        (tmp_path / file).write_text(text)
        with pytest.raises(ValueError, match='read|parquet'): load_questions(name, tmp_path / file)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    (tmp_path / 'a.parquet').write_text('')
    monkeypatch.setitem(sys.modules, 'pyarrow', None)
    monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
    with pytest.raises(ImportError, match='pyarrow'): load_questions('nq', tmp_path / 'a.parquet')


CELL = st.text(st.characters(codec='utf-8', exclude_characters='\r\x00'), max_size=12)


@given(
    st.lists(st.tuples(CELL, st.lists(CELL.filter(str.strip), min_size=1, max_size=3)), min_size=1, max_size=4),
    st.sampled_from([',', '\t']),
)
def test_tables_keep_every_character(tmp_path_factory, rows, delimiter):
    "Quotes, line breaks, delimiters and any alphabet in a cell come back as they were."
    path, out = tmp_path_factory.mktemp('t') / ('a.tsv' if delimiter == '\t' else 'a.csv'), io.StringIO()
    table = csv.writer(out, delimiter=delimiter, lineterminator='\r\n')
    table.writerow(['id', 'question', 'possible_answers'])
    for i, (text, golds) in enumerate(rows): table.writerow([i, 'q ' + text, json.dumps(golds)])
    path.write_bytes(out.getvalue().encode())
    questions = load_questions('popqa', path)
    assert [(q.text, q.answers) for q in questions
            ] == [(('q ' + t).strip(), tuple(dict.fromkeys(g.strip() for g in golds))) for t, golds in rows]


# ---- folders, names, corpora ----

def test_a_split_picks_the_file_of_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match='hot'): load_questions('hotpotqa', tmp_path)
    write(tmp_path / 'hotpot_train_v1.1.json', ROWS[:2])
    assert len(load_questions('hotpotqa', tmp_path)) == 2                       # the only split there is
    write(tmp_path / 'hotpot_dev_distractor_v1.json', ROWS[2:])
    assert len(load_questions('hotpotqa', tmp_path, split='train')) == 2
    assert load_questions('hotpotqa', tmp_path, split='dev') == load_questions('hotpotqa', tmp_path, split='validation')
    with pytest.raises(ValueError, match='several'): load_questions('hotpotqa', tmp_path)
    with pytest.raises(FileNotFoundError, match="'test'"): load_questions('hotpotqa', tmp_path, split='test')
    with pytest.raises(ValueError, match='unknown'): load_questions('hotpotqa', tmp_path, split='trian')
    pieces = lambda passages: {(p.title, p.text) for p in passages}
    assert pieces(load_corpus('hotpotqa', tmp_path)) == pieces(load_corpus('hotpotqa', SAMPLE))
    assert len(load_corpus('hotpotqa', tmp_path, split='train')) == 8
    write(tmp_path / 'hotpot_train_v1.json', ROWS)
    with pytest.raises(ValueError, match='files'): load_questions('hotpotqa', tmp_path, split='train')
    assert len(load_questions('hotpotqa', tmp_path, split='dev')) == 4


def test_the_original_file_of_a_folder_comes_before_a_copy(tmp_path):
    write(tmp_path / 'flashrag_test.jsonl', [{'id': 'test_0', 'question': 'Who?', 'golden_answers': ['Ada']}])
    assert load_questions('bamboogle', tmp_path)[0].id == 'test_0'
    (tmp_path / 'bamboogle.csv').write_bytes(OWN['bamboogle.csv'].read_bytes())
    assert len(load_questions('bamboogle', tmp_path, split='test')) == 2
    write(tmp_path / 'NQ-open.dev.jsonl', own_rows('nq'))
    assert len(load_questions('nq', tmp_path, split='dev')) == 3 and load_questions('nq', tmp_path,
                                                                                    split='test')[0].id == 'test_0'


def test_unknown_names_get_the_nearest():
    assert get_benchmark('2WikiMQA').name == '2wikimultihopqa' and get_benchmark('TQ').name == 'triviaqa'
    for call, said in ((lambda: load_questions('hotpot', SAMPLE), "'hotpotqa'"),
                       (lambda: load_corpus('zzz', SAMPLE), 'Known'),
                       (lambda: register(BENCHMARKS['hotpotqa']), 'already'),
                       (lambda: register(Benchmark('Hotpot-QA', ())), 'lower-case'),
                       (lambda: register(Benchmark('own', (), metric='rouge')), 'metric')):
        with pytest.raises(ValueError, match=said): call()


def test_corpus_files(tmp_path):
    def load(name, rows): return load_corpus('hotpotqa', write(tmp_path / name, rows))
    found = load('a.jsonl', [{'id': 7, 'contents': '"A "B" c"\nline 1\nline 2'}, {'id': 'x', 'contents': 'no title'}])
    assert found == [Passage('7', 'A "B" c', 'line 1\nline 2'), Passage('x', '', 'no title')]
    # a corpus file is taken as it is: what stands there twice, too
    found = load('b.json', [{'title': 'T', 'text': 'a'}, {'title': 'T', 'text': 'a'}, {'text': 'b', 'title': None}])
    assert found == [Passage('0', 'T', 'a'), Passage('1', 'T', 'a'), Passage('2', '', 'b')]
    found = load('c.json', {'T': ['One.', ' Two.'], 'U': ['x']})
    assert found == [Passage('0', 'T', 'One. Two.'), Passage('1', 'U', 'x')]
    assert load('d.json', [{'id': 3, 'title': 'T', 'text': 'a'}]) == [Passage('3', 'T', 'a')]
    (tmp_path / 'f.tsv').write_text('id\ttext\ttitle\n1\t"a ""b"""\tT\n')  # DPR's passages
    assert load_corpus('nq', tmp_path / 'f.tsv') == [Passage('1', 'T', 'a "b"')]
    bad = [([{'id': 1, 'contents': ''}], 'contents'), ([{'contents': 'a'}], 'id'),
           ([{'id': True, 'contents': 'a'}], 'id'), ([{'title': 'a', 'text': 3}], 'text'), ([{'body': 'a'}], 'text'),
           ([3], '(row)'), ([{'id': 1, 'contents': 'a'}, {'id': 1, 'contents': 'b'}], 'id'),
           ([{'title': 't', 'sentences': 'not a list'}], 'sentences')]
    for rows, field in bad:
        with pytest.raises(RowError) as e: load('e.jsonl', rows)
        assert e.value.field == field and f'e.jsonl, line {len(rows)}' in str(e.value)


def test_sentences_are_joined_as_each_set_writes_them():
    for name, title, text in (
            ('2wiki', 'Ilse Maren', 'Ilse Maren (1920 - 1999) was a composer of film music. She was born in Tavistead.'),
            ('hotpotqa', 'Ellsmere', 'Ellsmere is a fishing town known for its salt works. About 4,200 people live there.')):
        path = SAMPLE if name == 'hotpotqa' else OWN['2wikimultihopqa.json']
        assert {p.title: p.text for p in load_corpus(name, path)}[title] == text


def test_triviaqas_evidence(tmp_path):
    rows = [hub_row('triviaqa', row) for row in own_rows('triviaqa')]
    assert load_corpus('triviaqa', write(tmp_path / 'rc.jsonl', rows)) == [Passage('0', 'Orvane', 'Orvane is a port.')]
    # the nocontext configurations
    rows[0]['entity_pages']['wiki_context'] = rows[1]['entity_pages']['wiki_context'] = []
    with pytest.raises(ValueError, match='paragraphs'): load_corpus('triviaqa', write(tmp_path / 'rc.jsonl', rows))
    with pytest.raises(ValueError, match='paragraphs'): load_corpus('triviaqa', OWN['triviaqa.json'])


def test_a_folders_corpus_file_comes_first(tmp_path):
    write(tmp_path / 'hotpot_dev_distractor_v1.json', ROWS)
    write(tmp_path / 'wiki_passages.jsonl', [{'id': '0', 'contents': '"T"\na'}])
    assert [p.title for p in load_corpus('hotpotqa', tmp_path)] == ['T']
    write(tmp_path / 'hotpotqa_corpus.json', [{'title': 'U', 'text': 'b'}])
    assert [p.title for p in load_corpus('hotpotqa', tmp_path)] == ['U']
    assert len(load_corpus('hotpotqa', tmp_path, split='dev')) == 14


# ---- the hub ----

@pytest.fixture(scope='module')
def from_hub(tmp_path_factory, run_python):
    """What three processes got from one hub, one after the other: on a connection that breaks off in the middle of
    HotpotQA's training file; again; and again without a hub. (list of {name: {split: rows or error}}, Hub)."""
    pytest.importorskip('datasets')
    here = tmp_path_factory.mktemp('hub')
    repositories = {BENCHMARKS[n].hub[0]: (BENCHMARKS[n].hub[2], hub_files(n, BENCHMARKS[n].hub_splits)) for n in FILES}
    env = {'HF_HOME': str(here / 'home'), 'HF_HUB_OFFLINE': '0', 'HF_TOKEN': 'secret', 'NO_PROXY': '127.0.0.1',
           'HF_HUB_DISABLE_PROGRESS_BARS': '1'}

    def client(n, url):
        program = ROOT / 'tests' / 'tools' / 'hub_client.py'
        run_python(program, here / f'{n}.json', *FILES, env={**env, 'HF_ENDPOINT': url})
        return json.loads((here / f'{n}.json').read_text())
    with Hub(repositories, cut=['distractor/train-00000-of-00001.parquet', 'dataset/dev.json']) as hub:
        got = [client(0, hub.url), client(1, hub.url)]
    return [*got, client(2, hub.url)], hub


@pytest.mark.long
@pytest.mark.parametrize('name', FILES)
def test_a_set_is_loaded_by_name_at_the_pinned_commit(from_hub, name):
    "By the package `datasets` itself; the hub has no other commit. The third time there is no hub any more."
    (_, second, third), _ = from_hub
    original = load_questions(name, OWN[FILES[name]])
    for got in (second[name], third[name]):
        assert set(got) == set(BENCHMARKS[name].hub_splits)
        for rows in got.values():
            assert [(text, golds[0]) for _, text, golds, _ in rows] == [(q.text, q.answers[0]) for q in original]
            if name != 'bamboogle':
                assert rows == json.loads(json.dumps([[q.id, q.text, q.answers, q.meta] for q in original]))


@pytest.mark.long
def test_an_interrupted_download_goes_on_where_it_was(from_hub):
    (first, second, _), hub = from_hub
    for name, split, file in (('hotpotqa', 'train', 'distractor/train-00000-of-00001.parquet'),
                              ('finqa', 'dev', 'dataset/dev.json')):
        kind, said = first[name][split]
        assert kind == 'ConnectionError' and 'interrupted' in said and second[name][split][0][1]
        # that much came, and it is written 64 bytes at a time
        half = len(hub.repositories[BENCHMARKS[name].hub[0]][1][file]) // 2
        rest = f'bytes={half // 64 * 64}-'
        # broken off; tried again at once, refused; the rest, by another process
        assert half > 64 and hub.transfers(file) == [None, rest, rest]
    files = [f for _, of in hub.repositories.values() for f in of if f not in hub.cut and not f.endswith('.md')]
    assert files and all(hub.transfers(f) == [None] for f in files)             # what is there is not asked for again


def test_a_file_that_is_not_what_was_announced_is_removed(tmp_path):
    path = tmp_path / 'a.parquet.part'
    path.write_bytes(b'half of one, half of another')
    datasets._check_sum(path, None)
    datasets._check_sum(path, hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(OSError, match='damaged'): datasets._check_sum(path, '0' * 64)
    assert not path.exists()


@pytest.mark.long
def test_the_hubs_token_is_for_the_hub(from_hub, monkeypatch, tmp_path):
    _, hub = from_hub
    assert 'Bearer secret' in hub.tokens
    monkeypatch.setenv('HF_TOKEN', 'secret')
    with Hub({'a/b': ('0' * 40, {'x.json': b'[]'})}) as elsewhere:
        datasets._fetch(f'{elsewhere.url}/datasets/a/b/resolve/{"0" * 40}/x.json', tmp_path / 'deep' / 'x.json')
    assert elsewhere.tokens == {None} and (tmp_path / 'deep' / 'x.json').read_bytes() == b'[]'


def test_a_beginning_that_is_too_long_is_thrown_away(tmp_path):
    (tmp_path / 'x.json.part').write_bytes(b'something else')
    with Hub({'a/b': ('0' * 40, {'x.json': b'[3]'})}) as hub:
        for _ in range(2): datasets._fetch(f'{hub.url}/datasets/a/b/resolve/{"0" * 40}/x.json', tmp_path / 'x.json')
    assert (tmp_path / 'x.json').read_bytes() == b'[3]' and hub.transfers('x.json') == [None]
    assert not (tmp_path / 'x.json.part').exists()


def test_a_split_that_the_hub_has_not_is_refused():
    for name in FILES:
        for split in {'train', 'dev', 'test', None} - set(BENCHMARKS[name].hub_splits):
            if split is None and len(BENCHMARKS[name].hub_splits) == 1: continue
            with pytest.raises(ValueError, match='splits'): load_questions(name, split=split)


@pytest.mark.parametrize('name', ['nq', 'browsecompplus', 'finqa'])
def test_offline_is_said_clearly(monkeypatch, tmp_path, name):
    import huggingface_hub
    def offline(*args, **kwargs): raise OSError('[Errno 101] Network is unreachable')
    bench = BENCHMARKS[name]
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HOME', str(tmp_path))
    monkeypatch.setattr(datasets, '_fetch', offline)
    monkeypatch.setattr(datasets, 'ask_hub', offline)
    monkeypatch.setitem(sys.modules, 'datasets', SimpleNamespace(load_dataset_builder=offline))
    with pytest.raises(ConnectionError) as e: load_questions(name, split=bench.eval_split)
    for said in (bench.hub[0], bench.hub[2], 'unreachable', bench.home, 'give it as path',
                 datasets._file_names(bench, bench.eval_split)[0]):
        assert said in str(e.value)
    if '://' in bench.hub_splits[bench.eval_split]: return  # FinQA's files are fetched without the package
    monkeypatch.setitem(sys.modules, 'datasets', None)                          # not installed
    with pytest.raises(ImportError, match=r'credit_rl\[train\]'): load_questions(name, split=bench.eval_split)


# ---- parts and mixtures ----

QUESTIONS = [Question(f'q{i}', 'Who?', ['Ada'], 'nq') for i in range(30)]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 5), st.permutations(QUESTIONS))
def test_subsample(n, m, seed, shuffled):
    a, b = subsample(QUESTIONS, n, seed), subsample(QUESTIONS, m, seed)
    assert len(a) == min(n, 30) and a == [q for q in QUESTIONS if q in a] and a == subsample(QUESTIONS, n, seed)
    assert set(a) <= set(b) or set(b) <= set(a)
    c = subsample(shuffled, n, seed)
    assert set(c) == set(a) and c == [q for q in shuffled if q in c]           # the same questions, in the file's order
    fewer = [q for q in QUESTIONS if q.id != a[0].id]
    if n < 30: assert set(a[1:]) < set(subsample(fewer, n, seed))  # a question that is gone changes no other's draw


def test_subsample_depends_on_the_seed_and_favours_nobody():
    assert len({tuple(q.id for q in subsample(QUESTIONS, 5, seed)) for seed in range(20)}) > 15
    times = Counter(q.id for seed in range(600) for q in subsample(QUESTIONS, 10, seed))
    assert all(140 < times[q.id] < 260 for q in QUESTIONS)                      # 200 expected, standard deviation 11.5
    with pytest.raises(ValueError, match='least'): subsample(QUESTIONS, 0, 0)


# ---- real slices, where CREDIT_RL_DATA points to them ----

REAL = {  # set → file in its folder → questions
    'nq': {'NQ-open.dev.jsonl': 200, 'flashrag_test.jsonl': 200}, 'popqa': {'popQA.tsv': 200, 'flashrag_test.jsonl': 200},
    'triviaqa': {'flashrag_test.jsonl': 200, 'triviaqa_sample.json': 1, 'unfiltered-web-dev.json': 3,
                 'unfiltered-web-train.json': 3, 'wikipedia-dev.json': 1, 'web-dev.json': 3},
    'hotpotqa': {'hotpot_dev_distractor_v1.json': 120, 'hotpot_train_v1.1.json': 100,
                 'hf_distractor_validation.json': 60}, '2wikimultihopqa': {'dev.json': 99, 'train.json': 150},
    'musique': {'musique_ans_v1.0_dev.jsonl': 120, 'musique_ans_v1.0_train.jsonl': 100,
                '../verl_parquet/agentic_rag_musique_train.parquet': 500},
    'bamboogle': {'bamboogle.csv': 75, 'flashrag_test.jsonl': 75}, 'gsm8k': {'test.jsonl': 200, 'train.jsonl': 500},
    'finqa': {'dev.json': 120, 'train.json': 100}}
CORPORA = {
    'nq': {'wiki18_passages.jsonl': 2579, '../search_r1/corpus.jsonl': 10}, 'triviaqa': {'wiki18_passages.jsonl': 2601},
    'popqa': {'wiki18_passages.jsonl': 1859, 'popqa_corpus.json': 331}, 'bamboogle': {'wiki18_passages.jsonl': 432},
    'hotpotqa': {'hotpotqa_corpus.json': 2174, 'hipporag_hotpotqa_train_corpus.json': 994},
    '2wikimultihopqa': {'2wikimultihopqa_corpus.json': 1717, 'hipporag_2wikimultihopqa_corpus.json': 6119},
    'musique': {'musique_corpus.json': 3894}}


@pytest.mark.parametrize('name', REAL)
def test_real_questions(data, name):
    for file, n in REAL[name].items():
        questions = strict(load_questions, name, data / name / file)
        assert len(questions) == n == len({q.id for q in questions}) and not questions.skipped, file
        assert all(q.source == name and q.text.strip() and q.answers for q in questions), file
        json.dumps([q.meta for q in questions])
    assert not BENCHMARKS[name].common or load_questions(name, data / name, split=BENCHMARKS[name].eval_split)


@pytest.mark.parametrize('name', CORPORA)
def test_real_corpora(data, name):
    for file, n in CORPORA[name].items():
        corpus = strict(load_corpus, name, data / name / file)
        assert len(corpus) == n == len({p.id for p in corpus}) and all(p.text.strip() and p.title for p in corpus), file
    assert len(load_corpus(name, data / name)) > 300


@pytest.mark.parametrize('name', ['hotpotqa', '2wikimultihopqa', 'musique'])
def test_real_paragraphs_make_the_corpus_that_others_made_of_them(data, name):
    pieces = lambda passages: {(p.title, p.text) for p in passages}
    made = [load_corpus(name, data / name, split=s) for s in ('dev', 'train')]
    assert pieces(made[0]) | pieces(made[1]) == pieces(load_corpus(name, data / name))
    assert all(len(pieces(m)) == len(m) for m in made)


# ---- the set that lies in the repository ----

@pytest.mark.nightly
def test_the_real_parts_share_neither_questions_nor_pages_that_hold_an_answer():
    from credit_rl.tspo import first_occurrence
    parts = {part: load_questions('real', split=part) for part in ('train', 'dev', 'test')}
    pages = load_corpus('real')
    by_title = {}
    for p in pages: by_title.setdefault(p.title, []).append(p)
    search, held = BM25(pages), {}
    for part, questions in parts.items():
        for q in questions:
            assert q.meta['hops'] in (1, 2) and q.id.startswith(f'{q.source}:')
            named = [p for title, *_ in q.meta.get('supporting_facts', ()) for p in by_title.get(title, ())]
            shows = lambda found: {p.title for p in found if first_occurrence([p.text], q.answers) == 0}
            own = shows(named) or shows(search.search([q.text], 10)[0])
            assert own, q
            for title in own: held.setdefault(title, set()).add(part)
    assert all(len(of) == 1 for of in held.values())
    texts = [q.text.lower() for questions in parts.values() for q in questions]
    assert len(texts) == len(set(texts)) == 898
    assert {q.source for q in parts['train']} == {q.source for q in parts['test']} == {
        'hotpotqa', '2wikimultihopqa', 'musique', 'nq', 'popqa'}
