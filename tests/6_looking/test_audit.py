"""71_audit: scores of known answer, a checkpoint judged from a shell, real data and a random model: honest zeros."""

import dataclasses
import functools
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import kendalltau
from torch.testing import assert_close

from credit_rl import audit as audit_module, train as train_module
from credit_rl.audit import (FEW, KINDS, AuditChoice, Truth, _audit_figure, _findings, _product, agreement_intervals, agreements, audit,
                             find_truth, kendall, main, read_audit_settings, rollouts_saved, saving_says,
                             signal_to_noise, squares_by_kind, turn_kinds)
from credit_rl.engine import ScriptedEngine
from credit_rl.launch import Progress
from credit_rl.metrics import exact_match
from credit_rl.outcome import outcome_rewards
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.studies.regimes import BASES, regime_environment
from credit_rl.rollout import rollout
from credit_rl.significance import ratio_interval
from credit_rl.tiny import Player, act, player_state, tiny_environment, tiny_tokenizer
from credit_rl.true_credit import exact_values, state_values, turn_credit
from credit_rl.world import REGIMES, make_world, world_of

WEAK = Player(one_word=.3, restart=.2, near_miss=.4, early=.1)
AUDIT = ['model=data/tiny_base', 'questions=20', 'dev_questions=4', 'test_questions=4', 'questions_per_step=4',
         'group_size=4']
SCORES = ['within rollouts', 'within groups', 'sign']
earned = lambda groups: outcome_rewards(groups, exact_match)


@pytest.fixture(scope='module')
def truth():
    chat = Chat(PROTOCOLS['tiny'], tiny_tokenizer())
    world = make_world('train', 7, size=120, questions=24, hops=(1, 2, 2))
    env = tiny_environment(world, chat)
    engine = ScriptedEngine(lambda text, rng: act(text, rng, WEAK), chat.tokenizer)
    groups = rollout(engine, env, list(world.questions), 4, seed=3)
    exact = exact_values(lambda text, rng: act(text, rng, WEAK), env, groups, state=player_state)
    return find_truth(engine, env, groups, 24, earned, seed=1), exact


def test_rank_correlation_is_scipys():
    "With ties, holes, and rows that have none."
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(4, (60, 6), generator=generator).float() for _ in range(2))
    mask = torch.rand(60, 6, generator=generator) < .8
    wanted = torch.tensor([kendalltau(a[m], b[m]).statistic if m.sum() > 1 else math.nan
                           for a, b, m in zip(x, y, mask)], dtype=torch.float32)
    assert wanted.isnan().any()
    assert_close(kendall(x, y, mask), wanted, equal_nan=True, atol=1e-5, rtol=0)


@pytest.mark.long
def test_the_truth_scores_1_and_chance_0(truth):
    "The exact credit of a scripted player against itself measured; chance beside it, 0 and ½ within its interval."
    found, exact = truth
    right = turn_credit(exact, found.outcome, found.turn_mask)
    table = audit({'exact': right}, found)
    assert table.loc['exact', 'sign'] > .97 and table.loc['exact', 'silent'] == 0
    assert table.loc['exact', 'within groups'] > table.loc['half', 'within groups'] - .05 > .3
    few = dataclasses.replace(found, played=found.played[:, :FEW])              # what `vine` learns from
    alone = audit({'few': few.credit()}, dataclasses.replace(found, played=found.played[:, FEW:]))
    assert table.loc['vine', SCORES].tolist() == alone.loc['few', SCORES].tolist()
    assert table.loc['vine', 'within groups'] < table.loc['half', 'within groups']
    assert 'vine' not in audit({}, dataclasses.replace(found, played=found.played[:, :2 * FEW])).index
    for score, centre in (('within rollouts', 0), ('within groups', 0), ('sign', .5)):
        assert table.loc['chance', f'{score}, low'] <= centre <= table.loc['chance', f'{score}, high'], score
    own = audit({'true': found.credit()}, found).loc['true']
    assert own[['within rollouts', 'within groups', 'sign']].tolist() == pytest.approx([1, 1, 1], abs=1e-6)


def played_in(regime, asked):
    "Games of the regime's own player, judged by the regime's own outcome."
    chat = Chat(PROTOCOLS['tiny'], tiny_tokenizer())
    policy = lambda text, rng: act(text, rng, BASES[regime.name].player)
    env = regime_environment(regime, world := world_of({**regime.world, 'size': 150}, 'train', 7, asked), chat)
    engine, earned = ScriptedEngine(policy, chat.tokenizer), lambda groups: outcome_rewards(groups, regime.metric)
    groups = rollout(engine, env, list(world.questions), 4, seed=3)
    return policy, env, earned, find_truth(engine, env, groups, 32, earned, seed=1)


# where one rollout in a hundred is right, games of 24 questions hold next to no credit to measure
AUDITED = [name for name in REGIMES if name != 'rarely-right']


@pytest.mark.parametrize('name', [pytest.param(k, marks=[pytest.mark.nightly] * (k == 'far')) for k in AUDITED])
def test_measured_credit_is_the_exact_one_in_every_regime(name):
    "By its own player, its chances that a search fails, and its outcome."
    asked = {'far': 2, 'many-parts': 3}.get(name, 10)               # whose games branch most
    policy, env, earned, found = played_in(REGIMES[name], asked)
    exact = exact_values(policy, env, found.groups, earned, player_state)
    values, errors = state_values(found.played, found.index)
    each = torch.zeros(len(found.played))                            # attempts share states
    each[found.index[found.turn_mask]] = ((values - exact) / errors)[found.turn_mask]
    assert each.pow(2).mean() < 1.5 ** 2
    table = audit({'exact': turn_credit(exact, found.outcome, found.turn_mask)}, found)
    assert table.loc['exact', 'sign'] > .8          # where many turns earn nothing, some seem to: by two errors


@pytest.mark.long
def test_few_continuations_say_on_average_what_many_do(truth):
    """Σ A² by kind of turn, less its noise, from four continuations, drawn 300 times from the exact values: on average
    that of the exact credit. The squared errors of an interval are biased: by them it is 28.8 in all, and not 24.8."""
    found, exact = truth
    owner, at = exact.isfinite().nonzero(as_tuple=True)
    value = torch.zeros(len(found.played)).index_put((found.index[owner, at],), exact[owner, at])
    right = turn_credit(exact, found.outcome, found.turn_mask) ** 2
    generator, kinds, got = torch.Generator().manual_seed(0), turn_kinds(found.groups), []
    wanted = torch.stack([right[kinds == i].sum() for i in range(len(KINDS))])
    for _ in range(300):
        played = (torch.rand(len(value), 4, generator=generator) < value[:, None]).float()
        got.append(squares_by_kind(Truth(found.groups, found.outcome, played, found.index), kinds).sum(0))
    got = torch.stack(got)
    error = 3 * got.std(0) / 300 ** .5
    assert ((got.mean(0) - wanted).abs() <= error).all() and error.max() < .1 * wanted.sum()


def test_scores_by_hand():
    "Two turns, one group of two: a rule that has one of two signs right, and passes over one clear turn."
    chat = Chat(PROTOCOLS['tiny'], tiny_tokenizer())
    world = make_world('train', 7, size=120, questions=1, hops=(1,))
    engine = ScriptedEngine(lambda text, rng: act(text, rng, Player()), chat.tokenizer)
    groups = rollout(engine, tiny_environment(world, chat), list(world.questions), 2)
    found = Truth(groups, torch.tensor([1., 0.]), torch.tensor([[0., 1.] * 50, [1.] * 100]), torch.tensor([[0, 1]] * 2))
    assert_close(found.credit(), torch.tensor([[.5, 0.], [.5, -1.]]))
    said = agreements(torch.tensor([[1., 5.], [0., 1.]]), found, turn_kinds(groups))
    score = {name: x[0] for name, x in agreement_intervals(said).items()}
    assert score['sign'] == .5 and score['silent'] == pytest.approx(1 / 3) and score['within groups'] == 1.
    assert math.isclose(score['within rollouts'], -1.)


def judged_gradients(questions, size, share, alike, times):
    """Gradients of a rule, of GRPO and of true credit, whose luck has one source: expectations of length `size` in each
    of 30 directions, the rule's turned away in all but `share`; `alike` of the luck is true credit's own. The true
    signal to noise of both, and draws."""
    generator = torch.Generator().manual_seed(0)
    drawn = lambda spread: torch.randn(questions, 30, generator=generator) * spread
    away = torch.tensor([1., -1.]).repeat(15)
    rule, scatter = size * (share + (1 - share) * away), (alike ** 2 + 1) ** .5
    def one():
        luck = drawn(1.)
        made, plain = (mean + alike * luck + drawn(1.) for mean in (rule, size))
        return made, plain, size + luck + drawn(.5)
    true = [size * part / (scatter / questions ** .5) for part in (share, 1.)]
    return true, (one() for _ in range(times))


def test_noise_of_many_directions_is_not_told_from_none():
    "With more directions than pairs of questions all variance comes of pairs; taken off whole, 25 of these 60 are told."
    drawn = [torch.randn(16, 4096, generator=torch.Generator().manual_seed(i)) for i in range(60)]
    assert sum(_product(x, x).interval()[1] > 0 for x in drawn) <= 5


@pytest.mark.parametrize('questions, size, share, alike', [
    (16, .5, 1., .5), (24, .5, 0., .2), *(pytest.param(*of, marks=pytest.mark.nightly) for of in (
        (24, .5, .5, .5), (24, 1., .5, 1.), (48, .4, .8, 1.)))])
def test_intervals_of_signal_to_noise_cover(questions, size, share, alike):
    """Of a rule, and of what it has more than GRPO on the same rollouts: 95 % intervals hold the truth in 93 to 97 %,
    give or take two standard errors of what 600 data sets can show (.9 % each)."""
    true, draws = judged_gradients(questions, size, share, alike, 600)
    held = []
    for made, plain, right in draws:
        own, base = signal_to_noise(made, right), signal_to_noise(plain, right)
        for x, wanted in ((own, true[0]), (own - base, true[0] - true[1])):
            value, low, high = x.interval()
            held.append([not math.isnan(value), low <= wanted <= high])
    told, held = torch.tensor(held).view(-1, 2, 2).float().sum(0).T
    assert (told > .85 * 600).all() and (held / told > .912).all() and (held / told < .988).all()


@pytest.mark.parametrize('questions, mean, alike', [
    (12, .5, 4.), (24, .9, 4.), *(pytest.param(*of, marks=pytest.mark.nightly) for of in ((24, 0., 4.), (64, .97, 4.)))])
def test_intervals_of_agreements_cover(questions, mean, alike):
    """Rank correlations of rollouts, −1 or 1, that are alike within a question, some of them unknown; shares likewise.
    The intervals hold the truth in 93 to 97 %, give or take two standard errors of what 600 data sets can show."""
    generator, held = np.random.default_rng(0), 0
    for _ in range(600):
        count = generator.binomial(4, .7, questions)
        right = generator.binomial(count, generator.beta(alike * (1 + mean) / 2, alike * (1 - mean) / 2, questions))
        sums, counts = torch.tensor(2 * right - count), torch.tensor(count)
        found = agreement_intervals({'within groups': (sums, counts), 'sign': (torch.tensor(right), counts)})
        held += found['within groups'][1] <= mean <= found['within groups'][2]
        assert [2 * x - 1 for x in found['sign']] == pytest.approx(found['within groups'])
    assert .912 < held / 600 < .988


@pytest.mark.parametrize('questions', [24, 64])
def test_intervals_of_shares_of_credit_cover(questions):
    "Three kinds of turns of a question with .5, .4 and .1 of the credit, by continuations whose noise is taken off."
    generator, held = torch.Generator().manual_seed(0), torch.zeros(3)
    for _ in range(600):
        credit = torch.rand(questions, 1, generator=generator) * torch.rand(questions, 3, generator=generator)
        squares = credit * torch.tensor([.5, .4, .1]) + .03 * torch.randn(questions, 3, generator=generator)
        ends = [ratio_interval(x, squares.sum(1)) for x in squares.T]
        held += torch.tensor([low <= share <= high for (_, low, high), share in zip(ends, (.5, .4, .1))])
    assert (held / 600 > .912).all() and (held / 600 < .988).all()


@pytest.mark.parametrize('questions, spread, other, play, size', [
    (24, 1., 2., .5, .4), (16, 1., 1.2, 1., 1.2), *(pytest.param(*of, marks=pytest.mark.nightly) for of in (
        (48, 2., 4., 2., .4), (24, 1., 1., .5, .6)))])
def test_the_interval_of_what_is_saved_covers(questions, spread, other, play, size):
    """Gradients around one expectation: true credit's scatter by `spread`, GRPO's by `other` on the same rollouts, the
    continuations add `play`. The 95 % intervals that are told hold the ratio of variances in 94 to 98 %."""
    generator, held, told, times = torch.Generator().manual_seed(0), 0, 0, 400
    drawn = lambda scale: torch.randn(questions, 30, generator=generator) * scale
    for _ in range(times):
        luck = drawn(spread) + size
        one, two = (luck + drawn(play) for _ in range(2))
        made = size + .5 * (luck - size) + drawn((other ** 2 - .25 * spread ** 2) ** .5)
        n, low, high = rollouts_saved(made, one, two)
        held, told = held + (low <= (other / spread) ** 2 <= high), told + (not math.isnan(n))
    assert .93 <= held / told <= .985 and told > .7 * times


def test_nothing_is_saved_where_credit_is_grpos_and_nothing_told_where_there_is_none():
    generator = torch.Generator().manual_seed(1)
    drawn = lambda: torch.randn(32, 20, generator=generator)
    luck = drawn() + 1
    n, low, high = rollouts_saved(luck, luck + .3 * drawn(), luck + .3 * drawn())
    assert low <= 1 <= high and n == pytest.approx(1, abs=.1)
    assert saving_says((n, low, high)).endswith('not shown to be more than 1.')
    assert 'shown' not in saving_says((3., 2., 5.)) and '3.0 (2.0 to 5.0) times' in saving_says((3., 2., 5.))
    assert all(map(math.isnan, rollouts_saved(drawn() - drawn(), drawn(), drawn())))
    assert 'cannot be told' in saving_says((math.nan,) * 3)
    assert 'at least 2.0 times' in saving_says((9., 2., math.inf))


def test_what_judges_a_credit_is_not_what_it_was_made_of(truth):
    """Continuations that know nothing of any state, drawn twelve times: credit of some of them agrees with all of them
    by luck, and with the others not. A rule that is called `vine` brings continuations of its own, and all of these
    judge it."""
    found, scores = truth[0], []
    for seed in range(100, 112):
        luck = torch.rand(found.played.shape, generator=torch.Generator().manual_seed(seed)) < .5
        found = dataclasses.replace(found, played=luck.float(), outcome=torch.full_like(found.outcome, .5))
        table = audit({'itself': found.credit(slice(FEW))}, found)
        scores.append(table.loc[['itself', 'half', 'vine'], 'within groups'].tolist())
    itself, half, few = torch.tensor(scores).mean(0).tolist()
    assert itself > .25 and abs(half) < .1 and abs(few) < .12
    table = audit({'vine': found.credit()}, found)
    assert table.loc['vine', 'within groups'] == pytest.approx(1.) and list(table.index).count('vine') == 1


def test_a_rule_plays_on_by_itself_and_others_judge_it(root, tmp_path, monkeypatch):
    "`vine` learns from continuations of its run, with another seed than those that are its judges."
    monkeypatch.chdir(root)
    played = {}
    for module in (audit_module, train_module):
        def noted(engine, env, states, count, sampling, seed, *more, of=module.__name__, play=module.continuations):
            played.setdefault(of, []).append((count, seed))
            return play(engine, env, states, count, sampling, seed, *more)
        monkeypatch.setattr(module, 'continuations', noted)
    main([*AUDIT, f'run={tmp_path}/a', 'rules=[grpo, vine]', 'asked=3', 'attempts=2', 'plays=2', 'teach=0'])
    (judge,), (own,) = played['credit_rl.audit'], played['credit_rl.train']
    assert judge[0] == 2 and own[0] == FEW and judge[1] != own[1]


def test_two_rules_on_the_same_rollouts_are_told_apart_where_each_alone_is_not(truth):
    "A slightly noisier copy of a rule: its interval holds the rule's value, that of the difference not 0."
    found, _ = truth
    generator = torch.Generator().manual_seed(2)
    gradients = torch.randn(*found.turn_mask.shape, 20, generator=generator) + found.credit()[..., None]
    noise = torch.randn(found.turn_mask.shape, generator=generator) * found.turn_mask
    rules = {'grpo': found.credit(), 'same': found.credit(), 'worse': found.credit() + .1 * noise}
    table, name = audit(rules, found, gradients), 'signal to noise over grpo'
    assert table.loc['same', [name, f'{name}, low', f'{name}, high']].tolist() == [0, 0, 0]
    assert table.loc['worse', 'signal to noise, high'] > table.loc['grpo', 'signal to noise']
    assert table.loc['worse', f'{name}, high'] < 0
    assert table.loc['worse', name] == pytest.approx(
        table.loc['worse', 'signal to noise'] - table.loc['grpo', 'signal to noise'])


def test_a_checkpoint_is_audited_from_a_shell(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(root)
    for module in (audit_module, train_module):
        monkeypatch.setattr(module, 'Progress', functools.partial(Progress, every=0))
    main([*AUDIT, f'run={tmp_path}/a', 'asked=4', 'plays=2', 'teach=1',
          'rules=[grpo, igpo, tips, {by em: {method: igpo, options: {metric: em, penalty: null}}}]'])
    table = pd.read_csv(tmp_path / 'a' / 'audit.csv', index_col='rule')
    found = json.loads((tmp_path / 'a' / 'audit.json').read_text())
    assert list(table.index) == ['grpo', 'igpo', 'tips', 'by em', 'half', 'even', 'chance']
    assert table.loc['igpo', 'pays otherwise'] > 0 == table.loc['by em', 'pays otherwise']
    assert table.loc['tips', 'forward tokens'] > 0 == table.loc['grpo', 'forward tokens']
    said = capsys.readouterr().out
    assert found['findings'] in said and found['continuations'] == 2
    for line in ('rollouts played: 16 of 16', f'continuations played: {2 * found["states"]} of {2 * found["states"]}',
                 'tips, step 1: rollouts played: 16 of 16'): assert line in said
    assert set(found['saving']) == {'times', 'low', 'high'} and 'turn credit could save' in found['findings']
    assert (tmp_path / 'a' / 'figures' / 'audit.png').stat().st_size > 10_000
    assert (tmp_path / 'a' / 'solver.csv').exists() and found['belief']['belief_shown_states'] > 0
    main([f'run={tmp_path}/b', 'model=data/tiny_base', 'questions=20', 'dev_questions=4', 'test_questions=4',
          'turn_tokens=1', 'rules=[grpo]', 'asked=2', 'attempts=2', 'plays=2'])                  # nothing is ever right
    assert 'earned 0, so no turn has any credit' in capsys.readouterr().out
    with pytest.raises(SystemExit, match="'tpso'"): main(['rules=[tpso]'])
    with pytest.raises(ValueError, match='plays'): read_audit_settings({'plays': 1})


def test_settings_that_an_audit_does_not_heed_are_refused_and_rules_of_chains_known():
    with pytest.raises(ValueError, match="learner='deepspeed'"):
        read_audit_settings({'learner': 'deepspeed'})
    assert [name for name in ('oracle', 'vine', 'tspo', 'outcome+notes/turns') if audit_module._reads_chains(name)] == [
        'oracle', 'outcome+notes/turns']


def test_shares_of_a_credit_that_is_not_told_from_none_are_not_told():
    "Four questions whose credit, its noise taken off, is about nothing in all: no share, whatever the division gives."
    squares = torch.tensor([[.5, -.3, .1, 0.], [-.6, .2, 0., 0.], [.3, .1, -.2, 0.], [-.1, 0., -.1 + 1e-9, 0.]])
    table = pd.DataFrame({f'{kind}{end}': [.5] for kind in KINDS for end in ('', ', low', ', high')}, index=['tspo'])
    said = _findings(table, squares)
    assert '%' not in said and 'tspo' not in said and 'cannot be told' in said
    assert '%' in _findings(table, squares + 2) and 'tspo' in _findings(table, squares + 2)
    shown = [label.get_text() for label in _audit_figure(table, squares).axes[0].get_xticklabels()]
    assert not any('%' in text for text in shown) and len(shown) == len(KINDS)


def test_the_score_by_turn_is_that_of_products_between_questions():
    """Sixty questions of one rollout with a first query and an answer; a rule that is twice as clear in the first kind
    and as clear in the second. By loops over pairs of different questions; a kind that true credit does not move is
    left out, one that the rule says nothing of is not taught, and a rule that pays otherwise is not scored."""
    generator, b, d = torch.Generator().manual_seed(0), 60, 3
    drawn = lambda *shape: torch.randn(*shape, generator=generator)
    gradients, kinds = drawn(b, 3, d) * .3 + torch.tensor([1., 0., 0.]), torch.tensor([[0, 2, 1]]).expand(b, 3)
    right = torch.tensor([1., .5, 0.]) + drawn(b, 3) * .2
    right[:, 2] = drawn(b)                                        # nothing in expectation
    grpo, rule = right + drawn(b, 3), right + drawn(b, 3) * .3
    made = lambda credit: torch.einsum('nk,nkd->nd', credit, gradients)
    def clear(credit, k):
        g, t = (x[:, k, None] * gradients[:, k] for x in (credit, right))
        pairs = [(i, j) for i in range(b) for j in range(b) if i != j]
        mean = lambda x, y: sum(float(x[i] @ y[j]) for i, j in pairs) / len(pairs)
        return mean(g, t) / mean(t, t) ** .5 / float(g.var(0).sum() / b) ** .5
    found = audit_module._score_by_kind(rule, grpo, right, kinds, made)
    wanted = math.exp(sum(math.log(clear(rule, k) / clear(grpo, k)) for k in (0, 1)) / 2)
    assert found['score by turn'] == pytest.approx(wanted, rel=1e-4) and found['kinds that count'] == 2
    assert found['kinds missing'] == 0 == found['kinds not taught'] and wanted > 1.2
    silent = rule * torch.tensor([1., 0., 1.])
    found = audit_module._score_by_kind(silent, grpo, right, kinds, made)
    assert found['score by turn'] == 0 and found['kinds not taught'] == 1


def test_several_bases_together_tell_what_one_cannot():
    """Forty bases of few questions: most tell no score, together they give the ratio that the numbers were drawn with. A rule that says nothing of a kind does not teach it; one that pays otherwise in one audit is not scored."""
    generator, b, d = torch.Generator().manual_seed(0), 12, 40
    drawn = lambda *shape: torch.randn(*shape, generator=generator)
    kinds, tables = torch.full((b, 1), 2), []
    for _ in range(40):
        gradients = drawn(b, 1, d) + torch.tensor([1.2] + [0.] * (d - 1))
        made = lambda credit: torch.einsum('nk,nkd->nd', credit, gradients)
        right = 1 + drawn(b, 1) * .1
        grpo, rule = (right + drawn(b, 1) * spread for spread in (2., .1))
        rows = {name: audit_module._score_by_kind(credit, grpo, right, kinds, made)
                for name, credit in {'grpo': grpo, 'rule': rule, 'silent': 0 * rule}.items()}
        tables.append(pd.DataFrame.from_dict(rows | {'otherwise': {}}, orient='index'))
    alone = sum(table.loc['rule', 'score by turn'] > 0 for table in tables)
    found = audit_module.score_of_bases(tables, 'rule')
    wanted = ((5.01 * (d + 1.44) - 1.44) / (1.02 * (d + 1.44) - 1.44)) ** .5     # E c² E |γ|² − |E cγ|² of each
    assert found['low'] < wanted < found['high'] < 2.5 * found['low'] and found['turns'] == 1 and alone < 20
    assert audit_module.score_of_bases(tables, 'grpo')['score'] == pytest.approx(1.)
    silent, otherwise = (audit_module.score_of_bases(tables, name) for name in ('silent', 'otherwise'))
    assert silent['score'] == 0 and silent['untaught'] == 1 and math.isnan(otherwise['score'])


@pytest.mark.parametrize('rules, word', [
    ([{'flat': {'rule': 'tspo'}}], 'name'), ([{'flat': {'method': 'tspo', 'options': 1}}], 'name'),
    (['tspo', {'tspo': {'options': {'alpha': 2.}}}], 'twice'), ([{'half': {'method': 'tspo'}}], 'control'),
    ([{'flat': {'method': 'tspo', 'options': {'flatt': True}}}], 'flatt'), ([['grpo']], 'grpo')])
def test_rules_that_cannot_be_judged_are_refused_before_anything_is_played(rules, word):
    with pytest.raises(ValueError, match=word): AuditChoice(rules=rules)
