"37_games: texts earn what the games say, and values, visits and gradients are those of a brute sum over attempts."
import math

import pytest
import torch
from torch.testing import assert_close

from credit_rl.studies.games import (action_chances, asking, base_right, chain, draw_moves, earned_before, game_values,
                             group_moves, make_game, many_parts, near_miss, play_on, silent, Spot, staged, two_coins,
                             visit_chances, Way)
from credit_rl.studies.lab import all_paths, true_gradient
from credit_rl.outcome import outcome_rewards
from credit_rl.trajectory import Question

TINY = 3, 4, 3                     # words, kinds and features
GAMES = {'coins': two_coins, 'parts': lambda: many_parts(2, TINY, 3, lean=.7), 'chain': lambda: chain(2, .2, TINY, 3),
         'near miss': lambda: near_miss(.1, .5, TINY, 3), 'asking': lambda: asking(TINY, 3),
         'stages': lambda: staged(.5, .5, (4, 4, 3), 3), 'silent': lambda: silent(.5, .4, TINY, 4)}


@pytest.fixture(params=GAMES, scope='module')
def game(request): return GAMES[request.param]()


def attempts(game, pi):
    "All attempts at all questions: (question, chance, path)."
    return [(q, chance, path) for q, start in enumerate(game.starts.tolist())
            for chance, path in all_paths(game, pi, start)]


def test_values_and_visits_are_sums_over_all_attempts(game):
    pi, count = action_chances(game, game.base[None]), len(game.questions)
    total, visits = [0.] * count, torch.zeros(len(game.cell))
    for q, chance, path in attempts(game, pi):
        total[q] += chance * sum(game.earns[s, a, o].item() for s, a, o in path)
        for s, _, _ in path: visits[s] += chance / count
    assert_close(game_values(game, pi)[0, game.starts], torch.tensor(total), atol=1e-5, rtol=1e-5)
    assert_close(visit_chances(game, pi)[0], visits, atol=1e-5, rtol=1e-5)
    assert sum(chance for _, chance, _ in attempts(game, pi)) == pytest.approx(count, abs=1e-5)


def test_the_text_earns_what_the_game_says(game):
    generator = torch.Generator().manual_seed(0)
    pi = action_chances(game, game.base[None])
    moves = draw_moves(game, pi, torch.arange(len(game.questions))[None], 16, generator)
    groups = group_moves(game, pi, moves, 16)
    before, earned = earned_before(game, moves)
    assert_close(outcome_rewards(groups, game.metric), earned)
    assert len(groups) == len(game.questions) and (before[:, 0] == 0).all()
    turns = [turn for g in groups for t in g.trajectories for turn in t.turns]
    logps = torch.tensor([turn.action_logps[0] for turn in turns])
    played = moves.pick(pi).gather(2, moves.action.clamp(min=0)[..., None])[..., 0][moves.turn_mask]
    assert_close(logps, played.log())


def test_the_gradient_is_that_of_finite_differences(game):
    "Central differences in every weight; their own error is of the order of the step's square."
    found, step = true_gradient(game, game.base), 1e-2
    for d, a in torch.ones_like(game.base).nonzero().tolist():
        moved = torch.zeros_like(game.base)
        moved[d, a] = step
        slope = (base_right(game, game.base + moved) - base_right(game, game.base - moved)) / (2 * step)
        assert slope == pytest.approx(found[d, a].item(), abs=2e-4)


def test_bases_are_as_right_as_asked():
    assert base_right(many_parts(3)) == pytest.approx(1 / 8, abs=1e-6)
    for right in (.3, .005): assert base_right(near_miss(right)) == pytest.approx(right, abs=1e-4)
    for turns in (2, 8): assert base_right(chain(turns)) == pytest.approx(.1, abs=1e-4)
    assert base_right(silent(.8)) == pytest.approx(.8 + .2 * .4, abs=1e-4)


def test_near_misses_are_seen_by_folr():
    "`found` of the base's rollouts are shown the gold, as first_turns sees it."
    from credit_rl.folr import first_turns
    game, generator = near_miss(.025, .5), torch.Generator().manual_seed(1)
    pi = action_chances(game, game.base[None])
    moves = draw_moves(game, pi, torch.arange(64)[None], 32, generator)
    seen = first_turns(group_moves(game, pi, moves, 32)) == 0
    assert seen.float().mean().item() == pytest.approx(.5, abs=.04)
    assert (earned_before(game, moves)[1][~seen] == 0).all()


def test_playing_on_ends_and_draws_by_chance():
    game, generator = asking(), torch.Generator().manual_seed(2)
    pi = action_chances(game, game.base[None])
    start, n = int(game.starts[0]), 4000
    spots = torch.full((n,), start)
    total, turns = torch.zeros(n), 0
    for at, spot, action, way in play_on(game, pi, torch.zeros(n, dtype=torch.long), spots, generator):
        total[at] += game.earns[spot, action, way]
        turns += 1
    value = game_values(game, pi)[0, start].item()
    assert turns == 3 and abs(total.mean().item() - value) < 4 * math.sqrt(value * (1 - value) / n)


def test_a_spot_stands_before_one_turn_only():
    ways = {0: Spot('c', 0, ((Way(1., 1, 'on'),), (Way(1., 2, 'jump'),))), 1: Spot('c', 1, ((Way(1., 2, 'on'),),)),
            2: Spot('c', 2, ((Way(1., 1, 'back'),),))}
    with pytest.raises(ValueError, match='one number of turns only'):
        make_game('loop', ways, {Question('q', 'why?', ['x']): 0}, {'c': torch.ones(1)}, torch.zeros(1, 2))
