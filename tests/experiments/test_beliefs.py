"""47_beliefs: belief against a plain forward of the same text, an answer at once against the model's own
`generate`, and the command from a shell."""
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import mannwhitneyu

from credit_rl.beliefs import _auc, belief_rows, belief_table, closed_book, main, popularity_table, shown_and_right
from credit_rl.engine import HFEngine, SamplingParams
from credit_rl.metrics import exact_match
from credit_rl.models import load_model
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.rollout import rollout
from credit_rl.runlog import RunLog
from credit_rl.scoring import answer_form, answer_header, gold_templates
from credit_rl.significance import jackknife
from credit_rl.tiny import tiny_environment
from credit_rl.trajectory import Group, to_json
from credit_rl.world import make_world

BASE = str(Path(__file__).resolve().parents[2] / 'data' / 'tiny_base')


@pytest.fixture(scope='module')
def played():
    model, tokenizer = load_model(BASE)
    chat, world = Chat(PROTOCOLS['tiny'], tokenizer), make_world('train', 7, size=120, questions=6)
    groups = rollout(HFEngine(model, tokenizer), tiny_environment(world, chat), list(world.questions), 2,
                     SamplingParams(max_tokens=12), 0)
    return model, chat, groups


def test_belief_is_that_of_a_plain_forward(played):
    model, chat, groups = played
    rows = belief_rows(model, chat, groups[:2], ('own', 'tips'))
    trajectories = [t for g in groups[:2] for t in g.trajectories]
    golds = {schema: gold_templates(chat, groups[:2], schema) for schema in ('own', 'tips')}
    header = len(chat.encode(answer_header(chat)))               # ends a state and begins a gold
    assert len(rows) == 2 * sum(len(t.turns) for t in trajectories)
    for row in rows:
        t = trajectories[row['rollout']]
        state = [*t.prompt_ids, *(i for turn in t.turns[:row['state']]
                                  for i in (*turn.action_ids, *turn.observation_ids))]
        state = state[:len(state) - header]
        found = []
        for gold in golds[row['schema']][row['rollout']]:
            ids = torch.tensor([[*state, *gold.ids]])
            with torch.no_grad(): logp = model(ids).logits[0].log_softmax(-1)
            places = range(len(state) + gold.start, len(state) + gold.end)
            found.append([logp[k - 1, ids[0, k]].item() for k in places])
        assert row['belief'] == pytest.approx(max(math.exp(sum(x) / len(x)) for x in found), rel=1e-3, abs=1e-9)
        assert row['chance'] == pytest.approx(max(math.exp(sum(x)) for x in found), rel=1e-3, abs=1e-9)
        assert row['last'] == (row['state'] == len(t.turns) - 1)


def test_questions_without_evidence_are_not_counted(played):
    model, chat, groups = played
    plain, known = (belief_rows(model, chat, [g], ('own',)) for g in (groups[0], sign_alone(groups[0])))
    assert all(row['counted'] for row in plain) and not any(row['counted'] for row in known)
    rows = pd.DataFrame([{'model': 'm', **row} for row in (*plain, *known)])
    table = belief_table(rows)
    assert table['states shown'].sum() + table['not shown'].sum() == len(plain)


def sign_alone(group):
    question = dataclasses.replace(group.question, id='other', answers=('+',))
    return Group(question, [dataclasses.replace(t, question=question) for t in group.trajectories])


def test_an_answer_at_once_is_what_the_model_generates(played):
    model, chat, groups = played
    questions = [g.question for g in groups]
    before, after = answer_form(chat.protocol)
    for row, question in zip(closed_book(model, chat, questions, words=5), questions):
        ids = torch.tensor([[*chat.prompt_ids(question.text), *chat.encode(before)]])
        out = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1]:]
        answer = chat.tokenizer.decode(out, skip_special_tokens=True).split(after.strip())[0].strip()
        assert row['answer'] == answer and row['right'] == exact_match(answer, list(question.answers))


def test_what_was_shown_crossed_with_what_was_right_sums_to_one(played):
    shares = shown_and_right(played[2])
    assert sum(shares.values()) == pytest.approx(1) and len(shares) == 4


def test_one_kind_of_state_alone_has_no_auc():
    rows = pd.DataFrame({'model': 'm', 'schema': 's', 'question': ['a', 'b'], 'shown': [True, True], 'counted': True,
                         'belief': [.1, .2]})
    table = belief_table(rows)
    assert table.AUC.isna().all() and table.low.isna().all() and table['belief not shown'].isna().all()
    blank = pd.DataFrame({'model': 'm', 'right': [0, 1], 'popularity': math.nan})
    assert popularity_table(blank).loc['m'].tolist() == [.5, 2]


def made_beliefs(rng, questions, apart, alike):
    "Beliefs that are higher by `apart` where a gold was shown, and alike within a question."
    count = rng.integers(3, 10, questions)
    question = np.arange(questions).repeat(count)
    shown = rng.random(len(question)) < rng.beta(1, 2, questions)[question]
    belief = apart * shown + alike * rng.normal(size=questions)[question] + rng.normal(size=len(question))
    return pd.DataFrame({'model': 'm', 'schema': 's', 'counted': True, 'question': question, 'shown': shown,
                         'belief': belief})


def test_the_auc_is_scipys_with_any_question_left_out():
    rows = made_beliefs(np.random.default_rng(1), 8, 1., .5).round(1)                            # with ties
    for value, part in zip(_auc(rows).tolist(), (rows, *(rows[rows.question != q] for q in range(8)))):
        shown, unshown = part.belief[part.shown], part.belief[~part.shown]
        assert value == pytest.approx(mannwhitneyu(shown, unshown).statistic / len(shown) / len(unshown))


@pytest.mark.parametrize('questions, apart, alike', [(12, .8, .5), (25, 2.2, .5), (25, 1.5, 1.5), (60, 2.2, .5)])
def test_the_interval_of_the_auc_covers(questions, apart, alike):
    "The truth is that of very many questions. A percentile bootstrap over questions holds it in 84 to 94 %."
    rng, times = np.random.default_rng(0), 300
    true, held = np.mean([_auc(made_beliefs(rng, 1000, apart, alike))[0].item() for _ in range(10)]), 0
    for _ in range(times):
        _, low, high = jackknife(_auc(made_beliefs(rng, questions, apart, alike)), ends=(0, 1))
        held += low <= true <= high
    assert .905 < held / times < .995                           # 93 to 97 %, give or take two errors of what 300 show


def test_the_command_measures_every_model_on_the_same_rollouts(played, tmp_path):
    run, out = tmp_path / 'run', tmp_path / 'out'
    rows = [{'kind': kind, 'trajectory': to_json(t), 'advantages': None, 'reward': 0.}
            for g in played[2] for kind, t in zip(('train', 'before'), g.trajectories)]
    RunLog(run).turns(1, rows)
    asked = [str(run), str(out), f'one={BASE}', f'other={BASE}']
    with pytest.raises(SystemExit, match='params.yaml'): main(asked)                         # in which protocol?
    main([*asked, '--protocol', 'tiny', '--questions', '4'])
    rows, found = pd.read_csv(out / 'beliefs.csv'), json.loads((out / 'beliefs.json').read_text())
    one, other = (rows[rows.model == name].drop(columns='model').reset_index(drop=True) for name in ('one', 'other'))
    pd.testing.assert_frame_equal(one, other)
    assert found['questions'] == 4 == found['rollouts'] and len(pd.read_csv(out / 'closed_book.csv')) == 8
    with pytest.raises(SystemExit, match='is neither a folder'):
        main([str(run), str(out), f'x={tmp_path / "nowhere"}', '--protocol', 'tiny'])
    with pytest.raises(SystemExit, match='keeps no rollouts'): main([str(out), str(out), 'x=y', '--protocol', 'tiny'])
