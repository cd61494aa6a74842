"""A folder from a stranger (a run, a checkpoint, a model, an index, a base, a data set, a notebook) runs no code, leads
nowhere else, and takes no more memory than such a folder may. What a checkpoint's own files may hold is tested in
test_learner.py and test_sharded.py."""
import ast
import functools
import gzip
import json
import os
import re
import shutil
import time
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from credit_rl import protocol
from credit_rl.critics import LinearHead
from credit_rl.datasets import load_questions
from credit_rl.estimate import read_sizes
from credit_rl.export import read_policy
from credit_rl.launch import LaunchError, launch
from credit_rl.models import check_model, load_model, load_tokenizer
from credit_rl.parameters import make_parser, read_settings
from credit_rl.protocol import CHATML, PROTOCOLS, Chat, byte_tokenizer
from credit_rl.readers import Passage
from credit_rl.retrieval import BM25
from credit_rl.runlog import (RunFolders, RunLog, atomic_write, latest_checkpoint, named_checkpoint,
                              read_params, read_summary, read_turns, save_checkpoint)
from credit_rl.warmup import WarmupResult, read_collected, read_tiers, read_warmed
from credit_rl.watch import NewestRollouts
from deepspeed_steps import Harm

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / 'data' / 'tiny_base'


@pytest.fixture
def mark(tmp_path):
    "A folder that harm makes; it must not be there in the end."
    path = tmp_path / 'harm'
    yield path
    assert not path.exists()


@pytest.fixture
def model(tmp_path):
    "A model's folder, to be spoiled."
    return Path(shutil.copytree(BASE, tmp_path / 'model'))


def edit(path, **values): path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# ---- programs ----

TAG = '!!python/object/apply:os.mkdir ["{mark}"]'


@pytest.mark.parametrize('read', [read_params, lambda run: read_policy(run), read_warmed,
                                  lambda run: RunLog(run, resume=True).write_params({'seed': 1})],
                         ids=['a run', 'a policy', 'a warm-up', 'a run that goes on'])
def test_the_parameters_of_a_run_are_values(tmp_path, mark, read):
    (tmp_path / 'run').mkdir()
    names = ('auc', 'sign_accuracy', 'explained_variance', 'sign_kept', 'sign_lost')
    report = {**dict.fromkeys(names, 1.), 'pairs': [1, 1]}
    over = {'report': report, 'must_pass': False, 'head': 'linear', 'passed': True, 'step': 1}
    (tmp_path / 'run' / 'summary.json').write_text(json.dumps(over))
    save_checkpoint(tmp_path / 'run', 1, lambda path: None, name='best')
    (tmp_path / 'run' / 'params.yaml').write_text(f'seed: {TAG.format(mark=mark)}')
    with pytest.raises(ValueError, match='read'): read(tmp_path / 'run')


def test_weights_in_pickles_are_read_as_numbers_or_not(model, mark):
    state = load_model(str(model))[0].state_dict()
    (model / 'model.safetensors').unlink()
    torch.save(state, model / 'pytorch_model.bin')
    same = load_model(str(model))[0].state_dict()
    assert all(torch.equal(same[name], state[name]) for name in state)
    torch.save({**state, 'more': Harm(mark)}, model / 'pytorch_model.bin')
    with pytest.raises(ValueError, match='might'): load_model(str(model))


@pytest.mark.parametrize('file', ['config.json', 'tokenizer_config.json'])
def test_a_model_of_programs_is_refused_without_asking(model, mark, file, monkeypatch):
    "Neither is its program run, nor is somebody at a terminal asked whether it may be."
    (model / 'own.py').write_text(f'import os\nos.mkdir({str(mark)!r})\nclass Own: pass\n')
    monkeypatch.setattr('builtins.input', lambda *args: 'y')
    edit(model / file, auto_map={'AutoConfig': 'own.Own', 'AutoModelForCausalLM': 'own.Own',
                                 'AutoTokenizer': ['own.Own', None]}, model_type='own', tokenizer_class='Own')
    for read in (check_model, load_model, load_tokenizer):
        with pytest.raises(ValueError, match=f'{file} asks for programs of its own'): read(str(model))
    if file == 'config.json':
        with pytest.raises(ValueError, match='trust_remote_code|custom code'): read_sizes(str(model))


def test_no_module_trusts_the_code_of_a_model():
    "Each loader of transformers that could run a model's own code is told not to, or is for a kind without code."
    for path in (ROOT / 'credit_rl').rglob('*.py'):
        source = path.read_text(encoding='utf-8')
        assert 'trust_remote_code=True' not in source, path.name
        for after in re.split(r'\bAuto\w+\.from_pretrained\(', source)[1:]:
            assert 'trust_remote_code=False' in after[:160], path.name
        for after in source.split(' SentenceTransformer(')[1:]:
            assert 'trust_remote_code=False' in after[:160], path.name


def test_no_module_reads_weights_but_as_data():
    "Each torch.load stands in a block of only_data's."
    for path in (ROOT / 'credit_rl').rglob('*.py'):
        tree = ast.parse(path.read_text(encoding='utf-8'))
        blocks = [n for n in ast.walk(tree) if isinstance(n, ast.With)
                  and any('only_data' in ast.unparse(item.context_expr) for item in n.items)]
        inside = {inner for block in blocks for inner in ast.walk(block)}
        loads = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == 'torch.load']
        assert set(loads) <= inside, path.name
        assert not any(isinstance(n, ast.Attribute) and ast.unparse(n) in ('pickle.load', 'pickle.loads')
                       for n in ast.walk(tree)), path.name


def test_the_head_of_a_strangers_critic_is_read_as_numbers(tmp_path, mark):
    head = LinearHead(8)
    torch.save({**head.state_dict(), 'more': Harm(mark)}, tmp_path / 'head.pt')
    with pytest.raises(ValueError, match='program'):
        WarmupResult(tmp_path, 'linear', None, {}).load_head(head)


EVIL = {'classes': "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        'globals': "{{ cycler.__init__.__globals__.os.mkdir('MARK') }}",
        'import': "{{ self.__init__.__globals__.__builtins__.__import__('os').mkdir('MARK') }}",
        'namespace': "{{ namespace.__init__.__globals__['os'].mkdir('MARK') }}",
        'raise': "{{ raise_exception.__globals__['__builtins__']['open']('MARK', 'w') }}",
        'filter': "{{ messages|map(attribute='__class__')|list|first|attr('mro')() }}",
        'format': "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        'change': "{{ messages.clear() }}", 'many': '{% for i in range(10 ** 9) %}a{% endfor %}'}


@pytest.mark.parametrize('kind, how', [(kind, 'given') for kind in EVIL] + [('import', 'in a folder')])
def test_a_template_is_rendered_in_a_sandbox(model, mark, kind, how):
    evil = EVIL[kind].replace('MARK', str(mark))
    tokenizer, given = byte_tokenizer(CHATML), evil + CHATML if how == 'given' else None
    if how == 'in a folder':
        byte_tokenizer().save_pretrained(model)
        (model / 'chat_template.jinja').write_text(evil + CHATML)
        tokenizer = load_tokenizer(str(model))
        assert tokenizer.chat_template.startswith(evil)
    with pytest.raises(ValueError, match='fails on a mere question: (Security|Overflow|Undefined|Value)Error'):
        Chat(PROTOCOLS['tiny'], tokenizer, given)


LONG = '{% for i in range(90000) %}{% for j in range(90000) %}{% set x = i %}{% endfor %}{% endfor %}'
WASTEFUL = {'loops': (LONG, 'TimeoutError: it takes more than 0.2 seconds'),
            'output': ("{% for i in range(90000) %}{{ 'a' * 900 }}{% endfor %}", 'it writes more than 16,777,216 char'),
            'a power of a variable': ('{% set n = messages|length + 9 %}{{ n ** n ** n }}', r"computes with '\*\*'"),
            'number': ("{{ 'a' * 20000000000 }}", "computes with '20000000000'"),
            'in hexadecimal': ("{{ 'a' * 0xFFFF_FFFF_F }}", 'computes with'),
            'size': ('{# ' + 'a' * (1 << 20) + ' #}', 'more than a template needs')}


@pytest.mark.parametrize('kind', WASTEFUL)
def test_a_template_takes_no_more_than_it_needs(kind, monkeypatch):
    template, message = WASTEFUL[kind]
    monkeypatch.setattr(protocol, '_MOST_SECONDS', .2 if kind == 'loops' else 30.)
    since = time.monotonic()
    with pytest.raises(ValueError, match=f'fails on a mere question: .*{message}'):
        Chat(PROTOCOLS['tiny'], byte_tokenizer(template + CHATML))
    assert time.monotonic() - since < 20


def test_a_template_that_loops_over_a_long_conversation_is_interrupted(monkeypatch):
    "What is harmless for a question may loop for what comes later."
    monkeypatch.setattr(protocol, '_MOST_SECONDS', .2)
    late = f'{{% if messages|length > 9 %}}{LONG}{{% endif %}}'
    chat = Chat(PROTOCOLS['tiny'], byte_tokenizer(late + CHATML))
    with pytest.raises(TimeoutError, match='seconds'): chat.markup.render([{'role': 'user', 'content': 'a'}] * 10)
    assert 'a' in chat.markup.render([{'role': 'user', 'content': 'a'}])


@pytest.mark.parametrize('name', ['passages.start.npy', 'data.csc.index.npy', 'indices.csc.index.npy'])
def test_an_index_is_read_as_numbers(tmp_path, mark, name):
    BM25([Passage('0', 'a', 'b c'), Passage('1', 'd', 'e')]).save(tmp_path / 'index')
    assert (tmp_path / 'index' / name).exists()
    np.save(tmp_path / 'index' / name, np.array([Harm(mark)], object), allow_pickle=True)
    with pytest.raises(ValueError, match='[Oo]bject|pickle'): BM25.load(tmp_path / 'index')


def test_the_cell_of_a_notebooks_parameters_is_read_and_not_run(tmp_path, mark):
    cell = {'cell_type': 'code', 'source': f'run = __import__("os").mkdir({str(mark)!r})', 'execution_count': None,
            'metadata': {'tags': ['parameters']}}
    text = json.dumps({'cells': [cell], 'metadata': {'papermill': {'parameters': {'run': str(tmp_path)}}}})
    with pytest.raises(ValueError, match='malformed'): RunFolders.write(text, tmp_path / 'notebook.ipynb')


def test_rows_of_a_data_set_are_rows(tmp_path, mark):
    for name in ('rows.pkl', 'rows.pt', 'rows.jsonl', 'rows.parquet'):
        torch.save({'question': Harm(mark)}, tmp_path / name)
        with pytest.raises(ValueError): load_questions('gsm8k', str(tmp_path / name), 'test')


# ---- names that lead elsewhere ----

@pytest.mark.parametrize('place', ['../../secret/step-000001', '/etc/step-000001', '..', 'step-', 'step-000001/..',
                                   'newest'])
def test_a_checkpoints_name_leads_to_a_checkpoint_beside_it(tmp_path, place):
    (tmp_path / 'secret' / 'step-000001').mkdir(parents=True)
    run = tmp_path / 'run'
    save_checkpoint(run, 1, lambda path: None)
    (run / 'checkpoints' / 'best').symlink_to(place)
    with pytest.raises(ValueError, match='checkpoint'): named_checkpoint(run)


def test_a_checkpoint_that_is_a_link_is_refused(tmp_path):
    (tmp_path / 'secret').mkdir()
    save_checkpoint(run := tmp_path / 'run', 1, lambda path: None)
    (run / 'checkpoints' / 'step-000002').symlink_to(tmp_path / 'secret')
    (run / 'checkpoints' / 'best').symlink_to('step-000002')
    for find in (latest_checkpoint, named_checkpoint, lambda run: RunLog(run, resume=True)):
        with pytest.raises(ValueError, match='step-000002'): find(run)
    assert (tmp_path / 'secret').is_dir()


@pytest.mark.parametrize('name', ['metrics.jsonl', 'turns.jsonl.gz', 'params.yaml', 'summary.json', 'checkpoints',
                                  'bad_step.json', 'launch.yaml'])
def test_a_run_does_not_write_through_links(tmp_path, name):
    "Not even where the link leads nowhere yet, so that the file would be made."
    (tmp_path / 'run').mkdir()
    for place in ('mine', 'none'):
        (tmp_path / 'mine').write_text('')
        (tmp_path / 'run' / name).symlink_to(tmp_path / place)
        for resume in (True, False):
            with pytest.raises(ValueError, match=f'{name} is a link to'): RunLog(tmp_path / 'run', resume=resume)
        (tmp_path / 'run' / name).unlink()
    assert (tmp_path / 'mine').read_text() == '' and not (tmp_path / 'none').exists()
    assert os.listdir(tmp_path / 'run') == []


def test_what_is_replaced_as_a_whole_replaces_links_too(tmp_path):
    (tmp_path / 'mine').write_text('mine')
    for name in ('a', '.a.part'): (tmp_path / name).symlink_to(tmp_path / 'mine')
    atomic_write(tmp_path / 'a', lambda path: path.write_text('new'))
    assert (tmp_path / 'mine').read_text() == 'mine' and (tmp_path / 'a').read_text() == 'new'
    assert not (tmp_path / 'a').is_symlink()


def test_ranks_print_into_the_folder_of_their_run(tmp_path):
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'run').mkdir()
    (tmp_path / 'log').write_text('mine')
    (tmp_path / 'run' / 'ranks.log').symlink_to(tmp_path / 'log')
    (tmp_path / 'run' / 'errors').symlink_to(tmp_path / 'mine')
    with pytest.raises(LaunchError): launch(['echo', 'said'], tmp_path / 'run', tmp_path / 'run' / 'summary.json')
    assert (tmp_path / 'log').read_text() == 'mine' and (tmp_path / 'mine').is_dir()
    assert (tmp_path / 'run' / 'ranks.log').read_text() == 'said\n' and not (tmp_path / 'run' / 'errors').exists()


@pytest.mark.parametrize('shard', ['../secret.safetensors', '/etc/secret.safetensors', 'a/b.safetensors', '..', 7])
def test_an_index_of_weights_names_files_beside_it(model, shard):
    (model / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': {'w': shard}}))
    if shard == 7: check_model(str(model))                                   # no such file: transformers says so
    else:
        for read in (check_model, load_model):
            with pytest.raises(ValueError, match='files'): read(str(model))


# ---- sizes ----

BIG = {'zeros': lambda path: os.truncate(path, 2 ** 33), 'a list': lambda path: path.write_text('[' * 10 ** 5),
       'aliases': lambda path: path.write_text('a0: &a0 [1]\n' + ''.join(
           f'a{i}: &a{i} [{", ".join([f"*a{i - 1}"] * 9)}]\n' for i in range(1, 30)))}


@pytest.mark.parametrize('kind', BIG)
def test_a_file_takes_no_more_memory_than_such_a_file_may(tmp_path, kind):
    "8 GiB that are no bytes on the disk, lists in lists, and 9 to the 29th values in thirty lines."
    for name, read in (('params.yaml', read_params), ('summary.json', read_summary),
                       ('params.yaml', lambda run: RunLog(run, resume=True).write_params({'seed': 1}))):
        path = tmp_path / name
        path.write_text('')
        BIG[kind](path)
        with pytest.raises(ValueError, match=f'{name} (has more than|is nested too deep|cannot be read|is not valid)'):
            read(tmp_path)
        path.unlink()


def read_index(folder):
    BM25([Passage('0', 'a', 'b c')]).save(folder / 'index')
    os.truncate(folder / 'index' / 'index.json', 2 ** 33)
    return BM25.load(folder / 'index')


BOUNDED = {'config.json': check_model, 'tokenizer_config.json': check_model, 'model.safetensors.index.json': check_model,
           'params.yaml': lambda folder: read_settings(make_parser('x', 'y'), ['--params', f'{folder}/params.yaml']),
           'index.json': read_index}


@pytest.mark.parametrize('name', BOUNDED)
def test_files_of_models_settings_and_indexes_are_bounded(model, name):
    (model / name).touch()
    os.truncate(model / name, 2 ** 33)
    with pytest.raises(ValueError, match=f'{name}.* more than'): BOUNDED[name](model)


@functools.cache
def packed_blanks():
    "Half a GiB of blanks in half a MiB: packing takes longer than most readers need to refuse it."
    pack = zlib.compressobj(wbits=31)
    return b''.join([*(pack.compress(b' ' * (1 << 24)) for _ in range(32)), pack.flush()])


def peak(function):
    "MiB that a function takes from Python's heap at most, beyond what there is."
    tracemalloc.start()
    try: function()
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return most / 2 ** 20


BOMBS = {'rollouts': ('turns.jsonl.gz', lambda path: read_turns(path.parent), 256),
         'rollouts of a run that goes on': ('turns.jsonl.gz', lambda path: RunLog(path.parent, resume=True), 256),
         'rollouts that are watched': ('turns.jsonl.gz', lambda path: NewestRollouts(path.parent).read(), 256),
         'a warm-up': ('rollouts-train.jsonl.gz', read_collected, 113),
         'its tiers': ('rollouts-train.jsonl.gz', read_tiers, 113),
         'rows': ('rows.jsonl.gz', lambda path: load_questions('gsm8k', str(path), 'test'), 113),
         'a list of rows': ('rows.json.gz', lambda path: load_questions('musique', str(path), 'test'), 113)}


@pytest.mark.parametrize('kind', [kind if kind in ('rollouts', 'rows') else
                                  pytest.param(kind, marks=pytest.mark.nightly) for kind in BOMBS])
def test_a_packed_file_that_inflates_is_refused_at_a_stated_size(tmp_path, kind):
    name, read, most = BOMBS[kind]
    first = gzip.compress(b'{"step": 0}\n') if name.startswith('turns') else b''
    (tmp_path / name).write_bytes(first + packed_blanks())
    def refused():
        with pytest.raises(ValueError, match=f'{name}.* has more than {most}[.\\d]* MiB when it is unpacked'):
            read(tmp_path / name)
    assert peak(refused) < 4 * most + 40                        # bytes, and the text that is made of them


def test_what_we_pack_is_read(tmp_path):
    "Rollouts of one word, which pack best."
    rows = [{'kind': 'train', 'text': 'word ' * 200000, 'advantages': [0.] * 10000} for _ in range(8)]
    with RunLog(tmp_path) as log:
        for step in range(3): log.turns(step, rows)
    assert len(read_turns(tmp_path)) == 24 and len(NewestRollouts(tmp_path).read()) == 24


@pytest.mark.parametrize('kind', ['a warm-up', 'its tiers'])
def test_a_packed_file_that_lost_its_end_is_told(tmp_path, kind):
    name, read, _ = BOMBS[kind]
    path, rng = tmp_path / name, np.random.default_rng(0)
    whole = gzip.compress(''.join(f'{{"step": {n}, "loss": {rng.random()}}}\n' for n in range(500)).encode())
    for lost in (1, 94, 1024):
        path.write_bytes(whole[:-lost])
        if kind == 'its tiers': path.write_bytes(whole[:20])                   # of which the first line is read
        with pytest.raises(ValueError, match=f'{name} is damaged .*restore it, or '): read(path)
