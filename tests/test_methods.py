"""60_methods, 63_train: every pair of parts either trains a step or is refused with its reason; rows that must agree agree; a row costs what it says."""
import copy
import dataclasses
import itertools
import json
import math

import pytest
import torch

from credit_rl.advantages import to_tokens
from credit_rl.engine import HFEngine, ScriptedEngine
from credit_rl.folr import first_turns, tspo_advantages
from credit_rl.information_gain import igpo_advantages, with_outcome
from credit_rl.layout import pack
from credit_rl.learner import Learner, Optimiser, make_critic
from credit_rl.parts import Loss
from credit_rl.methods import (compose, extra_passes, get_method, LOSSES, method_table, METHODS, refusal, REWARDS,
                               RULES, SAMPLINGS)
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.rollout import rollout
from credit_rl.runlog import RunLog
from credit_rl.scoring import gold_templates
from credit_rl.smdp import segment_advantages
from credit_rl.tiny import NOISY, act, tiny_environment
from credit_rl.models import load_model
from credit_rl.settings import check, make_config
from credit_rl.stage import Stage, make_learner
from credit_rl.train import _chosen, _look, options_of, train_step
from credit_rl.trajectory import Group
from credit_rl.vspo import vspo_weights
from credit_rl.world import make_world


class StubJudge:
    """Says what a judge might; stands for an endpoint that can't be had here. A verdict for PRS's long form, ratings
    for pairs of calls."""
    def ask(self, prompts, parse):
        readers = [parse] * len(prompts) if callable(parse) else parse
        rate = lambda prompt: str([[1, 2, len(str(prompt)) % 3]] * str(prompt).count('</tool_response>')).replace(
            ' ', '')
        return [
            read('Evaluation Rating: Match' if isinstance(p, list) else f'ratings_by_pair={rate(p)}')
            for p, read in zip(prompts, readers)
        ]


@pytest.fixture(scope='module')
def world(root):
    "Small base, its chat, noisy games of six questions with four attempts each, and the environment."
    model, tokenizer = load_model(str(root / 'data' / 'tiny_base'))
    chat = Chat(PROTOCOLS['tiny'], tokenizer)
    land = make_world('train', 3, size=60, questions=6)
    env = tiny_environment(land, chat)
    groups = rollout(ScriptedEngine(lambda text, rng: act(text, rng, NOISY), tokenizer), env, land.questions,
                     group_size=4, seed=2)
    # scripted players have no log-probabilities of their own
    scored = Learner(copy.deepcopy(model)).evaluate(pack(groups)).logp
    return model, chat, groups, env, land, scored


def games(world, shift=0.):
    """The groups with the small base's own log-probabilities, `shift` lower on every second rollout, as those they
    were sampled with."""
    model, chat, groups, env, land, scored = world
    out, layout, i = [], pack(groups), 0
    for g in groups:
        trajectories = []
        for t in g.trajectories:
            rows = (layout.row_trajectory == i).nonzero()[:, 0]
            logps = [scored[rows][layout.token_turns[rows] == k].tolist() for k in range(len(t.turns))]
            trajectories.append(
                dataclasses.replace(
                    t, turns=[
                        dataclasses.replace(turn, action_logps=[x - shift * (i % 2)
                                                                for x in lp])
                        for turn, lp in zip(t.turns, logps)
                    ]))
            i += 1
        out.append(Group(g.question, trajectories))
    return out


def a_step(world, method, options=None, learner=None, groups=None, config=None, **how):
    """One update of a method on the stored games: credit, what was logged, the gradient's direction as the change of
    weights under SGD."""
    model, chat = world[:2]
    groups, c = groups or games(world), config or make_config({'log_kl': False, **how})
    settings = {**options_of(c, method, chat), **(options or {})}
    learner = learner or SGD(copy.deepcopy(model), dataclasses.replace(method.loss, **c.loss),
                             Optimiser(.1, minibatches=1, clip=1e9), critic=make_critic(model, **method.critic)
                             if method.critic else None, teacher_every=0 if 'teacher' in method.sees else None)
    before = {n: w.clone() for n, w in learner.weights().items()}
    rewards = method.text_rewards(groups, settings)
    kept, weights = method.keep(groups, rewards, settings, torch.Generator().manual_seed(0))
    layout, rewards, chosen, weights = _chosen(groups, rewards, kept, weights, 0, learner.loss.average)
    seen, _ = _look(c, method, settings, groups, chosen, layout, chat, learner)
    if method.model_rewards: rewards |= method.model_rewards(rewards, layout, seen, settings)
    credit = method.credit(rewards, layout, seen, settings)
    if weights is not None: credit = dataclasses.replace(credit, trajectory_weight=weights)
    passes, stats = dict(learner.passes), learner.step(layout, seen, credit)
    moved = torch.cat([(w - before[n]).flatten() for n, w in sorted(learner.weights().items())])
    return credit, stats, moved, passes, layout


class SGD(Learner):
    "Plain gradient descent, so that the weights' change is the gradient."
    def _adamw(self): return torch.optim.SGD(self.scorer.parameters(), lr=self.optimiser.learning_rate)


# ---- pairs ----

def pairs():
    "Every pair of parts, the others left at their defaults, with a turn reward where the rule asks for one."
    turn_rewards = [r for r in REWARDS if REWARDS[r].gives == 'turns']
    rewards = [
        *[('outcome', r) if REWARDS[r].gives != 'outcome' else (r, ) for r in REWARDS], ('prs', 'folr'),
        ('outcome', 'folr', 'gain')
    ]
    for earned, rule in itertools.product(rewards, RULES): yield earned, rule, 'all', 'ppo'
    for earned, sampling in itertools.product(rewards, SAMPLINGS):
        yield earned, 'accumulate' if set(earned) & set(turn_rewards) else 'group', sampling, 'ppo'
    for earned, loss in itertools.product(rewards, LOSSES):
        yield earned, 'accumulate' if set(earned) & set(turn_rewards) else 'group', 'all', loss
    for (rule, sampling), extra in itertools.product(itertools.product(RULES, SAMPLINGS), ((), ('rules',))):
        yield ('outcome', *extra), rule, sampling, 'ppo'
    for (rule, loss), extra in itertools.product(itertools.product(RULES, LOSSES), ((), ('rules',))):
        yield ('outcome', *extra), rule, 'all', loss
    for sampling, loss in itertools.product(SAMPLINGS, LOSSES): yield ('outcome',), 'group', sampling, loss


PAIRS = sorted(set(pairs()))
SPELT = ['/'.join(('+'.join(p[0]), *p[1:])) for p in PAIRS]


def test_the_pairs_are_all_pairs():
    "Each two parts of different kinds meet in the list."
    kinds = [set(REWARDS), set(RULES), set(SAMPLINGS), set(LOSSES)]
    met = {
        frozenset(((i, a), (j, b)))
        for p in PAIRS
        for (i, xs), (j, ys) in itertools.combinations(enumerate((p[0], *[(x, )
                                                                          for x in p[1:]])), 2)
        for a in xs
        for b in ys
    }
    for (i, a), (j, b) in itertools.combinations(enumerate(kinds), 2):
        assert {frozenset(((i, x), (j, y))) for x in a for y in b} <= met


@pytest.mark.parametrize('rule', RULES)
def test_every_pair_trains_or_is_refused(world, rule):
    "An accepted pair takes a step with finite numbers that moves the weights; a refused one raises its reason."
    batch = two_turns(games(world)) if rule == 'call' else games(world)
    rights = [sum(t.answer in g.question.answers for t in g.trajectories) for g in batch]
    # all wrong, mixed, mixed
    batch, taken = [batch[rights.index(0)], *[g for g, n in zip(batch, rights) if 0 < n < 4][:2]], 0
    for p, spelt in zip(PAIRS, SPELT):
        if p[1] != rule: continue
        why = refusal(*p)
        if why:
            with pytest.raises(ValueError) as told: get_method(spelt)
            assert why in str(told.value) and len(why) > 30
            continue
        method, taken = get_method(spelt), taken + 1
        credit, stats, moved, passes, _ = a_step(world, method, {'judge': StubJudge()} if 'judge' in p[0] else {},
                                                 groups=batch)
        assert credit.advantages.isfinite().all() and moved.isfinite().all(), spelt
        assert moved.abs().max() > 0 and math.isfinite(stats['loss']), spelt
        assert passes == extra_passes(method), spelt
    assert taken


# ---- rows ----

def two_turns(groups):
    "The first and the last turn of every rollout."
    return [
        Group(g.question, [dataclasses.replace(t, turns=[*t.turns[:1], *t.turns[-1:]])
                           for t in g.trajectories])
        for g in groups
    ]


@pytest.mark.parametrize('name', METHODS)
def test_a_row_is_what_its_functions_say(world, name):
    "Credit of composed rows against the pure functions called by hand."
    groups, method = games(world), METHODS[name]
    layout, settings = pack(groups), method.settings({})
    rewards = method.text_rewards(groups, settings)
    em = torch.tensor([
        float(t.answer is not None and t.answer.strip() in t.question.answers) for g in groups for t in g.trajectories
    ])
    assert torch.equal(rewards['right'], em)  # the tiny world's answers need no normalisation
    if name == 'tspo':
        by_hand = tspo_advantages(em, first_turns(groups), layout.turn_mask, layout.groups)
        torch.testing.assert_close(
            method.credit(rewards, layout, None, settings).advantages, to_tokens(by_hand, layout.token_turns),
            atol=1e-6, rtol=0)
    if name == 'igpo':
        gains = torch.rand(layout.turn_mask.shape) * layout.turn_mask
        last = layout.turn_mask & ~torch.nn.functional.pad(layout.turn_mask[:, 1:], (0, 1))
        by_hand = igpo_advantages(with_outcome(gains, rewards['outcome'], layout.turn_mask), layout.turn_mask,
                                  layout.groups)
        told = method.credit({**rewards, 'turns': gains.masked_fill(last, 0)}, layout, None, settings)
        torch.testing.assert_close(told.advantages, to_tokens(by_hand, layout.token_turns), atol=1e-5, rtol=0)


@pytest.mark.parametrize('name', [n for n in METHODS if n not in ('grpo', 'mt-grpo', 'gspo')])
def test_a_row_is_not_grpo(world, name):
    "The gradient on the stored games differs from GRPO's; and the forwards are those that the row states."
    _, _, plain, _, _ = a_step(world, METHODS['grpo'])
    _, _, moved, passes, _ = a_step(world, METHODS[name])
    assert passes == extra_passes(METHODS[name])
    assert (moved - plain).norm() > 1e-3 * plain.norm()


def test_gspo_is_grpo_until_the_policy_moves(world):
    """With all ratios 1, the gradient of a rollout's mean ratio is the mean of its tokens' gradients, GRPO's; once
    ratios differ, so do the two."""
    same_step(a_step(world, METHODS['gspo']), a_step(world, METHODS['grpo']))
    gspo, grpo = (a_step(world, METHODS[n], groups=games(world, shift=.1))[2] for n in ('gspo', 'grpo'))
    assert (gspo - grpo).norm() > 1e-3 * grpo.norm()


def test_mt_grpo_on_two_turns_is_not_grpo(world):
    "MT-GRPO knows a call and an answer; on such games its first turn differs from GRPO's."
    two = two_turns(games(world))
    ours, grpo = (a_step(world, METHODS[n], groups=two)[2] for n in ('mt-grpo', 'grpo'))
    assert (ours - grpo).norm() > 1e-3 * grpo.norm()


def same_step(a, b): torch.testing.assert_close(a[2], b[2], atol=1e-6, rtol=1e-4)


def test_rows_that_meet(world):
    """MT-GRPO* without its own part, TSPO without a latent reward and VSPO without a silent group take GRPO's step;
    TIPS with α = 0 takes PPO's."""
    grpo = METHODS['grpo']
    like = lambda row: dataclasses.replace(row, loss=grpo.loss)
    same_step(a_step(world, like(METHODS['mt-grpo*']), {'lambda_mid': 0.}), a_step(world, grpo))
    same_step(a_step(world, like(METHODS['tspo']), {'alpha': 0.}), a_step(world, grpo))
    same_step(a_step(world, METHODS['tips'], {'alpha': 0.}), a_step(world, METHODS['ppo']))
    varied = [
        g for g in games(world)
        if 0 < sum(t.answer in g.question.answers for t in g.trajectories) < len(g.trajectories)
    ]
    assert len(varied) > 1
    same_step(a_step(world, METHODS['vspo'], groups=varied), a_step(world, grpo, groups=varied))


@pytest.mark.parametrize('average', ['token-mean', 'sequence-mean-token-mean', 'token-sum'])
def test_vspo_by_weights_is_vspo_by_copies(world, average):
    "One row of weight ω, averaged over the batch's places, is the batch in which a group stands N times with ω/N each."
    groups = games(world)
    method = compose(sampling='value', average=average, smoothing=3)
    credit, _, moved, _, layout = a_step(world, method, groups=groups)
    settings = method.settings({})
    rewards = method.text_rewards(groups, settings)['outcome'].view(6, 4)
    weights, counts = vspo_weights(rewards, alpha=3, generator=torch.Generator().manual_seed(0))
    assert (counts == 0).any() and int(counts.max()) > 1
    whole = pack(groups)
    learner = SGD(copy.deepcopy(world[0]), Loss(average=average), Optimiser(.1, minibatches=1, clip=1e9))
    before = {n: w.clone() for n, w in learner.weights().items()}
    grpo = METHODS['grpo']
    plain = grpo.credit(grpo.text_rewards(groups, grpo.settings({})), whole, None, grpo.settings({}))
    # dropped groups have weight 0 and stay in the denominator
    learner.step(whole, None, dataclasses.replace(plain, trajectory_weight=weights.repeat_interleave(4)))
    by_hand = torch.cat([(w - before[n]).flatten() for n, w in sorted(learner.weights().items())])
    torch.testing.assert_close(moved, by_hand, atol=1e-6, rtol=1e-4)


def test_carl_on_tokens(world):
    "CARL's credit and its critic's targets, against the pure function and by hand."
    credit, stats, _, passes, layout = a_step(world, METHODS['carl'])
    groups = games(world)
    outcome = METHODS['grpo'].text_rewards(groups, METHODS['grpo'].settings({}))['outcome']
    half = torch.full(layout.turn_mask.shape, .5)  # an untrained critic says one half everywhere
    by_hand = segment_advantages(half, layout.turn_mask, outcome)
    torch.testing.assert_close(credit.advantages, to_tokens(by_hand, layout.token_turns), atol=1e-6, rtol=0)
    assert credit.returns[layout.trained].unique().tolist() == [0., 1.] and math.isclose(
        stats['value_loss'], .125, rel_tol=1e-4) and passes == {'policy': 1}


def test_missing_measures_take_a_rollout_out(world):
    "A rollout without gold scores has weight 0 and changes nobody else's credit."
    groups, method = games(world), METHODS['igpo']
    layout, settings = pack(groups), method.settings({})
    rewards = method.text_rewards(groups, settings)
    seen = Learner(copy.deepcopy(world[0])).evaluate(layout, ('gold', ),
                                                     {'gold': gold_templates(world[1], groups, 'igpo')})
    lost = dataclasses.replace(seen, gold_logp=seen.gold_logp.clone().index_fill_(0, torch.tensor([2]), torch.nan))
    told = [
        method.credit({**rewards, **method.model_rewards(rewards, layout, s, settings)}, layout, s, settings)
        for s in (seen, lost)
    ]
    assert told[0].trajectory_weight is None and told[1].trajectory_weight.tolist() == [
        float(i != 2) for i in range(24)
    ]
    assert not told[1].advantages[2].any() and torch.equal(
        told[0].advantages[4:],
        told[1].advantages[4:]) and not torch.equal(told[0].advantages[1], told[1].advantages[1])


def test_dapo_asks_again(world, tmp_path, root):
    """Where too few groups vary, another round of rollouts is made, up to the limit; the update takes no more groups
    than a step asks for."""
    model, chat, _, _, _, _ = world
    land = make_world('train', 3, size=60, questions=40)
    env = tiny_environment(land, chat)
    stage = Stage(chat, copy.deepcopy(model), {'train': list(land.questions)}, {'train': env})
    counts = {}
    for draws in (1, 3):
        config = make_config({
            'method': 'dapo', 'options': {'draws': draws}, 'questions_per_step': 4, 'group_size': 4, 'log_kl': False,
            'model': str(root / 'data' / 'tiny_base')
        })
        learner = make_learner(config, METHODS['dapo'], copy.deepcopy(model))
        log = RunLog(str(tmp_path / str(draws)))
        counts[draws] = train_step(1, config, METHODS['dapo'], stage, HFEngine(learner.scorer.model, chat.tokenizer),
                                   learner, log)
    assert counts[1]['trajectories'] == 16 and counts[3]['trajectories'] in (32, 48)
    assert counts[1]['groups_mixed'] < 1                                       # a draw was needed


def test_the_controller_moves_alpha_and_survives_in_json(world, tmp_path, root):
    "TIPS's dynamic α: its state is JSON, a resumed run goes on from it."
    model, chat, _, _, _, _ = world
    land = make_world('train', 3, size=60, questions=40)
    stage = Stage(chat, copy.deepcopy(model), {'train': list(land.questions)}, {'train': tiny_environment(land, chat)})
    config = make_config({
        'method': 'tips', 'options': {'band': 'small', 'alpha': 1.0}, 'questions_per_step': 2, 'group_size': 2,
        'log_kl': False, 'model': str(root / 'data' / 'tiny_base')
    })
    learner, memory, log = make_learner(config, METHODS['tips'],
                                        copy.deepcopy(model)), {}, RunLog(str(tmp_path / 'run'))
    alphas = []
    for step in (1, 2, 3):
        memory = json.loads(json.dumps(memory))
        alphas.append(
            train_step(step, config, METHODS['tips'], stage, HFEngine(learner.scorer.model, chat.tokenizer), learner,
                       log, memory=memory)['alpha'])
    assert alphas[0] == 1.0 and alphas[2] < alphas[1] < 1.0                    # far above the band: α falls


def test_shaping_beside_folr_keeps_its_own_alpha(world, tmp_path, root):
    "Where two rewards have an `alpha`, the controller moves that of the shaping, and the other stays."
    model, chat, _, _, _, _ = world
    land, method = make_world('train', 3, size=60, questions=40), get_method('outcome+folr+shaping/turns')
    stage = Stage(chat, copy.deepcopy(model), {'train': list(land.questions)}, {'train': tiny_environment(land, chat)})
    config = make_config({
        'method': method.name, 'options': {'band': 'small', 'shaping.alpha': .9, 'folr.alpha': .3},
        'questions_per_step': 2, 'group_size': 2, 'log_kl': False, 'model': str(root / 'data' / 'tiny_base')
    })
    learner, memory, log = make_learner(config, method, copy.deepcopy(model)), {}, RunLog(str(tmp_path / 'run'))
    logged = [
        train_step(step, config, method, stage, HFEngine(learner.scorer.model, chat.tokenizer), learner, log,
                   memory=memory) for step in (1, 2)
    ]
    assert logged[0]['alpha'] == .9 and logged[1]['alpha'] != .9


def test_tokens_read_are_those_of_rows_and_answers(world):
    "Each row once, and each gold's ids at each state of its rollout before the last turn's end."
    model, chat, groups, *_ = world
    c, layout = make_config({'method': 'igpo', 'log_kl': False}), pack(groups)
    learner = make_learner(dataclasses.replace(c, method='igpo'), METHODS['igpo'], copy.deepcopy(model))
    _, read = _look(c, METHODS['igpo'], METHODS['igpo'].options, groups, torch.arange(len(layout.groups)), layout,
                    chat, learner)
    flat = [t for g in groups for t in g.trajectories]
    answers = gold_templates(chat, groups, 'igpo')
    by_hand = sum(len(t.turns) * sum(len(a.ids) for a in golds) for t, golds in zip(flat, answers))
    assert read == int(layout.lengths.sum()) + by_hand


@pytest.mark.parametrize('name, changes, message', [
    ('outcome+judge/calls', {}, 'asks a judge'), ('mt-grpo', {}, 'max_turns must be 2'), ('tips', {'options': {'band': 'tiny'}}, 'small, medium, large'),
    ('grpo', {'critic': 'own'}, 'has no critic'), ('ppo', {'critic': 'mine'}, 'own, shared, frozen'), ('tips', {'teacher': 'data/tiny_base', 'teacher_every': 3}, 'never refreshed'),
    ('grpo', {'loss': {'cliphigh': 1}}, 'clip_high'), ('prs+prs/group', {}, 'exactly one outcome'), ('outcome/group/all/ppo/more', {}, 'rewards/rule/sampling/loss'),
    ('outcome/grup', {}, "did you mean 'group'"), ('prs+vspoo', {}, "did you mean 'prs.vspo'")])
def test_refused_before_compute(root, monkeypatch, name, changes, message):
    monkeypatch.chdir(root)
    with pytest.raises(ValueError, match=message): check(make_config({'method': name, **changes}))


def test_the_table_names_every_row():
    table = method_table().splitlines()
    assert len(table) == len(METHODS) + 2 and all(
        line.startswith(f'| {name} |') for line, name in zip(table[2:], METHODS))
    assert all(line.count(' | ') == 6 for line in table[2:]) and not any('||' in line for line in table)
