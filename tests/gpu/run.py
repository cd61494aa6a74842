"""All that needs a GPU, part by part, in an environment that is there already: no network, no DeepSpeed, no vLLM, and
any PyTorch that has what a part needs. A part that cannot run here says so, and the rest goes on.

    python tests/gpu/run.py [step tree training] [--out runs/gpu] [--device cuda] [--small]

- `step`: acting, reading, packed scoring and learning at the true shapes of 0.5B, 3B and 7B (measure.py), and the
  estimate of 04_estimate against `torch.cuda.max_memory_allocated`.
- `tree`: log-probabilities and gradients by flex attention over a tree against rows of their own, at the same shapes in
  float32, with as many layers as fit; seconds and memory of both.
- `training`: a model of 64 M parameters made from nothing, a warm start on games of scripted players, and a TSPO run in
  a tiny world of 1,500 pages by `nbs/90_train.ipynb` through papermill.

Each part's numbers go to `OUT/PART.json`, with the device and the versions. Ends with 1 where a part failed, and with 2
where none could run. `--device cpu --small` tries the program itself with toys.
"""
import argparse
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]   # a checkout will do
import measure


class CannotRun(RuntimeError):
    "What a part needs is not here."


def versions():
    "Versions of what is installed, None for what is not: dict."
    from importlib.metadata import PackageNotFoundError, version
    found = {'python': platform.python_version()}
    for name in ('torch', 'transformers', 'papermill', 'deepspeed', 'vllm', 'trl'):
        try: found[name] = version(name)
        except PackageNotFoundError: found[name] = None
    return found


def shapes(a): return ['toy'] if a.small else [s for s in measure.SHAPES if s != 'toy']


def room(device): return torch.cuda.get_device_properties(0).total_memory if device == 'cuda' else float('inf')


def step_part(a):
    "A training step at each shape that fits: list of dict, those left out with the reason."
    out = []
    for shape in shapes(a):
        how = argparse.Namespace(device=a.device, rows=4 if a.small else 16, tokens=200 if a.small else 2048,
                                 row_tokens=8192, dtype='float32' if a.small else 'bfloat16', checkpointing=True)
        needs = measure.memory(measure.sizes(shape), measure.plan(how))['rank']
        if needs > room(a.device):
            out.append({'shape': shape, 'left out': f'it needs {needs / 1e9:.1f} GB of {room(a.device) / 1e9:.1f} GB'})
            continue
        found = measure.measure(shape, how)
        if found['learning_bytes']: found['measured_over_estimated'] = found['learning_bytes'] / found[
            'estimated_bytes']
        out.append(found)
        if a.device == 'cuda': torch.cuda.empty_cache()
    return out


def layers_that_fit(shape, device):
    "Layers of a shape whose weights and two sets of gradients, in float32, take at most 70 % of the device: int."
    layers, hidden, intermediate, heads, kv, vocabulary, tied = measure.SHAPES[shape]
    one = hidden * (3 * intermediate + 2 * hidden + 2 * kv * hidden // heads) * 4 * 3
    table = (1 if tied else 2) * vocabulary * hidden * 4
    return int(max(1, min(layers, (.7 * room(device) - table) // one)))


def tree_part(a):
    "A tree against rows of their own at each shape: list of dict."
    if a.device == 'cuda':
        try: from torch.nn.attention.flex_attention import flex_attention  # noqa: F401
        except ImportError as e: raise CannotRun(f'PyTorch {torch.__version__} has no flex attention: {e}') from e
    out = []
    for shape in shapes(a):
        layers = layers_that_fit(shape, a.device)
        prompt, response = (40, 30) if a.small else (500, 300)
        out.append({'shape': shape, 'layers': layers,
                    **measure.tree_against_rows(shape, a.device, prompt, response, layers)})
        if a.device == 'cuda': torch.cuda.empty_cache()
    return out


def warm_model(a, folder):
    """Make a model from nothing, teach it to copy and to play as the tiny world's warm start does, on any device, and
    store it: dict of its size, its losses and seconds."""
    from credit_rl.layout import pack, take, token_logps
    from credit_rl.protocol import PROTOCOLS, Chat
    from credit_rl.tiny import TEACHER, copy_rows, demonstrations, tiny_model, tiny_tokenizer
    size = dict(width=32, layers=1, heads=2, feedforward=64) if a.small else dict(
        width=640, layers=12, heads=10, feedforward=2048)
    since, chat = time.perf_counter(), Chat(PROTOCOLS['tiny'], tiny_tokenizer())
    model = tiny_model(chat.tokenizer, 0, **size).to(a.device).train()
    generator = torch.Generator().manual_seed(0)
    shown = pack(demonstrations(chat, TEACHER, 40 if a.small else 8000, 0, {'hops': (1, 2, 3, 3, 3)}))

    def games():
        while True:
            part = take(shown, sorted(torch.randperm(len(shown.groups), generator=generator)[:32].tolist()))
            yield part.ids, part.token_turns
    rows = iter(lambda: copy_rows(chat.tokenizer, 64, generator), None)
    losses = {}
    for name, batches, level, most in (('copy', rows, 1., 3000), ('games', games(), .08, 6000)):
        adamw, last = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(.9, .95), weight_decay=0.), []
        for n in range(3 if a.small else most):
            for group in adamw.param_groups: group['lr'] = 4e-4 * min(1., (n + 1) / 100)
            ids, turns = (x.to(a.device) for x in next(batches))
            loss = -token_logps(model, ids, turns >= 0).sum() / (turns >= 0).sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
            adamw.step()
            adamw.zero_grad()
            last = [*last[-24:], loss.item()]
            if len(last) == 25 and sum(last) / 25 < level: break
        losses[name] = {'steps': n + 1, 'loss': sum(last) / len(last), 'wanted below': level}
    model.eval().save_pretrained(folder)
    chat.tokenizer.save_pretrained(folder)
    return {'parameters': sum(p.numel() for p in model.parameters()), 'warm start': losses,
            'warm start seconds': time.perf_counter() - since}


def training_part(a):
    "A TSPO run of that model by the notebook: dict of its summary's numbers."
    try:
        import ipykernel  # noqa: F401
        import papermill
    except ImportError as e: raise CannotRun(f'the notebook is run by papermill and ipykernel: {e}') from e
    few = dict(steps=1, questions=20, dev_questions=4, test_questions=6, questions_per_step=2, group_size=2,
               world={'size': 60}) if a.small else dict(
        steps=60, questions=6000, dev_questions=420, test_questions=1200, questions_per_step=48, group_size=8,
        row_tokens=65536, world={'size': 1500})
    os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    with tempfile.TemporaryDirectory() as folder:
        made = warm_model(a, f'{folder}/base')
        since = time.perf_counter()
        papermill.execute_notebook(
            ROOT / 'nbs' / '90_train.ipynb', f'{folder}/notebook.ipynb', cwd=ROOT, progress_bar=False, parameters={
                'run': f'{folder}/run', 'method': 'tspo', 'model': f'{folder}/base', 'average': 'token-mean',
                'learning_rate': 5e-5, 'eval_every': 10, 'track': '', **few})
        summary = json.loads((Path(folder) / 'run' / 'summary.json').read_text())
    kept = {name: summary[name] for name in ('base_em', 'final_em', 'steps', 'questions', 'ceiling_em')}
    return {**made, **kept, 'training seconds': time.perf_counter() - since}


PARTS = {'step': step_part, 'tree': tree_part, 'training': training_part}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('parts', nargs='*', metavar='part', help=', '.join(PARTS))
    parser.add_argument('--out', default=str(ROOT / 'runs' / 'gpu'))
    parser.add_argument('--device', default='cuda', choices=('cuda', 'cpu'))
    parser.add_argument('--small', action='store_true')
    a = parser.parse_args(arguments)
    if unknown := set(a.parts) - set(PARTS): parser.error(f'parts are {", ".join(PARTS)}, got {", ".join(unknown)}')
    if a.device == 'cuda' and not torch.cuda.is_available():
        sys.exit('this machine has no GPU that PyTorch can use (torch.cuda.is_available() is False)')
    about, failed, ran = {'device': measure.name(a.device), 'versions': versions()}, [], []
    print(json.dumps(about), flush=True)
    Path(a.out).mkdir(parents=True, exist_ok=True)
    for name in a.parts or PARTS:
        try: found = {'numbers': PARTS[name](a)}
        except (CannotRun, ImportError) as e:
            found = {'cannot run': str(e)}
            print(f'CANNOT RUN {name}: {e}', flush=True)
        except Exception:
            found = {'failed': traceback.format_exc()}
            failed.append(name)
            print(f'FAILED {name}:\n{found["failed"]}', flush=True)
        else:
            ran.append(name)
            print(f'MEASURED {name}: {json.dumps(found["numbers"])}', flush=True)
        (Path(a.out) / f'{name}.json').write_text(json.dumps({**about, **found}, indent=1) + '\n')
    sys.exit(1 if failed else 0 if ran else 2)


if __name__ == '__main__':
    main()
