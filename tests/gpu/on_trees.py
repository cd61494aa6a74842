"""Tokens that rows share, read once, against rows of their own: seconds and peak of memory of a forward and backward,
the first time apart (it compiles), how often something is compiled for other widths, and how far apart gradients are.
"""
import torch

from credit_rl.layout import hidden_states, token_logps
from credit_rl.trees import node_numbers, plant

from on_shapes import Clock, random_model

CLOSE = 1e-4      # of log-probabilities, in nats, and of gradients over their norm, in float32


def rows_of_group(generator, rows, prompt, response):
    "Attempts at one question: all share the prompt, every second the first half of the one before."
    ids = torch.randint(1, 500, (rows, prompt + response), generator=generator)
    ids[:, :prompt] = ids[0, :prompt]
    ids[1::2, :prompt + response // 2] = ids[::2, :prompt + response // 2][:len(ids[1::2])]
    return ids, torch.arange(rows) % 3 * -5 + prompt + response


def rows_of_segments(generator, rows, prompt, response):
    "Segments of an agent that keeps a summary: all share a short prompt, then nothing."
    ids = torch.randint(1, 500, (rows, prompt // 2 + response), generator=generator)
    ids[:, :prompt // 2] = ids[0, :prompt // 2]
    return ids, torch.arange(rows) % 4 * -7 + prompt // 2 + response


KINDS = {'group': rows_of_group, 'segments': rows_of_segments}


def graphs():
    "How many graphs were compiled so far: int."
    from torch._dynamo.utils import counters
    return int(counters['stats']['unique_graphs'])


def both_ways(model, device, ids, lengths, prompt):
    "Tree against rows: dict, see the top of this file."
    tree = plant(ids, node_numbers(ids, lengths)).to(device)
    at = torch.arange(ids.shape[1])
    trained = ((at < lengths[:, None]) & (at >= prompt // 2)).to(device)
    ids, found, out = ids.to(device), [], {'tokens': int(lengths.sum()), 'nodes': tree.work[0]}
    parameters = [p for n, p in model.named_parameters() if 'layers' in n]
    for name, how in (('rows', None), ('tree', tree)):
        before = graphs()
        for which in ('first', 'second'):
            with Clock(device) as clock:
                logp = token_logps(model, ids, trained, hidden=hidden_states(model, ids, how), place=how and how.place)
                gradients = torch.autograd.grad(logp.sum() / trained.sum(), parameters)
            out[f'{name}_seconds_{which}'] = clock.seconds
        out |= {f'{name}_bytes': clock.bytes, f'{name}_graphs': graphs() - before}
        found.append((logp.detach(), gradients))
    (rows, own), (columns, other) = found
    norm = lambda tensors: sum(float(t.double().norm()) ** 2 for t in tensors) ** .5
    return out | {'times_as_fast': out['rows_seconds_second'] / out['tree_seconds_second'],
                  'nats_apart': float((rows - columns).abs().max()),
                  'gradients_apart': norm(a - b for a, b in zip(own, other)) / norm(own)}


def more_widths(model, device, generator, prompt, response):
    "Six trees of other widths: graphs that they compiled, seconds of each."
    before, seconds = graphs(), []
    for width in range(6):
        ids, lengths = rows_of_group(generator, 4, prompt // 2, response // 2 + 37 * width)
        tree = plant(ids, node_numbers(ids, lengths)).to(device)
        with Clock(device) as clock: hidden_states(model, ids.to(device), tree).sum().backward()
        seconds.append(round(clock.seconds, 3))
        model.zero_grad()
    return {'graphs': graphs() - before, 'seconds': seconds}


def section(record, a):
    "A few layers in float32, for the gradients; in bfloat16 as many as leave rows of their own room."
    generator = torch.Generator().manual_seed(0)
    prompt, response, rows = (40, 30, 4) if a.small else (1000, 500, 8)
    for shape, layers, dtype in [('toy', 2, 'float32')] if a.small else [
            ('qwen2.5-0.5b', 6, 'float32'), ('qwen2.5-0.5b', 24, 'bfloat16'), ('qwen2.5-7b', 8, 'bfloat16')]:
        model = random_model(shape, a.device, dtype, layers).train()
        for kind, make in KINDS.items():
            found = both_ways(model, a.device, *make(generator, rows, prompt, response), prompt)
            record.put(f'{shape}, {layers} layers, {dtype}, {kind}', found)
            assert dtype == 'bfloat16' or max(found['nats_apart'], found['gradients_apart']) <= CLOSE, found
        if shape != 'qwen2.5-7b' and dtype == 'float32':
            record.put(f'{shape}: six more widths', more_widths(model, a.device, generator, prompt, response))
        del model
        if a.device == 'cuda': torch.cuda.empty_cache()
