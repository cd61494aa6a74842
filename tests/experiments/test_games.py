"37_games: texts earn what the games say, and values, visits and gradients are those of a brute sum over attempts."

import pytest
import torch
from torch.testing import assert_close

from credit_rl.studies.games import (action_chances, asking, base_right, chain, draw_moves, earnings_before,
                                     game_values, group_moves, make_game, make_stages, many_parts, near_miss, repair,
                                     searches, silent, Spot, stopping, two_coins, visit_chances, Way)
from credit_rl.studies.lab import all_paths, true_gradient
from credit_rl.outcome import outcome_rewards
from credit_rl.trajectory import Question

TINY = 3, 4, 3                     # words, kinds and features
GAMES = {'coins': two_coins, 'parts': lambda: many_parts(2, TINY, 3, lean=.7), 'chain': lambda: chain(2, .2, TINY, 3),
         'near miss': lambda: near_miss(.1, .5, TINY, 3), 'asking': lambda: asking(TINY, 3),
         'searches': lambda: searches(2, .2, .5, TINY, 3), 'routine': lambda: chain(1, .5, TINY, 3, every=2),
         'repair': lambda: repair(.4, .2, .5, TINY, 3), 'stopping': lambda: stopping(3, .05, sizes=(4, 4, 3), questions=3),
         'stages': lambda: make_stages(.5, .5, (4, 4, 3), 3), 'silent': lambda: silent(.5, .4, TINY, 4)}


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
    before, earned = earnings_before(game, moves)
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


def test_bases_that_miss_what_was_asked_are_refused():
    for asked in (lambda: stopping(3, .2), lambda: chain(3, 1.01), lambda: searches(2, .2, 1.3)):
        with pytest.raises(ValueError, match='base'): asked()


def test_failures_that_were_shown_the_gold_are_as_many_as_asked():
    "All searches succeed in right + near · (1 − right) of the rollouts, by visits of the last spot."
    for right, near in ((.2, .2), (.02, .5)):
        game = searches(2, right, near, TINY, 3)
        visits = visit_chances(game, action_chances(game, game.base[None]))[0]
        reading = game.layers[-1]
        shown = sum(float(visits[s]) for s in range(reading.start, reading.stop) if game.earns[s].any())
        assert base_right(game) == pytest.approx(right, rel=.01)
        assert (shown - right) / (1 - right) == pytest.approx(near, rel=.02)


def test_what_a_game_reads_is_what_the_library_reads(game):
    "The page that first shows a gold, and equal numbers for equal words and pages."
    from credit_rl.tspo import first_turns
    pi, generator = action_chances(game, game.base[None]), torch.Generator().manual_seed(0)
    moves = draw_moves(game, pi, torch.arange(len(game.questions))[None], 8, generator)
    groups, (numbers, shows) = group_moves(game, pi, moves, 8), game.reads
    seen = shows[moves.spot.clamp(min=0), moves.action, moves.way] & moves.turn_mask
    assert torch.where(seen.any(1), seen.float().argmax(1), -1).tolist() == first_turns(groups).tolist()
    words = [(t.action_ids, t.observation_ids) for g in groups for r in g.trajectories for t in r.turns]
    found = numbers[moves.spot, moves.action, moves.way][moves.turn_mask].tolist()
    assert len({*words}) == len({*found}) == len({*zip(words, found)})


def test_another_draw_is_another_world_as_right():
    one, other = chain(2, .2, TINY, 3), chain(2, .2, TINY, 3, draw=1)
    assert not torch.equal(one.features, other.features) and base_right(other) == pytest.approx(.2, rel=.01)


def test_routine_turns_decide_nothing():
    "Only the last of two turns: a value before a routine turn is that after it, whatever the word."
    game = chain(1, .5, TINY, 3, every=2)
    values = game_values(game, action_chances(game, game.base[None]))[0]
    first = game.layers[0]
    assert_close(values[game.after[first, :, 0]], values[first][:, None].expand(-1, TINY[0]))
    assert_close(base_right(game), .5, atol=5e-3, rtol=0)


def test_near_misses_are_seen_by_folr():
    "`found` of the base's rollouts are shown the gold, as first_turns sees it."
    from credit_rl.tspo import first_turns
    game, generator = near_miss(.025, .5), torch.Generator().manual_seed(1)
    pi = action_chances(game, game.base[None])
    moves = draw_moves(game, pi, torch.arange(64)[None], 32, generator)
    seen = first_turns(group_moves(game, pi, moves, 32)) == 0
    assert seen.float().mean().item() == pytest.approx(.5, abs=.04)
    assert (earnings_before(game, moves)[1][~seen] == 0).all()


def test_a_spot_stands_before_one_turn_only():
    ways = {0: Spot('c', 0, ((Way(1., 1, 'on'),), (Way(1., 2, 'jump'),))), 1: Spot('c', 1, ((Way(1., 2, 'on'),),)),
            2: Spot('c', 2, ((Way(1., 1, 'back'),),))}
    with pytest.raises(ValueError, match='number'):
        make_game('loop', ways, {Question('q', 'why?', ['x']): 0}, {'c': torch.ones(1)}, torch.zeros(1, 2))
