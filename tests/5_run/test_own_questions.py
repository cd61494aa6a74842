"""A file of one's own questions, a folder of documents: what is read, trained on, and said of what was seen before."""
import gzip
import io
import json
import re
import shutil
import subprocess
from pathlib import PurePath

import pytest
import yaml

from credit_rl.command import main as command
from credit_rl.datasets import find_own_files, load_corpus, load_questions
from credit_rl.environment import open_search
from credit_rl.evaluate import Evaluation, note_seen, open_set, train_keys
from credit_rl.readers import Cutting, read_documents
from credit_rl.retrieval import BM25
from credit_rl.runlog import read_turns
from credit_rl.sft import demos_main, main as sft_main
from credit_rl.settings import check, make_config
from credit_rl.setup import real_questions, real_search
from gguf_files import small_llama

PORTS = ['Orvane', 'Salmir', 'Tessk', 'Brillo', 'Quay', 'Harn', 'Velt', 'Ombra', 'Lyst', 'Kerrow', 'Dunmere', 'Ashby']


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "Questions about ports, a page of each, and a small random model."
    place = tmp_path_factory.mktemp('mine')
    (place / 'pages').mkdir()
    rows = [{'question': f'Who keeps the lighthouse of {port}?', 'answer': f'Keeper {port[::-1]}'} for port in PORTS]
    (place / 'ports.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    for port in PORTS:
        (place / 'pages' / f'{port}.md').write_text(f'# {port}\n\n## Lighthouse\n\nIts keeper is Keeper {port[::-1]}.')
    model, tokenizer = small_llama(positions=4096)
    for part in (model, tokenizer): part.save_pretrained(place / 'model')
    return place


def words(place, root, **more):
    given = dict(data=place / 'ports.jsonl', corpus=place / 'pages', model=place / 'model', dev_questions=2,
                 test_questions=2, protocol=root / 'runs/params/protocols/short.yaml', track="''", max_tokens=1500,
                 turn_tokens=6, max_turns=3, malformed='end', threads=1, **more)
    return [f'{name}={value}' for name, value in given.items()]


def parts(place, **more):
    s = make_config({'data': str(place / 'ports.jsonl'), 'corpus': str(place / 'pages'), **more})
    return {part: [q.text for q in found] for part, found in real_questions(s, s.seed).items()}


def test_a_question_keeps_its_part_with_other_numbers_and_seeds(place):
    few, many = parts(place, dev_questions=1, test_questions=1), parts(place, dev_questions=99, test_questions=99, seed=3)
    assert all(set(few[part]) <= set(many[part]) for part in many)
    assert sum(map(len, many.values())) == len(PORTS) == len({q for found in many.values() for q in found})


def test_documents_are_searched(place):
    s = make_config({'data': str(place / 'ports.jsonl'), 'corpus': str(place / 'pages'),
                     'cut': {'words': 3}})
    [found] = real_search(s, 'tspo').search(['lighthouse of Tessk'], 1)
    assert found[0].title == 'Tessk: Lighthouse' and len(found[0].text.split()) <= 3
    assert open_search('hotpotqa', corpus=place / 'pages')[1] == open_search('hotpotqa', corpus=str(place / 'pages'))[1]


@pytest.mark.parametrize('given, message', [
    ({'data': 'nowhere.jsonl'}, 'no such file'), ({'path': 'x'}, 'leave out path'), ({'dev_split': 'dev'}, 'splits'),
    ({'columns': {'golds': 'x'}}, 'columns'), ({'cut': {'words': 2, 'overlap': 2}}, 'overlap')])
def test_what_says_nothing_of_a_file_is_refused(place, given, message):
    with pytest.raises(ValueError, match=message):
        check(make_config({'data': str(place / 'ports.jsonl'), 'corpus': str(place / 'pages'), 'model': str(place / 'model'),
                           **given}))


def test_what_was_demonstrated_is_not_evaluated_without_a_word(place, root, tmp_path, capsys):
    "A question keeps its part, so none is evaluated. A file that names other parts is told of."
    demos_main([*words(place, root), f'run={tmp_path / "demos"}'])
    shown = {row['trajectory']['question']['text'] for row in read_turns(tmp_path / 'demos')}
    sft_main([*words(place, root), 'dev_questions=9', 'test_questions=9', f'run={tmp_path / "sft"}',
              f'sft.demos={tmp_path / "demos"}', 'sft.epochs=1'])
    assert shown and not shown & set(parts(place, test_questions=9)['test'])
    assert 'WARNING' not in capsys.readouterr().out
    rows = [json.loads(line) for line in (place / 'ports.jsonl').read_text().splitlines()]
    held = [row['question'] in shown for row in rows]
    rows = [{**row, 'split': 'test' if seen else part} for row, seen, part in zip(rows, held, ['train', 'dev'] * 6)]
    (tmp_path / 'ports.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    other = [word for word in words(place, root) if not word.startswith('data=')]
    sft_main([*other, f'data={tmp_path / "ports.jsonl"}', 'test_questions=99', f'run={tmp_path / "again"}',
              f'sft.demos={tmp_path / "demos"}', 'sft.epochs=1'])
    assert f'WARNING: {sum(held)} of {sum(held)} test questions' in capsys.readouterr().out
    summary = json.loads((tmp_path / 'again' / 'summary.json').read_text())
    assert summary['test_inside'] == sum(held) and len(train_keys(tmp_path / 'again' / 'model')) == sum(held)
    with pytest.warns(UserWarning, match='trained'):
        open_set(Evaluation(data=str(tmp_path / 'ports.jsonl'), model=str(tmp_path / 'sft' / 'model'),
                            protocol='direct'), 'ports', {})


# ---- nbs/your_data.md ----

@pytest.mark.long
def test_the_page_on_own_data_runs_as_it_stands(place, root, tmp_path, monkeypatch, capsys):
    "From settings to demonstrations, fine-tuning, training, rollouts and a model; added is only what is small."
    page = (root / 'nbs' / 'your_data.md').read_text()
    first, second = ([line.split('#')[0].split()[1:] for line in block.splitlines()]
                     for block in re.findall(r'```bash\n(.*?)\n```', page, re.S))
    made = subprocess.run(['make', '-n', '-o', '.venv/.ok-real', 'mine'], cwd=root, text=True, stdout=subprocess.PIPE).stdout
    said = [line.split('credit_rl.command ')[1] for line in made.replace('\\\n', '').splitlines() if '.command ' in line]
    named = [{*re.sub(r'\$\(.* echo (.*)\)', r'\1', line).split()} for line in said]                # make mine does the same
    assert [words - {'resume=true'} for words in named[2:]] == [{*words} for words in first[1:]]
    shutil.copytree(place, tmp_path / 'mine')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('sys.stdin', io.StringIO('Who keeps the lighthouse of Orvane?\n'))
    small = ['steps=1', 'questions_per_step=2', 'group_size=2', 'dev_questions=2', 'test_questions=2', 'turn_tokens=6',
             'max_tokens=1500', 'max_turns=3', 'base_questions=0', 'threads=1']
    verbs = [words[0] for words in (*first, *second)]
    assert verbs == ['new', 'demos', 'sft', 'train', 'view', 'evaluate', 'train', 'compare', 'ask']
    for words in (*first, *second): assert not command([*words, *(small if words[0] in ('demos', 'sft', 'train') else ())])
    said = capsys.readouterr().out
    assert (tmp_path / 'mine/runs/first/evaluation').exists() and list((tmp_path / 'mine/runs/first').glob('*.html'))
    assert 'grpo − mine/runs/first' in said and 'settings that differ' not in said and said.rstrip().endswith(')') and '→' in said


# ---- credit-rl new ----

def pdf(path, text):
    "Write a PDF file of one page with a line of text, by hand."
    stream = f'BT /F1 12 Tf 72 700 Td ({text}) Tj ET'.encode()
    parts = [b'<</Type/Catalog/Pages 2 0 R>>', b'<</Type/Pages/Kids[3 0 R]/Count 1>>',
             b'<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>',
             b'<</Length %d>>stream\n%s\nendstream' % (len(stream), stream), b'<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>']
    out, starts = b'%PDF-1.4\n', []
    for number, part in enumerate(parts, 1):
        starts.append(len(out))
        out += b'%d 0 obj%s endobj\n' % (number, part)
    table = b''.join(b'%010d 00000 n \n' % at for at in starts)
    path.write_bytes(out + b'xref\n0 6\n0000000000 65535 f \n' + table + b'trailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF'
                     % len(out))


def test_new_writes_settings_that_train_takes(place, capsys):
    command(['new', str(place)])
    out = place / 'credit.yaml'
    assert f'credit-rl train --params {out}' in capsys.readouterr().out
    config = make_config(yaml.safe_load(out.read_text()))
    check(config)
    assert (config.data, config.corpus, config.model) == tuple(str(place / x) for x in ('ports.jsonl', 'pages', 'model'))
    assert all('#' in line for line in out.read_text().split('\n')[1:4])
    with pytest.raises(SystemExit): command(['new', str(place)])
    assert 'already' in capsys.readouterr().err
    out.unlink()


@pytest.mark.parametrize('name, words', [('more.csv', ('more.csv', 'ports.jsonl')), ('corpus.jsonl', ('pages', 'corpus.jsonl')),
                                         ('other/config.json', ('other', 'model'))])
def test_new_names_two_candidates_and_stops(place, capsys, name, words):
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).write_text('{}')
    try:
        with pytest.raises(SystemExit): command(['new', str(place)])
    finally: (place / name).unlink()
    said = capsys.readouterr().err
    assert all(word in said for word in ('2 ', *words)) and not (place / 'credit.yaml').exists()


def test_new_without_documents_asks_directly_and_without_questions_refuses(tmp_path, capsys):
    with pytest.raises(SystemExit): command(['new', str(tmp_path)])
    assert 'no file of questions' in capsys.readouterr().err
    (tmp_path / 'asked.jsonl').write_text('\n'.join(json.dumps({'question': f'{n}?', 'answer': n}) for n in range(9)))
    command(['new', str(tmp_path)])
    found = yaml.safe_load((tmp_path / 'credit.yaml').read_text())
    assert found['protocol'] == 'direct' and 'corpus' not in found and 'fetch smollm2' in capsys.readouterr().out


def test_a_folder_of_many_documents_is_looked_through_once(tmp_path, monkeypatch):
    for n in range(200): (tmp_path / f'{n}.txt').touch()
    (tmp_path / 'asked.CSV.GZ').write_bytes(gzip.compress(b'question,answer\nWho?,Ada\n'))
    compared, same = [], PurePath.__eq__
    monkeypatch.setattr(PurePath, '__eq__', lambda *paths: compared.append(paths) or same(*paths))
    [question] = load_questions(str(find_own_files(tmp_path)['data']))
    assert question.text == 'Who?' and len(compared) < 2000


def test_a_page_has_one_title_and_a_heading_may_break(tmp_path):
    (tmp_path / 'a.html').write_text('<title>Ports</title><h1><svg><title>icon</title></svg>Orvane<br/>harbour</h1><p>Salt.')
    [(_, row)] = read_documents(tmp_path)
    assert (row['title'], row['text']) == ('Ports: Orvane harbour', 'Salt.')


def test_an_index_of_a_folder_of_documents_is_what_corpus_finds(place, tmp_path, capsys):
    "PDF among them, cut as asked for."
    pytest.importorskip('pypdf')
    pages = tmp_path / 'pages'
    shutil.copytree(place / 'pages', pages)
    pdf(pages / 'far.pdf', 'Zarn has two lighthouses on its northern pier')
    [alone] = [text['text'] for _, text in read_documents(pages / 'far.pdf')]
    assert alone == 'Zarn has two lighthouses on its northern pier'
    command(['index', str(pages), str(tmp_path / 'index'), '--words', '5', '--by', 'words'])
    passages = load_corpus('hotpotqa', pages, cut=Cutting('words', 5))
    assert f'{len(passages)} passages' in capsys.readouterr().out
    [found] = BM25.load(tmp_path / 'index').search(['Zarn lighthouses'], 1)
    assert found[0].text == 'Zarn has two lighthouses on'


def test_a_question_of_two_files_is_in_one_part(tmp_path):
    "Where files say different parts of it, test goes before dev, and dev before training."
    parts = ['train', 'dev', 'test']
    for name, shift in (('a', 0), ('b', 1)):
        (tmp_path / f'{name}.jsonl').write_text(''.join(json.dumps(
            {'question': f'{i}?', 'answer': 'x', 'split': parts[(i + shift * (i % 2)) % 3]}) + '\n' for i in range(36)))
    with pytest.warns(UserWarning, match='questions of .* stand in several'):
        found = real_questions(make_config({'data': f'{tmp_path / "a.jsonl"}+{tmp_path / "b.jsonl"}', 'model': 'a/b'}), 0)
    texts = {part: {q.text for q in questions} for part, questions in found.items()}
    assert all(texts.values()) and not texts['train'] & (texts['dev'] | texts['test']) and not texts['dev'] & texts['test']


def test_what_a_row_says_of_its_split_is_kept_whatever_its_golds_are_called(tmp_path):
    parts = ['test', 'train', 'dev', 'test', 'train', 'train']
    rows = [{'question': f'q{i}?', 'golden_answers': ['a'], 'split': part, 'hops': '2.0'} for i, part in enumerate(parts)]
    rows += [{'question': f'v{i}?', 'golden_answers': ['a'], 'metadata': {'x': 1}, 'split': part} for i, part in enumerate(parts)]
    (tmp_path / 'mine.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    found = load_questions(str(tmp_path / 'mine.jsonl'), split='test')
    assert [q.text for q in found] == ['q0?', 'q3?', 'v0?', 'v3?'] and found[0].meta['hops'] == 2


def test_a_question_that_a_column_puts_into_two_parts_is_in_one(tmp_path):
    rows = [('Q5?', 'test'), ('q5? ', 'train'), ('a?', 'train'), ('b?', 'dev'), ('b?', 'train')]
    (tmp_path / 'two.jsonl').write_text('\n'.join(json.dumps({'question': q, 'answer': 'a', 'split': part}) for q, part in rows))
    asked = make_config({'data': str(tmp_path / 'two.jsonl'), 'corpus': str(tmp_path), 'run': 'x'})
    with pytest.warns(UserWarning, match='2 of its questions'): found = real_questions(asked, 1)
    assert {part: [q.text for q in qs] for part, qs in found.items()} == {'train': ['a?'], 'dev': ['b?'], 'test': ['Q5?']}


def test_rows_of_verls_own_tags_are_of_their_sets(tmp_path):
    rows = [{'question': f'{tag}?', 'golden_answers': ['x'], 'data_source': tag} for tag in ('searchR1_nq', 'searchR1_hotpotqa', 'nq')]
    (tmp_path / 'all.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    assert [q.text for q in load_questions('nq', tmp_path / 'all.jsonl')] == ['searchR1_nq?', 'nq?']


def test_what_runs_write_is_no_document(tmp_path):
    (tmp_path / 'a.md').write_text('# A\n\nOf harbours.')
    (tmp_path / 'runs' / 'first').mkdir(parents=True)
    (tmp_path / 'runs' / 'first' / 'view.html').write_text('<p>of a run</p>')
    assert len(list(read_documents(tmp_path))) == 2                                     # somebody's own folder `runs`
    (tmp_path / 'runs' / 'first' / 'params.yaml').write_text('steps: 1')
    assert [name for name, _ in read_documents(tmp_path)] == ['a.md']


def test_a_run_on_the_repositorys_questions_asks_its_own_test_questions(tmp_path):
    "Their sources are the sets that they were drawn from."
    asked = real_questions(make_config({'data': 'real', 'run': 'x', 'test_questions': 5}), 1)
    note_seen(tmp_path, asked['train'], asked['dev'], asked['test'])
    (found, about), _ = open_set(Evaluation(data='real', questions=str(tmp_path), corpus='data/real/corpus.jsonl.gz'), 'real', {})
    assert [q.id for q in found] == [q.id for q in asked['test']] and about['asked'] == 5
