"""60_methods, 63_train: each pair of parts either trains a step or is refused with its reason; rows that must agree
agree; a row costs what it says."""
import copy
import dataclasses
import itertools
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch

from credit_rl.engine import HFEngine, ScriptedEngine
from credit_rl.tspo import folr_rewards
from credit_rl.layout import pack
from credit_rl.learner import FrozenModels, Learner, Optimiser, make_critic
from credit_rl.methods import LOSSES, METHODS, REWARDS, RULES, SAMPLINGS, compose, extra_passes, get_method, refusal
from credit_rl.models import load_model, load_tokenizer, other_words
from credit_rl.parts import Credit, Facts, Golds, Loss, Measured, Needs, Row, assign, not_dropped, turn_starts
from credit_rl.process_model import process_texts
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.rollout import rollout
from credit_rl.runlog import RunLog, latest_checkpoint, read_metrics
from credit_rl.scoring import gold_templates
from credit_rl.settings import check, make_config
from credit_rl.setup import Setup
from credit_rl.tiny import NOISY, act, tiny_environment
from credit_rl.train import Run, read_memory, train, train_step
from credit_rl.trajectory import example_group, Group, Result
from credit_rl.true_credit import continuation_values
from credit_rl.vspo import vspo_weights
from credit_rl.world import make_world
from deepspeed_steps import PlainSGD
from made_runs import learner_of


class StubJudge:
    "Stands for an endpoint: a verdict for PRS's long form, ratings for pairs of calls."
    def ask(self, prompts, parse):
        readers = [parse] * len(prompts) if callable(parse) else parse
        return [read(self.reply(p)) for p, read in zip(prompts, readers)]

    def reply(self, prompt):
        if isinstance(prompt, list):
            said, wanted = prompt[-1]['content'].split('[Q&A Agents Response]:')[1].split('[Reference Answer]:')
            return f'Evaluation Rating: {"Match" if said.strip() in wanted else "Mismatch"}'
        return f'ratings_by_pair={[[1, 2, len(prompt) % 3]] * prompt.count("</tool_response>")}'


class StubScorer:
    "Scores texts as a process reward model might."
    def score(self, texts): return [len(text) % 7 / 7 for text in texts]


@pytest.fixture(scope='module')
def world(root):
    "Small base, its chat, noisy games of six questions with four attempts each, and the environment."
    model, tokenizer = load_model(str(root / 'data' / 'tiny_base'))
    chat = Chat(PROTOCOLS['tiny'], tokenizer)
    land = make_world('train', 3, size=60, questions=6)
    env = tiny_environment(land, chat)
    groups = rollout(ScriptedEngine(lambda text, rng: act(text, rng, NOISY), tokenizer), env, land.questions,
                     group_size=4, seed=2)
    # scripted players have no log-probabilities of their own
    scored = Learner(copy.deepcopy(model)).evaluate(pack(groups)).logp
    return model, chat, groups, env, land, scored


def games(world, shift=0.):
    """The groups with the small base's own log-probabilities, `shift` lower on every second rollout, as those they
    were sampled with."""
    model, chat, groups, env, land, scored = world
    layout, numbers = pack(groups), itertools.count()

    def resampled(t):
        i = next(numbers)
        rows = (layout.row_trajectory == i).nonzero()[:, 0]
        own = [scored[rows][layout.token_turns[rows] == k] - shift * (i % 2) for k in range(len(t.turns))]
        return dataclasses.replace(t, turns=[dataclasses.replace(turn, action_logps=x.tolist())
                                             for turn, x in zip(t.turns, own)])
    return [Group(g.question, [resampled(t) for t in g.trajectories]) for g in groups]


AT_ONCE = Optimiser(.1, minibatches=1, clip=1e9)


def looks(learner, world):
    "A look that asks a learner, or a policy that plays on, for what a method asks, and for nothing else."
    model, chat, _, env = world[:4]

    def look(layout, needs):
        if not needs.forwards and not needs.plays: return None
        golds, seen = {n: gold_templates(chat, needs.groups, g.schema) for n, g in needs.golds.items()}, Measured()
        if needs.forwards: seen = learner.evaluate(layout, needs, golds)
        if not needs.plays: return seen
        engine = HFEngine(model, chat.tokenizer, max_length=192)
        return dataclasses.replace(seen, state_values=continuation_values(engine, env, needs.groups, needs.plays)[0])
    return look


def a_step(world, method, options=None, groups=None):
    """One update of a method on the stored games: batch, what was logged, the gradient's direction as the change of
    weights under SGD, forwards besides the step."""
    model, chat = world[:2]
    method = method.bind(options or {})
    critic = make_critic(model, **method.critic) if method.critic else None
    frozen = FrozenModels(teacher_every=0 if method.needs.teacher else None)
    learner = Learner(copy.deepcopy(model), method.loss, AT_ONCE, critic, frozen, backend=PlainSGD())
    before = {n: w.clone() for n, w in learner.weights().items()}
    batch = assign(method, groups or games(world), looks(learner, world), torch.Generator().manual_seed(0))
    passes, stats = dict(learner.passes), learner.step(batch.layout, batch.seen, batch.credit)
    return batch, stats, change(before, learner), passes


def change(before, learner):
    "By how much weights moved, as one vector."
    return torch.cat([(w - before[n]).flatten() for n, w in sorted(learner.weights().items())])


def pairs():
    """Every pair of parts of which one asks something of the other, with a turn reward where the rule asks for one. Of
    the losses GSPO's alone minds whether credit differs from turn to turn."""
    turn_rewards = [r for r in REWARDS if REWARDS[r].gives == 'turns']
    rewards = [('outcome', r) if REWARDS[r].gives != 'outcome' else (r,) for r in REWARDS]
    rewards += [('prs', 'folr'), ('outcome', 'folr', 'gain')]
    for earned, rule in itertools.product(rewards, RULES): yield earned, rule, 'all', 'ppo'
    for earned, sampling in itertools.product(rewards, SAMPLINGS):
        yield earned, 'accumulate' if set(earned) & set(turn_rewards) else 'group', sampling, 'ppo'
    for earned, loss in zip(rewards, itertools.cycle(LOSSES)):
        yield earned, 'accumulate' if set(earned) & set(turn_rewards) else 'group', 'all', loss
    own = lambda rule: ('outcome', *('rules',) * RULES[rule].wants_turns)
    for rule, sampling in itertools.product(RULES, SAMPLINGS): yield own(rule), rule, sampling, 'ppo'
    for rule, loss in itertools.product(RULES, ('ppo', 'gspo')): yield own(rule), rule, 'all', loss
    for rule, loss in zip(RULES, itertools.cycle(LOSSES)): yield own(rule), rule, 'all', loss
    for sampling, loss in zip(itertools.cycle(SAMPLINGS), LOSSES): yield ('outcome',), 'group', sampling, loss


PAIRS = sorted(set(pairs()))
SPELT = ['/'.join(('+'.join(p[0]), *p[1:])) for p in PAIRS]


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.long
def test_every_pair_trains_or_is_refused(world, rule):
    "An accepted pair takes a step with finite numbers that moves the weights; a refused one raises its reason."
    batch = two_turns(games(world)) if rule == 'call' else games(world)
    rights = [sum(t.answer in g.question.answers for t in g.trajectories) for g in batch]
    # all wrong, mixed, mixed
    batch, taken = [batch[rights.index(0)], *[g for g, n in zip(batch, rights) if 0 < n < 4][:2]], 0
    stubs = {'judge': StubJudge, 'judged': StubJudge, 'prm': StubScorer}
    for p, spelt in zip(PAIRS, SPELT):
        if p[1] != rule: continue
        if why := refusal(*p):
            with pytest.raises(ValueError) as refused: get_method(spelt)
            assert why in str(refused.value) and len(why) > 30
            continue
        method, taken, given = get_method(spelt), taken + 1, {}
        for reward in stubs.keys() & set(p[0]):
            knob = 'prm' if reward == 'prm' else 'judge'
            given[knob if knob in method.knobs else f'{reward}.{knob}'] = stubs[reward]()
        played = [in_parts(g) for g in batch] if 'notes' in p[0] else batch
        learned, stats, moved, passes = a_step(world, method, given, groups=played)
        assert learned.credit.advantages.isfinite().all() and moved.isfinite().all(), spelt
        assert moved.abs().max() > 0 and math.isfinite(stats['loss']), spelt
        assert passes == extra_passes(method), spelt
    assert taken


def in_parts(group):
    "The same games, their question said to be of the form that notes are checked in, of one part."
    question = dataclasses.replace(group.question, meta={**group.question.meta, 'form': 'parts'})
    return Group(question, [dataclasses.replace(t, question=question) for t in group.trajectories])


def two_turns(groups):
    "The first and the last turn of every rollout."
    ends = lambda t: dataclasses.replace(t, turns=[*t.turns[:1], *t.turns[-1:]])
    return [Group(g.question, [ends(t) for t in g.trajectories]) for g in groups]


def right_answers(groups):
    "Exact match by hand: the tiny world's answers need no normalisation."
    return torch.tensor([float((t.answer or '').strip() in t.question.answers) for g in groups for t in g.trajectories])


def test_a_row_knows_what_is_right(world):
    "Whatever an outcome pays, every row knows which answers are right."
    groups = games(world)
    for name, row in METHODS.items():
        assert torch.equal(row.text_rewards(groups)['right'], right_answers(groups)), name


def test_every_rule_takes_the_outcome_of_igpo_or_of_prs_by_name(world):
    "IGPO's by the options `metric` and `penalty`, PRS's stages by the part's name."
    groups = games(world)
    of = lambda method: method.text_rewards(groups)['outcome']
    igpo, plain, prs = of(METHODS['igpo-f1'].bind({})), of(METHODS['grpo']), of(METHODS['prs'])
    assert not torch.equal(igpo, plain)
    for name, row in METHODS.items():
        if 'outcome' not in [r.name for r in row.rewards]: continue
        if any(r.gives == 'levels' for r in row.rewards):            # which takes grades in [0, 1]
            with pytest.raises(ValueError, match='penalty'): row.bind({'metric': 'f1', 'penalty': -1.})
        else: assert torch.equal(of(row.bind({'metric': 'f1', 'penalty': -1.})), igpo), name
        assert torch.equal(of(row.bind({'metric': 'em', 'penalty': None})), plain), name
        stages = '+'.join('prs' if r.name == 'outcome' else r.name for r in row.rewards) + f'/{row.rule.name}'
        if name == 'carl':                                # whose critic is a chance of success
            with pytest.raises(ValueError, match='success'): compose(stages)
        else: assert torch.equal(of(compose(stages)), prs), name


def answers(group, *said):
    "The same rollouts with other answers in their last turns; None: a malformed call, and no answer."
    def other(t, text):
        last = t.turns[-1]
        if text is None: last = dataclasses.replace(last, action_text='<tool_call>', result=Result.MALFORMED)
        return dataclasses.replace(t, turns=[*t.turns[:-1], last], answer=text)
    return Group(group.question, [other(t, text) for t, text in zip(group.trajectories, said)])


def test_graded_outcomes_with_folr_by_hand():
    """F1 of one word of two against one is 2/3: what was shown the gold earns α of the rest up to it; under exact match
    the rewards are eq. 6's; a broken call of PRS earns -1 in all turns, and a grade out of [0, 1] is refused."""
    group = answers(example_group(), 'Budapest', 'Budapest city', 'Vienna')
    def table(spelling, group, **options):
        rewards = compose(spelling).bind(options).text_rewards([group])
        return rewards['outcome'][:, None] + rewards['turns']
    f1 = table('outcome+folr/turns', group, metric='f1', right='em', alpha=.5)
    torch.testing.assert_close(f1, torch.tensor([[1.] * 4, [5 / 6, 5 / 6, 2 / 3, 2 / 3], [0.] * 4]))
    torch.testing.assert_close(table('outcome+folr/turns', group, metric='f1', right='f1', alpha=.5), f1)
    em = table('outcome+folr/turns', group, alpha=.3)
    assert torch.equal(em, folr_rewards(torch.tensor([1., 0, 0]), torch.tensor([1, 1, -1]), em > -1, .3))
    tags = dict(tags=('think', 'tool_call', 'answer'))
    whole = table('prs+folr/turns', answers(example_group(), 'Budapest', 'Vienna', 'Vienna'), **tags)
    torch.testing.assert_close(whole, torch.tensor([[2.1] * 4, [2.1, 2.1, 1.1, 1.1], [1.1] * 4]))
    broken = table('prs+folr/turns', answers(example_group(), 'Budapest', None, 'Vienna'), **tags)
    torch.testing.assert_close(broken, torch.tensor([[2.1] * 4, [-1.] * 4, [1.1] * 4]))
    with pytest.raises(ValueError, match='grades'): table('outcome+folr/turns', group, metric=lambda said, golds: 2.)


@pytest.fixture(scope='module')
def plain(world): return a_step(world, METHODS['grpo'])[2]


@pytest.mark.parametrize('name', [n for n in METHODS if n not in ('grpo', 'mt-grpo', 'gspo')])
def test_a_row_is_not_grpo(world, plain, name):
    "The gradient on the stored games differs from GRPO's; and the forwards are those that the row states."
    _, _, moved, passes = a_step(world, METHODS[name])
    assert passes == extra_passes(METHODS[name])
    assert (moved - plain).norm() > 1e-3 * plain.norm()


def test_gspo_is_grpo_until_the_policy_moves(world):
    "At ratios of 1 the gradient of a rollout's mean ratio is GRPO's; once ratios differ, so do the two."
    moved = lambda **how: [a_step(world, METHODS[n], **how)[2] for n in ('gspo', 'grpo')]
    torch.testing.assert_close(*moved(), atol=1e-6, rtol=1e-4)
    gspo, grpo = moved(groups=games(world, shift=.1))
    assert (gspo - grpo).norm() > 1e-3 * grpo.norm()


@pytest.mark.parametrize('average', ['token-mean', 'token-sum'])
def test_vspo_counts_the_kl_of_a_kept_row_once(world, average):
    """ω is a statement about advantages: with a KL term the step is the step without it and that of the KL alone, in
    which a kept row weighs 1, whatever its ω, a dropped one 0, and the batch keeps its denominator."""
    groups, model = games(world), world[0]
    reference = copy.deepcopy(model)
    with torch.no_grad(): reference.get_output_embeddings().weight.mul_(1.5)
    method = compose(Row('tried', 'outcome/group/value', None, options={'smoothing': 3}, average=average))

    def moved(layout, credit, loss):
        learner = Learner(copy.deepcopy(model), loss, AT_ONCE, frozen=FrozenModels(reference), backend=PlainSGD())
        before = {n: w.clone() for n, w in learner.weights().items()}
        learner.step(layout, learner.evaluate(layout, Needs(logp=True, ref_logp=bool(loss.kl))), credit)
        return change(before, learner)

    batch = assign(method, groups, lambda layout, asks: None, torch.Generator().manual_seed(0))
    weights, counts = vspo_weights(method.text_rewards(groups)['outcome'].view(6, 4), alpha=3,
                                   generator=torch.Generator().manual_seed(0))
    assert (counts == 0).any() and weights.max() > 1.5
    both, alone = (moved(batch.layout, batch.credit, Loss(average=average, kl=kl)) for kl in (.5, 0.))
    whole = pack(groups)
    once = Credit(torch.zeros(whole.ids.shape), trajectory_weight=(counts > 0).float().repeat_interleave(4))
    expected = moved(whole, once, Loss(average=average, kl=.5))
    assert expected.norm() > 1e-3 * alone.norm()
    assert (both - alone - expected).norm() < 1e-3 * expected.norm()


def test_missing_measures_take_a_rollout_out(world):
    "A rollout without gold scores has weight 0 and changes nobody else's credit outside its group."
    look = looks(Learner(copy.deepcopy(world[0])), world)
    def without_one(layout, asks):
        seen, gone = look(layout, asks), torch.tensor([2])
        return dataclasses.replace(seen, gold_logp=seen.gold_logp.clone().index_fill_(0, gone, torch.nan))
    whole, lost = (assign(METHODS['igpo'], games(world), how).credit for how in (look, without_one))
    assert whole.trajectory_weight is None and lost.trajectory_weight.tolist() == [float(i != 2) for i in range(24)]
    assert not lost.advantages[2].any() and torch.equal(whole.advantages[4:], lost.advantages[4:])
    assert not torch.equal(whole.advantages[1], lost.advantages[1])


def test_a_method_needs_what_its_parts_look_at():
    "Each row's `Needs`: the models that its rewards read, their schemas, ends where these are scored, and rounds."
    needs = lambda spelling, **options: get_method(spelling).bind(options).needs
    assert needs('grpo') == Needs() and needs('igpo') == Needs(gold=Golds('own', 16))
    assert needs('tips') == Needs(teacher=Golds(), values=True) and needs('dapo', draws=2) == Needs(rounds=2)
    assert needs('igpo', schema='igpo').golds['gold'].schema == 'igpo' and needs('vine').plays == 4
    assert needs('tips', terminal='teacher').ends and not needs('tips-hmax').ends
    assert needs('igpo', golds=3).gold.most == 3 and needs('tips', golds=2).teacher.most == 2
    with pytest.raises(ValueError, match='golds'): needs('igpo', golds=0)
    with pytest.raises(ValueError, match='scored'): needs('outcome+shaping+record/turns', **{'shaping.schema': 'bare'})


def test_parts_log_what_they_measured(world):
    "Shaping logs its weight and its size; a row without such a part logs nothing."
    batch, *_ = a_step(world, METHODS['tips'], {'alpha': .3})
    logged = METHODS['tips'].bind({'alpha': .3}).metrics(batch)
    before_last = batch.layout.turn_mask & torch.nn.functional.pad(batch.layout.turn_mask[:, 1:], (0, 1))
    size = batch.rewards['shaping'][before_last].abs().mean().item()
    assert logged == {'alpha': .3, 'mean_abs_shaping': pytest.approx(size)} and size > 0
    assert METHODS['tspo'].metrics(batch) == {} and set(logged) == set(REWARDS['shaping'].logs)


@pytest.fixture
def tomorrow(monkeypatch):
    "A rule that nobody knows yet, registered with some fields of its own: a function of these fields."
    def register(**fields):
        usual = {'name': 'tomorrow', 'turnwise': True, 'wants_turns': False}
        monkeypatch.setitem(RULES, 'tomorrow', dataclasses.replace(RULES['group'], **{**usual, **fields}))
    return register


def test_a_new_rule_is_refused_by_what_it_says_of_itself(tomorrow, monkeypatch):
    tomorrow(turnwise=False)
    unsummed = {name: why for name, r in REWARDS.items() if (why := r.fits(RULES['tomorrow'], {})) and r.of_turns}
    assert {*unsummed} == {'shaping', 'continuations', 'solver', 'table'}
    for reward, why in unsummed.items():
        found = refusal(('outcome', reward), 'tomorrow')
        assert 'tomorrow sums over turns' in found and why in found and 'take one of' in found
        with pytest.raises(ValueError, match='tomorrow'): compose(f'outcome+{reward}/tomorrow')
    assert refusal(('outcome', 'gain'), 'tomorrow') is refusal(('outcome', 'folr'), 'tomorrow') is None
    tomorrow(fits=RULES['calls'].fits)
    fixed = dataclasses.replace(REWARDS['rules'], name='fixed', gives='changes')    # any reward that telescopes
    monkeypatch.setitem(REWARDS, 'fixed', fixed)
    for reward in ('shaping', 'fixed', 'notes'):
        assert f'so {reward} would not telescope' in refusal(('outcome', reward), 'tomorrow')
    assert refusal(('outcome', 'rules'), 'tomorrow') is None
    tomorrow(wants_turns=True)
    assert 'compares turn rewards' in refusal(('outcome',), 'tomorrow')
    tomorrow(fits=RULES['smdp'].fits)
    assert 'a chance of success' in refusal(('prs',), 'tomorrow') and refusal(('outcome',), 'tomorrow') is None
    tomorrow(fits=not_dropped('tomorrow needs them'))
    assert 'tomorrow needs them' in refusal(('outcome',), 'tomorrow', 'value')
    tomorrow(critic={'kind': 'own', 'at': 'turns'})
    assert 'with a critic these teach too' in refusal(('outcome',), 'tomorrow', 'varied')
    tomorrow()
    assert 'tomorrow would do nothing' in refusal(('outcome',), 'tomorrow', 'all', 'gspo')


def a_run(world, folder, method, **changes):
    "A run of a method in a small world, from the small base, without a test set."
    model, chat = world[:2]
    land = make_world('train', 3, size=60, questions=40)
    setup = Setup(chat, copy.deepcopy(model), {'train': list(land.questions)}, {'train': tiny_environment(land, chat)})
    config = make_config({'method': method, 'questions_per_step': 2, 'group_size': 2, 'log_kl': False, **changes})
    learner = learner_of(config, copy.deepcopy(model))
    return Run(config, setup, HFEngine(learner.scorer.model, chat.tokenizer), learner, RunLog(str(folder)))


def test_dapo_asks_again(world, tmp_path):
    "Where too few groups vary, another round of rollouts is made, up to the limit."
    play = lambda draws: train_step(a_run(world, tmp_path / str(draws), 'dapo', options={'draws': draws},
                                          questions_per_step=4, group_size=4), 1)
    once, thrice = play(1), play(3)
    assert once['trajectories'] == 16 and thrice['trajectories'] in (32, 48)
    assert once['groups_mixed'] < 1                                            # a draw was needed


def test_the_controller_moves_alpha_and_survives_in_json(world, tmp_path):
    "TIPS's dynamic α: its state is JSON, a resumed run goes on from it."
    run, alphas, means = a_run(world, tmp_path, 'tips', options={'band': 'small', 'alpha': 1.0}), [], []
    for step in (1, 2, 3):
        run.memory = json.loads(json.dumps(run.memory))
        alphas.append(train_step(run, step)['alpha'])
        means.append(run.memory['method']['shaping']['mean'])
    assert alphas[0] == 1.0 and alphas[2] <= alphas[1] < 1.0                   # far above the band: α falls
    assert len(set(means)) == 3                                                # every step is remembered


def test_a_pilot_fixes_alpha_through_a_resumption_and_teachers_made_anew(tmp_path):
    "Five steps at .1, then .2 over the mean size of their turns, by a whole run as by one resumed after three steps."
    small = dict(model='data/tiny_base', method='tips', options={'alpha': 'pilot'}, questions_per_step=1, group_size=2,
                 questions=9, dev_questions=1, test_questions=1, max_turns=2, turn_tokens=8, world={'size': 60},
                 threads=1, eval_every=3, teacher_every=2, log_kl=False)
    def play(name, steps, **more):
        train({**small, 'run': str(tmp_path / name), 'steps': steps, **more}, say=lambda line: None)
        return read_metrics(tmp_path / name).alpha.dropna().tolist()
    whole = play('whole', 7)
    assert whole[:5] == [.1] * 5 and len(set(whole[5:])) == 1 and whole[5] != .1
    play('parts', 3)
    assert play('parts', 7, resume=True) == whole
    kept = read_memory(latest_checkpoint(tmp_path / 'parts')[1])[0]['method']['shaping']
    assert kept['steps'] == 0 and math.isclose(kept['alpha'], .2 * kept['turns'] / kept['total'])


def test_shaping_with_folr_keeps_its_own_alpha(world, tmp_path):
    "Where two rewards have an `alpha`, the controller moves that of the shaping, and the other stays."
    options = {'band': 'small', 'shaping.alpha': .9, 'folr.alpha': .3}
    run = a_run(world, tmp_path, 'outcome+folr+shaping/turns', options=options)
    logged = [train_step(run, step) for step in (1, 2)]
    assert logged[0]['alpha'] == .9 and logged[1]['alpha'] != .9
    assert run.method.options['folr.alpha'] == .3


def test_tokens_read_are_those_of_rows_and_answers(world, tmp_path):
    "Each row once, and each gold's ids at each state of its rollout before the last turn's end."
    chat, groups = world[1], world[2]
    run, layout = a_run(world, tmp_path, 'igpo'), pack(groups)
    look = run.look()
    look(layout, dataclasses.replace(run.method.needs, groups=groups))
    flat = [t for g in groups for t in g.trajectories]
    answers = gold_templates(chat, groups)
    by_hand = sum(len(t.turns) * sum(len(a.ids) for a in golds) for t, golds in zip(flat, answers))
    assert look.tokens == int(layout.lengths.sum()) + by_hand


REFUSED = [
    ('outcome+judge/calls', {}, 'judge'), ('mt-grpo', {}, 'max_turns'), ('ppo', {'critic': 'mine'}, 'shared'),
    ('tips', {'options': {'band': 'tiny'}}, 'medium'), ('grpo', {'critic': 'own'}, 'has no critic'),
    ('tips', {'teacher': 'data/tiny_base', 'teacher_every': 3}, 'never refreshed'),
    ('grpo', {'loss': {'cliphigh': 1}}, 'clip_high'), ('prs+prs/group', {}, 'outcome'),
    ('outcome/group/all/ppo/more', {}, 'rewards/rule/sampling/loss'), ('outcome/grup', {}, "'group'"),
    ('tspo', {'options': {'alpha': 2}}, 'alpha'), ('tspo', {'options': {'alhpa': 1}}, "'alhpa'"),
    ('prs+vspoo', {}, "'prs.vspo'"), ('prs', {'protocol': 'carl-tiny'}, 'by their tags, .* None'),
    ('prs+vspo', {'protocol': 'carl-tiny-direct'}, 'tags'), ('prs', {'options': {'tags': ['think', 'tool_call']}}, 'tags'),
    ('tips', {'options': {'schema': 'tpis'}}, "'bare'"), ('igpo', {'options': {'schema': 'igop'}}, "'bare'"),
    ('igpo', {'options': {'schema': 'igpo'}, 'protocol': 'carl-tiny'}, "'carl-tiny'"),
    ('tips', {'options': {'schema': 'bare'}, 'protocol': 'carl-tiny'}, "'carl-tiny'"),
    ('grpo', {'gold_schema': ['{relation} ', '']}, 'place'), ('grpo', {'gold_schema': ['{open}']}, 'gold_schema'),
    ('grpo', {'measure': ['belief'], 'gold_schema': ['<{tag}>', ''], 'protocol': 'carl-tiny'}, "'carl-tiny'"),
    ('igpo', {'data': 'gsm8k', 'model': 'data/tiny_base', 'protocol': 'tiny'}, "'gsm8k'"),
    ('tips', {'model': 'data/tiny_carl', 'teacher': 'data/tiny_base', 'protocol': 'carl-tiny'}, 'family')]


@pytest.mark.parametrize('name, changes, message', REFUSED)
def test_refused_before_compute(root, monkeypatch, name, changes, message):
    monkeypatch.chdir(root)
    with pytest.raises(ValueError, match=message): check(make_config({'method': name, **changes}))


def test_a_teacher_with_the_policys_words_is_let_in(root, monkeypatch, tmp_path):
    "Another model with the same ids; also one that has words besides, to which the policy's ids say the same."
    monkeypatch.chdir(root)
    shutil.copytree('data/tiny_base', tmp_path / 'more')
    tokenizer = load_tokenizer('data/tiny_base')
    tokenizer.add_tokens(['<more>'])
    tokenizer.save_pretrained(tmp_path / 'more')
    base, more = 'data/tiny_base', str(tmp_path / 'more')
    for given in ({'teacher': base}, {'teacher': more}, {'teacher': more, 'model': base},
                  {'teacher': base, 'model': more}):                                           # told the text
        check(make_config({'method': 'tips', **given}))
    assert "'<more>', is no token at all" in other_words(base, more)


def test_igpo_pays_the_penalty_for_a_turn_without_reasoning():
    "In a run the protocol's reasoning tag is known; what broke is the outcome, and nothing else changes."
    group, method = example_group(), METHODS['igpo'].bind({}, Facts(tags=('think', 'tool_call', 'answer')))
    first, *others = group.trajectories
    mute = dataclasses.replace(first.turns[0], action_text=first.turns[0].action_text.replace('</think>', ''))
    broken = Group(group.question, [dataclasses.replace(first, turns=[mute, *first.turns[1:]]), *others])
    whole, found = method.text_rewards([group]), method.text_rewards([broken])
    assert whole['outcome'].tolist() == [1, 0, 0] and found['outcome'].tolist() == [-1, 0, 0]
    assert found['right'][0] == 1                                                    # right, whatever it pays


@pytest.mark.parametrize('lam', [.5, 1.])
def test_tips_below_lambda_one(world, lam):
    "Shaped GAE, token by token, is the recursion written out, and GAE with the critic V + αΦ of the state before."
    generator = torch.Generator().manual_seed(3)
    method = METHODS['tips'].bind({'lam': lam, 'alpha': .3, 'whiten': False})

    def look(layout, asks):
        shape = (*layout.states.shape[:2], 1)
        values = torch.randn(layout.ids.shape, generator=generator) * layout.trained
        return Measured(values=values, teacher_logp=-9 * torch.rand(shape, generator=generator),
                        teacher_tokens=torch.ones(shape).long())
    batch = assign(method, games(world)[:3], look)
    layout, seen, rewards = batch.layout, batch.seen, batch.rewards
    for i in range(len(layout.groups)):
        at = layout.trained[i].nonzero()[:, 0].tolist()
        turn, v, phi = layout.token_turns[i], seen.values[i], seen.teacher_logp[i, :, 0]
        turns, later, shifted = int(layout.turn_mask[i].sum()), 0., 0.
        critic = lambda s: v[s] + .3 * phi[int(turn[s])]
        for j, t in reversed(list(enumerate(at))):
            k, last = int(turn[t]), j + 1 == len(at)
            after = None if last else at[j + 1]
            ends = last or int(turn[after]) != k                              # the turn's last token is paid
            paid = .3 * ((0. if k + 1 == turns else phi[k + 1]) - phi[k]) if ends else 0.
            outcome = rewards['outcome'][i] if last else 0.
            later = outcome + paid + (0. if last else v[after]) - v[t] + lam * later
            shifted = outcome + (0. if last else critic(after)) - critic(t) + lam * shifted
            assert math.isclose(batch.credit.advantages[i, t], later, abs_tol=1e-4)
            assert math.isclose(later, shifted, abs_tol=1e-4)


@pytest.mark.parametrize('name', ['mt-grpo', 'mt-grpo*'])
def test_mt_grpo_is_a_mean_over_rollouts_of_sums_over_tokens(world, name):
    "TIPS eq. 5: a batch played twice makes the same step, and a rollout with more tokens a larger one."
    groups = two_turns(games(world)[:3]) if name == 'mt-grpo' else games(world)[:3]
    once, twice = (a_step(world, METHODS[name], groups=batch) for batch in (groups, groups * 2))
    torch.testing.assert_close(twice[2], once[2], atol=1e-6, rtol=1e-3)
    assert METHODS[name].loss.average == 'group-mean-token-sum' and once[2].norm() > 0


def test_one_missing_number_decides_nothing_for_the_others():
    "A right rollout without a score leaves an all-wrong group; a missing first value leaves CARL's rollout; whole numbers."
    group = example_group()
    right, near, lost = group.trajectories
    bad = {*process_texts(right)} - {*process_texts(near)}
    scorer = SimpleNamespace(score=lambda texts: [math.nan if x in bad else .5 for x in texts])
    found = assign(compose('outcome+folr+prm/turns').bind({'prm': scorer}), [group], lambda layout, needs: None)
    one = turn_starts(found.credit.advantages, found.layout)
    torch.testing.assert_close(one, torch.tensor([[0., 0, 0, 0], [1, 1, 0, 0], [-1, -1, 0, 0]]), atol=1e-3, rtol=0)

    def look(layout, needs):
        values = .5 * layout.trained
        values[0, layout.token_turns[0] == 0] = math.nan
        return Measured(values=values)
    whitened = assign(METHODS['carl'].bind({'whiten': True}), [group], look)
    assert not whitened.credit.advantages[0].any() and whitened.credit.advantages[1].any()
    with pytest.raises(ValueError): assign(METHODS['turn-ppo'].bind(), [group], look)

    paid = [dataclasses.replace(t, turns=[dataclasses.replace(turn, reward=pay) for turn in t.turns]) for t, pay in ((right, 1), (near, .5))]
    found = assign(get_method('outcome+brought/mean'), [Group(group.question, paid)], lambda layout, needs: None)
    assert found.rewards['turns'].tolist() == [[1.] * 4, [.5] * 4]
