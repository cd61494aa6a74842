"""54_warmup: the edges of the gate, who is asked and who searches elsewhere, and draws that are even."""
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings, strategies as st

from credit_rl.engine import SamplingParams, ScriptedEngine
from credit_rl.outcome import Earned
from credit_rl.protocol import PROTOCOLS, Chat, byte_tokenizer
from credit_rl.readers import Passage
from credit_rl.rollout import Environment
from credit_rl.tiny import NOISY_CODER, act_coder, memory_of, tiny_environment, tiny_tokenizer
from credit_rl.tools import PythonTool
from credit_rl.trajectory import Group, Question, Stop, Trajectory, Turn
from credit_rl import warmup
from credit_rl.warmup import (choose_questions, collect, CollectionPlan, draw_evenly, GATE, gate, GateFailed,
                              GateReport, make_pairs, Missing, Pairs, with_prompt, Sampler, searching, tiers, warm_up, WarmUp)
from credit_rl.world import Competence, make_world


@pytest.mark.parametrize('name', GATE)
def test_each_check_alone_fails_the_gate_by_what_it_says(name):
    good = dict(auc=[.9, .1], sign_accuracy=[[.1, 1]], explained_variance=[0., 1.])
    bad = dict(auc=[.1, .9], sign_accuracy=[[-.1, 1]], explained_variance=[1., 0.])
    pick = lambda n: (bad if n == name else good)[n]
    report = gate(pick('auc'), [2, 1], pick('sign_accuracy'), pick('explained_variance'), [0., 1.])
    assert not report.passed and set(report.failed) == {name}
    assert f'FAILED: {name} by {report.failed[name]:.3f}' in str(report)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.data())
def test_draws_are_even(clusters, data):
    "No cluster is drawn twice more often than another that still had items; nothing is drawn twice."
    n = data.draw(st.integers(0, len(clusters)))
    drawn, size = draw_evenly(clusters, n, seed=1), Counter(clusters)
    assert len(set(drawn)) == len(drawn) == n
    count = Counter(clusters[i] for i in drawn)
    assert all(count[a] <= count[b] + 1 or count[b] == size[b] for a in size for b in size)


PASSES, FAILS = GateReport(.9, .9, .9, .9, .9, (1, 1)), GateReport(.1, .9, .9, .9, .9, (1, 1))


@pytest.mark.parametrize('how, passes, sat', [
    ((200, 60, 25), lambda step: True, [0, 25, 50, 75]), ((200, 50, 25), lambda step: True, [0, 25, 50]),
    ((200, 60, 25), lambda step: step != 75, [0, 25, 50, 75, 100]), ((70, 60, 25), lambda step: True, [0, 25, 50, 70]),
    ((200, 0, 25), lambda step: True, [0]), ((100, 60, 25), lambda step: step < 60, None)])
def test_the_first_pass_at_or_after_least_ends_it(monkeypatch, how, passes, sat):
    "A pass before `least` counts for nothing, and `least` need not be a step of an examination."
    taught, rows = [], Pairs([[1]], torch.ones(1), torch.zeros(1, dtype=torch.long))
    monkeypatch.setattr(warmup, '_teach', lambda *a: taught.append(a) or 0.)
    examine = lambda: PASSES if passes(len(taught)) else FAILS
    run = lambda: [n for n, _ in warm_up(None, rows, examine, WarmUp(*how))]
    if sat is None:
        with pytest.raises(GateFailed, match='pass'): run()
    else: assert run() == sat and len(taught) == sat[-1]


QUESTIONS = [Question(f'q{i}', f'who directed film {i}' if i % 3 else f'what is {i} plus {i}', ('7',)) for i in range(60)]
TIER = torch.tensor([1 + i % 2 for i in range(60)])


def test_a_missing_reward_is_no_wrong_answer():
    "A question known by one attempt stays known; states of a rollout without a reward are not taught, nor examined."
    turn = Turn('answer', [2], [0.], [], '', '')
    group = Group(QUESTIONS[0], [Trajectory(QUESTIONS[0], [1], [turn], 'answer', '7', earned=x) for x in (1., math.nan)])
    assert tiers([group], Earned()).tolist() == [2] and make_pairs([group], torch.tensor([0]), Earned()).returns.tolist() == [1]


def test_so_many_questions_of_each_tier():
    for per_tier, drawn in ((5, (5, 5)), ([4, 9], (4, 9)), (100, (30, 30)), ((100, 3), (30, 3))):
        wanted = CollectionPlan(per_tier=per_tier).wanted
        chosen = choose_questions(QUESTIONS, TIER, wanted, clusters=2)
        assert len(set(chosen)) == len(chosen) and tuple((TIER[chosen] == t).sum().item() for t in (1, 2)) == drawn
        for t, n in zip((1, 2), drawn):  # a third of the questions are sums; half of those drawn, while there are any
            sums = sum(QUESTIONS[i].text.startswith('what') for i in chosen if TIER[i] == t)
            assert abs(sums - min(n / 2, 10)) <= .5
        assert len(choose_questions(QUESTIONS, TIER, wanted, None)) == min(60, sum(wanted))
    for bad in (0, (3,), (3, 0), (1, 2, 3), 2.5, '8', None):
        with pytest.raises(ValueError, match='per_tier'): CollectionPlan(per_tier=bad)


@pytest.mark.parametrize('per_tier, said', [
    ((9, 9), None), ((11, 9), 'takes all 11 of Tier 1, of which 11 may be taken: clusters choose nothing there'),
    (50, 'takes all 11 of Tier 1, of which 50 may be taken and all 11 of Tier 2, of which 50 may be taken: clusters')])
def test_a_tier_that_is_taken_whole_is_said(per_tier, said):
    world = make_world('dev', seed=3, size=200, questions=12, hops=(1,), competence=Competence(famous=12))
    env = tiny_environment(world, Chat(PROTOCOLS['carl-tiny'], tiny_tokenizer(numbers=True)))
    player, lines = lambda text, rng: act_coder(text, rng, NOISY_CODER, memory_of(world)), []
    tiers = [[q for q in world.questions if q.meta['parametric'] is known][:11] for known in (True, False)]
    plan = CollectionPlan(per_tier=per_tier, clusters=3)
    data = collect(Sampler(ScriptedEngine(player, env.chat.tokenizer), SamplingParams()), env, sum(tiers, []), plan,
                   say=lines.append)
    assert lines[0].startswith('22 questions: 11 that it knows')
    assert lines[-1].startswith('told to call, it does in 100% of rollouts of Tier 1 and 100% of rollouts of Tier 2; ')
    assert [line[:len(said or '')] for line in lines[1:-1]] == ([said] if said else [])
    assert len(data.questions) == sum(min(11, n) for n in plan.wanted)


class Told:
    "A sampler that notes under which prompt which questions are played; the questions named `known` are answered right."
    def __init__(self): self.asked = {}

    def play(self, env, questions, times, *seed):
        if seed[0] == 'collect': self.asked[env.chat.protocol.name] = {q.id for q in questions}
        answer = lambda q: q.answers[0] if q.id.startswith('known') else 'no'
        turn = Turn('commit', (1,), (0.,), (), 'x', '')
        return [Group(q, [Trajectory(q, (1,), [turn], Stop.ANSWER, answer(q))] * times) for q in questions]


@pytest.mark.parametrize('by', ['paper', 'all'])
def test_prompts_go_by_tier_and_by_set_as_in_appendix_c(by):
    """The optional prompt for what is known alone, the multi-hop one for questions of several hops alone; by default all
    under all. Sets with nothing to search are told of no search."""
    questions = [Question(f'{tier} {hops}', f'{tier} of {hops}?', ('7',), 'a', {'hops': hops})
                 for tier in ('known', 'unknown') for hops in (1, 2)]
    env, told = Environment(Chat(PROTOCOLS['carl'], byte_tokenizer()), PythonTool(None)), Told()
    collect(told, env, questions, CollectionPlan(per_tier=2, clusters=1, prompts_by=by, prompts=[
        'direct', 'forced', 'optional', 'multi-hop']))
    every = {q.id for q in questions}
    paper = {'carl': {'known 1', 'known 2'}, 'carl-multi-hop': {'known 2', 'unknown 2'}}
    assert told.asked == {'carl-direct': every, 'carl-forced': every, 'carl': every, 'carl-multi-hop': every} | (
        paper if by == 'paper' else {})
    said = [with_prompt(env, mode).chat.protocol.system for mode in ('forced', 'optional', 'multi-hop')]
    assert not any('search' in text for text in said) and len(set(said)) == 3
    assert all('search(query)' in PROTOCOLS[name].system for name in ('carl-forced', 'carl', 'carl-multi-hop'))


def test_a_base_that_does_not_call_when_told_to_is_noticed():
    from credit_rl.warmup import obedience
    assert obedience(['direct', 'forced', 'forced', 'forced', 'optional'], [False, True, False, True, True],
                     [1, 1, 1, 2, 2]).startswith('told to call, it does in 50% of rollouts of Tier 1 and 100% of')
    assert obedience(['forced'], [False], [2]).startswith('told to call, it does in 0% of rollouts of Tier 2;')


def test_sources_have_clusters_of_their_own():
    """With one cluster each, draws alternate between the sources, though one has three times as many questions; and
    the drawn sums come from both of a source's two clusters."""
    questions = [Question(f'q{i}', f'who directed film {i}' if i % 2 else f'what is {i} plus {i}', ('7',),
                          'a' if i < 45 else 'b') for i in range(60)]
    tier = torch.tensor([1] * 30 + [2] * 15 + [1] * 15)
    def of(clusters, n):
        return [questions[i] for i in choose_questions(questions, tier, (n, 1), clusters) if tier[i] == 1]
    assert sorted(q.source for q in of({'a': 1, 'b': 1}, 20)) == ['a'] * 10 + ['b'] * 10
    counts = Counter(q.source + q.text[:3] for q in of({'a': 2, 'b': 1}, 18))
    assert counts['awho'] == counts['awha'] == 6 and counts['bwho'] + counts['bwha'] == 6
    with pytest.raises(ValueError, match='questions'): of({'a': 2}, 5)
    with pytest.raises(ValueError, match='clusters'): CollectionPlan(clusters={'a': 0})


ELSEWHERE = 'mayor mayor'  # words that the tiny tokenizer knows, as no page has them


class Ranked:
    "A retriever that finds `2k` numbered passages for whatever is asked, under a name of its own."
    def __init__(self, name): self.name = name
    def search(self, queries, k):
        return [[Passage(str(i), f'{self.name} {i}', self.name) for i in range(k)] for _ in queries]


@pytest.fixture(scope='module')
def looked_up():
    "A world of questions that need a search, an environment, one that searches elsewhere, and a coder."
    world = make_world('dev', seed=3, size=200, questions=20, hops=(1, 2), competence=Competence(famous=20))
    env = tiny_environment(world, Chat(PROTOCOLS['carl-tiny'], tiny_tokenizer(numbers=True)))
    player = lambda text, rng: act_coder(text, rng, NOISY_CODER, memory_of(world))
    return list(world.questions), env, searching(env, Ranked(ELSEWHERE)), ScriptedEngine(player, env.chat.tokenizer)


def places(data, prompt):
    "What the rollouts of each question searched in under a prompt: dict id -> set of 'there' and 'elsewhere'."
    out = {}
    for g, p in zip(data.groups, data.prompts):
        seen = {'elsewhere' if ELSEWHERE in turn.observation_text else 'there'
                for turn in g.trajectories[0].turns if turn.call is not None}
        if p == prompt and seen: out[g.question.id] = out.get(g.question.id, set()) | seen
    return out


@pytest.mark.parametrize('how, share', [({}, 0.3), (dict(other_share=1.0), 1.0), (dict(collected='random'), 0.0)],
                         ids=['as in the paper', 'all', 'random'])
def test_so_many_questions_are_searched_elsewhere(looked_up, how, share):
    "Three in ten unless told otherwise, wholly so, and the same ones under every prompt."
    questions, env, other, engine = looked_up
    plan = CollectionPlan(per_tier=15, clusters=3, repeats=2, **how)
    data = collect(Sampler(engine, SamplingParams()), env, questions, plan, other)
    forced, optional = places(data, 'forced'), places(data, 'optional')
    assert len(forced) == len(data.questions) == 30 and all(len(where) == 1 for where in forced.values())
    away = {q for q, where in forced.items() if where == {'elsewhere'}}
    assert len(away) == round(share * 30) and len(optional) > 15 and not places(data, 'direct')
    assert all(where == forced[q] for q, where in optional.items())
    tiers = {q.id: int(t) for q, t in zip(data.questions, data.tier)}
    if 0 < share < 1: assert {tiers[q] for q in away} == {1, 2}


@pytest.mark.parametrize('share', [.1, .5])
def test_a_share_of_the_queries_falls_into_a_hole(share):
    "Those get what ranks behind the best, always the same ones; larger holes hold the smaller ones."
    queries = [f'who directed film {i}' for i in range(3000)]
    found = Missing(Ranked('p'), share).search(queries, 3)
    ranks = [tuple(int(p.title.split()[1]) for p in passages) for passages in found]
    assert set(ranks) == {(0, 1, 2), (3, 4, 5)}
    holes = {q for q, r in zip(queries, ranks) if r[0] == 3}
    assert abs(len(holes) / 3000 - share) < .03                                # three deviations of a half are .027
    again = Missing(Ranked('p'), share)
    assert holes == {q for q in reversed(queries) if again.search([q], 3)[0][0].title == 'p 3'}
    larger = Missing(Ranked('p'), share + .1).search(queries, 3)
    assert holes < {q for q, passages in zip(queries, larger) if passages[0].title == 'p 3'}
