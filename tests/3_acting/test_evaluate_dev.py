"Questions that chose a checkpoint: an evaluation says how many it asks, or leaves them out."
import json
import shutil
import warnings
from pathlib import Path

import pytest

from credit_rl.evaluate import Evaluation, check_evaluation, dev_keys, note_seen, open_set, question_key
from credit_rl.export import export_run, of_model
from credit_rl.runlog import read_json
from credit_rl.trajectory import Question

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = dict(data='hotpotqa', path=str(ROOT / 'data' / 'hotpotqa_sample.json'), questions=None)


@pytest.fixture(scope='module')
def run(tmp_path_factory, finished):
    "A run that was chosen by two questions of the sample, and the model that it was exported as."
    folder = tmp_path_factory.mktemp('dev')
    run = shutil.copytree(finished(), folder / 'run', symlinks=True)
    assert not (run / 'dev.json').exists() and dev_keys(run) == set()          # of the tiny world nothing is published
    (questions, _), _ = open_set(Evaluation(**SAMPLE), 'hotpotqa', {})
    note_seen(run, [], questions[:2], questions[5:2:-1])
    return run, export_run(run, folder / 'model'), questions


def test_one_question_has_one_key_however_its_set_was_mixed():
    alone = Question('17', 'Who?', ('a',), source='nq')
    assert question_key(alone) == question_key(Question('nq:17', 'Who?', ('a',), source='nq')) == 'nq:17'


@pytest.mark.long
def test_an_exported_model_knows_what_chose_it(run):
    folder, model, questions = run
    assert read_json(model / 'credit_rl.json')['dev'] == [question_key(q) for q in questions[:2]]
    assert dev_keys(model) == dev_keys(folder) == {question_key(q) for q in questions[:2]}
    assert dev_keys(None) == dev_keys('owner/name') == set()


def test_a_note_says_how_many_are_in(run):
    _, model, questions = run
    with pytest.warns(UserWarning, match=f'2 of {len(questions)} questions chose the checkpoint'):
        (asked, about), _ = open_set(Evaluation(model=str(model), **SAMPLE), 'hotpotqa', {})
    assert len(asked) == len(questions) and about['dev_inside'] == 2 and 'dev_left_out' not in about


@pytest.mark.parametrize('which', [0, 1])
def test_they_are_left_out_where_it_is_asked(run, which):
    "By the run's folder or the model's, of this model and of its base alike."
    for model in (str(run[1]), None):
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            (asked, about), _ = open_set(Evaluation(model=model, leave_out=str(run[which]), **SAMPLE), 'hotpotqa', {})
        assert asked == run[2][2:] and about['dev_left_out'] == 2 and 'dev_inside' not in about
        assert about['loaded'] == len(run[2]) and json.dumps(about)


def test_the_test_questions_of_a_run_are_asked_in_its_order(run):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        (asked, about), _ = open_set(Evaluation(**{**SAMPLE, 'questions': str(run[0])}), 'hotpotqa', {})
    assert asked == run[2][5:2:-1] and about['asked'] == 3
    with pytest.raises(ValueError, match='test.json'): check_evaluation(Evaluation(**{**SAMPLE, 'questions': str(run[1])}))


def test_a_model_that_was_exported_before_the_run_went_on_is_not_asked(run, tmp_path):
    "Its step is not that of the best checkpoint; the one of today is exported beside it."
    place, said = shutil.copytree(run[0], tmp_path / 'run', symlinks=True), []
    shutil.copytree(run[1], place / 'model')
    arguments = of_model([str(place), 'passages=2'], said.append)
    assert f'model={json.dumps(str(place / "model"))}' in arguments and f'questions={json.dumps(str(place))}' in arguments and not said
    about = read_json(place / 'model' / 'credit_rl.json')
    (place / 'model' / 'credit_rl.json').write_text(json.dumps(about | {'step': about['step'] - 1}))
    again = f'-{about["step"]}'
    arguments = of_model([str(place)], said.append)
    assert f'model={json.dumps(str(place / "model") + again)}' in arguments and again in next(a for a in arguments if a[:4] == 'run=')
    assert len(said) == 1 and read_json(f'{place / "model"}{again}/credit_rl.json')['step'] == about['step']
    (place / 'test.json').unlink()
    assert 'leave_out' in ' '.join(of_model([str(place)], said.append)) and 'drawn anew' in said[-1]


def test_an_export_says_how_it_is_loaded_and_that_its_prompts_have_changed(run, tmp_path):
    assert read_json(run[1] / 'credit_rl.json')['tokenizer'] == 'PreTrainedTokenizerFast'      # AutoTokenizer makes Qwen2's of it
    place = shutil.copytree(run[0], tmp_path / 'run', symlinks=True)
    summary = read_json(place / 'summary.json')
    (place / 'summary.json').unlink()
    (place / 'summary.json').write_text(json.dumps(summary | {'rendered_hash': 'other'}))
    with pytest.warns(UserWarning, match='other prompts'): export_run(place, tmp_path / 'made')


def test_leaving_all_out_or_a_folder_that_says_nothing_is_refused(run, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match='questions'):
        open_set(Evaluation(leave_out=str(tmp_path), **SAMPLE), 'hotpotqa', {})
    monkeypatch.setattr('credit_rl.evaluate.dev_keys', lambda folder: {question_key(q) for q in run[2]})
    with pytest.raises(ValueError, match='leave_out='): open_set(Evaluation(leave_out=str(run[0]), **SAMPLE), 'hotpotqa', {})
