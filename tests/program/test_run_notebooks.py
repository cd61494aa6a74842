"""90_train and 91_evaluate by papermill: from anywhere, with parameters checked, shown again without doing it again."""
import json
import os
from pathlib import Path

import pytest
import yaml
from jupyter_client.manager import start_new_kernel

from papermilled import commands_of, outputs, papermill, printed, shown, typed
from random_models import random_model

from credit_rl.options import dotted
from credit_rl.runlog import latest_checkpoint, read_metrics

ROOT = Path(__file__).resolve().parents[2]
SHORT = dict(model=str(ROOT / 'data' / 'tiny_base'), steps=3, eval_every=2, questions_per_step=4, group_size=4,
             questions=50, dev_questions=6, test_questions=6, max_turns=3, turn_tokens=12, world={'size': 200}, threads=1)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    "A run by papermill, its folder given relative to another directory: (directory, run folder, notebook)."
    cwd = tmp_path_factory.mktemp('elsewhere')
    code, text, notebook = papermill(cwd / 'runs' / 'short' / 'notebook.ipynb', '-p', 'run', 'runs/short',
                                     settings=SHORT, cwd=cwd, fresh=True)
    assert code == 0, text[-5000:]
    return cwd, cwd / 'runs' / 'short', notebook


SMALL = dict(model=str(ROOT / 'data' / 'tiny_base'), data='tiny', corpus=None, patience={}, protocol='tiny',
             questions=40, dev_questions=8, test_questions=8, questions_per_step=8, group_size=2, minibatches=2, steps=2,
             eval_every=1, turn_tokens=24, prompt_tokens=64, response_tokens=128, max_tokens=192, row_tokens=4096,
             passages=1, passage_tokens=30, engine='hf', vllm={}, ranks=2)
CODE = dict(model=str(ROOT / 'data' / 'tiny_carl'), protocol='carl-tiny', context_tokens=24, turn_tokens=48,
            response_tokens=320, max_tokens=384, warmup=2,
            world=dict(size=300, hops=[1, 2], famous=dict(train=30, dev=15, test=15), easy=5, hard=5))
CLUSTERS = dict(per_tier=[6, 6], tries=2, sorted_questions=24, clusters=2, embed=None, other_corpus=None, warm_steps=2,
                warm_least=1, warm_every=1, warm_batch=16, warm_rise=1, must_pass=False)
# learners, and kinds of critics: file, what is small, what the file says, what is measured
KINDS = {
    'own critic, two ranks': (
        'tips_qwen2.5_7b', dict(group_size=1, teacher_every=1, minibatches=1),
        dict(method='tips', learner='deepspeed', stage=3, dtype='bfloat16', critic='own', critic_step='apart',
             gradient_checkpointing=True, offload=['reference', 'teacher']),
        ['mean_abs_shaping', 'alpha', 'value_loss', 'critic_grad_norm']),
    'shared critic, two ranks': (
        'carl_qwen2.5_7b', CODE, dict(method='carl', learner='deepspeed', stage=3, critic='shared', critic_step='apart',
                                      critic_backbone_rate=5e-7), ['value_loss', 'critic_grad_norm']),
}


@pytest.mark.nightly         # by day the files train in one process, and a notebook's ranks are interrupted and go on
@pytest.mark.parametrize('kind', KINDS)
def test_a_papers_commands_with_a_small_model(kind, tmp_path):
    """As they are typed in a clone, with the papers' files for eight GPUs; given besides is only what is small, and two
    ranks that play by themselves. Where a file's critic is warmed up, its warm-up comes first, typed as well."""
    name, changes, said, measured = KINDS[kind]
    pytest.importorskip('deepspeed', reason='pip install credit_rl[train]')
    (tmp_path / 'runs').mkdir()
    for part in ('nbs', 'runs/params', 'settings.ini'): (tmp_path / part).symlink_to(ROOT / part)
    *warm, train = commands_of(name)
    for words in warm: typed(words, {**SMALL, **changes, **CLUSTERS}, tmp_path)
    notebook = typed(train, {**SMALL, **changes}, tmp_path)
    run = tmp_path / 'runs' / name
    params, table = yaml.safe_load((run / 'params.yaml').read_text()), read_metrics(run)
    assert params.items() >= dotted(said).items() and (run / 'summary.json').exists()
    assert params['critic.warmed'] == (f'runs/{name}_warmup' if warm else None)
    assert printed(notebook).count('2 ranks: ') == 1
    assert table.step.tolist() == [0, 1, 2] and table[['grad_norm', *measured]][1:].gt(0).all(axis=None)
    assert table.trajectories[1:].tolist() == [8 * params['group_size']] * 2
    assert len(shown(notebook, 'image/png')) >= 1
    for line in ('base: EM', 'step 2/2', 'final: EM'): assert printed(notebook).count(line) == 1, line


@pytest.mark.long
def test_the_notebook_shows_what_happened(finished):
    _, folder, notebook = finished
    assert list((folder / 'figures').glob('*.png'))
    params = yaml.safe_load((folder / 'params.yaml').read_text())
    assert params.items() >= dotted({**SHORT, 'method': 'tspo'}).items()
    assert not [o for _, o in outputs(notebook) if o['output_type'] == 'error']
    assert all(cell['execution_count'] for cell in notebook['cells'] if cell['cell_type'] == 'code')
    lines = printed(notebook)
    for said in ('ceiling', 'base: EM', 'step 1/3', 's left', 'final: EM'):
        assert said in lines
    assert len(shown(notebook, 'image/png')) >= 1                      # the curves
    pages = shown(notebook, 'text/html')
    (table,) = [page for page in pages if 'ceiling' in page and '<table' in page]
    assert all(column in table for column in ('base', 'after'))
    assert sum('crl-head' in page for page in pages) == 2              # two rollouts, laid out turn by turn


@pytest.mark.long
def test_a_finished_run_is_shown_again_without_training(finished):
    cwd, folder, first = finished
    before = {name: (folder / name).read_bytes() for name in ('metrics.jsonl', 'turns.jsonl.gz', 'summary.json')}
    code, text, notebook = papermill(cwd / 'again' / 'notebook.ipynb', '-p', 'run', 'runs/short', '-p', 'resume',
                                     'True', settings=SHORT, cwd=cwd)
    assert code == 0, text[-5000:]
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert 'step 1/3' in printed(notebook).split('step 3/3')[0]      # what the log keeps is told again
    table = lambda nb: next(page for page in shown(nb, 'text/html') if 'ceiling' in page)
    assert table(notebook) == table(first)


def test_a_dry_run_only_tells_what_a_run_would_take(tmp_path):
    code, text, notebook = papermill(tmp_path / 'notebook.ipynb', '-p', 'run', str(tmp_path / 'run'), '-p', 'dry_run',
                                     'True', settings=SHORT, cwd=tmp_path)
    assert code == 0, text[-5000:]
    for said in ('470,144 parameters', 'memory of a rank, at least', '3 steps', 'leave out dry_run'):
        assert said in printed(notebook)
    assert not shown(notebook, 'image/png') and not (tmp_path / 'run').exists()


@pytest.fixture
def kernel(tmp_path):
    "A kernel as JupyterLab starts one: what runs code in it and hands back its outputs, and its manager."
    manager, client = start_new_kernel(kernel_name='python3', cwd=str(tmp_path),
                                       env={**os.environ, 'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': '1'},
                                       startup_timeout=600)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run_cell(client, code, until=None):
    "What a cell prints, and the name of its error or None; with `until`, once that is printed, while it runs."
    if code is not None: client.execute(code)
    said = ''
    while True:
        message = client.get_iopub_msg()
        if message['parent_header'].get('msg_type') != 'execute_request': continue
        kind, content = message['msg_type'], message['content']
        if kind == 'stream': said += content['text']
        if until and until in said: return said, None
        if kind == 'error': error = content['ename']
        elif kind == 'status' and content['execution_state'] == 'busy': error = None
        elif kind == 'status' and content['execution_state'] == 'idle': return said, error


def test_interrupting_the_notebook_ends_its_ranks(kernel, tmp_path):
    "While two train; then the notebook goes on from the last checkpoint on one, the kernel."
    pytest.importorskip('deepspeed', reason='deepspeed is not installed: pip install credit_rl[train]')
    psutil = pytest.importorskip('psutil')
    manager, client = kernel
    cells = json.loads((ROOT / 'nbs' / '90_train.ipynb').read_text())['cells']
    first, read, begin = [''.join(c['source']) for c in cells if c['cell_type'] == 'code'][:3]
    settings = {**SHORT, 'learner': 'deepspeed', 'ranks': 2, 'run': str(tmp_path / 'run'), 'eval_every': 1, 'track': ''}
    given = lambda **more: '\n'.join(f'{name} = {value!r}' for name, value in {**settings, **more}.items())
    for code in (first, given(steps=100000), read): assert run_cell(client, code)[1] is None
    said, error = run_cell(client, begin, until='step 2/')
    assert error is None and '2 ranks: ' in said, said
    (pid,) = [p.pid for p in psutil.Process().children() if p.pid == manager.provisioner.pid]
    ranks = [p for p in psutil.Process(pid).children(recursive=True) if 'RANK' in p.environ()]
    assert len(ranks) == 2
    manager.interrupt_kernel()
    assert run_cell(client, None)[1] == 'KeyboardInterrupt'
    # launcher and ranks have ended, the kernel has not
    assert not psutil.wait_procs(ranks, 60)[1] and not psutil.Process(pid).children(recursive=True)
    assert not (tmp_path / 'run' / 'summary.json').exists()
    done = latest_checkpoint(tmp_path / 'run')[0]
    for code in (given(steps=done + 1, resume=True, ranks=1), read): assert run_cell(client, code)[1] is None
    said, error = run_cell(client, begin)
    assert error is None and f'resumed after step {done}' in said and 'final: EM' in said, said
    assert read_metrics(tmp_path / 'run').step.tolist() == list(range(done + 2))


def test_an_unknown_parameter_is_an_error(tmp_path):
    code, text, notebook = papermill(tmp_path / 'notebook.ipynb', '-p', 'run', str(tmp_path / 'run'), '-p', 'metod',
                                     'grpo', settings=SHORT, cwd=tmp_path)
    message = "there is no setting 'metod'; did you mean 'method'?"
    assert code == 1 and message in text
    ((at, error),) = [(i, o) for i, o in outputs(notebook) if o['output_type'] == 'error']
    assert error['evalue'] == message
    assert not any(cell.get('outputs') for cell in notebook['cells'][at + 1:])   # saved up to the error
    assert not (tmp_path / 'run').exists()


# ---- 91_evaluate ----

FILES = {'hotpotqa': str(ROOT / 'data' / 'hotpotqa_sample.json'), 'gsm8k': str(ROOT / 'data' / 'rows' / 'gsm8k.jsonl')}
ASKED = dict(data='hotpotqa, gsm8k', path=FILES, max_turns=2, turn_tokens=6, threads=1)


def test_an_evaluation_is_made_and_shown(tmp_path):
    "By the command itself, from another working directory; once more it is only shown."
    model = random_model(tmp_path / 'model')
    scores = []
    for out in ('first', 'again'):
        code, text, notebook = papermill(tmp_path / 'runs' / out / 'notebook.ipynb', '-p', 'run', 'runs/eval', '-p',
                                         'model', model, settings=ASKED, cwd=tmp_path, notebook='91_evaluate')
        assert code == 0, text[-5000:]
        assert not [o for _, o in outputs(notebook) if o['output_type'] == 'error']
        assert printed(notebook).count('evaluated before') == (0 if out == 'first' else 2)
        pages = shown(notebook, 'text/html')
        assert len(shown(notebook, 'image/png')) == 1 and sum('crl-head' in page for page in pages) == 2
        scores.append(next(page for page in pages if 'cover EM' in page))
        assert 'numeric match' in scores[-1] and 'mean' in scores[-1]
    assert scores[0] == scores[1]
    folder = tmp_path / 'runs' / 'eval'
    assert {'hotpotqa', 'gsm8k', 'summary.json', 'table.csv', 'figures'} == set(os.listdir(folder))
    assert (folder / 'figures' / 'scores.png').exists()
    assert {'manifest.json', 'turns.jsonl.gz', 'scores.json'} <= set(os.listdir(folder / 'hotpotqa'))
    assert json.loads((folder / 'gsm8k' / 'manifest.json').read_text())['settings']['model'] == model


def test_an_evaluation_of_nothing_known_is_refused(tmp_path):
    code, text, notebook = papermill(tmp_path / 'notebook.ipynb',
                                     '-p', 'run', str(tmp_path / 'run'), '-p', 'data', 'hotpot', '-p', 'model',
                                     str(tmp_path), settings={}, cwd=tmp_path, notebook='91_evaluate')
    assert code == 1 and "did you mean 'hotpotqa'" in text and not (tmp_path / 'run').exists()
