"""Make the files beside this one from slices of five data sets, each in a folder of its own name:

    python data/real/make.py FOLDER

README.md says of which files the slices were cut, and what is left out.
"""
import gzip
import hashlib
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from credit_rl.benchmarks import get_benchmark, read_passages
from credit_rl.datasets import load_corpus, load_questions
from credit_rl.folr import evidence_golds, first_occurrence
from credit_rl.readers import Passage, read_rows
from credit_rl.retrieval import BM25

HERE = Path(__file__).resolve().parent
# set, file, part of a release that it is from; questions of a training split stay training questions
QUESTIONS = (('hotpotqa', 'hotpot_train_v1.1.json', 'train'), ('hotpotqa', 'hotpot_dev_distractor_v1.json', 'dev'),
             ('hotpotqa', 'hf_distractor_validation.json', 'dev'),
             ('2wikimultihopqa', 'train.json', 'train'), ('2wikimultihopqa', 'dev.json', 'dev'),
             ('musique', 'musique_ans_v1.0_train.jsonl', 'train'), ('musique', 'musique_ans_v1.0_dev.jsonl', 'dev'),
             ('nq', 'NQ-open.dev.jsonl', None), ('popqa', 'popQA.tsv', None), ('popqa', 'flashrag_test.jsonl', None))
PASSAGES = (('nq', 'wiki18_passages.jsonl'), ('popqa', 'popqa_corpus.json'), ('popqa', 'wiki18_passages.jsonl'))
DEV, TEST = 0.15, 0.33            # of what a release does not split itself; of its dev questions those are 5 to 11
NEAR = 10                         # passages that BM25 finds first, where none is named or a named one lacks the gold


def draw(text):
    "A number in [0, 1) from a text, as good as random and the same everywhere."
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) / 16 ** 12


def wanted(question):
    "Whether a question can be answered by a few searches: one or two hops, and a gold that a page can show."
    return question.meta.get('hops', 1) <= 2 and bool(evidence_golds(question.answers))


def read_questions(folder):
    "The questions that are wanted, once each: list of (Question, part of its release)."
    found, texts = [], set()
    for name, file, part in QUESTIONS:
        rows = [q for q in load_questions(name, folder/name/file) if wanted(q)]
        for q in sorted(rows, key=lambda q: draw(f'{name} {q.id}')):
            key = q.text.lower().strip('? ')
            if key not in texts: found.append((replace(q, meta={'hops': 1, **q.meta}), part))
            texts.add(key)
    return found


def read_all_passages(folder, questions):
    "The passages of the sets, each once: list of Passage. Those of sets with paragraphs are of the wanted questions."
    kept, once = {(q.source, q.text) for q, _ in questions}, {}
    for name, file, _ in QUESTIONS:
        if get_benchmark(name).paragraphs is None: continue
        for _, row in read_rows(folder/name/file):
            if (name, row['question'].strip()) not in kept: continue
            once |= {(title, text): None for _, title, text in read_passages(get_benchmark(name), row)}
    for name, file in PASSAGES:
        once |= {(p.title, p.text): None for p in load_corpus(name, folder/name/file)}
    # in the passages of 100 words the title is said again before the text
    tidy = {(title, text.removeprefix(title).strip() or text): None for title, text in once}
    return [Passage(str(i), title, text) for i, (title, text) in enumerate(tidy)]


def holders(question, titles, search):
    """Numbers of the passages that hold a gold: of those that the question names, else of those found first. Passages
    of one page count as one."""
    named = [p for title, *_ in question.meta.get('supporting_facts', ()) for p in titles.get(title, ())]
    for near in (named, search.search([question.text], NEAR)[0]):
        if held := {p.title for p in near if first_occurrence([p.text], question.answers) == 0}: return held
    return set()


def parts_of(questions, held):
    """Deal questions into train, dev and test, so that no two parts share a page that holds an answer: a list of names,
    None for a question that would bind a training split to another."""
    root = {}
    def find(x):
        while root.setdefault(x, x) != x: x = root[x]
        return x
    for pages in held:
        first, *rest = [find(p) for p in sorted(pages)]
        for p in rest: root[find(p)] = find(first)
    bound = [find(min(pages)) for pages in held]
    trained = {b for (_, part), b in zip(questions, bound) if part == 'train'}
    def part_of(part, b):
        if part == 'train': return 'train'
        if b in trained: return None if part == 'dev' else 'train'
        at, both = draw(b), DEV + TEST
        if any(p == 'dev' for (_, p), other in zip(questions, bound) if other == b): at *= both
        return 'dev' if at < DEV else 'test' if at < both else 'train'
    return [part_of(part, b) for (_, part), b in zip(questions, bound)]


def write(name, rows):
    "Write rows as packed JSON lines; the same rows give the same bytes."
    text = ''.join(json.dumps(row, ensure_ascii=False, separators=(',', ':')) + '\n' for row in rows)
    (HERE/name).write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def main(folder):
    questions = read_questions(folder)
    passages = read_all_passages(folder, questions)
    search, titles = BM25(passages), {}
    for p in passages: titles.setdefault(p.title, []).append(p)
    held = [holders(q, titles, search) for q, _ in questions]
    questions, held = zip(*[(q, h) for q, h in zip(questions, held) if h])
    parts = parts_of(questions, held)
    for name in ('train', 'dev', 'test'):
        rows = [{'id': f'{q.source}:{q.id}', 'set': q.source, 'question': q.text, 'answers': list(q.answers), **q.meta}
                for (q, _), part in zip(questions, parts) if part == name]
        write(f'{name}.jsonl.gz', sorted(rows, key=lambda r: draw(r['id'])))
        print(name, len(rows), dict(Counter(r['set'] for r in rows)), dict(Counter(r['hops'] for r in rows)))
    write('corpus.jsonl.gz', [{'title': p.title, 'text': p.text} for p in passages])
    print(f'{len(passages)} passages, {sum(p.stat().st_size for p in HERE.glob("*.gz")) / 1e6:.2f} MB in all')


if __name__ == '__main__': main(Path(sys.argv[1]))
