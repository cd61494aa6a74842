"""Two commands that meet on loopback, as on two hosts: the end of one ends both; what a run needs before."""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from credit_rl.launch import Ranks, check_alike, check_hosts, free_port
from credit_rl.runlog import latest_checkpoint, read_metrics, same_metrics
from credit_rl.settings import Config, check, make_config
from credit_rl.parameters import by_group, make_parser, read_settings
from credit_rl.train import train
from made_runs import SHORT
from started import Started, ranks_of, typed

psutil = pytest.importorskip('psutil')
ROOT = Path(__file__).resolve().parents[2]
SHORT = {**SHORT, 'questions_per_step': 3, 'dev_questions': 7, 'test_questions': 7, 'learning_rate': 1e-4,
         'learner': 'deepspeed', 'stage': 2}
PATIENCE = 240  # seconds, on a busy machine, in which a command that must end has ended


def free_endpoint(): return f'127.0.0.1:{free_port()}'


def start_two(start, *arguments, cwd=(ROOT, ROOT)):
    "Two commands of tests/tools/hosts.py, each a host with a rank."
    folder, *rest = arguments
    endpoint = free_endpoint()
    return [start('tests.tools.hosts', folder, endpoint, *rest, cwd=place) for place in cwd]


def in_order(commands):
    "Two commands whose ranks have met, that of rank 0 first."
    for command in commands: command.read_until('is here')
    return sorted(commands, key=lambda command: 'rank 0 is here' not in command.said)


@pytest.mark.nightly                                               # by day a killed one of a run is
def test_a_traceback_is_named_on_both_hosts(start, tmp_path):
    for command in start_two(start, tmp_path / 'run', 'fail'):
        code, said = command.end()
        assert code != 0 and 'rank 1 failed: ZeroDivisionError: division by zero' in said, said
        assert str(tmp_path / 'run' / 'errors' / 'rank-1.txt') in said.splitlines()[-1]
    assert 'ZeroDivisionError' in (tmp_path / 'run' / 'errors' / 'rank-1.txt').read_text()


@pytest.mark.parametrize('which', [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_lost_host_is_named_and_leaves_no_rank(start, tmp_path, which):
    both = in_order(start_two(start, tmp_path / 'run', 'wait'))
    ranks = [rank for command in both for rank in ranks_of(command.pid).values()]
    both[which].kill()
    code, said = both[1 - which].end()
    assert code != 0 and f'{socket.gethostname()} was lost' in said, said
    assert not psutil.wait_procs(ranks, 60)[1]


def test_two_hosts_end_well(start, tmp_path):
    (data := tmp_path / 'data').write_text('12345')
    both = start_two(start, tmp_path / 'run', 'end', data)
    for command in both:
        code, said = command.end()
        assert code == 0 and said.endswith('all is well\n'), said
    left = sorted(p.name for p in (tmp_path / 'run').iterdir())
    logs = sorted(f'ranks-{socket.gethostname()}-{command.pid}.log' for command in both)
    assert left == [*logs, 'summary.json']


def test_a_run_folder_that_only_one_host_sees_is_refused(start, tmp_path):
    for name in ('one', 'two'): (tmp_path / name).mkdir()
    for command in start_two(start, 'run', 'end', cwd=(tmp_path / 'one', tmp_path / 'two')):
        code, said = command.end()
        assert code != 0 and "does not see the run folder 'run'" in said and 'under the same path' in said, said


@pytest.mark.nightly                                               # by day a run folder is
def test_data_that_only_one_host_sees_is_refused(start, tmp_path):
    for name in ('one', 'two'): (tmp_path / name).mkdir()
    (tmp_path / 'one' / 'nq.jsonl').write_text('12345')
    for command in start_two(start, tmp_path / 'run', 'end', 'nq.jsonl', cwd=(tmp_path / 'one', tmp_path / 'two')):
        code, said = command.end()
        host = socket.gethostname()
        assert code != 0, said
        assert re.search(f"'nq.jsonl' (is not there|has 5 bytes) on {host}, and (has 5|is not)", said), said


def test_another_command_on_a_host_is_refused(start, tmp_path):
    endpoint = free_endpoint()
    both = [start('tests.tools.hosts', tmp_path / 'run', endpoint, what) for what in ('end', 'wait')]
    for command in both:
        code, words = command.end()
        assert code != 0 and 'every host gives the same command, but what=' in words, words


def test_a_rank_that_does_not_come_is_named():
    "One of two ranks, whose launcher was DeepSpeed's: the other's host could not be reached."
    code = ('from credit_rl.launch import join_ranks\ntry: join_ranks(2, wait=3)\n'
            'except TimeoutError as e: print(e)')
    place = free_endpoint().split(':')
    alone = {**os.environ, 'WORLD_SIZE': '2', 'LOCAL_RANK': '0', 'MASTER_ADDR': place[0], 'MASTER_PORT': place[1],
             'PYTHONPATH': str(ROOT), 'CUDA_VISIBLE_DEVICES': ''}
    ask = lambda rank: subprocess.run([sys.executable, '-c', code], env={**alone, 'RANK': rank}, text=True,
                                      stdout=subprocess.PIPE, timeout=PATIENCE).stdout
    assert f'1 of 2 ranks came within 3 s, on {socket.gethostname()}; not there: rank 1' in ask('0')
    assert f'waited 3 s for rank 0 at {":".join(place)}, in vain' in ask('1')


@pytest.mark.parametrize('end, left', [('raise SystemExit(0)', True), ('1 / 0', False)])
def test_a_rank_leaves_its_group_where_all_went_well(tmp_path, end, left):
    "Else the group's threads abort some of the ranks that end; one that failed could wait for the others."
    code = ('import atexit, sys\nimport torch.distributed as dist\n'
            "atexit.register(lambda: print('in its group:', dist.is_initialized()))\n"
            'from credit_rl.launch import join_ranks, keep_traceback\n'
            f'with keep_traceback(sys.argv[1], 0):\n    join_ranks(1)\n    {end}')
    place = free_endpoint().split(':')
    alone = {**os.environ, 'WORLD_SIZE': '1', 'RANK': '0', 'LOCAL_RANK': '0', 'MASTER_ADDR': place[0],
             'MASTER_PORT': place[1], 'PYTHONPATH': str(ROOT), 'CUDA_VISIBLE_DEVICES': ''}
    said = subprocess.run([sys.executable, '-c', code, tmp_path], env=alone, text=True, stdout=subprocess.PIPE,
                          timeout=PATIENCE).stdout
    assert said == f'in its group: {not left}\n'


def test_a_file_of_the_launcher_that_a_host_does_not_see_is_named(tmp_path, monkeypatch):
    for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR'): monkeypatch.setenv(name, '1')
    parser = make_parser('credit_rl.train', '')
    with pytest.raises(FileNotFoundError, match=f'{socket.gethostname()} does not see .*launch.yaml'):
        read_settings(parser, ['--params', str(tmp_path / 'launch.yaml')], by_group(Config))


def test_one_rank_leaves_nothing_in_its_folder(tmp_path):
    check_alike(Ranks(), tmp_path / 'run', {'path': str(tmp_path)})
    assert list((tmp_path / 'run').iterdir()) == []


# ---- a run ----

def new_ranks(commands, seen):
    "The two ranks that began since, whose numbers go into `seen`: rank -> (command, psutil.Process)."
    while True:
        found = {rank: (command, process) for command in commands
                 for rank, process in ranks_of(command.pid, 1).items() if process.pid not in seen}
        if {*found} == {0, 1}: break
        time.sleep(.1)
    seen.update(process.pid for _, process in found.values())
    return found


@pytest.fixture(scope='module')
def killed(tmp_path_factory):
    "A run of two hosts, one of whose ranks is killed after its first step and once more: the folder, what both said."
    place, started = tmp_path_factory.mktemp('hosts'), []
    settings = {**SHORT, 'run': str(place / 'run'), 'ranks': 2, 'hosts': 2, 'endpoint': free_endpoint(),
                'restarts': 1}
    try:
        for _ in range(2):
            started.append(Started('credit_rl.train', *typed(settings)))
        for command in started: command.read_until('2 ranks of all hosts: ')
        seen = set()
        for words in ('step 1/3', 'resumed after step 0'):       # which host has rank 0 is decided each time
            ranks = new_ranks(started, seen)
            ranks[0][0].read_until(words)
            ranks[1][1].send_signal(signal.SIGKILL)
            for command in started: command.read_until('rank 1 was ended by SIGKILL')
        return place / 'run', [command.end() for command in started]
    finally:
        for command in started: command.kill()


@pytest.mark.long
def test_a_killed_rank_ends_the_run_on_both_hosts(killed):
    folder, ends = killed
    for code, said in ends:
        assert code != 0 and 'Traceback' not in said, said
        assert said.count(f'ended without summary.json: {socket.gethostname()}: rank 1') == 2, said
        assert re.search(r'ranks-.*\.log', said.splitlines()[-1]), said
        assert said.count('; started again (1 of 1 times') == 1, said
    assert sum(said.count('base: EM') for _, said in ends) == 2         # rank 0 alone speaks, once in each sitting
    assert latest_checkpoint(folder)[0] == 0 and not (folder / '.writer').exists()
    assert len([*folder.glob('ranks-*.log')]) == 2 and not [*folder.glob('launch-*.yaml')]


@pytest.mark.long
def test_it_goes_on_on_one_host_with_the_numbers_of_a_whole_run(killed, finished):
    "The same command, with one rank on one host; DeepSpeed's optimiser is dealt out anew."
    whole, lines, folder = finished(**SHORT), [], killed[0]
    again = {'ranks': 1, 'hosts': 1, 'endpoint': 'node0:29500', 'resume': True}
    train({**SHORT, 'run': str(folder), **again}, lines.append)
    assert 'resumed after step 0' in lines and any('final: EM' in line for line in lines)
    assert [line for line in same_metrics(whole, folder, 1e-4) if 'grad_norm' not in line] == []
    assert read_metrics(folder).grad_norm.tolist() == pytest.approx(read_metrics(whole).grad_norm.tolist(), rel=1e-4,
                                                                    nan_ok=True)
    results = lambda f: {k: v for k, v in json.loads((f / 'summary.json').read_text()).items()
                         if k not in ('seconds', 'code')}
    assert results(whole) == results(folder)


# ---- what is refused, or said to be missing, before anything starts ----

@pytest.mark.parametrize('given, message', [
    (dict(ranks=6, hosts=4, endpoint='node0:1'), 'ranks=6'),
    (dict(ranks=8, hosts=4), 'endpoint'),
    (dict(ranks=8, hosts=4, endpoint='node0:99999'), "got 'node0:99999'"), (dict(ranks=1, hosts=0), 'at least 1')])
def test_hosts_that_cannot_work_are_refused(given, message):
    with pytest.raises(ValueError, match=message): check_hosts(**given)
    with pytest.raises(ValueError, match=message): check(make_config({**SHORT, **given}))


def test_an_endpoint_that_is_not_known_here_is_said_before_a_run(tmp_path):
    asked = {**SHORT, 'run': str(tmp_path / 'run'), 'ranks': 2, 'hosts': 2, 'endpoint': 'nowhere.invalid:29500',
             'dry_run': True}
    with pytest.raises(ValueError, match='host'):
        train(asked, say=lambda line: None)


# ---- the examples ----

def checked(arguments):
    "The settings of a command, checked but for vLLM, which this host need not have: dict."
    assert arguments[:2] == ['credit-rl', 'train']
    settings = read_settings(make_parser('credit_rl.train', ''), arguments[2:], by_group(Config))[0]
    check(make_config({**settings, 'engine': 'hf', 'vllm': {}}))
    return settings


def test_the_slurm_example_gives_a_command_that_the_checks_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    script = ROOT / 'runs' / 'hosts' / 'slurm.sh'
    for name, does in {'srun': 'printf "%s\\n" "$@"', 'scontrol': 'echo gpu07; echo gpu08'}.items():
        (tmp_path / name).write_text(f'#!/bin/sh\n{does}\n')
        (tmp_path / name).chmod(0o755)
    slurm = {'SLURM_JOB_NODELIST': 'gpu[07-08]', 'SLURM_NNODES': '2', 'SLURM_GPUS_ON_NODE': '4'}
    path = {'PATH': f'{tmp_path}:{os.environ["PATH"]}'}
    assert subprocess.run(['bash', '-n', script]).returncode == 0
    given = subprocess.check_output(['bash', script, 'steps=7'], env=path | slurm, text=True).splitlines()
    settings = checked(given[given.index('credit-rl'):])
    assert (settings['hosts.count'], settings['ranks'], settings['hosts.endpoint']) == (2, 8, 'gpu07:29500')
    assert settings['steps'] == 7 and settings['corpus'] == 'http://gpu07:8000' and settings['method'] == 'tspo'


def test_the_kubernetes_example_gives_a_command_that_the_checks_pass(monkeypatch):
    monkeypatch.chdir(ROOT)
    service, job = yaml.safe_load_all((ROOT / 'runs' / 'hosts' / 'kubernetes.yaml').read_text())
    pod = job['spec']['template']
    settings = checked(pod['spec']['containers'][0]['command'])
    assert settings['hosts.count'] == job['spec']['completions'] == job['spec']['parallelism'] == 4
    assert settings['ranks'] == 4 * pod['spec']['containers'][0]['resources']['limits']['nvidia.com/gpu']
    # the name of the first pod, as the service gives it
    assert settings['hosts.endpoint'].split(':')[0] == f'{job["metadata"]["name"]}-0.{service["metadata"]["name"]}'
    assert pod['spec']['subdomain'] == service['metadata']['name'] and service['spec']['clusterIP'] == 'None'
    assert service['spec']['selector'].items() <= pod['metadata']['labels'].items()
