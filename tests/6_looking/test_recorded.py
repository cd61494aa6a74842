"""What a run kept is enough to say again what it credited its turns with, and what it does not hold is refused."""
import dataclasses
import math
from pathlib import Path

import pytest
import torch

from credit_rl.methods import METHODS
from credit_rl.recorded import NotKept, read_recording, recorded_credit, recorded_tokenizer, token_texts
from credit_rl.runlog import RunLog
from credit_rl.train import train
from credit_rl.trajectory import example_group, to_json

ROOT = Path(__file__).resolve().parents[2]
NAN = math.nan
SMALL = {'model': str(ROOT / 'data/tiny_base'), 'steps': 1, 'questions_per_step': 6, 'group_size': 4,
         'dev_questions': 3, 'test_questions': 6, 'log_rollouts': 6, 'track': '', 'keep': 1, 'seed': 14,
         'log_kl': False}


def kept(tmp_path, rows, **params):
    "A run's folder with rows of one step."
    log = RunLog(tmp_path / 'run')
    if params: log.write_params(params)
    log.turns(1, rows)
    return read_recording(tmp_path / 'run', None)


def example(rewards=(1., 0., 0.), **more):
    "The rows of the running example; a value of `more` is a list with one for each rollout."
    return [{'kind': 'train', 'trajectory': to_json(t), 'reward': r, 'advantages': None,
             **{name: values[i] for name, values in more.items()}}
            for i, (t, r) in enumerate(zip(example_group().trajectories, rewards))]


@pytest.mark.parametrize('method', [pytest.param('tspo', marks=pytest.mark.nightly), 'igpo', 'turn-ppo'])
def test_a_run_s_own_credit_comes_out_again(tmp_path, method):
    "From text alone, from the belief that was measured, and from a critic's values."
    more = {'critic_rate': .002, 'critic_backbone_rate': .0005, 'steps': 3} if method == 'turn-ppo' else {}
    train({**SMALL, **more, 'method': method, 'run': str(tmp_path / 'run')}, lambda line: None)
    recording = read_recording(tmp_path / 'run')
    found = recorded_credit(recording, method, None)
    trained = [(a, c) for a, c in zip(recording.attempts, found) if a.kind == 'train']
    assert len(trained) == 6 * (3 if more else 1) and not [c for _, c in trained if isinstance(c, str)]
    before = torch.tensor([x for a, _ in trained for r in a.rows for x in r['advantages']])
    again = torch.tensor([x for _, c in trained for row in c for x in row])
    assert before.abs().max() > .1
    torch.testing.assert_close(again, before, atol=2e-5, rtol=1e-4)
    texts = token_texts([turn for a, _ in trained for t in a.group.trajectories for turn in t.turns],
                        recorded_tokenizer(recording))
    assert {''.join(t) for t in texts} == {turn.action_text for a, _ in trained for t in a.group.trajectories
                                           for turn in t.turns}


def test_what_was_not_measured_is_a_reason_and_never_a_number(tmp_path):
    recording = kept(tmp_path, example(), method='tspo', group_size=3)
    reasons = {name: recorded_credit(recording, name)[0] for name in METHODS}
    for name, part in {'igpo': 'belief', 'tips': 'critic', 'ppo': 'critic', 'carl': 'critic', 'vine': 'playing on',
                       'mt-grpo': 'one tool call', 'oracle': 'tiny world'}.items():
        assert isinstance(reasons[name], str) and part in reasons[name], (name, reasons[name])
    assert all(len(reasons[name]) == 3 for name in ('grpo', 'tspo', 'gigpo', 'igpo-f1', 'rloo'))


def test_the_wrong_critic_and_the_wrong_words_are_refused(tmp_path):
    values, belief = [[.1, .2, .3, .4]] * 3, [[.1, .2, .3, .4, NAN]] * 3
    recording = kept(tmp_path, example(values=values, belief=belief), method='mt-ppo', group_size=3)
    assert 'this run had one of outcome + rules' in recorded_credit(recording, 'turn-ppo')[0]
    (tmp_path / 'other').mkdir()
    recording = kept(tmp_path / 'other', example(belief=belief), method='igpo', options={'schema': 'bare'})
    assert isinstance(recorded_credit(recording, 'igpo', None)[0], list)
    assert 'other words' in recorded_credit(recording, 'igpo')[0]


def test_values_of_tokens_are_not_made_of_values_of_turns(tmp_path):
    recording = kept(tmp_path, example(values=[[.1, .2, .3, .4]] * 3), method='ppo', group_size=3)
    assert 'before every token' in recorded_credit(recording, 'ppo')[0]
    assert isinstance(recorded_credit(recording, 'turn-ppo')[0], list)
    rows = example(values=[[.1, .2, .3, .4], [.1, NAN, .3, .4], [.1] * 4])
    (tmp_path / 'gap').mkdir()
    assert 'some are missing' in recorded_credit(kept(tmp_path / 'gap', rows, method='ppo'), 'turn-ppo')[0]


def test_a_rollout_without_measure_has_no_credit_and_the_others_have(tmp_path):
    belief = [[.1, .2, .3, .4, NAN], [NAN] * 5, [.1, .1, .2, .1, NAN]]
    [credit] = recorded_credit(kept(tmp_path, example(belief=belief), method='igpo', group_size=3), 'igpo')
    assert all(math.isnan(x) for x in credit[1]) and not any(math.isnan(x) for row in credit[::2] for x in row)


def test_an_evaluation_s_folder_holds_one_for_each_set(tmp_path):
    t = to_json(example_group().trajectories[0])
    for name, em in (('hotpotqa', 1.), ('nq', 0.)):
        RunLog(tmp_path / name).turns(0, [{'kind': 'evaluate', 'dataset': name, 'em': em, 'trajectory': t}])
    recording = read_recording(tmp_path)
    assert [a.rewards for a in recording.attempts] == [[1.], [0.]] and recording.settings is None
    assert 'one member' in recorded_credit(recording, 'grpo')[0]
    with pytest.raises(NotKept, match='names'): recorded_tokenizer(recording)


def test_a_file_that_is_cut_or_damaged(tmp_path):
    recording = kept(tmp_path, example())
    path = tmp_path / 'run/turns.jsonl.gz'
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])                                # a run is writing at this moment
    assert read_recording(tmp_path / 'run').rollouts == recording.rollouts
    path.write_bytes(whole + b'no gzip at all')
    with pytest.raises(ValueError, match='damaged'): read_recording(tmp_path / 'run')
    with pytest.raises(FileNotFoundError, match='holds no turns.jsonl.gz'): read_recording(tmp_path / 'nowhere')


def test_parameters_of_another_version_do_not_stop_a_look(tmp_path):
    recording = kept(tmp_path, example(), method='tspo', a_setting_of_the_future=1)
    assert 'not read by this version' in recording.notes[0] and isinstance(recorded_credit(recording, 'tspo')[0], list)


def test_a_tokenizer_that_is_not_the_run_s_is_noticed(tmp_path):
    recording = kept(tmp_path, example(), method='tspo', model='tiny')
    turn = example_group().trajectories[0].turns[0]
    with pytest.raises(NotKept, match='wrote'):
        token_texts([turn], recorded_tokenizer(recording))
    with pytest.raises(NotKept, match="'nobody/nothing'"):
        settings = dataclasses.replace(recording.settings, model='nobody/nothing')
        recorded_tokenizer(dataclasses.replace(recording, settings=settings))
