"""What resuming on another number of ranks takes in main memory: a random model of 120 million parameters, stepped once
and saved by DeepSpeed on so many ranks, is gone on from by another number.

    python tests/bench/bench_resume.py [2-1 2-3 4-2] [--stage 2 3] [--case grpo carl]

Beside the share of a rank (12 bytes a weight: float32 and AdamW's averages, of CARL's shared critic, whose loss steps
apart at a rate of its own, 20) stands the most that a rank held while it restored, over what its learner held before:
its own memory (RssAnon), and with it what of the checkpoint's files was mapped."""
import argparse
import os
import sys
import tempfile
import threading

from bench_estimate import MALLOC, batch, join, model, on_ranks, status
import torch
from credit_rl.learner import Learner, Optimiser, make_critic
from credit_rl.parts import Credit, Needs
from credit_rl.sharded import DeepSpeedBackend

SIZE, LENGTH = 120, 32


class Watch:
    "The most of RssAnon and VmRSS in a block, over what was there at its start."
    def __enter__(self):
        self.before, self.most, self.over = self.now(), self.now(), threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self
    def now(self): return {name: status(name) for name in ('RssAnon', 'VmRSS')}
    def look(self):
        while not self.over.wait(.002): self.most = {name: max(self.most[name], v) for name, v in self.now().items()}
    def __exit__(self, *error):
        self.over.set()
        self.thread.join()
        self.took = {name: self.most[name] - self.before[name] for name in self.most}


def rank_of(rank, ranks, port, out, stage, case, folder):
    "Save after a step where the folder is empty, else resume; puts what that took."
    join(rank, ranks, port)
    torch.manual_seed(0)
    policy, saves = model(SIZE), not os.listdir(folder)
    torch.distributed.barrier()
    critic = make_critic(policy, 'shared') if case == 'carl' else None
    learner = Learner(policy, optimiser=Optimiser(1e-5, 1e-4, backbone_rate=1e-6, minibatches=1, row_tokens=2 * LENGTH,
                                                  apart=case == 'carl'), critic=critic, backend=DeepSpeedBackend(stage))
    if saves:
        layout = batch(ranks, LENGTH)
        seen = learner.evaluate(layout, Needs(values=True)) if critic else None
        learner.step(layout, seen, Credit(torch.ones(layout.ids.shape) * layout.trained, *(
            [torch.ones(layout.ids.shape)] if critic else [])))
        learner.save(folder)
        out.put(None)
    else:
        with Watch() as watch: learner.restore(folder)
        out.put(watch.took)
    torch.distributed.barrier()


if __name__ == '__main__':
    if not MALLOC.items() <= os.environ.items():     # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC, 'OMP_NUM_THREADS': '1'})
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('ways', nargs='*', default=['2-1', '2-3', '4-2'])
    parser.add_argument('--stage', nargs='+', type=int, default=[2, 3])
    parser.add_argument('--case', nargs='+', default=['grpo', 'carl'])
    given = parser.parse_args()
    os.environ['DS_ACCELERATOR'] = 'cpu'
    with torch.device('meta'): parameters = model(SIZE).num_parameters()
    print(f'{parameters:,} parameters\n{"":22}{"share, MB":>10}{"own":>8}{"ratio":>7}{"and mapped":>12}{"ratio":>7}')
    for stage, case in ((s, c) for s in given.stage for c in given.case):
        for ranks in sorted({way.split('-')[0] for way in given.ways}):
            with tempfile.TemporaryDirectory() as folder:
                on_ranks(int(ranks), rank_of, stage, case, folder)
                for to in (int(way.split('-')[1]) for way in given.ways if way.split('-')[0] == ranks):
                    took = on_ranks(to, rank_of, stage, case, folder)
                    share = (12 if case == 'grpo' else 20) * parameters / to
                    own, whole = (max(t[name] for t in took) for name in ('RssAnon', 'VmRSS'))
                    print(f'ZeRO {stage} {case:5} {ranks} → {to:<5} {share / 1e6:10,.0f}{own / 1e6:8,.0f}'
                          f'{own / share:7.2f}{whole / 1e6:12,.0f}{whole / share:7.2f}', flush=True)
