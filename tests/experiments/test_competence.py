"By which engine a run is examined, where its models lie, and that ranks share the questions."
import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from credit_rl.studies import competence
from credit_rl.studies.competence import examine_run, examine_sets, open_agent
from credit_rl.engine import HFEngine
from credit_rl.launch import Ranks
from credit_rl.models import load_model
from credit_rl.runlog import read_summary
from credit_rl.train import train

ROOT = Path(__file__).resolve().parents[2]
TINY = {'method': 'carl', 'protocol': 'carl-tiny', 'world': {'hops': [1, 2], 'twins': True}, 'seed': 412,
        'questions': 6, 'dev_questions': 4, 'test_questions': 6, 'questions_per_step': 2, 'group_size': 2, 'steps': 1,
        'eval_every': 1, 'learning_rate': .002, 'turn_tokens': 40, 'threads': 1, 'track': '',
        'model': str(ROOT / 'data' / 'tiny_carl')}


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    "A run of one large step, so that policy and base play differently, and what was found of it."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, 'is_available', lambda: False)
        run = train({**TINY, 'run': str(tmp_path_factory.mktemp('plain') / 'run')}, say=lambda line: None)
        return run, examine_run(run, lambda line: None, 'newest')


@pytest.fixture
def run(plain, tmp_path, monkeypatch):
    "The same run, not examined yet."
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    shutil.copytree(plain[0], tmp_path / 'run')
    summary = read_summary(tmp_path / 'run')
    del summary['competence']
    (tmp_path / 'run' / 'summary.json').write_text(json.dumps(summary))
    return tmp_path / 'run'


class Shared(HFEngine):
    "In vLLM's place: it begins with the base's weights, takes others, and can be closed."
    def __init__(self, folder, tokenizer):
        super().__init__(load_model(folder)[0], tokenizer, max_length=192)
        self.loads, self.closed = 0, False

    def load(self, named):
        self.loads += 1
        super().load({n: t.detach().clone() for n, t in named.items()})

    def close(self): self.closed = True


@pytest.mark.long
def test_a_run_is_examined_by_its_own_engine(run, plain, monkeypatch):
    "One engine plays the base, then takes the policy's weights; what it finds is what two models find."
    params, made = yaml.safe_load((run / 'params.yaml').read_text()), []
    (run / 'params.yaml').write_text(yaml.safe_dump({**params, 'engine': 'vllm'}))

    def make(config, folder, model, tokenizer):
        assert config.engine == 'vllm' and model is None and not made
        made.append(Shared(folder, tokenizer))
        return made[0]
    monkeypatch.setattr(competence, 'make_engine', make)
    found = examine_run(run, lambda line: None, 'newest')
    assert made[0].loads == 1 and made[0].closed and found == plain[1]
    assert found['tiers'] == {'1': 3, '2': 3} and found['greedy'] != found['base']['greedy']


@pytest.mark.long
def test_ranks_share_the_questions(run):
    "By hand: three ranks, each of which gets every third question."
    agent, _ = open_agent(run, 'newest')
    played = []
    class Third(Ranks):
        def each(self, items, function):
            parts = [function(items[r::3]) for r in range(3)]
            played.extend(map(len, parts))
            whole = [None] * len(items)
            for r, part in enumerate(parts): whole[r::3] = part
            return whole
    shared = open_agent(run, 'newest', ranks=Third())[0]
    groups = shared.play(shared.engine, shared.env, shared.sampling, 2, seed=3)
    assert sum(played) == len(shared.questions) and max(played) - min(played) <= 1
    assert [[t.turns[0].action_ids for t in g.trajectories] for g in groups] == [
        [t.turns[0].action_ids for t in g.trajectories]
        for g in agent.play(agent.engine, agent.env, agent.sampling, 2, seed=3)]


@pytest.mark.long
@pytest.mark.nightly
def test_two_ranks_find_what_one_finds(run, plain, run_python):
    said = run_python('-m', 'credit_rl.studies.competence', run, 'ranks=2', '--checkpoint', 'newest',
                      env={'PYTHONPATH': str(ROOT), 'CUDA_VISIBLE_DEVICES': ''})
    found, one = read_summary(run)['competence'], copy.deepcopy(plain[1])
    for x in (found, one): (x['broken'] or {}).pop('irrelevant', None)       # which is another rollout's of the rank
    assert found == one and 'play, greedy' in said and (run / 'competence' / 'ranks.log').exists()


@pytest.mark.long
def test_a_run_is_asked_the_questions_of_other_sets_each_by_itself(run):
    "Each among its own passages, by its own metric; what was found before stays."
    rows = ROOT / 'data' / 'rows'
    asked = dict(data='hotpotqa', path=str(ROOT / 'data' / 'hotpotqa_sample.json'), questions=3)
    found = examine_sets(run, asked, lambda line: None, 'newest')
    assert list(found) == ['hotpotqa'] and sum(found['hotpotqa']['tiers'].values()) == 3
    assert found['hotpotqa']['step'] == 1 and 'auc' in found['hotpotqa']['critic']
    said, again = [], json.loads(json.dumps(found))
    assert examine_sets(run, asked, said.append, 'newest') == again and said == []        # it is not asked twice
    with pytest.raises(SystemExit, match='wanted the folder of a run'): competence.main([f'pool={rows}'])   # before: nothing
    competence.main([str(run), 'data=gsm8k', f'path={rows / "gsm8k.jsonl"}', 'questions=2', '--checkpoint', 'newest'])
    kept = read_summary(run)
    assert list(kept['competence_sets']) == ['hotpotqa', 'gsm8k'] and 'competence' not in kept
    assert kept['competence_sets']['hotpotqa'] == json.loads(json.dumps(found['hotpotqa']))


@pytest.mark.long
def test_other_questions_that_cannot_be_asked_are_refused(run):
    sample = str(ROOT / 'data' / 'hotpotqa_sample.json')
    with pytest.raises(ValueError, match='data'): examine_sets(run, {'data': 'hotpotqq'}, lambda line: None)
    with pytest.raises(ValueError, match='prompt'):
        examine_sets(run, {'data': 'hotpotqa', 'path': sample}, lambda line: None, 'newest', {'prompt_tokens': 3})
    with pytest.raises(ValueError, match='setting'): examine_sets(run, {}, host={'max_turn': 3})
