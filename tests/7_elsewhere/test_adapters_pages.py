"""The lines that the pages of 7_elsewhere tell users to write, as they stand, against the trainers or their names."""
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from tools import releases

from credit_rl import adapters

# TSPO on an all-wrong pair, of which the first saw a gold in its first turn: +1 and -1 on the first turns, then 0
MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 0]])
WANTED = torch.tensor([[1., 1., 0., 0.], [-1., 0., 0., 0.]])
TURNS = torch.tensor([[1., 0.], [0., 0.]])
REWARDS = torch.tensor([[1., 0., 0., 0.], [0., 0., 0., 0.]])      # the first turn's on its first token, outcomes 0


def page(root, notebook, heading):
    "The code of a section, one text for each block: lines that are indented, without the indent."
    cells = json.loads((root / f'nbs/7_elsewhere/{notebook}.ipynb').read_text(encoding='utf-8'))['cells']
    text = next(s for c in cells if c['cell_type'] == 'markdown' and f'## {heading}\n' in (s := ''.join(c['source'])))
    text = text.split(f'## {heading}\n')[1].split('\n## ')[0]
    blocks, lines = [], []
    for line in [*text.split('\n'), 'end']:
        if line.startswith('    ') or (lines and not line.strip()): lines.append(line)
        elif lines:
            blocks.append(textwrap.dedent('\n'.join(lines)).strip() + '\n')
            lines = []
    return [part for block in blocks for part in block.split('\n\n#')]


def typed(text, name='__page__', monkeypatch=None, **given):
    "Run the lines of a page as a module of their own: its names."
    module = ModuleType(name)
    vars(module).update(given)
    if monkeypatch: monkeypatch.setitem(sys.modules, name, module)
    exec(compile(text, name, 'exec'), vars(module))
    return module


def stand_in(monkeypatch, place, **names):
    "A module of a trainer that is not installed, with the names that a page or an adapter takes from it."
    parts = place.split('.')
    for i in range(1, len(parts) + 1):
        at = '.'.join(parts[:i])
        if at not in sys.modules: monkeypatch.setitem(sys.modules, at, ModuleType(at))
        above = sys.modules['.'.join(parts[:i - 1])] if i > 1 else None
        if above: monkeypatch.setattr(above, parts[i - 1], sys.modules[at], raising=False)
    for key, value in names.items(): monkeypatch.setattr(sys.modules[place], key, value, raising=False)


def close(found, wanted=WANTED): torch.testing.assert_close(torch.as_tensor(found).float(), wanted, atol=1e-5, rtol=0)


def estimated(function):
    return function(token_level_rewards=REWARDS, response_mask=MASK, index=np.array(['q', 'q'], dtype=object),
                    config=None)[0]


def test_the_lines_for_verl_register_an_estimator(root, monkeypatch):
    verl, _ = page(root, '80_adapters', 'verl and SkyRL')
    found = {}
    if importlib.util.find_spec('verl') is None:
        register = lambda name: lambda f: found.update({name: f})
        stand_in(monkeypatch, 'verl.trainer.ppo.core_algos', register_adv_est=register)
    else:
        algos = releases.load('verl.trainer.ppo.core_algos')
    typed(verl)
    close(estimated(found['credit_rl/tspo'] if found else algos.get_adv_estimator_fn('credit_rl/tspo')))


def test_the_lines_for_skyrl_register_an_estimator(root, monkeypatch):
    _, skyrl = page(root, '80_adapters', 'verl and SkyRL')
    found = {}
    place = 'skyrl.backends.skyrl_train.utils.ppo_utils'
    register = lambda name: lambda f: found.update({name: f})
    if importlib.util.find_spec('skyrl') is None: stand_in(monkeypatch, place, register_advantage_estimator=register)
    else: monkeypatch.setattr(releases.load(place), 'register_advantage_estimator', register)
    typed('#' + skyrl)
    carl = found['credit_rl/carl']
    values = torch.tensor([[.25, .25, 0., .5], [.5, 0., .25, 0.]])
    outcome = torch.tensor([[0., 0., 0., 1.], [0., 0., 0., 0.]])
    advantages = carl(token_level_rewards=outcome, response_mask=MASK, index=['q', 'q'], values=values, config=None,
                      grpo_norm_by_std=True, gamma=1., lambd=1.)[0]
    close(advantages, torch.tensor([[.25, .25, 0., .5], [-.25, 0., -.25, 0.]]))       # λ = 0, set on the page


def test_the_lines_for_verls_loops_make_a_loop_that_its_settings_name(root, monkeypatch):
    loop, settings = page(root, '80_adapters', 'Turn rewards in verl')
    class Output:
        def __init__(self, mask): self.response_mask, self.extra_fields, self.reward_score = mask, {}, None
        def as_dict(self): return {'rm_scores': torch.zeros(len(self.response_mask)), 'extra_fields': self.extra_fields}
    class ToolAgentLoop:
        async def run(self, sampling_params, **kwargs): return Output([1, 1, 0, 1])
    monkeypatch.setitem(sys.modules, 'verl.experimental.agent_loop.tool_agent_loop', SimpleNamespace())
    stand_in(monkeypatch, 'verl.experimental.agent_loop.tool_agent_loop', ToolAgentLoop=ToolAgentLoop)
    module = typed(loop, 'my_loop', monkeypatch)
    (row,) = yaml.safe_load('#' + settings)
    place, _, name = row['_target_'].rpartition('.')
    assert row['name'] == 'credit' and place == 'my_loop' and getattr(module, name) is module.CreditLoop
    assert issubclass(module.CreditLoop, ToolAgentLoop)


def test_the_lines_for_openrlhf_put_our_maker_in_its_place(root, monkeypatch):
    (lines,) = page(root, '80_adapters', 'OpenRLHF')
    class Maker: pass
    stand_in(monkeypatch, 'openrlhf.trainer.ppo_utils.experience_maker', RemoteExperienceMaker=Maker)
    stand_in(monkeypatch, 'openrlhf.trainer.ppo_utils.length_penalty', apply_length_penalties=lambda e, args: None)
    stand_in(monkeypatch, 'openrlhf.trainer.ppo_trainer', RemoteExperienceMaker=Maker)
    typed(lines)
    made = sys.modules['openrlhf.trainer.ppo_trainer'].RemoteExperienceMaker
    assert made is not Maker and issubclass(made, Maker) and issubclass(made, adapters.ExperienceMixin)


def test_the_lines_for_slime_are_its_two_hooks(root, monkeypatch):
    hooks, flags = page(root, '80_adapters', 'slime')
    module = typed(hooks, 'my_credit', monkeypatch)
    for flag, name in (('--custom-reward-post-process-path', 'rewards'),
                       ('--custom-advantage-function-path', 'advantages')):
        assert f'{flag} my_credit.{name}' in flags and callable(getattr(module, name))


def test_the_lines_for_prime_rl_make_an_algorithm(root, monkeypatch):
    (lines,) = page(root, '80_adapters', 'prime-rl and verifiers')
    Algorithm = type('Algorithm', (), {})
    stand_in(monkeypatch, 'prime_rl.orchestrator.algo.base', Algorithm=Algorithm)
    stand_in(monkeypatch, 'prime_rl.orchestrator.algo.routing', assign_advantages=print)
    assert issubclass(made := typed(lines).TSPO, Algorithm) and made.credited[0].name == 'tspo'


def test_the_lines_for_areal_make_an_actor_that_credits(root, monkeypatch):
    (lines,) = page(root, '80_adapters', 'AReaL')
    class PPOActor:
        def __init__(self, config, engine): self.config, self.engine, self.kl_ctl = config, engine, 0.
        def compute_advantages(self, data): return data
    class FSDPPPOActor:
        def __init__(self, config): self.actor = PPOActor(config, self)
    stand_in(monkeypatch, 'areal.trainer.ppo.actor', PPOActor=PPOActor)
    stand_in(monkeypatch, 'areal.engine', FSDPPPOActor=FSDPPPOActor)
    engine = typed(lines).CreditActor('config')
    assert engine.actor.engine is engine and engine.actor.config == 'config'
    shifted = torch.nn.functional.pad(MASK, (1, 0)).roll(-1, 1)
    (row,) = engine.actor.compute_advantages([{'loss_mask': shifted, 'rewards': torch.zeros(2), 'turn_rewards': TURNS}])
    close(row['advantages'], torch.nn.functional.pad(WANTED, (0, 1)))


class Library:
    "An environment of somebody's own, as TRL wants it."
    def reset(self, **row): self.seen_at = None

    def search(self, query: str):
        """Look something up.

        Args:
            query: what
        """
        return query


@pytest.mark.parametrize('heading', ['How to use it', 'In our environment', "Our search as TRL's environment"])
def test_the_lines_for_trl_make_its_trainer(root, tmp_path, monkeypatch, heading):
    "TRL's own GRPOTrainer is made by them, with a tiny model; the settings are the page's own."
    trl = pytest.importorskip('trl', reason='pip install credit_rl[train]')
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from credit_rl.protocol import Chat, PROTOCOLS
    from credit_rl.rollout import Environment
    from credit_rl.tools import SearchTool
    from credit_rl.trajectory import Question
    from templates import family_tokenizer, PUBLISHED
    if 'qwen2_5' not in PUBLISHED: pytest.skip('this TRL has not the template whose calls it reads')
    monkeypatch.setenv('TRL_EXPERIMENTAL_SILENCE', '1')
    monkeypatch.chdir(tmp_path)
    tokenizer = family_tokenizer('qwen2_5', published=True)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16,
                                         num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
    environment = Environment(Chat(PROTOCOLS['tspo'], tokenizer),
                              SearchTool(SimpleNamespace(search=lambda queries, k: [[] for _ in queries]), 1, None), 4)
    from datasets import Dataset
    questions, calls = [Question(str(i), f'Who is {i}?', ['x']) for i in range(12)], []
    monkeypatch.setattr(trl.GRPOTrainer, 'train', lambda self: calls.append(self))
    config = trl.GRPOConfig
    on_cpu = lambda *a, **k: config(*a, **k, use_cpu=True, bf16=False, report_to='none', gradient_checkpointing=False)
    monkeypatch.setattr(trl, 'GRPOConfig', on_cpu)
    (lines,) = page(root, '82_trl_trainer', heading)
    rows = [{'prompt': [{'role': 'user', 'content': q.text}]} for q in questions]
    typed(lines, model=model, tokenizer=tokenizer, environment=environment, questions=questions, Dataset=Dataset,
          Library=Library, dataset=Dataset.from_list(rows), is_right=lambda completions, **row: [0.] * len(completions))
    (made,) = calls
    assert type(made).__name__ == 'CreditTrainer' and len(made.train_dataset) == 12


def test_the_lines_for_dumps_read_and_compare(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{'input': 'Who?', 'ground_truth': ['Ada'], 'score': i, 'output': '<search>a</search><information>Ada'
             f'</information><answer>{answer}</answer>'} for i, answer in enumerate(('Bob', 'Ada'))]
    (tmp_path / 'rollouts.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    (lines,) = page(root, '83_dumps', 'How to use it')
    typed(lines)
    assert capsys.readouterr().out == '1 questions, tensor(0.5000)\n'


def test_no_page_of_a_trainer_is_left_out(root):
    "Each section with lines of code is typed above."
    cells = [c for n in ('80_adapters', '82_trl_trainer', '83_dumps') for c in
             json.loads((root / f'nbs/7_elsewhere/{n}.ipynb').read_text(encoding='utf-8'))['cells']]
    texts = [''.join(c['source']) for c in cells if c['cell_type'] == 'markdown']
    sections = {s.split('\n')[0].strip('# ') for t in texts for s in t.split('\n## ') if '\n    from ' in s
                or '\n    import ' in s}
    assert sections == {'A loop of your own', 'verl and SkyRL', 'Turn rewards in verl', 'OpenRLHF', 'slime',
                        'prime-rl and verifiers', 'AReaL', 'How to use it', 'In our environment', "Our search as TRL's environment"}


# ---- a script beside a clone ----

FINDER = """
import importlib.util, sys
from importlib.machinery import PathFinder

class Installed:       # as an editable install has it: asked after the folders
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == 'credit_rl':
            return importlib.util.spec_from_file_location(name, ROOT + '/__init__.py', submodule_search_locations=[ROOT])

sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Installed)
"""


def test_the_script_for_a_loop_of_ones_own_runs_beside_a_clone(root, tmp_path):
    "README says what a clone is called. In the folder above it the page's script imports the package, not the clone."
    address, given = re.search(r'git clone .*?(\S+://\S+)(?: ([^\s&]+))?', (root / 'README.md').read_text()).groups()
    (tmp_path / (given or address.split('/')[-1]) / 'credit_rl').mkdir(parents=True)
    (tmp_path / 'site').mkdir()
    (tmp_path / 'site' / 'sitecustomize.py').write_text(f'ROOT = {str(root / "credit_rl")!r}\n{FINDER}')
    script = next(text for text in page(root, '80_adapters', 'A loop of your own') if 'assign_arrays' in text)
    (tmp_path / 'credit.py').write_text(script)
    env = {**os.environ, 'PYTHONPATH': str(tmp_path / 'site'), 'OMP_NUM_THREADS': '1'}
    done = subprocess.run([sys.executable, 'credit.py'], cwd=tmp_path, env=env, text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200)
    assert done.returncode == 0 and 'tensor(' in done.stdout, done.stdout
