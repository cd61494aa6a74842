"The shapes that a tiny world may have: long chains, two pages, many parts, hopeless questions."
import hashlib

import pytest

from credit_rl.settings import check, make_config
from credit_rl.setup import tiny_worlds
from credit_rl.world import fact_chain, make_world, reachable, world_of


def titles(world):
    return lambda query: [page for name, page in world.pages.items() if query.startswith(name + ' ')]


@pytest.mark.parametrize('split, digest', [('train', 'bf7c31fb'), ('test', 'd6bfe674')])
def test_worlds_of_before_are_as_they_were(split, digest):
    # digests of what the code made before worlds could have another shape: stored runs were played in them
    w = make_world(split, 3, size=120, questions=30, hops=(1, 2, 3), mirrors=.1, parametric=.2)
    said = repr([sorted(w.pages.items()), [(q.id, q.text, q.answers, sorted(q.meta.items())) for q in w.questions],
                 sorted(w.known)])
    assert hashlib.blake2b(said.encode(), digest_size=4).hexdigest() == digest


@pytest.mark.parametrize('hops', [4, 5])
def test_long_chains(hops):
    w = make_world('dev', 2, size=200, questions=60, hops=(hops, ))
    for q in w.questions:
        chain = fact_chain(q)
        assert len(chain) == hops == q.meta['hops'] and len({r for _, r in chain}) == hops
        assert all(w.facts[f] == name for f, name in zip(chain, q.meta['chain'][1:]))
        assert q.answers == (q.meta['chain'][-1], )
        assert reachable(w, q, [], hops, titles(w)) and not reachable(w, q, [], hops - 1, titles(w))


def test_refusals():
    for bad, match in (({'hops': (6,)}, 'hops'), ({'hops': (0,)}, 'hops'), ({'hops': ()}, 'hops'),
                       ({'two_pages': .5}, 'leave'), ({'hops': (2,), 'two_pages': 1.5}, 'share'), ({'parts': [11]}, 'parts'),
                       ({'parts': [1]}, 'parts'), ({'parts': [3], 'two_pages': .5}, 'pages'),
                       ({'parts': [3], 'twins': True}, 'twin'), ({'twins': True, 'size': 50, 'hops': (4,)}, 'is left'),
                       ({'twins': True, 'parametric': .5}, 'known besides'), ({'hopeless': 1}, 'hopeless'),
                       ({'twins': True, 'easy': 2}, 'chains among'), ({'hopeless': .9, 'parametric': 1.}, 'need'),
                       ({'nothing': .7, 'sibling': .4}, 'together'), ({'sibling': -.1}, 'sibling'),
                       ({'lost': 1.5}, 'chance')):
        with pytest.raises(ValueError, match=match): world_of(bad, 'dev', 0, 20)


@pytest.mark.parametrize('settings', [{'parts': [3]}, {'hops': (2, 3), 'two_pages': .5}, {'hopeless': .3},
                                      {'nothing': .1, 'sibling': .1}, {'lost': .1}])
def test_another_shape_leaves_the_rest_as_it_was(settings):
    before = world_of({'hops': settings.get('hops', (1, 2, 3))}, 'train', 4, 80)
    after = world_of(settings, 'train', 4, 80)
    assert (after.types, after.facts, after.known) == (before.types, before.facts, before.known)
    assert [q.id for q in after.questions] == [q.id for q in before.questions]
    assert world_of(settings, 'train', 4, 80) == after != before
    if 'two_pages' in settings:
        kept = [q for q in after.questions if 'form' not in q.meta]
        assert len(kept) == 40 and set(kept) <= set(before.questions)


def test_runs_of_other_seeds_may_meet_the_same_questions():
    asked = {}
    for seed in (1, 2):
        config = make_config({'data': 'tiny', 'seed': seed, 'world': {'seed': 9}, 'model': 'data/tiny_base'})
        check(config)
        asked[seed] = tiny_worlds(config.world, config.sizes, seed)
    assert asked[1] == asked[2] and asked[1]['dev'].seed == 9
