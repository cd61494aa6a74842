"""63_train: runs whose judge answers, fails, is slow or thinks; of what is missing a step is not learned from."""
import gzip
import json
import time
import zlib

import pytest

from credit_rl import judge as judges, train as training
from credit_rl.runlog import read_metrics, read_summary
from credit_rl.train import train
from judge_server import Stub, no_proxy  # noqa: F401

BASE = dict(method='outcome+judge/calls', questions_per_step=6, group_size=3, questions=40, dev_questions=1,
            test_questions=1, max_turns=2, turn_tokens=12, world={'size': 100}, threads=1, eval_every=9, track='',
            steps=6)
NAMES = ['judge_calls', 'judge_failures', 'judge_unparsable']
COLUMNS = [*NAMES, 'updates', 'zero_advantage', 'turn_reward']


def grades(prompt):
    "Ratings of every pair that a prompt shows, which differ from prompt to prompt."
    luck = zlib.crc32(prompt.encode())
    return f'ratings_by_pair={[[(luck + i) % 3, luck % 2, 1] for i in range(prompt.count("</tool_response>"))]}'


def failing(share, how=400):
    "A judge that gives up on some of a hundred prompts, the same ones at every attempt; not on the one of a check."
    return lambda prompt, attempt: how if 'Pair' in prompt and zlib.crc32(prompt[::-1].encode()) % 100 < share else (
        grades(prompt))


def run_with(script, root, folder, judge={}, **more):
    "A run, or how it ended; what it said, and how often the judge was asked."
    lines = []
    with Stub(script) as stub: end = one_more(stub, root, folder, lines, judge, **more)
    return end, lines, stub.requests


def one_more(stub, root, folder, lines, judge={}, **more):
    "A run in another process, as it were, of a judge that is there: its folder, or how it ended."
    judges._judge_at.cache_clear()
    asked = {'base_url': f'http://127.0.0.1:{stub.server.server_port}/v1', 'model': 'stub', **judge}
    try: return train({**BASE, 'options': {'judge': asked}, 'model': str(root / 'data' / 'tiny_base'),
                       'run': str(folder), **more}, say=lines.append)
    except ConnectionError as e: return str(e)


@pytest.mark.parametrize('share, how', [(5, 400), (50, 400), (50, 'I would rather not.')])
def test_a_step_of_which_too_much_is_missing_is_not_learned_from(share, how, root, tmp_path):
    "Refused or unreadable: a step is learned from if at most a tenth is missing; the fifth in a row ends the run."
    end, lines, _ = run_with(failing(share, how), root, tmp_path / 'run')
    table = read_metrics(tmp_path / 'run')[1:].reindex(columns=COLUMNS)
    missing = (table.judge_failures + table.judge_unparsable) / table.judge_calls
    learned = missing <= .1
    assert (table.judge_calls > 0).all() and (table.turn_reward.notna() == learned).all()
    assert (table.updates[~learned] == 0).all() and (table.zero_advantage[~learned] == 1).all()
    assert (table.updates > 0).any() == learned.any()
    assert (table.judge_failures if how == 400 else table.judge_unparsable).gt(0).any() == (share > 0)
    if share < 50:
        assert len(table) == 6 and end == tmp_path / 'run' and read_summary(end)['steps'] == 6 and learned.sum() >= 3
    else:
        assert len(table) == 4 and not learned.any() and 'the fifth step in a row' in end and 'resume=True' in end
        assert sum('is not learned from' in line for line in lines) == 5
        assert how != 400 or any('400' in line for line in lines if 'is not learned from' in line)


def test_a_run_that_ended_goes_on_when_its_judge_is_mended(root, tmp_path):
    "By the same command; what the judge said before it failed is not asked again."
    ill, lines = [100], []
    with Stub(lambda prompt, attempt: failing(ill[0])(prompt, attempt)) as stub:
        end = one_more(stub, root, tmp_path / 'run', lines, eval_every=2)
        assert 'goes on by the same command' in end and not (tmp_path / 'run' / 'judge.jsonl.gz').exists()
        ill[0] = 0
        end = one_more(stub, root, tmp_path / 'run', lines, eval_every=2, resume=True)
    assert end == tmp_path / 'run' and 'resumed after step 4' in lines
    table = read_metrics(end)[1:]
    assert len(table) == 6 and table.turn_reward.notna().tolist() == [False] * 4 + [True] * 2


def test_a_run_goes_on_though_its_judge_moved(root, tmp_path):
    "To another address, asked otherwise; what it said before it moved is not asked again. Another model is refused."
    folder, lines = tmp_path / 'run', []
    with Stub(failing(0)) as stub:
        one_more(stub, root, folder, lines, eval_every=2, steps=2)
        before = {r['messages'][-1]['content'] for r in stub.requests}
    with Stub(failing(0)) as stub:
        moved = {'timeout': 7., 'concurrency': 2, 'deadline': 99., 'retries': 1}
        with pytest.raises(ValueError, match='parameters'):
            one_more(stub, root, folder, lines, {**moved, 'model': 'other'}, eval_every=2, steps=3, resume=True)
        asked = len(stub.requests)
        end = one_more(stub, root, folder, lines, moved, eval_every=2, steps=3, resume=True)
        again = {r['messages'][-1]['content'] for r in stub.requests[asked + 1:]}
    assert end == folder and read_summary(end)['steps'] == 3 and 'resumed after step 2' in lines
    assert again and not again & before and read_metrics(end)[1:].turn_reward.notna().all()


def test_more_may_be_missing_where_a_run_says_so(root, tmp_path):
    end, _, _ = run_with(failing(50), root, tmp_path / 'run', unanswered=1., steps=2)
    assert read_metrics(end)[1:].turn_reward.notna().all()
    with pytest.raises(ValueError, match='unanswered'):
        train({**BASE, 'options': {'judge': {'base_url': 'http://x', 'model': 'm'}}, 'unanswered': 1.5})


def test_a_judge_is_asked_while_others_are_still_played(root, tmp_path, monkeypatch):
    "The engine waits for a request after each rollout; the run is as if all were asked in the end."
    begun, plain = [], run_with(failing(0), root, tmp_path / 'plain', steps=2)[0]
    each = training.rollout
    def waiting(*given):
        *rest, progress, hook = given
        def late(ended):
            before = len(begun)
            hook(ended)
            for _ in range(200):
                if len(begun) > before or not any(t.answer for t in ended): break
                time.sleep(.01)
        if hook is None: return each(*rest, progress)
        found = each(*rest, progress, late)
        early.append(len(begun))
        return found
    early, counted = [], lambda prompt, attempt: begun.append(1) or grades(prompt) if 'Pair' in prompt else 'ready'
    monkeypatch.setattr(training, 'rollout', waiting)
    end, _, requests = run_with(counted, root, tmp_path / 'early', steps=2)
    assert len(early) == 2 and early[0] > 0 and len(begun) == len(requests) - 1
    names = ['turn_reward', 'reward', *NAMES]
    assert read_metrics(end)[1:][names].equals(read_metrics(plain)[1:][names])
    assert (read_metrics(end)[1:].judge_calls > 0).all()


@pytest.mark.long
def test_a_judge_of_several_ranks_is_asked_by_the_first(root, tmp_path):
    "Each prompt once, of the base's attempts too; what the rollouts earn is the same as on one rank."
    more = dict(steps=2, base_questions=1, learner='deepspeed', stage=2)
    found = {}
    for ranks in (1, 2):
        end, lines, requests = run_with(failing(0), root, tmp_path / str(ranks), ranks=ranks, **more)
        asked = [r['messages'][-1]['content'] for r in requests[1:]]
        assert sorted(asked) == sorted({*asked}), 'a prompt was asked twice'
        found[ranks] = sorted(asked), read_metrics(end)[1:2][['turn_reward', 'judge_calls']].round(4).to_dict('list')
    assert found[1][1] == found[2][1] and found[1][1]['judge_calls'][0] > 0


def test_what_the_judge_said_lies_in_the_run_and_nothing_is_asked_twice(root, tmp_path):
    "Of a run that plays ahead too, which asks while it learns; and a new run in the folder's place begins its own."
    for name, more in (('step', {}), ('ahead', dict(ahead=1, correction='truncated', gap=5.))):
        end, _, requests = run_with(failing(0), root, tmp_path / name, steps=3, **more)
        asked = [r['messages'][-1]['content'] for r in requests[1:]]                      # the first is the check
        rows = [json.loads(line) for line in gzip.open(end / 'judge.jsonl.gz', 'rt')]
        assert sorted(r['messages'][-1]['content'] for r in rows) == sorted(asked) == sorted({*asked})
        assert all(r['reply'] == grades(r['messages'][-1]['content']) for r in rows)
        assert read_metrics(end)[1:].turn_reward.notna().all()
