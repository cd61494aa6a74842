"67_lab: identities that hold exactly where all groups can be listed, the fit of censored steps, and going on."
import dataclasses
import functools
import json
import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch.testing import assert_close

from credit_rl.studies import lab
from credit_rl.studies.games import (action_chances, asking, chain, earnings_before, game_values, group_moves,
                                     many_parts, near_miss, repair, searches, silent, stopping)
from credit_rl.groups import group_normalize, index_groups
from credit_rl.studies.lab import (FORETOLD, TRIALS, LabChoice, Pupils, all_groups, belief_noise, beliefs_of, best_rate,
                                   censored_mean, chart_figure, estimate_of, exact_estimate, get_contender, histories,
                                   lab_table, learn, map_page, move_weights, read_learned, run_lab, sampled_estimate,
                                   step_ratio, true_gradient, turn_gradients, turn_weights, unit_rate, foretell_lab)
from credit_rl.methods import compose
from credit_rl.potentials import shaping_rewards
from credit_rl.runlog import RunLog
from credit_rl.significance import welch
from credit_rl.trajectory import example_group, to_json

TINY = 3, 4, 3
MISSES = functools.partial(near_miss, .1, .5, TINY, 2)
ROOT = Path(__file__).resolve().parents[2]
seeded = lambda: torch.Generator().manual_seed(0)


def listed(game, question=0, size=3):
    "All groups of attempts at a question: policies' chances, moves, values, chances of the groups."
    pi = action_chances(game, game.base[None])
    moves, chances = all_groups(game, pi, question, size)
    wide = pi.expand(len(chances), -1, -1)
    return wide, moves, game_values(game, wide), chances


def credit_of(name, game, size=3, **options):
    "Weights of all turns, in all groups of a question: (M, size, K)."
    contender, (pi, moves, values, _) = get_contender(name, game.metric, **options), listed(game, size=size)
    pupils = Pupils(game, contender, len(pi), seeded())
    earned, _ = earnings_before(game, moves)
    shown, _ = pupils.show(pi, values, moves, earned)
    return pupils.credit(pi, moves, shown, size)[0].view(len(pi), size, -1)


# ---- what is exact ----

@pytest.mark.parametrize('game', [lambda: many_parts(2, TINY, 2, lean=.5), lambda: chain(2, .2, TINY, 2), MISSES,
                                  lambda: asking((2, 4, 3), 1)], ids=['parts', 'chain', 'near miss', 'asking'])
def test_expectations_are_the_gradient(game):
    "True credit undivided, a baseline, and Dr. GRPO times G / (G - 1), since its mean holds the attempt itself."
    game = game()
    true = true_gradient(game, game.base)
    for name, options, factor in (('exact', {'scale': 'none'}, 1.), ('ppo (exact)', {'whiten': False}, 1.),
                                  ('dr-grpo', {}, 3 / 2)):
        found = exact_estimate(game, get_contender(name, game.metric, **options), 3)
        assert_close(factor * found.mean, true, atol=2e-6, rtol=1e-4)
        assert found.cosine == pytest.approx(1, abs=1e-4) and found.pulls is None


def test_tips_shaping_adds_nothing_to_grpo():
    "It sums to -αΦ(S_0), which a group shares; a row that adds it is refused for that."
    game = chain(3, .2, (2, 4, 3), 2)
    pi, moves, values, _ = listed(game, size=3)
    earned, outcome = earnings_before(game, moves)
    owner = torch.arange(len(pi)).repeat_interleave(3)
    for kind in ('own', 'frozen', 'late', 'wrong'):
        first = Pupils(game, get_contender('grpo'), len(pi), seeded()).first.expand(len(pi), -1)
        phi = beliefs_of(kind, values, first, game, moves, earned).double().log()
        shaped = shaping_rewards(phi, moves.turn_mask, .1)
        assert shaped.abs().max() > .01                                     # it says something of turns
        found = group_normalize(outcome.double() + shaped.sum(1), owner)
        assert_close(found, group_normalize(outcome.double(), owner), atol=1e-8, rtol=0)
    with pytest.raises(ValueError, match='group'): compose('outcome+shaping/group')


@pytest.mark.parametrize('shown', ['cold, late', 'cold, wrong', 'exact'])
def test_tips_shaping_changes_no_expectation_in_ppo(shown):
    "At λ = 1 it is a baseline: the expected step is the gradient, whatever the teacher believes; the noise differs."
    game = chain(2, .2, TINY, 2)
    found = [exact_estimate(game, get_contender(name, 'em', whiten=False), 2)
             for name in (f'tips ({shown})', f'ppo ({shown.split(",")[0]})')]
    assert_close(found[0].mean, found[1].mean, atol=2e-6, rtol=1e-4)
    assert_close(found[0].mean, true_gradient(game, game.base), atol=2e-6, rtol=1e-4)
    if shown == 'exact': assert found[0].noise == pytest.approx(found[1].noise, rel=1e-4)  # its critic takes Φ off
    if 'cold' in shown: assert found[0].noise != pytest.approx(found[1].noise, rel=1e-2)


def test_tspo_is_grpo_where_no_group_is_all_wrong():
    game = MISSES()
    _, moves, _, _ = listed(game)
    right = earnings_before(game, moves)[1].view(-1, 3).sum(1)
    tspo, grpo = credit_of('tspo', game), credit_of('grpo', game)
    assert (right > 0).any() and (right == 0).any()
    assert_close(tspo[right > 0], grpo[right > 0], atol=1e-5, rtol=1e-5)
    assert not grpo[right == 0].any() and tspo[right == 0].any()


def test_carl_at_lambda_1_is_a_baseline():
    "Its credit is then outcome less value, of every turn; at λ = 0 it is the change of the value."
    game = asking((2, 4, 3), 2)
    pi, moves, values, _ = listed(game)
    earned, outcome = earnings_before(game, moves)
    baseline = torch.where(moves.turn_mask, outcome[:, None] - earned - moves.pick(values), 0.).view(len(pi), 3, -1)
    assert_close(credit_of('carl (exact)', game, lam=1.), baseline / 3, atol=1e-5, rtol=1e-4)
    found = exact_estimate(game, get_contender('carl (exact)', 'em', lam=1.), 3)
    assert_close(found.mean, true_gradient(game, game.base), atol=2e-6, rtol=1e-4)
    assert (credit_of('carl (exact)', game, lam=0.) - baseline / 3).abs().max() > .01


def test_vspo_expected_step():
    "Without smoothing, over draws: Σ_b (1 + s p_b) g_b, with s silent groups and p the chances of the draw."
    game = silent(0., .4, TINY, 4)
    pi = action_chances(game, game.base[None])
    good = game.earns[..., 0].argmax(1)
    asked = torch.arange(4).repeat_interleave(4)
    spot = game.starts[asked][:, None]
    wins = torch.tensor([1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]).bool()     # two silent, two heard groups
    action = torch.where(wins[:, None], good[spot], (good[spot] + 1) % 3)
    moves = lab.Moves(torch.zeros(16, dtype=torch.long), asked, spot, action, torch.zeros_like(action))
    groups, generator = group_moves(game, pi, moves, 4), seeded()
    assert index_groups(groups)[0].shape == (16, 1)
    step = lambda name, **o: turn_weights(get_contender(name, 'em', **o).method, groups, {}, generator)[0][:, 0]
    plain, drawn = step('grpo'), torch.stack([step('vspo', clip=False) for _ in range(600)])
    means, spread = torch.tensor([.25, .5]), torch.tensor([.25 * .75, .25])
    p = (((1 - means) * spread) / .1).softmax(0)
    total = (1 + 2 * p).repeat_interleave(4)
    found = drawn.mean(0)[4:12] / plain[4:12]
    assert not drawn[:, :4].any() and not drawn[:, 12:].any()
    assert_close(found / found.sum(), total / total.sum(), atol=.015, rtol=0)


def test_the_interval_of_signal_to_noise_over_grpos_covers():
    "Two skewed rules drawn together, half of what they add alike; the truth is of a million steps."
    generator, true, noise = seeded(), torch.tensor([[1., .5], [0., -1.]]), torch.distributions.Exponential(1.)
    torch.manual_seed(0)
    def steps(times, n):
        seen = (torch.rand(times, n, 1, 1, generator=generator) < .3).double()
        common, one, other = noise.sample((3, times, n, 2, 2)).double()
        return (common + one - 2 + true) * seen, (common + .3 * other - 1.3 + true * .6) * seen
    own, base = (estimate_of(found[0], true) for found in steps(1, 1_000_000))
    truth, held, errors = own.over(base)[0], 0, []
    for one, other in zip(*steps(1500, 400)):
        ratio, error = estimate_of(one, true).over(estimate_of(other, true))
        held += abs(ratio - truth) <= 1.96 * error
        errors.append((ratio, error))
    ratios, told = torch.tensor(errors).T
    assert .93 < held / 1500 < .97 and ratios.std().item() == pytest.approx(told.mean().item(), rel=.06)
    assert own.over(own) == (1, 0)


# ---- credit from moves, and turn by turn ----

SMALL = {'parts': lambda: many_parts(3, TINY, 4), 'chain': lambda: chain(2, .2, TINY, 4), 'near miss': MISSES,
         'searches': lambda: searches(2, .2, .5, TINY, 3), 'repair': lambda: repair(.4, .2, .5, TINY, 3),
         'stopping': lambda: stopping(3, .05, sizes=(4, 4, 3), questions=3), 'asking': lambda: asking((2, 4, 3), 2)}
RULES = ('grpo', 'dr-grpo', 'exact', 'exact (undivided)', 'gigpo', 'ppo (warm, told)', 'carl (warm, blind)', 'igpo',
         'tips (cold, late)', 'tspo', 'tspo flat', 'tspo flat (found)', 'outcome+folr/group')


@pytest.mark.parametrize('world', SMALL)
def test_credit_of_moves_is_that_of_their_text(world):
    "To the last digit: weights and a critic's targets."
    game = SMALL[world]()
    pi, generator = action_chances(game, game.base.expand(2, -1, -1)), seeded()
    moves = lab.draw_moves(game, pi, torch.randint(len(game.questions), (2, 2), generator=generator), 4, generator)
    values, (earned, _) = game_values(game, pi), earnings_before(game, moves)
    for name in RULES:
        if world == 'parts' and {'folr', 'gain', 'shaping'} & {*name.replace('tspo', 'folr').replace(
                'igpo', 'gain').replace('tips', 'shaping').replace('+', ' ').replace('/', ' ').split()}: continue
        contender = get_contender(name, game.metric)
        shown, _ = Pupils(game, contender, 2, seeded()).show(pi, values, moves, earned)
        text = turn_weights(contender.method, group_moves(game, pi, moves, 4), shown, seeded())
        fast = move_weights(game, contender.method, moves, 4, shown)
        assert torch.equal(fast, text), name
        assert fast.any() or world == 'stopping'


def test_a_rule_that_reads_more_than_a_game_tells_is_read():
    for name in ('prs', 'vspo'): assert lab.move_rewards(MISSES(), get_contender(name).method, None) is None


@pytest.mark.parametrize('world', ['parts', 'chain', 'near miss', 'searches', 'stopping'])
def test_gradients_by_turn_sum_and_true_credit_expects_each(world):
    "True credit undivided expects each turn's; Dr. GRPO (G − 1) / G of it."
    game = SMALL[world]()
    true = turn_gradients(game, game.base)
    assert_close(true.sum(0), true_gradient(game, game.base), atol=1e-6, rtol=1e-4)
    if world == 'stopping': game = dataclasses.replace(game, starts=game.starts[:1], questions=game.questions[:1])
    for name, factor in (('exact (undivided)', 1.), ('dr-grpo', 2.)):
        found, true = exact_estimate(game, get_contender(name, game.metric), 2), turn_gradients(game, game.base)
        assert_close(torch.stack([factor * e.mean for e in found.turns]), true, atol=2e-6, rtol=1e-4)
        assert_close(sum(e.mean for e in found.turns), found.mean, atol=1e-6, rtol=1e-4)


def test_the_score_by_turn_by_a_sum_over_all_pairs_of_attempts():
    """Independent of the lab's estimates: every ordered pair of attempts at a question, its chance a product, credit
    by hand (half the difference of two outcomes, or each turn's own change of value), scores of softmax by hand."""
    game = chain(2, .3, (2, 2, 2), 2)
    pi = action_chances(game, game.base[None])
    values = game_values(game, pi)[0]
    true = turn_gradients(game, game.base)
    def pulls(path):
        out = torch.zeros(2, *game.base.shape)
        for k, (s, a, _) in enumerate(path):
            out[k] = torch.outer(game.features[game.cell[s]], torch.eye(2)[a] - pi[0, s])
        return out
    sums = {name: torch.zeros(2, 2) for name in ('dr-grpo', 'exact')}       # by turn: mean along t_k, mean square
    means = {name: torch.zeros(2, *game.base.shape) for name in sums}
    for q in range(2):
        attempts = lab.all_paths(game, pi, int(game.starts[q]))
        for (p, one), (r, two) in ((x, y) for x in attempts for y in attempts):
            outcome = [sum(game.earns[s, a, o].item() for s, a, o in path) for path in (one, two)]
            step = {name: torch.zeros(2, *game.base.shape) for name in sums}
            for path, mine, other in ((one, *outcome), (two, *outcome[::-1])):
                states = [float(values[s]) for s, _, _ in path] + [0.]
                credit = [states[k + 1] - states[k] + (mine if k == 1 else 0.) for k in range(2)]
                step['dr-grpo'] += pulls(path) * (mine - other) / 2 / 2
                step['exact'] += pulls(path) * torch.tensor(credit)[:, None, None] / 2
            for name, g in step.items():
                means[name] += p * r / 2 * g
                sums[name][:, 1] += p * r / 2 * g.pow(2).sum((1, 2))
    s = {name: (means[name] * true).sum((1, 2)) / true.flatten(1).norm(dim=1) /
         (sums[name][:, 1] - means[name].pow(2).sum((1, 2))).sqrt() for name in sums}
    found = {name: exact_estimate(game, get_contender(name), 2) for name in ('dr-grpo', 'exact (undivided)')}
    assert_close(torch.tensor([e.signal_to_noise for e in found['dr-grpo'].turns]), s['dr-grpo'], atol=1e-4, rtol=1e-3)
    score = found['exact (undivided)'].score(found['dr-grpo'])
    assert score['score'] == pytest.approx(float((s['exact'] / s['dr-grpo']).log().mean().exp()), rel=1e-3)
    assert score['turns'] == 2 and not score['untaught'] and not score['missing']


def test_a_turn_that_is_not_taught_makes_the_lowest_score():
    "A blind critic's value does not change where the model may be right or not: only the last turn gets any credit."
    game = chain(2, .3, TINY, 4)
    grpo, blind = (sampled_estimate(game, get_contender(name), 1000) for name in ('grpo', 'carl (warm, blind)'))
    found = blind.score(grpo)
    assert found['score'] == 0 and found['untaught'] == 1 and found['turns'] == 2
    routine = chain(1, .3, TINY, 4, every=2)                    # the first turn decides nothing, and does not count
    exact, grpo = (sampled_estimate(routine, get_contender(name), 1000) for name in ('exact', 'grpo'))
    found = exact.score(grpo)
    assert found['turns'] == 1 and found['missing'] == 0 and .5 < found['score'] < 4


def test_a_blind_critic_sees_the_turn_alone():
    game = SMALL['chain']()
    def shown(game, sight):
        pi, moves, values, _ = listed(game)
        pupils = Pupils(game, get_contender(f'ppo (warm, {sight})', game.metric), len(pi), seeded())
        return pupils.show(pi, values, moves, earnings_before(game, moves)[0])[0]['values']
    told, blind = (shown(game, sight) for sight in ('told', 'blind'))
    assert len(blind[:, 1].unique()) == 1 < len(told[:, 1].unique())
    blind = shown(SMALL['parts'](), 'blind')                 # what was earned is in its mean alone
    assert_close(blind, torch.full_like(blind, 1 / 3))
    with pytest.raises(ValueError, match='critic'): get_contender('carl (exact, blind)')


@pytest.mark.parametrize('game, auc', [(lambda: near_miss(.1, .5), .93), (lambda: chain(3, .1), .75),
                                       (lambda: stopping(3), .93)], ids=['near miss', 'chain', 'stopping'])
def test_noisy_belief_tells_states_with_the_gold_as_well_as_asked(game, auc):
    "AUC counted over rollouts of the base, by ranks; equal histories have equal beliefs."
    from scipy.stats import mannwhitneyu
    game, generator = game(), seeded()
    pi = action_chances(game, game.base.expand(150, -1, -1))                  # each policy has draws of its own
    moves = lab.draw_moves(game, pi, torch.randint(64, (150, 30), generator=generator), 2, generator)
    pupils = Pupils(game, get_contender(f'igpo ({str(auc)[1:]})'), 150, generator)
    belief = pupils.show(pi, game_values(game, pi), moves, earnings_before(game, moves)[0])[0]['belief'][:, :-1]
    shows = game.reads[1][moves.spot.clamp(min=0), moves.action, moves.way] & moves.turn_mask
    seen = torch.nn.functional.pad(shows.cumsum(1)[:, :-1], (1, 0)) > 0 if shows.any() else \
        moves.pick(game_values(game, pi)) > 0
    mask = moves.turn_mask
    right, pairs = 0., 0.
    for k in range(mask.shape[1]):                                             # states before the same turn
        one, other = (belief[:, k][which[:, k] & mask[:, k]] for which in (seen, ~seen))
        if not len(one) or not len(other): continue
        right += float(mannwhitneyu(one, other).statistic)
        pairs += len(one) * len(other)
    assert right / pairs == pytest.approx(auc, abs=.02)
    same = histories(game, moves)
    for number in same[mask].unique()[:50]: assert len(belief[same == number].unique()) == 1
    assert len(belief[mask].unique()) > len(moves.pick(game_values(game, pi))[mask].unique())


def test_noise_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match='AUC'): belief_noise(near_miss(.1, .5, TINY, 4), .2)


def test_flattened_tspo_pays_the_same_for_all_turns():
    game = MISSES()
    _, moves, _, _ = listed(game)
    right = earnings_before(game, moves)[1].view(-1, 3).sum(1)
    flat, tspo = credit_of('tspo flat', game), credit_of('tspo', game)
    assert_close(flat[right > 0], tspo[right > 0], atol=1e-6, rtol=1e-6)
    wrong = flat[right == 0]
    assert wrong.any() and torch.equal(wrong[..., 0], wrong[..., 1]) and not torch.equal(wrong, tspo[right == 0])


# ---- steps that were not all seen ----

@pytest.mark.parametrize('most', [1e9, 70.])
def test_intervals_of_ratios_cover(most):
    "Steps are log-normal, of another spread for each rule, and some are cut: 95 % intervals hold the ratio."
    generator, times, estimates = seeded(), 1000, []
    for mean, spread in ((4., .5), (3.6, .2)):
        x = (torch.randn(times, 24, generator=generator) * spread + mean).exp()
        estimates.append((x.clamp(max=most).log(), x < most))
    (a, u), (b, v) = (censored_mean(*x) for x in estimates)
    free = [(there.sum(1) - 1).tolist() for _, there in estimates]
    ends = [welch(*x)[1:3] for x in zip(a.tolist(), u.tolist(), free[0], b.tolist(), v.tolist(), free[1])]
    assert .93 < sum(low <= .4 <= high for low, high in ends) / times < .975
    steps = [torch.where(there[0], logs[0].exp(), -1.) for logs, there in estimates]
    ratio, low, high, _ = step_ratio(steps[1], steps[0], most)
    assert [math.log(low), math.log(high)] == pytest.approx(ends[0], abs=1e-4)


def test_a_ratio_of_too_few_is_not_known():
    few, many = torch.tensor([5, 6, -1, -1]), torch.tensor([5, 6, 7, 8])
    assert all(math.isnan(x) for x in step_ratio(few, many, 100))


# ---- learning ----

def test_learning_reaches_the_goal_and_counts_turns():
    game = many_parts(2, (4, 8, 4), 8)
    contender = get_contender('exact', 'parts')
    (steps, turns), (again, _) = (learn(game, contender, [4 * unit_rate(game, contender)] * 6, 3, 200) for _ in range(2))
    assert (steps > 0).all() and turns.tolist() == (steps * 2 * 8 * 2).tolist()      # steps · questions · G · K
    cut, _ = learn(game, contender, [1e-9] * 2, 3, 5)
    assert again.tolist() == steps.tolist()
    assert cut.tolist() == [-1, -1]


def test_the_first_step_of_adam_is_the_rate_times_the_sign():
    game, contender = many_parts(1, TINY, 2), get_contender('exact', 'parts')
    start = Pupils(game, contender, 1, torch.Generator().manual_seed(5))
    gradient, _ = start.gradient()
    seen = []
    def watch(self, **known):
        seen.append(self.weights.clone())
        return plain(self, **known)
    plain, Pupils.gradient = Pupils.gradient, watch
    try: learn(game, contender, [.1], 5, 2, adam=True)
    finally: Pupils.gradient = plain
    moved = (seen[1] - seen[0])[gradient.abs() > 1e-4] / .1
    assert_close(moved, gradient[gradient.abs() > 1e-4].sign(), atol=1e-3, rtol=0)


def test_draws_have_rates_of_the_first_and_fresh_seeds_of_the_others(tmp_path):
    how = LabChoice(run=str(tmp_path), worlds=['parts 1', 'parts 2'], rates=[4.], tuning=1, fresh=3, most=100, drawn=50,
                    draws=3, seed=1)
    run_lab(how, lambda line: None)
    order = [(b['phase'], b['draw']) for b in read_learned(tmp_path)]
    rates = order.count(('rates', 0))
    assert order == [('rates', 0)] * rates + [('fresh', 1)] * 8 + [('fresh', 2)] * 8
    table = lab_table(tmp_path)
    one = table[(table.world == 'parts 2') & (table.rule == 'exact')].iloc[0]
    assert one.seeds == 6 and one.low < one.steps < one.high and one.first_reached == 1
    found = foretell_lab(tmp_path)
    assert (tmp_path / 'predictions.csv').exists() and found.rule.tolist() == ['dr-grpo', 'exact', 'exact (undivided)'] * 2
    assert found[found.world == 'parts 1'].score.tolist()[1] == pytest.approx(1, abs=1e-4)   # one turn: exact is GRPO


@pytest.mark.long
def test_exact_csv_is_filled_rule_by_rule(little, tmp_path):
    path = tmp_path / 'exact.csv'
    whole = (Path(little[0].run) / 'exact.csv').read_text()
    lines = whole.splitlines(keepends=True)
    path.write_text(''.join(line for line in lines if ',exact,' not in line))
    for name in ('settings.json', 'learned.jsonl'): (tmp_path / name).write_bytes((Path(little[0].run) / name).read_bytes())
    run_lab(dataclasses.replace(little[0], run=str(tmp_path)), lambda line: None)
    assert path.read_text() == whole


def test_the_best_rate_is_the_fastest_and_edges_are_told():
    block = lambda *steps: {'rates': [1., 2., 4.], 'steps': list(steps)}
    assert best_rate([block(9, 5, 7)]) == (2., 0) and best_rate([block(9, 7, 5)]) == (4., 1)
    assert best_rate([block(5, 7, 9)]) == (1., -1) and best_rate([block(50, 60, -1)], most=55)[0] == 1.


@pytest.fixture(scope='module')
def little(tmp_path_factory):
    "Settings of a lab that takes a second, and what it found without a break."
    how = LabChoice(run=str(tmp_path_factory.mktemp('lab') / 'whole'), worlds=['parts 1'], rates=[2., 4.], tuning=1,
                    fresh=4, most=200, drawn=50)
    run_lab(how, lambda line: None)
    return how, facts(how.run)


def facts(folder):
    "What was learned, without clocks."
    return [{k: v for k, v in block.items() if k != 'seconds'} for block in read_learned(folder)]


@pytest.mark.long
def test_an_interrupted_lab_goes_on(little, tmp_path):
    "After every line that it says, it is interrupted; the same command goes on, and nothing is done twice."
    whole, wanted = little
    how, said = dataclasses.replace(whole, run=str(tmp_path / 'lab')), []

    def say(line):
        said.append(line)
        raise KeyboardInterrupt
    for _ in range(20):
        try: run_lab(how, say)
        except KeyboardInterrupt: continue
        break
    assert facts(how.run) == wanted and len(said) == len(wanted) + 1
    assert (tmp_path / 'lab' / 'exact.csv').read_text() == (Path(whole.run) / 'exact.csv').read_text()


def test_other_settings_and_other_worlds_are_refused(little):
    with pytest.raises(ValueError, match='settings'): run_lab(dataclasses.replace(little[0], fresh=5))
    with pytest.raises(ValueError, match="'parts"): LabChoice(worlds=['parts one'])
    for wrong in (dict(rates=[-1.]), dict(rates=[]), dict(rates=['a']), dict(worlds=[])):
        with pytest.raises(ValueError, match=next(iter(wrong))): LabChoice(**wrong)
    with pytest.raises(ValueError, match='critic'): get_contender('grpo (warm)')
    for name, trial in (TRIALS | FORETOLD).items():
        for rule in trial.rules: assert get_contender(rule).name == rule, name


def test_the_stored_lab_is_whole(tmp_path):
    "The plain command has nothing left to do in runs/lab: every pair is there, by the settings that are the defaults."
    for name in ('settings.json', 'exact.csv', 'learned.jsonl'):
        (tmp_path / name).write_bytes((ROOT / 'runs' / 'lab' / name).read_bytes())
    how, said = dataclasses.replace(LabChoice(), run=str(tmp_path)), []
    assert (how.tuning, how.fresh, how.names) == (16, 128, list(TRIALS))
    run_lab(how, said.append)
    pairs = [(b['world'], b['rule']) for b in read_learned(tmp_path) if b['phase'] == 'fresh']
    assert not said and sorted(pairs) == sorted((name, rule) for name, trial in TRIALS.items() for rule in trial.rules)


def test_time_that_is_up_begins_nothing(little, tmp_path):
    how = dataclasses.replace(little[0], run=str(tmp_path / 'lab'), minutes=1e-9)
    run_lab(how, lambda line: None)
    assert not read_learned(how.run) and not (tmp_path / 'lab' / 'exact.csv').exists()


# ---- the map ----


def written(little, folder, **steps):  # rule -> (steps, turns of each step) of four seeds
    "A folder with these results of one world, at the highest of two rates."
    for name in ('exact.csv', 'settings.json'): (folder / name).write_bytes((Path(little[0].run) / name).read_bytes())
    blocks = [{'world': 'parts 1', 'rule': rule, 'phase': phase, 'rates': [2., 4., 4., 4.][:len(found)],
               'steps': found, 'turns': [each * (s if s >= 0 else 200) for s in found], 'unit': 1., 'seconds': 1.}
              for rule, (fresh, each) in steps.items() for phase, found in (('rates', [9, 5]), ('fresh', fresh))]
    (folder / 'learned.jsonl').write_text('\n'.join(map(json.dumps, blocks)) + '\n')
    return lab_table(folder)


def test_the_map_says_what_turns_cost_and_at_which_rate(little, tmp_path):
    "Half of GRPO's steps, of eight times as many turns each: worth 2 by steps and a quarter by turns."
    table = written(little, tmp_path, grpo=([8, 9, 8, 9], 10), exact=([4, 4.5, 4, 4.5], 80))
    row = table.set_index('rule').loc['exact']
    assert row.steps == pytest.approx(2) and row.turns == pytest.approx(1 / 4) and row.verdict == 'ahead'
    assert row.turns_low < 1 / 4 < row.turns_high < 1 and (row.rate, row.edge) == (4., 1)
    assert map_page(table).loc['parts 1', 'ahead'] == 'exact ×2.00 (by turns ×0.25)'


def test_a_rule_that_never_gets_there_is_on_the_map(little, tmp_path):
    table = written(little, tmp_path, grpo=([8, 9, 8, 9], 10), exact=([-1, -1, 190, -1], 10))
    row = table.set_index('rule').loc['exact']
    assert math.isnan(row.steps) and row.reached == .25
    assert map_page(table).loc['parts 1', ['ahead', 'without a ratio']].tolist() == ['', 'exact (there in 25% of the seeds)']
    chart = lab.Chart('Does it?', 'K', {'exact': [(1, 'parts 1', 'exact')]})
    assert lab.chart_says(chart, table) == "Does it? GRPO's steps over the rule's: exact there in 25% of the seeds at 1."
    assert [text.get_text() for text in chart_figure(chart, table).axes[1].texts] == ['there in 25% of the seeds']


def test_a_rule_that_got_there_where_grpo_did_not_is_not_called_hopeless(little, tmp_path):
    table = written(little, tmp_path, grpo=([-1, -1, 190, -1], 10), exact=([4, 5, 4, 5], 10))
    assert math.isnan(table.set_index('rule').steps['exact'])
    assert map_page(table).loc['parts 1', 'without a ratio'] == 'exact (there in 100% of the seeds, grpo in 25%)'


def rows_of(*found):  # (world, rule, steps, verdict)
    "A table of a lab in which these were learned, each with an interval of a tenth."
    return pd.DataFrame([{'world': world, 'rule': rule, 'steps': x, 'low': .9 * x, 'high': 1.1 * x, 'turns': x, 'seeds': 8.,
                          'reached': float(x == x), 'first_reached': 1., 'verdict': said} for world, rule, x, said in found])


def test_which_rule_names_what_can_be_trained_and_where_worlds_contradict_each_other():
    table = rows_of(('near miss 0.1', 'tspo', 1.3, 'ahead'), ('near miss 0.1', 'exact', 1.5, 'ahead'),
                    ('near miss 0.1', 'igpo', 1.5, 'ahead'), ('chain 2', 'tspo', .8, 'behind'),
                    ('parts 16', 'carl (warm, told)', 3., 'ahead'), ('parts 16', 'gigpo', math.nan, 'unknown'))
    rows, said = lab.which({'turns': 2, 'right': .1, 'near': .4, 'parts': False}, table, 2)
    assert rows.index.tolist() == ['tspo'] and list(rows) == ['near miss 0.1', 'chain 2']      # no bounds, nearest first
    assert rows.loc['tspo'].tolist() == ['×1.30 (1.17 to 1.43), ahead', '×0.80 (0.72 to 0.88), behind']
    assert 'tspo is ahead in near miss 0.1 and behind in chain 2' in said[-1] and 'most in near' in said[-1]
    rows, said = lab.which({'turns': 16, 'right': .1, 'near': 0., 'parts': True}, table, 1)
    assert rows['parts 16'].to_dict() == {'gigpo': 'never there'} and len(said) == 1


def test_which_rule_measures_a_run_and_refuses_what_it_does_not_know(tmp_path, monkeypatch, capsys):
    log = RunLog(tmp_path / 'tiny')
    log.turns(0, [{'kind': 'evaluate', 'trajectory': to_json(t), 'advantages': None, 'reward': 0.}
                  for t in example_group().trajectories])
    log.close()
    monkeypatch.setattr(lab, 'lab_table', lambda folder: rows_of(('near miss 0.3', 'tspo', 1.1, 'ahead')))
    lab.which_main([f'run={tmp_path}', 'turns=2', 'worlds=1'])
    shown = capsys.readouterr().out
    assert 'your problem: turns 2, right 0.333, near 0.5' in shown and '×1.10 (0.99 to 1.21), ahead' in shown
    with pytest.raises(SystemExit, match='known'): lab.which_main(['turns=2', 'right=.1'])


def test_which_rule_takes_a_runs_base_and_the_outcome_that_is_paid(tmp_path):
    run, made = RunLog(tmp_path / 'run'), to_json(example_group().trajectories[0])
    for step, em in enumerate((math.nan, .1, .9)): run.metrics(step, em=em, turns=3., near_miss=.5)
    run.close()
    assert lab.measured_problem(tmp_path / 'run') == {'turns': 3., 'right': .1, 'near': .5}
    assert lab.measured_problem(tmp_path / 'run', True) == {'turns': 3., 'near': 0.}           # right has to be given
    log = RunLog(tmp_path / 'asked' / 'own')
    half = {**made, 'answer': 'Paris; Oslo', 'question': {**made['question'], 'answers': ['Paris; Rome']}}
    log.turns(0, [{'kind': 'evaluate', 'trajectory': half, 'advantages': None, 'reward': 0.}])
    log.close()
    assert [lab.measured_problem(tmp_path / 'asked', parts)['right'] for parts in (False, True)] == [0., .5]
