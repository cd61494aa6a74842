"""The chain of `make real`, with a random model of SmolLM2's architecture, and with the true one where it is there."""
import importlib.util
import json
import re

import pytest
import torch

from credit_rl.command import main
from credit_rl.environment import Conversation, make_environment, open_search
from credit_rl.models import load_model
from credit_rl.protocol import check_tokenizer, get_protocol
from credit_rl.datasets import load_questions
from credit_rl.demonstrations import demonstrate_all, reach
from gguf_files import small_llama, write_gguf

PARAMS, SHORT = 'runs/params/real.yaml', 'runs/params/protocols/short.yaml'


def recipe(root):
    "The commands of `make real` as the Makefile has them: list of lists of words after `credit_rl.`."
    lines = (root / 'Makefile').read_text().partition('\nreal: ')[2].partition('\n\n')[0].splitlines()
    return [line.split('-m credit_rl.')[1].split() for line in lines if '-m credit_rl.' in line]


def test_the_file_of_settings_says_what_the_makefile_does(root):
    comments = [line[1:].strip() for line in (root / PARAMS).read_text().splitlines() if line.startswith('#')]
    said = ' '.join(comments).replace(' \\ ', ' ')
    sft = re.search(r'^REAL_SFT := (.*)$', (root / 'Makefile').read_text(), re.M)[1]
    assert sft in re.sub(' +', ' ', said)
    assert f"steps={re.search(r'^REAL_STEPS [?]= (.*)$', (root / 'Makefile').read_text(), re.M)[1]} " in said
    assert [words[0] for words in recipe(root)] == ['fetch', 'command', 'sft', 'train', 'view']


def test_the_whole_chain_with_a_random_model(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(root)
    model, tokenizer = small_llama(positions=4096)
    folder, small = tmp_path / 'smollm2', [
        f'--params={PARAMS}', f'model={tmp_path / "smollm2"}', 'questions=12', 'dev_questions=3', 'test_questions=4',
        'max_tokens=2500', 'passage_tokens=300', 'turn_tokens=6', 'threads=1', 'base_questions=2', 'group_size=2',
        'questions_per_step=2', 'row_tokens=4096', 'eval_every=1']
    if importlib.util.find_spec('gguf'):
        write_gguf(tmp_path / 'm.gguf', model, tokenizer)
        main(['fetch', str(tmp_path / 'm.gguf'), str(folder)])
    else:
        for part in (model, tokenizer): part.save_pretrained(folder)
    main(['demos', *small, f'run={tmp_path / "demos"}'])
    main(['sft', *small, f'run={tmp_path / "sft"}', f'sft.demos={tmp_path / "demos"}', 'sft.epochs=1', 'sft.batch=4',
          'sft.compute=fastest'])
    train = ['train', *small, f'run={tmp_path / "tspo"}', f'model={tmp_path / "sft/model"}', 'method=tspo', 'steps=2']
    main(train)
    main(['view', str(tmp_path / 'tspo'), '--rules', 'tspo', 'grpo', 'outcome+folr/group'])
    said = capsys.readouterr().out
    assert 'fewer than a fifth of its groups are mixed' in said and 'no turn could be read' in said
    assert said.count('the search shows an answer of') == 5 and 'on the same 4 questions' in said
    summary = json.loads((tmp_path / 'tspo/summary.json').read_text())
    assert summary['steps'] == 2 and summary['base_sampled']['trajectories'] == 4 and summary['protocol'] == 'short'
    assert set(summary['ceiling']) >= {'all'} and len(summary['base_right']) == len(summary['final_right']) == 4
    assert summary['questions_by_set'] and (tmp_path / 'tspo/view.html').exists()
    main([*train, 'resume=true'])                                                 # over, and only shown again
    assert 'only shown again' in capsys.readouterr().out


# ---- the true model, where `credit-rl fetch smollm2` has put it ----

@pytest.fixture(scope='module')
def true_model(root):
    folder = root / 'models/smollm2'
    if not folder.is_dir(): pytest.skip('models/smollm2 is not there: credit-rl fetch smollm2')
    return load_model(str(folder))


@pytest.mark.long
def test_the_true_model_reads_its_template_and_writes_english(root, true_model):
    model, tokenizer = true_model
    chat = check_tokenizer(tokenizer, get_protocol(str(root / SHORT)), vocabulary=model.config.vocab_size)
    ids = chat.prompt_ids('What is the capital of France?')
    assert tokenizer.decode(ids).endswith('<|im_start|>user\nWhat is the capital of France?<|im_end|>\n'
                                          '<|im_start|>assistant\n')
    assert chat.history == 'as-sampled' and not chat.rewrites and len(ids) < 70
    plain = tokenizer('The capital of France is', return_tensors='pt').input_ids
    with torch.no_grad(): best = model(plain).logits[0, -1].argmax()
    assert tokenizer.decode([best]).strip() == 'Paris'


@pytest.mark.long
def test_the_search_shows_most_answers_within_the_limits_of_the_true_tokenizer(root, true_model, monkeypatch):
    monkeypatch.chdir(root)
    how = Conversation(SHORT, passages=2, observation={'passage_tokens': 100}, max_tokens=1024)
    env = make_environment(true_model[1], open_search('real')[0], how)
    assert reach(demonstrate_all(env, load_questions('real', split='dev')[::3], 2))['all'] > .6
