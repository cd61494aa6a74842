"""Answers of several sentences: pairs from files, two verdicts, PRS's long reward on the way and in a training."""
import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
import yaml

from credit_rl.datasets import load_questions
from credit_rl.diagnostics import training_curves
from credit_rl.engine import ScriptedEngine
from credit_rl.evaluate import question_row, run_evaluation
from credit_rl.studies.longform import (JudgeChoice, VERDICTS, judge_rows, judged_table, long_rewards,
                                main, pass_rates, run_longform)
from credit_rl.methods import get_method
from credit_rl.models import load_tokenizer
from credit_rl.options import options_in
from credit_rl.parameters import from_settings
from credit_rl.protocol import PROTOCOLS, Chat, byte_tokenizer
from credit_rl.prs import parse_grounded, prs_long
from credit_rl.readers import RowError
from credit_rl.runlog import read_metrics, read_turns
from credit_rl.sft import Imitation, read_rollouts, rejection_sft
from credit_rl.train import train
from credit_rl.trajectory import Group, Question, Stop, Trajectory, Turn
from notebooks import kept
from paper_player import answer_of, call_of, write_model
from test_paper_settings import unsaid
from judge_server import Stub
from started import typed

ROOT = Path(__file__).resolve().parents[2]
SAMPLE, PAGES = ROOT / 'data' / 'rows' / 'pairs.jsonl', ROOT / 'data' / 'rows' / 'pairs_corpus.jsonl'
PRS = PROTOCOLS['prs']


@pytest.fixture(autouse=True)
def on_its_own(monkeypatch):
    "None is reached through a proxy or a GPU."
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)


def test_a_table_of_pairs_is_read(tmp_path):
    import pandas as pd
    rows = [{'question': f'Why {i}?', 'reference': f'Because of {i}, of course.'} for i in range(3)]
    pd.DataFrame(rows).to_csv(tmp_path / 'p.csv', index=False)
    found = load_questions('pairs', tmp_path / 'p.csv')
    assert [(q.text, q.answers) for q in found] == [(r['question'], (r['reference'], )) for r in rows]
    assert len({q.id for q in found}) == 3 and found[0].meta == {}


@pytest.mark.parametrize('row, message', [
    ({'question': 'Why?'}, "'reference'"), ({'question': 'Why?', 'reference': ' '}, 'answer'),
    ({'question': 'Why?', 'reference': 7}, 'strings'),
    ({'reference': 'So.'}, "'question'")])
def test_a_pair_without_one_of_the_two_is_refused(row, message, tmp_path):
    (tmp_path / 'p.jsonl').write_text(json.dumps(row))
    with pytest.raises(RowError, match=message): load_questions('pairs', tmp_path / 'p.jsonl')


# ---- verdicts ----

def row_of(text, seen='', gold='It rains.', turns=None):
    "A row of an evaluation: one search where something was `seen`, then an answer, or none."
    q = Question('q', 'Why is {answer} wet?', (gold, ), 'nq', {})
    call = {'name': 'wiki_search', 'queries': ['rain']}
    turns = [Turn('tool', (1, ), (0., ), (2, ), call_of(PRS, 'rain'), seen, call, 'ok')] if seen else []
    turns.append(Turn('answer', (3, ), (0., ), (), answer_of(PRS, text) if text else '<reasoning> hm </reasoning>', ''))
    return question_row(Trajectory(q, (0, ), tuple(turns), 'answer' if text else 'no_answer', text), 'nq')


class Listed:
    "A judge that answers from a list, and keeps what it was asked."
    def __init__(self, *replies): self.replies, self.asked = list(replies), []

    def ask(self, prompts, parse):
        self.asked += prompts
        return [None if reply is None else read(reply) for read, reply in zip(parse, self.replies)]


def test_verdicts_by_hand_and_what_the_judge_is_shown():
    rows = [row_of('It rains.', 'Rain {reference} fell.'), row_of(None), row_of('{question} is dry.')]
    judge = Listed('Match', 'Mismatch', 'grounded', 'Well: invented.')
    got = judge_rows(rows, judge, 'Be kind.')
    assert [tuple(v.values()) for v in got] == [(1, 1), (0, 0), (0, 0)] and list(got[0]) == list(VERDICTS)
    assert len(judge.asked) == 4 and judge.asked[0][0] == {'role': 'system', 'content': 'Be kind.'}
    first, last = judge.asked[2:]
    assert 'Rain {reference} fell.' in first and 'Why is {answer} wet?' in first      # fields inside texts stay
    assert 'Nothing was searched.' in last and '{question} is dry.' in last and first.count('It rains.') == 2
    assert '{found}' not in first + last


def test_a_missing_verdict_is_missing():
    rows = [row_of('It rains.'), row_of('No.'), row_of('Yes.')]
    got = judge_rows(rows, Listed(None, 'perhaps', 'Match', 'grounded', None, 'I cannot say'))
    assert [[math.isnan(v[n]) for n in VERDICTS] for v in got] == [[True, False], [True, True], [False, True]]
    rewards = long_rewards(rows, [v['reference_pass'] for v in got], vars(PRS))
    assert [math.isnan(x) for x in rewards] == [True, True, False]
    rates = pass_rates([{**v, 'prs_long': x, 'type': k} for v, x, k in zip(got, rewards, ('a', 'a', None))])
    assert rates['all']['missing'] == {'reference_pass': 2, 'hallucination_pass': 2, 'prs_long': 2}
    assert rates['a']['reference_pass'] is None and json.dumps(rates, allow_nan=False)


@pytest.mark.parametrize('verdict', [0, 1])
def test_the_reward_is_the_one_of_a_training(verdict):
    "By the formula: process and format, then the verdict, then BLEU (4 of 4 words, or 2 of 2 shorter by half: e^-1)."
    rows = [row_of('It rains all day', 'Rain.', 'It rains all day.'), row_of('It rains', 'Rain.', 'It rains all day.'),
            row_of(None, 'Rain.')]
    got = long_rewards(rows, [verdict, verdict, 0], vars(PRS))
    wanted = [prs_long(1, .1, verdict, 1.), prs_long(1, .1, verdict, math.exp(-1)), prs_long(0, 0, None, 0)]
    assert got == pytest.approx(wanted, abs=1e-6)
    assert all(math.isnan(x) for x in long_rewards(rows, [1, 1, 0], {**vars(PRS), 'think_tag': None}))


@pytest.mark.parametrize('reply, verdict', [
    ('grounded', 1), ('Invented.', 0), ('**Grounded**', 1), ('not grounded', 0), ('Not grounded.', 0),
    ('The answer is not grounded.', 0), ('ungrounded', 0), ('not fully grounded', 0), ('The answer is grounded.', 1),
    ('Verdict: **invented**', 0), ('invented\n\nOnly the year is grounded', 0), ('grounded (nothing is invented)', None),
    ('Claim 1: supported.\nClaim 2: supported.\n\ngrounded', 1), ('Claim 1: in neither.\nFinal verdict: invented', 0),
    ('<think>grounded? No: invented.</think>\n\ngrounded', 1), ('so\n</think>\ninvented', 0),
    ('<think>grounded', None), ('The claim is grounded, the date is invented', None), ('grounded or invented', None),
    ('not sure', None), ('', None), (None, None)])
def test_a_verdict_about_inventions_begins_a_line(reply, verdict):
    assert parse_grounded(reply) == verdict


# ---- the whole way ----

def gossip(questions):
    "A player that searches, repeats the first passage, and where it is about a museum adds a lie."
    def act(text, rng):
        question, said = re.split('<\\|im_end\\|>', text.rsplit('Question: ', 1)[1], maxsplit=1)
        if '<tool_response>' not in said: return call_of(PRS, question)
        page = re.search(r'Doc 1 \(Title: "[^"]*"\) (.*?)\n', said + '\n')[1]
        return answer_of(PRS, page + (' It burned down in 1788.' if 'museum' in page else ''))
    return ScriptedEngine(act, byte_tokenizer(), max_length=8192)


def by_numbers(prompt, attempt):
    "A judge's reply: a match where answer and reference share a number, an invention where one was not found."
    numbers = lambda text: set(re.findall(r'\d+', text))
    if '[Q&A Agents Response]' in prompt:
        said, wanted = prompt.split('[Q&A Agents Response]:')[1].split('[Reference Answer]:')
        return 'Match' if numbers(said) & numbers(wanted) else 'Mismatch'
    if 'search found:' not in prompt: return 'ready'
    found, said = prompt.split('search found:')[1].split("assistant's answer:")
    return 'grounded' if numbers(said.split('Go through')[0]) <= numbers(found) else 'invented'


def settings_for(stub, run, **more):
    return {'path': str(SAMPLE), 'corpus': str(PAGES), 'protocol': 'prs', 'model': 'gossip', 'run': str(run),
            'passages': 1, **more,
            'judge': more.get('judge', {'base_url': f'http://127.0.0.1:{stub.server.server_port}/v1', 'model': 'stub'})}


def test_what_was_evaluated_is_judged_from_its_folder(tmp_path, capsys):
    "Of any set, here one of the nine; nothing is played. Another judge's verdicts take the place of the first's."
    sample = ROOT / 'data' / 'hotpotqa_sample.json'
    run_evaluation({'data': 'hotpotqa', 'path': str(sample), 'protocol': 'prs', 'model': 'x', 'run': str(tmp_path)},
                   engine=gossip(None), say=lambda line: None, progress=False)
    for reply, rate in (('Match', 1), ('Mismatch', 0)):
        with Stub(lambda prompt, attempt: 'invented' if 'search found:' in prompt else reply) as stub:
            judge = {**settings_for(stub, tmp_path)['judge'], 'model': f'stub {rate}'}     # replies are kept by model
            main(['--folder', str(tmp_path), f'judge={json.dumps(judge)}'])
        table = judged_table(tmp_path)
        assert table.loc[('hotpotqa', 'all'), list(VERDICTS)].tolist() == [rate, 0]
    assert 'hotpotqa: reference pass 0.000' in capsys.readouterr().out


def test_a_judge_that_goes_down_leaves_gaps(tmp_path):
    "After the check every request about inventions fails: three attempts each, then a verdict that is missing."
    with Stub(lambda prompt, attempt: 500 if 'search found:' in prompt else by_numbers(prompt, attempt)) as stub:
        run = run_longform(settings_for(stub, tmp_path), engine=gossip(None), say=lambda line: None, progress=False)
    about = json.loads((run / 'pairs' / 'judged.json').read_text())
    assert about['all']['hallucination_pass'] is None and about['all']['missing']['hallucination_pass'] == 4
    assert about['all']['reference_pass'] == .5 and about['counts']['judge_failures'] == 4


@pytest.mark.parametrize('given, message', [
    ({'judge': {}}, 'answers are judged by a model'), ({'judge': {'model': 'x'}}, "a judge needs 'base_url'"),
    ({'judge': {'base_url': 'http://x', 'model': 'x', 'api_key': 'k'}}, 'may not hold a key'),
    ({'path': None}, 'path=FILE'),
    ({'jugde': {}}, "did you mean 'judge'"),
    ({'hallucination_prompt': 'bare.txt'}, 'must have the placeholders {answer}, {found}, {question}, {reference}')])
def test_what_cannot_work_is_refused_before_anything_is_asked(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('bare.txt').write_text('Is it so? {question}')
    with Stub(by_numbers) as stub:
        with pytest.raises(ValueError, match=re.escape(message)):
            run_longform(settings_for(stub, tmp_path / 'run', **given), engine=gossip(None), progress=False)
        assert stub.requests == [] and not (tmp_path / 'run').exists()


def test_a_judge_that_is_not_there_is_named_before_anything_is_played(tmp_path):
    given = {'path': str(SAMPLE), 'run': str(tmp_path / 'run'),
             'judge': {'base_url': 'http://127.0.0.1:9/v1', 'model': 'm', 'retries': 0}}
    with pytest.raises(ConnectionError, match='answer'):
        run_longform(given, engine=gossip(None), progress=False)
    assert not (tmp_path / 'run').exists()


@pytest.mark.long
def test_pairs_are_played_by_several_ranks_and_judged_once(tmp_path, monkeypatch):
    "The same rows as on one rank; the judge is asked by the process that was started, when all are played."
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    write_model(tmp_path / 'model', [json.loads(line)['question'] for line in SAMPLE.read_text().splitlines()])
    rows = []
    for ranks in (1, 2):
        with Stub(by_numbers) as stub:
            given = settings_for(stub, tmp_path / str(ranks), model=str(tmp_path / 'model'), turn_tokens=8, threads=1,
                                 ranks=ranks)
            run = run_longform(given, say=lambda line: None, progress=False)
            assert len(stub.requests) == 1                                # the check: nobody has answered anything
        assert judged_table(run).loc[('pairs', 'all'), ['questions', *VERDICTS]].tolist() == [4, 0, 0]
        rows.append([(r['id'], [t['action_ids'] for t in r['trajectory']['turns']]) for r in read_turns(run / 'pairs')])
    assert rows[0] == rows[1] and len(rows[0]) == 4


# ---- the paper's file, and a training ----

def test_the_papers_file_is_cited_and_runs_with_a_local_model(tmp_path):
    path = ROOT / 'runs' / 'params' / 'eval_prs_long.yaml'
    told = yaml.safe_load(path.read_text())
    assert unsaid(path.read_text(), host=False) == [] and told['judge']['model'] == 'gpt-4.1'
    from_settings(JudgeChoice, {k: told[k] for k in options_in(JudgeChoice)})
    write_model(tmp_path / 'model', [json.loads(line)['question'] for line in SAMPLE.read_text().splitlines()])
    with Stub(by_numbers) as stub:
        given = settings_for(stub, tmp_path / 'run', model=str(tmp_path / 'model'), turn_tokens=8)
        here = {k: given[k] for k in ('path', 'corpus', 'model', 'run', 'judge', 'turn_tokens')}
        plain = dict(engine='hf', vllm={}, dtype='float32', ranks=1)
        run = run_longform({**told, **plain, **here}, say=lambda line: None, progress=False)
    rows = read_turns(run / 'pairs')
    assert len(rows) == 4 and judged_table(run).loc[('pairs', 'all'), 'questions'] == 4


LONG = {p.stem: p for p in kept(ROOT, 'runs/params/*_long*_qwen3_*.yaml')}
# of the sample: sizes and host, and nothing else
SMALL = dict(path=str(SAMPLE), corpus=str(PAGES), steps=2, group_size=4, questions_per_step=2, dev_questions=1,
             test_questions=1, eval_every=2, max_tokens=4096, turn_tokens=512, threads=1, recompute=True, minibatches=1,
             learner='plain', ranks=1, deepspeed={}, engine='hf', vllm={}, dtype='float32', template_options={},
             track='')


@pytest.fixture
def chatty(tmp_path, monkeypatch):
    "The folder of a small random model, in whose place such a player acts."
    questions = load_questions('pairs', SAMPLE)
    write_model(tmp_path / 'model', [q.text for q in questions])
    def act(text, rng):
        (q, ) = [q for q in questions if q.text in text]
        luck = rng.random()
        said = q.answers[0] if luck < .4 else 'Nobody knows.'
        return (answer_of(PRS, said) if luck < .8 else 'I give up.') + '<|im_end|>'
    monkeypatch.setattr('credit_rl.setup.HFEngine', lambda model, tokenizer, **limits: ScriptedEngine(act, tokenizer, 8192))
    return str(tmp_path / 'model')


def knows(prompt, attempt): return 'Mismatch' if 'Nobody knows' in prompt else 'Match'


def judge_of(stub): return {'base_url': f'http://127.0.0.1:{stub.server.server_port}/v1', 'model': 'stub'}


def test_each_long_run_of_the_paper_has_a_file():
    """Tables 1, 3 and 6: two rewards with GRPO on two models, and PPO and VSPO on the larger one; all values cited, and
    a judge named."""
    told = {name: yaml.safe_load(path.read_text()) for name, path in LONG.items()}
    assert {name: (t['method'], t['options'].get('form')) for name, t in told.items()} == {
        **dict.fromkeys(('prs_long_qwen3_14b', 'prs_long_qwen3_8b'), ('prs', 'long')),
        **dict.fromkeys(('prs_long_outcome_qwen3_14b', 'prs_long_outcome_qwen3_8b'), ('judged/group', None)),
        'prs_long_ppo_qwen3_14b': ('prs/gae', 'long'), 'vspo_long_qwen3_14b': ('prs+vspo', 'long')}
    for name, t in told.items():
        assert unsaid(LONG[name].read_text()) == [] and t['run'] == f'runs/{name}' and t['data'] == 'pairs'
        assert t['options']['judge']['model'] == 'Qwen3-235B-A22B-Instruct-2507' and t['learning_rate'] == 1e-7


@pytest.mark.parametrize('name', [pytest.param(name, marks=[pytest.mark.nightly] * name.endswith('8b')) for name in LONG])
def test_a_long_run_of_the_paper_trains_at_a_small_size(name, chatty, tmp_path):
    "By its own method, options, protocol and loss; the checkpoint is chosen by BLEU, since no paragraph is equal."
    told = yaml.safe_load(LONG[name].read_text())
    with Stub(knows) as stub:
        run = train({**told, **SMALL, 'model': chatty, 'run': str(tmp_path / 'run'),
                     'options': {**told['options'], 'judge': judge_of(stub)}}, say=lambda line: None)
        asked = [r for r in stub.requests if '[Reference Answer]' in r['messages'][-1]['content']]
    table = read_metrics(run)
    different = {json.dumps(r['messages']) for r in asked}                  # equal prompts are asked once
    assert 0 < len(asked) == len(different) <= table[1:].judge_calls.sum() and (table[1:].grad_norm > 0).any()
    assert table.dev_right.dropna().between(0, 1).all() and len(table.dev_right.dropna()) == 2
    if 'outcome' in name: assert table[1:].reward.between(0, 1).all()
    else:                                                      # beyond process and format: a verdict counted
        assert table[1:].reward.max() > 1.1 and (table.judge_failures[1:] == 0).all()
        assert table[1:][['prs_process', 'prs_format', 'prs_answer', 'prs_judge']].notna().all(axis=None)
        assert {'stages', 'a judge'} <= {ax.get_title() for ax in training_curves(run).axes}


def test_pairs_are_found_by_their_name_in_any_process(tmp_path, run_python):
    "By the command, which nobody has told of them; without a file it says what is missing."
    write_model(tmp_path / 'model', [q.text for q in load_questions('pairs', SAMPLE)])
    given = dict(data='pairs', corpus=str(PAGES), protocol='prs', method='grpo', model=str(tmp_path / 'model'),
                 run=str(tmp_path / 'run'), dev_questions=1, test_questions=1, max_tokens=4096, dry_run=True, tflops=1)
    said = run_python('-m', 'credit_rl.train', *typed({**given, 'path': str(SAMPLE)}), env={'CUDA_VISIBLE_DEVICES': ''})
    assert '1 train questions, 1 dev questions, 1 test questions' in said
    with pytest.raises(ValueError, match='give path=FILE'): train(given, say=lambda line: None)


def test_the_judged_outcome_by_hand():
    "Right, wrong, no answer, and a verdict that is missing: only what was said is asked."
    question = Question('q', 'Why?', ('Because.',), source='pairs')
    def tried(said):
        turn = Turn('answer', (2,), (-.1,), (), said or '', '')
        return Trajectory(question, (1,), [turn], Stop.ANSWER if said else Stop.NO_ANSWER, said)
    tries = [tried(said) for said in ('Because.', 'Nobody knows.', None, 'Odd.')]
    method = get_method('judged/group')
    with Stub(lambda prompt, attempt: 'what?' if 'Odd.' in prompt else knows(prompt, attempt)) as stub:
        bound = method.bind({'judge': judge_of(stub)})
        rewards = bound.text_rewards([Group(question, tries)])
        assert len(stub.requests) == 4       # three, and once more what could not be read
    assert rewards['outcome'][:3].tolist() == [1, 0, 0] and rewards['outcome'][3].isnan()
    with pytest.raises(ValueError, match='judged'): method.bind({})


def test_a_policy_is_fine_tuned_on_what_another_model_did_and_a_judge_passed(chatty, tmp_path):
    """PRS table 3: of four evaluated answers the judge passes two; these are told in the words of the model that
    learns, its end-of-turn token behind the answer."""
    with Stub(by_numbers) as stub:
        teacher = run_longform(settings_for(stub, tmp_path / 'teacher', answer_stop='last'), engine=gossip(None),
                               say=lambda line: None, progress=False)
    chat = Chat(dataclasses.replace(PRS, answer_stop='last'), load_tokenizer(chatty))
    groups, count = read_rollouts(teacher, chat, 4, 0)
    passed = [r['id'] for r in map(json.loads, (teacher / 'pairs' / 'judged.jsonl').read_text().splitlines())
              if r['reference_pass'] == 1]
    assert count == 4 and [g.question.id for g in groups] == passed and len(passed) == 2
    for t in (t for g in groups for t in g.trajectories):
        assert t.prompt_ids == tuple(chat.prompt_ids(t.question.text)) and t.turns[-1].action_ids[-1] == chat.end_id
        assert chat.tokenizer.decode(t.turns[0].action_ids) == t.turns[0].action_text       # a call's own end is enough
    settings = {**SMALL, 'model': chatty, 'data': 'pairs', 'protocol': 'prs', 'answer_stop': 'last', 'malformed': 'end'}
    run = rejection_sft({**settings, 'run': str(tmp_path / 'sft')}, Imitation(rollouts=str(teacher), epochs=1, batch=1),
                        say=lambda line: None)
    summary = json.loads((run / 'summary.json').read_text())
    assert (summary['rows'], summary['trajectories'], len(summary['losses'])) == (2, 4, 2)
    other = Chat(PROTOCOLS['tspo'], chat.tokenizer)
    with pytest.raises(ValueError, match='prompt'): read_rollouts(teacher, other, 4, 0)
    with pytest.raises(ValueError, match='rollout'): read_rollouts(tmp_path, chat, 4, 0)
