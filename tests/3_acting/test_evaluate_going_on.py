"""An evaluation that ends in the middle of a set: its rows are there, the same command plays what is left, and what
comes of it is what an evaluation without interruption gives."""
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from credit_rl import evaluate as evaluation
from credit_rl import runlog
from credit_rl.engine import FinishedTurn, ScriptedEngine
from credit_rl.evaluate import replay_evaluation, run_evaluation
from credit_rl.protocol import byte_tokenizer
from credit_rl.runlog import read_turns

ROOT = Path(__file__).resolve().parents[2]


class OneByOne(ScriptedEngine):
    "Answers each question with its number; `ends(n)` is called before the n-th answer, and may raise."
    def __init__(self, ends=lambda n: None):
        super().__init__(None, byte_tokenizer(), 4096)
        self.ends, self.asked = ends, []

    def stream(self, sampling): return self

    def __iter__(self):
        while self.waiting:
            key, ids, _ = self.waiting.pop(0)
            number = self.tokenizer.decode(ids).rsplit('Number ', 1)[1].split('?')[0]
            self.ends(len(self.asked))
            self.asked.append(number)
            said = self.tokenizer.encode(f'<answer> {int(number) % 3} </answer>')
            yield [FinishedTurn(key, said, [-.5] * len(said), 'stop')]


@pytest.fixture
def settings(tmp_path):
    rows = [{'id': f'q{i}', 'question': f'Number {i}?', 'golden_answers': ['0']} for i in range(12)]
    (tmp_path / 'nq.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    return {'model': 'counter', 'data': 'nq', 'path': str(tmp_path / 'nq.jsonl'), 'protocol': 'direct',
            'run': str(tmp_path / 'run')}


def quiet(settings, engine, say=lambda line: None):
    return run_evaluation(settings, engine, say=say, progress=False) / 'nq'


def stop_at(most):
    def ends(n):
        if n == most: raise KeyboardInterrupt
    return ends


def assert_same_files(one, other):
    for name in ('turns.jsonl.gz', 'scores.json'): assert (one / name).read_bytes() == (other / name).read_bytes()


def test_what_was_played_is_written_and_not_played_again(settings, tmp_path):
    "Interrupted twice: three sittings ask twelve questions, each once."
    whole = quiet({**settings, 'run': str(tmp_path / 'whole')}, OneByOne())
    sittings, lines = [OneByOne(stop_at(5)), OneByOne(stop_at(4)), OneByOne()], []
    for engine in sittings[:2]:
        with pytest.raises(KeyboardInterrupt): quiet(settings, engine)
    place = Path(settings['run']) / 'playing' / 'nq'
    assert [r['id'] for r in read_turns(place / 'rank-0')] == [f'q{i}' for i in range(9)]
    assert not (Path(settings['run']) / 'nq').exists()
    there = quiet(settings, sittings[2], lines.append)
    assert [e.asked for e in sittings] == [['0', '1', '2', '3', '4'], ['5', '6', '7', '8'], ['9', '10', '11']]
    assert_same_files(there, whole)
    assert lines[0].startswith('nq: EM 0.333 on 12 questions (9 played before), ') and not place.parent.exists()
    assert replay_evaluation(there, OneByOne(), say=lambda line: None, progress=False)['nq'].same


def test_a_set_whose_last_question_was_played_needs_no_engine(settings):
    "The crash came between the last row and the folder."
    def interrupt(*given): raise KeyboardInterrupt
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, '_keep', interrupt)
        with pytest.raises(KeyboardInterrupt): quiet(settings, engine := OneByOne())
    assert len(engine.asked) == 12
    again = OneByOne()
    again.stream = lambda sampling: pytest.fail('something was played')
    assert len(read_turns(quiet(settings, again))) == 12


def test_what_was_begun_with_other_inputs_is_refused(settings):
    with pytest.raises(KeyboardInterrupt): quiet(settings, OneByOne(stop_at(3)))
    with pytest.raises(ValueError, match='playing/nq'):
        quiet({**settings, 'turn_tokens': 9}, OneByOne())
    assert len(read_turns(quiet(settings, engine := OneByOne()))) == 12 and len(engine.asked) == 9


KILLED = '''
import os, signal, sys
sys.path[:0] = sys.argv[2:]
from test_evaluate_going_on import OneByOne, quiet
import json
quiet(json.loads(sys.argv[1]), OneByOne(lambda n: n == 7 and os.kill(os.getpid(), signal.SIGKILL)))
'''


def test_a_process_that_is_killed_loses_nothing_that_it_had_played(settings, tmp_path):
    "By a signal that nobody can catch; and a row that was cut off in the middle is played again."
    whole = quiet({**settings, 'run': str(tmp_path / 'whole')}, OneByOne())
    done = subprocess.run([sys.executable, '-c', KILLED, json.dumps(settings), str(Path(__file__).parent)], cwd=ROOT,
                          env={**os.environ, 'PYTHONPATH': str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    path = Path(settings['run']) / 'playing' / 'nq' / 'rank-0' / 'turns.jsonl.gz'
    path.write_bytes(path.read_bytes()[:-9])
    there = quiet(settings, engine := OneByOne())
    assert engine.asked == [str(i) for i in range(6, 12)]
    assert_same_files(there, whole)


def test_rows_of_other_numbers_of_ranks_are_taken(settings, tmp_path):
    "Three ranks wrote before; one goes on. A rank's file that ends in the middle of a row keeps the rows before it."
    whole = quiet({**settings, 'run': str(tmp_path / 'whole')}, OneByOne())
    with pytest.raises(KeyboardInterrupt): quiet(settings, OneByOne(stop_at(0)))
    place, rows = Path(settings['run']) / 'playing' / 'nq', read_turns(whole)
    for rank in range(3):
        with runlog.RunLog(place / f'rank-{rank}', resume=True) as log:
            for row in rows[rank::3][:2]: log.turns(0, [row])
    cut = place / 'rank-2' / 'turns.jsonl.gz'
    cut.write_bytes(cut.read_bytes()[:-1])
    there = quiet(settings, engine := OneByOne())
    assert engine.asked == ['5', '6', '7', '8', '9', '10', '11']        # 2 and 5 are rank 2's, whose second is cut off
    assert_same_files(there, whole)


def test_a_set_larger_than_what_is_read_at_once_is_read(settings, monkeypatch):
    "A limit on what a file may unpack to at once is not one on how many questions a set has."
    rows = [{'id': f'q{i}', 'question': f'Number {i}?', 'golden_answers': ['0']} for i in range(200)]
    Path(settings['path']).write_text('\n'.join(map(json.dumps, rows)))
    there = quiet(settings, OneByOne())
    size = sum(len(json.dumps(row)) for row in read_turns(there)) / 200
    monkeypatch.setattr(runlog, '_MOST_STEP', int(100 * size))           # a hundred of the two hundred rows
    assert len(read_turns(there)) == 200
    quiet(settings, OneByOne(stop_at(0)))                                # it is done, and can be read


def test_scores_by_another_reward_are_no_scores_of_this_one(settings, tmp_path, monkeypatch):
    "By name, and by the file that it stands in; what a word of an answer is counts as well."
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / 'my_reward.py').write_text('def f(question, answer): return 1.\ndef g(question, answer): return 0.\n')
    quiet({**settings, 'reward': 'my_reward:f'}, OneByOne())
    with pytest.raises(ValueError, match='own'): quiet({**settings, 'reward': 'my_reward:g'}, OneByOne())
    quiet({**settings, 'reward': 'my_reward:f'}, OneByOne(stop_at(0)))                              # nothing is asked again
    (tmp_path / 'my_reward.py').write_text('def f(question, answer): return .5\n')
    with pytest.raises(ValueError, match='own'): quiet({**settings, 'reward': 'my_reward:f'}, OneByOne())
    quiet({**settings, 'run': str(tmp_path / 'cut')}, OneByOne())
    with pytest.raises(ValueError, match='tokens'): quiet({**settings, 'run': str(tmp_path / 'cut'), 'tokens': 'characters'}, OneByOne())
