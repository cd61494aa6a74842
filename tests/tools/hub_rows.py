"""Rows of our own for every data set, in their original layout and as their Hugging Face copies have them."""
import io
import json
from pathlib import Path

import pytest

from credit_rl.benchmarks import BENCHMARKS
from credit_rl.readers import read_rows

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / 'data' / 'hotpotqa_sample.json'
OWN = {p.name: p for p in (ROOT / 'data' / 'rows').iterdir() if p.is_file()} | {SAMPLE.name: SAMPLE}
FILES = {
    'nq': 'nq.jsonl', 'triviaqa': 'triviaqa.json', 'popqa': 'popqa.tsv', 'hotpotqa': SAMPLE.name, '2wikimultihopqa':
    '2wikimultihopqa.json', 'musique': 'musique.jsonl', 'bamboogle': 'bamboogle.csv', 'gsm8k': 'gsm8k.jsonl', 'finqa':
    'finqa.json', 'browsecompplus': 'browsecompplus.jsonl'
}


def own_rows(name):
    return [row for _, row in read_rows(OWN[FILES[name]])]


def columns(row):
    "A HotpotQA or 2Wiki row in the Hugging Face layout."
    pairs = {'supporting_facts': ('title', 'sent_id'), 'context': ('title', 'sentences')}
    return {'id': row['_id']} | {
        k: {c: [p[i]
                for p in v]
            for i, c in enumerate(pairs[k])} if k in pairs else v
        for k, v in row.items()
        if k != '_id'
    }


def hub_row(name, row):
    "An original row as its Hugging Face copy has it."
    if name in ('hotpotqa', '2wikimultihopqa'): return columns(row)
    if name == 'triviaqa':
        a = row['Answer']
        return {
            'question': row['Question'], 'question_id': row['QuestionId'], 'question_source': row['QuestionSource'],
            'entity_pages': {'title': ['Orvane'], 'wiki_context':
                             ['Orvane is a port.']}, 'search_results': {'title': [], 'search_context': []}, 'answer': {
                                 'value': a['Value'], 'aliases': a['Aliases'], 'normalized_aliases':
                                 a['NormalizedAliases'], 'type': a['Type']
                             }
        }
    if name == 'bamboogle': return {'Question': row[0], 'Answer': row[4]}
    if name == 'finqa':
        qa = row['qa']
        return {k: row[k] for k in ('id', 'pre_text', 'post_text', 'table')} | {
            'question': qa['question'], 'answer': qa['answer'], 'final_result': str(qa['exe_ans']), 'program_re':
            qa['program_re'], 'gold_inds': []
        }
    return row


def hub_files(name, splits):
    "The files of one set's repository: a card that says which file is which split, and a file of rows for each."
    bench, rows = BENCHMARKS[name], [hub_row(name, row) for row in own_rows(name)]
    if name == 'finqa': return {f'dataset/{split}.json': OWN['finqa.json'].read_bytes() for split in splits}
    config, kind = bench.hub[1] or 'default', 'jsonl' if name in ('musique', 'bamboogle') else 'parquet'
    folder = 'data' if name == 'browsecompplus' else config
    card = ''.join(f'  - split: {theirs}\n    path: {folder}/{theirs}-*\n' for theirs in splits.values())
    files = {'README.md': f'---\nconfigs:\n- config_name: {config}\n  data_files:\n{card}---\n'.encode()}
    for theirs in splits.values():
        out = io.BytesIO()
        if kind == 'jsonl': out.write(''.join(json.dumps(row) + '\n' for row in rows).encode())
        else:
            pytest.importorskip('pyarrow.parquet').write_table(
                pytest.importorskip('pyarrow').Table.from_pylist(rows), out)
        files[f'{folder}/{theirs}-00000-of-00001.{kind}'] = out.getvalue()
    return files
