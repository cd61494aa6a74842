"""62_setup: how an engine's weights travel on a host of several ranks. Four processes play two hosts of two."""
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from credit_rl.launch import Ranks
from credit_rl.learner import Learner
from credit_rl.models import load_model
from credit_rl.setup import add_lora, hand_over


class Writes:
    "An engine that is given files, and notes what it was given."
    by_file = True
    def __init__(self): self.written, self.read, self.folder = 0, None, None
    def write(self, named, folder):
        self.written += 1
        (Path(folder) / 'weights').write_text(' '.join(sorted(named)))
    def load_file(self, folder): self.folder, self.read = folder, (Path(folder) / 'weights').read_text()
    def load_adapter(self, folder): self.folder, self.read = folder, sorted(p.name for p in Path(folder).iterdir())


def asked(folder, rank, lora):
    "As one of four ranks, hand over a fake learner's weights, and write down what came of it."
    os.environ['LOCAL_RANK'] = str(rank % 2)
    torch.distributed.init_process_group('gloo', f'file://{folder}/meet', rank=rank, world_size=4)
    asks = []
    def weights(trained=False, here=True):
        asks.append((trained, here))
        name = 'layer.q_proj.lora_A.default.weight' if trained else 'layer.q_proj.weight'
        return {name: torch.ones(2, 2)} if here else {}
    engine = Writes()
    hand_over(SimpleNamespace(weights=weights), engine, 'vllm', lora, Ranks(rank, 4))
    torch.save((asks, engine.written, engine.read, engine.folder, os.path.exists(engine.folder)),
               Path(folder) / f'{rank}.pt')
    torch.distributed.barrier()
    os._exit(0)


@pytest.mark.parametrize('lora', [{}, {'r': 2}])
def test_one_rank_of_a_host_writes_and_all_read(tmp_path, lora):
    "The others take part in gathering and keep nothing; with low-rank additions these alone are gathered."
    if lora: pytest.importorskip('peft')
    spawn = multiprocessing.get_context('spawn')                    # a fork of a process with threads may hang
    ranks = [spawn.Process(target=asked, args=(str(tmp_path), rank, lora)) for rank in range(4)]
    for p in ranks: p.start()
    for p in ranks: p.join(300)
    found = [torch.load(tmp_path / f'{rank}.pt') for rank in range(4)]
    assert [asks for asks, *_ in found] == [[(bool(lora), here)] for here in (True, False, True, False)]
    assert [written for _, written, *_ in found] == ([0] * 4 if lora else [1, 0, 1, 0])
    wanted = ['adapter_config.json', 'adapter_model.safetensors'] if lora else 'layer.q_proj.weight'
    assert all(read == wanted for _, _, read, *_ in found)
    folders = [folder for *_, folder, _ in found]
    assert folders[0] == folders[1] != folders[2] == folders[3] and not any(map(os.path.exists, folders))


def test_a_learner_gives_its_additions_alone():
    pytest.importorskip('peft')
    model = load_model(Path(__file__).resolve().parents[2] / 'data' / 'tiny_base')[0]
    add_lora(model, {'r': 2})
    learner = Learner(model)
    whole, added = learner.weights(), learner.weights(trained=True)
    assert added and all('.lora_' in n for n in added) and added.keys() < whole.keys()
    assert learner.weights(trained=True, here=False) == {} == learner.weights(here=False)
