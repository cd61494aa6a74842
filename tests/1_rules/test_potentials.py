"""Properties of 31_potentials: answer potential, bridging, shaping, history-max, α, the cost of scoring."""
import dataclasses, math

import pandas as pd
import pytest, torch
from hypothesis import given, strategies as st
from torch.testing import assert_close

from credit_rl.potentials import (AlphaController, MODEL_SHAPES, REWARD_BANDS, answer_potential, bridge, history_max,
                                  mean_abs_reward, shaping_rewards)

NAN = math.nan
logps = st.floats(-30, 0, width=32)


@st.composite
def states(draw, gaps=True):
    "phi (N, K+1) float64 with NaN where nothing is known, turn_mask (N, K); `gaps`: missing states inside."
    turns = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    width = max(turns)
    known = st.one_of(logps, st.just(NAN)) if gaps else logps
    rows = [draw(st.lists(known, min_size=k + 1, max_size=k + 1)) + [NAN] * (width - k) for k in turns]
    return torch.tensor(rows, dtype=torch.float64), torch.arange(width) < torch.tensor(turns)[:, None]


def own(x, mask):
    "A trajectory's own values as lists of floats: N lists of K_i + (columns of x − columns of mask)."
    more = x.shape[1] - mask.shape[1]
    return [row[:int(m.sum()) + more].tolist() for row, m in zip(x, mask)]


@given(st.lists(st.lists(logps, min_size=3, max_size=3), min_size=1, max_size=4), st.permutations([0, 1, 2]),
       st.integers(1, 3))
def test_the_potential_is_the_log_of_the_summed_probabilities(rows, order, golds):
    x, mask = torch.tensor(rows, dtype=torch.float64), torch.arange(3) < golds
    mask = mask.expand(len(rows), 3)
    # in padded golds anything may stand
    junk = torch.where(mask, x, torch.tensor([NAN, 7.0, -math.inf], dtype=torch.float64))
    for row, phi, mean in zip(rows, answer_potential(junk, mask), answer_potential(junk, mask, 'mean')):
        assert math.isclose(phi, math.log(math.fsum(math.exp(v) for v in row[:golds])), rel_tol=1e-9, abs_tol=1e-9)
        assert math.isclose(mean, math.fsum(row[:golds]) / golds, rel_tol=1e-9, abs_tol=1e-9)
        assert mean <= phi + 1e-9 and max(row[:golds]) <= phi + 1e-9 <= max(row[:golds]) + math.log(golds) + 2e-9
    assert_close(answer_potential(junk[:, order], mask[:, order]), answer_potential(junk, mask), atol=1e-12, rtol=1e-12)


def test_types_come_back_and_statistics_are_wide():
    exact = torch.tensor([[-700 + math.log1p(math.exp(-1)), math.log(math.exp(-0.5) + math.exp(-3)), -2 + math.log(2)]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):  # exp(−700) is 0 in every narrow type
        phi = answer_potential(torch.tensor([[[-700.0, -701.0], [-0.5, -3.0], [-2.0, -2.0]]]).to(dtype))
        assert_close(phi.float(), exact, rtol=0.01, atol=0.01)
        for out in (phi, shaping_rewards(phi, mask, 0.1), history_max(phi, mask), bridge(phi, mask)):
            assert out.dtype == dtype


def test_the_potential_refuses():
    some = -torch.ones(2, 3)
    for bad, message in ((dict(logps=torch.tensor([[0.3, 0.9]])), 'probabilities'),
                         (dict(logps=torch.tensor([[-3, -1]])), 'floats'), (dict(logps=torch.tensor(-1.0)), 'floats'),
                         (dict(logps=torch.zeros(2, 0)), 'no gold'), (dict(logps=some, gold_mask=some > 0), 'no gold'),
                         (dict(logps=-torch.ones(2, 2, 3), gold_mask=some < 0), 'as many axes'),
                         (dict(logps=some, reduce='max'), "'mean'")):
        with pytest.raises(ValueError, match=message): answer_potential(**bad)
    assert_close(answer_potential(torch.tensor([[1e-6]])), torch.tensor([1e-6]))      # rounding is no probability


@given(states())
def test_bridging_is_filling_forward(batch):
    phi, mask = batch
    out = bridge(phi, mask)
    filled = pd.DataFrame(phi.numpy()).ffill(axis=1).to_numpy()  # pandas' own rule
    for i, (row, got) in enumerate(zip(own(phi, mask), own(out, mask))):
        k = len(row)
        expected = [NAN] * k if math.isnan(row[0]) else filled[i, :k].tolist()
        assert_close(torch.tensor(got), torch.tensor(expected), equal_nan=True)
        assert out[i, k:].isnan().all()


def test_bridging_refuses():
    all3 = torch.ones(1, 3, dtype=torch.bool)
    for x, mask in ((torch.zeros(1, 3), all3), (torch.zeros(1, 4), all3.float()), (torch.zeros(1, 4).long(), all3),
                    (torch.zeros(1, 4), all3[0]), (torch.zeros(1, 4), torch.tensor([[True, False, True]])),
                    (torch.zeros(1, 4), ~all3), (torch.tensor([[-1.0, -math.inf, -1.0, -1.0]]), all3)):
        for rule in (bridge, lambda *given: shaping_rewards(*given, 0.1), history_max):
            with pytest.raises(ValueError): rule(x, mask)


@given(states(), st.floats(0, 2))
def test_shaping_sums_to_the_potential_of_the_prompt(batch, alpha):
    phi, mask = batch
    zero = shaping_rewards(phi, mask, alpha)
    assert not zero[~mask].any()
    for row, r in zip(own(phi, mask), own(zero, mask)):
        if math.isnan(row[0]): assert all(map(math.isnan, r))
        else: assert math.isclose(sum(r), -alpha * row[0], abs_tol=1e-8)
    ends = phi.gather(1, mask.sum(1, keepdim=True))
    if not ends.isnan().all():
        teacher, bridged = shaping_rewards(phi, mask, alpha, terminal='teacher'), bridge(phi, mask)
        last = bridged.gather(1, mask.sum(1, keepdim=True))[:, 0]
        assert_close(teacher.sum(1), alpha * (last - phi[:, 0]), atol=1e-8, rtol=0, equal_nan=True)


@given(states(), st.sampled_from([NAN, 0.0, 1e6, -math.inf]), st.integers(0, 2))
def test_padding_and_the_unread_end_are_never_read(batch, junk, more):
    phi, mask = batch
    turns = mask.sum(1, keepdim=True)
    dirty = torch.where(torch.arange(phi.shape[1]) > turns, junk, phi)
    wide = torch.nn.functional.pad(dirty, (0, more), value=junk)
    wide_mask = torch.nn.functional.pad(mask, (0, more))
    rules = [lambda x, m: shaping_rewards(x, m, 0.3), history_max]
    if not phi.gather(1, turns).isnan().all(): rules.append(lambda x, m: shaping_rewards(x, m, 0.3, 'teacher'))
    for rule in rules:
        out = rule(wide, wide_mask)
        assert_close(out[:, :mask.shape[1]], rule(phi, mask), equal_nan=True)
        assert not out[:, mask.shape[1]:].any()
    for rule in rules[:2]:  # S_K_i is read by 'teacher' alone
        assert_close(rule(phi.scatter(1, turns, junk), mask), rule(phi, mask), equal_nan=True)


def test_shaping_refuses():
    phi, mask = torch.tensor([[-1.0, -2.0, NAN]]), torch.ones(1, 2, dtype=torch.bool)
    for bad in ((-0.1,), (NAN,), (math.inf,), (0.1, 'none'), (0.1, 'teacher')):
        with pytest.raises(ValueError): shaping_rewards(phi, mask, *bad)


@given(states())
def test_history_max_is_the_record_so_far(batch):
    phi, mask = batch
    out = history_max(phi, mask)
    assert not out[~mask].any()
    for row, got in zip(own(phi, mask), own(out, mask)):
        if math.isnan(row[0]):
            assert all(map(math.isnan, got))
            continue
        seen, expected = [row[0]], []
        for v in row[1:-1]:
            record = max(seen)
            if not math.isnan(v): seen.append(v)
            expected.append(max(0.0, max(seen) - record))
        assert got == pytest.approx(expected + [0.0], abs=1e-9)


def test_the_refund_is_not_what_alpha_is_sized_by():
    """Appendix D's pilot and band are about what a search earns. The last turn's refund −αΦ(S_{K−1}) is left out, in
    trajectories of any length, unless it is asked for; where nothing comes before the last turn nothing is measured."""
    phi = torch.tensor([[-9., -8., -6., NAN], [-9., -8.5, NAN, NAN], [-9., NAN, NAN, NAN]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    shaping = shaping_rewards(phi, mask, .1)
    assert math.isclose(mean_abs_reward(shaping, mask), .1 * (1 + 2 + .5) / 3)
    assert math.isclose(mean_abs_reward(shaping, mask, refund=True), .1 * (1 + 2 + 6 + .5 + 8.5 + 9) / 6)
    assert math.isnan(mean_abs_reward(shaping[2:, :1], mask[2:, :1]))


@given(st.lists(st.floats(0.01, 20), min_size=1, max_size=30))
def test_the_running_mean_stays_in_the_band_and_state_can_be_restored(signal):
    c = AlphaController(*REWARD_BANDS['medium'], alpha_max=1e6)
    mean = signal[0]
    for i, nats in enumerate(signal):
        mean = mean if i == 0 else 0.9 * mean + 0.1 * nats
        c.update(c.alpha * nats)
        c = AlphaController(**dataclasses.asdict(c))
        assert math.isclose(c.mean, mean, rel_tol=1e-9) and 0.05 - 1e-9 <= c.alpha * c.mean <= 0.3 + 1e-9


def test_the_controller_ignores_what_was_not_measured_and_refuses_nonsense():
    c = AlphaController(alpha=0.2)
    assert c.update(NAN) == 0.2 and c.mean is None
    assert c.update(0.0) == 0.2  # belief that does not move: nothing to divide by
    assert c.update(1e-9) <= c.alpha_max
    for bad in (-0.1, math.inf):
        with pytest.raises(ValueError): c.update(bad)
    for bad in (dict(low=0.3, high=0.05), dict(low=0.0), dict(alpha=0.0), dict(alpha=11.0), dict(decay=1.0)):
        with pytest.raises(ValueError): AlphaController(**bad)


def test_dense_parameters_are_those_of_the_real_architectures():
    "The matrices of transformers' own models, built without memory."
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
    for name, config, model, heads in (('Qwen2.5-3B', Qwen2Config, Qwen2ForCausalLM, 16),
                                       ('Qwen3-4B', Qwen3Config, Qwen3ForCausalLM, 32),
                                       ('Llama-3-8B', LlamaConfig, LlamaForCausalLM, 32)):
        s = dataclasses.replace(MODEL_SHAPES[name], layers=2)
        with torch.device('meta'):
            real = model(config(vocab_size=s.vocab, hidden_size=s.hidden, intermediate_size=s.intermediate,
                                num_hidden_layers=s.layers, num_attention_heads=heads, num_key_value_heads=s.kv // 128,
                                head_dim=128, tie_word_embeddings=False))
        assert s.dense == sum(p.numel() for p in real.parameters() if p.ndim == 2), name
