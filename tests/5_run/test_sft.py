"""64_sft: the supervised baseline as a command, its folder, and what stands in its way."""
import contextlib
import importlib.util
import json
import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
import yaml

from credit_rl import runlog, sft
from credit_rl.engine import HFEngine, SamplingParams
from credit_rl.layout import pack, token_logps
from credit_rl.learner import PlainBackend
from credit_rl.models import load_model, load_tokenizer
from credit_rl.protocol import PROTOCOLS, Chat, byte_tokenizer, get_protocol, prompt_hash
from credit_rl.rollout import rollout
from credit_rl.runlog import read_turns
from credit_rl.sft import (Imitation, deal_batches, demos_main, fine_tune, imitator, keep_right, main, read_demos,
                           rejection_sft)
from credit_rl.tiny import tiny_environment
from credit_rl.trajectory import Group, Question, example_group
from credit_rl.world import make_world
from gguf_files import small_llama


def words_of(folder, questions=24):
    "The words of a small fine-tuning of the stored base on its own right games."
    return [f'run={folder / "run"}', 'model=data/tiny_base', 'questions=40', 'dev_questions=6', 'test_questions=6',
            'threads=1', 'seed=3', f'sft.questions={questions}']


def test_the_command_leaves_a_model_that_loads(tmp_path, root, monkeypatch, capsys):
    "By the file of a training, whose rule plays no part."
    monkeypatch.chdir(root)
    main([*words_of(tmp_path), 'sft.attempts=8', 'sft.epochs=2', 'sft.learning_rate=1e-3', 'tree=true',
          'adamw.warmup=9', 'sft.calls=true', 'method=tspo', 'options={alpha: 0.5}'])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith('not heeded here')]
    assert 'adamw.warmup=9' in line and line.endswith('tree=True')
    summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
    tiny = PROTOCOLS['tiny']
    assert (summary['protocol'], summary['prompt_hash']) == ('tiny', prompt_hash(tiny))
    assert summary['method'] == 'sft' and summary['rows'] > 5 and 0 <= summary['final_em'] <= 1 and summary['losses']
    model, tokenizer = load_model(str(tmp_path / 'run' / 'model'))
    base, _ = load_model('data/tiny_base')
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), base.parameters()))
    with pytest.raises(SystemExit, match='already holds a run'):
        main([f'run={tmp_path / "run"}', 'model=data/tiny_base'])


@pytest.mark.parametrize('given, message', [
    ('sft.questons=9', "'sft.questions'"), ('modle=x', "'model'"),
    ('sft.rollouts=nowhere', 'folder'), ('model=nowhere', 'neither a folder'),
])
def test_what_it_does_not_take_is_refused_before_it_plays(tmp_path, root, monkeypatch, given, message):
    monkeypatch.chdir(root)
    with pytest.raises(SystemExit, match=message): main([f'run={tmp_path / "run"}', 'model=data/tiny_base', given])
    assert not (tmp_path / 'run').exists()


def test_a_dry_run_tells_what_a_fine_tuning_takes(tmp_path, root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    main([f'run={tmp_path / "run"}', 'model=data/tiny_base', 'dry_run=true', 'tflops=1', 'sft.questions=50', 'sft.epochs=3',
          'method=carl', 'protocol=carl-tiny'])
    assert '200 rows' in capsys.readouterr().out and not (tmp_path / 'run').exists()


def test_games_are_different_right_and_few():
    group = example_group()
    right, wrong = group.trajectories[0], group.trajectories[1]
    kept = keep_right([Group(group.question, [right, right, wrong]), Group(group.question, [wrong])])
    assert [len(g.trajectories) for g in kept] == [1] and kept[0].trajectories[0] is right


@pytest.fixture(scope='module')
def played(root):
    "A base and twelve of its games in a small world."
    model, tokenizer = load_model(str(root / 'data/tiny_base'))
    world = make_world(seed=1, questions=3)
    env = tiny_environment(world, Chat(PROTOCOLS['tiny'], tokenizer))
    groups = rollout(HFEngine(model, tokenizer), env, list(world.questions), 4, SamplingParams(max_tokens=24), seed=2)
    return model, tokenizer, groups


def test_one_update_is_a_step_down_the_mean_log_probability(root, played):
    "Against autograd on the loss as it is defined, and AdamW by hand: its first step is the rate times the sign."
    _, _, groups = played
    model, twin = (load_model(str(root / 'data/tiny_base'))[0] for _ in range(2))
    before = [p.detach().clone() for p in model.parameters()]
    fine_tune(imitator(model, 1, 1e-3, row_tokens=300), deal_batches(groups, epochs=1, batch=99))
    layout = pack(groups)
    logps = token_logps(twin, layout.ids, layout.trained)
    (-logps[layout.trained].mean()).backward()
    for old, new, p in zip(before, model.parameters(), twin.parameters()):
        moved, clear = new - old, p.grad.abs() > 1e-4                    # the first of two updates of warm-up: half
        torch.testing.assert_close(moved[clear], -5e-4 * p.grad[clear].sign(), atol=2e-6, rtol=1e-2)


def test_the_order_is_the_seeds_and_every_rollout_is_learned_once_an_epoch(played):
    _, _, groups = played
    runs = [deal_batches(groups, 2, 5, seed) for seed in (0, 0, 1)]
    names = [[[id(g.trajectories[0]) for g in batch] for batch in run] for run in runs]
    assert names[0] == names[1] != names[2] and [len(b) for b in names[0]] == [5, 5, 2] * 2
    everyone = sorted(id(t) for g in groups for t in g.trajectories)
    assert all(sorted(i for batch in run[k:k + 3] for i in batch) == everyone for run in names for k in (0, 3))


def test_narrow_forwards_keep_wide_weights(root, played):
    def first(compute):
        model = load_model(str(root / 'data/tiny_base'))[0]
        return model, fine_tune(imitator(model, 1), deal_batches(played[2], 1, 12), compute)[0]
    _, wide = first('float32')
    model, narrow = first('bfloat16')
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert narrow['loss'] != wide['loss'] and abs(narrow['loss'] - wide['loss']) < .02


def test_a_fine_tuning_that_was_ended_begins_anew(tmp_path, root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    words = [*words_of(tmp_path), 'sft.attempts=8', 'sft.epochs=1']
    class Killed(BaseException): pass
    def die(*args, **rest): raise Killed
    with monkeypatch.context() as patch:
        patch.setattr(sft, 'fine_tune', die)
        patch.setattr(runlog.RunLog, 'beginning', lambda log: contextlib.nullcontext())      # no time to clear away
        with pytest.raises(Killed): main(words)
    assert (tmp_path / 'run' / 'params.yaml').exists()
    with pytest.raises(SystemExit, match='already holds a run'): main(words)
    main([*words, 'resume=true'])
    made = (tmp_path / 'run' / 'summary.json').read_bytes()
    main([*words, 'resume=true'])
    assert 'complete and left as it is' in capsys.readouterr().out
    with pytest.raises(SystemExit, match='fine-tuning'):
        main([*words, 'resume=true', 'sft.batch=3'])
    assert (tmp_path / 'run' / 'summary.json').read_bytes() == made


def test_an_update_whose_gradient_is_not_finite_is_not_taken(tmp_path, root, monkeypatch):
    monkeypatch.chdir(root)
    words = [*words_of(tmp_path, 12), 'sft.attempts=6', 'sft.epochs=4']
    update, calls = PlainBackend.update, []
    def third(backend, clip):
        calls.append(backend)
        if len(calls) == 3: backend.scorer.model.lm_head.weight.grad[0, 0] = math.inf
        return update(backend, clip)
    monkeypatch.setattr(PlainBackend, 'update', third)
    with pytest.raises(SystemExit, match='gradient'): main(words)
    bad = json.loads((tmp_path / 'run' / 'bad_step.json').read_text())
    assert bad['step'] == 3 and 'loss' in bad['error']
    assert bad['rollouts'] and all('<answer>' in row for row in bad['rollouts'])
    assert sorted(p.name for p in (tmp_path / 'run').iterdir()) == ['bad_step.json', 'params.yaml', 'played']
    calls.clear()
    monkeypatch.setattr(sft, 'rollout', lambda *args: pytest.fail('what was played is played again'))
    main([*words, 'resume=true', 'on_bad_step=skip'])
    assert json.loads((tmp_path / 'run' / 'summary.json').read_text())['bad_updates'] == 1
    weights = load_model(str(tmp_path / 'run' / 'model'))[0].parameters()
    assert all(w.isfinite().all() for w in weights)


# ---- demonstrations ----

@pytest.fixture(scope='module')
def shown(root, tmp_path_factory):
    "Demonstrations of the sample by a random model's tokenizer: the words of the command, and the folder."
    place, here = tmp_path_factory.mktemp('shown'), root
    model, tokenizer = small_llama(positions=4096)
    for part in (model, tokenizer): part.save_pretrained(place / 'model')
    words = ['data=hotpotqa', f'path={here / "data/hotpotqa_sample.json"}', f'model={place / "model"}', 'questions=4',
             f'protocol={here / "runs/params/protocols/short.yaml"}', 'dev_questions=1', 'test_questions=1', "track=''",
             'max_tokens=1500', 'turn_tokens=6', 'max_turns=3', 'malformed=end', 'threads=1']
    demos_main([*words, f'run={place / "demos"}', 'demos.attempts=4', 'demos.per_question=2'])
    return words, place


def test_demonstrations_are_right_rollouts_that_a_run_can_show(shown):
    words, place = shown
    summary, rows = json.loads((place / 'demos' / 'summary.json').read_text()), read_turns(place / 'demos')
    assert rows and all(row['kind'] == 'demo' and row['reward'] == 1 and row['step'] == 0 for row in rows)
    assert summary['rows'] == len(rows) and summary['trajectories'] == 16 and set(summary['reach']) == {
        'train', 'dev', 'test'}
    chat = Chat(get_protocol(words[4].partition('=')[2]), load_tokenizer(str(place / 'model')))
    groups, _ = read_demos(place / 'demos', chat)
    layout = pack(groups)
    text = chat.tokenizer.decode(layout.ids[layout.trained])
    assert '<search>' in text and '<answer>' in text and 'Doc 1' not in text          # passages are read, not learned


@pytest.mark.long
@pytest.mark.parametrize('how', ['asked to end', 'killed'])
def test_a_fine_tuning_that_ends_on_its_way_goes_on_to_the_same_weights(shown, tmp_path, monkeypatch, how):
    words, place = shown
    own = [f'sft.demos={place / "demos"}', 'sft.epochs=4', 'sft.batch=1']
    main([*words, *own, f'run={tmp_path / "whole"}'])
    step, updates = sft.Learner.step, []
    class Killed(BaseException): pass
    def third(*args):
        updates.append(step(*args))
        if len(updates) == 3:
            if how == 'killed': raise Killed
            os.kill(os.getpid(), signal.SIGTERM)
        return updates[-1]
    monkeypatch.setattr(sft.Learner, 'step', third)
    words = [*words, *own, f'run={tmp_path / "run"}']
    minutes = ['save_every=1e-9'] if how == 'killed' else []
    with pytest.raises(Killed if minutes else SystemExit) as ended: main([*words, *minutes])
    assert minutes or ended.value.code == 128 + signal.SIGTERM
    found, _ = runlog.latest_checkpoint(tmp_path / 'run')
    assert found == (2 if minutes else 3) == len(updates) - bool(minutes)
    main([*words, *minutes, 'resume=true'])
    one, other = (json.loads((tmp_path / n / 'summary.json').read_text()) for n in ('whole', 'run'))
    assert one['losses'] == other['losses'] and len(one['losses']) > 3 and one['losses'][-1] < one['losses'][0]
    assert one['rows'] == len(read_turns(place / 'demos'))
    assert all(one[k] == other[k] for k in ('base', 'base_right', 'final', 'rows', 'trajectories'))
    pair = [load_model(str(tmp_path / n / 'model'))[0].state_dict() for n in ('whole', 'run')]
    assert all(torch.equal(w, pair[1][n]) for n, w in pair[0].items())
    assert not (tmp_path / 'run' / 'checkpoints').exists()


@pytest.mark.long
@pytest.mark.skipif(not importlib.util.find_spec('deepspeed'), reason='deepspeed is not installed')
@pytest.mark.parametrize('given', [
    {'stage': 3, 'deepspeed': {'zero_optimization': {'stage3_param_persistence_threshold': 0}}},
    pytest.param({'stage': 2, 'lora': {'r': 2}}, marks=pytest.mark.nightly)],
                         ids=['stage 3', 'stage 2, low-rank, told to end'])
def test_two_ranks_fine_tune_as_one_process_does(shown, tmp_path, given):
    words, place = shown
    settings = {name: yaml.safe_load(value) for name, value in (word.split('=', 1) for word in words)}
    lora = {'lora': given['lora']} if 'lora' in given else {}
    how = Imitation(demos=str(place / 'demos'), epochs=30 if lora else 6, batch=2, learning_rate=1e-4)
    rejection_sft({**settings, **lora, 'run': str(tmp_path / 'one')}, how, say=lambda line: None)
    ranks = {**settings, **given, 'learner': 'deepspeed', 'ranks': 2, 'run': str(tmp_path / 'two')}
    def told(line):
        if line.startswith('update 1 of'): os.kill(os.getpid(), signal.SIGTERM)
    if lora:
        with pytest.raises(SystemExit) as ended: rejection_sft(ranks, how, say=told)
        found, _ = runlog.latest_checkpoint(tmp_path / 'two')
        assert ended.value.code == 128 + signal.SIGTERM and 0 < found
        assert not (tmp_path / 'two' / 'model').exists()
    rejection_sft({**ranks, 'resume': True}, how, say=lambda line: None)
    one, two = (json.loads((tmp_path / n / 'summary.json').read_text()) for n in ('one', 'two'))
    assert two['losses'] == pytest.approx(one['losses'], abs=1e-3) and one['losses'][-1] < one['losses'][0]
    assert two['base_right'] == one['base_right'] and two['rows'] == one['rows']
    pair = [load_model(str(tmp_path / n / 'model'))[0].state_dict() for n in ('one', 'two')]
    for name, weight in pair[0].items(): torch.testing.assert_close(pair[1][name], weight, atol=1e-4, rtol=0)


def test_low_rank_additions_are_merged_into_what_is_saved(shown, tmp_path):
    pytest.importorskip('peft')
    words, place = shown
    main([*words, f'run={tmp_path / "run"}', f'sft.demos={place / "demos"}', 'sft.epochs=2', "lora={'r': 2}"])
    base, made = (load_model(str(folder))[0] for folder in (place / 'model', tmp_path / 'run' / 'model'))
    moved = [n for (n, a), b in zip(base.named_parameters(), made.parameters()) if not torch.equal(a, b)]
    assert moved and all('proj' in n for n in moved)


@pytest.mark.parametrize('word, message', [
    ('protocol=igpo', 'prompt'), ('model=OTHER', 'tokenizer'),
    ('sft.demos=nowhere', 'demonstrations'),
])
def test_demonstrations_of_other_words_are_refused(shown, tmp_path, word, message):
    words, place = shown
    if 'OTHER' in word:
        model, _ = small_llama()
        other = byte_tokenizer(texts=['something else, and other words'] * 2, merges=3)
        model.resize_token_embeddings(max(len(other), model.config.vocab_size))
        for part in (model, other): part.save_pretrained(tmp_path / 'other')
        word = f'model={tmp_path / "other"}'
    with pytest.raises(SystemExit, match=message):
        main([*words, f'sft.demos={place / "demos"}', word, f'run={tmp_path / "run"}'])
    assert not (tmp_path / 'run' / 'summary.json').exists()


@pytest.mark.parametrize('words, message', [
    (['data=tiny'], 'players'), (['demos.attemps=2'], "'demos.attempts'"),
    (['data=real', 'model=data/tiny_base', 'protocol=carl'], 'demonstrations'),
])
def test_what_cannot_be_demonstrated_is_refused(tmp_path, root, monkeypatch, words, message):
    monkeypatch.chdir(root)
    with pytest.raises(SystemExit, match=message): demos_main([f'run={tmp_path / "run"}', *words])
    assert not (tmp_path / 'run' / 'summary.json').exists()


def test_each_training_question_is_played_once(tmp_path, monkeypatch):
    "Where more are asked for than there are, their rollouts would come again, drawn by the same numbers."
    asked, said, train = [], [], [Question(str(i), f'{i}?', ['a']) for i in range(5)]
    def play(engine, env, questions, *rest):
        asked.extend(questions)
        return []
    monkeypatch.setattr(sft, 'rollout', play)
    monkeypatch.setattr(sft, 'play_parts', lambda folder, parts, play, times, say: [
        g for i, part in enumerate(parts) for g in play(part, i)])
    actor = SimpleNamespace(
        setup=SimpleNamespace(chat=None, questions={'train': train}, environments={'train': None}), seed=0, say=said.append,
        engine=None, sampling=None, ranks=SimpleNamespace(each=lambda part, share: share(part)), log=SimpleNamespace(folder=tmp_path))
    for most in (3, 400):
        asked.clear()
        sft._examples(actor, 'em', None, sft.Imitation(questions=most))
        assert len(asked) == len({q.id for q in asked}) == min(most, 5)
    assert sum('of which there are 5' in line for line in said) == 1
