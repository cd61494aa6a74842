"""nbs/your_tool.md, followed literally outside of the checkout; what it says is refused is refused."""
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from credit_rl.engine import ScriptedEngine
from credit_rl.environment import make_environment
from credit_rl.methods import get_method
from credit_rl.protocol import PROTOCOLS, Chat, byte_tokenizer
from credit_rl.rollout import Environment, continuations, rollout
from credit_rl.settings import check, make_config
from credit_rl.step_metrics import right_marks
from credit_rl.tools import OwnTools, own_outcome, tool_of
from credit_rl.trajectory import Question, Result, Stop, group_from_json, to_json

CALL = '<tool_call> {"name": "%s", "arguments": %s} </tool_call>'


def double(x: int):
    """Double a number.

    Args:
        x: The number.
    """
    return 2 * x


def odd(kind: str):
    """Return what JSON does not have.

    Args:
        kind: Of it.
    """
    async def later(): yield 1
    return {'keys': {(1, 2): 3}, 'numbers': {np.int64(1): 2}, 'steps': (10 // n for n in (5, 2)), 'later': later(),
            'broken': (10 // n for n in (5, 0))}[kind]


def near(question, answer): return .5


class Steps:
    "An environment of TRL's shape whose calls bring rewards."
    def reset(self, **row):
        self.n = 0
        return ' Go on.'

    def step(self, by: int):
        """Take steps.

        Args:
            by: How many.
        """
        if by < 1: raise ValueError('only forward')
        self.n += by
        return SimpleNamespace(blocks=[{'type': 'text', 'text': f'at {self.n}'}], reward=self.n / 4, finished=self.n >= 4)

    @classmethod
    @functools.cache
    def look(cls):
        "Look around."
        return 'a road'

    def get_reward(self): return min(1., self.n / 4)


def play(tools, *says, reward=None, n=1):
    chat = make_environment(byte_tokenizer(), tools).chat
    turns = iter(says * n)
    env = Environment(chat, tools, 6, 20000, reward=reward)
    engine = ScriptedEngine(lambda text, rng: next(turns), chat.tokenizer)
    return rollout(engine, env, [Question('q', 'How far?', ['4'])], n)[0]


def test_an_environment_plays_with_rewards_of_turns_and_ends_itself():
    "Text behind the question, an exception as a reply, what each call brought, and the outcome; stored and read again."
    group = play(OwnTools(environment=Steps), *(CALL % ('step', '{"by": %d}' % by) for by in (1, 0, 3)))
    [t] = group.trajectories
    assert t.question.text == 'How far? Go on.' and t.stop is Stop.FINISHED and t.answer is None and t.earned == 1
    assert [turn.observation_text for turn in t.turns] == ['at 1', 'Error: ValueError: only forward', 'at 4']
    assert [turn.reward for turn in t.turns] == [.25, None, 1] and t.turns[1].result is Result.ERROR
    [read] = group_from_json(to_json(group)).trajectories
    assert read.stop is t.stop and read.earned == 1 and [turn.reward for turn in read.turns] == [.25, None, 1]
    rewards = get_method('outcome+brought/turns').text_rewards([group])['turns']
    assert rewards.tolist() == [[.25, 0, 1]]
    with pytest.raises(ValueError, match='brought'): get_method('grpo').text_rewards([group])


def test_rollouts_of_a_group_have_environments_of_their_own():
    group = play(OwnTools(environment=Steps), CALL % ('step', '{"by": 2}'), '<answer> 2 </answer>', n=1)
    assert [t.earned for t in group.trajectories] == [.5]
    tools = OwnTools(environment=Steps)
    one, two = (tools.begin(group.question)[0] for _ in range(2))
    assert one is not two and tools.methods == ['look', 'step']


def test_functions_answer_by_name_and_a_reward_scores_the_answer():
    group = play(tool_of(double), CALL % ('double', '{"x": 4}'), CALL % ('double', '{"y": 4}'),
                 CALL % ('halve', '{}'), '<answer> 8 </answer>', reward=near)
    [t] = group.trajectories
    assert [turn.result for turn in t.turns[:3]] == [Result.OK, Result.MALFORMED, Result.MALFORMED]
    assert t.turns[0].returned == ('8',) and t.earned == .5
    assert right_marks([group]) == '0' and right_marks([group], .5) == '1'           # and not by exact match
    said = tool_of(odd).call([[{'name': 'odd', 'arguments': {'kind': kind}}]
                              for kind in ('keys', 'numbers', 'steps', 'later', 'broken')])
    assert said[:3] == [('{(1, 2): 3}', Result.OK), ('{"1": 2}', Result.OK), ('[2, 5]', Result.OK)]
    assert [r for _, r in said[3:]] == [Result.ERROR] * 2 and 'ZeroDivision' in said[4][0] and 'return a value' in said[3][0]
    assert "argument" in t.turns[1].observation_text and 'halve' in t.turns[2].observation_text


@pytest.mark.parametrize('settings, word', [
    ({'tools': ['math:sin2']}, 'module:name'), ({'tools': [double], 'data': 'tiny'}, 'tiny'),
    ({'tools': [double], 'corpus': 'pages'}, 'corpus'), ({'tools': [double], 'protocol': 'tspo'}, 'protocol'),
    ({'protocol': 'tools'}, 'protocol'), ({'right': .5}, 'right'), ({'environment': Steps, 'reward': near}, 'get_reward'),
    ({'reward': 'math:sin'}, 'question'), ({'tools': [double], 'reward': near, 'method': 'prs'}, 'prs'),
    ({'environment': Steps, 'method': 'vine'}, 'plays on')])
def test_settings_that_cannot_work_are_refused(settings, word):
    "Before anything is loaded."
    with pytest.raises(ValueError, match=word):
        check(make_config({'data': 'nq', 'path': __file__, 'model': 'absent/model', **settings}))


def test_an_outcome_outside_of_0_to_1_is_refused():
    with pytest.raises(ValueError, match='scale'):
        play(tool_of(double), '<answer> 8 </answer>', reward=lambda question, answer: 8)
    with pytest.raises(ValueError, match='a list, one number'):
        play(tool_of(double), '<answer> 8 </answer>', reward=lambda completions: .5)


def test_what_cannot_be_played_is_refused():
    group = play(OwnTools(environment=Steps), '<answer> 8 </answer>')
    env = make_environment(byte_tokenizer(), OwnTools(environment=Steps))
    with pytest.raises(ValueError, match='beginning'): continuations(None, env, [(group.trajectories[0], 0)], 1)
    with pytest.raises(ValueError, match='write a def'): tool_of(functools.partial(double, x=1))
    with pytest.raises(ValueError, match='own'): Environment(Chat(PROTOCOLS['tspo'], byte_tokenizer()), tool_of(double))
    assert own_outcome(group.trajectories[0], lambda completions: [None]) != 0      # NaN: missing


ENDING = """
import atexit, threading
atexit.register(lambda: print(sorted(t.name for t in threading.enumerate())))    # the last to run
from credit_rl.tools import tool_of

async def greet(name: str):
    '''Greet somebody.

    Args:
        name: Who.
    '''
    return f'Hello {name}'

print(*tool_of(greet).call([[{'name': 'greet', 'arguments': {'name': 'Bo'}}]])[0])
"""


def test_a_program_with_an_asynchronous_tool_ends(root):
    "No thread of the tools is left when the interpreter goes."
    done = subprocess.run([sys.executable, '-c', ENDING], env={**os.environ, 'PYTHONPATH': str(root)}, timeout=120, text=True,
                          stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split('\n')[:2] == ['Hello Bo Result.OK', "['MainThread']"]


@pytest.mark.long
@pytest.mark.process
def test_the_page_runs_as_it_stands(root, tmp_path):
    blocks = re.findall(r'^```(\w+)\n(.*?)^```$', (root / 'nbs/your_tool.md').read_text(encoding='utf-8'), re.M | re.S)
    for language, text in blocks:
        if language == 'python': (tmp_path / text.split('\n')[0].removeprefix('# ')).write_text(text, encoding='utf-8')
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ['PATH']))
    env = {**os.environ, 'PATH': path, 'PYTHONPATH': str(root), 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
    for command in next(text for language, text in blocks if language == 'bash').strip().split('\n'):
        done = subprocess.run(['bash', '-c', command], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
        assert done.returncode == 0, f'{command}\n{done.stdout[-3000:]}'
    for name in ('prices', 'shop'):
        assert 'dev_right' in (tmp_path / f'runs/{name}/metrics.jsonl').read_text()
    assert '"metric": "reward"' in (tmp_path / 'runs/shop/evaluation/questions/scores.json').read_text()
