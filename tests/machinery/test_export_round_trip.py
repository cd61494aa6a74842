"""66_export: what goes out plays elsewhere as it played here, awkward bases included."""
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from gguf_files import small_llama

from credit_rl.evaluate import run_evaluation
from credit_rl.export import export_run
from credit_rl.models import load_model, write_model
from credit_rl.protocol import CHATML, Chat, byte_tokenizer, get_protocol
from credit_rl.runlog import read_json, read_turns
from credit_rl.settings import check, make_config
from credit_rl.sft import demos_main, main
from credit_rl.train import train
from credit_rl.trajectory import trajectory_from_json

IDS = {'bos_token_id', 'eos_token_id', 'pad_token_id'}
# what transformers reads and does not save, a row of each check in GenerationConfig.validate
UNSAVED = [{'temperature': .6}, {'top_p': .9}, {'min_p': .1}, {'top_h': .4}, {'typical_p': .9}, {'top_k': 20},
           {'epsilon_cutoff': .1}, {'eta_cutoff': .1}, {'early_stopping': True}, {'length_penalty': .8},
           {'use_cache': False, 'cache_implementation': 'static'}, {'output_scores': True}, {'pad_token_id': -1}]
# what it does not even read
UNREAD = [{'num_return_sequences': 3}, {'early_stopping': 'perhaps'}, {'max_new_tokens': 0},
          {'assistant_ensemble_weight': 2.}, {'cache_implementation': 'none such'}, {'compile_config': {}},
          {'watermarking_config': {'greenlist_ratio': 3.}}, {'forced_eos_token_id': 3, 'suppress_tokens': [3]},
          {'num_beams': 2, 'num_return_sequences': 5}]
# what it saves, and heeds in greedy play
HEEDED = [{'repetition_penalty': 1.3}, {'no_repeat_ngram_size': 1}, {'suppress_tokens': [5]}, {'num_beams': 3}]


def add(folder, **generation):
    "Put entries into a folder's generation_config.json."
    path = folder / 'generation_config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | generation))


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp('plain')
    for part in small_llama(width=24, layers=1): part.save_pretrained(folder)
    return folder


@pytest.fixture
def awkward(plain, tmp_path):
    "A function of entries that makes a base with them in its generation_config.json."
    import shutil
    shutil.copytree(plain, tmp_path / 'base')
    return lambda entries: add(tmp_path / 'base', **entries) or tmp_path / 'base'


@pytest.mark.parametrize('entries', [*UNSAVED, *HEEDED], ids=str)
def test_what_a_base_brings_beside_ids_is_left_out_and_named(awkward, tmp_path, entries):
    from transformers import AutoModelForCausalLM
    model, tokenizer = load_model(awkward(entries))
    if entries in UNSAVED:
        with pytest.raises(ValueError): model.save_pretrained(tmp_path / 'refused')
    (tmp_path / 'made').mkdir()
    left = write_model(tmp_path / 'made', model, tokenizer)
    ids = torch.arange(3, 9)[None]
    made, model.generation_config = AutoModelForCausalLM.from_pretrained(tmp_path / 'made'), None
    greedy = [ids]
    for _ in range(5): greedy.append(model(torch.cat(greedy, 1)).logits[:, -1:].argmax(-1))
    written = made.generate(ids, attention_mask=ids * 0 + 1, max_new_tokens=5, eos_token_id=-1, pad_token_id=0)
    assert written.tolist() == torch.cat(greedy, 1).tolist()
    assert set(left) == {n for n, v in entries.items() if n not in IDS and v is not False}
    assert not left or read_json(tmp_path / 'made' / 'credit_rl.json')['left_out'] == left
    assert made.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize('entries', UNREAD, ids=str)
def test_what_transformers_does_not_read_is_refused_by_its_file(awkward, entries):
    with pytest.raises(ValueError, match='generation_config.json'): load_model(awkward(entries))


def test_quantised_weights_are_refused_before_they_are_read(awkward):
    folder = awkward({})
    about = read_json(folder / 'config.json')
    (folder / 'config.json').write_text(json.dumps(about | {'quantization_config': {'quant_method': 'awq', 'bits': 4}}))
    for read in (load_model, lambda model: check(make_config({'model': str(model), 'data': 'gsm8k'}))):
        with pytest.raises(ValueError, match='quantised .awq.'): read(folder)


# ---- sft, train, export, evaluation ----

ENDED = CHATML.replace('<|im_end|>', '<|eot|>')
DATED = "{{- '<|im_start|>system\nIt is ' + strftime_now('%d %B %Y') + '.<|im_end|>\n' -}}" + CHATML


def base_of(folder, case):
    "Write a base of a kind; what has to be said besides to play it."
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
    text, special = ['Where is the lighthouse of Orvane? In the harbour.'] * 2, ('<|im_start|>', '<|im_end|>')
    tokenizer = byte_tokenizer(texts=text, merges=200, special=(*special, '<|eot|>'))
    if case == 'stop string': tokenizer.add_tokens(['</search>'])
    torch.manual_seed(0)
    kind, config = (MistralForCausalLM, MistralConfig) if case == 'window' else (LlamaForCausalLM, LlamaConfig)
    model = kind(config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        tie_word_embeddings=case == 'eos list', **({'sliding_window': 1500} if case == 'window' else {})))
    said = {'no template': ['template=chatml'], 'dated': ["template_options={strftime_now: '2026-01-31'}"]}
    tokenizer.chat_template = {'no template': None, 'end of turn': ENDED, 'dated': DATED}.get(case, CHATML)
    for part in (model, tokenizer): part.save_pretrained(folder)
    return said.get(case, [])


def let_it_end(folder, case, question, chat):
    "Let the third token that a base writes be one that ends a turn, by its id or by its text."
    model, tokenizer = load_model(folder)
    ids = torch.tensor([chat.prompt_ids(question)])
    for _ in range(3): ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    third = int(ids[0, -1])
    if case == 'eos list': return add(folder, eos_token_id=[third, *tokenizer.convert_tokens_to_ids(['a', 'b'])])
    with torch.no_grad():
        rows = [third, tokenizer.convert_tokens_to_ids('</search>') if case == 'stop string' else chat.end_id]
        model.lm_head.weight[rows] = model.lm_head.weight[rows[::-1]]
    model.save_pretrained(folder)


BY_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == '__main__':
    folder, tools, asked, stop = json.load(sys.stdin)
    engine = LLM(folder, dtype='float32', enforce_eager=True, max_model_len=2048)
    how = SamplingParams(temperature=0, max_tokens=6, stop=stop, include_stop_str_in_output=True)
    for r in engine.chat(asked, how, tools=tools, use_tqdm=False):
        print('came', json.dumps([list(r.prompt_token_ids), list(r.outputs[0].token_ids)]), flush=True)
"""


def asked_by_vllm(folder, tools, messages, stop):
    "What vLLM alone, which knows the folder and nothing of us, reads and writes after messages: (prompt ids, ids) each."
    done = subprocess.run(
        [sys.executable, '-c', BY_VLLM], input=json.dumps([str(folder), tools, messages, stop]), text=True, capture_output=True,
        env={**os.environ, 'VLLM_ENABLE_V1_MULTIPROCESSING': '0', 'VLLM_CPU_KVCACHE_SPACE': '1', 'HF_HUB_OFFLINE': '1'})
    came = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith('came ')]
    assert len(came) == len(messages), done.stdout[-3000:] + done.stderr[-3000:]
    return came


@pytest.mark.parametrize('case', ['eos list', 'no template', 'end of turn', 'stop string', 'dated', 'window'])
def test_a_round_trip(case, tmp_path, root):
    "By us, by transformers' `generate`, and where it is installed (make test-vllm) by vLLM."
    from transformers import AutoModelForCausalLM, AutoTokenizer
    base, asked = tmp_path / 'base', ['data=hotpotqa', f'path={root / "data/hotpotqa_sample.json"}', 'threads=1']
    more, protocol = base_of(base, case), root / 'runs/params/protocols/short.yaml'
    words = [*asked, *more, f'model={base}', f'protocol={protocol}', 'questions=4', 'dev_questions=1',
             'test_questions=1', "track=''", 'max_tokens=1500', 'turn_tokens=6', 'max_turns=3', 'malformed=end']
    demos_main([*words, f'run={tmp_path / "demos"}', 'demos.attempts=4'])
    row = trajectory_from_json(read_turns(tmp_path / 'demos')[0]['trajectory'])
    options = {'strftime_now': '2026-01-31'} if case == 'dated' else {}
    template = CHATML if case == 'no template' else None
    chat = Chat(get_protocol(str(protocol)), load_model(base)[1], template, options)
    let_it_end(base, case, row.question.text, chat)
    add(base, temperature=.6, repetition_penalty=1.3)
    main([*words, f'sft.demos={tmp_path / "demos"}', 'sft.epochs=1', 'sft.learning_rate=1e-9', f'run={tmp_path / "sft"}'])
    train({'data': 'hotpotqa', 'path': str(root / 'data/hotpotqa_sample.json'), 'model': str(tmp_path / 'sft' / 'model'),
           'method': 'grpo', 'threads': 1, 'steps': 1, 'questions': 2, 'questions_per_step': 1, 'group_size': 2,
           'dev_questions': 1, 'test_questions': 1, 'learning_rate': 1e-9, 'track': '', 'run': str(tmp_path / 'run')},
          say=lambda line: None)                                         # nothing is said again
    made = export_run(tmp_path / 'run', tmp_path / 'made')
    protocol_text = protocol.read_text()
    run_evaluation({'data': 'hotpotqa', 'path': asked[1].removeprefix('path='), 'model': str(made), 'questions': 2,
                    'threads': 1, 'run': str(tmp_path / 'evaluation')}, say=lambda line: None, progress=False)
    played = [trajectory_from_json(r['trajectory']) for r in read_turns(tmp_path / 'evaluation' / 'hotpotqa')]
    about = read_json(made / 'credit_rl.json')
    assert (made / about['play']['protocol']).read_text() == protocol_text
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    ends, messages = [], [chat.messages(t.question.text) for t in played]
    for t, asked in zip(played, messages):
        ids = tokenizer.apply_chat_template(asked, tools=chat.tools, add_generation_prompt=True, return_dict=False)
        assert ids == list(t.prompt_ids)
        written = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, stop_strings=about['stop'],
                                 tokenizer=tokenizer)[0, len(ids):].tolist()
        assert written == list(t.turns[0].action_ids)
        ends.append(len(written) < 6)
    assert any(ends)
    if importlib.util.find_spec('vllm'):
        assert asked_by_vllm(made, chat.tools, messages, about['stop']) == [
            [list(t.prompt_ids), list(t.turns[0].action_ids)] for t in played]
