"Players, searches and settings of the regimes of the tiny world."
from dataclasses import replace

import pytest
import torch

from credit_rl import tiny
from credit_rl.engine import ScriptedEngine
from credit_rl.parts import Golds, Needs
from credit_rl.tspo import first_turns
from credit_rl.information_gain import belief_check, belief_of, belief_schema
from credit_rl.layout import pack
from credit_rl.metrics import parts
from credit_rl.methods import METHODS
from credit_rl.models import load_model
from credit_rl.outcome import outcome_rewards
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.studies.regimes import BASES, RegimeBase, main, regime_environment
from credit_rl.rollout import rollout
from credit_rl.runlog import METRICS as METRICS_OF_RUNS
from credit_rl.scoring import answer_header, gold_templates
from credit_rl.settings import check, make_config
from credit_rl.tiny import (PERFECT, Player, WarmStart, act, act_coder, ceiling, demonstrations,
                            tiny_environment, tiny_model, tiny_tokenizer)
from credit_rl.tools import Faults
from credit_rl.setup import bound_method
from credit_rl.trajectory import Group, Result, Stop
from credit_rl.world import REGIMES, Regime, fact_chain, get_regime, world_of
from made_runs import learner_of

CHAT = Chat(PROTOCOLS['tiny'], tiny_tokenizer())
CODE = Chat(PROTOCOLS['carl-tiny'], tiny_tokenizer(numbers=True))
WORLDS = {name: world_of({'mirrors': 0., **settings}, 'dev', 5, 40) for name, settings in {
    'chains': {'hops': (1, 2, 3)}, 'long': {'hops': (4, 5)}, 'pages': {'hops': (2, 3), 'two_pages': 1.},
    'parts': {'parts': [6]}}.items()}


def play(player, world='chains', seed=0, size=1, questions=None, **caps):
    engine = ScriptedEngine(lambda text, rng: act(text, rng, player), CHAT.tokenizer)
    w = WORLDS[world] if isinstance(world, str) else world
    return rollout(engine, tiny_environment(w, CHAT, **{'max_turns': 7, 'max_tokens': 448, **caps}),
                   list(questions or w.questions), size, seed=seed)


def firsts(groups):
    return [g.trajectories[0] for g in groups]


# ---- players ----

@pytest.mark.parametrize('world', WORLDS)
def test_perfect_play(world):
    for t in firsts(play(PERFECT, world)):
        found = [x for turn, (name, _) in zip(t.turns, fact_chain(t.question)) for x in [turn.observation_text]
                 if x.startswith(f'{name} is ')]
        if len(found) == t.question.meta['hops']: assert t.answer == t.question.answers[0]
        assert all(turn.result in (Result.OK, Result.NONE, Result.SKIPPED) for turn in t.turns)
    right = outcome_rewards(play(PERFECT, world))
    assert right.mean() > .9 and ceiling(WORLDS[world], CHAT, max_turns=7, max_tokens=448)['all'] == right.mean()


def test_no_observation_shows_an_answer_of_two_pages_or_many_parts():
    for world in ('pages', 'parts'): assert (first_turns(play(PERFECT, world)) == -1).all()
    assert (first_turns(play(PERFECT)) >= 0).float().mean() > .9


def test_a_player_goes_astray_before_the_last_page_alone():
    short = [q for q in WORLDS['chains'].questions if q.meta['hops'] == 1]
    long = [q for q in WORLDS['chains'].questions if q.meta['hops'] == 3]
    astray = Player(astray=1.)
    assert outcome_rewards(play(astray, questions=short)).mean() > .9
    lost = play(astray, questions=long)
    assert outcome_rewards(lost).sum() == 0 and (first_turns(lost) >= 0).float().mean() < .2
    for t in firsts(lost):
        name, relation = fact_chain(t.question)[0]
        if not t.turns[0].observation_text.startswith(f'{name} is '): continue
        label, *value = t.turns[1].action_text.split()[1:4]
        assert label != relation and WORLDS['chains'].facts[name, label] == ' '.join(value)


@pytest.mark.parametrize('field, wrong', [('broken_call', '</answer>'), ('broken_answer', '</tool_call>')])
def test_broken_turns_are_malformed(field, wrong):
    for t in firsts(play(Player(**{field: 1.}), max_turns=4)):
        bad = t.turns if field == 'broken_call' else t.turns[-1:]
        assert all(x.result is Result.MALFORMED and x.action_text.endswith(wrong) for x in bad) and t.answer is None
        assert t.stop is Stop.TURN_CAP
    some = play(Player(**{field: .5}))
    right, broke = outcome_rewards(some), torch.tensor([any(x.result is Result.MALFORMED for x in t.turns)
                                                        for t in firsts(some)])
    assert .3 < broke.float().mean() < 1 and right[broke].mean() > .7      # told what was wrong, it goes on


def test_chances_of_nothing_draw_nothing():
    "A player whose new chances are 0 draws the same random numbers as one that has none."
    class Counting:
        def __init__(self, rng): self.rng, self.n = rng, 0
        def __getattr__(self, name):
            self.n += 1
            return getattr(self.rng, name)
    drawn = []
    def counted(text, rng):
        rng = Counting(rng)
        says = act(text, rng, PERFECT)
        drawn.append((text.count('<tool_response>'), '<answer>' in says, rng.n))
        return says
    q = [q for q in WORLDS['chains'].questions if q.meta['hops'] == 3][:1]
    rollout(ScriptedEngine(counted, CHAT.tokenizer), tiny_environment(WORLDS['chains'], CHAT), q)
    # guess, query; misread, early, query; the same; misread, near miss (unless it is not asked)
    assert drawn == [(0, False, 2), (1, False, 3), (2, False, 3), (3, True, 2)]


def test_a_part_costs_its_own_place_alone():
    groups = play(Player(near_miss=.4, one_word=.2), 'parts')
    shares = outcome_rewards(groups, 'parts')
    assert all(t.stop is Stop.ANSWER and len(t.turns) == 7 for t in firsts(groups))
    assert .3 < shares.mean() < .9 and len(set(shares.tolist())) >= 4
    for t, share in zip(firsts(groups), shares.tolist()):
        said, gold = (x.split(' ; ') for x in (t.answer, t.question.answers[0]))
        assert len(said) == len(gold) == 6 and share == pytest.approx(sum(a == b for a, b in zip(said, gold)) / 6)
        for k, turn in enumerate(t.turns[1:]):   # a thought holds what was read right before
            items = turn.action_text.split(' </think>')[0].removeprefix('<think> ').split(' ; ')
            assert ' '.join(items[k if k == 5 else 0].split()[1:]) == said[k]
            assert len(items) == (6 if k == 5 else 2)


def test_coders_refuse_what_they_do_not_play():
    with pytest.raises(ValueError, match="'tiny'"): ceiling(WORLDS['parts'], CODE)


def test_a_warm_start_plays_the_games_of_its_world():
    games = demonstrations(CHAT, PERFECT, 20, 1, {'parts': [6]}, {'max_turns': 7, 'max_tokens': 448})
    assert all(g.question.meta['hops'] == 6 and len(g.trajectories[0].turns) == 7 for g in games)
    assert WarmStart().world == {'hops': (1, 2, 3, 3, 3)} == BASES['plain'].warm_start(REGIMES['plain']).world


def test_easier_games_come_first(monkeypatch):
    worlds, real = [], tiny.demonstrations
    monkeypatch.setattr(tiny, 'demonstrations', lambda chat, player, count, seed, world, caps: worlds.append(
        world) or real(chat, player, count, seed, world, caps))
    plan = WarmStart(copy=1, copied=99, games=3, least=2, played=99, count=16, world={'hops': [2], 'size': 100})
    for eased in (0, 1):
        tiny.warm_start(CHAT, plan=replace(plan, easier={'hops': [1]}, eased=eased), progress=lambda line: None)
    hard, easy = {'hops': [2], 'size': 100}, {'hops': [1], 'size': 100}
    assert worlds == [hard, easy, hard]


# ---- a metric ----


def test_parts_is_one_exactly_where_all_are_right():
    groups = play(Player(near_miss=.1), 'parts')
    assert (outcome_rewards(groups, 'parts') == 1).tolist() == (outcome_rewards(groups, 'em') == 1).tolist()
    with pytest.raises(ValueError, match='golds'): parts('a', [])


# ---- searches that fail ----

def observed(groups):
    return [[x.observation_text for x in t.turns] for g in groups for t in g.trajectories]


@pytest.mark.parametrize('chat', [CHAT, CODE], ids=['search', 'code'])
def test_faults_come_as_often_as_stated_and_are_repeatable(chat):
    code = chat is CODE
    player = (lambda text, rng: act_coder(text, rng)) if code else act
    def run(settings, questions=None, size=2, seed=3):
        w = world_of({'mirrors': 0., 'hops': (1, 2), 'size': 200, **settings}, 'dev', 5, 60)
        env = tiny_environment(w, chat, max_turns=15 if code else 4)
        return w, rollout(ScriptedEngine(player, chat.tokenizer), env, questions or list(w.questions), size, seed=seed)
    w, good = run({})
    _, bad = run({'nothing': .2, 'sibling': .3})
    calls = [x for g in bad for t in g.trajectories for x in t.turns if x.call]
    nothing = sum('No results' in x.observation_text for x in calls) / len(calls)
    firsts = [(a.turns[0].observation_text, b.turns[0].observation_text) for f, g in zip(good, bad)
              for a, b in zip(f.trajectories, g.trajectories)]
    other = sum(a != b and 'No results' not in b for a, b in firsts) / len(firsts)
    assert abs(nothing - .2) < .1 and abs(other - .3) < .12
    assert observed(run({'nothing': .2, 'sibling': .3})[1]) == observed(bad)
    assert observed(run({'nothing': .2, 'sibling': .3}, seed=4)[1]) != observed(bad)
    some = list(w.questions)[7:10]                             # in other company, and with more attempts
    alone = run({'nothing': .2, 'sibling': .3}, some, 3)[1]
    assert [observed([Group(g.question, g.trajectories[:2])]) for g in alone] == [observed([g]) for g in bad[7:10]]
    fates = [len({t.turns[0].observation_text for t in g.trajectories}) for g in bad]
    assert 1 in fates and 2 in fates                           # attempts differ in their luck


def test_notes_are_lost_as_often_as_stated_and_leave_an_empty_context():
    "Perfect coders then are wrong for no reason of theirs; the same attempt always has the same luck."
    w = world_of({'mirrors': 0., 'hops': (1, 2), 'size': 200, 'lost': .3}, 'dev', 5, 60)
    def run(world, questions=None):
        engine = ScriptedEngine(lambda text, rng: act_coder(text, rng), CODE.tokenizer)
        return rollout(engine, tiny_environment(world, CODE), questions or list(w.questions), 4, seed=3)
    groups = run(w)
    after = [(turn, later) for g in groups for t in g.trajectories for turn, later in zip(t.turns, t.turns[1:])
             if turn.kind == 'assimilate']
    share = sum(turn.result is Result.LOST for turn, _ in after) / len(after)
    assert abs(share - .3) < .08 and {turn.result for turn, _ in after} == {Result.LOST, Result.NONE}
    for turn, later in after:
        kept = CODE.tokenizer.decode(later.context_ids).rpartition('<context>')[2].partition('</context>')[0].strip()
        written = turn.action_text.partition('<context>')[2].partition('</context>')[0].strip()
        assert kept == ('' if turn.result is Result.LOST else written) and written
    right = outcome_rewards(groups).mean()
    assert right < .8 < outcome_rewards(run(replace(w, lost=0.))).mean()
    assert run(w, list(w.questions)[7:10]) == groups[7:10]
    with pytest.raises(ValueError, match="'tiny'"): tiny_environment(w, CHAT)


def test_without_faults_nothing_is_drawn(monkeypatch):
    monkeypatch.setattr('credit_rl.rollout.random', None)
    monkeypatch.setattr('credit_rl.rollout.skipping', None)
    assert tiny_environment(WORLDS['chains'], CHAT).faults is None
    play(PERFECT)


def test_the_next_best_page_comes_instead():
    w = world_of({'sibling': 1., 'size': 200}, 'dev', 5, 10)
    env, plain = tiny_environment(w, CHAT, k=1), tiny_environment(world_of({'size': 200}, 'dev', 5, 10), CHAT, k=2)
    for t in firsts(rollout(ScriptedEngine(act, CHAT.tokenizer), env, w.questions)):
        first = t.turns[0]
        both = plain.tool.run(first.call['queries'])
        assert both.endswith(first.observation_text) and both != first.observation_text
    with pytest.raises(ValueError, match='together'): Faults(.6, .6)


# ---- regimes ----

def test_the_regimes():
    assert {'plain', 'many-parts', 'near-miss', 'far', 'two-pages', 'mixed', 'unreliable', 'malformed'} <= set(REGIMES)
    with pytest.raises(ValueError, match="'near-miss'"): get_regime('near_miss')
    for r in REGIMES.values():
        world = world_of({'mirrors': 0., **r.world, 'size': 300}, 'dev', 5, 40)
        chance = {'nothing': 0., 'sibling': 0., 'hopeless': 0.}
        calm = world_of({'mirrors': 0., **r.world, **chance, 'size': 300}, 'dev', 5, 40)
        for w in (world, calm):
            engine = ScriptedEngine(act, CHAT.tokenizer)
            for t in firsts(rollout(engine, regime_environment(r, w, CHAT), list(w.questions))):
                assert t.stop is not Stop.LENGTH and len(t.turns) <= r.max_turns
                assert all(len(x.action_ids) <= r.turn_tokens for x in t.turns)
        most = ceiling(calm, CHAT, max_turns=r.max_turns, max_tokens=r.max_tokens)
        assert most['all'] > .8, r.name


def test_a_regime_fills_what_is_left():
    row = REGIMES['many-parts']
    c = make_config({'regime': 'many-parts', 'seed': 30})
    assert (c.world, c.max_turns, c.max_tokens, c.turn_tokens) == (row.world, 7, row.max_tokens, row.turn_tokens)
    assert c.model == 'data/bases/many-parts-30' and vars(c)['regime'] == 'many-parts'
    for name in ('grpo', 'tspo'):
        method = bound_method(replace(c, method=name))
        assert method.options['metric'] == 'parts' and method.metric == 'em' and name in METHODS
    own = make_config({'regime': 'many-parts', 'world': {'parts': [3]}, 'max_turns': 4, 'model': 'some/model'})
    assert (own.world, own.max_turns, own.model) == ({'parts': [3]}, 4, 'some/model')
    plain = make_config({})
    assert (plain.world, plain.max_turns, plain.max_tokens, plain.model, plain.regime) == ({}, 4, 192, 'tiny', None)


@pytest.mark.parametrize('bad, match', [({'regime': 'near_miss'}, "'near-miss'"),
                                        ({'regime': 'far', 'seed': 999}, 'credit_rl.studies.regimes far seed=999'),
                                        ({'regime': 'far', 'data': 'nq', 'model': 'some/model'}, "for data='tiny'"),
                                        ({'world': {'nothing': 2.}}, 'nothing'), ({'world': {'part': [3]}}, 'parts')])
def test_settings_of_regimes_that_are_refused(bad, match):
    with pytest.raises(ValueError, match=match): check(make_config(bad))


def test_belief_of_a_base_is_that_of_a_run_which_measures_it():
    "The learner's way, as a run with measure=['belief'] goes it, on games in which golds were shown."
    groups = play(Player(near_miss=.5), size=6)
    model = tiny_model(CHAT.tokenizer, 3)
    found = belief_of(model, CHAT, groups)
    layout = pack(groups, len(CHAT.encode(answer_header(CHAT))))
    golds = gold_templates(CHAT, groups, belief_schema(CHAT.protocol))
    learner = learner_of(make_config({'method': 'grpo', 'log_kl': False}), model)
    seen = learner.evaluate(layout, Needs(gold=Golds()), {'gold': golds})
    wanted = belief_check(seen, layout, groups)
    assert wanted['belief_shown_states'] > 3
    for name, value in found.items(): assert value == pytest.approx(wanted[name], rel=1e-4), name


def test_the_command(tmp_path, monkeypatch, capsys):
    few = {'games': 3, 'played': 99, 'count': 32}
    short = RegimeBase(plan=WarmStart(copy=3, copied=99, **few), from_nothing=True)
    monkeypatch.setitem(BASES, 'plain', short)
    monkeypatch.setitem(BASES, 'far', RegimeBase(plan=WarmStart(least=2, **few)))
    monkeypatch.setitem(REGIMES, 'plain', Regime('plain', ''))
    monkeypatch.setitem(REGIMES, 'far', Regime('far', '', {'hops': [4]}))
    kept = tmp_path / 'study' / 'bases.csv'
    main(['plain', 'seed=2', f'folder={tmp_path / "base"}', 'questions=2', f'table={kept}'])
    assert kept.read_text().startswith('regime,seed,right') and '\nplain,2,0.0,' in kept.read_text()
    out = capsys.readouterr().out
    assert (tmp_path / 'base' / 'config.json').exists() and f'{tmp_path / "base"}: right 0.000' in out
    assert 'all_wrong 1.000' in out and 'tokens' in out
    main(['far', f'start={tmp_path / "base"}', f'folder={tmp_path / "next"}', 'questions=2'])   # begins with that one
    base, following, other = (load_model(str(f))[0].lm_head.weight for f in
                              (tmp_path / 'base', tmp_path / 'next', 'data/tiny_base'))
    assert 0 < (base - following).abs().max() < .05 < (base - other).abs().max()
    for bad, match in ((['plan'], "'plain'"), (['plain', 'sed=1'], "'seed'")):
        with pytest.raises(SystemExit, match=match): main(bad)


def test_a_step_of_each_number_of_look_ups_has_a_metric():
    most = {q.meta['hops'] for r in REGIMES.values() for q in world_of(r.world, 'dev', 0, 12).questions}
    assert {5, 6} <= most and {f'dev_em_{hops}' for hops in most} <= set(METRICS_OF_RUNS)
