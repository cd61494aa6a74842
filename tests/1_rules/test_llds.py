"LLDS: the term against a loop over tokens, its gates, and what it does to a learner's update."
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

from credit_rl.layout import pack
from credit_rl.learner import Learner, Optimiser
from credit_rl.llds import likelihood_falls
from credit_rl.methods import compose
from credit_rl.parts import Credit, Loss
from credit_rl.trajectory import example_group
from random_models import small_qwen


def by_loop(logp, old, a, trained, actions):
    "The definition, token by token."
    out = torch.zeros_like(logp)
    cells = [(i, j) for i in range(len(logp)) for j in range(logp.shape[1]) if trained[i, j]]
    for i, j in cells:
        same = [(p, q) for p, q in cells if actions[p, q] == actions[i, j]]
        fell = sum(float(old[p, q] - logp[p, q]) for p, q in same)
        if fell > 1e-6 and a[i, j] >= 0: out[i, j] = max(0., float(old[i, j] - logp[i, j]))
    return out


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10 ** 6))
def test_the_term_is_its_definition(seed):
    g = torch.Generator().manual_seed(seed)
    logp, old = (-torch.rand(3, 7, generator=g) * 3 for _ in range(2))
    a = torch.randint(-1, 2, (3, 7), generator=g).float()
    trained = torch.rand(3, 7, generator=g) < .7
    actions = torch.where(trained, torch.randint(0, 5, (3, 7), generator=g), -1)
    assert_close(likelihood_falls(logp, old, a, trained, actions), by_loop(logp, old, a, trained, actions))


def learner_of(loss):
    model = small_qwen(80, 3, hidden_size=16, intermediate_size=16, num_hidden_layers=1, max_position_embeddings=256)
    return Learner(model, loss, Optimiser(learning_rate=3e-3, minibatches=1, epochs=4), seed=1)


def course(**loss):
    "Fall of the praised rollout's tokens over four updates on one batch, and the log of the step."
    learner, layout = learner_of(Loss(average='token-mean', **loss)), pack([example_group()])
    seen = learner.evaluate(layout)
    sign = torch.tensor([1., -2., -2.])[layout.row_trajectory]
    log = learner.step(layout, seen, Credit(torch.where(layout.trained, sign[:, None], 0.)))
    after = learner.evaluate(layout).logp
    good = layout.trained & (layout.row_trajectory == 0)[:, None]
    return (seen.logp - after)[good].clamp(min=0).sum().item(), log


def test_a_learner_loses_less_of_what_is_praised():
    "Rollouts that share words: blame for two takes the third along, less with the term."
    plain, log = course()
    kept, logged = course(llds=2.)
    assert plain > 0 and kept < .9 * plain and 'falls' not in log and logged['falls'] > 0


def test_one_update_is_not_changed():
    layout, weights = pack([example_group()]), []
    for llds in (0., 5.):
        learner = learner_of(Loss(llds=llds))
        learner.optimiser = Optimiser(learning_rate=3e-3, minibatches=1)
        credit = Credit(torch.where(layout.trained, torch.tensor([1., -1., 0.])[layout.row_trajectory][:, None], 0.))
        learner.step(layout, learner.evaluate(layout), credit)
        weights.append(torch.cat([p.detach().flatten() for p in learner.scorer.model.parameters()]))
    assert_close(*weights, atol=1e-6, rtol=0)


def test_the_gate_of_a_response_counts_where_an_action_rose():
    "A rollout falls as a whole, one of its turns rises: with the gate for actions that turn does not count."
    logp, old = torch.tensor([[-3., -3., -.9, -1.2]]), torch.full((1, 4), -1.)
    on, a = torch.ones(1, 4, dtype=torch.bool), torch.ones(1, 4)
    turns = torch.tensor([[0, 0, 1, 1]])
    assert likelihood_falls(logp, old, a, on, 0 * turns)[0, 3] > 0
    assert_close(likelihood_falls(logp, old, a, on, turns)[0, 3], torch.tensor(.2))     # fell by .1 in all: counts
    risen = torch.tensor([[-3., -3., -.7, -1.2]])
    assert likelihood_falls(risen, old, a, on, turns)[0, 2:].tolist() == [0, 0]


def test_a_method_brings_the_term_and_settings_refuse_what_it_is_not():
    assert compose('outcome/group/all/llds').loss.llds == .1
    from credit_rl.settings import make_config
    from credit_rl.methods import get_method
    s = make_config({'model': 'data/tiny_base', 'loss': {'llds': .3, 'llds_gate': 'response'}})
    loss = s.loss_of(get_method('tspo'))
    assert (loss.llds, loss.llds_gate) == (.3, 'response')
    for wrong in ({'llds': -1.}, {'llds_gate': 'token'}):
        with pytest.raises(ValueError): make_config({'loss': wrong}).loss_of(get_method('tspo'))
