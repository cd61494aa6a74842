"""How the engine reads: shared keys where they lie, prompts without a mask, and the numbers of plain forwards."""
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from credit_rl import engine as own
from credit_rl.engine import HFEngine, SamplingParams
from credit_rl.protocol import byte_tokenizer

SIZES = dict(hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
             head_dim=8, initializer_range=.3, max_position_embeddings=1024, eos_token_id=None, bos_token_id=None,
             pad_token_id=None)
KINDS = {'qwen2': (Qwen2ForCausalLM, Qwen2Config), 'qwen3': (Qwen3ForCausalLM, Qwen3Config),
         'llama': (LlamaForCausalLM, LlamaConfig)}
TOKENIZER = byte_tokenizer()


def made(kind='qwen2', attention='sdpa', **options):
    "A small random model with three query heads to a key."
    torch.manual_seed(0)
    model, config = KINDS[kind]
    model = model(config(**{'vocab_size': len(TOKENIZER), **SIZES, **options})).eval()
    model.set_attn_implementation(attention)
    return model


@pytest.fixture
def attentions(monkeypatch):
    "Queries, keys and how, of each call of PyTorch's attention."
    seen, real = [], torch.nn.functional.scaled_dot_product_attention

    def attend(query, key, value, *args, **how):
        seen.append((query, key, how))
        return real(query, key, value, *args, **how)
    monkeypatch.setattr(torch.nn.functional, 'scaled_dot_product_attention', attend)
    return seen


def prompts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def plain_logps(model, prompt, ids):
    "Log-probabilities of ids after a prompt, by one forward over both."
    logp = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1:-1].log_softmax(-1)
    return logp.gather(-1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize('device', ['cpu', 'meta'])
def test_a_step_reads_shared_keys_where_they_lie(attentions, device):
    """The kernel is given the cache itself, with as many heads of queries as of keys, so that nothing has to be
    repeated; on other devices than a CPU too, for which a device without data stands."""
    model, cache = made().to(device), own._SlotCache()
    cache.reserve(4, 64)
    for count, length in ((3, 3), (1, 4)):
        positions = (torch.arange(count) + length - count).expand(4, count).to(device)
        cache.aim(slice(0, 4), positions, length)
        last = {} if count == 1 else {'last': torch.tensor([2] * 4)}
        attentions.clear()
        logits = own._logits(model, cache, torch.ones(4, count, dtype=torch.long, device=device), positions, **last)
    assert logits.shape == (4, len(TOKENIZER)) and len(attentions) == 2
    for (query, key, how), kept in zip(attentions, cache.keys):
        assert query.shape == (4, 2, 3, 8) and key.shape == (4, 2, 4, 8) and key._base is kept
        assert not how.get('enable_gqa')


@pytest.mark.parametrize('kind', [*KINDS])
@pytest.mark.parametrize('heads', [2, 6])
def test_what_is_sampled_is_what_a_plain_forward_says(attentions, kind, heads):
    "Rows of different lengths, read in two turns; the first reading has no mask."
    model = made(kind, num_key_value_heads=heads)
    engine, texts = HFEngine(model, TOKENIZER), prompts(9, 30, 17)
    first = engine.generate(texts, SamplingParams(max_tokens=7), keys='abc')
    assert [how.get('is_causal') for _, _, how in attentions[:2]] == [True, True]
    assert all(how.get('attn_mask') is not None for _, _, how in attentions[2:])
    longer = [p + ids + more for p, ids, more in zip(texts, first.ids, prompts(12, 3, 8))]
    second = engine.generate(longer, SamplingParams(max_tokens=5), keys='abc')
    for before, out in ((texts, first), (longer, second)):
        for prompt, ids, logps in zip(before, out.ids, out.logps):
            torch.testing.assert_close(torch.tensor(logps), plain_logps(model, prompt, ids), atol=1e-5, rtol=1e-5)
