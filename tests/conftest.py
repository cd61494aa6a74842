"""Fixtures that every test may use."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope='session')
def root():
    "The top of the checkout."
    return ROOT


@pytest.fixture(scope='session')
def data():
    "The folder of real data sets, one sub-folder each."
    folder = os.environ.get('CREDIT_RL_DATA')
    if not folder:
        pytest.skip('CREDIT_RL_DATA is not set: no real data sets here')
    if not Path(folder).is_dir():
        pytest.fail(f'CREDIT_RL_DATA={folder} is not a folder')
    return Path(folder)


@pytest.fixture(scope='session')
def spoken(tmp_path_factory):
    "A Hugging Face folder with a small random Qwen2 and a tokenizer of bytes, so that any text can be said to it."
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from credit_rl.protocol import byte_tokenizer
    folder, tokenizer = tmp_path_factory.mktemp('spoken'), byte_tokenizer()
    torch.manual_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16384,
                    eos_token_id=tokenizer.eos_token_id)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope='session')
def run_python():
    """Run this Python with some arguments in the checkout; fails the test, with what it printed, on another exit code
    than `code`."""
    def run(*args, code=0, env=None, cwd=ROOT):
        done = subprocess.run([sys.executable, *map(str, args)], cwd=cwd, env={**os.environ, **(env or {})},
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == code, f'exit code {done.returncode}, wanted {code}:\n{done.stdout[-6000:]}'
        return done.stdout
    return run
