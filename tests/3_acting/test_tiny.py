"The world of CARL: famous facts and calculations, scripted coders, and the rows of the warm start."
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from credit_rl import tiny
from credit_rl.engine import ScriptedEngine
from credit_rl.layout import pack, token_logps
from credit_rl.protocol import PROTOCOLS, Chat
from credit_rl.rollout import rollout
from credit_rl.tiny import (CODE_TEACHER, NOISY_CODER, PERFECT_CODER, TABLE, CodeWarmStart, Coder, act_coder,
                            code_demonstrations, code_recollections, code_warm_start, knowing_loss, knowing_rows,
                            make_base, memory_of, segment_rows, tiny_environment, tiny_model, tiny_tokenizer)
from credit_rl.trajectory import Group, Result, Stop, example_group
from credit_rl.world import EASY, HARD, Competence, make_world, world_of

TOKENIZER = tiny_tokenizer(numbers=True)
SMALL = make_world('dev', seed=4, size=100, questions=10, hops=(1,), competence=Competence(famous=10))
CHATS = {mode: Chat(PROTOCOLS['carl-tiny' + mode], TOKENIZER) for mode in ('', '-forced', '-direct')}
WORLD = make_world('dev', seed=4, size=300, questions=30, hops=(1, 2, 3),
                   competence=Competence(famous=40, easy=10, hard=10))


def play(coder, mode='', questions=None, memory=None, seed=0, world=WORLD):
    memory, env = memory_of(world) if memory is None else memory, tiny_environment(world, CHATS[mode])
    engine = ScriptedEngine(lambda text, rng: act_coder(text, rng, coder, memory), TOKENIZER)
    return [g.trajectories[0] for g in rollout(engine, env, list(questions or world.questions), seed=seed)]


def calls(t): return sum(x.call is not None for x in t.turns)


def test_training_and_testing_share_no_famous_fact():
    train, test = (make_world(s, 0, questions=30, competence=Competence(famous=300)) for s in ('train', 'test'))
    assert not train.known & test.known and not {n for n, _ in train.known} & {n for n, _ in test.known}


def test_the_doors():
    for bad in (dict(famous=10_000), dict(easy=156), dict(hard=len(HARD) + 1), dict(famous=-1)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            make_world('train', 0, size=100, questions=10, competence=Competence(**bad))


def test_each_mistake_by_itself():
    unknown = [q for q in WORLD.questions if not q.meta['parametric']]
    chains, sums = [q for q in unknown if q.meta['hops'] == 1], [q for q in unknown if q.meta['hops'] == 0]
    for q, t in zip(chains, play(Coder(near_miss=1.), questions=chains)):
        assert t.answer not in q.answers and t.answer in WORLD.pages[q.meta['chain'][0]]  # it stood beside
    for q, t in zip(chains, play(Coder(lose=1.), questions=chains)):
        noted = [x.action_text for x in t.turns if x.kind == 'assimilate']
        assert noted == ['<context> </context>'] and t.stop is Stop.ANSWER
        assert t.answer == q.meta['chain'][0]                                                           # what it had
    assert all(t.answer in q.answers for q, t in zip(sums, play(Coder(lose=1.), questions=sums)))  # a result is no page
    assert all(calls(t) == 0 for t in play(Coder(guess=1.), questions=unknown))
    assert all(calls(t) > 0 for t in play(Coder(recall=0.)))
    for t in play(Coder(one_word=1.), questions=chains):
        assert len(re.search(r'" (.*?) "', t.turns[0].call['code'])[1].split()) == 1
    assert all(t.answer in q.answers for q, t in zip(sums, play(PERFECT_CODER, questions=sums)))


@settings(max_examples=6)
@given(st.integers(0, 10**6), st.sampled_from(['', '-forced', '-direct']))
def test_the_noisy_coder_never_breaks_the_form(seed, mode):
    for t in play(NOISY_CODER, mode, WORLD.questions[:20], seed=seed):
        assert t.stop is Stop.ANSWER and all(x.result in (Result.OK, Result.NONE) for x in t.turns)
        assert TOKENIZER.unk_token_id not in [i for x in t.turns for i in x.action_ids]


def test_what_is_recalled_and_what_is_shown():
    learned = code_recollections(TOKENIZER, [WORLD], sums=2)
    texts = [g.question.text for g in learned]
    assert all(g.trajectories[0].answer == g.question.answers[0] and len(g.trajectories[0].turns) == 1 for g in learned)
    assert all(texts.count(t) == 2 for t in TABLE) and set(memory_of(WORLD)) <= set(texts) and len(TABLE) == len(EASY)
    shown, again = (code_demonstrations(TOKENIZER, CODE_TEACHER, 60, seed=1, known=[WORLD]) for _ in range(2))
    assert len(shown) == 60 + len(memory_of(WORLD)) and shown == again


# a plan that is over at once
BRIEF = CodeWarmStart(copy=2, games=2, reading=2, mixed=6, copied=99, played=99, read=99, recalled=99, answers=0, count=40)


def test_searches_of_demonstrations_fail_as_those_of_the_known_worlds(monkeypatch):
    def empty(groups):
        seen = [x.observation_text.strip() for g in groups for t in g.trajectories for x in t.turns
                if x.call and 'search' in x.action_text]
        return sum(x == 'No results .' for x in seen) / len(seen)
    caller, lucks, real = replace(CODE_TEACHER, recall=0., guess=0., one_word=0.), [], tiny.code_demonstrations
    shares = [empty(real(TOKENIZER, caller, 60, seed=1, luck={'nothing': p})) for p in (0., .5, 1.)]
    assert shares[0] < .05 and .35 < shares[1] < .65 and shares[2] == 1

    def noted(*given, luck={}, **more):
        lucks.append(luck)
        return real(*given, luck=luck, **more)
    monkeypatch.setattr(tiny, 'code_demonstrations', noted)
    code_warm_start(TOKENIZER, 3, BRIEF, known=[replace(SMALL, nothing=.2, sibling=.1)], progress=lambda line: None)
    assert lucks[0] == {'nothing': .2, 'sibling': .1}


def test_fewer_rows_say_the_same():
    "Every segment is trained once, after its own context: the log-probabilities are those of a row for each segment."
    model = tiny_model(TOKENIZER, 1)
    for seed in range(3):
        for t in play(NOISY_CODER, '', WORLD.questions[seed::9], seed=seed):
            rows, layout = segment_rows(t), pack([Group(t.question, [t])])
            assert len(rows) == sum(x.kind == 'assimilate' for x in t.turns) + 1 and len(layout.ids) == len(t.turns)
            with torch.no_grad():
                own = token_logps(model, layout.ids, layout.trained)
                for ids, turns in rows:
                    ids, turns = torch.tensor([ids]), torch.tensor([turns])
                    logp = token_logps(model, ids, turns >= 0)
                    for k in set(turns[turns >= 0].tolist()):
                        assert ids[turns == k].tolist() == list(t.turns[k].action_ids)
                        torch.testing.assert_close(logp[turns == k], own[layout.token_turns == k], atol=1e-5, rtol=0)
            assert sorted(k for _, turns in rows for k in set(turns) - {-1}) == list(range(len(t.turns)))


def test_the_warm_start_is_the_same_for_the_same_seed_and_refuses_to_fail_silently(tmp_path):
    rest = dict(known=[SMALL], progress=lambda line: None)
    folders = [make_base(tmp_path / str(i), 3, 'carl-tiny', BRIEF, **rest) for i in range(2)]
    assert (folders[0] / 'model.safetensors').read_bytes() == (folders[1] / 'model.safetensors').read_bytes()
    for change, said in ((dict(recalled=.01), "'mixed'"), (dict(answers=.9), 'games')):
        with pytest.raises(RuntimeError, match=said): code_warm_start(TOKENIZER, 3, replace(BRIEF, **change), **rest)
    with pytest.raises(ValueError, match='carl-tiny'): make_base(tmp_path / 'x', protocol='carl')


def test_it_is_asked_whether_it_knows_where_a_critic_reads_and_where_it_chooses():
    "Where its question ends, and behind its first thought, as in a game; twins are never asked about."
    twins = world_of({'hops': [1, 2], 'twins': True}, 'dev', 3, 20)
    games = {q.text: play(PERFECT_CODER, '', [q], {}, world=twins)[0] for q in twins.questions}
    begins = {tuple([*t.prompt_ids, *t.turns[0].action_ids]): (q, len(t.prompt_ids)) for q, t in games.items()}
    found = set()
    for ids, labels in knowing_rows(TOKENIZER, [twins], 0):
        mine = [x for whole, x in begins.items() if whole[:len(ids)] == tuple(ids)]
        places = [i for i, label in enumerate(labels) if label >= 0]
        assert len(ids) == len(labels) and len(places) == 2 and places[1] == len(ids) - 1
        assert len({labels[i] for i in places}) == 1 and TOKENIZER.decode(ids[-1]) == '</think>'
        for text, prompt in mine:
            assert labels[prompt - 1] == 1 and places[0] == prompt - 1
            found.add(text)
    assert found == set(memory_of(twins))


def test_what_it_would_say_of_two_words_leaves_all_other_words_alone():
    "Only these two rows of the output layer have a gradient where it is not tied to the input."
    model, words = tiny_model(TOKENIZER, width=32, heads=1, feedforward=64), (5, 9)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    ids, labels = torch.tensor([[3, 7, 8], [4, 6, 0]]), torch.tensor([[-1, -1, 1], [-1, 0, -1]])
    knowing_loss(model, ids, labels, words).backward()
    assert model.lm_head.weight.grad.abs().sum(-1).nonzero()[:, 0].tolist() == sorted(words)


def test_batches_of_all_lengths_hold_what_batches_of_like_length_hold():
    "Each row once in a round either way; of all lengths a batch of short and long rows comes up."
    rows = [([1] * n, [0] * n) for n in (2, 2, 9, 9)]
    for alike in (True, False):
        batches = tiny._endless_rows(rows, 2, 0, alike)
        rounds = [[(ids > 0).sum(-1).tolist() for ids, _ in (next(batches), next(batches))] for _ in range(20)]
        assert all(sorted(sum(r, [])) == [2, 2, 9, 9] for r in rounds)
        assert any(len(set(batch)) > 1 for r in rounds for batch in r) != alike


def test_fewer_games_than_a_batch_are_one_batch():
    example = example_group()
    ids, turns = next(tiny._endless([Group(example.question, [t]) for t in example.trajectories], 16, 0))
    assert len(ids) == len(turns) == 3


def test_a_base_that_is_not_asked_whether_it_knows_may_know_sums(monkeypatch):
    "Only chains can be asked about; a base of another world never gets there."
    assert any(q.meta['parametric'] and 'what is' in q.text for q in WORLD.questions)
    monkeypatch.setattr(tiny, 'knowing_rows', lambda *_: pytest.fail('asked whether it knows'))
    plan = CodeWarmStart(copy=2, games=2, reading=2, mixed=2, count=10, times=1, copied=99, played=99, read=99)
    with pytest.raises(RuntimeError, match='mixed'): code_warm_start(TOKENIZER, 0, plan, [WORLD], print)
