"""Properties of 33_information_gain: gains telescope, comparisons stay inside their cells, the released variant is
what was released."""
import dataclasses, math, statistics

import pytest, torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

from credit_rl.engine import HFEngine, SamplingParams
from credit_rl.tspo import first_turns
from credit_rl.information_gain import (NORMS, belief_check, belief_warning, best_gold_logp, first_answer,
                                        gold_entropy, has_answer, igpo_advantages, information_gain, set_f1,
                                        shown_states, with_outcome)
from credit_rl.layout import pack, take
from credit_rl.models import load_model
from credit_rl.parts import Measured
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.rollout import rollout
from credit_rl.scoring import acting_states, answer_header, answer_logps, gold_templates
from credit_rl.tiny import tiny_environment
from credit_rl.trajectory import Group, example_group
from credit_rl.world import make_world
from credit_batches import NAN, batches

logps = st.floats(-8, -1 / 128, width=32)
numbers = st.one_of(st.sampled_from([0.0, 0.5, 1.0, -1.0]), st.floats(-2, 2, width=32))


@st.composite
def beliefs(draw, missing=True):
    "answer_logp (N, K+1) float64 with NaN padding and, with `missing`, failed states; turn_mask."
    _, mask, _ = draw(batches())
    own = torch.nn.functional.pad(mask, (1, 0), value=True)
    value = st.one_of(logps, st.just(NAN)) if missing else logps
    return torch.tensor([[draw(value) if there else NAN for there in row] for row in own.tolist()],
                        dtype=torch.float64), mask


def cells_of(mask, groups, norm):
    "Lists of (i, k) that are compared with one another, slowly."
    cells = {}
    for i, k in mask.nonzero().tolist():
        last = k == int(mask[i].sum()) - 1
        kind = {'joint': 0, 'separate': last, 'pooled': last, 'per-turn': 'end' if last else k}[norm]
        cells.setdefault((groups[i].item(), kind), []).append((i, k))
    return list(cells.values())


def slow_igpo(x, mask, groups, gamma, norm, ddof, eps, variant, parts):
    "IGPO by Python's statistics; the released variant at the level of tokens, two to a turn, the reward on the second."
    n, width = x.shape
    out = torch.zeros(n, width, dtype=torch.float64)
    end = mask.sum(1).tolist()
    for cell in cells_of(mask, groups, norm):
        for w in list(cell):
            is_last = w[1] == end[w[0]] - 1
            if parts != 'both' and is_last != (parts == 'outcome'): cell.remove(w)
            elif variant == 'released' and not is_last and x[w] == 0: cell.remove(w)
        values = [x[w].item() for w in cell]
        if len(values) < 2 or max(values) == min(values): continue
        mean, var = statistics.fmean(values), (statistics.variance if ddof else statistics.pvariance)(values)
        scale = (math.sqrt(var + 1e-8) if variant == 'released' else math.sqrt(var)) + eps
        for w in cell: out[w] = (x[w] - mean) / scale
    y = torch.zeros_like(out)
    for i in range(n):
        if variant == 'paper':
            for k in range(end[i]): y[i, k] = sum(gamma ** (j - k) * out[i, j] for j in range(k, end[i]))
            continue
        tokens = [0.0 if t % 2 == 0 else out[i, t // 2].item() for t in range(2 * end[i])]
        advantage, ends, later = [0.0] * len(tokens), [t for t, r in enumerate(tokens) if r != 0], 0.0
        for t in ends[::-1]:
            later = tokens[t] + gamma * later
            start = max([e + 1 for e in ends if e < t], default=0)
            advantage[start:t + 1] = [later] * (t + 1 - start)
        for k in range(end[i]): y[i, k] = advantage[2 * k]
    return y


@given(st.data())
def test_the_best_gold_counts_at_each_state(data):
    n, s, m = (data.draw(st.integers(1, 3)) for _ in range(3))
    filled = lambda value, *shape: torch.tensor([data.draw(value) for _ in range(math.prod(shape))]).view(shape)
    sums, tokens = filled(st.one_of(logps, st.just(NAN)), n, s, m), filled(st.integers(1, 5), m)
    exists = filled(st.booleans(), n, 1, m).expand(n, s, m).clone()
    exists[..., 0] = True
    best = best_gold_logp(sums, tokens, exists)
    for i in range(n):
        for j in range(s):
            means = [(sums[i, j, g] / tokens[g]).item() for g in range(m) if exists[i, j, g]]
            expected = NAN if any(map(math.isnan, means)) else max(means)
            assert_close(best[i, j], torch.tensor(expected), equal_nan=True)


def test_bad_golds_are_refused():
    sums, one = torch.tensor([[-1.0, -2.0]]), torch.tensor([1, 1])
    square = torch.full((2, 2, 2), -1.0)  # a mask (N, M) would silently be read as (states, M)
    for given, said in (((sums, torch.tensor([1, 0])), 'tokens'), ((-sums, one), r'log\(\)'), ((sums.long(), one), 'floats'),
                        ((sums, one, torch.tensor([False, False])), 'golds'),
                        ((square, one, torch.ones(2, 2, dtype=torch.bool)), 'axes')):
        with pytest.raises(ValueError, match=said): best_gold_logp(*given)


@given(beliefs(), st.sampled_from(['prob', 'logprob']))
def test_gains_telescope_over_missing_states(batch, mode):
    x, mask = batch
    gains = information_gain(x, mask, mode)
    value = x.exp() if mode == 'prob' else x
    for i, n in enumerate(mask.sum(1).tolist()):
        own = [v for v in value[i, :n + 1].tolist() if not math.isnan(v)]
        if math.isnan(value[i, 0]): assert gains[i, :n].isnan().all()
        else:
            assert math.isclose(gains[i, :n].sum(), own[-1] - own[0], rel_tol=1e-9, abs_tol=1e-9)
            before = own[0]
            for k in range(n):
                now = value[i, k + 1].item()
                assert math.isclose(gains[i, k], 0.0 if math.isnan(now) else now - before, rel_tol=1e-9, abs_tol=1e-9)
                before = before if math.isnan(now) else now
    assert (gains[~mask] == 0).all()


@given(beliefs(missing=False), st.sampled_from([NAN, 0.5, -math.inf]))
def test_padding_is_never_read(batch, garbage):
    x, mask = batch
    own = torch.nn.functional.pad(mask, (1, 0), value=True)
    wide = torch.nn.functional.pad(torch.where(own, x, garbage), (0, 2), value=garbage)
    wide_mask = torch.nn.functional.pad(mask, (0, 2))
    for mode in ('prob', 'logprob'):
        assert torch.equal(information_gain(wide, wide_mask, mode)[:, :mask.shape[1]], information_gain(x, mask, mode))
    assert torch.equal(gold_entropy(wide, wide_mask), gold_entropy(x, mask))


def test_gain_is_small_print():
    x = torch.tensor([[-3.0, -1.0, -2.0]], requires_grad=True)
    assert not information_gain(x).requires_grad and not gold_entropy(x, torch.tensor([[True, True]])).requires_grad
    assert_close(information_gain(x), torch.tensor([[math.exp(-1) - math.exp(-3), math.exp(-2) - math.exp(-1)]]))
    low = information_gain(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert_close(low, information_gain(x.bfloat16().float()).bfloat16())
    never = torch.tensor([[-3.0, -math.inf, -2.0]])  # probability 0 is a measurement, its logarithm is not
    assert_close(information_gain(never), torch.tensor([[-math.exp(-3), math.exp(-2)]]))
    with pytest.raises(ValueError, match='infinite'): information_gain(never, mode='logprob')


def test_probabilities_are_refused():
    mask = torch.tensor([[True, True]])
    for values in ([0.2, 0.5, 0.9], [1e-5, 2e-5, 3e-5], [-1.0, 0.3, -2.0]):
        x = torch.tensor([values])
        for call in (lambda: information_gain(x), lambda: gold_entropy(x, mask)):
            with pytest.raises(ValueError, match=r'log\(\)'): call()
    with pytest.raises(ValueError, match='mode'): information_gain(-x.abs(), mode='log')
    with pytest.raises(ValueError, match=r'\(N, K\+1\)'): information_gain(x[0])
    with pytest.raises(ValueError, match='turn_mask'): information_gain(-x.abs(), torch.tensor([[True, True, True]]))
    assert information_gain(torch.zeros(1, 3)).tolist() == [[0, 0]]  # certain everywhere is possible, and gains nothing


@given(batches(numbers), st.data())
def test_the_outcome_takes_the_last_turn(batch, data):
    gains, mask, _ = batch
    drawn = lambda value: torch.tensor([data.draw(value) for _ in gains])
    answered, gone = drawn(st.booleans()), drawn(st.booleans())
    outcome = drawn(st.one_of(st.floats(0, 1, width=32), st.just(NAN))).double()
    out = with_outcome(torch.where(gone[:, None], NAN, gains), outcome, mask, answered, penalty=-0.5)
    for i, k in enumerate(mask.sum(1).tolist()):
        end = outcome[i].item() if answered[i] else -0.5
        missing = math.isnan(end) or (gone[i] and k > 1)                 # a rollout that answers at once needs no gain
        expected = [NAN] * k if missing else gains[i, :k - 1].tolist() + [end]
        assert_close(out[i, :k], torch.tensor(expected, dtype=torch.float64), equal_nan=True)
    assert (out[~mask] == 0).all()


def test_with_outcome_refuses():
    gains, mask, outcome = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.tensor([1., 0.])
    holed = torch.tensor([[NAN, 0., 0.], [0., 0., 0.]])
    for bad, said in ((dict(penalty=2.0), '<= 0'), (dict(penalty=NAN), '<= 0'), (dict(outcome=outcome[:1]), 'outcome'),
                      (dict(answered=torch.tensor([1, 0])), 'answered'), (dict(gains=holed), 'bridge')):
        with pytest.raises(ValueError, match=said):
            with_outcome(**{**dict(gains=gains, outcome=outcome, turn_mask=mask), **bad})
    assert has_answer([example_group()]).tolist() == [True] * 3


@settings(max_examples=100)
@given(batches(numbers), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(NORMS), st.sampled_from([0, 1]),
       st.sampled_from(['paper', 'released']),
       st.sampled_from(['both', 'gain', 'outcome']))
def test_igpo_is_the_slow_reference(batch, gamma, norm, ddof, variant, parts):
    x, mask, groups = batch
    out = igpo_advantages(x, mask, groups, gamma, norm, ddof, 1e-6, variant, parts)
    assert_close(out, slow_igpo(x, mask, groups, gamma, norm, ddof, 1e-6, variant, parts), atol=1e-6, rtol=1e-6)


def test_igpo_refuses():
    x, mask, groups = torch.randn(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 0])
    for wrong in (dict(norm='turn'), dict(variant='first'), dict(parts='f1'), dict(gamma=1.5), dict(ddof=2),
                  dict(groups=torch.tensor([0, 1])), dict(rewards=torch.tensor([[NAN, 0., 0.], [0., 0., 0.]])),
                  dict(rewards=x / 0), dict(turn_mask=mask.float()),
                  dict(turn_mask=torch.tensor([[True, False, True], [True] * 3]))):
        with pytest.raises(ValueError): igpo_advantages(**{**dict(rewards=x, turn_mask=mask, groups=groups), **wrong})


@given(st.lists(st.sampled_from('the a Rome rome Who York, new'.split()), max_size=6),
       st.lists(st.sampled_from('the a Rome Who York new'.split()), min_size=1, max_size=4))
def test_set_f1_is_scikit_learns_f1_of_word_indicators(said, gold):
    metrics = pytest.importorskip('sklearn.metrics')
    words = 'the a rome who york new'.split()
    has = lambda text: [w in {x.strip(',').lower() for x in text} for w in words]
    expected = metrics.f1_score(has(gold), has(said), zero_division=0.0)
    assert math.isclose(set_f1(' '.join(said), [' '.join(gold)]), expected)
    assert set_f1(' '.join(said), [' '.join(gold), 'nothing']) >= expected


def test_first_answer_is_the_first():
    assert first_answer('<answer>two\nlines</answer><answer>b</answer>') == 'two\nlines'
    assert first_answer('<answer>a') is None and set_f1(None, ['a']) == 0
    with pytest.raises(TypeError, match='list'): set_f1('a', 'a')


def scored(beliefs):
    "`Measured` with these beliefs (N, K+1) in one gold of one token."
    logp = torch.as_tensor(beliefs).log()[..., None]
    return Measured(gold_logp=logp, gold_tokens=torch.ones_like(logp, dtype=torch.long))


def test_belief_is_compared_at_states_that_were_shown_the_gold_and_others():
    "By hand: S_2 and S_3 of two rollouts were shown Budapest; the end and a state that was not scored do not count."
    group = example_group()
    assert first_turns([group]).tolist() == [1, 1, -1]
    beliefs = [[.1, .2, .6, .3, .9], [.1, NAN, .2, .4, .9], [.1, .1, .1, .5, .9]]
    found = belief_check(scored(beliefs), pack([group]), [group])
    assert (found['belief_shown_states'], found['belief_unshown_states']) == (4, 7)
    assert found['belief_shown'] == pytest.approx((.6 + .3 + .2 + .4) / 4)
    assert found['belief_unshown'] == pytest.approx((.1 + .2 + .1 + .1 + .1 + .1 + .5) / 7)
    # of 28 pairs the shown .6 wins 7, .3 and .4 each 6, and .2 five and a half
    assert found['belief_auc'] == pytest.approx((7 + 6 + 6 + 5.5) / 28) and belief_warning(found) == ''


def test_belief_is_compared_where_the_longest_rollout_was_left_out():
    "As by DAPO: the batch keeps its columns, and what is left has fewer turns."
    group = example_group()
    longer = dataclasses.replace(group.trajectories[0], turns=[*group.trajectories[0].turns[:1], *group.trajectories[0].turns])
    whole = pack([group, Group(group.question, [longer, longer])])
    left = take(whole, torch.arange(3))
    beliefs = torch.rand(3, left.states.shape[1], generator=torch.Generator().manual_seed(0))
    assert left.turn_mask.shape[1] > max(len(t.turns) for t in group.trajectories)
    assert belief_check(scored(beliefs), left, [group]) == belief_check(scored(beliefs[:, :5]), pack([group]), [group])


def test_what_a_note_has_lost_is_not_shown_any_more():
    "By hand: a call shows Budapest (S_1), its note keeps it (S_2) or not; the model's own words show nothing."
    group = example_group()
    first = group.trajectories[0]
    turn = dataclasses.replace(first.turns[0], observation_text='Curtiz was born in Budapest .')
    last = dataclasses.replace(first.turns[-1], action_text='Budapest', observation_text='')
    def played(note):
        noted = dataclasses.replace(turn, kind='assimilate', action_text=note, observation_text='')
        asks = dataclasses.replace(turn, action_text='Budapest ?')
        return dataclasses.replace(first, turns=[asks, noted, last, last])
    both = Group(group.question, [played('born in Budapest'), played('nothing')])
    assert shown_states([both]).tolist() == [[False, True, True, True], [False, True, False, False]]


def test_answers_that_nothing_can_show_are_no_states_of_either_kind():
    group = example_group()
    yes = dataclasses.replace(group, question=dataclasses.replace(group.question, answers=['yes']))
    said = belief_check(scored(torch.full((3, 5), .1)), pack([yes]), [yes])
    assert said['belief_shown_states'] == said['belief_unshown_states'] == 0 and math.isnan(said['belief_unshown'])


def test_a_belief_that_is_none_is_warned_about():
    for auc, shown, warned in ((.81, .06, False), (.79, .5, True), (.99, .04, True), (NAN, NAN, False), (.8, .05, False)):
        said = belief_warning({'belief_auc': auc, 'belief_shown': shown, 'belief_unshown': .01, 'belief_shown_states': 7,
                               'belief_unshown_states': 9})
        assert bool(said) == warned == ('gold_schema' in said) == ('7 states' in said)


def test_a_small_base_of_notes_believes_in_its_own_words(root):
    "CARL's, whose outputs are replaced by notes that may lose what they showed."
    model, words = load_model(str(root / 'data' / 'tiny_carl'))
    chat, world = Chat(PROTOCOLS['carl-tiny-forced'], words), make_world('dev', 5, size=200, questions=30)
    groups = rollout(HFEngine(model, words), tiny_environment(world, chat, max_turns=9), world.questions, 2,
                     SamplingParams(max_tokens=24))
    layout = pack(groups, prefix=len(chat.encode(answer_header(chat))))
    scores = answer_logps(model, (layout.ids, layout.lengths), acting_states(layout.states, layout.turn_mask),
                          gold_templates(chat, groups))
    found = belief_check(Measured(gold_logp=scores.sums, gold_tokens=scores.tokens), layout, groups)
    assert found['belief_auc'] > .9 and found['belief_shown'] > .3 and found['belief_shown_states'] > 20
