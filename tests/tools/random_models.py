"""Small random models, saved to a folder as any model is."""
import copy
from pathlib import Path

import torch

from credit_rl.protocol import byte_tokenizer

ROWS = Path(__file__).resolve().parents[2] / 'data' / 'rows'


def small_qwen(vocabulary, seed=0, **settings):
    "A small random Qwen2; `settings` of its configuration go before those here."
    from transformers import Qwen2Config, Qwen2ForCausalLM
    torch.manual_seed(seed)
    shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=1)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocabulary, **{**shape, **settings})).eval()


def save_small(folder, tokenizer, **settings):
    "Save a small random Qwen2 and its tokenizer to a folder, as any model is saved. Returns the folder as str."
    settings = {'max_position_embeddings': 16384, 'eos_token_id': tokenizer.eos_token_id, **settings}
    small_qwen(len(tokenizer), **settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def random_model(folder):
    "Save a small random Qwen2 with a byte-level BPE to a folder. Returns the folder as str."
    tokenizer = byte_tokenizer(texts=[p.read_text() for p in sorted(ROWS.glob('*.*')) if p.is_file()], merges=400)
    return save_small(folder, tokenizer, hidden_size=32, intermediate_size=64)


def moved(model, scale=.05, seed=0):
    "A copy of a model with other weights."
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters(): p.add_(scale * torch.randn(p.shape, generator=generator))
    return other
