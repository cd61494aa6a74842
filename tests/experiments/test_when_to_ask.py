"What asking is worth, told before any training: by hand, where it was not measured, and by the command."
import json
import math

import pytest
import torch
import yaml

from credit_rl.studies import when_to_ask
from credit_rl.studies.when_to_ask import (AskingChoice, asking_says, asking_values, first_choice, form_auc, read_asking,
                                   run_asking, value_bias)
from credit_rl.settings import make_config
from credit_rl.tiny import tiny_model, tiny_tokenizer
from credit_rl.trajectory import Group, Question, Stop, Trajectory, Turn

SETTINGS = dict(protocol='carl-tiny', method='carl', world={'size': 200, 'hops': [1], 'twins': True}, questions=8,
                dev_questions=12, test_questions=8, turn_tokens=8, threads=1)


def rollouts(question, *played):
    "A group of 'ask' and 'answer' rollouts, right or wrong, as in 'ask+', 'answer-'; '?' is cut off."
    def one(said):
        gold = 'yes' if said.endswith('+') else 'no'
        call = Turn('invoke', (1, ), (0., ), (), 'call', 'seen', {'queries': ['x']})
        turns = [call] * said.startswith('ask') + [Turn('commit', (1, ), (0., ), (), gold, '')]
        asked, stop = Question(question, question, ['yes']), Stop.LENGTH if said == '?' else Stop.ANSWER
        return Trajectory(asked, (), turns, stop, None if said == '?' else gold)
    return Group(Question(question, question, ['yes']), [one(said) for said in played])


def test_by_hand():
    groups = [rollouts('a', 'ask+', 'ask-', 'answer+', 'answer+'), rollouts('b', 'ask-', 'answer+', '?'),
              rollouts('c', 'answer-', 'answer-'), rollouts('d', 'ask+', 'ask+', 'answer-')]
    assert [first_choice(t) for t in groups[1].trajectories] == ['ask', 'answer', None]
    found = asking_values(groups, [True, True, True, False])
    known, unknown = found.loc['known'], found.loc['unknown']
    assert (known.questions, known.both, unknown.both) == (3, 2, 1)
    assert known['ask error'] == pytest.approx(torch.tensor([.5, .5, 0.]).std().item() / 3 ** .5)  # of questions
    assert known['ask rate'] == 3 / 8 and known.ask == .25 and known.answer == pytest.approx(2 / 3)
    assert known.delta == .75 and (known.low, known.high) == (.5, 1.)      # of .5 and 1
    assert unknown.delta == -1 and math.isnan(unknown.low)                 # one question has no interval


def test_what_was_not_measured_is_missing():
    none = asking_values([rollouts('a', 'ask+'), rollouts('b', 'answer-')], [True, False])
    assert math.isnan(none.answer['known']) and math.isnan(none.ask['unknown']) and none.delta.isna().all()
    assert none.both.tolist() == [0, 0] and 'Too few' in asking_says(none)
    nobody = asking_values([rollouts('a', 'ask+', 'answer-')], [False])
    assert nobody.questions['known'] == 0 and math.isnan(nobody['ask rate']['known'])


def test_bias_is_told_apart_by_question_tier_and_kind():
    found = value_bias([.9, .9, .2, .4], [1., 0., 0., 1.], ['start', 'start', 'commit', 'start'], ['a', 'b', 'a', 'c'],
                       [True, True, True, False])
    assert found.bias['known', 'start'] == pytest.approx(.4) and found.error['known', 'start'] == pytest.approx(.5)
    assert found.bias['known', 'commit'] == pytest.approx(.2) and math.isnan(found.error['known', 'commit'])
    assert found.bias['unknown', 'start'] == pytest.approx(-.6) and found.states.tolist() == [1, 2, 1]


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tiny')
    tiny_model(tiny_tokenizer(numbers=True), width=32, heads=1, feedforward=64).save_pretrained(folder)
    tiny_tokenizer(numbers=True).save_pretrained(folder)
    return str(folder)


def test_an_untrained_model_knows_nothing_and_the_command_says_so(model, tmp_path, capsys):
    file = tmp_path / 'settings.yaml'
    file.write_text(yaml.safe_dump({**SETTINGS, 'model': model, 'method': 'grpo'}))
    when_to_ask.main(['--params', str(file), 'attempts=2', 'tries=2', 'asked=6', f'run={tmp_path / "run"}'])
    kept = json.loads((tmp_path / 'run' / 'asking.json').read_text())
    assert kept['questions'] == 6 and kept['bias'] is None and kept['form'] == {'logistic': None, 'trees': None}
    assert kept['asking']['known']['questions'] == 0 and 'Too few known questions' in kept['says']
    assert kept['says'] in capsys.readouterr().out
    (row,) = read_asking(tmp_path).itertuples()
    assert row.Index == (tmp_path.name, 'run') and all(map(math.isnan, (row.delta, row.bias, row.form)))
    again = ['--params', str(file), 'attempts=2', 'tries=2', 'asked=6', f'run={tmp_path / "run"}', 'learning_rate=.5']
    when_to_ask.main(again)                              # what plays no part in it may change
    assert 'found before' in capsys.readouterr().out
    with pytest.raises(SystemExit, match='settings'):
        when_to_ask.main([*again, 'attempts=3', 'temperature=.5'])
    with pytest.raises(ValueError, match='leaves'):
        run_asking(make_config({'protocol': 'tiny', 'model': model, 'run': str(tmp_path)}))
    with pytest.raises(ValueError, match='attempts'): AskingChoice(attempts=1)


def test_questions_of_one_form_cannot_be_told_apart():
    with pytest.raises(ValueError, match='questions'): form_auc([Question('a', 'x', [''])], [True])
    assert torch.tensor(list(form_auc([Question(str(i), 'x', ['']) for i in range(9)], [i < 4 for i in range(9)])
                             .values())).allclose(torch.tensor(.5))
