"""How the engine reads: shared keys where they lie, prompts without a mask, steps at few shapes that can be replayed,
and the numbers of plain forwards in all of these."""
import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
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


@pytest.mark.parametrize('kind, heads', [('qwen2', 2), ('qwen3', 6), ('llama', 2)])
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


class Recording(TorchDispatchMode):
    """What a CUDA graph is on a GPU: all that is computed inside, at the addresses that it was computed at. `replay`
    computes it again from what stands there, and whatever is not a tensor is as it was."""
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        self.calls.append((function, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, out in self.calls:
            new = function(*args, **kwargs)
            for a, b in zip(*(x if isinstance(x, (tuple, list)) else [x] for x in (new, out))):
                if isinstance(a, torch.Tensor) and a.data_ptr() != b.data_ptr(): b.copy_(a)


@pytest.fixture
def recorded(monkeypatch):
    "Engines of fixed shapes capture on a CPU, too; the recordings."
    made, real = [], own._FixedSteps.__init__

    def begin(steps, device):
        real(steps, device)
        steps.capture = capture

    def capture(run, pool):
        with torch.no_grad(), Recording() as recording: run()
        made.append(recording)
        return recording
    monkeypatch.setattr(own._FixedSteps, '__init__', begin)
    return made


def engines(model, **how):
    "The same engine with fixed shapes and without."
    return [HFEngine(model, TOKENIZER, fixed_shapes=fixed, **how) for fixed in (True, False)]


def talk(engine, seed=0, turns=3):
    """Conversations of different lengths, each with an observation after a turn; some are released early, one is
    rewound, each prompt is asked twice: ids and log-probabilities by conversation and turn, and the stream."""
    stream, found, texts = engine.stream(SamplingParams(max_tokens=40)), {}, prompts(5, 21, 90, 13)
    whole = {(i, twin): list(p) for i, p in enumerate(texts) for twin in range(2)}
    for key, ids in whole.items(): stream.submit(key, ids, seed=hash((seed, *key)), max_tokens=10 + 9 * key[0])
    for batch in stream:
        for f in batch:
            found.setdefault(f.key, []).append((f.ids, f.logps))
            n = len(found[f.key])
            if n == turns or f.key == (3, 1):
                stream.release(f.key)
                continue
            if f.key == (1, 0):                                        # its observations are cut out of the past again
                whole[f.key] = whole[f.key][:15] + f.ids[:5]
                stream.rewind(f.key, whole[f.key])
            else: whole[f.key] += f.ids
            whole[f.key] += prompts(30 * n)[0]
            stream.submit(f.key, whole[f.key], seed=hash((seed, n, *f.key)), max_tokens=25)
    return found, stream


def assert_same_talks(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert [ids for ids, _ in a[key]] == [ids for ids, _ in b[key]], key
        for (_, x), (_, y) in zip(a[key], b[key]): torch.testing.assert_close(x, y, atol=1e-4, rtol=0)


@pytest.mark.parametrize('kind', ['qwen2', 'llama'])
def test_captured_steps_change_no_number(recorded, kind):
    "Rows come and go, a cache grows: replays are of what stands in the tensors now, and most steps are replays."
    fixed, plain = (talk(engine) for engine in engines(made(kind)))
    assert_same_talks(fixed[0], plain[0])
    assert fixed[1].captures == len(recorded) > 3 and fixed[1].forwards > 4 * len(recorded)
    assert plain[1].captures == 0


def test_captures_are_dropped_where_weights_moved(recorded):
    "New weights at the same addresses are seen by a replay; weights elsewhere are seen because captures are dropped."
    model = made()
    engine, how = engines(model)[0], SamplingParams(max_tokens=12, greedy=True)
    stream, text = engine.stream(how), prompts(9)[0]
    said = {}
    for name, change in (('at first', lambda p: p), ('in place', lambda p: p.data.mul_(-1)),
                         ('elsewhere', lambda p: setattr(p, 'data', p.data * -1))):
        change(model.lm_head.weight)
        stream.submit(name, text)
        ((turn,),) = stream
        said[name] = turn.ids
        assert turn.ids == HFEngine(model, TOKENIZER, fixed_shapes=False).generate([text], how).ids[0]
        stream.release(name)
    assert said['at first'] == said['elsewhere'] != said['in place'] and stream.captures == len(recorded) == 2


def test_a_step_never_asks_what_it_computed():
    "On a device without data every question to it is an error, as it is while a graph is captured."
    for kind in KINDS:
        batch = own._RowBatch(made(kind).to('meta'), torch.device('meta'), most=(8, 64))
        batch.ids, batch.have = (torch.zeros(*shape, dtype=torch.long, device='meta') for shape in ((8, 64), (8,)))
        batch.cache.reserve(8, 64)
        assert batch.steps(batch, live=5, length=30).shape == (5, len(TOKENIZER)) and batch.steps.seen == {(8, 64)}


class Questions(TorchDispatchMode):
    "How often the host asks for what a device computed, but for the lists that it takes."
    count = 0
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize('fixed', [True, False])
def test_the_host_waits_once_for_a_token(fixed):
    "It knows itself which rows are busy, how long they are and which are full."
    stream = HFEngine(made(), TOKENIZER, fixed_shapes=fixed).stream(SamplingParams(max_tokens=30))
    for i, text in enumerate(prompts(9, 30, 17)): stream.submit(i, text, seed=i)
    with Questions() as reading: stream._sample(ready := stream._admit(), stream.batch.read(ready))
    with Questions() as questions:
        for _ in range(20): stream._sample(ready, stream.batch.step(ready, 3))
    assert reading.count <= 1 and questions.count == 0 and stream.tokens == 63


def test_a_padded_cache_is_no_larger_than_the_engine_may_need():
    stream = HFEngine(made(), TOKENIZER, 200, max_rows=17, fixed_shapes=True).stream(SamplingParams(max_tokens=4))
    for i, text in enumerate(prompts(*range(180, 196), 9)): stream.submit(i, text)
    list(stream)
    assert stream.batch.cache.shape == stream.batch.cache.keys[0].shape[::2] == (17, 256)


def test_what_cannot_be_captured_says_why(monkeypatch):
    class Broken:
        "As PyTorch's: a failure inside makes the end of the capture fail too."
        def __init__(self, graph, pool, capture_error_mode): assert capture_error_mode == 'thread_local'
        def __enter__(self): pass
        def __exit__(self, *error): raise RuntimeError('capture invalidated')
    for name, stub in (('CUDAGraph', object), ('graph', Broken)): monkeypatch.setattr(torch.cuda, name, stub)
    def run(): raise ValueError('no .item() here')
    with pytest.raises(RuntimeError, match='fixed_shapes'): own._capture(run, None)


def test_fixed_shapes_are_for_a_gpu_and_for_models_that_launch_the_same_each_time():
    from transformers import GPT2Config, GPT2LMHeadModel
    assert not HFEngine(made(), TOKENIZER).fixed_shapes
    assert own._replays(made()) and not own._replays(made(attention='eager'))
    assert not own._replays(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1)))
    stretched = {'rope_type': 'dynamic', 'factor': 2., 'rope_theta': 1e4}
    assert not own._replays(made('llama', rope_parameters=stretched))


def test_a_streams_memory_goes_with_it():
    "Nothing in it refers to itself: the cache is freed at once, not when Python collects."
    stream = HFEngine(made(), TOKENIZER, fixed_shapes=True).stream(SamplingParams(max_tokens=3))
    stream.submit('a', [1, 2, 3])
    list(stream)
    gone = weakref.ref(stream.batch.cache)
    gc.disable()
    try:
        del stream
        assert gone() is None
    finally: gc.enable()


def test_more_kept_conversations_than_rows_are_refused_over_all_calls():
    engine, few = HFEngine(made(), TOKENIZER, 200, max_rows=2), SamplingParams(max_tokens=2)
    engine.generate([[1, 2], [3, 4]], few, keys=['a', 'b'])
    with pytest.raises(ValueError, match='release some'): engine.generate([[5, 6]], few, keys=['c'])
    engine.release(['a'])
    assert len(engine.generate([[5, 6]], few, keys=['c']).ids) == 1
