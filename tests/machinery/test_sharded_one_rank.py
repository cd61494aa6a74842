"""53_sharded, one rank in this process. In bfloat16: what AdamW steps on is float32, and so is a critic's head, which
takes the plain learner's steps. In float32: 512 rows of gold answers."""
import importlib.util
import math
import random

import pytest
import torch
from torch.testing import assert_close

if not importlib.util.find_spec('deepspeed'):
    pytest.skip('deepspeed is not installed: pip install credit_rl[train]', allow_module_level=True)

from deepspeed_steps import SPREAD_ALL, DeepSpeedSGD, PlainSGD, adapted, model

from credit_rl.layout import pack
from credit_rl.learner import BadStep, Learner, Optimiser, make_critic, saved_critic
from credit_rl.parts import Credit, Golds, Loss, Needs
from credit_rl.scoring import AnswerTemplate
from credit_rl.sharded import DeepSpeedBackend
from credit_rl.trajectory import Group, Question, Stop, Trajectory, Turn, example_group

LAYOUT = pack([example_group()])
SIGNS = torch.randn(LAYOUT.ids.shape, generator=torch.Generator().manual_seed(0)).sign() * LAYOUT.trained
RETURNS = torch.linspace(0, 1, 3)[:, None].expand(LAYOUT.ids.shape)
# backbone and whether the losses step apart: both or one of them moved by the critic's loss, or the head alone
KINDS = [('shared', 1., True), ('shared', 1., False), ('shared', 0., True), ('own', 1., True), ('frozen', 1., True)]
# stages 1 and 2 are one optimiser of DeepSpeed's, which on one rank does the same
STAGES = [0, pytest.param(1, marks=pytest.mark.nightly), 2, 3]
# by day each kind in pieces, and one at each stage
GRID = [pytest.param(stage, *kind, marks=[pytest.mark.nightly] * (stage == 1 or (stage != 3 and kind != KINDS[0])))
        for stage in range(4) for kind in KINDS]
needs_peft = pytest.mark.skipif(not importlib.util.find_spec('peft'), reason='peft is not installed: pip install '
                                                                             'credit_rl[train]')


def half(stage): return DeepSpeedBackend(stage, 'bfloat16', SPREAD_ALL)


def masters(backend):
    "What AdamW steps on, behind DeepSpeed: list of tensors."
    held = backend.engine.optimizer
    if backend.stage == 0: return sum(held.fp32_groups, [])
    return held.fp32_partitioned_groups_flat if backend.stage == 3 else held.single_partition_of_fp32_groups


def moved(before, after):
    "Share of numbers that are not what they were."
    same = sum(int((a == b).sum()) for a, b in zip(before, after, strict=True))
    return 1 - same / sum(a.numel() for a in after)


def of_critic(kind='shared', mix=1., apart=True, backend=None, rate=1e-3, clip=.1, bad='stop'):
    "A learner with a competence critic in bfloat16 whose head says something."
    policy = model(0, 100).bfloat16()
    critic = make_critic(policy, kind, 'competence', 'turns', mix)
    torch.manual_seed(1)
    for p in critic.head.parameters(): torch.nn.init.normal_(p, std=.1)
    how = Optimiser(rate, critic_rate=3 * rate, minibatches=2, clip=clip, apart=apart, on_bad_step=bad)
    return Learner(policy, Loss(), how, critic, backend=backend)


def steps(learner, count, returns=RETURNS):
    return [learner.step(LAYOUT, learner.evaluate(LAYOUT), Credit(SIGNS, returns)) for _ in range(count)]


def values(learner): return learner.evaluate(LAYOUT, Needs(values=True)).values


# ---- what is stepped on ----

@pytest.mark.parametrize('additions', [False, pytest.param(True, marks=needs_peft)])
@pytest.mark.parametrize('stage', STAGES)
def test_a_small_rate_moves_the_masters(stage, additions):
    "At rate 1e-6 more than half in ten updates; forwards read them rounded, of which hardly any has moved yet."
    policy = (adapted(0, 100) if additions else model(0, 100)).bfloat16()
    learner = Learner(policy, Loss(), Optimiser(1e-6, minibatches=1), backend=half(stage))
    before, narrow = [x.clone() for x in masters(learner.backend)], {n: w.clone() for n, w in learner.weights().items()}
    for _ in range(10): learner.step(LAYOUT, learner.evaluate(LAYOUT), Credit(SIGNS))
    after, now = masters(learner.backend), learner.weights()
    assert all(x.dtype == torch.float32 for x in after) and moved(before, after) > .5
    trained = [n for n, p in policy.named_parameters() if p.requires_grad]
    kept = [[named[n] for n in trained] for named in (narrow, now)]
    assert all(w.dtype == torch.bfloat16 for w in kept[1]) and (additions or moved(*kept) < .25)
    assert sum(map(torch.numel, kept[1])) <= sum(map(torch.numel, after))


def test_a_small_rate_moves_a_critics_head():
    "In bfloat16 its weights would stay, as the backbone's do, until their masters have gone far enough."
    learner = of_critic(backend=half(2), rate=1e-6)
    before = [w.clone() for w in learner.head_weights().values()]
    steps(learner, 5)                                                               # two updates each
    assert moved(before, learner.head_weights().values()) > .5


# ---- a critic's head ----

@pytest.mark.parametrize('stage, kind, mix, apart', GRID)
def test_a_critics_head_is_exact_and_takes_the_plain_learners_steps(stage, kind, mix, apart):
    "Within what bfloat16 leaves open of the backbone; on what AdamW moves by 0.012 or more."
    plain, spread = of_critic(kind, mix, apart), of_critic(kind, mix, apart, half(stage))
    assert {w.dtype for w in spread.head_weights().values()} == {torch.float32}
    assert_close(values(spread), values(plain), atol=1e-6, rtol=0)
    wanted, found = steps(plain, 2), steps(spread, 2)
    for one, other in zip(wanted, found):
        for name in one: assert other[name] == pytest.approx(one[name], rel=.01, abs=1e-3), name
    for name, weight in plain.head_weights().items():
        assert_close(spread.head_weights()[name], weight, atol=1e-3, rtol=0)


@pytest.mark.parametrize('stage', STAGES)
def test_head_and_backbone_are_clipped_by_one_norm(stage):
    "By plain gradient descent, which shows a gradient's size. With such returns much of the norm is the head's."
    plain, spread = (of_critic(apart=False, backend=backend, rate=.1)
                     for backend in (PlainSGD(), DeepSpeedSGD(stage, 'bfloat16', SPREAD_ALL)))
    before = {n: w.clone() for n, w in plain.head_weights().items()}
    norms = [steps(learner, 1, 100 * RETURNS)[0]['grad_norm'] for learner in (plain, spread)]
    assert norms[1] == pytest.approx(norms[0], rel=.01) and norms[0] > 3 * .1
    for name, weight in plain.head_weights().items():
        assert_close(spread.head_weights()[name] - before[name], weight - before[name], atol=1e-5, rtol=.02)


@pytest.mark.parametrize('stage', STAGES)
def test_a_critics_head_is_restored(tmp_path, stage):
    "Weights and AdamW's averages; a checkpoint without it is told."
    learner = of_critic(backend=half(stage))
    steps(learner, 1)
    learner.save(tmp_path)
    kept = {n: w.clone() for n, w in learner.head_weights().items()}
    read = saved_critic(tmp_path)
    for name, weight in kept.items(): assert torch.equal(read[f'head.{name}'], weight)
    on, fresh = steps(learner, 2), of_critic(backend=half(stage))
    steps(fresh, 1, 1 - RETURNS)
    fresh.restore(tmp_path)
    assert all(torch.equal(w, kept[n]) for n, w in fresh.head_weights().items())
    assert steps(fresh, 2) == on and torch.equal(values(fresh), values(learner))
    (tmp_path / 'head.pt').unlink()
    with pytest.raises(ValueError, match='written'): fresh.restore(tmp_path)


@pytest.mark.parametrize('stage, kind, mix, apart', [one for one in GRID if one.values[1] == 'shared'])
def test_a_gradient_that_is_not_finite_moves_no_head(stage, kind, mix, apart):
    "Also where the head is all that is moved; nor does it stay for the next update."
    learner = of_critic(kind, mix, apart, half(stage), bad='skip')
    before = {n: w.clone() for n, w in learner.head_weights().items()}
    log, = steps(learner, 1, RETURNS + 1e38)
    assert log['bad_updates'] == 2
    for name, weight in learner.head_weights().items(): assert torch.equal(weight, before[name])
    after, = steps(learner, 1)
    assert 'bad_updates' not in after and math.isfinite(after['value_loss'])
    assert all(w.isfinite().all() for w in learner.head_weights().values())
    learner.optimiser = Optimiser(minibatches=2, apart=apart)
    with pytest.raises(BadStep): steps(learner, 1, RETURNS + 1e38)


# ---- gold answers ----

@pytest.mark.parametrize('stage', [2, 3])
def test_512_rows_of_gold_answers_are_scored_alike(stage):
    "One to three turns, one to four golds and one of forty: golds and trained tokens, by both backends."
    rng, question = random.Random(0), Question('q', 'Who?', ('one',))
    ids = lambda least, most: tuple(rng.randrange(1, 100) for _ in range(rng.randint(least, most)))
    turn = lambda: Turn('plain', (own := ids(1, 5)), [-1.] * len(own), ids(0, 6), '', '')
    rollouts = [Trajectory(question, ids(3, 8), [turn() for _ in range(rng.randint(1, 3))], Stop.ANSWER)
                for _ in range(512)]
    layout = pack([Group(question, rollouts)])
    gold = lambda: AnswerTemplate((x := ids(2, 5)), 1, len(x))
    golds = [[gold() for _ in range(40 if i == 7 else rng.randint(1, 4))] for i in range(512)]
    plain, spread = (Learner(model(0, 100), optimiser=Optimiser(row_tokens=64), backend=backend)
                     for backend in (None, DeepSpeedBackend(stage, settings=SPREAD_ALL)))
    needs = Needs(logp=True, gold=Golds())
    wanted, found = (learner.evaluate(layout, needs, {'gold': golds}) for learner in (plain, spread))
    assert layout.ids.shape[0] == 512 and wanted.gold_logp.shape[2] == 40
    assert torch.equal(found.gold_tokens, wanted.gold_tokens) and wanted.gold_logp.isfinite().sum() > 2000
    assert_close(found.gold_logp, wanted.gold_logp, atol=1e-5, rtol=1e-5, equal_nan=True)
    assert_close(found.logp, wanted.logp, atol=1e-5, rtol=1e-5)
