"""A run told to end saves its step first, one whose rank dies starts again: both have an undisturbed run's numbers."""
import signal
import time
from pathlib import Path

import pytest
import yaml

from credit_rl.estimate import likely_load, memory, read_sizes, step_seconds
from credit_rl.runlog import latest_checkpoint, read_metrics, same_metrics
from credit_rl.settings import make_config
from credit_rl.setup import load_of, plan_of
from credit_rl.train import train
from made_runs import SHORT
from started import ranks_of, typed

psutil = pytest.importorskip('psutil')
ROOT = Path(__file__).resolve().parents[2]
SHORT = {**SHORT, 'steps': 4, 'eval_every': 4}
TWO = dict(learner='deepspeed', stage=2, ranks=2)


@pytest.fixture
def whole(finished): return finished(**SHORT)


@pytest.mark.parametrize('sent', [pytest.param(signal.SIGTERM, marks=pytest.mark.nightly), signal.SIGUSR1])
def test_a_run_that_is_told_to_end_saves_its_step(start, tmp_path, whole, sent):
    process = start('credit_rl.train', *typed({**SHORT, 'run': str(tmp_path / 'run')}))
    process.read_until('step 1/4')
    process.send_signal(sent)
    code, said = process.end()
    assert code == 128 + sent and f'as it was told to ({sent.name})' in said, said
    assert 1 <= (reached := latest_checkpoint(tmp_path / 'run')[0]) < 4
    lines = []
    train({**SHORT, 'run': str(tmp_path / 'run'), 'resume': True}, lines.append)
    assert f'resumed after step {reached}' in lines and same_metrics(whole, tmp_path / 'run', 0.) == []


def test_a_checkpoint_is_written_between_evaluations(tmp_path, whole):
    "When so many minutes are over; none of it changes a number."
    seen = []
    def say(line):
        if line.startswith('step '): seen.append(latest_checkpoint(tmp_path / 'run')[0])
    train({**SHORT, 'run': str(tmp_path / 'run'), 'save_every': 1e-6}, say)
    assert seen[:2] == [0, 1] and same_metrics(whole, tmp_path / 'run', 0.) == []
    assert read_metrics(whole).step.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.long
def test_two_ranks_start_again_save_when_told_and_go_on(start, tmp_path, whole):
    "All numbers are one process's, but for the gradient's norm, which ranks add up otherwise."
    pytest.importorskip('deepspeed')
    folder = tmp_path / 'run'
    settings = {**SHORT, **TWO, 'run': str(folder)}
    process = start('credit_rl.train', *typed({**settings, 'restarts': 1, 'save_every': 1e-6}))
    process.read_until('step 1/4')
    while latest_checkpoint(folder)[0] < 1: time.sleep(.1)
    ranks_of(process.pid)[1].send_signal(signal.SIGKILL)
    process.read_until('resumed after step ')
    process.send_signal(signal.SIGTERM)
    code, said = process.end()
    assert code == 128 + signal.SIGTERM and 'as it was told to (SIGTERM)' in said, said
    for words in ('2 ranks: ', 'base: EM', 'step 1/4'): assert said.count(words) == 2, said        # of two starts
    assert said.count('rank 1 was ended by SIGKILL') == 1, said
    assert 'rank 0 was' not in said and 'Traceback' not in said and (latest_checkpoint(folder)[1] / 'deepspeed').is_dir()
    assert not (folder / 'summary.json').exists() and latest_checkpoint(folder)[0] >= 2
    code, said = start('credit_rl.train', *typed({**settings, 'resume': True})).end()
    assert code == 0 and said.count('final: EM') == 1 and 'final: EM' in (folder / 'ranks.log').read_text(), said
    assert not (folder / 'errors').exists()
    assert [line for line in same_metrics(whole, folder, 1e-4) if 'grad_norm' not in line] == []


def test_host_files_leave_time_for_a_step_and_its_save():
    "As the estimate has them: what Slurm's warning and Kubernetes' patience give is what the run's own setting gives."
    s = make_config(yaml.safe_load((ROOT / 'runs/params/tspo_qwen2.5_7b.yaml').read_text()))
    sizes, plan = read_sizes(s.model), plan_of(s)
    takes = memory(sizes, plan)['checkpoint'] / 2e9 + sum(
        step_seconds(sizes, plan, likely_load(load_of(s), []), s.tflops).values())
    slurm = (ROOT / 'runs/hosts/slurm.sh').read_text()
    *_, job = yaml.safe_load_all((ROOT / 'runs/hosts/kubernetes.yaml').read_text())
    patience = job['spec']['template']['spec']['terminationGracePeriodSeconds']
    assert f'--signal=USR1@{patience}\n' in slurm and patience == s.checkpoints.grace > takes
