"""04_estimate: what it says of memory beside what new tensors hold at the worst moment (tests/tools/peak.py), while a
learner reads, learns and updates; and that its numbers are those of the modules it speaks of."""
import dataclasses
import random

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from credit_rl import dry_run, estimate
from credit_rl.engine import HFEngine
from credit_rl.estimate import Sizes, TrainingPlan, memory
from credit_rl.layout import HeadPieces, head_logps, pack
from credit_rl.learner import Learner, Optimiser
from credit_rl.parts import Credit, Golds, Loss, Needs
from credit_rl.scoring import AnswerTemplate
from credit_rl.settings import make_config
from credit_rl.setup import add_lora, plan_of
from credit_rl.trajectory import Group, Question, Stop, Trajectory, Turn
from peak import Peak

ROWS, LENGTH = 8, 128
CASES = {                                                         # what takes most: the layers, the head, its gradient
    'layers': {}, 'head': {'words': 3000}, 'entropy': {'words': 3000, 'entropy': True},
    'pieces': {'words': 3000, 'piece': 60_000, 'checkpointing': True}, 'checkpointing': {'checkpointing': True},
    'wide': {'layers': 6, 'hidden': 128, 'intermediate': 320, 'words': 300}}


def model(layers=4, hidden=64, intermediate=176, words=64):
    "A random Qwen2 with heads of 16, four of which share keys, and its sizes."
    torch.manual_seed(0)
    made = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=words, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
                    num_attention_heads=hidden // 16, num_key_value_heads=hidden // 64, tie_word_embeddings=False,
                    eos_token_id=None, bos_token_id=None, pad_token_id=None))
    return made, Sizes(made.num_parameters(), layers, hidden, intermediate, hidden, hidden // 4, words)


def rows(words, prompt=8):
    "Eight trajectories of a row of 128 tokens, nearly all of which are trained."
    rng, question = random.Random(0), Question('q', 'Who?', ('one',))
    ids = lambda n: tuple(rng.randrange(1, words) for _ in range(n))
    turn = lambda: Turn('plain', ids(LENGTH - prompt), [-1.] * (LENGTH - prompt), (), '', '')
    return pack([Group(question, [Trajectory(question, ids(prompt), [turn()], Stop.ANSWER) for _ in range(ROWS)])])


def learner_of(dtype, golds=0, entropy=False, piece=None, checkpointing=False, stage=None, lora=None, **shape):
    "A learner after its first update, its rows, its sizes and its plan. A forward without gradient reads all rows."
    policy, sizes = model(**shape)
    if dtype == 'bfloat16' and stage is None: policy = policy.bfloat16()
    if lora: add_lora(policy, lora)
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    if checkpointing: policy.gradient_checkpointing_enable({'use_reentrant': False})
    layout, backend = rows(sizes.vocabulary), None
    if stage is not None:
        from credit_rl.sharded import DeepSpeedBackend
        backend = DeepSpeedBackend(stage, dtype, {'zero_optimization': {'reduce_bucket_size': 100_000}})
    budget = ROWS * (LENGTH + 4 * golds) // 4
    learner = Learner(policy, Loss(entropy=.01 * entropy), Optimiser(minibatches=1, row_tokens=budget), backend=backend)
    if piece: learner.scorer.pieces = HeadPieces(max(piece, budget * sizes.hidden))
    plan = TrainingPlan(stage, width=4 if dtype == 'float32' else 2, row_tokens=budget, checkpointing=checkpointing,
                        length=LENGTH, branches=4 * golds, entropy=entropy, spread=entropy,
                        piece=piece or TrainingPlan.piece, bucket=1e5, share=min(1., trained / sizes.parameters))
    learn(learner, layout)
    return learner, layout, sizes, plan


def learn(learner, layout):
    credit = torch.randn(layout.ids.shape, generator=torch.Generator().manual_seed(0))
    return learner.step(layout, None, Credit(credit * layout.trained))


def updates(learner, layout):
    "The most bytes of a step, gradients among them, and of its update alone."
    inside, update = [], learner.backend.update
    def counted(clip):
        with Peak() as peak: norm = update(clip)
        inside.append(peak.most)
        return norm
    learner.backend.update = counted
    with Peak() as peak: learn(learner, layout)
    return peak.most, max(inside)


@pytest.mark.parametrize('entropy', [False, True])
@pytest.mark.parametrize('pieces', [1, 4])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_the_bytes_of_a_head(dtype, pieces, entropy):
    "8 or 16 bytes of each number while it is read; 12 or 20 on the way back, and its gradient beside where it adds up."
    words, hidden, tokens = 1000, 16, 200
    plan = TrainingPlan(width=dtype.itemsize, row_tokens=0, piece=words * tokens / pieces, entropy=entropy,
                        spread=entropy)
    sizes, head = Sizes(0, 1, hidden, 1, 1, 1, words), torch.nn.Linear(hidden, words, bias=False).to(dtype)
    states, target = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True), torch.randint(words, (tokens,))
    ask = lambda: head_logps(head, states, target, None, entropy, HeadPieces(int(plan.piece)))
    with torch.no_grad(), Peak() as reading: ask()
    with Peak() as learning: sum(x.sum() for x in (ask() if entropy else (ask(),))).backward()
    assert estimate._head_bytes(sizes, plan, tokens, False) == pytest.approx(reading.most, rel=.01)
    assert estimate._head_bytes(sizes, plan, tokens, True) == pytest.approx(learning.most, rel=.05)
    numbers = words * tokens // pieces
    assert reading.most == pytest.approx((16 if entropy else 8) * numbers, rel=.01)
    assert learning.most >= (20 if entropy else 12) * numbers


@pytest.mark.parametrize('case, dtype', [*((case, 'float32') for case in CASES), ('head', 'bfloat16'),
                                         *(pytest.param(case, 'bfloat16', marks=pytest.mark.nightly) for case in (
                                             'layers', 'entropy', 'pieces', 'checkpointing', 'wide'))])
def test_what_a_learner_takes(case, dtype):
    "While it learns from a quarter of the rows at a time, and reads them all."
    learner, layout, sizes, plan = learner_of(dtype, **CASES[case])
    with Peak() as reading: learner.evaluate(layout, Needs(logp=True, entropy=plan.entropy))
    learning, updating = updates(learner, layout)
    said = memory(sizes, plan)
    assert said['forward'] == pytest.approx(reading.most, rel=.1)
    assert said['gradients'] + said['activations'] + max(said['layer'], said['head']) == pytest.approx(learning, rel=.1)
    if sizes.vocabulary > 2 * sizes.intermediate: assert said['update'] == pytest.approx(updating, rel=.01)


@pytest.mark.parametrize('dtype, checkpointing', [('float32', False), ('bfloat16', True)])
def test_what_low_rank_additions_take(dtype, checkpointing):
    "While rows are read, an addition as wide as the feed-forward part stands beside what it is added to."
    pytest.importorskip('peft')
    learner, layout, sizes, plan = learner_of(dtype, checkpointing=checkpointing, hidden=128, intermediate=688,
                                              lora={'r': 4, 'lora_alpha': 8})
    with Peak() as reading: learner.evaluate(layout)
    said, whole = memory(sizes, plan), memory(sizes, dataclasses.replace(plan, share=1.))
    assert said['forward'] == pytest.approx(reading.most, rel=.03) and whole['forward'] < .85 * reading.most
    learning = said['gradients'] + said['activations'] + said['layer']
    assert learning == pytest.approx(updates(learner, layout)[0], rel=.15)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('golds', [1, 8])
def test_gold_answers_count(golds, dtype):
    "Behind their rows in one forward. A kernel may take the mask in the model's numbers, which is not seen here."
    learner, layout, sizes, plan = learner_of(dtype, golds)
    templates = {'gold': [[AnswerTemplate((1, 2, 3, 4, 5 + k), 2, 5) for k in range(golds)]] * ROWS}
    learner.evaluate(layout, Needs(logp=True, gold=Golds()), templates)
    with Peak() as peak: learner.evaluate(layout, Needs(logp=True, gold=Golds()), templates)
    said, without = (memory(sizes, way)['forward'] for way in (plan, dataclasses.replace(plan, branches=0)))
    assert .8 * said < peak.most < 1.05 * said and said > 1.1 * without


@pytest.mark.parametrize('stage, dtype', [(0, 'float32'), (2, 'bfloat16'), (3, 'float32')])
def test_what_an_update_behind_deepspeed_takes(stage, dtype):
    "Its own numbers are flat and float32, which the gradients become first."
    pytest.importorskip('deepspeed')
    learner, layout, sizes, plan = learner_of(dtype, stage=stage, words=600)
    assert memory(sizes, plan)['update'] == pytest.approx(updates(learner, layout)[1], rel=.01)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_checkpoint_holds_the_masters(dtype, tmp_path):
    learner, _, sizes, plan = learner_of(dtype, words=600)
    learner.save(tmp_path)
    assert memory(sizes, plan)['checkpoint'] == pytest.approx((tmp_path / 'learner.pt').stat().st_size, rel=.05)
    assert memory(sizes, plan)['checkpoint'] == sizes.parameters * (12 if dtype == 'float32' else 14)


def test_the_numbers_are_those_of_the_modules():
    assert TrainingPlan.piece == HeadPieces.budget
    plan = plan_of(make_config(dict(max_tokens=1000, questions_per_step=100, act_rows=256)))
    assert plan.prompts == HFEngine(model()[0], FakeTokenizer()).read_tokens < plan.acting
    policy, sizes = model(words=50)
    for budget in (2 ** 10, 2 ** 20):
        learner = Learner(policy, optimiser=Optimiser(row_tokens=budget))
        pieces = learner.scorer.pieces.count(2 ** 22, 50)
        said = estimate._head_bytes(sizes, TrainingPlan(row_tokens=budget), 2 ** 22, False)
        assert said == 8 * 50 * -(-2 ** 22 // pieces)


class FakeTokenizer:
    eos_token_id = 0


def test_a_run_says_what_its_forwards_are():
    plan = lambda **settings: plan_of(make_config(dict(max_tokens=200, **settings)))
    assert (plan().length, plan().rows, plan().branches) == (200, 1, 0)
    carl = dict(method='carl', protocol='carl-tiny', max_turns=9)
    assert plan(**carl).rows == 9 and plan(**carl).branches == 0
    assert plan(**carl, loss={'entropy': .001}).entropy and not plan(**carl).entropy
    tree = plan(**carl, tree=True, prompt_tokens=100, response_tokens=100)
    assert tree.tree and tree.rows * 200 == pytest.approx(100 + (4 * 4 + 1) * 100 / 9)      # a call is four stretches
    assert plan(method='igpo').branches == 4 * 16 * 24 == plan(measure=['belief']).branches
    assert plan(method='igpo', options={'golds': 2}).branches == 4 * 2 * 24
    assert plan(measure=['entropy']).spread and not plan(measure=['entropy'], loss={'entropy': .1}).spread
    assert plan(method='ppo', critic='own', critic_step='together').together and not plan(method='ppo').together


@pytest.mark.parametrize('dtype, wanted', [('float32', 1.), ('bfloat16', 4.)])
def test_speed_is_measured_in_the_runs_own_numbers(dtype, wanted, monkeypatch):
    "And in TF32 where that is set; afterwards it is as it was."
    seen = []
    def measured(dtype):
        seen.append(torch.get_float32_matmul_precision())
        return {torch.float32: 1., torch.bfloat16: 4.}[dtype]
    monkeypatch.setattr(dry_run, 'measure_tflops', measured)
    for tf32 in (None, True):
        tflops, line = dry_run.rank_tflops(None, dtype, tf32)
        assert tflops == wanted and f'measured on this host in {dtype}: {wanted:.3g} TFLOP/s' in line
    assert seen == ['highest', 'high'] and torch.get_float32_matmul_precision() == 'highest'
