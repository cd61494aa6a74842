"""HotpotQA as it was published, end to end: BM25, the published prompt, five training steps, rollouts one can read."""
import dataclasses
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from credit_rl.benchmarks import BENCHMARKS, get_benchmark
from credit_rl.datasets import load_questions
from credit_rl.engine import ScriptedEngine
from credit_rl.layout import pack, token_logps
from credit_rl.metrics import cover_match, normalize
from credit_rl.rollout import rollout
from credit_rl.runlog import read_metrics, read_turns
from credit_rl.models import load_model
from credit_rl.settings import check, make_config
from credit_rl.setup import real_passages, real_questions
from credit_rl.train import train
from credit_rl.trajectory import Group, Result, Stop, trajectory_from_json
from credit_rl.view import show_rollout
from made_runs import setup_of
from started import typed

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / 'data' / 'hotpotqa_sample.json'
SHORT = dict(data='hotpotqa', steps=5, eval_every=5, questions_per_step=2, group_size=2, dev_questions=4,
             test_questions=4, max_turns=3, turn_tokens=16, max_tokens=6000, passages=2, passage_tokens=60, threads=1)


pytestmark = pytest.mark.usefixtures('on_a_cpu')


def check_run(run, model_folder, settings):
    "What must be true of a run of a random model: finite numbers, real prompts, right masks, readable rollouts."
    table = read_metrics(run)
    assert table.step.tolist() == list(range(settings['steps'] + 1))
    for line in (run / 'metrics.jsonl').read_text().splitlines():
        assert all(isinstance(v, (int, float)) and math.isfinite(v) for v in json.loads(line).values()), line
    assert table.logp_gap.dropna().max() < 1e-4
    summary = json.loads((run / 'summary.json').read_text())
    assert 0 <= summary['final_em'] <= .5 and summary['ceiling_em'] is None

    config = make_config({**settings, 'run': str(run), 'model': model_folder})
    parts = {part: {q.text for q in questions} for part, questions in real_questions(config, config.seed).items()}
    model, tokenizer = load_model(model_folder)
    rows = read_turns(run)
    assert {row['kind'] for row in rows} == {'before', 'train', 'after'}
    assert sum(row['kind'] == 'train' for row in rows) == settings['steps'] * settings['group_size']
    for row in rows:
        t = trajectory_from_json(row['trajectory'])
        prompt = tokenizer.decode(t.prompt_ids)
        # the published prompt
        assert '<tools>' in prompt and '"query_list"' in prompt and '<answer> Beijing </answer>' in prompt
        assert f'Question: {t.question.text}<|im_end|>\n<|im_start|>assistant\n' in prompt
        assert t.question.text in parts['train' if row['kind'] == 'train' else 'test']
        for turn in t.turns:
            assert tokenizer.decode(turn.action_ids).removesuffix('<|im_end|>') == turn.action_text
            assert len(turn.action_ids) <= settings['turn_tokens']
            if turn.observation_ids: assert turn.observation_text in tokenizer.decode(turn.observation_ids)
        page = show_rollout(t, row['advantages']).html
        assert all(f'turn {k}' in page for k in range(len(t.turns)))

        layout = pack([Group(t.question, [t])])
        assert layout.trained.sum() == sum(len(turn.action_ids) for turn in t.turns)
        assert layout.ids[0][layout.trained[0]].tolist() == [i for turn in t.turns for i in turn.action_ids]
        if row['kind'] == 'before' or (row['kind'], row['step']) == ('train', 1):  # sampled by the model in the folder
            with torch.no_grad():
                logp = token_logps(model, layout.ids, layout.trained)
            torch.testing.assert_close(logp, layout.logps, atol=1e-4, rtol=0)
    return table


def test_five_steps_on_the_sample_by_the_command_line(spoken, tmp_path, run_python):
    settings = {**SHORT, 'path': str(SAMPLE), 'dev_questions': 1, 'test_questions': 2, 'kl': .01}
    words = typed({**settings, 'run': str(tmp_path / 'run'), 'model': spoken})
    said = run_python('-m', 'credit_rl.train', *words, cwd=tmp_path, env={'CUDA_VISIBLE_DEVICES': ''})
    # a hash of their words parts the six questions
    assert '4 train, 1 dev, 1 test questions of hotpotqa' in said and 'step 5/5' in said
    table = check_run(tmp_path / 'run', spoken, settings)
    assert table.updates[1:].eq(2).all() and table.loss[1:].notna().all()  # the KL term moves every trajectory


# sets of the same kind of rows as another's, which the day tries
ALIKE = ('popqa', 'bamboogle', 'hotpotqa', '2wikimultihopqa')


@pytest.mark.parametrize('name', [pytest.param(n, marks=[pytest.mark.nightly] * (n in ALIKE))
                                  for n, b in BENCHMARKS.items() if b.common])
def test_a_step_on_every_set(spoken, data, tmp_path, name):
    "In its original format: with its own paragraphs, a corpus found beside it, or without a search."
    path = data / name / ('flashrag_test.jsonl' if name == 'triviaqa' else '')  # the original slice has three questions
    settings = {**SHORT, 'data': name, 'path': str(path), 'train_split': get_benchmark(name).eval_split, 'method': 'grpo',
                'kl': .01, 'steps': 1, 'turn_tokens': 8, 'max_tokens': 12000, 'passage_tokens': 64, 'questions': 8,
                'dev_questions': 2, 'test_questions': 2, 'corpus': str(data / name) if name == 'triviaqa' else None}
    train({**settings, 'run': str(tmp_path / 'run'), 'model': spoken}, say=lambda line: None)
    (step,) = [row for _, row in read_metrics(tmp_path / 'run').iterrows() if row.step == 1]
    assert step.updates == 2 and math.isfinite(step.loss)
    assert step.trajectories == settings['questions_per_step'] * settings['group_size']


def researcher(text, rng):
    "Asks the search for the question itself, then answers with the title of the first page that came back."
    question = text.rsplit('Question: ', 1)[1].split('<|im_end|>')[0]
    if '<tool_response>\nDoc 1' not in text:
        call = json.dumps({'name': 'search', 'arguments': {'query_list': [question]}})
        return f'<think> I look it up. </think> <tool_call> {call} </tool_call>'
    title = text.split('Doc 1 (Title: ', 1)[1].split('"')[1]
    return f'<think> That must be it. </think> <answer> {title} </answer>'


@pytest.fixture
def stage(spoken, data):
    "Questions, search and model of the real set."
    return setup_of(make_config(
        {**SHORT, 'path': str(data / 'hotpotqa'), 'model': spoken, 'dev_questions': 30, 'test_questions': 30}))


def test_the_search_finds_real_passages(stage):
    "A player that asks the question gets pages that the question rests on."
    groups = rollout(ScriptedEngine(researcher, stage.chat.tokenizer, max_length=16000), stage.environments['test'],
                     stage.questions['test'])
    found = 0
    for g in groups:
        (t,) = g.trajectories
        assert t.stop is Stop.ANSWER and [turn.result for turn in t.turns] == [Result.OK, Result.NONE]
        seen = t.turns[0].observation_text
        assert seen.startswith('Doc 1 (Title: "') and '\nDoc 2 (Title: "' in seen and 'Doc 3' not in seen
        for line in seen.splitlines(): assert len(stage.chat.encode(line.split('") ', 1)[1])) <= SHORT['passage_tokens']
        found += any(f'(Title: "{title}")' in seen for title, _ in g.question.meta['supporting_facts'])
    assert found > len(groups) / 2, f'{found} of {len(groups)}'


# ---- which questions, which passages ----

def names(parts):
    return {part: {(q.id, q.text) for q in questions} for part, questions in parts.items()}


def disjoint(parts):
    sets = list(names(parts).values())
    return len(set().union(*sets)) == sum(map(len, sets))


def test_a_single_file_is_dealt_out(tmp_path):
    rows = json.loads(SAMPLE.read_text())
    many = [{**row, '_id': f'{row["_id"]}-{i}', 'question': f'{row["question"]} ({i})'} for i in range(10) for row in rows]
    (tmp_path / 'one.json').write_text(json.dumps(many))

    def deal(**settings):
        config = make_config({'data': 'hotpotqa', 'path': str(tmp_path / 'one.json'), **settings})
        return real_questions(config, config.seed)
    parts = deal(dev_questions=5, test_questions=7)
    assert len(parts['dev']) == 5 and len(parts['test']) == 7 and len(parts['train']) > len(many) / 2 and disjoint(parts)
    assert names(parts) == names(deal(dev_questions=5, test_questions=7))
    greedy = deal(questions=3)                                         # asks for 210 and 600 held-out ones
    assert 5 < len(greedy['dev']) < len(many) / 2 and len(greedy['train']) == 3 and disjoint(greedy)
    for part in ('dev', 'test'): assert {q.id for q in parts[part]} < {q.id for q in greedy[part]}   # it keeps its part


def test_dev_may_be_larger_than_test(tmp_path):
    row = json.loads(SAMPLE.read_text())[0]
    many = [{**row, '_id': str(i), 'question': f'Number {i}?'} for i in range(120)]
    (tmp_path / 'one.json').write_text(json.dumps(many))
    for dev, test in ((12, 4), (4, 12), (8, 8)):
        config = make_config({'data': 'hotpotqa', 'path': str(tmp_path / 'one.json'), 'dev_questions': dev,
                              'test_questions': test})
        parts = real_questions(config, config.seed)
        assert (len(parts['dev']), len(parts['test'])) == (dev, test)


def test_rows_of_the_same_words_stand_in_one_part(tmp_path):
    "Every question stands three times in the file, with ids of their own."
    rows = json.loads(SAMPLE.read_text())
    many = [{**row, '_id': f'{row["_id"]}-{i}'} for row in rows for i in range(3)]
    for split in ('train', 'dev'): (tmp_path / f'{split}.json').write_text(json.dumps(many[split == 'dev':]))
    for place in (tmp_path, tmp_path / 'dev.json'):
        config = make_config({'data': 'hotpotqa', 'path': str(place), 'dev_questions': 2, 'test_questions': 2})
        parts = real_questions(config, config.seed)
        held, left = [q.text for part in ('dev', 'test') for q in parts[part]], {q.text for q in parts['train']}
        assert len(set(held)) == len(held) >= 2 and left and not left & set(held)


def test_sets_are_mixed_by_their_shares(tmp_path):
    "Of 4 and 9 questions by equal shares four each, by 1 to 3 three and nine; at most `questions`."
    rows = json.loads(SAMPLE.read_text())
    for name, n in (('hotpotqa', 4), ('2wikimultihopqa', 9)):
        (tmp_path / name).mkdir()
        for split, of in (('train', range(n)), ('dev', range(50, 54))):
            row = {**rows[0], 'type': 'comparison'}
            made = [{**row, '_id': f'{name}{i}', 'question': f'Number {i} of {name}?'} for i in of]
            (tmp_path / name / f'{split}.json').write_text(json.dumps(made))
    def counts(**more):
        config = make_config({'data': 'hotpotqa+2wikimultihopqa', 'path': str(tmp_path), 'protocol': 'direct',
                              'dev_questions': 4, 'test_questions': 4, **more})
        parts = real_questions(config, config.seed)
        assert disjoint(parts)
        return Counter(q.source for q in parts['train'])
    assert counts() == {'hotpotqa': 4, '2wikimultihopqa': 9}
    assert counts(mix={'hotpotqa': 1, '2wikimultihopqa': 1}) == {'hotpotqa': 4, '2wikimultihopqa': 4}
    assert counts(mix={'hotpotqa': 1, '2wikimultihopqa': 3}) == {'hotpotqa': 3, '2wikimultihopqa': 9}
    assert counts(mix={'hotpotqa': 1, '2wikimultihopqa': 3}, questions=4) == {'hotpotqa': 1, '2wikimultihopqa': 3}
    for mix in ({'hotpotqa': 1}, {'hotpotqa': 1, '2wikimultihopqa': 0}, {'hotpotqa': 1, '2wikimultihopqa': 1, 'nq': 1}):
        with pytest.raises(ValueError, match='data='):
            check(make_config({'data': 'hotpotqa+2wikimultihopqa', 'protocol': 'direct', 'mix': mix}))


def test_a_folder_keeps_its_splits(data):
    config = make_config({**SHORT, 'path': str(data / 'hotpotqa')})
    parts = real_questions(config, config.seed)
    own = names({split: load_questions('hotpotqa', data / 'hotpotqa', split) for split in ('train', 'dev')})
    named = names(parts)
    assert named['train'] <= own['train'] and named['dev'] | named['test'] <= own['dev'] and disjoint(parts)
    assert len(parts['dev']) == len(parts['test']) == 4
    # trains on what dev and test leave
    same = real_questions(dataclasses.replace(config, splits={'train': 'dev'}), config.seed)
    assert names(same)['train'] <= own['dev'] and disjoint(same)


def test_questions_of_a_files_own_paragraphs_can_be_answered():
    config = make_config({'data': 'hotpotqa', 'path': str(SAMPLE)})
    text = normalize(' '.join(f'{p.title} {p.text}' for p in real_passages(config)))
    answers = [q.answers for questions in real_questions(config, config.seed).values() for q in questions]
    assert sum(cover_match(text, list(a)) for a in answers) >= len(answers) / 2


def test_without_a_path_both_splits_of_the_hub_are_searched(monkeypatch):
    "No network is needed to see what would be asked for."
    from credit_rl import datasets
    rows = json.loads(SAMPLE.read_text())
    monkeypatch.setattr(
        datasets, '_hub_rows',
        lambda bench, split: [(split, row) for row in (rows[:4] if bench.hub_splits[split] == 'train' else rows[3:])])
    config = make_config({'data': 'hotpotqa', 'dev_questions': 1, 'test_questions': 1})
    parts, passages = real_questions(config, config.seed), real_passages(config)
    assert disjoint(parts) and parts['train']
    assert len({p.id for p in passages}) == len(passages) == len({(p.title, p.text) for p in passages})
    assert {p.title for p in passages} == {title for row in rows for title, _ in row['context']}
    assert BENCHMARKS['hotpotqa'].hub
