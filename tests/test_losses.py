"""50_losses against TRL's own `_compute_loss`, and its identities."""
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest, torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

from credit_rl.losses import (entropy, kl, overlong_penalty, policy_loss, policy_terms, sequence_log_ratio, value_loss,
                              weighted_sum)

settings.register_profile('credit', deadline=None, max_examples=40)
settings.load_profile('credit')
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


def sequence_mean(mask): return mask / mask.sum(1, keepdim=True) / len(mask)
def token_mean(mask): return mask / mask.sum()


def trl_loss(loss_type, logp, old, ref, advantages, mask, level='token', low=0.2, high=0.2, delta=None, beta=0.0,
             max_length=32):
    "The loss that TRL's trainer computes when the model's log-probabilities are `logp`."
    grpo = pytest.importorskip('trl.trainer.grpo_trainer')
    pytest.importorskip('accelerate')
    trainer = object.__new__(grpo.GRPOTrainer)      # its method, without a model, a tokenizer and a data set
    same = lambda x, *a, **k: x
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (logp, torch.zeros_like(logp), None)
    trainer.model = SimpleNamespace(training=True)
    trainer.args = SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1)
    trainer.accelerator = SimpleNamespace(num_processes=1, gather=same, reduce=same, gather_for_metrics=same,
                                          sync_gradients=True)
    trainer._metrics = {'train': defaultdict(list), 'eval': defaultdict(list)}
    for name, value in dict(loss_type=loss_type, importance_sampling_level=level, epsilon_low=low, epsilon_high=high,
                            beta=beta, top_entropy_quantile=1.0,
                            off_policy_mask_threshold=None, aux_loss_enabled=False, use_vllm=False,
                            vllm_importance_sampling_correction=False,
                            current_gradient_accumulation_steps=1, max_completion_length=max_length,
                            _entropy_bonus_enabled=False,
                            use_adaptive_entropy=False).items(): setattr(trainer, name, value)
    ids = torch.zeros_like(logp, dtype=torch.long)
    inputs = dict(prompt_ids=ids[:, :1], prompt_mask=torch.ones_like(ids[:, :1]), completion_ids=ids,
                  completion_mask=torch.ones_like(ids), tool_mask=mask.long(),
                  advantages=advantages, old_per_token_logps=old, ref_per_token_logps=ref, num_items_in_batch=mask.sum())
    return trainer._compute_loss(trainer.model, inputs)


def agree(ours, theirs, logp):
    "Both losses and their gradients are the same."
    x, y = logp.clone().requires_grad_(), logp.clone().requires_grad_()
    a, b = ours(x), theirs(y)
    assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert_close(torch.autograd.grad(a, x)[0], torch.autograd.grad(b, y)[0], atol=1e-6, rtol=1e-4)


AVERAGES = {'grpo': sequence_mean, 'bnpo': token_mean, 'dapo': token_mean, 'dr_grpo': lambda m: m / (len(m) * 32),
            'luspo': lambda m: m / len(m)}


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('loss_type', AVERAGES)
@pytest.mark.parametrize('clip', [dict(), dict(high=0.28), dict(delta=1.5)], ids=['ppo', 'clip-higher', 'dual-clip'])
def test_ppo_family_is_trl(seed, loss_type, clip):
    logp, old, ref, a, mask = batch(seed)
    kw = dict(clip_high=clip.get('high', 0.2), dual_clip=clip.get('delta'))
    agree(lambda x: policy_loss(x, old, a, AVERAGES[loss_type](mask), 'ppo', **kw),
          lambda x: trl_loss(loss_type, x, old, ref, a, mask, **clip), logp)


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('loss_type', ['grpo', 'bnpo', 'dapo'])
@pytest.mark.parametrize('per_token', [True, False])
def test_gspo_is_trl(seed, loss_type, per_token):
    logp, old, ref, a, mask = batch(seed)
    if not per_token: a = a[:, :1].expand_as(a)
    w = AVERAGES[loss_type](mask)
    theirs = lambda x: trl_loss(loss_type, x, old, ref, a, mask, level='sequence', low=0.05, high=0.05)
    agree(lambda x: policy_loss(x, old, a, w, 'gspo', 0.05, 0.05), theirs, logp)
    if not per_token: agree(lambda x: policy_loss(x, old, a, w, 'gspo-token', 0.05, 0.05), theirs, logp)


@pytest.mark.parametrize('seed', range(3))
def test_cispo_is_trl(seed):
    logp, old, ref, a, mask = batch(seed)                             # TRL clips the upper side only, at an absolute ratio
    agree(lambda x: policy_loss(x, old, a, token_mean(mask), 'cispo', clip_low=1.0, clip_high=0.3),
          lambda x: trl_loss('cispo', x, old, ref, a, mask, high=1.3), logp)


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('loss_type', ['grpo', 'bnpo', 'dr_grpo'])
def test_kl_term_is_trl(seed, loss_type):
    logp, old, ref, a, mask = batch(seed)
    w = AVERAGES[loss_type](mask)
    agree(lambda x: policy_loss(x, old, a, w) + 0.3 * weighted_sum(kl(x, ref, mask=mask), w),
          lambda x: trl_loss(loss_type, x, old, ref, a, mask, beta=0.3), logp)


@pytest.mark.parametrize('kind', KINDS)
@given(seed=st.integers(0, 10 ** 6))
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


@pytest.mark.parametrize('kind', KINDS)
def test_micro_batches_sum_to_the_batch(kind):
    logp, old, ref, a, mask = batch(1, rows=8)
    w, owner = token_mean(mask), torch.tensor([0, 0, 1, 2, 2, 2, 3, 3])
    x = logp.clone().requires_grad_()
    policy_loss(x, old, a, w, kind, row_trajectory=owner).backward()
    y = logp.clone().requires_grad_()
    for rows in ([0, 1], [2], [3, 4, 5], [6, 7]):                     # a trajectory's rows stay together
        policy_loss(y[rows], old[rows], a[rows], w[rows], kind, row_trajectory=owner[rows]).backward()
    assert_close(x.grad, y.grad)


@given(st.integers(0, 10 ** 6))
def test_gspo_ratio_is_of_the_trajectory(seed):
    logp, old, _, a, mask = batch(seed, rows=2)
    lay = lambda v: torch.cat([v[0], v[1]])[None]                     # two rows of one trajectory, laid end to end
    for kind in ('gspo', 'gspo-token'):
        two = policy_terms(logp, old, a, mask, kind, row_trajectory=torch.tensor([9, 9]))[0]
        assert_close(lay(two), policy_terms(lay(logp), lay(old), lay(a), lay(mask), kind)[0])
    d = torch.where(mask, logp - old, 0.0)
    assert_close(sequence_log_ratio(d, mask)[:, 0], d.sum(1) / mask.sum(1))


@pytest.mark.parametrize('kind', KINDS)
def test_on_policy_gradient_is_the_advantage(kind):
    logp, _, _, a, mask = batch(0)
    if kind == 'gspo': a = a[:, :1].expand_as(a)
    w = sequence_mean(mask)
    x = logp.clone().requires_grad_()
    policy_loss(x, logp, a, w, kind).backward()
    assert_close(x.grad, -w * a)
    assert not torch.isnan(policy_loss(x, logp, a, torch.zeros_like(w), kind))


def test_gspo_averages_turn_level_credit_away():
    old, w, a = torch.full((1, 4), -1.0), torch.full((1, 4), 0.25), torch.tensor([[1., 1., -1., -1.]])
    for kind, expected in (('gspo', torch.zeros(1, 4)), ('gspo-token', -w * a)):
        x = old.clone().requires_grad_()
        policy_loss(x, old, a, w, kind).backward()
        assert_close(x.grad, expected)


def test_huge_ratios_stay_finite():
    x = torch.tensor([[-0.1, -200.0]], requires_grad=True)
    for kind in KINDS:
        for sign in (1.0, -1.0):
            loss = policy_loss(x, torch.tensor([[-300.0, -0.1]]), torch.full((1, 2), sign), torch.full((1, 2), 0.5), kind)
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
    ok = dict(logp=logp, old_logp=old, advantages=a, weights=w)
    for change, what in ((dict(logp=logp.exp()), 'probabilities'), (dict(old_logp=old.exp()), 'probabilities'),
                         (dict(logp=logp * NAN), 'finite'),
                         (dict(advantages=a * NAN), 'missing trajectory'), (dict(weights=-w), '>= 0'),
                         (dict(weights=w[:, :1]), 'mask'),
                         (dict(kind='grpo'), 'kind'), (dict(dual_clip=0.9), 'dual_clip'),
                         (dict(dual_clip=3.0, kind='cispo'), 'dual_clip'),
                         (dict(clip_low=1.2), 'clip_low'),
                         (dict(kind='gspo', row_trajectory=torch.tensor([0])), 'row_trajectory')):
        with pytest.raises(ValueError, match=what): policy_loss(**{**ok, **change})
    with pytest.raises(ValueError, match='probabilities'): kl(logp, ref.exp())
    with pytest.raises(ValueError, match='k3'): kl(logp, ref, 'k4')
    with pytest.raises(ValueError, match='finite'): value_loss(torch.full_like(w, NAN), a, w)
    with pytest.raises(ValueError, match='buffer'): overlong_penalty(torch.tensor([1]), 10, 11)


@given(st.integers(0, 10 ** 6))
def test_kl_estimators(seed):
    g = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, 9, generator=g, dtype=torch.float64).log_softmax(-1)
    true = (p.exp() * (p - q)).sum()
    mean = {k: (p.exp() * kl(p[None], q[None], k)[0]).sum() for k in ('k1', 'k2', 'k3')}
    assert_close(mean['k1'], true); assert_close(mean['k3'], true)
    assert (kl(p[None], q[None]) >= 0).all() and not kl(p[None], p[None]).any()


def test_statistics():
    logp, old, _, a, mask = batch(3)
    _, stats = policy_terms(logp, old, a, mask)
    ratio = (logp - old).exp()[mask]
    assert_close(stats['ratio'], ratio.mean()); assert stats['tokens'] == mask.sum()
    assert_close(stats['approx_kl'], (ratio - 1 - ratio.log()).mean())
    cut = ((ratio > 1.2) & (a[mask] > 0)) | ((ratio < 0.8) & (a[mask] < 0))
    assert_close(stats['clip_fraction'], cut.float().mean())
    x = logp.clone().requires_grad_()
    policy_loss(x, old, a, mask.float()).backward()
    assert_close((x.grad[mask] == 0).float().mean(), stats['clip_fraction'])


def test_value_loss_and_entropy():
    v, target, old = torch.tensor([[0.5, 0.9, NAN]]), torch.tensor([[1., 1., NAN]]), torch.tensor([[0.2, 0.85, NAN]])
    w = torch.tensor([[0.5, 0.5, 0.]])
    assert_close(value_loss(v, target, w), torch.tensor((0.25 + 0.01) / 4))
    assert_close(value_loss(v, target, w, old, 0.1),
                 torch.tensor((0.49 + 0.01) / 4))       # .5 counts as .3; .9 is within the step
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    assert_close(entropy(logits), torch.distributions.Categorical(logits=logits).entropy())
    assert overlong_penalty(torch.tensor([0, 60, 75, 100, 999]), 100, 40).tolist() == [0, 0, -0.375, -1, -1]
