"Loaders: both HotpotQA layouts, corpora, splits, malformed rows, no network; real slices where CREDIT_RL_DATA points to them."
import copy
import json
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from credit_rl import datasets
from credit_rl.datasets import (BENCHMARKS, Benchmark, Passage, RowError, get_benchmark, load_corpus, load_questions, read_rows, register,
                                subsample)
from credit_rl.trajectory import Question

SAMPLE = Path(__file__).parents[1] / 'data' / 'hotpotqa_sample.json'
ROWS = json.loads(SAMPLE.read_text(encoding='utf-8'))
DATA = os.environ.get('CREDIT_RL_DATA')


def columns(row):
    "A row in the Hugging Face layout."
    return {'id': row['_id'], 'question': row['question'], 'answer': row['answer'], 'type': row['type'], 'level': row['level'],
            'supporting_facts': {'title': [t for t, _ in row['supporting_facts']], 'sent_id': [i for _, i in row['supporting_facts']]},
            'context': {'title': [t for t, _ in row['context']], 'sentences': [s for _, s in row['context']]}}


def write(path, rows, encoding='utf-8'):
    text = '\n'.join(map(json.dumps, rows)) + '\n' if path.suffix == '.jsonl' else json.dumps(rows)
    path.write_text(text, encoding=encoding)
    return path


def test_the_sample():
    questions = load_questions('hotpotqa', SAMPLE)
    assert len(questions) == 6 and [q.id for q in questions] == [r['_id'] for r in ROWS]
    q = questions[0]
    assert q.answers == ('Orvane',) and q.source == 'hotpotqa' and q.meta['hops'] == 2 and q.meta['type'] == 'bridge'
    json.dumps([q.meta for q in questions])
    for row in ROWS:                                                           # the sample is sound itself
        paragraphs = dict(row['context'])
        assert all(i < len(paragraphs[t]) for t, i in row['supporting_facts'])


@pytest.mark.parametrize('name', ['a.json', 'a.jsonl'])
@pytest.mark.parametrize('layout', [dict, columns])
@pytest.mark.parametrize('encoding', ['utf-8', 'utf-8-sig'])
def test_layouts_and_files_say_the_same(tmp_path, name, layout, encoding):
    path = write(tmp_path / name, [layout(r) for r in ROWS], encoding)
    assert load_questions('hotpotqa', path) == load_questions('hotpotqa', SAMPLE)
    assert [q.meta for q in load_questions('hotpotqa', path)] == [q.meta for q in load_questions('hotpotqa', SAMPLE)]
    assert load_corpus('hotpotqa', path) == load_corpus('hotpotqa', SAMPLE)


def test_rows_without_context_or_id(tmp_path):
    rows = [{'question': 'Who?', 'answer': ' Ada '}, {'question': 'Where?', 'answer': 'Orvane', 'context': None}]
    path = write(tmp_path / 'fullwiki.json', rows)
    questions = load_questions('hotpotqa', path)
    assert [q.id for q in questions] == ['hotpotqa-row0', 'hotpotqa-row1'] and questions[0].answers == ('Ada',)
    with pytest.raises(ValueError, match='no paragraphs'): load_corpus('hotpotqa', path)


def broken(**changes):
    row = copy.deepcopy(ROWS[1])
    for k, v in changes.items():
        if v is ...: del row[k]
        else: row[k] = v
    return row


@pytest.mark.parametrize('row, field', [
    (broken(answer=...), 'answer'), (broken(answer=None), 'answer'), (broken(answer=' '), 'answer'), (broken(answer=['x']), 'answer'),
    (broken(question=...), 'question'), (broken(question=3), 'question'), (broken(supporting_facts=[['only one']]), 'supporting_facts'),
    (broken(supporting_facts={'title': ['a'], 'sent_id': []}), 'supporting_facts'), (broken(_id='sample-0'), 'id'), (['a list'], '(row)'),
    ('text', '(row)')])
def test_a_malformed_question_names_file_row_and_field(tmp_path, row, field):
    for name, place in (('a.json', 'a.json, row 1'), ('a.jsonl', 'a.jsonl, line 2')):
        path = write(tmp_path / name, [ROWS[0], row, ROWS[2]])
        with pytest.raises(RowError) as e: load_questions('hotpotqa', path)
        assert e.value.field == field and place in str(e.value) and repr(field) in str(e.value)
        with pytest.warns(UserWarning, match=f'skipped 1 of 3 rows; the first: {place}'):
            assert [q.id for q in load_questions('hotpotqa', path, on_error='skip')] == ['sample-0', 'sample-2']


@pytest.mark.parametrize('context', [[['title']], {'title': ['a', 'b'], 'sentences': [['x']]}, [['a', 'not a list']], [['a', [3]]],
                                     [[3, ['x']]], 'text'])
def test_a_malformed_paragraph_names_its_field(tmp_path, context):
    path = write(tmp_path / 'a.json', [ROWS[0], broken(context=context)])
    with pytest.raises(RowError, match="a.json, row 1: field 'context'"): load_corpus('hotpotqa', path)
    with pytest.warns(UserWarning, match='skipped 1 of 2'):
        assert len(load_corpus('hotpotqa', path, on_error='skip')) == len(ROWS[0]['context'])


def test_a_line_that_is_not_json(tmp_path):
    path = tmp_path / 'a.jsonl'
    path.write_text(json.dumps(ROWS[0]) + '\n\n' + json.dumps(ROWS[1])[:40] + '\n')
    with pytest.raises(RowError, match='a.jsonl, line 3.*not JSON'): load_questions('hotpotqa', path)
    with pytest.warns(UserWarning, match='skipped 1 of 2'): assert len(load_questions('hotpotqa', path, on_error='skip')) == 1


def test_files_that_are_not_what_they_were_taken_for(tmp_path):
    cut = tmp_path / 'cut.json'
    cut.write_text(SAMPLE.read_text()[:500])
    with pytest.raises(ValueError, match='cut.json is not JSON'): load_questions('hotpotqa', cut, on_error='skip')
    with pytest.raises(ValueError, match='no rows'): load_questions('hotpotqa', write(tmp_path / 'empty.json', []))
    with pytest.raises(ValueError, match='all 2 rows are malformed'):
        load_questions('hotpotqa', write(tmp_path / 'other.json', [{'text': 'a'}, {'text': 'b'}]), on_error='skip')
    with pytest.raises(ValueError, match='neither'): load_questions('hotpotqa', write(tmp_path / 'object.json', {'version': 1}))
    with pytest.raises(ValueError, match='suffixes'): read_rows(tmp_path / 'a.xml')
    with pytest.raises(FileNotFoundError): load_questions('hotpotqa', tmp_path / 'none.json')
    with pytest.raises(FileNotFoundError): read_rows(tmp_path / 'none.json')
    with pytest.raises(ValueError, match='on_error'): load_questions('hotpotqa', SAMPLE, on_error='ignore')


def test_a_split_picks_the_file_of_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match='hot.*looked for'): load_questions('hotpotqa', tmp_path)
    write(tmp_path / 'hotpot_train_v1.1.json', ROWS[:2])
    assert len(load_questions('hotpotqa', tmp_path)) == 2                       # the only split there is
    write(tmp_path / 'hotpot_dev_distractor_v1.json', ROWS[2:])
    assert len(load_questions('hotpotqa', tmp_path, split='train')) == 2
    assert load_questions('hotpotqa', tmp_path, split='dev') == load_questions('hotpotqa', tmp_path, split='validation')
    with pytest.raises(ValueError, match='several splits.*split='): load_questions('hotpotqa', tmp_path)
    with pytest.raises(FileNotFoundError, match="'test'"): load_questions('hotpotqa', tmp_path, split='test')
    with pytest.raises(ValueError, match='unknown split'): load_questions('hotpotqa', tmp_path, split='trian')
    assert {(p.title, p.text) for p in load_corpus('hotpotqa', tmp_path)} == {(p.title, p.text) for p in load_corpus('hotpotqa', SAMPLE)}
    assert len(load_corpus('hotpotqa', tmp_path, split='train')) == 8
    write(tmp_path / 'hotpot_train_v1.json', ROWS)
    with pytest.raises(ValueError, match='2 files'): load_questions('hotpotqa', tmp_path, split='train')
    assert len(load_questions('hotpotqa', tmp_path, split='dev')) == 4


def test_unknown_names_get_the_nearest():
    assert get_benchmark('Hotpot-QA') is get_benchmark('hotpot_qa')
    with pytest.raises(ValueError, match="did you mean 'hotpotqa'"): load_questions('hotpot', SAMPLE)
    with pytest.raises(ValueError, match='Known: .*hotpotqa'): load_corpus('zzz', SAMPLE)
    with pytest.raises(ValueError, match='already'): register(BENCHMARKS['hotpotqa'])
    with pytest.raises(ValueError, match='lower-case'): register(Benchmark('Hotpot-QA', None))


def test_another_benchmark_joins_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, 'BENCHMARKS', dict(BENCHMARKS))
    register(Benchmark('own', lambda row, i: Question(str(i), row['q'], row['a'], 'own'), files={'test': ('own.jsonl',)}))
    write(tmp_path / 'own.jsonl', [{'q': 'Who?', 'a': ['Ada', 'Lovelace']}])
    assert load_questions('own', tmp_path)[0].answers == ('Ada', 'Lovelace')
    with pytest.raises(RowError, match='a passage has'): load_corpus('own', tmp_path)
    assert load_questions('own', tmp_path, split='test')


def test_corpus_files(tmp_path):
    path = write(tmp_path / 'a.jsonl', [{'id': 7, 'contents': '"A "B" c"\nline 1\nline 2'}, {'id': 'x', 'contents': 'no title'}])
    assert load_corpus('hotpotqa', path) == [Passage('7', 'A "B" c', 'line 1\nline 2'), Passage('x', '', 'no title')]
    path = write(tmp_path / 'b.json', [{'title': 'T', 'text': 'a'}, {'title': 'T', 'text': 'a'}, {'text': 'b', 'title': None}])
    # a corpus file is taken as it is
    assert load_corpus('hotpotqa', path) == [Passage('0', 'T', 'a'), Passage('1', 'T', 'a'), Passage('2', '', 'b')]
    path = write(tmp_path / 'c.json', {'T': ['One.', ' Two.'], 'U': ['x']})
    assert load_corpus('hotpotqa', path) == [Passage('0', 'T', 'One. Two.'), Passage('1', 'U', 'x')]
    assert load_corpus('hotpotqa', write(tmp_path / 'd.json', [{'id': 3, 'title': 'T', 'text': 'a'}])) == [Passage('3', 'T', 'a')]
    for rows, field in (([{'id': 1, 'contents': ''}], 'contents'), ([{'contents': 'a'}], 'id'), ([{'title': 'a', 'text': 3}], 'text'),
                        ([{'body': 'a'}], 'text'), ([3], '(row)'), ([{'id': 1, 'contents': 'a'}, {'id': 1, 'contents': 'b'}], 'id'),
                        ([{'title': 't', 'sentences': 'not a list'}], 'sentences')):
        with pytest.raises(RowError) as e: load_corpus('hotpotqa', write(tmp_path / 'e.jsonl', rows))
        assert e.value.field == field and f'e.jsonl, line {len(rows)}' in str(e.value)


def test_a_folders_corpus_file_comes_first(tmp_path):
    write(tmp_path / 'hotpot_dev_distractor_v1.json', ROWS)
    write(tmp_path / 'wiki_passages.jsonl', [{'id': '0', 'contents': '"T"\na'}])
    assert [p.title for p in load_corpus('hotpotqa', tmp_path)] == ['T']
    write(tmp_path / 'hotpotqa_corpus.json', [{'title': 'U', 'text': 'b'}])
    assert [p.title for p in load_corpus('hotpotqa', tmp_path)] == ['U']
    assert len(load_corpus('hotpotqa', tmp_path, split='dev')) == 14


def test_download_is_pinned_and_offline_is_said_clearly(monkeypatch):
    asked = []
    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return [columns(r) for r in ROWS]
    monkeypatch.setitem(sys.modules, 'datasets', SimpleNamespace(load_dataset=load_dataset))
    assert load_questions('hotpotqa', split='validation') == load_questions('hotpotqa', SAMPLE)
    assert load_corpus('hotpotqa', split='dev') == load_corpus('hotpotqa', SAMPLE)
    (args, kwargs), _ = asked
    assert args == ('hotpotqa/hotpot_qa', 'distractor') and kwargs['split'] == 'validation' and len(kwargs['revision']) == 40
    with pytest.raises(ValueError, match='splits'): load_questions('hotpotqa')
    with pytest.raises(ValueError, match='splits'): load_questions('hotpotqa', split='test')

    def offline(*args, **kwargs): raise OSError('[Errno 101] Network is unreachable')
    monkeypatch.setitem(sys.modules, 'datasets', SimpleNamespace(load_dataset=offline))
    with pytest.raises(ConnectionError, match=r'hotpotqa/hotpot_qa(.|\n)*unreachable(.|\n)*give it as path'):
        load_questions('hotpotqa', split='dev')
    monkeypatch.setitem(sys.modules, 'datasets', None)                          # not installed
    with pytest.raises(ImportError, match=r'credit_rl\[train\]'): load_questions('hotpotqa', split='dev')


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 5))
def test_subsample(n, m, seed):
    items = list(range(30))
    a, b = subsample(items, n, seed), subsample(items, m, seed)
    assert len(a) == min(n, 30) and a == sorted(set(a)) and a == subsample(items, n, seed)
    assert set(a) <= set(b) or set(b) <= set(a)


def test_subsample_depends_on_the_seed():
    assert len({tuple(subsample(range(100), 5, seed)) for seed in range(20)}) > 15
    with pytest.raises(ValueError, match='at least 1'): subsample([1], 0, 0)


def test_a_large_file_shows_progress(tmp_path, monkeypatch, capsys):
    load_questions('hotpotqa', SAMPLE)
    assert not capsys.readouterr().err
    monkeypatch.setattr(Path, 'stat', lambda self, **k: SimpleNamespace(st_size=10 ** 8, st_mode=0o100644))
    assert len(list(datasets._progress([1, 2], SAMPLE, 2))) == 2 and SAMPLE.name in capsys.readouterr().err


real = pytest.mark.skipif(not DATA, reason='CREDIT_RL_DATA is not set')


@real
def test_real_hotpotqa():
    folder = Path(DATA) / 'hotpotqa'
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        dev, train = load_questions('hotpotqa', folder, 'dev'), load_questions('hotpotqa', folder, 'train')
        hub = load_questions('hotpotqa', folder / 'hf_distractor_validation.json')
        corpus = load_corpus('hotpotqa', folder)
        built = load_corpus('hotpotqa', folder / 'hotpot_dev_distractor_v1.json')
        old = load_corpus('hotpotqa', folder / 'hipporag_hotpotqa_train_corpus.json')
        example = load_corpus('hotpotqa', Path(DATA) / 'search_r1' / 'corpus.jsonl')
    assert (len(dev), len(train), len(hub), len(corpus), len(old), len(example)) == (120, 100, 60, 2174, 994, 10)
    assert {q.meta['type'] for q in dev} == {'bridge', 'comparison'} and {len(q.answers) for q in dev} == {1}
    pairs = lambda passages: {(p.title, p.text) for p in passages}
    assert pairs(built) | pairs(load_corpus('hotpotqa', folder / 'hotpot_train_v1.1.json')) == pairs(corpus)
    titles = {p.title for p in built}
    assert all(t in titles for q in dev for t, _ in q.meta['supporting_facts'])
    assert all(p.title and p.text for p in example)
