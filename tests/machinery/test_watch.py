"""A run is watched from its folder alone: before it begins, while it writes, when it is killed, when it has ended."""
import gzip
import io
import json
import math
import os
import pty
import select
import subprocess
import sys
import time

import pytest

from credit_rl import watch as watching
from credit_rl.trajectory import example_group, to_json
from credit_rl.watch import NewestRollouts, Status, follow, main, read_status, screen, watch
from made_runs import begun

SUMMARY = {'final_em': .5, 'base_em': .25, 'questions': 600, 'best_step': 3, 'seconds': 150, 'steps': 3}


def begin(folder, steps=10): return begun(folder, steps=steps)


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


def test_a_damaged_summary_is_said(tmp_path):
    begin(tmp_path / 'run')
    (tmp_path / 'run' / 'summary.json').write_text('{"final_em": .5')
    assert 'summary.json' in read_status(tmp_path / 'run').line


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


def test_a_warm_up_is_as_long_as_its_own_steps(tmp_path):
    "It logs every 25th of its 2,400 steps, of 4 s; the training's number is not its own, and it has no test questions."
    begun(tmp_path / 'run', steps=500, warm_steps=2400, collected='curated')
    lines = [json.dumps({'step': n, 'seconds': 4. * n}) for n in range(0, 525, 25)]
    (tmp_path / 'run' / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
    assert read_status(tmp_path / 'run').line == 'step 500 of 2400, 4 s a step, 2 h 7 min left'


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


def member(*steps):
    return gzip.compress(''.join(json.dumps({'step': s}) + '\n' for s in steps).encode())


def test_rollouts_are_read_on_where_the_last_look_ended(tmp_path):
    path, newest = tmp_path / 'turns.jsonl.gz', NewestRollouts(tmp_path, most=3)
    path.write_bytes(member(1, 1) + member(2, 2))
    assert [r['step'] for r in newest.read()] == [1, 2, 2] and newest.end == path.stat().st_size
    with open(path, 'ab') as f: f.write(member(3)[:7])
    assert [r['step'] for r in newest.read()] == [1, 2, 2]
    path.write_bytes(member(1, 1) + member(2, 2) + member(3) + member(4))
    assert [r['step'] for r in newest.read()] == [2, 3, 4]
    longer = member(1) + member(*range(90, 400))                         # cut back to step 1, and longer than it was
    assert len(longer) > newest.end
    path.write_bytes(longer)
    assert [r['step'] for r in newest.read()] == [397, 398, 399]
    path.write_bytes(member(1) + b'no gzip' * 2000)
    with pytest.raises(ValueError, match='damaged'): newest.read()


def test_many_pieces_are_read_whole(tmp_path):
    steps = range(3000)
    (tmp_path / 'turns.jsonl.gz').write_bytes(b''.join(member(s) for s in steps))
    assert [r['step'] for r in NewestRollouts(tmp_path, most=None).read()] == list(steps)


@pytest.mark.parametrize('width, height', [(20, 3), (40, 10), (80, 24), (250, 60)])
def test_a_screen_fits(tmp_path, width, height):
    metrics = {s: {name: math.sin(s) for name in watching._CURVES} for s in range(50)}
    newest = [{**r, 'step': 1} for r in rows(1)]
    status = Status(tmp_path, 'running', 'step 49 of 60', {'method': 'tspo'}, metrics, newest)
    lines = screen(status, width, height)
    assert len(lines) <= height and max(map(len, lines)) <= width
    assert ('newest rollouts' in '\n'.join(lines)) == (height >= 10)


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


def test_a_reader_that_stops_is_no_error(tmp_path):
    begin(tmp_path / 'run')
    write_lines(tmp_path / 'run', *range(10, 20))
    done = subprocess.run(f'{sys.executable} -m credit_rl.watch {tmp_path}/run | true', shell=True, timeout=300,
                          capture_output=True, text=True)
    assert done.stderr == ''


def test_a_terminal_is_redrawn_in_place_until_the_run_ends(tmp_path):
    "The command in a terminal of its own, from before the run begins until its summary."
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, '-m', 'credit_rl.watch', str(tmp_path / 'run'), '--every', '0.1'],
                               stdout=slave, stdin=slave, stderr=slave,
                               env={**os.environ, 'COLUMNS': '90', 'LINES': '30'})
    os.close(slave)
    seen = ''
    def wait_for(text):
        nonlocal seen
        until = time.monotonic() + 120
        while text not in seen and time.monotonic() < until:
            if select.select([master], [], [], .2)[0]: seen += os.read(master, 1 << 16).decode(errors='replace')
        assert text in seen, seen[-2000:]
    try:
        wait_for('waiting')
        log = begin(tmp_path / 'run', steps=3)
        wait_for('starting')
        log.metrics(1, reward=.5, answer_rate=1., em=.5)
        log.metrics(2, reward=.75, answer_rate=1., em=.5)
        log.turns(2, rows(2))
        wait_for('step 2 of 3')
        wait_for('Budapest')
        log.summary(SUMMARY)
        wait_for('ended: EM 0.500')
        assert process.wait(60) == 0 and seen.count('\x1b[H') >= 4 and '\x1b[2J' not in seen
    finally:
        process.kill()
        process.wait(20)
        os.close(master)


def test_a_real_run_is_read(finished):
    (status,) = follow(finished(), .05)
    assert status.phase == 'ended' and status.rollouts[-1]['kind'] == 'after' and max(status.metrics) == 3
