"""64_sft: the supervised baseline as a command, its folder, and what stands in its way."""
import contextlib
import importlib.util
import json
import sys
from unittest.mock import patch

import pytest
import torch

from credit_rl import runlog, sft
from credit_rl.models import load_model
from credit_rl.protocol import PROTOCOLS, prompt_hash
from credit_rl.sft import fine_tune, keep_right, main, sft_rows
from credit_rl.trajectory import Group, example_group


@pytest.mark.skipif(
    importlib.util.find_spec('trl') is None, reason='trl is not installed: pip install credit_rl[train]'
)
def test_the_command_leaves_a_model_that_loads(tmp_path, root, monkeypatch):
    monkeypatch.chdir(root)
    main([
        f'run={tmp_path / "run"}', 'model=data/tiny_base', 'questions=60', 'dev_questions=15', 'test_questions=60',
        'threads=1', 'seed=3', 'sft.questions=24', 'sft.attempts=8', 'sft.epochs=2', 'sft.learning_rate=1e-3'
    ])
    summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
    tiny = PROTOCOLS['tiny']
    assert (summary['protocol'], summary['prompt_hash']) == ('tiny', prompt_hash(tiny))
    assert summary['method'] == 'sft' and summary['rows'] > 5 and 0 <= summary['final_em'] <= 1 and len(
        summary['losses']) > 0
    model, tokenizer = load_model(str(tmp_path / 'run' / 'model'))
    base, _ = load_model('data/tiny_base')
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), base.parameters()))
    with pytest.raises(SystemExit, match='already holds a run'):
        main([f'run={tmp_path / "run"}', 'model=data/tiny_base'])


@pytest.mark.parametrize(
    'given, message',
    [
        ('sft.questons=9', "no setting 'sft.questons'; did you mean 'sft.questions'?"),
        ('dry_run=true', 'dry_run is for training by reinforcement'),
    ],
)
def test_what_it_does_not_take_is_refused_before_it_plays(tmp_path, root, monkeypatch, given, message):
    monkeypatch.chdir(root)
    with pytest.raises(SystemExit, match=message): main([f'run={tmp_path / "run"}', 'model=data/tiny_base', given])
    assert not (tmp_path / 'run').exists()


def test_games_are_different_right_and_few():
    group = example_group()
    right, wrong = group.trajectories[0], group.trajectories[1]
    kept = keep_right([Group(group.question, [right, right, wrong]), Group(group.question, [wrong])])
    assert [len(g.trajectories) for g in kept] == [1] and kept[0].trajectories[0] is right
    (row,) = sft_rows(kept)
    assert len(row['input_ids']) == len(row['labels']) and {l for l in row['labels'] if l != -100} <= set(
        row['input_ids'])


def test_without_trl_the_extra_is_named(root):
    with patch.dict(sys.modules, trl=None), pytest.raises(ImportError, match=r'credit_rl\[train\]'):
        fine_tune(None, None, [{'input_ids': [1], 'labels': [1]}])


@pytest.mark.parametrize(
    'arguments, message',
    [(['modle=x'], "did you mean 'model'"), (['model=nowhere'], 'neither a folder'), (['sft.atempts=3'], 'atempts')],
)
def test_mistakes_in_a_line(arguments, message):
    with pytest.raises(SystemExit, match=message): main(arguments)


def test_a_fine_tuning_that_was_ended_begins_anew(tmp_path, root, monkeypatch, capsys):
    "What a kill leaves was refused with the advice to resume, which was refused as well."
    pytest.importorskip('trl')
    monkeypatch.chdir(root)
    words = [f'run={tmp_path / "run"}', 'model=data/tiny_base', 'questions=40', 'dev_questions=6', 'test_questions=6',
             'threads=1', 'seed=3', 'sft.questions=24', 'sft.attempts=8', 'sft.epochs=1']
    class Killed(BaseException): pass
    def die(*args, **rest): raise Killed
    with monkeypatch.context() as patch:
        patch.setattr(sft, 'fine_tune', die)
        patch.setattr(runlog.RunLog, 'beginning', lambda log: contextlib.nullcontext())      # no time to clear away
        with pytest.raises(Killed): main(words)
    assert (tmp_path / 'run' / 'params.yaml').exists()
    with pytest.raises(SystemExit, match='already holds a run'): main(words)
    main([*words, 'resume=true'])
    made = (tmp_path / 'run' / 'summary.json').read_bytes()
    main([*words, 'resume=true'])
    assert 'complete and left as it is' in capsys.readouterr().out
    with pytest.raises(SystemExit, match='holds a finished fine-tuning by'):
        main([*words, 'resume=true', 'sft.batch=3'])
    assert (tmp_path / 'run' / 'summary.json').read_bytes() == made


def test_an_update_whose_gradient_is_not_finite_is_not_taken(tmp_path, root, monkeypatch, capsys):
    "TRL takes it, and what came out was a model of NaN and a summary of its score."
    pytest.importorskip('trl')
    monkeypatch.chdir(root)
    words = [f'run={tmp_path / "run"}', 'model=data/tiny_base', 'questions=40', 'dev_questions=6', 'test_questions=6',
             'threads=1', 'seed=3', 'sft.questions=12', 'sft.attempts=6', 'sft.epochs=4', 'sft.learning_rate=1e30']
    with pytest.raises(SystemExit, match='update 3: the gradient is not finite .*bad_step.json'): main(words)
    bad = json.loads((tmp_path / 'run' / 'bad_step.json').read_text())
    assert bad['step'] == 3 and 'loss' in bad['error']
    assert bad['rollouts'] and all('<answer>' in row for row in bad['rollouts'])
    assert sorted(p.name for p in (tmp_path / 'run').iterdir()) == ['bad_step.json']
    main([*words, 'resume=true', 'on_bad_step=skip'])
    assert 'update 3: the gradient is not finite' in capsys.readouterr().out
    weights = load_model(str(tmp_path / 'run' / 'model'))[0].parameters()
    assert all(w.isfinite().all() for w in weights)
