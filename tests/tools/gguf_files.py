"""GGUF files: a header by hand, and a small Llama written with the package `gguf`."""
import json
import struct

import torch

from credit_rl.protocol import byte_tokenizer


def number(form, x):
    return struct.pack(f'<{form}', x)


def text(s):
    return number('Q', len(s)) + s.encode()


def entry(name, kind, value):
    return text(name) + number('I', kind) + value


def header():
    "The bytes of a file of three entries and one weight, of 64 numbers in two blocks."
    made = b''.join((b'GGUF', number('I', 3), number('Q', 1), number('Q', 3),
                     entry('general.architecture', 8, text('llama')), entry('llama.block_count', 4, number('I', 2)),
                     entry('tokenizer.ggml.tokens', 9, number('I', 8) + number('Q', 2) + text('a') + text('b')),
                     text('token_embd.weight'), number('I', 2), number('Q', 32), number('Q', 2), number('I', 3),
                     number('Q', 0)))
    return made + b'\0' * (-len(made) % 32) + b'\0' * 2 * 20


def small_llama(width=48, layers=2, texts=('Where is the lighthouse of Orvane? In the harbour.', ) * 2, positions=2048):
    "A random Llama of SmolLM2's kind (tied, three heads a key, ChatML), and a byte-level tokenizer."
    from transformers import LlamaConfig, LlamaForCausalLM
    tokenizer = byte_tokenizer(texts=texts, merges=200)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width,
                         num_hidden_layers=layers, num_attention_heads=3, num_key_value_heads=1,
                         max_position_embeddings=positions, tie_word_embeddings=True,
                         eos_token_id=tokenizer.eos_token_id)
    return LlamaForCausalLM(config), tokenizer


def write_gguf(path, model, tokenizer, without=None):
    "Write a Llama and its byte-level tokenizer as a GGUF file, `without` the weights of a name."
    import gguf
    c, w, rules = model.config, gguf.GGUFWriter(str(path), 'llama'), json.loads(tokenizer.backend_tokenizer.to_str())
    for add, value in ((w.add_context_length, c.max_position_embeddings), (w.add_embedding_length, c.hidden_size),
                       (w.add_block_count, c.num_hidden_layers), (w.add_feed_forward_length, c.intermediate_size),
                       (w.add_head_count, c.num_attention_heads), (w.add_head_count_kv, c.num_key_value_heads),
                       (w.add_layer_norm_rms_eps, c.rms_norm_eps), (w.add_vocab_size, c.vocab_size),
                       (w.add_eos_token_id, tokenizer.eos_token_id), (w.add_chat_template, tokenizer.chat_template)):
        add(value)
    w.add_tokenizer_model('gpt2')
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    w.add_token_list(words)
    w.add_token_types([3 if t in tokenizer.all_special_tokens else 1 for t in words])
    w.add_token_merges([' '.join(pair) for pair in rules['model']['merges']])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
    turn = lambda x, n: x.reshape(n, 2, -1, x.shape[1]).transpose(1, 2).reshape(x.shape)   # as llama.cpp keeps them
    for name, x in model.state_dict().items():
        if name == 'lm_head.weight' or without and without in name: continue
        if 'q_proj' in name: x = turn(x, c.num_attention_heads)
        if 'k_proj' in name: x = turn(x, c.num_key_value_heads)
        w.add_tensor(names.get_name(name, ('.weight', )), x.numpy())
    for write in (w.write_header_to_file, w.write_kv_data_to_file, w.write_tensors_to_file): write()
    w.close()
