"A teacher whose tokenizer is not the policy's: the conversation is told in its words and its template (TIPS table 6)."
import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import Qwen2Config, Qwen2ForCausalLM

from credit_rl.engine import ScriptedEngine
from credit_rl.layout import pack
from credit_rl.protocol import CHATML, PROTOCOLS, Chat, byte_tokenizer
from credit_rl.readers import Passage
from credit_rl.retrieval import BM25
from credit_rl.rollout import Environment, rollout
from credit_rl.runlog import read_metrics
from credit_rl.scoring import acting_states, answer_header, answer_logps, gold_templates, retell, teacher_chat
from credit_rl.settings import check, make_config
from credit_rl.tools import SearchTool
from credit_rl.train import train
from credit_rl.trajectory import Question
from templates import FAMILIES, family_tokenizer

ROOT = Path(__file__).resolve().parents[2]
QUESTION = Question('q', 'Who directed Casablanca?', ['Michael Curtiz', 'Curtiz'])
TOOL = SearchTool(BM25([Passage('0', 'Casablanca', 'Casablanca is a film directed by Michael Curtiz.')]), 1, 50)
CALL = '<tool_call> {"name": "search", "arguments": {"query_list": ["Casablanca"]}} </tool_call>'


def play(chat, *says, **rules):
    said = iter(says)
    engine = ScriptedEngine(lambda text, rng: next(said), chat.tokenizer, max_length=10**6)
    return rollout(engine, Environment(chat, TOOL, max_tokens=10**6, **rules), [QUESTION])


SAYS = (f'<think> I look. </think> {CALL}', f'<think> Again. </think> {CALL}', 'nonsense',
        '<think> So. </think> <answer> Rabat </answer>')


def read(t, tokenizer):
    ids = [*t.prompt_ids, *(i for turn in t.turns for i in (*turn.action_ids, *turn.observation_ids))]
    return tokenizer.decode(ids)


@pytest.mark.parametrize('other', FAMILIES)
def test_the_same_conversation_is_told_in_another_template(other):
    policy = Chat(PROTOCOLS['tspo'], family_tokenizer('qwen2_5'))
    teacher = Chat(PROTOCOLS['tspo'], family_tokenizer(other))
    groups = play(policy, *SAYS)
    told = retell(groups, teacher, policy.opening)
    (own,), (t,) = groups[0].trajectories, told[0].trajectories
    assert t.prompt_ids == tuple(teacher.prompt_ids(QUESTION.text)) and len(t.turns) == len(own.turns) == 4
    text = read(t, teacher.tokenizer)
    for turn in own.turns:
        assert turn.action_text in text and turn.observation_text.strip() in text
    prefix = lambda chat: len(chat.encode(answer_header(chat)))
    theirs, ours = pack(told, prefix(teacher)), pack(groups, prefix(policy))
    assert theirs.states.shape == ours.states.shape and torch.equal(theirs.turn_mask, ours.turn_mask)
    for k in range(4):                       # a state ends behind the same words
        row, last = theirs.states[0, k].tolist()
        seen = own.turns[k - 1].observation_text if k else QUESTION.text
        assert teacher.tokenizer.decode(theirs.ids[row, :last + 1].tolist()).find(seen.strip()) > 0


def pair():
    "A tokenizer and a model, and the same with other ids: a special token more, and rows of the model in its order."
    tokens, others = byte_tokenizer(CHATML), byte_tokenizer(CHATML, special=('<|more|>', '<|im_start|>'))
    config = Qwen2Config(vocab_size=max(len(tokens), len(others)), hidden_size=32, intermediate_size=48,
                         num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                         max_position_embeddings=8192)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    other = Qwen2ForCausalLM(config).eval()
    other.load_state_dict(model.state_dict())
    place = [others.get_vocab().get(tokens.convert_ids_to_tokens(i)) for i in range(len(tokens))]
    assert place != list(range(len(tokens))) and None not in place
    with torch.no_grad():
        for name in ('get_input_embeddings', 'get_output_embeddings'):
            ours, theirs = getattr(model, name)().weight, getattr(other, name)().weight
            theirs.zero_()
            theirs[place] = ours[:len(tokens)]
            if len(others) > len(tokens):                                       # what is left goes to the word more
                theirs[others.convert_tokens_to_ids('<|more|>')] = ours[len(tokens)]
    return (tokens, model), (others, other)


def test_the_potential_of_the_same_model_with_other_ids_is_the_same():
    "Equal to the last digits: the text is the same, and so are the model's words but for their numbers."
    (tokens, model), (others, other) = pair()
    ours, theirs = Chat(PROTOCOLS['tspo'], tokens), Chat(PROTOCOLS['tspo'], others)
    groups = play(ours, *SAYS)
    def potential(model, chat, groups):
        layout = pack(groups, len(chat.encode(answer_header(chat))))
        return answer_logps(model, (layout.ids, layout.lengths), acting_states(layout.states, layout.turn_mask),
                            gold_templates(chat, groups, 'tips')).sums
    own, told = potential(model, ours, groups), potential(other, theirs, retell(groups, theirs, ours.opening))
    assert own[0, :4].isfinite().all() and own.shape == (1, 5, 2)
    assert_close(told, own, atol=1e-4, rtol=0, equal_nan=True)
    assert (potential(other, ours, groups) - own)[0, :4].abs().min() > 1e-3     # it reads another text in our ids


def test_who_is_told_and_who_reads_ids(tmp_path):
    (ours, model), (others, _) = pair()
    for name, tokenizer in (('same', ours), ('other', others)):
        for part in (model, tokenizer): part.save_pretrained(tmp_path / name)
    for teacher in ('self', 'base', str(tmp_path / 'same')):
        assert teacher_chat(teacher, ours, PROTOCOLS['tips']) is None
    assert teacher_chat(str(tmp_path / 'other'), ours, PROTOCOLS['tips']).tokenizer.get_vocab() == others.get_vocab()
    with pytest.raises(ValueError, match="policy's"):
        teacher_chat(str(tmp_path / 'other'), ours, PROTOCOLS['carl'])


def test_a_run_is_taught_by_a_model_of_another_family(tmp_path):
    "Two steps: potentials are there at every state."
    teacher = tmp_path / 'teacher'
    shutil.copytree(ROOT / 'data' / 'tiny_carl', teacher)
    settings = dict(model=str(ROOT / 'data' / 'tiny_base'), method='tips', teacher=str(teacher), steps=2, eval_every=2,
                    questions_per_step=2, group_size=2, questions=20, dev_questions=2, test_questions=2, max_turns=3,
                    turn_tokens=12, world={'size': 200}, threads=1, track='', options={'alpha': .1})
    check(make_config(settings))
    log = read_metrics(train({**settings, 'run': str(tmp_path / 'run')}, say=lambda line: None))[1:]
    assert (log.mean_abs_shaping > 0).all() and (log.seconds_teacher > 0).all()


def test_the_end_of_a_message_is_the_models_own_where_that_is_set():
    "By default generation stops at the call, and the token behind it is the template's; else it is sampled."
    chat = Chat(PROTOCOLS['tspo'], byte_tokenizer(CHATML))
    own = Chat(dataclasses.replace(PROTOCOLS['tspo'], call_stop='message'), chat.tokenizer)
    assert '</tool_call>' in chat.stop and '</tool_call>' not in own.stop and '</answer>' in own.stop
    says = {chat: (CALL, '<answer> Rabat </answer>'), own: (f'{CALL}<|im_end|>', '<answer> Rabat </answer>')}
    (tag,), (message,) = (play(c, *says[c])[0].trajectories for c in (chat, own))
    for t in (tag, message): assert t.turns[0].call == {'name': 'search', 'queries': ['Casablanca']}
    end = chat.tokenizer.convert_tokens_to_ids('<|im_end|>')
    assert tag.turns[0].action_ids[-1] != end and message.turns[0].action_ids[-1] == end
    assert read(tag, chat.tokenizer) == read(message, chat.tokenizer)          # the same conversation
    trained = [int(pack(play(c, *says[c])).trained.sum()) for c in (chat, own)]
    assert trained[1] == trained[0] + 1


def test_a_message_goes_on_behind_a_call_that_does_not_end_it():
    own = Chat(dataclasses.replace(PROTOCOLS['tspo'], call_stop='message'), byte_tokenizer(CHATML))
    said = play(own, f'{CALL} {CALL}<|im_end|>', '<answer> Rabat </answer>')[0].trajectories[0].turns[0]
    assert said.action_text == f'{CALL} {CALL}' and said.call


@pytest.mark.parametrize('protocol', ['search-r1', 'carl'])
def test_a_call_inside_the_assistants_message_ends_none(protocol):
    with pytest.raises(ValueError, match='call_stop'):
        dataclasses.replace(PROTOCOLS[protocol], call_stop='message')
    with pytest.raises(ValueError, match='call_stop'):
        check(make_config({'protocol': protocol, 'call_stop': 'message', 'model': 'data/tiny_base'}))
