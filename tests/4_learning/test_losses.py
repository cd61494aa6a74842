"""50_losses against TRL's own `_compute_loss`, its identities, and the learner's micro-batches.

TRL 1.16 also has `sapo`, `vespo` and RLOO's product ratio off policy, which nothing here wants.
"""
import dataclasses, math
from collections import defaultdict
from types import SimpleNamespace

import pytest, torch
from hypothesis import given, strategies as st
from torch.testing import assert_close

from credit_rl.layout import AVERAGES, loss_weights, pack, token_logps
from credit_rl.learner import FrozenModels, Learner, Optimiser, PlainBackend
from credit_rl.parts import Credit, Loss, Needs
from credit_rl.losses import entropy, kl, overlong_penalty, policy_loss, policy_terms, value_loss, weighted_sum
from credit_rl.trajectory import Group, example_group
from random_models import small_qwen

NAN = math.nan
KINDS = ('ppo', 'gspo', 'gspo-token', 'cispo', 'reinforce')


def batch(seed, rows=6, length=15, spread=0.4, dtype=torch.float32):
    "logp, old_logp, ref_logp, advantages, mask with holes (every row trains something), all (R, T)."
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, length, generator=g, dtype=dtype) * 3 - 1.2
    logp, ref = old + spread * torch.randn(2, rows, length, generator=g, dtype=dtype).clamp(-2.5, 2.5)
    mask = torch.rand(rows, length, generator=g) < 0.6
    mask[:, 3] = True
    return logp, old, ref, torch.randn(rows, length, generator=g, dtype=dtype), mask


def average(mask, name, **kw):
    "Weights (R, T) of the trained tokens, each row a trajectory of one turn."
    return loss_weights(torch.where(mask, 0, -1), torch.arange(len(mask)), name, **kw)


def sequence_mean(mask): return average(mask, 'sequence-mean-token-mean')
def token_mean(mask): return average(mask, 'token-mean')


def trl_step(loss_type, logp, old, ref, advantages, mask, level='token', low=0.2, high=0.2, delta=None, beta=0.0):
    "The loss that TRL's trainer computes when the model's log-probabilities are `logp`, and the metrics that it logs."
    grpo = pytest.importorskip('trl.trainer.grpo_trainer', reason='pip install credit_rl[train]')
    trainer = object.__new__(grpo.GRPOTrainer)      # its method, without a model, a tokenizer and a data set
    same = lambda x, *a, **k: x
    stubs = dict(
        loss_type=loss_type, importance_sampling_level=level, epsilon_low=low, epsilon_high=high, beta=beta,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, aux_loss_enabled=False, use_vllm=False,
        vllm_importance_sampling_correction=False, current_gradient_accumulation_steps=1, max_completion_length=32,
        _entropy_bonus_enabled=False, entropy_coef=0.0, use_adaptive_entropy=False, model=SimpleNamespace(training=True),
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=SimpleNamespace(num_processes=1, gather=same, reduce=same, gather_for_metrics=same,
                                    sync_gradients=True),
        _metrics={'train': defaultdict(list), 'eval': defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp, torch.zeros_like(logp), None))
    for name, value in stubs.items(): setattr(trainer, name, value)
    ids = torch.zeros_like(logp, dtype=torch.long)
    inputs = dict(prompt_ids=ids[:, :1], prompt_mask=torch.ones_like(ids[:, :1]), completion_ids=ids,
                  completion_mask=torch.ones_like(ids), tool_mask=mask.long(), advantages=advantages,
                  old_per_token_logps=old, ref_per_token_logps=ref, num_items_in_batch=mask.sum())
    loss = trainer._compute_loss(trainer.model, inputs)
    return loss, {name: values[-1] for name, values in trainer._metrics['train'].items()}


def agree(ours, theirs, logp):
    "Both losses and their gradients are the same."
    x, y = logp.clone().requires_grad_(), logp.clone().requires_grad_()
    a, b = ours(x), theirs(y)
    assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert_close(torch.autograd.grad(a, x)[0], torch.autograd.grad(b, y)[0], atol=1e-6, rtol=1e-4)


# TRL's loss types and the averages that they are
TRL = {'grpo': sequence_mean, 'bnpo': token_mean, 'dapo': token_mean,
       'dr_grpo': lambda m: average(m, 'token-sum', denominator=len(m) * 32),
       'luspo': lambda m: average(m, 'group-mean-token-sum')}


@pytest.mark.parametrize('loss_type', TRL)
def test_ppo_family_and_gspo_are_trls(loss_type):
    "PPO, clip-higher and dual clip; GSPO with credit for each token and for each row."
    logp, old, ref, a, mask = batch(0)
    w = TRL[loss_type](mask)
    for clip in (dict(), dict(high=0.28), dict(delta=1.5)):
        agree(lambda x: policy_loss(x, old, a, w, 'ppo', clip_high=clip.get('high', 0.2), dual_clip=clip.get('delta')),
              lambda x: trl_step(loss_type, x, old, ref, a, mask, **clip)[0], logp)
    for kind, credit in (('gspo', a), ('gspo', a[:, :1].expand_as(a)), ('gspo-token', a[:, :1].expand_as(a))):
        theirs = lambda x: trl_step(loss_type, x, old, ref, credit, mask, level='sequence', low=0.05, high=0.05)[0]
        agree(lambda x: policy_loss(x, old, credit, w, kind, 0.05, 0.05), theirs, logp)


def test_cispo_is_trl():
    logp, old, ref, a, mask = batch(0)  # TRL clips the upper side only, at an absolute ratio
    w = token_mean(mask)
    ours = lambda x: policy_loss(x, old, a, w, 'cispo', clip_low=1.0, clip_high=0.3)
    agree(lambda x: ours(x) + 0.3 * weighted_sum(kl(x, ref, mask=mask), w),
          lambda x: trl_step('cispo', x, old, ref, a, mask, high=1.3, beta=0.3)[0], logp)


@pytest.mark.parametrize('level', ['token', 'sequence'])
def test_statistics_are_trls(level):
    logp, old, ref, a, mask = batch(0)
    if level == 'sequence': a = a[:, :1].expand_as(a)
    _, logged = trl_step('dapo', logp, old, ref, a, mask, level, low=0.05, high=0.1, beta=0.1)
    _, ours = policy_terms(logp, old, a, mask, 'ppo' if level == 'token' else 'gspo', (0.05, 0.1))
    assert_close(weighted_sum(kl(logp, ref, mask=mask), token_mean(mask)), torch.tensor(logged['kl']))
    assert_close(ours['clip_fraction'], torch.tensor(logged['clip_ratio/region_mean']))


@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 10 ** 6))
def test_untrained_positions_never_leak(kind, seed):
    logp, old, ref, a, mask = batch(seed)
    w = token_mean(mask)
    clean, dirty = logp.clone().requires_grad_(), torch.where(mask, logp, NAN).requires_grad_()
    junk = [torch.where(mask, v, bad) for v, bad in ((old, math.inf), (a, NAN))]
    one, two = policy_loss(clean, old, a, w, kind), policy_loss(dirty, *junk, w, kind)
    assert_close(one, two)
    assert_close(*(torch.autograd.grad(loss, x)[0] for loss, x in ((one, clean), (two, dirty))))
    for k in ('k1', 'k2', 'k3'):
        term = weighted_sum(kl(dirty, torch.where(mask, ref, NAN), k, mask), w)
        assert term.isfinite() and torch.autograd.grad(term, dirty)[0].isfinite().all()


@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 10 ** 6), random=st.randoms(use_true_random=False))
def test_order_padding_and_scale(kind, seed, random):
    logp, old, _, a, mask = batch(seed, dtype=torch.float64)
    w, owner = token_mean(mask).double(), torch.tensor([3, 3, 0, 7, 7, 7])
    loss = lambda *fields, o=owner: policy_loss(*fields, kind, row_trajectory=o)
    order = random.sample(range(6), 6)
    whole = loss(logp, old, a, w)
    assert_close(loss(logp[order], old[order], a[order], w[order], o=owner[order] * 5), whole)
    wide = [torch.nn.functional.pad(x, (1, 2), value=v) for x, v in ((logp, NAN), (old, NAN), (a, math.inf), (w, 0.0))]
    assert_close(loss(*wide), whole)
    assert_close(loss(logp, old, a, 3 * w), 3 * whole); assert_close(loss(logp, old, 3 * a, w), 3 * whole)


@pytest.mark.parametrize('kind', KINDS)
def test_only_the_policy_and_the_critic_get_a_gradient(kind):
    "Sampled and reference log-probabilities, advantages, returns and old values are constants, whatever made them."
    logp, old, ref, a, mask = (x.clone().requires_grad_(x.is_floating_point()) for x in batch(0))
    w = token_mean(mask)
    terms, stats = policy_terms(logp, old, a, mask, kind)
    loss = weighted_sum(terms, w) + sum(weighted_sum(kl(logp, ref, k, mask), w) for k in ('k1', 'k2', 'k3'))
    moved = torch.autograd.grad(loss + value_loss(logp, ref, w) + value_loss(logp, a, w, old, 0.1),
                                (logp, old, ref, a), allow_unused=True)
    assert moved[0].any() and moved[1:] == (None, None, None)
    assert not any(x.requires_grad for x in stats.values())


def test_huge_ratios_stay_finite():
    x, old, half = torch.tensor([[-0.1, -200.0]], requires_grad=True), torch.tensor([[-300.0, -0.1]]), torch.full((1, 2), .5)
    for kind in KINDS:
        for sign in (1.0, -1.0):
            loss = policy_loss(x, old, torch.full((1, 2), sign), half, kind)
            assert loss.isfinite() and torch.autograd.grad(loss, x)[0].isfinite().all()


@pytest.mark.parametrize('kind', KINDS)
def test_low_precision_is_widened(kind):
    logp, old, ref, a, mask = (x.bfloat16() if x.is_floating_point() else x for x in batch(4))
    loss = policy_loss(logp, old, a, token_mean(mask), kind)
    assert loss.dtype == torch.float32
    assert_close(loss, policy_loss(logp.float(), old.float(), a.float(), token_mean(mask), kind))
    assert kl(logp, ref).dtype == entropy(logp).dtype == torch.float32


def test_bad_input_is_refused():
    logp, old, ref, a, mask = batch(0)
    w = token_mean(mask)
    def refused(call, right, *cases):
        for change, what in cases:
            with pytest.raises(ValueError, match=what): call(**{**right, **change})
    refused(policy_loss, dict(logp=logp, old_logp=old, advantages=a, weights=w),
            (dict(logp=logp.exp()), 'probabilities'), (dict(old_logp=old.exp()), 'probabilities'),
            (dict(logp=logp * NAN), 'finite'), (dict(advantages=a * NAN), 'missing trajectory'),
            (dict(weights=-w), '>= 0'), (dict(weights=torch.where(mask, math.inf, 0.0)), '>= 0'),
            (dict(advantages=a[:, 0]), 'token'), (dict(advantages=a[:, :1]), 'token'), (dict(weights=w[:, :1]), 'mask'),
            (dict(kind='grpo'), 'kind'), (dict(dual_clip=0.9), 'dual_clip'),
            (dict(dual_clip=3.0, kind='cispo'), 'dual_clip'), (dict(clip_low=1.2), 'clip_low'),
            (dict(kind='gspo', row_trajectory=torch.tensor([0])), 'row_trajectory'))
    refused(value_loss, dict(values=a, returns=a, weights=w),
            (dict(values=a * NAN), 'finite'), (dict(clip=0.2), 'together'), (dict(old_values=a), 'together'),
            (dict(clip=0.0, old_values=a), 'above 0'), (dict(clip=-1.0, old_values=a), 'above 0'),
            (dict(returns=a[:1]), 'returns'), (dict(values=a[:, :1]), 'values'),
            (dict(clip=0.1, old_values=a[0]), 'old_values'), (dict(returns=a * math.inf), 'finite'),
            (dict(clip=0.1, old_values=a * NAN), 'finite'))
    refused(kl, dict(logp=logp, ref_logp=ref), (dict(ref_logp=ref.exp()), 'probabilities'), (dict(kind='k4'), 'k3'))
    refused(overlong_penalty, dict(lengths=torch.tensor([1]), max_length=10),
            *((dict(buffer=buffer), 'buffer') for buffer in (0, -1, 11)))
    with pytest.raises(ValueError, match='terms'): weighted_sum(a, w[:1])


def test_kl_keeps_its_digits_and_stays_finite():
    for d in (1e-2, 1e-4, -1e-4):
        ref = torch.full((1, 1), -2.0)
        logp = (ref.double() + d).float()
        moved = (logp.double() - ref.double()).item()                                   # what float32 holds of d
        k3, (_, stats) = kl(logp, ref).item(), policy_terms(ref, logp, torch.ones(1, 1), ref < 0)
        assert k3 >= 0 and math.isclose(k3, math.expm1(-moved) + moved, rel_tol=1e-3)
        assert math.isclose(stats['approx_kl'], math.expm1(-moved) + moved, rel_tol=1e-3)
    x = torch.tensor([[-300.0, -0.1]], requires_grad=True)
    for kind in ('k1', 'k2', 'k3'):
        term = kl(x, torch.tensor([[-0.1, -300.0]]), kind).sum()
        assert term.isfinite() and torch.autograd.grad(term, x)[0].isfinite().all()


def test_statistics():
    logp, old, _, a, mask = batch(3)
    _, stats = policy_terms(logp, old, a, mask)
    ratio = (logp - old).exp()[mask]
    assert_close(stats['ratio'], ratio.mean()); assert stats['tokens'] == mask.sum()
    assert_close(stats['approx_kl'], (ratio - 1 - ratio.log()).mean())
    cut = ((ratio > 1.2) & (a[mask] > 0)) | ((ratio < 0.8) & (a[mask] < 0))
    assert_close(stats['clip_fraction'], cut.float().mean())
    for kw in (dict(), dict(dual_clip=1.3), dict(dual_clip=1.3, clip=(0.2, 0.5))):  # what is cut off has no gradient
        x = logp.clone().requires_grad_()
        low, high = kw.get('clip', (0.2, 0.2))
        policy_loss(x, old, a, mask.float(), 'ppo', low, high, kw.get('dual_clip')).backward()
        share = policy_terms(logp, old, a, mask, **kw)[1]['clip_fraction']
        assert_close((x.grad[mask] == 0).float().mean(), share)
        assert not kw or share > stats['clip_fraction']
    bounded = policy_terms(logp, old, a, mask, 'cispo')[1]['clip_fraction']  # CISPO's tokens keep theirs, bounded
    assert_close(bounded, ((ratio < 0.8) | (ratio > 1.2)).float().mean())


def test_value_loss_and_entropy():
    v, target, old = torch.tensor([[0.5, 0.9, NAN]]), torch.tensor([[1., 1., NAN]]), torch.tensor([[0.2, 0.85, NAN]])
    w = torch.tensor([[0.5, 0.5, 0.]])
    assert_close(value_loss(v, target, w), torch.tensor((0.25 + 0.01) / 4))
    clipped = value_loss(v, target, w, old, 0.1)                # .5 counts as .3; .9 is within the step
    assert_close(clipped, torch.tensor((0.49 + 0.01) / 4))
    assert value_loss(v.bfloat16(), target.bfloat16(), w).dtype == torch.float32
    assert value_loss(v.requires_grad_(), target, w).requires_grad and value_loss(v, target, torch.zeros_like(w)) == 0
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    assert_close(entropy(logits), torch.distributions.Categorical(logits=logits).entropy())
    assert overlong_penalty(torch.tensor([0, 60, 75, 100, 999]), 100, 40).tolist() == [0, 0, -0.375, -1, -1]


class Recorder(PlainBackend):
    "A backend that keeps each update's gradient before it is clipped."
    def update(self, clip):
        self.gradient = torch.cat([p.grad.flatten().clone() for p in self.scorer.parameters()])
        return super().update(clip)


def small_model(seed=0):
    return small_qwen(100, seed, hidden_size=32, intermediate_size=48, initializer_range=.1)


@pytest.fixture(scope='module')
def eight():
    "Eight trajectories of different lengths, two of them in two rows, and a credit for each turn."
    x, y, z = example_group().trajectories
    cut = lambda t, k: dataclasses.replace(t, turns=t.turns[:k])
    edited = lambda t: dataclasses.replace(
        t, turns=[t.turns[0], dataclasses.replace(t.turns[1], context_ids=t.prompt_ids[2:]), *t.turns[2:]])
    layout = pack([Group(x.question, [x, cut(y, 2), edited(z), cut(x, 1), cut(z, 3), y, edited(cut(y, 3)), z])])
    a = torch.randn(layout.ids.shape, generator=torch.Generator().manual_seed(0)) * layout.trained
    return layout, Credit(a, trajectory_weight=torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 0.0, 1.5, 1.0]))


@pytest.mark.parametrize('kind, name', [('gspo', AVERAGES[0]), ('cispo', AVERAGES[0]), *(('ppo', n) for n in AVERAGES[1:])])
def test_the_learners_batch_1_times_8_is_its_batch_8_times_1(eight, kind, name):
    "Whatever fits into one forward, the gradient is that of the loss written out over the whole batch."
    layout, credit = eight
    spec, gradients, losses = Loss(kind, average=name, clip_low=0.02, clip_high=0.02, kl=0.1, entropy=0.01), [], []
    for budget in (1, 3 * layout.ids.shape[1], 10 ** 6):
        learner = Learner(small_model(), spec, Optimiser(minibatches=1, row_tokens=budget),
                          frozen=FrozenModels(small_model(1)), backend=Recorder())
        calls = []
        learner.scorer.register_forward_hook(lambda module, args, out: calls.append(len(args[0])))
        # off policy, so that clips bite
        seen = dataclasses.replace(learner.evaluate(layout, Needs(logp=True, ref_logp=True)), logp=layout.logps - 4.0)
        calls.clear()
        losses.append(learner.step(layout, seen, credit)['loss'])
        gradients.append(learner.backend.gradient)
        assert sum(calls) == 10 and {1: len(calls) == 8, 10 ** 6: len(calls) == 1}.get(budget, 1 < len(calls) < 8)
    model = small_model()
    logp, spread = token_logps(model, layout.ids, layout.trained, entropy=True)
    w = loss_weights(layout.token_turns, layout.row_trajectory, name, credit.trajectory_weight)
    whole = policy_loss(logp, seen.logp, credit.advantages, w, kind, 0.02, 0.02, row_trajectory=layout.row_trajectory) \
        + 0.1 * weighted_sum(kl(logp, seen.ref_logp, mask=layout.trained), w) - 0.01 * weighted_sum(spread, w)
    whole.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    for gradient, loss in zip(gradients, losses):
        assert_close(gradient, expected, atol=2e-5 * expected.abs().max().item(), rtol=1e-3)
        assert math.isclose(loss, whole.item(), rel_tol=1e-4)
