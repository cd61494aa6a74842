"""CARL end to end: training by programs, in segments, with a critic that was warmed up or not, in the tiny world and on real sets."""
import dataclasses
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from credit_rl.datasets import get_benchmark
from credit_rl.evaluate import run_evaluation
from credit_rl.protocol import PROTOCOLS, byte_tokenizer
from credit_rl.runlog import read_metrics, read_turns
from credit_rl.tiny import tiny_model, tiny_tokenizer
from credit_rl.tools import PythonTool, SearchTool
from credit_rl.train import check, make_config, set_stage, train, tiny_worlds
from credit_rl.trajectory import Group, trajectory_from_json

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / 'data' / 'rows'
WORLD = dict(size=300, hops=[1, 2], famous=dict(train=30, dev=15, test=15), easy=5, hard=5)
TINY = dict(protocol='carl-tiny', method='carl', world=WORLD, steps=2, eval_every=2, questions=20, dev_questions=6, test_questions=6, questions_per_step=4, group_size=4,
            learning_rate=1e-3, threads=1, track='')
SETS = {'gsm8k': 'gsm8k.jsonl', 'finqa': 'finqa.json', 'hotpotqa': '../hotpotqa_sample.json', '2wikimultihopqa': '2wikimultihopqa.json', 'musique': 'musique.jsonl'}
REAL = dict(protocol='carl', method='carl', steps=1, eval_every=1, questions_per_step=2, group_size=2, questions=6, dev_questions=1, test_questions=1, turn_tokens=8, max_tokens=12000,
            context_tokens=6, passages=2, passage_tokens=60, kl=.01, threads=1, track='')


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)


@pytest.fixture(scope='module')
def spoken(tmp_path_factory):
    "A Hugging Face folder with a small random Qwen2 and a tokenizer of bytes."
    from transformers import Qwen2Config, Qwen2ForCausalLM
    folder, tokenizer = tmp_path_factory.mktemp('model'), byte_tokenizer()
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                                 max_position_embeddings=16384, eos_token_id=tokenizer.eos_token_id)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope='module')
def rows(tmp_path_factory):
    "A function set name -> a file of eight questions or more: our own rows, each asked several times in other words."
    folder = tmp_path_factory.mktemp('rows')
    def of(name):
        source = ROWS / SETS[name]
        found = [json.loads(line) for line in source.read_text().splitlines()] if source.suffix == '.jsonl' else json.loads(source.read_text())
        def again(row, i):
            if isinstance(row, dict): return {k: f'{v}-{i}' if k in ('id', '_id') else f'({i}) {v}' if k == 'question' else again(v, i) for k, v in row.items()}
            return row
        many = [again(row, i) for i in range(6) for row in found]
        (folder / f'{name}{source.suffix}').write_text('\n'.join(map(json.dumps, many)) if source.suffix == '.jsonl' else json.dumps(many))
        return str(folder / f'{name}{source.suffix}')
    return of


def quiet(settings): return train(settings, say=lambda line: None)


# ---- what an agent of CARL lives in ----

@pytest.mark.parametrize('name', SETS)
def test_each_set_has_its_tools(spoken, rows, name):
    "GSM8K and FinQA can calculate and nothing else; the others can search as well."
    stage = set_stage(make_config({**REAL, 'data': name, 'path': rows(name), 'model': spoken}), say=lambda line: None)
    env = stage.environments['test']
    assert isinstance(env.tool, PythonTool) and (env.max_turns, env.context_tokens, env.chat.protocol) == (15, 6, PROTOCOLS['carl']) and stage.ceiling is None
    assert env.tool.run('print((2100 - 1750) / 1750)') == '0.2'
    if name in ('gsm8k', 'finqa'): assert env.tool.search is None and env.tool.run('search("x")').startswith('Error: ')
    else: assert isinstance(env.tool.search, SearchTool) and env.tool.run('print(search("river Ossel"))').startswith('Doc 1 (Title: ')


@pytest.mark.parametrize('name', SETS)
def test_each_set_trains_and_is_evaluated_by_programs(spoken, rows, tmp_path, name):
    "On the published files where they are, else on rows of our own."
    path = str(Path(os.environ['CREDIT_RL_DATA']) / name) if os.environ.get('CREDIT_RL_DATA') else rows(name)
    run = quiet({**REAL, 'data': name, 'path': path, 'model': spoken, 'train_split': get_benchmark(name).eval_split, 'run': str(tmp_path / 'run')})
    step = read_metrics(run).iloc[-1]
    assert step.updates == 2 and step.trajectories == 4 and math.isfinite(step.loss) and step.logp_gap < 1e-4
    folder = run_evaluation(dict(model=spoken, data=name, path=path, protocol='carl', questions=2, turn_tokens=8, context_tokens=6, max_tokens=12000, run=str(tmp_path / 'eval'),
                                 threads=1), say=lambda line: None, progress=False)
    manifest = json.loads((folder / name / 'manifest.json').read_text())
    assert manifest['limits'] == {'max_turns': 15, 'turn_tokens': 8, 'max_tokens': 12000, 'context_tokens': 6} and manifest['protocol']['name'] == 'carl'
    assert (manifest['corpus'] is None) == (name in ('gsm8k', 'finqa')) and len(read_turns(folder / name)) == 2
