"67_lab: identities that hold exactly where all groups can be listed, the fit of censored steps, and going on."
import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch.testing import assert_close

from credit_rl.studies import lab
from credit_rl.studies.games import (action_chances, asking, chain, earned_before, game_values, group_moves, many_parts,
                             near_miss, silent)
from credit_rl.groups import group_normalize, index_groups
from credit_rl.studies.lab import (CHARTS, TRIALS, LabChoice, Pupils, all_groups, believed, best_rate, censored_mean,
                           chart_figure, estimate_of, exact_estimate, get_contender, get_trial, judge_expected,
                           lab_table, learn, map_page, nearest_worlds, read_learned, run_lab, sampled_estimate,
                           step_ratio, true_gradient, turn_weights, unit_rate)
from credit_rl.methods import compose
from credit_rl.potentials import shaping_rewards
from credit_rl.significance import welch

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
    earned, _ = earned_before(game, moves)
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
    """The shaping of a rollout sums to -αΦ(S_0), which a group shares: outcomes normalised within groups stay what they
    were, and a row that adds it is refused for that."""
    game = chain(3, .2, (2, 4, 3), 2)
    pi, moves, values, _ = listed(game, size=3)
    earned, outcome = earned_before(game, moves)
    owner = torch.arange(len(pi)).repeat_interleave(3)
    for kind in ('own', 'frozen', 'late', 'wrong'):
        first = Pupils(game, get_contender('grpo'), len(pi), seeded()).first.expand(len(pi), -1)
        phi = believed(kind, values, first, game, moves, earned).double().log()
        shaped = shaping_rewards(phi, moves.turn_mask, .1)
        assert shaped.abs().max() > .01                                     # it says something of turns
        found = group_normalize(outcome.double() + shaped.sum(1), owner)
        assert_close(found, group_normalize(outcome.double(), owner), atol=1e-8, rtol=0)
    with pytest.raises(ValueError, match='the same for the whole group'): compose('outcome+shaping/group')


@pytest.mark.parametrize('shown', ['cold', 'cold, late', 'cold, wrong', 'warm', 'exact'])
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
    right = earned_before(game, moves)[1].view(-1, 3).sum(1)
    tspo, grpo = credit_of('tspo', game), credit_of('grpo', game)
    assert (right > 0).any() and (right == 0).any()
    assert_close(tspo[right > 0], grpo[right > 0], atol=1e-5, rtol=1e-5)
    assert not grpo[right == 0].any() and tspo[right == 0].any()


def test_carl_at_lambda_1_is_a_baseline():
    "Its credit is then outcome less value, of every turn; at λ = 0 it is the change of the value."
    game = asking((2, 4, 3), 2)
    pi, moves, values, _ = listed(game)
    earned, outcome = earned_before(game, moves)
    baseline = torch.where(moves.turn_mask, outcome[:, None] - earned - moves.pick(values), 0.).view(len(pi), 3, -1)
    assert_close(credit_of('carl (exact)', game, lam=1.), baseline / 3, atol=1e-5, rtol=1e-4)
    found = exact_estimate(game, get_contender('carl (exact)', 'em', lam=1.), 3)
    assert_close(found.mean, true_gradient(game, game.base), atol=2e-6, rtol=1e-4)
    assert (credit_of('carl (exact)', game, lam=0.) - baseline / 3).abs().max() > .01


def test_exact_credit_of_one_turn_is_grpo():
    game = many_parts(1, TINY, 2)
    assert_close(credit_of('exact', game), credit_of('grpo', game), atol=1e-5, rtol=1e-4)


def test_vspo_expected_step():
    """A step of B groups by VSPO without smoothing: a kept group stands once and once more for each silent one whose
    place it takes. The mean over draws is Σ_b (1 + s p_b) g_b, s silent groups, p the chances of the draw."""
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


def test_listing_and_drawing_agree():
    game = MISSES()
    for name in ('grpo', 'tspo', 'igpo', 'exact'):
        exact = exact_estimate(game, get_contender(name), 3, questions=2)
        small = dataclasses.replace(game, group_size=3)
        drawn = sampled_estimate(small, get_contender(name), 500)
        error = (drawn.pulls.std() / len(drawn.pulls) ** .5).item()
        assert abs(exact.signal_to_noise - drawn.signal_to_noise) < 4 * error + .02 * exact.signal_to_noise


def test_the_interval_of_signal_to_noise_over_grpos_covers():
    """Steps of two rules, skewed, mostly 0 and drawn together: what they add to each entry is half the same. Of
    a million steps the ratio is the truth, of 400 its 95 % interval holds it."""
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


def test_true_credit_of_many_parts_has_more_signal():
    "Where 16 independent parts share an outcome, 3.3 times GRPO's signal to noise (runs/lab), give or take some luck."
    found = [sampled_estimate(many_parts(16), get_contender(name, 'parts'), 100).signal_to_noise
             for name in ('grpo', 'exact')]
    assert 2.8 < found[1] / found[0] < 4.3


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
    mean, error = censored_mean(torch.tensor([1., 2., 3.]), torch.ones(3, dtype=torch.bool))
    assert mean == pytest.approx(2.) and error == pytest.approx(1 / 3 ** .5, rel=1e-3)


# ---- learning ----

def test_learning_reaches_the_goal_and_counts_turns():
    game = many_parts(2, (4, 8, 4), 8)
    contender = get_contender('exact', 'parts')
    steps, turns = learn(game, contender, [4 * unit_rate(game, contender)] * 6, 3, 200)
    assert (steps > 0).all() and turns.tolist() == (steps * 2 * 8 * 2).tolist()      # steps · questions · G · K
    again, _ = learn(game, contender, [4 * unit_rate(game, contender)] * 6, 3, 200)
    assert again.tolist() == steps.tolist()
    cut, _ = learn(game, contender, [1e-9] * 2, 3, 5)
    assert cut.tolist() == [-1, -1]


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


def test_a_killed_lab_goes_on(little, tmp_path):
    "Killed when its first line of results stands, the same command ends with what an unbroken one found."
    whole, wanted = little
    how = dataclasses.replace(whole, run=str(tmp_path / 'lab'))
    given = [f'{name}={json.dumps(getattr(how, name))}' for name in ('worlds', 'rates', 'tuning', 'fresh', 'most',
                                                                     'drawn')]
    process = subprocess.Popen([sys.executable, '-m', 'credit_rl.studies.lab', *given, f'run={how.run}'], cwd=ROOT,
                               stdout=subprocess.PIPE, env={**os.environ, 'PYTHONUNBUFFERED': '1'}, text=True)
    for line in process.stdout:
        if 'rates' in line: break
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert read_learned(how.run)
    run_lab(how, lambda line: None)
    assert facts(how.run) == wanted


def test_other_settings_and_other_worlds_are_refused(little):
    how, _ = little
    with pytest.raises(ValueError, match='holds results by other settings .fresh: 4 there, 5 now'):
        run_lab(dataclasses.replace(how, fresh=5))
    with pytest.raises(ValueError, match="no world 'parts one'"): LabChoice(worlds=['parts one'])
    with pytest.raises(ValueError, match='grpo has no critic'): get_contender('grpo (warm)')
    for name, trial in TRIALS.items():
        for rule in trial.rules: assert get_contender(rule).name == rule, name


def test_the_stored_lab_is_whole(tmp_path):
    "The plain command has nothing left to do in runs/lab: every pair is there, by the settings that are the defaults."
    for name in ('settings.json', 'exact.csv', 'learned.jsonl'):
        (tmp_path / name).write_bytes((ROOT / 'runs' / 'lab' / name).read_bytes())
    how, said = dataclasses.replace(LabChoice(), run=str(tmp_path)), []
    assert (how.tuning, how.fresh, how.names) == (16, 128, list(TRIALS))
    run_lab(how, said.append)
    pairs = [(b['world'], b['rule']) for b in read_learned(tmp_path) if b['phase'] == 'fresh']
    assert not said and pairs == [(name, rule) for name, trial in TRIALS.items() for rule in trial.rules]


def test_time_that_is_up_begins_nothing(little, tmp_path):
    how = dataclasses.replace(little[0], run=str(tmp_path / 'lab'), minutes=1e-9)
    run_lab(how, lambda line: None)
    assert not read_learned(how.run) and not (tmp_path / 'lab' / 'exact.csv').exists()


# ---- the map ----

def test_the_table_is_of_what_was_found(little):
    table = lab_table(little[0].run)
    assert table.rule.tolist() == ['grpo', 'exact'] and table.steps.isna().tolist() == [True, False]
    assert table.steps[1] == 1. == table.signal[1] and table.seeds[1] == 4
    judged = judge_expected(table, pd.DataFrame({'world': ['parts 1'], 'rule': ['exact'], 'expected': [1.3]}))
    assert judged.error.item() == pytest.approx(math.log(1.3)) and judged.error_always_1.item() == 0
    assert map_page(table).loc['parts 1', 'turns'] == 1


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
    row = table.iloc[1]
    assert row.steps == pytest.approx(2) and row.turns == pytest.approx(1 / 4) and row.verdict == 'ahead'
    assert row.turns_low < 1 / 4 < row.turns_high < 1 and (row.rate, row.edge) == (4., 1)
    assert map_page(table).loc['parts 1', 'ahead'] == 'exact ×2.00 (by turns ×0.25)'


def test_a_rule_that_never_gets_there_is_on_the_map(little, tmp_path):
    table = written(little, tmp_path, grpo=([8, 9, 8, 9], 10), exact=([-1, -1, 190, -1], 10))
    assert math.isnan(table.steps[1]) and table.reached[1] == .25
    assert map_page(table).loc['parts 1', ['ahead', 'never there']].tolist() == ['', 'exact']
    chart = lab.Chart('Does it?', 'K', {'exact': [(1, 'parts 1', 'exact')]})
    assert lab.chart_says(chart, table) == "Does it? GRPO's steps over the rule's: exact never there at 1."
    assert [text.get_text() for text in chart_figure(chart, table).axes[1].texts] == ['never there']


def test_every_chart_is_drawn_of_rows_that_exist(little):
    table = lab_table(little[0].run)
    for chart in CHARTS.values():
        for line in chart.lines.values():
            for _, world, rule in line: assert rule in get_trial(world).rules
        assert len(chart_figure(chart, table).axes) == 2
    assert nearest_worlds(turns=16, right=.125, near=0., parts=True, count=1).keys() == {'parts 16'}
