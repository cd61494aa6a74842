"""A run is watched from its folder alone: before it begins, while it writes, when it is killed, when it has ended."""
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from credit_rl.runlog import RunLog
from credit_rl.trajectory import example_group, to_json
from credit_rl.watch import Status, follow, main, read_status, screen, watch

ROOT = Path(__file__).resolve().parents[2]
SUMMARY = {'final_em': .5, 'base_em': .25, 'questions': 600, 'best_step': 3, 'seconds': 150, 'steps': 3}


def begin(folder, **params):
    log = RunLog(folder)
    log.write_params({'method': 'tspo', 'seed': 1, 'steps': 10, **params})
    return log


def write_lines(folder, *clocks, end='\n'):
    "Metrics of steps 0, 1, …, whose clocks are given. Returns when that was."
    lines = [json.dumps({'step': s, 'seconds': c, 'reward': .1 * s}) for s, c in enumerate(clocks)]
    (folder / 'metrics.jsonl').write_text('\n'.join(lines) + end)
    return (folder / 'metrics.jsonl').stat().st_mtime


def rows(step, **more):
    "The running example as rollouts of a step."
    return [{'kind': 'train', 'reward': 1., 'advantages': [.5, -.25, 0., None], 'trajectory': to_json(t), **more}
            for t in example_group().trajectories]


def test_a_run_that_has_not_begun(tmp_path):
    assert read_status(tmp_path / 'nowhere').phase == 'waiting'
    begin(tmp_path / 'run')
    status = read_status(tmp_path / 'run')
    assert status.phase == 'starting' and 'no line yet' in status.line and screen(status)
    assert read_status(tmp_path / 'run', now=time.time() + 1e6).phase == 'starting'      # of its pace nothing is known


def test_a_last_line_that_is_cut_is_left_for_the_next_look(tmp_path):
    begin(tmp_path / 'run')
    now = write_lines(tmp_path / 'run', 10., 12., 14., end='\n{"step": 3, "seconds": 16, "rew')
    status = read_status(tmp_path / 'run', now=now)
    assert status.phase == 'running' and status.line == 'step 2 of 10, 2 s a step, 16 s left'
    assert list(status.metrics) == [0, 1, 2]


def test_a_line_that_is_no_json_is_said(tmp_path):
    begin(tmp_path / 'run')
    (tmp_path / 'run/metrics.jsonl').write_text('{"step": 0, "seconds": 1}\nnot json\n')
    status = read_status(tmp_path / 'run')
    assert 'holds a line that is not JSON' in status.line and screen(status, width=300)


@pytest.mark.parametrize('quiet, phase', [(0, 'running'), (59, 'running'), (61, 'silent')])
def test_a_silence_is_long_by_the_run_s_own_measure(tmp_path, quiet, phase):
    "The longest step took 10 s: three times that, and 30 s."
    begin(tmp_path / 'run')
    now = write_lines(tmp_path / 'run', 100., 102., 112., 114.)
    status = read_status(tmp_path / 'run', now=now + quiet)
    assert status.phase == phase and ('has died, or hangs' in status.line) == (phase == 'silent')


def test_the_evaluation_at_the_end_is_waited_for(tmp_path):
    "The base took 100 s, and two such evaluations end a run."
    begin(tmp_path / 'run', steps=3)
    now = write_lines(tmp_path / 'run', 100., 102., 104., 106.)
    assert read_status(tmp_path / 'run', now=now + 600).phase == 'finishing'
    assert read_status(tmp_path / 'run', now=now + 640).phase == 'silent'


def test_a_run_whose_rank_wrote_an_error_has_died_until_it_goes_on(tmp_path):
    begin(tmp_path / 'run')
    now = write_lines(tmp_path / 'run', 10., 12.)
    (tmp_path / 'run/errors').mkdir()
    path = tmp_path / 'run/errors/rank-0.json'
    path.write_text('{"time"')                                           # it is being written
    assert read_status(tmp_path / 'run', now=now).phase == 'running'
    path.write_text(json.dumps({'time': now + 1, 'error': 'RuntimeError: out of memory'}))
    status = read_status(tmp_path / 'run', now=now + 2)
    assert status.phase == 'died' and status.over and 'out of memory' in status.line
    os.utime(tmp_path / 'run/metrics.jsonl', (now + 60, now + 60))       # resumed, it wrote again
    assert read_status(tmp_path / 'run', now=now + 61).phase == 'running'


def test_an_ended_run_says_what_came_of_it(tmp_path):
    log = begin(tmp_path / 'run', steps=3)
    write_lines(tmp_path / 'run', 10., 12., 14., 16.)
    log.summary(SUMMARY)
    status = read_status(tmp_path / 'run', now=time.time() + 1e6)
    assert status.phase == 'ended' and 'EM 0.500' in status.line and 'base 0.250' in status.line
    log.summary({**SUMMARY, 'collapsed': True})
    assert 'answer rate collapsed' in read_status(tmp_path / 'run').line
    log.summary({'questions': 3})                                        # of a warm-up
    assert read_status(tmp_path / 'run').line == 'ended'


def test_what_a_model_wrote_steers_no_terminal():
    hostile = '\x1b[2J\x07\r\n\u202egold\x9b31m'
    row = {**rows(1)[0], 'step': 1}
    row['trajectory'] |= {'answer': hostile, 'question': {**row['trajectory']['question'], 'text': hostile}}
    status = Status(Path(f'run{hostile}'), 'running', hostile, {'method': hostile}, {1: {'reward': 1.}}, [row])
    text = '\n'.join(screen(status, 400, 40))
    assert not [c for c in text if not c.isprintable() and c != '\n'] and 'gold' in text


def test_a_look_that_is_no_terminal_is_one_look(tmp_path, capsys):
    log = begin(tmp_path / 'run', steps=3)
    write_lines(tmp_path / 'run', 10., 12.)
    assert main([str(tmp_path / 'run')]) == 0
    assert 'step 1 of 3' in capsys.readouterr().out
    old = time.time() - 1e5
    for path in (tmp_path / 'run').iterdir(): os.utime(path, (old, old))
    assert main([str(tmp_path / 'run'), '--once']) == 1
    assert 'has died' in ' '.join(capsys.readouterr().out.split())         # the path may break the line anywhere
    log.summary(SUMMARY)
    out = io.StringIO()
    assert watch(tmp_path / 'run', out=out).phase == 'ended' and '\x1b' not in out.getvalue()
    for wrong in ([str(tmp_path / 'run/params.yaml')], [str(tmp_path / 'run'), '--every', '0']):
        with pytest.raises(SystemExit) as end: main(wrong)
        assert end.value.code == 2


def test_a_real_run_is_followed_from_before_its_start_to_its_end(tmp_path):
    settings = {'model': ROOT / 'data/tiny_base', 'method': 'tspo', 'steps': 3, 'questions_per_step': 2,
                'group_size': 4, 'dev_questions': 3, 'test_questions': 6, 'keep': 1, 'run': tmp_path / 'run'}
    process = subprocess.Popen([sys.executable, '-m', 'credit_rl.train', "track=''",
                                *(f'{k}={v}' for k, v in settings.items())],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        phases, until = [], time.monotonic() + 300
        for status in follow(tmp_path / 'run', .05):
            if not phases or phases[-1] != status.phase: phases.append(status.phase)
            assert time.monotonic() < until, phases
        assert phases[0] == 'waiting' and phases[-1] == 'ended' and {'running', 'finishing'} & set(phases)
        assert status.rollouts[-1]['kind'] == 'after' and max(status.metrics) == 3
    finally:
        process.kill()
        process.wait(20)
