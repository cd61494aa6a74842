"The shapes that a tiny world may have: long chains, two pages, many parts, hopeless questions."
import hashlib

import pytest

from credit_rl.settings import check, make_config
from credit_rl.setup import tiny_worlds
from credit_rl.world import (RELATIONS, fact_chain, make_world, missing_facts, reachable, withdraw_pages, world_of)


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


@pytest.mark.parametrize('bad, match', [({'hops': (6,)}, 'hops must be some of 1 to 5'), ({'hops': (0,)}, 'hops'),
                                        ({'hops': ()}, 'hops'), ({'two_pages': .5}, 'leave 1 out of hops'),
                                        ({'hops': (2,), 'two_pages': 1.5}, 'two_pages is a share'),
                                        ({'parts': [11]}, 'parts must be some of 2 to 10'), ({'parts': [1]}, 'parts'),
                                        ({'parts': [3], 'two_pages': .5}, 'or two pages'),
                                        ({'parts': [3], 'twins': True}, 'or a twin'),
                                        ({'twins': True, 'size': 50, 'hops': (4, )}, 'is left'),
                                        ({'twins': True, 'parametric': .5}, 'known besides'),
                                        ({'twins': True, 'easy': 2}, 'chains among'), ({'hopeless': 1}, 'hopeless'),
                                        ({'hopeless': .9, 'parametric': 1.}, 'need a page'),
                                        ({'nothing': .7, 'sibling': .4}, 'together at most 1'),
                                        ({'sibling': -.1}, 'sibling'), ({'lost': 1.5}, 'lost is the chance')])
def test_refusals(bad, match):
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
        asked[seed] = tiny_worlds(config, seed)
    assert asked[1] == asked[2] and asked[1]['dev'].seed == 9


def test_no_page_holds_an_answer_of_two_pages():
    w = world_of({'hops': (2, 3, 5), 'two_pages': 1.}, 'test', 1, 90)
    for q in w.questions:
        chain, shown = fact_chain(q), [w.pages[name] for name, _ in fact_chain(q)]
        first, second = w.facts[chain[-2]], w.facts[chain[-1]]
        assert q.answers == (f'{first.split()[0]} {second.split()[1]}', ) and q.meta['hops'] == len(chain)
        assert not any(q.answers[0] in page for page in w.pages.values())
        assert missing_facts(w, q) == chain and missing_facts(w, q, shown[:1]) == chain[1:]
        assert reachable(w, q, shown[:-1], 1, titles(w)) and not reachable(w, q, shown[:-2], 1, titles(w))
    assert len({q.text for q in w.questions}) == 90


def test_many_parts_are_independent_facts():
    w = world_of({'parts': [6, 8]}, 'test', 1, 40)
    assert [q.meta['hops'] for q in w.questions] == [6, 8] * 20
    for q in w.questions:
        assert q.answers[0].split(' ; ') == [w.facts[f] for f in fact_chain(q)]
        assert len({r for _, r in fact_chain(q)}) == len({n for n, _ in fact_chain(q)}) == q.meta['hops']
        assert reachable(w, q, [], q.meta['hops'], titles(w)) and not reachable(w, q, [], 5, titles(w))
    assert {r for q in w.questions for _, r in fact_chain(q)} == set(RELATIONS)


def test_twins_have_one_form_and_one_of_them_is_known():
    w = world_of({'twins': True, 'hops': (1, 2, 2)}, 'dev', 3, 120)
    of = {q.id: q for q in w.questions}
    assert len({q.text for q in w.questions}) == 120 and {q.meta['hops'] for q in w.questions} == {1, 2}
    assert w.known == {f for q in w.questions[:60] for f in fact_chain(q)}
    for q in w.questions:
        twin, knows = of[q.meta['twin']], [f in w.known for f in fact_chain(q)]
        assert of[twin.meta['twin']] is q and twin.meta['parametric'] != q.meta['parametric']
        assert [r for _, r in fact_chain(q)] == [r for _, r in fact_chain(twin)]
        assert w.types[q.meta['chain'][0]] == w.types[twin.meta['chain'][0]]
        assert q.text.split()[0] == twin.text.split()[0]
        assert all(knows) if q.meta['parametric'] else not any(knows)
        assert q.answers == (w.facts[fact_chain(q)[-1]], )
        assert missing_facts(w, q) == ([] if q.meta['parametric'] else fact_chain(q))
    assert world_of({'twins': True, 'hops': (1, 2, 2)}, 'dev', 3, 120) == w
    with pytest.raises(ValueError, match='number'): world_of({'twins': True}, 'dev', 3, 21)


@pytest.mark.parametrize('share', [.1, .5, .9])
def test_hopeless_questions_lack_a_page(share):
    w = world_of({'hopeless': share, 'hops': (1, 3)}, 'train', 2, 300)
    hopeless = [q for q in w.questions if q.meta['hopeless']]
    assert share <= len(hopeless) / 300 < share + .05
    for q in w.questions:
        lacks = [f for f in fact_chain(q) if f[0] not in w.pages]
        assert bool(lacks) == q.meta['hopeless'] == (not reachable(w, q, [], 9, titles(w)))
        assert set(lacks) <= set(missing_facts(w, q, w.pages.values()))


def test_what_is_known_needs_no_page():
    w = withdraw_pages(make_world('train', 0, questions=40, parametric=.5), .4)
    assert not any(q.meta['hopeless'] and q.meta['parametric'] for q in w.questions)
