"""52_learner: mini-batches, dropout that repeats itself, models that are only read (the policy without its additions,
or offloaded), and a critic on the policy's backbone."""
import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

import deepspeed_steps
from deepspeed_steps import adapted, model

from credit_rl import learner as learning, setup as staging, train as training
from credit_rl.advantages import to_tokens
from credit_rl.layout import pack
from credit_rl.learner import (MOST_REFUSED, BadStep, FrozenModels, Learner, Optimiser, PlainBackend, Scorer, make_critic,
                               parameter_groups)
from credit_rl.options import flat
from credit_rl.parts import Credit, Golds, Loss, Needs
from credit_rl.runlog import read_metrics, read_turns, same_metrics
from credit_rl.scoring import AnswerTemplate
from credit_rl.settings import make_config
from credit_rl.train import train
from credit_rl.trajectory import Group, Question, example_group
from started import apart

ROOT = Path(__file__).resolve().parents[2]
# the KL term makes it update at every step
SHORT = dict(model=str(ROOT / 'data' / 'tiny_base'), steps=4, eval_every=2, questions_per_step=4, group_size=4,
             questions=50, dev_questions=4, test_questions=4, max_turns=3, turn_tokens=12, kl=.01, learning_rate=1e-2,
             world={'size': 200}, threads=1, track='')
DROPPING = {**SHORT, 'lora': {'r': 4, 'lora_dropout': .2}}
LEARNER = dict(learner='deepspeed', stage=2) if importlib.util.find_spec('deepspeed') else {}
needs_peft = pytest.mark.skipif(not importlib.util.find_spec('peft'), reason='no peft: pip install credit_rl[train]')

def sitting(settings, seed):
    "A run, or the rest of one, after other work that left torch's generator somewhere."
    torch.manual_seed(seed)
    train(settings)


def sit(folder, settings, seed=0):
    "The folder of a run that a process of its own made."
    assert apart(sitting, {**settings, 'run': str(folder)}, seed) == 0
    return folder


def assert_same(a, b):
    assert same_metrics(a, b) == [] and read_turns(a) == read_turns(b)
    one, other = (json.loads((folder / 'summary.json').read_text()) for folder in (a, b))
    assert {**one, 'seconds': 0} == {**other, 'seconds': 0}


def test_each_epoch_deals_all_trajectories_out_anew(monkeypatch):
    "Two mini-batches of four, twice: other fours in the second epoch, and no trajectory in two of them."
    group, drawn, cut = example_group(), [], learning.update_tensors
    layout = pack([Group(group.question, (group.trajectories * 3)[:8])])
    note = lambda layout, trajectories, *others: drawn.append(trajectories) or cut(layout, trajectories, *others)
    monkeypatch.setattr(learning, 'update_tensors', note)
    learner = Learner(model(0, 100), optimiser=Optimiser(minibatches=2, epochs=2))
    assert learner.step(layout, None, Credit(layout.trained.float()))['updates'] == 4
    assert [len(part) for part in drawn] == [4] * 4
    first, second = drawn[:2], drawn[2:]
    for parts in (first, second): assert sorted(sum(parts, [])) == list(range(8))
    assert sorted(first) != sorted(second)                            # whichever comes first


@pytest.mark.long
@needs_peft
def test_a_run_with_dropout_repeats_itself_and_is_resumed(tmp_path):
    "Whatever was drawn before in the process; and a run of two steps that goes on to four ends as the one of four."
    settings = {**DROPPING, **LEARNER}
    whole = sit(tmp_path / 'whole', settings)
    resumed = sit(tmp_path / 'resumed', {**settings, 'steps': 2}, seed=2)
    sit(resumed, {**settings, 'resume': True}, seed=3)
    assert_same(whole, resumed)
    assert same_metrics(whole, sit(tmp_path / 'without', {**settings, 'lora': {'r': 4}})) != []   # it does drop


def quiet(folder, settings):
    "The folder of a run that this process made."
    return train({**settings, 'run': str(folder)}, say=lambda line: None)


@needs_peft
def test_additions_switched_off_are_a_second_model(tmp_path, monkeypatch):
    "The KL from the reference, and a base that teaches: the numbers of a run that loads the base again."
    settings = {**SHORT, 'method': 'tips', 'lora': {'r': 4}, 'teacher': 'base', 'kl': .1}
    loaded, load = [], staging.load_model
    monkeypatch.setattr(staging, 'load_model', lambda *a: loaded.append(a) or load(*a))
    off = quiet(tmp_path / 'off', settings)
    assert len(loaded) == 1                                           # the policy
    whole = lambda origin, device: staging.load_model(origin.base, origin.dtype, device)[0]
    monkeypatch.setattr(staging.Origin, 'load_base', whole)
    second = quiet(tmp_path / 'second', settings)
    assert len(loaded) == 4                                           # the policy, its reference, its teacher
    assert same_metrics(off, second, 1e-6) == [] and read_metrics(off).kl.max() > 1e-4


@needs_peft
def test_what_changes_the_weights_beside_it_needs_a_second_model():
    "PiSSA puts a part of the weights into the additions, so that the rest is not the base."
    pieces = [make_config({**SHORT, 'lora': {'r': 4, **more}}) for more in ({}, {'init_lora_weights': 'pissa'})]
    whole, taken = (staging.origin_of(c).load_base() for c in pieces)
    assert whole == 'base' and isinstance(taken, torch.nn.Module)


def offloading(names, **how):
    "A learner with a reference and a teacher on 'cpu:0', a device to which all is copied."
    policy = model(0, 100)
    learner = Learner(policy, Loss(kl=.1), Optimiser(1e-2),
                      frozen=FrozenModels(model(1, 100), teacher_every=2, offload=names))
    learner.backend.device = torch.device('cpu', 0)
    places = {}
    for who in ('reference', 'teacher'):
        scorer = getattr(learner, who)
        home = [p.data_ptr() for p in scorer.parameters()]
        read = lambda *_, scorer=scorer, home=home, who=who: places.setdefault(who, []).append(
            [p.data_ptr() for p in scorer.parameters()] == home)
        scorer.model.base_model.register_forward_pre_hook(read)
    return learner, places


def test_an_offloaded_model_is_on_the_device_only_while_it_reads():
    "A teacher says the same, refreshed and restored too, from a copy that is made for it; afterwards it lies where it lay."
    layout, golds = pack([example_group()]), [[AnswerTemplate((3, 4, 5), 1, 3)]] * 3
    credit = Credit(to_tokens(torch.tensor([[1.], [-.5], [-.5]]).expand(3, 4), layout.token_turns))
    (learner, places), (plain, _) = offloading(['teacher']), offloading([])
    lay = {who: [p.data_ptr() for p in getattr(learner, who).parameters()] for who in ('reference', 'teacher')}
    needs = Needs(logp=True, teacher=Golds(), ref_logp=True)
    for step in range(1, 4):
        seens = [which.evaluate(layout, needs, {'teacher': golds}) for which in (learner, plain)]
        assert torch.equal(seens[0].ref_logp, seens[1].ref_logp)
        assert torch.equal(seens[0].teacher_logp.nan_to_num(), seens[1].teacher_logp.nan_to_num())
        for which, seen in zip((learner, plain), seens):
            which.step(layout, seen, credit)
            which.tick(step)
    for who in ('reference', 'teacher'):
        assert places[who] and set(places[who]) == {who == 'reference'}
        assert [p.data_ptr() for p in getattr(learner, who).parameters()] == lay[who]


def test_an_offloaded_model_goes_home_when_a_forward_fails():
    learner, _ = offloading(['reference'])
    lay = [p.data_ptr() for p in learner.reference.parameters()]
    learner.reference.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError): learner.evaluate(pack([example_group()]), Needs(ref_logp=True))
    assert [p.data_ptr() for p in learner.reference.parameters()] == lay


def test_a_run_may_offload_from_its_next_sitting_on(tmp_path):
    "The numbers stay."
    whole = quiet(tmp_path / 'whole', {**SHORT, 'method': 'tips'})
    run = quiet(tmp_path / 'run', {**SHORT, 'method': 'tips', 'steps': 2, 'teacher_every': 2})
    quiet(run, {**SHORT, 'method': 'tips', 'teacher_every': 2, 'resume': True, 'offload': ['reference', 'teacher']})
    assert same_metrics(whole, run) == []
    with pytest.raises(ValueError, match="'reference'"):
        quiet(tmp_path / 'no', {**SHORT, 'offload': ['optimiser']})
    assert not (tmp_path / 'no').exists()


# the model, and what of it lies beyond the backbone
BEYOND = {'output embeddings of its own': (lambda: model(0, 100), {'lm_head.weight'}),
          'tied embeddings': (lambda: model(0, 100, True), set())}
if importlib.util.find_spec('peft'):
    BEYOND['additions to the output embeddings'] = (
        lambda: adapted(0, 100, ['q_proj', 'lm_head']), {f'lm_head.lora_{x}.default.weight' for x in 'AB'})


@pytest.mark.parametrize('name', BEYOND)
def test_a_shared_critics_step_leaves_alone_what_its_loss_does_not_reach(name):
    "By the groups' rates, and by the gradient: the weights to which the values' backward gives none."
    make, beyond = BEYOND[name]
    layout, policy = pack([example_group()]), make()
    scorer = Scorer(policy, critic=make_critic(policy, 'shared'))
    groups = parameter_groups(scorer, Optimiser(weight_decay=.1, apart=True))
    scorer(layout.ids, layout.trained, layout.trained, ('values',))['values'].sum().backward()
    named = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    rates = {id(p): set(group['rates']) for group in groups for p in group['params']}
    assert {n for n, p in named.items() if p.grad is None} == beyond
    for n, p in named.items(): assert rates[id(p)] == ({'policy'} if n in beyond else {'policy', 'critic'})
    assert sum(len(group['params']) for group in groups) == len(rates) == len(named) + 2          # the head's two


def test_a_checkpoint_over_other_groups_of_weights_is_refused(tmp_path):
    deepspeed_steps.learn(PlainBackend, deepspeed_steps.UNTIED, tmp_path)
    said = deepspeed_steps.another_critic(PlainBackend, tmp_path)
    assert "AdamW steps over 3 groups of weights, this learner's over 2" in said and 'earlier version' in said


def moved_by(run, batch, steps=3):
    "Where some steps on a batch take the weights of a run's policy, as one vector."
    flat = lambda: torch.cat([p.detach().flatten() for p in run.learner.scorer.model.parameters()]).clone()
    before = flat()
    for _ in range(steps): run.learner.step(batch.layout, batch.seen, batch.credit)
    return flat() - before


@pytest.fixture(scope='module')
def directions(tmp_path_factory):
    """Where PPO takes a policy whose shared critic expects 20 of outcomes in [0, 1], by how the two step; and where it
    goes without the critic's loss. All on the same rollouts."""
    ask = {**SHORT, 'method': 'ppo', 'critic': 'shared', 'learning_rate': 5e-4, 'kl': 0., 'group_size': 8}
    ways = {'alone': {'critic_step': 'together', 'loss': {'value': 0.}}, 'apart': {'critic_backbone_rate': 5e-5},
            'together': {'critic_step': 'together'}}
    found, batch = {}, None
    for name, more in ways.items():
        folder = tmp_path_factory.mktemp(name)
        run = training.begin_run(make_config({**ask, **more, 'run': str(folder / 'run')}), lambda line: None)
        if batch is None:
            groups, rewards = training.play_step(run.actor, run.method, 1)
            batch = training.assign(run.method, groups, run.look(), torch.Generator(), run.prefix, rewards)
        with torch.no_grad():
            for p in run.learner.critic.head.parameters(): p.fill_(20. if p.ndim == 1 or p.numel() == 1 else .01)
        found[name] = moved_by(run, batch)
    return found


@pytest.mark.long
def test_a_bad_critic_does_not_turn_its_policy_where_they_step_apart(directions):
    cosine = lambda name: torch.cosine_similarity(directions[name], directions['alone'], dim=0).item()
    apart, together = cosine('apart'), cosine('together')
    assert apart > .9 > .5 > together


def test_entropy_is_that_of_the_distributions():
    "Against torch's own Categorical: alone, with log-probabilities, and beside gold answers."
    layout = pack([example_group()])
    learner = Learner(model(0, int(layout.ids.max()) + 1), temperature=.7)
    golds = {'gold': [[AnswerTemplate((3, 4, 5), 1, 3)]] * 3}
    with torch.no_grad(): logits = learner.scorer.model(input_ids=layout.ids).logits / .7
    expected = torch.distributions.Categorical(logits=logits).entropy().roll(1, 1).where(layout.trained, 0.)
    for more, passes in ({}, 1), ({'logp': True}, 1), ({'logp': True, 'gold': Golds()}, 2):
        seen = learner.evaluate(layout, Needs(entropy=True, **more), golds)
        torch.testing.assert_close(seen.entropy, expected, atol=1e-5, rtol=0)
        assert learner.passes['policy'] == passes
    assert torch.equal(seen.logp, learner.evaluate(layout, Needs(logp=True, gold=Golds()), golds).logp)
    learner = Learner(learner.scorer.model, Loss(entropy=.1), Optimiser(minibatches=1, learning_rate=1e-9),
                      temperature=.7)
    log = learner.step(layout, None, Credit(layout.trained.float()))
    assert log['entropy'] == pytest.approx(expected[layout.trained].mean().item(), rel=1e-5)


def test_the_rate_that_is_logged_is_the_last_updates():
    layout = pack([example_group()])
    learner = Learner(model(0, int(layout.ids.max()) + 1), Loss(), Optimiser(1e-4, minibatches=2, warmup=4, decay=8))
    logged = [learner.step(layout, learner.evaluate(layout), Credit(layout.trained.float()))['learning_rate']
              for _ in range(2)]
    assert logged == pytest.approx([1e-4 * learner.optimiser.share(done) for done in (1, 3)])
    assert {group['lr'] for group in learner.backend.adamw.param_groups} == {logged[-1]}


def stepped(policy, updates, folder=None):
    "A learner at the rate 1e-6 after some updates, and the share of its masters that moved."
    learner = Learner(policy, Loss(), Optimiser(1e-6, minibatches=1), seed=1)
    layout = pack([example_group()])
    signs = torch.randn(layout.ids.shape, generator=torch.Generator().manual_seed(0)).sign() * layout.trained
    before = [m.clone() for m in learner.backend.masters.state()]
    for _ in range(updates): learner.step(layout, learner.evaluate(layout), Credit(signs))
    after = learner.backend.masters.state()
    same = sum(int((a == b).sum()) for a, b in zip(before, after))
    return learner, 1 - same / sum(a.numel() for a in after)


@pytest.mark.parametrize('additions', [False, pytest.param(True, marks=needs_peft)])
def test_a_small_rate_moves_weights_in_bfloat16(additions):
    "Of bfloat16 weights that AdamW steps on as they are, fewer than one in twenty would move in ten updates."
    policy = (adapted(0, 100) if additions else model(0, 100)).bfloat16()
    learner, moved = stepped(policy, 10)
    assert moved > .5 and all(m.dtype == torch.float32 for m in learner.backend.masters.state())
    for p, master in learner.backend.masters.copies: assert torch.equal(p, master.bfloat16())
    names = {n for n, p in policy.named_parameters() if p.requires_grad}
    assert len(learner.backend.masters.copies) == len(names) and (not additions or all('lora' in n for n in names))


def test_masters_go_on_from_a_checkpoint(tmp_path):
    learner, _ = stepped(model(0, 100).bfloat16(), 3)
    learner.save(tmp_path)
    again, _ = stepped(model(1, 100).bfloat16(), 1)
    again.restore(tmp_path)
    both = zip(again.backend.masters.state(), learner.backend.masters.state(), strict=True)
    assert all(torch.equal(a, b) for a, b in both)
    for a, b in zip(again.scorer.parameters(), learner.scorer.parameters()): assert torch.equal(a, b)


def test_a_second_learner_of_the_same_weights_learns_too():
    "As in an audit, where rules with critics are taught one after another on one policy."
    policy = model(0, 100).bfloat16()
    first, moved = stepped(policy, 2)
    again, moved_again = stepped(policy, 2)
    assert moved > .2 and moved_again > .2
    assert all(m.grad is None for _, m in first.backend.masters.copies)          # what is another's it did not take


def test_a_strangers_checkpoint_runs_nothing(tmp_path):
    honest = Learner(model(0, 100))
    honest.save(tmp_path)
    held = torch.load(tmp_path / 'learner.pt', weights_only=True)
    torch.save({**held, 'more': deepspeed_steps.Harm(str(tmp_path / 'harm'))}, tmp_path / 'learner.pt')
    for read in (honest.restore, learning.saved_policy):
        with pytest.raises(ValueError, match='program'): read(tmp_path)
    assert not (tmp_path / 'harm').exists() and 'TORCH_FORCE_WEIGHTS_ONLY_LOAD' not in os.environ
    torch.load(tmp_path / 'learner.pt', weights_only=False)
    assert (tmp_path / 'harm').exists()                                            # it would have been done


def test_a_checkpoint_that_lost_its_end_is_told(tmp_path):
    "Torch's own words are 'Invalid argument' and others."
    path = tmp_path / 'learner.pt'
    torch.save({'scorer': {'model.w': torch.zeros(1000)}, 'more': list(range(100))}, path)
    whole = path.read_bytes()
    for lost in (1, 300, 1000, len(whole) - 30, len(whole)):
        path.write_bytes(whole[:-lost])
        with pytest.raises(ValueError, match='resume=True'): learning.saved_policy(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError): learning.saved_policy(tmp_path)


def test_skipping_ends_after_some_updates_in_a_row_with_their_count(monkeypatch):
    layout = pack([example_group()])
    learner = Learner(model(0, 100), optimiser=Optimiser(minibatches=1, on_bad_step='skip'))
    credit = Credit(to_tokens(torch.tensor([[1.], [-.5], [-.5]]).expand(3, 4), layout.token_turns))
    step = lambda: learner.step(layout, learner.evaluate(layout), credit)
    update, bad = learner.backend.update, lambda clip: update(clip) * float('inf')
    monkeypatch.setattr(learner.backend, 'update', bad)
    for _ in range(MOST_REFUSED - 1): assert step()['bad_updates'] == 1
    monkeypatch.setattr(learner.backend, 'update', update)
    assert step().get('bad_updates', 0) == 0                                             # a good one begins anew
    monkeypatch.setattr(learner.backend, 'update', bad)
    for _ in range(MOST_REFUSED - 1): step()
    with pytest.raises(BadStep, match=f'those of {MOST_REFUSED - 1} updates before'): step()


def test_what_is_asked_again_goes_out_by_its_own_name():
    q = Group(example_group().question, []).question
    assert q.again(1).id != q.id and q.again(1).first == q == q.first and q.again(2).meta == q.meta
    own = Question('do it (again please)', '?', ['a'])
    assert own.first == own


@pytest.mark.parametrize('draws', [1, 2])
def test_a_question_that_a_step_asks_twice_has_other_rollouts_the_second_time(tmp_path, draws):
    short = {**SHORT, 'steps': 1, 'questions': 3, 'questions_per_step': 6, 'log_rollouts': 6, 'eval_every': 1}
    train(make_config({**short, 'run': str(tmp_path / 'run'), 'draw_version': draws}), say=lambda line: None)
    said = {}
    for row in read_turns(tmp_path / 'run'):
        t = row['trajectory']
        said.setdefault(t['question']['text'], []).append((t['question']['id'], [x['action_ids'] for x in t['turns']]))
    again = [(turns[:4], turns[4:]) for turns in said.values() if len(turns) == 8]
    assert again and all(([x[1] for x in a] == [x[1] for x in b]) == (draws == 1) for a, b in again)
    assert {len({i for i, _ in turns}) for turns in said.values() if len(turns) == 8} == {draws}


def test_a_run_that_was_begun_without_the_setting_goes_on_drawing_as_it_did(tmp_path):
    import yaml
    config = make_config({**SHORT, 'run': str(tmp_path), 'resume': True})
    assert training._as_begun(config).draw_version == 2
    (tmp_path / 'params.yaml').write_text(yaml.safe_dump({k: v for k, v in flat(config).items() if k != 'draw_version'}))
    assert training._as_begun(config).draw_version == 1 and training._as_begun(make_config(SHORT)).draw_version == 2
