"LLDS: the term against a loop over tokens, and what a method brings of it."
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

from credit_rl.llds import likelihood_falls
from credit_rl.methods import compose


def by_loop(logp, old, a, trained, actions):
    "The definition, token by token."
    out = torch.zeros_like(logp)
    cells = [(i, j) for i in range(len(logp)) for j in range(logp.shape[1]) if trained[i, j]]
    for i, j in cells:
        same = [(p, q) for p, q in cells if actions[p, q] == actions[i, j]]
        fell = sum(float(old[p, q] - logp[p, q]) for p, q in same)
        if fell > 1e-6 and a[i, j] >= 0: out[i, j] = max(0., float(old[i, j] - logp[i, j]))
    return out


@settings(max_examples=60)
@given(st.integers(0, 10 ** 6))
def test_the_term_is_its_definition(seed):
    g = torch.Generator().manual_seed(seed)
    logp, old = (-torch.rand(3, 7, generator=g) * 3 for _ in range(2))
    a = torch.randint(-1, 2, (3, 7), generator=g).float()
    trained = torch.rand(3, 7, generator=g) < .7
    actions = torch.where(trained, torch.randint(0, 5, (3, 7), generator=g), -1)
    assert_close(likelihood_falls(logp, old, a, trained, actions), by_loop(logp, old, a, trained, actions))


def test_a_method_brings_the_term_and_settings_refuse_what_it_is_not():
    assert compose('outcome/group/all/llds').loss.llds == .1
    from credit_rl.settings import make_config
    from credit_rl.methods import get_method
    s = make_config({'model': 'data/tiny_base', 'loss': {'llds': .3, 'llds_gate': 'response'}})
    loss = s.loss_of(get_method('tspo'))
    assert (loss.llds, loss.llds_gate) == (.3, 'response')
    for wrong in ({'llds': -1.}, {'llds_gate': 'token'}):
        with pytest.raises(ValueError): make_config({'loss': wrong}).loss_of(get_method('tspo'))
