"""Writing, reading, scoring and learning at the shapes of Qwen2.5, with random weights. Each number as a rate, with the
peak of memory; what learning takes stands beside what 04_estimate says."""
import copy
import time
from dataclasses import replace

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from credit_rl.engine import HFEngine, SamplingParams
from credit_rl.estimate import Sizes, TrainingPlan, measure_tflops, memory
from credit_rl.layout import pack, token_logps
from credit_rl.learner import FrozenModels, Learner, Optimiser, make_critic
from credit_rl.methods import METHODS
from credit_rl.parts import Credit, Needs
from credit_rl.scoring import AnswerTemplate, acting_states, answer_logps
from credit_rl.setup import add_lora
from credit_rl.trajectory import Group, Question, Stop, Trajectory, Turn

# layers, width, width of the feed-forward layer, heads, key heads, vocabulary, whether the output layer shares the
# embedding
SHAPES = {
    'toy': (2, 64, 128, 4, 2, 512, True), 'qwen2.5-0.5b': (24, 896, 4864, 14, 2, 151936, True), 'qwen2.5-3b':
    (36, 2048, 11008, 16, 2, 151936, True), 'qwen2.5-7b': (28, 3584, 18944, 28, 4, 152064, False)
}
LORA = {'r': 16, 'lora_alpha': 32}
APART = {'float32': 1e-3, 'bfloat16': 3.}    # largest difference of a gold answer's log-probability, in nats


class Ids:
    "A tokenizer of as many ids as the model has, each the text of its number; nothing ends a turn but its length."
    eos_token_id = None
    def decode(self, ids): return ''.join(f'<{int(i)}>' for i in ids)
    def batch_decode(self, rows): return [self.decode(row) for row in rows]


def random_model(shape, device, dtype, depth=None):
    "A Qwen2 of some shape with random weights, made on the device; `depth`: layers, None for all."
    layers, hidden, intermediate, heads, kv, vocabulary, tied = SHAPES[shape]
    config = Qwen2Config(num_hidden_layers=depth or layers, hidden_size=hidden, intermediate_size=intermediate,
                         num_attention_heads=heads, num_key_value_heads=kv, vocab_size=vocabulary,
                         tie_word_embeddings=tied, max_position_embeddings=32768, eos_token_id=None, bos_token_id=None,
                         pad_token_id=None, dtype=getattr(torch, dtype))
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device): model = Qwen2ForCausalLM(config)
    finally: torch.set_default_dtype(before)
    return model.eval()


class Clock:
    "Seconds and peak memory of what stands in its block, everything on the device done."
    def __init__(self, device): self.cuda = device == 'cuda'
    def __enter__(self):
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.start = time.perf_counter()
        return self
    def __exit__(self, *_):
        if self.cuda: torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.start
        self.bytes = torch.cuda.max_memory_allocated() if self.cuda else None


def numbers(model, generator, n): return torch.randint(model.config.vocab_size, (n,), generator=generator).tolist()


def layout_of(model, rows, tokens, generator):
    "Groups of eight rollouts: a prompt, four turns of which three are answered by a search, as a `Layout`."
    part, question, groups = tokens // 10, Question('q', 'What?', ['gold']), []
    for start in range(0, rows, 8):
        prompt, made = numbers(model, generator, 3 * part), []
        for _ in range(start, min(start + 8, rows)):
            turns = [Turn('answer' if k == 3 else 'tool', numbers(model, generator, part), [-10.] * part,
                          [] if k == 3 else numbers(model, generator, part), '', '') for k in range(4)]
            made.append(Trajectory(question, prompt, turns, Stop.ANSWER))
        groups.append(Group(question, made))
    return pack(groups)


def writing(model, device, rows, prompt, tokens, generator, fixed_shapes=None):
    """Tokens a second that some rows write in a turn, after prompts that eight rows each share; `fixed_shapes` False:
    without CUDA graphs. The turn before it is not counted: graphs are captured there."""
    engine = HFEngine(model, Ids(), max_length=prompt + 2 * tokens + 8, max_rows=rows,
                      **({} if fixed_shapes is None else {'fixed_shapes': fixed_shapes}))
    said = [numbers(model, generator, prompt) for _ in range(-(-rows // 8))]
    said, keys = [said[i // 8] for i in range(rows)], list(range(rows))
    for _ in range(2):
        with Clock(device) as clock: found = engine.generate(said, SamplingParams(max_tokens=tokens), keys=keys)
        said = [s + ids + [1] for s, ids in zip(said, found.ids)]
    captures = engine.kept.captures
    engine.sleep()                                # an engine and what it keeps know each other: its cache would stay
    return {'tokens_per_second': rows * tokens / clock.seconds, 'ms_per_step': 1e3 * clock.seconds / tokens,
            'graphs': captures, 'bytes': clock.bytes}


def batched_rows(model, rows, states, golds, budget):
    "Every gold after every state as a row of its own, in full batches: (N, S, M) sums of log-probabilities."
    whole, spans = [], []
    for n, own in enumerate(golds):
        for s, (row, last) in enumerate(states[n].tolist()):
            for m, gold in enumerate(own if row >= 0 else ()):
                begin = rows[0][row, :last + 1].tolist()
                whole.append([*begin, *gold.ids])
                spans.append((n, s, m, len(begin) + gold.start, len(begin) + gold.end))
    order, out = sorted(range(len(whole)), key=lambda i: len(whole[i])), {}
    while order:
        width = len(whole[order[-1]])
        part, order = order[-max(1, budget // width):], order[:-max(1, budget // width)]
        ids, where = torch.zeros(len(part), width, dtype=torch.long), torch.zeros(len(part), width, dtype=torch.bool)
        for j, i in enumerate(part):
            ids[j, :len(whole[i])] = torch.tensor(whole[i])
            where[j, spans[i][3]:spans[i][4]] = True
        sums = token_logps(model, ids.to(model.device), where.to(model.device)).sum(1).tolist()
        out |= {spans[i][:3]: x for i, x in zip(part, sums)}
    return out


@torch.no_grad()
def scoring(model, device, layout, budget, dtype, generator):
    "Two gold answers at every state, packed and as batched rows: seconds of each, how far apart they are in nats."
    rows = layout.ids, layout.lengths
    states = acting_states(layout.states, layout.turn_mask)
    golds = [[AnswerTemplate(numbers(model, generator, 10), 3, 10) for _ in range(2)] for _ in range(len(states))]
    answer_logps(model, rows, states[:2], golds[:2], 'packed', budget=budget)              # kernels are chosen
    with Clock(device) as packed: fast = answer_logps(model, rows, states, golds, 'packed', budget=budget)
    with Clock(device) as batched: slow = batched_rows(model, rows, states, golds, budget)
    differences = [abs(float(fast.sums[at]) - x) for at, x in slow.items()]
    found = {'states': int((states[..., 0] >= 0).sum()), 'seconds_packed': packed.seconds, 'bytes_packed': packed.bytes,
             'seconds_batched_rows': batched.seconds, 'times_as_fast': batched.seconds / packed.seconds,
             'nats_apart': max(differences)}
    assert len(differences) == found['states'] * 2 and found['nats_apart'] <= APART[dtype], found
    return found


def learning(model, device, layout, row_tokens, lora):
    "A CARL step with reference, KL and entropy: seconds, tokens a second, peak of memory beside the estimate."
    sizes, plan = sizes_of(model), {'width': next(model.parameters()).element_size(), 'row_tokens': row_tokens,
                                    'checkpointing': True, 'frozen': 0 if lora else 1, 'share': lora or 1.}
    needs = memory(sizes, TrainingPlan(**plan))['rank']
    room = torch.cuda.get_device_properties(0).total_memory if device == 'cuda' else float('inf')
    if needs > room: return {'left out': f'it needs {needs / 1e9:.1f} GB of {room / 1e9:.1f} GB', 'estimated': needs}
    method = METHODS['carl']
    if lora: add_lora(model, LORA)
    model.gradient_checkpointing_enable({'use_reentrant': False})
    reference = 'base' if lora else copy.deepcopy(model)
    learner = Learner(model, replace(method.loss, kl=.01, entropy=.001),
                      Optimiser(1e-6, 1e-5, minibatches=1, row_tokens=row_tokens), make_critic(model, **method.critic),
                      FrozenModels(reference))
    better = (layout.row_trajectory % 2 * 2. - 1)[:, None] * layout.trained
    sees = Needs(logp=True, entropy=True, values=True, ref_logp=True)
    for again in range(2):                                             # AdamW's averages are made in the first
        with Clock(device) as reading: seen = learner.evaluate(layout, sees)
        with Clock(device) as clock: log = learner.step(layout, seen, Credit(better, better))
    assert all(x == x and abs(x) < float('inf') for x in log.values()), log
    tokens = int(layout.lengths.sum())
    return {'seconds_evaluate': reading.seconds, 'bytes_evaluate': reading.bytes, 'seconds_update': clock.seconds,
            'tokens_per_second': tokens / (reading.seconds + clock.seconds), 'bytes': clock.bytes,
            'estimated': needs, 'loss': log['loss'], 'sizes': vars(sizes), 'plan': plan}


def sizes_of(model):
    "The `Sizes` of a model that is there."
    c = model.config
    width = c.hidden_size // c.num_attention_heads
    return Sizes(sum(p.numel() for p in model.parameters()), c.num_hidden_layers, c.hidden_size, c.intermediate_size,
                 width * c.num_attention_heads, width * c.num_key_value_heads, c.vocab_size)


def tried(record, name, measure, *arguments):
    "Put what `measure` finds; a lack of memory is a finding."
    try: found = measure(*arguments)
    except torch.cuda.OutOfMemoryError as e: found = {'out of memory': str(e).split('.')[0]}
    record.put(name, found)


def measure_shape(record, shape, device, dtype, small):
    generator = torch.Generator().manual_seed(1)
    model = random_model(shape, device, dtype)
    prompt, tokens, lines, length = (60, 8, 8, 120) if small else (1000, 48, 32, 1500)
    for rows in (2, 4) if small else (16, 64, 160):
        tried(record, f'{shape}: writing, {rows} rows', writing, model, device, rows, prompt, tokens, generator)
    tried(record, f'{shape}: writing, {rows} rows, kernel by kernel', writing, model, device, rows, prompt, tokens // 4,
          generator, False)
    layout = layout_of(model, lines, length, generator)
    tried(record, f'{shape}: scoring', scoring, model, device, layout, 32768, dtype, generator)
    lora = 0. if shape in ('toy', 'qwen2.5-0.5b') else lora_share(model)
    tried(record, f'{shape}: a step of CARL' + ', LoRA' * bool(lora), learning, model, device, layout, 16384, lora)


def lora_share(model):
    "The share of a model's parameters that its low-rank additions are."
    linear = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and 'lm_head' not in n]
    return LORA['r'] * sum(m.in_features + m.out_features for m in linear) / sum(p.numel() for p in model.parameters())


def section(record, a):
    dtype = 'float32' if a.small else 'bfloat16'
    for kind in ('float32', 'bfloat16'):
        width = 256 if a.small else 2048
        record.put(f'products in {kind}', {'tflops': measure_tflops(a.device, getattr(torch, kind), width)})
    for shape in ('toy',) if a.small else [s for s in SHAPES if s != 'toy']:
        measure_shape(record, shape, a.device, dtype, a.small)
        if a.device == 'cuda': torch.cuda.empty_cache()
