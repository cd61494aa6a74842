"""TRL plays in our environment, by the stored tiny base; what it played is read, credited and learned from as ours."""
import os
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from credit_rl.learner import Learner, Optimiser
from credit_rl.methods import get_method
from credit_rl.models import load_model
from credit_rl.parts import assign
from credit_rl.protocol import Chat, PROTOCOLS
from credit_rl.rollout import Environment
from credit_rl.tiny import tiny_environment
from credit_rl.tools import SearchTool
from credit_rl.trajectory import Question, Result, Stop
from credit_rl.world import make_world
from templates import family_tokenizer

trl = pytest.importorskip('trl', reason='pip install credit_rl[train]')
from credit_rl import trl_trainer as ours

TEMPLATE = ("{% for m in messages %}<|im_start|>{% if m['role'] == 'tool' %}user\n<tool_response>\n"
            "{{ m['content'] }}\n</tool_response>{% else %}{{ m['role'] }}\n{{ m['content'] }}"
            "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function']['name'] }} "
            "{{ c['function']['arguments'] | tojson }}</tool_call>{% endfor %}{% endif %}"
            "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
CALLS = {'start_anchor_pattern': r'<\|im_start\|>\s*assistant', 'defaults': {'role': 'assistant'}, 'fields': {
    'tool_calls': {'open': '<tool_call>', 'close': '</tool_call>', 'repeats': True, 'content': 'text',
                   'transform': {'type': 'function', 'function': {'name': 'search',
                                                                  'arguments': {'query_list': ['{content}']}}}},
    'content': {'close': '<|im_end|>', 'content': 'text'}}}
RATE = 1e-3


@pytest.fixture(autouse=True)
def quiet(monkeypatch): monkeypatch.setenv('TRL_EXPERIMENTAL_SILENCE', '1')


def room_of(root):
    "The stored base with a template that has tools, and a world to ask about."
    (model, tokenizer), world = load_model(str(root / 'data/tiny_base')), make_world(seed=3, questions=4)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, CALLS
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(['<|im_end|>', '</tool_call>', '</answer>'])
    return model, tokenizer, tiny_environment(world, Chat(PROTOCOLS['tiny'], tokenizer), max_turns=4), world


def trained(root, folder, method, **more):
    "One step of TRL on four questions by four attempts: (trainer, weights before it)."
    from datasets import Dataset
    model, tokenizer, room, world = room_of(root)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    settings = dict(num_generations=4, per_device_train_batch_size=16, max_steps=1, max_completion_length=120,
                    max_tool_calling_iterations=3, loss_type='dapo', beta=0., learning_rate=RATE, seed=1, use_cpu=True,
                    lr_scheduler_type='constant', bf16=False, gradient_checkpointing=False, save_strategy='no',
                    report_to='none', disable_tqdm=True, logging_strategy='no', dataloader_pin_memory=False,
                    max_grad_norm=1., weight_decay=0.)
    credit = ours.EnvironmentCredit(method, room)
    trainer = ours.credit_trainer()(
        model, credit=credit, processing_class=tokenizer, args=trl.GRPOConfig(str(folder), **settings | more),
        train_dataset=Dataset.from_list(ours.environment_rows(room.chat, world.questions)))
    seen = []
    original = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: (seen.append(inputs), original(model, inputs))[1]
    trainer.train()
    return trainer, before, seen


@pytest.fixture(scope='module')
def played(root, tmp_path_factory):
    os.environ['TRL_EXPERIMENTAL_SILENCE'] = '1'
    return trained(root, tmp_path_factory.mktemp('trl'), get_method('outcome+folr/turns').bind({}))


@pytest.mark.long
def test_what_trl_played_is_what_we_credit(played):
    trainer, _, (inputs,) = played
    credit = trainer.turn_credit
    rollouts = [t for g in credit.groups for t in g.trajectories]
    assert [len(g.trajectories) for g in credit.groups] == [4] * 4
    theirs = {}                                    # TRL deals the rows of a batch out anew
    for row, mask, own, prompt, kept in zip(inputs['completion_ids'], inputs['completion_mask'].bool(),
                                            inputs['tool_mask'], inputs['prompt_ids'], inputs['prompt_mask'].bool()):
        theirs[tuple(prompt[kept].tolist()), tuple(row[mask].tolist())] = own[mask].tolist()
    for t in rollouts:
        ids = tuple(i for turn in t.turns for i in (*turn.action_ids, *turn.observation_ids))
        flags = [x for turn in t.turns for x in [1] * len(turn.action_ids) + [0] * len(turn.observation_ids)]
        assert theirs[t.prompt_ids, ids] == flags
    assert len(theirs) > 4
    called = [turn for t in rollouts for turn in t.turns if turn.call]
    assert called and all(turn.result in (Result.OK, Result.SKIPPED, Result.ERROR) for turn in called)
    answered = [t for t in rollouts if t.stop is Stop.ANSWER]
    assert answered and all(t.answer for t in answered) and all(t.turns[-1].kind == 'answer' for t in answered)


@pytest.mark.long
def test_the_tool_is_our_search_and_its_fields_are_kept(played):
    trainer = played[0]
    tool = trainer.turn_credit.environment.tool
    turns = [turn for g in trainer.turn_credit.groups for t in g.trajectories for turn in t.turns
             if turn.result is Result.OK]
    assert turns
    for turn in turns:
        ((said, _),) = tool.call([turn.call['queries']])
        assert turn.observation_text == trainer.turn_credit.environment.chat.plain(said)
        assert turn.returned == said.returned()


def test_the_advantages_are_those_of_assign(played):
    trainer, _, (inputs,) = played
    credit = trainer.turn_credit
    batch = assign(credit.method, credit.groups, lambda layout, asks: None)
    tokens = batch.layout.trained.sum()
    found = inputs['advantages']
    assert found.shape == inputs['completion_ids'].shape and found.any() and not found[inputs['tool_mask'] == 0].any()
    weights = ours.loss_weights(batch.layout.token_turns, batch.layout.row_trajectory, credit.method.loss.average)
    wanted = batch.credit.advantages * weights * tokens
    for row, mask, ids in zip(found, inputs['completion_mask'].bool(), inputs['completion_ids']):
        (i, t), *_ = [(i, t) for i, t in enumerate(batch.trajectories) if ids[mask].tolist() ==
                      [x for turn in t.turns for x in (*turn.action_ids, *turn.observation_ids)]]
        assert_close(row[mask], wanted[i, len(t.prompt_ids):][:int(mask.sum())])
    assert credit.outcome(['x'] * 16) == credit.rewards['outcome'].tolist()


def test_trls_step_is_our_learners_step_on_what_trl_played(root, played):
    trainer, before, _ = played
    credit = trainer.turn_credit
    model, _ = load_model(str(root / 'data/tiny_base'))
    model.load_state_dict(before, strict=False)
    learner = Learner(model, credit.method.loss,
                      Optimiser(RATE, betas=(.9, .999), minibatches=1, clip=1.), seed=1)
    batch = assign(credit.method, credit.groups, lambda layout, asks: None)
    learner.step(batch.layout, learner.evaluate(batch.layout), batch.credit)
    mine, theirs = (torch.cat([(p.detach() - before[n]).flatten() for n, p in m.named_parameters()])
                    for m in (model, trainer.model))
    assert theirs.norm() > 0 and (mine - theirs).norm() < .03 * theirs.norm()


def test_turns_that_do_not_fit_are_refused(root, tmp_path):
    with pytest.raises(ValueError, match='max_tool_calling_iterations=3'):
        trained(root, tmp_path, get_method('tspo').bind(), max_tool_calling_iterations=5)


# ---- the environment, and what is read of a rollout ----

class Fixed:
    def search(self, queries, k): return [[] for _ in queries]


@pytest.mark.parametrize('name', [n for n, p in PROTOCOLS.items() if p.tools])
def test_the_model_is_shown_the_protocols_own_tool(name):
    "The ids of the prompt that TRL makes are those of our own rollouts, where the template shows tools."
    from transformers.utils import get_json_schema
    chat = Chat(PROTOCOLS[name], family_tokenizer('qwen2_5'))
    env = Environment(chat, SearchTool(Fixed(), 1, None))
    task = ours.task_class(env)(chat, env.tool)
    schema = PROTOCOLS[name].tools[0]
    method = getattr(task, schema['function']['name'])
    assert get_json_schema(method) == schema
    (row,) = ours.environment_rows(chat, [Question('q', 'Who?', ['x'])])
    if chat.tools is None: return
    ids = chat.tokenizer.apply_chat_template(row['prompt'], tools=[method], add_generation_prompt=True,
                                             return_dict=False)
    assert ids == chat.prompt_ids('Who?')


@pytest.mark.parametrize('name', ['carl', 'carl-direct', 'carl-tiny'])
def test_protocols_that_trl_cannot_play_are_refused(name):
    chat = Chat(PROTOCOLS[name], family_tokenizer('qwen2_5'))
    with pytest.raises(ValueError, match='played'): ours.task_class(SimpleNamespace(chat=chat))


def reply(text, query, result=Result.OK): return ({'name': 'search', 'queries': [query]}, text, result, text)


def read(messages, runs, replies, max_turns=4):
    "A rollout of letters: runs are pairs of what the model wrote and what followed."
    chat = Chat(PROTOCOLS['tspo'], family_tokenizer('qwen2_5'))
    env = Environment(chat, SearchTool(Fixed(), 1, None), max_turns)
    mask, ids = [], []
    for wrote, after in runs:
        own, seen = chat.encode(wrote), chat.encode(after)
        mask += [1] * len(own) + [0] * len(seen)
        ids += own + seen
    return ours.task_trajectory(env, Question('q', 'Who?', ['x']), [1, 2], (mask, ids, [0.] * len(ids)), messages,
                                replies)


CALL = {'role': 'assistant', 'content': '', 'tool_calls': [{'type': 'function', 'function': {
    'name': 'search', 'arguments': {'query_list': ['a']}}}]}
SAID = {'role': 'assistant', 'content': 'x'}
def tool(text): return {'role': 'tool', 'name': 'search', 'content': text}


def test_several_calls_in_a_message_are_one_turn_with_all_queries():
    t = read([CALL, tool('p'), tool('p2'), SAID], [('two calls', 'pages'), ('<answer>x</answer><|im_end|>', '')],
             [reply('p', 'a'), reply('p2', 'b')])
    assert t.turns[0].call == {'name': 'search', 'queries': ['a', 'b']} and t.turns[0].observation_text == 'p\np2'
    assert t.stop is Stop.ANSWER and t.answer == 'x' and t.turns[0].result is Result.OK


def test_a_call_that_trl_could_not_run_is_an_error():
    "A tool that there is not, between two that there are: the replies keep their places."
    t = read([CALL, tool("{'error': 'Tool sing not found.'}"), CALL, tool('p'), SAID],
             [('a', 'err'), ('b', 'page'), ('no answer<|im_end|>', '')], [reply('p', 'a')])
    assert [turn.result for turn in t.turns] == [Result.ERROR, Result.OK, Result.MALFORMED]
    assert t.turns[0].call is None and t.stop is Stop.NO_ANSWER and t.answer is None


def test_rollouts_that_are_cut_say_why():
    over = read([CALL], [('call', '')], [reply('p', 'a')])          # TRL rolled the tool's answer back: no room
    assert over.stop is Stop.LENGTH and over.turns[0].result is Result.SKIPPED
    last = read([CALL, tool('p'), CALL], [('call', 'page'), ('call', '')], [reply('p', 'a')], max_turns=2)
    assert last.stop is Stop.TURN_CAP and last.turns[1].result is Result.SKIPPED
    behind = read([CALL, tool('p')], [('call', 'page')], [reply('p', 'a')])   # nothing was left to write an answer in
    assert behind.stop is Stop.LENGTH and behind.turns[0].result is Result.OK
    cut = read([SAID], [('never ends', '')], [])
    assert cut.stop is Stop.LENGTH and cut.turns[0].result is Result.MALFORMED


def test_messages_that_are_not_the_stretches_are_refused():
    with pytest.raises(ValueError, match='stretches'):
        read([SAID], [('a', 'b'), ('c', '')], [])
