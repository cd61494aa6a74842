("The papers' settings under runs/params: each file loads, can be run, says where its values come from, and fits its "
 "paper's host.")
import dataclasses
import importlib.util
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch
import yaml
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from credit_rl import sft
from credit_rl.compare import plan_jobs
from credit_rl.datasets import MIXTURES, load_questions
from credit_rl.estimate import memory, read_sizes
from credit_rl.evaluate import _vllm as vllm_arguments
from credit_rl.evaluate import Evaluation, check_evaluation, read_manifest, read_scores, run_evaluation, set_names
from credit_rl.studies.longform import JudgeChoice
from credit_rl.options import dotted, flat, options_in
from credit_rl.layout import pack
from credit_rl.learner import Learner, Optimiser, make_critic, saved_policy
from credit_rl.parts import Credit, Measured
from credit_rl.methods import get_method
from credit_rl.parameters import from_settings
from credit_rl.models import load_model
from credit_rl.prepare import check_warming, make_warming, prepare
from credit_rl.protocol import PROTOCOLS
from credit_rl.retrieval import BM25
from credit_rl.tiny import tiny_model, tiny_tokenizer
from credit_rl.runlog import latest_checkpoint, read_json, read_metrics, read_turns
from credit_rl.scoring import Schema, read_schema
from credit_rl.settings import check, make_config, scored_schemas
from credit_rl.setup import plan_of
from credit_rl.train import train
from credit_rl.trajectory import example_group
from credit_rl.warmup import read_collected
from notebooks import kept
from paper_player import Player, write_model, write_sets

ROOT = Path(__file__).resolve().parents[2]
VLLM = importlib.util.find_spec('vllm') is not None
# many runs in the tiny world, for credit_rl.compare
OURS = ('sweep', 'sweep_weak', 'claims', 'engines', 'ahead', 'carl_warm', 'carl_tiny', 'study', 'study_again',
        'asking')
FILES = {p.stem: p for p in kept(ROOT, 'runs/params/*.yaml')
         if p.stem not in ('demo', 'carl_demo', 'real', 'real_rules', 'search_r1_grpo_qwen3_1.7b', *OURS)
         and not p.stem.endswith('_warmup')
         and not p.stem.startswith('eval_') and '_long' not in p.stem}            # long answers: test_longform.py
# how a paper evaluates, for credit_rl.evaluate; long answers: test_longform.py
EVALUATIONS = {p.stem: p for p in kept(ROOT, 'runs/params/eval_*.yaml') if p.stem != 'eval_prs_long'
               and not p.stem.startswith('eval_carl_')}
# one of them with other passages: CARL's appendix G
SEARCHES = {p.stem: p for p in kept(ROOT, 'runs/params/eval_carl_*.yaml')}
# what a warm-up is told besides
WARM = {p.stem.removesuffix('_warmup'): p for p in kept(ROOT, 'runs/params/*_warmup.yaml')}
BOTH = lambda *names: [f'{name}_qwen2.5_{size}' for name in names for size in ('3b', '7b')]
# what IGPO is compared with in table 2: file -> method
OTHERS = {f'igpo_{name}_qwen2.5_7b': method for name, method in (('rloo', 'rloo'), ('ppo', 'ppo'), ('gspo', 'gspo'),
                                                               ('reinforce_pp', 'reinforce++'))}
# steps, questions a step, group size, mini-batches, epochs, learning rate, gradient clip, KL's weight, by the papers
VALUES = {
    **dict.fromkeys([*BOTH('tips', 'ppo', 'mt_ppo'), 'tips_qwen2.5_14b', 'tips_qwen3_4b', 'tips_llama3.1_8b'],
                    (500, 256, 1, 1, 1, 1e-6, 1.0, 0.001)),
    **dict.fromkeys(BOTH('grpo', 'mt_grpo_star'), (500, 256, 5, 1, 1, 5e-7, 1e-4, 0.001)),
    **dict.fromkeys(BOTH('tspo', 'tspo_grpo'), (500, 512, 5, 2, 1, 1e-6, 1.0, 0.001)),
    **dict.fromkeys([*BOTH('igpo', 'igpo_f1', 'igpo_ig'), *OTHERS], (500, 32, 16, 1, 1, 1e-6, 1.0, 0.001)),
    **dict.fromkeys([*BOTH('prs', 'prs_grpo', 'vspo'), 'prs_ppo_qwen2.5_3b'], (500, 128, 5, 1, 1, 1e-7, 1.0, 0.001)),
    **dict.fromkeys([*BOTH('carl', 'carl_grpo'), 'search_r1_ppo_qwen2.5_7b'],
                    (500, 256, 5, 20, 4, 1e-6, 1.0, 0.001)),
}
# the same for all of a paper's files, then what a file has besides
GAE = {'gamma': 1.0, 'lam': 1.0, 'whiten': True}
CRITIC = dict(critic='own', critic_step='apart', critic_rate=1e-5, critic_backbone_rate=1e-5, clip=1.0, critic_clip=1.0)
DUAL = dict(average='token-mean', loss={'clip_low': 0.2, 'clip_high': 0.2, 'dual_clip': 3.0, 'entropy': 0.0})
F1 = {'metric': 'f1', 'penalty': -1.0}
SAMPLE = {'ddof': 1}              # of verl; TSPO's worked example has the population's
GAIN = {**F1, **SAMPLE, 'mode': 'prob', 'norm': 'joint', 'gamma': 1.0}
GRPO_MEAN = {'average': 'sequence-mean-token-mean'}
VARIANT = {'3b': 'answer-aware', '7b': 'tool-only'}
RULES = lambda size: {'variant': VARIANT[size], 'exec_reward': .1, 'answer_reward': .15}
FAMILIES = {
    ('tips', 'ppo', 'mt_ppo', 'grpo', 'mt_grpo_star'):
        dict(protocol='tips', max_turns=5, max_tokens=8192, prompt_tokens=4096, response_tokens=4096, turn_tokens=4096,
             answer_stop='last', malformed='end', passages=3, passage_tokens=500, observation_format='json',
             data='nq+hotpotqa', stage=3),
    ('tspo', ):
        dict(protocol='tspo', data='nq+hotpotqa', average='token-mean', answer_stop='last',
             observation_tokens=500, passage_tokens=None, warmup=int(.285 * 500) * 2),
    ('igpo', ):
        dict(protocol='igpo', max_turns=10, turn_tokens=2000, max_tokens=30767 + 2000, temperature=1.0,
             answer_stop='last', data='nq+triviaqa+hotpotqa+2wikimultihopqa', questions=80000, chosen_by='f1',
             mix={'nq': 1, 'triviaqa': 1, 'hotpotqa': 3, '2wikimultihopqa': 3}),
    ('prs', 'vspo'):
        dict(protocol='prs', data='nq+hotpotqa', temperature=1.0, answer_stop='last', observation_tokens=500,
             passage_tokens=None),
    ('carl', 'search_r1_ppo'):
        dict(protocol='carl', betas=[0.9, 0.999], weight_decay=0.01, warmup=100 * 80, eval_every=25, max_turns=15,
             turn_tokens=2048, context_tokens=256, prompt_tokens=2048, response_tokens=2048, max_tokens=4096,
             data='hotpotqa+2wikimultihopqa+gsm8k', questions=170000, passages=3, output_chars=16000,
             stage=3),
}
MORE = {
    **dict.fromkeys((n for n in VALUES if n.startswith('tips')), {
        'method': 'tips', 'teacher': 'self', 'teacher_every': 200, **CRITIC, 'options':
            {'band': 'medium', 'alpha': .1, 'refund': False, 'schema': 'tips', 'reduce': 'logsumexp',
             'terminal': 'zero', **GAE}
    }),
    **dict.fromkeys(BOTH('ppo'), {'method': 'ppo', 'options': GAE, **CRITIC}),
    **dict.fromkeys(BOTH('grpo'), {'method': 'grpo', 'options': SAMPLE, **DUAL}),
    **{f'mt_ppo_qwen2.5_{s}': {'method': 'mt-ppo', 'options': {**RULES(s), 'placement': 'last', **GAE}, **CRITIC}
       for s in ('3b', '7b')},
    **{f'mt_grpo_star_qwen2.5_{s}': {'method': 'mt-grpo*', **DUAL, 'options': {
        **RULES(s), 'lambda_mid': 1.0, 'lambda_final': 1.0, 'literal': False, **SAMPLE}} for s in ('3b', '7b')},
    **dict.fromkeys(BOTH('tspo'), {'method': 'tspo', 'options': {'alpha': 1.0, 'strategy': 'all-wrong', 'ddof': 0}}),
    **dict.fromkeys(BOTH('tspo_grpo'), {'method': 'grpo', 'options': {'ddof': 0}}),
    **dict.fromkeys(BOTH('igpo'), {'method': 'igpo', 'options': GAIN, **GRPO_MEAN}),
    **dict.fromkeys(BOTH('igpo_f1'), {'method': 'igpo-f1', 'options': F1 | SAMPLE, **GRPO_MEAN}),
    **dict.fromkeys(BOTH('igpo_ig'), {'method': 'igpo-ig', 'options': {**GAIN, 'parts': 'gain'}, **GRPO_MEAN}),
    **{name: {'method': method, 'options': F1 if method == 'rloo' else F1 | SAMPLE, 'average': None, 'loss': {'entropy': 0.0}}
       for name, method in OTHERS.items() if method != 'ppo'},
    'igpo_ppo_qwen2.5_7b': {'method': 'ppo', 'options': {**F1, **GAE}, 'average': None, 'loss': {'entropy': 0.0},
                            **CRITIC},
    **dict.fromkeys(BOTH('prs'), {'method': 'prs', 'options': {'form': 'short', **SAMPLE},
                                  'average': 'sequence-mean-token-mean'}),
    **dict.fromkeys(BOTH('prs_grpo'), {'method': 'grpo', 'options': {'metric': 'em', **SAMPLE}}),
    'prs_ppo_qwen2.5_3b': {'method': 'prs/gae', 'options': {'form': 'short', **GAE}, 'critic': 'own'},
    **dict.fromkeys(BOTH('vspo'), {'method': 'prs+vspo', 'options': {
        'form': 'short', 'draw': 'value', 'temperature': 0.1, 'clip': True, 'smoothing': 2, 'least_variance': 1e-6, **SAMPLE}}),
    **dict.fromkeys(BOTH('carl'), {
        'method': 'carl', 'options': {'lam': 0.0, 'whiten': False}, 'critic': 'shared', 'critic_step': 'apart',
        'critic_rate': 5e-6, 'critic_backbone_rate': 5e-7,
        'critic_mix': None, 'critic_clip': 1.0, 'average': 'segment-mean',
        'loss': {'clip_low': 0.2, 'clip_high': 0.2, 'entropy': 0.001, 'value': 1.0}}),
    **dict.fromkeys(BOTH('carl_grpo'), {'method': 'grpo', 'options': SAMPLE}),
    'search_r1_ppo_qwen2.5_7b': dict(method='ppo', options={'gamma': 1.0, 'lam': 0.95, 'whiten': True}, critic='frozen',
                                     critic_step='apart', critic_rate=1e-5, critic_mix=None),
}

# the models' shapes, as their configurations say; parameters as published
_SHAPE = lambda kind, layers, hidden, intermediate, heads, kv, vocabulary, **more: kind(
    num_hidden_layers=layers, hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads,
    num_key_value_heads=kv, vocab_size=vocabulary, **more)
TIED = {'tie_word_embeddings': True}
MODELS = {
    'Qwen/Qwen2.5-3B-Instruct': (_SHAPE(Qwen2Config, 36, 2048, 11008, 16, 2, 151936, **TIED), 3_085_938_688),
    'Qwen/Qwen2.5-7B-Instruct': (_SHAPE(Qwen2Config, 28, 3584, 18944, 28, 4, 152064), 7_615_616_512),
    'Qwen/Qwen2.5-14B-Instruct': (_SHAPE(Qwen2Config, 48, 5120, 13824, 40, 8, 152064), 14_770_033_664),
    'Qwen/Qwen3-1.7B': (_SHAPE(Qwen3Config, 28, 2048, 6144, 16, 8, 151936, head_dim=128, **TIED), 1_720_574_976),
    'Qwen/Qwen3-8B': (_SHAPE(Qwen3Config, 36, 4096, 12288, 32, 8, 151936, head_dim=128), 8_190_735_360),
    'Qwen/Qwen3-14B': (_SHAPE(Qwen3Config, 40, 5120, 17408, 40, 8, 151936, head_dim=128), 14_768_307_200),
    'Qwen/Qwen3-4B-Instruct-2507': (_SHAPE(Qwen3Config, 36, 2560, 9728, 32, 8, 151936, head_dim=128, **TIED), 4_022_468_096),
    'meta-llama/Llama-3.1-8B-Instruct': (_SHAPE(LlamaConfig, 32, 4096, 14336, 32, 8, 128256), 8_030_261_248)}
# bytes of a GPU of the stated host
GPU = {**dict.fromkeys(('tips', 'ppo', 'grpo', 'mt_', 'prs', 'vspo'), 141e9),
       **dict.fromkeys(('tspo', 'igpo', 'carl', 'search_r1'), 80e9)}


def settings(name): return dotted(yaml.safe_load(FILES[name].read_text()))


@pytest.fixture(scope='module')
def sizes(tmp_path_factory):
    "Sizes of the papers' models, from their configurations."
    found = {}
    for name, (config, _) in MODELS.items():
        config.save_pretrained(folder := tmp_path_factory.mktemp('model'))
        found[name] = read_sizes(folder)
    return found


def test_every_main_setting_has_a_file():
    assert set(FILES) == set(VALUES)


@pytest.mark.parametrize('name', OURS)
def test_each_run_of_a_sweep_passes_the_checks(name, root, monkeypatch):
    """Those of the command in the file's first lines: each method that it names, with its own settings; and no setting
    is left unnamed."""
    monkeypatch.chdir(root)
    text = (root / 'runs' / 'params' / f'{name}.yaml').read_text()
    commands, params, named = re.findall(r'--methods ([^-].*?) --seeds ([\d ]+?) (?:\s*--worlds (\w+) )?',
                                         re.sub(r'\\\n#', '', text)), yaml.safe_load(text), set()
    left = {'critic.warmed'} | (set() if VLLM else {'engine', 'vllm'})    # what others make first, or is not installed
    for asked, seeds, world in commands:
        named |= set(asked.split())
        worlds = [world] if world else None
        for job in plan_jobs(asked.split(), list(map(int, seeds.split())), params, 'runs/nothing', worlds):
            given = {'model': 'tiny', 'method': job.method, **job.settings, 'seed': job.seed, 'run': str(job.folder)}
            warms = 'collected' in given
            if given['model'] != 'tiny' if warms else given['model'].startswith('runs/') or 'regime' in given:
                given['model'] = 'data/tiny_base'                                   # another command makes it
            if warms: check_warming(make_warming(given))
            else: check(make_config({n: v for n, v in given.items() if n not in left}))
    assert commands and set(params.get('methods', {})) <= named


def test_what_make_carl_runs_passes_the_checks(root, monkeypatch):
    monkeypatch.chdir(root)
    shared = yaml.safe_load((root / 'runs' / 'params' / 'carl_demo.yaml').read_text())
    makefile = (root / 'Makefile').read_text().replace('\\\n', '')
    given = lambda name: {n: yaml.safe_load(v) for n, v in (
        pair.split('=') for pair in re.search(rf'^{name} := (.*)$', makefile, re.M)[1].split())}
    check_warming(make_warming(shared | given('CARL_WARM')))
    check(make_config(shared | given('CARL_RUN')))


@pytest.mark.parametrize('name', FILES)
def test_a_file_loads_and_passes_the_checks(name, tmp_path):
    shutil.copytree(ROOT / 'data' / 'tiny_base', tmp_path / 'model')      # stands in for the model, which is not here
    config = make_config({**settings(name), 'model': str(tmp_path / 'model')})
    check(replace(config, engine='hf', vllm={}))                           # vLLM wants the host, see below
    assert (config.learner.kind, config.ranks, config.run) == ('deepspeed', 8, f'runs/{name}')
    assert settings(name)['model'] in MODELS
    got = (config.steps, config.questions_per_step, config.group_size, config.minibatches, config.epochs,
           config.learning_rate, config.adamw.clip, config.kl)
    assert got == VALUES[name]
    (family,) = [told for starts, told in FAMILIES.items() if name.startswith(starts)]
    for key, value in dotted({**family, **MORE[name]}).items(): assert flat(config)[key] == value, key


@pytest.mark.parametrize('name', OTHERS)
def test_a_baseline_has_the_loss_of_its_own_row(name):
    """Its clips and its average over tokens, which it would else take from the paper's method: GSPO's ratios are of
    whole rollouts, and the others average over the tokens of a mini-batch."""
    config = make_config(settings(name))
    method = get_method(OTHERS[name])
    assert config.loss_of(method) == replace(method.loss, kl=.001, entropy=0.)
    narrow = OTHERS[name] == 'gspo'
    assert (method.loss.clip_low < .001) == narrow == (method.loss.average != 'token-mean')


@pytest.mark.parametrize('name', [n for n in FILES if n.startswith(('igpo', 'tips'))])
def test_golds_are_scored_in_the_papers_words(name):
    "IGPO's sentence and TIPS's answer form, whether the file names them or leaves them to its protocol."
    config = make_config(settings(name))
    method = get_method(config.method).bind(config.options)
    scored = [read_schema(schema, PROTOCOLS[config.protocol]) for schema in scored_schemas(method, ['belief'])]
    own = Schema('{open}') if name.startswith('tips') else Schema(
        "<think>Now there's enough information to answer</think><{tag}>", '</{tag}>')
    assert {*scored} == {own} and len(scored_schemas(method, [])) == len(method.needs.golds)


@pytest.mark.parametrize('name', FILES)
def test_vllm_acts_asleep_while_the_rank_learns(name):
    config = make_config(settings(name))
    assert config.engine == 'vllm' and plan_of(config).copies and plan_of(config).sleeps
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match='memory'): check(config)


# of the paper in the file's first line; paper 4's sections have no numbers
PLACE = re.compile(
    r'\b(sections?|tables?|appendix|equations?|figures?) '
    r'(\d|[A-Z](\.\d|\b)|Experimental Setup|Datasets|Evaluation Metrics|Baselines|The introduction of VSPO)', re.I)
OURS = re.compile(r'\bours(: |, for )\S+( \S+){2}')                                 # and why


def unsaid(text, host=True):
    """Lines of a paper's file whose value is neither cited nor ours for a reason. Ranks and learner are the host's, which
    a line above them cites; run and method are the file's own. What one sees when it goes well: test_healthy."""
    text = re.sub(r'^healthy: \|\n(  .*\n)+', '', text, flags=re.M)
    named = re.search(r'\(paper [1-5]\b|paper \([1-5]\)', text.splitlines()[0])
    wrong = [] if named else ['no paper is named in the first line']
    if host and not any(line.startswith('# the host: ') and PLACE.search(line) for line in text.splitlines()):
        wrong.append('the host is not cited')
    for line in text.splitlines():
        if line.startswith(('#', 'run:', 'method:', 'learner:', 'ranks:')) or re.fullmatch(r'\w+:', line): continue
        comment = line.partition(' # ')[2]
        if not (PLACE.search(comment) or OURS.search(comment)): wrong.append(line)
    return wrong


@pytest.mark.parametrize('changes, frozen, aside', [
    ({}, 1, 0), ({'offload': ['reference', 'teacher']}, 1, 1), ({'log_kl': False}, 0, 0),
    ({'method': 'tips', 'offload': ['teacher']}, 2, 1), ({'method': 'tips', 'teacher': 'base', 'lora': {'r': 4}}, 0, 0),
    ({'method': 'ppo', 'critic': 'frozen'}, 2, 0)])
def test_models_that_are_only_read_are_counted(changes, frozen, aside):
    """A reference that the policy has under its low-rank additions is no second model; one in the host's memory only
    visits; a frozen critic's backbone is one more."""
    plan = plan_of(make_config({'method': 'grpo', 'model': 'data/tiny_base', **changes}))
    assert (plan.frozen, plan.aside) == (frozen, aside)


@pytest.mark.parametrize('name', FILES)
def test_every_value_is_cited_or_ours_for_a_reason(name):
    "Those of a warm-up too, whose paper and host are named in the training's file."
    assert unsaid(FILES[name].read_text() + (WARM[name].read_text() if name in WARM else '')) == []


def test_a_value_that_says_nothing_is_noticed():
    head = '# TIPS (paper 1): all.\n# the host: section 4, 8 GPUs\nrun: x\nlearner: deepspeed\n'
    for good in ('kl: 1   # table 10, kl_loss_coef', 'kl: 1   # appendix C.2', 'kl: 1   # ours: not given; as in verl',
                 'kl: 1   # section Datasets'):
        assert unsaid(head + good) == []
    for bad in ('kl: 1', 'kl: 1   # ours', 'kl: 1   # not given', 'kl: 1   # the table', 'kl: 1   # ours: so'):
        assert unsaid(head + bad) == [bad]
    assert len(unsaid('# Mine.\nkl: 1   # table 1')) == 2


@pytest.mark.parametrize('name, per_tier, rates', [
    ('carl_qwen2.5_3b', [10400, 5600], (5e-6, 5e-7)), ('carl_qwen2.5_7b', [8800, 7200], (5e-6, 5e-7)),
    ('search_r1_ppo_qwen2.5_7b', [8800, 7200], (1e-5, 0.0))])
def test_a_warm_up_is_told_the_rest_by_a_second_file(name, per_tier, rates, tmp_path):
    "The two files of the command, one after the other as papermill reads them."
    shutil.copytree(ROOT / 'data' / 'tiny_base', tmp_path / 'model')
    told = settings(name) | dotted(yaml.safe_load(WARM[name].read_text()))
    warming = make_warming({**told, 'model': str(tmp_path / 'model'), 'engine': 'hf', 'vllm': {}})
    check_warming(warming)
    assert (warming.run, warming.per_tier, warming.prompts, warming.tries,
            warming.repeats) == (f'runs/{name}_warmup', per_tier, ['direct', 'forced', 'optional'], 5, 1)
    assert 2 * sum(warming.per_tier) == 32000 and set(warming.clusters) == set(warming.data.split('+'))
    assert warming.clusters == {'hotpotqa': 50, '2wikimultihopqa': 50, 'gsm8k': 30}
    assert (warming.warm_steps, warming.warm_least, warming.warm_every, warming.warm_batch, warming.warm_rise,
            warming.other_share) == (2400, 1800, 25, 256, 100, .3)
    assert (warming.head_rate, warming.backbone_rate,
            warming.collected) == (*rates, 'curated') and warming.adamw.betas == [.9, .999]


def test_only_those_with_a_critic_to_warm_up_have_a_second_file():
    assert set(WARM) == {n for n in FILES if settings(n).get('critic.kind') in ('shared', 'frozen')}


@pytest.mark.parametrize('name', WARM)
def test_the_critics_term_is_half_the_mean_square(name):
    """By hand: a cold CARL critic says .5 at every segment, and .5 · mean (.5 - 1)² = .125 of an outcome of 1; a
    linear one says 0, so .5 · mean (0 - 1)² = .5."""
    config = make_config(settings(name))
    model = tiny_model(tokenizer := tiny_tokenizer(), width=32, heads=1, feedforward=64)
    method = get_method(config.method)
    loss = replace(method.loss, **config.loss | {'entropy': 0.}, average=config.average, kl=0.)
    critic = make_critic(model, **{**method.critic, 'kind': config.critic.kind})
    layout = pack([example_group()])
    nothing = torch.zeros(layout.ids.shape)
    logged = Learner(model, loss, Optimiser(minibatches=1),
                     critic=critic).step(replace(layout, ids=layout.ids % len(tokenizer)), Measured(logp=layout.logps),
                                         Credit(nothing, nothing + 1))
    assert abs(logged['loss'] - (.125 if config.method == 'carl' else .5)) < 1e-6


def test_sizes_are_the_published_ones(sizes):
    for name, (_, parameters) in MODELS.items(): assert sizes[name].parameters == parameters, name


def test_known_sizes_are_those_of_the_configurations():
    from credit_rl.estimate import KNOWN_SIZES
    for name, known in KNOWN_SIZES.items():
        config, parameters = MODELS[name]
        width = getattr(config, 'head_dim', None) or config.hidden_size // config.num_attention_heads
        assert dataclasses.astuple(known) == (
            parameters, config.num_hidden_layers, config.hidden_size, config.intermediate_size,
            width * config.num_attention_heads, width * config.num_key_value_heads, config.vocab_size), name


def test_the_job_of_the_page_on_gpus_is_priced_by_its_dry_run(sizes):
    "The page's figures are the dry run's: a rank's memory, a checkpoint."
    file, page = ROOT / 'runs/params/search_r1_grpo_qwen3_1.7b.yaml', (ROOT / 'nbs/on_gpus.md').read_text()
    config = make_config(yaml.safe_load(file.read_text()))
    needs = memory(sizes[config.model], plan_of(config))
    assert f"learns in {needs['rank'] / 1e9:.0f} GB" in page
    assert f"a checkpoint is {needs['checkpoint'] / 1e9:.0f} GB" in page


@pytest.mark.parametrize('name, rows', [('carl_qwen2.5_3b', 32_000), ('carl_qwen2.5_7b', 32_000),
                                        ('prs_long_qwen3_14b', 1_600)])
def test_a_fine_tuning_that_a_paper_has_is_told_by_its_file_and_fits(name, rows, sizes, monkeypatch):
    "A policy alone, on the ranks of the training; at most as many rows as the command asks for."
    text = (ROOT / 'runs/params' / f'{name}.yaml').read_text()
    config, small = make_config(yaml.safe_load(text)), sizes['Qwen/Qwen2.5-14B-Instruct']
    how = from_settings(sft.Imitation, {n: yaml.safe_load(v) for n, v in re.findall(r'sft\.(\w+)=(\S+)', text)})
    monkeypatch.setattr(sft, 'read_sizes', lambda model: sizes.get(model, small))
    assert sft._weigh(config)['rank'] < .9 * GPU['prs' if 'long' in name else 'carl'] and how.learning_rate == 1e-5
    lines = sft._forecast(config, how)
    assert f'{config.ranks} ranks, ZeRO 3' in lines[0] and f'{rows:,} rows' in lines[-1]


@pytest.mark.parametrize('name', FILES)
def test_a_setting_fits_its_papers_host(name, sizes):
    config = make_config(settings(name))
    needs = memory(sizes[config.model], plan_of(config))
    assert needs['rank'] < .9 * next(size for start, size in GPU.items() if name.startswith(start)), needs


def test_a_dry_run_names_all_that_is_missing_and_leaves_nothing(tmp_path):
    "A model whose checkpoints no disk holds, and passages that are not there."
    shutil.copytree(ROOT / 'data' / 'tiny_base', tmp_path / 'model')
    _SHAPE(Qwen2Config, 4, 65536, 262144, 64, 64, 152064).save_pretrained(tmp_path / 'model')
    lines = []
    wanted = 'cannot start:\n- .*nowhere.*\n- .* GB free, but 3 checkpoints and the weights of 1 take [0-9.]+ GB'
    given = dict(model=str(tmp_path / 'model'), data='hotpotqa', path=str(ROOT / 'data' / 'hotpotqa_sample.json'),
                 dev_questions=1, test_questions=1, corpus='nowhere', run=str(tmp_path / 'run'), dry_run=True)
    with pytest.raises(ValueError, match=wanted): train(given, say=lines.append)
    for words in ('1 test questions', 'memory of a rank'): assert any(words in line for line in lines)
    assert not (tmp_path / 'run').exists()


# ---- none that has never been started ----

# what a run at a small size is given instead: of all else each file's own settings are what is run
SMALL = dict(steps=2, eval_every=2, dev_questions=10, test_questions=5, ranks=1, engine='hf', vllm={}, dtype='float32',
             recompute=True, track='', **{'template.options': {}, 'learner.kind': 'plain', 'learner.deepspeed': {}, 'torch.threads': 1})
SMALL_WARM = dict(per_tier=[8, 6], warm_steps=2, warm_least=1, warm_every=1, warm_rise=1, warm_batch=16,
                  must_pass=False)


@pytest.fixture(scope='module')
def small(tmp_path_factory):
    "A small model, the sets' files and passages: (settings, question → gold)."
    folder = tmp_path_factory.mktemp('small')
    gold = write_sets(folder)
    write_model(folder / 'model', list(gold))
    return {**SMALL, 'model': str(folder / 'model'), 'path': str(folder), 'corpus': str(folder / 'corpus.jsonl')}, gold


@pytest.fixture
def shrunk(small, tmp_path, monkeypatch):
    """A function of a file's settings, and changes to them, to the changed settings of a run in a small folder, where a
    player of the file's protocol acts."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    def of(told, **changes):
        monkeypatch.setattr('credit_rl.setup.HFEngine',
                            lambda model, tokenizer, **limits: Player(PROTOCOLS[told['protocol']], small[1], tokenizer))
        questions = 2 if told['epochs'] > 1 else max(2, 15 // told['group_size'])
        return {**small[0], 'minibatches': min(told['minibatches'], 2), 'adamw.warmup': min(told.get('adamw.warmup', 0), 2),
                'questions_per_step': questions, 'run': str(tmp_path / Path(told['run']).name), **changes}
    return of


def quiet(line): pass


def check_ran(told, changes):
    """Check of a finished run of two steps that all settings but the changed ones were the file's, and that it learned
    from what its method asks for. Returns its table without the base."""
    run, method = Path(changes['run']), get_method(told['method'])
    params, table, changes = yaml.safe_load((run / 'params.yaml').read_text()), read_metrics(run), dotted(changes)
    assert {k: params[k] for k in told} == {**told, **{k: v for k, v in changes.items() if k in told}}
    assert table.step.tolist() == [0, 1, 2] and (run / 'summary.json').exists()
    chose = read_json(run / 'dev.json')
    assert 0 < len(chose) <= 10 and {key.partition(':')[0] for key in chose} == set(told['data'].split('+'))
    steps = table[1:]
    asked = ['grad_norm', 'reward', 'calls', 'answer_rate', *['value_loss', 'critic_grad_norm'] * bool(method.critic),
             *['mean_abs_shaping', 'alpha'] * bool(method.needs.teacher)]
    assert (steps[asked].max() > 0).all() and steps[['loss', 'kl']].notna().all(axis=None)
    before, after = load_model(params['model'])[0].state_dict(), saved_policy(latest_checkpoint(run)[1])
    assert any(not torch.equal(before[name], w) for name, w in after.items() if name in before)
    return steps


# what `shrunk` replaces, or no step depends on; of files that are alike without it one trains
SHRUNK = {*SMALL, 'run', 'model', 'path', 'corpus', 'questions_per_step', 'healthy', 'tflops', 'learner.stage', 'row_tokens',
          'act_rows', 'questions'}
DISTINCT = {repr(sorted((k, repr(v)) for k, v in settings(name).items() if k not in SHRUNK)): name for name in FILES}
BY_DAY = {settings(name)['method']: name for name in DISTINCT.values()}.values()             # one of each method


@pytest.mark.long
@pytest.mark.parametrize('name', [pytest.param(name, marks=[pytest.mark.nightly] * (name not in BY_DAY))
                                  for name in DISTINCT.values()])
def test_a_file_trains_at_a_small_size(name, shrunk):
    """Two steps by all of a file's settings but sizes and host. Questions that are never answered right are there for
    TSPO, and for VSPO to leave out."""
    train({**(told := settings(name)), **(changes := shrunk(settings(name)))}, say=quiet)
    steps = check_ran(told, changes)
    if name.startswith(('tspo', 'vspo')): assert steps.groups_all_wrong.max() > 0


@pytest.fixture
def sentences(monkeypatch):
    "A stand-in for sentence-transformers, which need not be installed: the names of the models that were asked for."
    asked = []
    class Encoder:
        def __init__(self, name, trust_remote_code): asked.append((name, trust_remote_code))
        def encode(self, texts): return numpy.array([[float(len(t)), float(sum(map(ord, t)) % 7)] for t in texts])
    stub = ModuleType('sentence_transformers')
    stub.SentenceTransformer = Encoder
    monkeypatch.setitem(sys.modules, 'sentence_transformers', stub)
    return asked


@pytest.mark.long
@pytest.mark.parametrize('name', [pytest.param(name, marks=[pytest.mark.nightly] * name.endswith('3b')) for name in WARM])
def test_a_warm_up_runs_at_a_small_size_and_what_it_made_teaches(name, small, shrunk, sentences):
    "The two commands of a file's head, one after the other."
    told = settings(name) | (own := dotted(yaml.safe_load(WARM[name].read_text())))
    changes = shrunk(told, **SMALL_WARM, other_corpus=small[0]['corpus'])
    warm = prepare({**told, **changes}, say=quiet)
    params = yaml.safe_load((warm / 'params.yaml').read_text())
    kept = {k: params[k] for k in told if k in params}
    assert kept == {k: {**told, **changes}[k] for k in kept} and kept.keys() >= own.keys()
    assert sentences and set(sentences) == {(told['embed'], False)}
    data = read_collected(warm / 'rollouts-train.jsonl.gz')
    assert set(data.prompts) == {'direct', 'forced', 'optional'} and set(data.tier.tolist()) == {1, 2}
    assert (read_metrics(warm).loss.dropna() > 0).sum() == 2
    changes = shrunk(told := settings(name), **{'critic.warmed': str(warm)})
    train({**told, **changes}, say=quiet)
    steps = check_ran(told, changes)
    cold = {'shared': .5, 'frozen': 0.}[told['critic.kind']]                       # of a critic that knows nothing yet
    assert abs(steps.value_start.iloc[0] - cold) > 1e-6


# ---- how the papers evaluate ----

# sets, passages, turns, metric, by the papers
EVALUATED = {'eval_tips': ('tips', 3, 5, 'em'), 'eval_tspo': ('tspo', 3, 5, 'em'), 'eval_igpo': ('igpo', 3, 10, 'f1'),
             'eval_prs': ('prs', 3, 5, 'em'), 'eval_carl': ('carl', 3, 15, 'carl_em')}
# a host without GPUs and vLLM, and what an evaluation at a small size is given instead
PLAIN = dict(engine='hf', vllm={}, dtype='float32', ranks=1)
BRIEF = dict(questions=2, turn_tokens=12, threads=1, **PLAIN)


def evaluation(name): return dotted(yaml.safe_load(EVALUATIONS[name].read_text()))


@pytest.mark.parametrize('name', sorted({*EVALUATIONS, *EVALUATED, *(f'eval_{paper}' for paper in MIXTURES)}))
def test_an_evaluation_is_its_papers(name):
    """Its sets, passages, turns and metric; the protocol and the limits that the same paper trains with; every value is
    cited or ours for a reason; and its head has the command."""
    s = from_settings(Evaluation, evaluation(name) | {'corpus': None})     # no server is here
    check_evaluation(replace(s, **({} if VLLM else PLAIN)))
    data, *rest = EVALUATED[name]
    assert (set_names(s.data), [s.passages, s.max_turns, s.metric]) == (list(MIXTURES[data].evaluate), rest)
    trained = settings({'prs': 'prs_qwen2.5_3b'}.get(data, f'{data}_qwen2.5_7b'))
    for key in ('protocol', 'max_turns', 'turn_tokens', 'max_tokens', 'prompt_tokens', 'response_tokens', 'passages',
                'passage_tokens', 'observation_tokens', 'observation_format', 'output_chars', 'answer_stop',
                'malformed', 'context_tokens'):
        if data == 'carl' and key in ('prompt_tokens', 'max_tokens'): continue    # FinQA's pages are longer
        assert evaluation(name).get(key) == trained.get(key), key
    assert s.greedy and 'model' not in evaluation(name) and 'run' not in evaluation(name)
    assert unsaid(EVALUATIONS[name].read_text(), host=False) == []
    (command,) = [line[4:] for line in EVALUATIONS[name].read_text().splitlines() if line.startswith('#   ')]
    assert command == (f'papermill nbs/91_evaluate.ipynb runs/{name}/notebook.ipynb -f runs/params/{name}.yaml -p run '
                       f'runs/{name} -p model MODEL -p path DATA')


@pytest.mark.parametrize('name', [p.stem for p in kept(ROOT, 'runs/params/eval_*.yaml')])
def test_an_evaluation_plays_by_the_engine_of_the_training(name):
    "On as many ranks, in the same numbers. A rank's vLLM has its own GPU, which is allowed."
    told = yaml.safe_load((ROOT / 'runs' / 'params' / f'{name}.yaml').read_text())
    trained = settings({'prs': 'prs_qwen2.5_3b'}.get(paper := name.split('_')[1], f'{paper}_qwen2.5_7b'))
    assert all(told[key] == trained[key] for key in ('engine', 'dtype')) and told['engine'] == 'vllm'
    assert told.get('ranks', 1) == trained['ranks'] and told['vllm']['untried']
    known = {k: v for k, v in told.items() if k not in ('data', *options_in(JudgeChoice))}
    asked = from_settings(Evaluation, known)
    rank = vllm_arguments(asked.dtype, asked.ranks, asked.vllm)
    assert rank['dtype'] == 'bfloat16' and rank['own_process']


@pytest.mark.parametrize('name, passages', [
    ('eval_carl_k3', 3), ('eval_carl_k5', 5), pytest.param('eval_carl_k7', 7, marks=pytest.mark.nightly),
    ('eval_carl_oracle', 3)])
@pytest.mark.long
def test_an_evaluation_with_other_passages_is_the_papers_but_for_them(name, passages, small, data, tmp_path):
    "CARL's settings on one set; played with them (of numbers one), the oracle's search finds nothing but support."
    told, plain = dotted(yaml.safe_load(SEARCHES[name].read_text())), evaluation('eval_carl')
    changed = {k for k in told if told[k] != plain[k]}
    assert changed <= {'data', 'passages', 'corpus', 'healthy'} and told.keys() == plain.keys()
    assert (told['data'], told['passages'], told['questions']) == ('musique', passages, 500)
    assert unsaid(SEARCHES[name].read_text(), host=False) == [] and len(SEARCHES) == 4
    command = (f'#   papermill nbs/91_evaluate.ipynb runs/{name}/notebook.ipynb -f runs/params/{name}.yaml '
               f'-p run runs/{name} -p model MODEL -p path DATA')
    assert command in SEARCHES[name].read_text()
    if name in ('eval_carl_k3', 'eval_carl_k5'): return
    if name == 'eval_carl_oracle':
        lines = (ROOT / 'data' / 'README.md').read_text().split('musique_oracle` of')[1].split('python -c "')[1]
        code, place = lines.split('"')[0].replace('\n      ', '\n'), str(tmp_path / 'oracle')
        exec(code.replace('FOLDER/musique', str(data / 'musique')).replace('data/musique_oracle', place), {})
        told['corpus'] = place
        support = {t for q in load_questions('musique', data / 'musique', 'dev') for t, _ in q.meta['supporting_facts']}
        assert {p.title for p in BM25.load(place).passages} <= support
    run_evaluation({**told, **BRIEF, 'model': small[0]['model'], 'path': str(data), 'run': str(tmp_path / 'run')},
                   say=quiet, progress=False)
    assert read_manifest(tmp_path / 'run' / 'musique')['retriever']['top_k'] == passages


@pytest.mark.parametrize('name', [n if n == 'eval_carl' else pytest.param(n, marks=pytest.mark.nightly)
                                  for n in EVALUATIONS])
@pytest.mark.long
def test_an_evaluation_runs_on_the_real_slices(name, small, data, tmp_path):
    """All its settings but the number of questions, the length of a turn, and a server's passages, in whose place are
    those beside the questions: with a small random model."""
    told = evaluation(name)
    corpus = str(data) if told['corpus'] else None
    run_evaluation({**told, **BRIEF, 'model': small[0]['model'], 'path': str(data), 'corpus': corpus,
                    'run': str(tmp_path)}, say=quiet, progress=False)
    scores = read_scores(tmp_path)
    assert set(scores) == set(MIXTURES[EVALUATED[name][0]].evaluate)
    for found, s in scores.items():
        manifest, rows = read_manifest(tmp_path / found), read_turns(tmp_path / found)
        numeric = found in ('gsm8k', 'finqa')
        assert s['metric'] == manifest['metric']['name'] == ('numeric' if numeric else told['metric'])
        assert s['questions'] == 2 and s['score'] == sum(r[s['metric']] for r in rows) / 2
        assert manifest['protocol']['name'] == told['protocol'] and manifest['limits']['max_turns'] == told['max_turns']
        assert manifest['malformed'] == told.get('messages.malformed', 'error') and manifest['decoding']['greedy']
        assert (manifest['retriever'] or {'top_k': 3})['top_k'] == told['passages']
        assert (manifest['retriever'] is None) == numeric
