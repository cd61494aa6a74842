"""GGUF files: a header by hand, and a small Llama written with the package `gguf`."""
import json
import struct
from pathlib import Path

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


PAGE = Path(__file__).resolve().parents[2] / 'nbs' / 'machinery' / '87_fetch.ipynb'
CELLS = [''.join(cell['source']) for cell in json.loads(PAGE.read_text(encoding='utf-8'))['cells']]
exec(next(cell for cell in CELLS if cell.startswith('def write_gguf(')), globals())       # the page's own writer
