"""Small random models, saved to a folder as any model is."""
from pathlib import Path

import torch

from credit_rl.protocol import byte_tokenizer

ROWS = Path(__file__).resolve().parents[2] / 'data' / 'rows'


def random_model(folder):
    "Write a small random Qwen2 with a byte-level BPE to a folder, as any model is saved. Returns the folder as str."
    from transformers import Qwen2Config, Qwen2ForCausalLM
    tokenizer = byte_tokenizer(texts=[p.read_text() for p in sorted(ROWS.glob('*.*')) if p.is_file()], merges=400)
    torch.manual_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16384,
                    eos_token_id=tokenizer.eos_token_id)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
