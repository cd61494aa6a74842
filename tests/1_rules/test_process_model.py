"A process reward model: a tiny real classifier that was taught something, from a folder and behind a server."
import math
import socket
import threading

import pytest
import torch
from torch.testing import assert_close
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM
from transformers import LlamaForSequenceClassification

from credit_rl.methods import compose
from credit_rl.parts import assign
from credit_rl.process_model import (check_scorer, ClassifierScorer, make_scorer, process_scores, process_texts,
                                     ServerScorer)
from credit_rl.protocol import byte_tokenizer
from credit_rl.trajectory import example_group
from serving import Serving

GROUP = example_group()


def small(kind, tokenizer, **more):
    shape = dict(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                 num_attention_heads=2, max_position_embeddings=1024, pad_token_id=tokenizer.pad_token_id, **more)
    torch.manual_seed(0)
    return kind(BertConfig(**shape) if kind is BertForSequenceClassification else LlamaConfig(**shape))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "A small random Bert that tells bad from good."
    path, tokenizer = tmp_path_factory.mktemp('prm'), byte_tokenizer()
    names = {'id2label': {0: 'bad', 1: 'good'}, 'label2id': {'bad': 0, 'good': 1}}
    for part in (small(BertForSequenceClassification, tokenizer, **names), tokenizer): part.save_pretrained(path)
    return path


def test_a_classifier_pays_each_turn(folder):
    method = compose('outcome+prm/turns').bind({'prm': {'model': str(folder), 'label': 'good'}})
    batch = assign(method, [GROUP], lambda layout, asks: None)
    scores = process_scores([GROUP], make_scorer({'model': str(folder), 'label': 'good'}))
    assert_close(batch.rewards['turns'], scores)
    assert scores.shape == (3, 4) and scores.std() > 0 and (0 < scores).all() and (scores < 1).all()
    logged = method.metrics(batch)
    assert logged['prm_texts'] >= 12 and logged['prm_failures'] == logged['prm_cut'] == 0
    summed = compose('outcome+prm/group').bind({'prm': method.options['prm']})
    found = assign(summed, [GROUP], lambda layout, asks: None).rewards['turns']
    assert_close(found, scores / 4)                                   # a rule that sums takes the mean over turns


@pytest.mark.parametrize('labels', [3, 1])
def test_scores_are_the_models_own_and_batches_change_nothing(tmp_path, labels):
    "A softmax over labels; a model with one output gives its sigmoid. Llama's is read at a text's last token."
    tokenizer = byte_tokenizer()
    model = small(LlamaForSequenceClassification, tokenizer, num_labels=labels).eval()
    model.save_pretrained(tmp_path); tokenizer.save_pretrained(tmp_path)
    texts = ['a', 'abc ' * 9, 'ä', 'one two three']
    logits = torch.cat([model(tokenizer(text, return_tensors='pt').input_ids).logits for text in texts])
    own = (logits.softmax(1)[:, 1] if labels == 3 else logits.sigmoid()[:, 0]).tolist()
    which = {'label': 1} if labels == 3 else {}
    for batch in (1, 3): assert_close(ClassifierScorer(tmp_path, batch=batch, **which).score(texts), own)


def test_a_long_text_keeps_its_end_and_is_counted(folder):
    scorer, text = ClassifierScorer(folder, max_tokens=20), 'x' * 99 + 'the end is judged!!'
    ids = scorer.tokenizer(text, return_tensors='pt').input_ids
    end = scorer.model(ids[:, -20:]).logits.softmax(1)[0, 1].item()
    assert ids.shape[1] > 20 and scorer.score([text, 'short'])[0] == pytest.approx(end)
    assert scorer.counts == {'texts': 2, 'failures': 0, 'cut': 1}


def test_what_is_no_classifier_is_refused(tmp_path, folder):
    tokenizer = byte_tokenizer()
    small(LlamaForCausalLM, tokenizer).save_pretrained(tmp_path); tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='classifier'): ClassifierScorer(tmp_path)
    for label, said in (('goood', "'goood'"), (2, 'label=2'), (True, 'label=True')):
        with pytest.raises(ValueError, match=said): ClassifierScorer(folder, label=label)
    for wrong, said in ((None, 'wants a classifier'), ({'label': 1}, "needs 'model'"), ({'model': 'a', 'batc': 1}, 'batch'),
                        ({'base_url': 'http://h', 'model': 'a', 'api_key': 's'}, 'may not hold a key')):
        with pytest.raises(ValueError, match=said): check_scorer(wrong)
        with pytest.raises(ValueError, match=said): compose('outcome+prm/turns').bind({'prm': wrong})


@pytest.fixture
def server():
    "A server whose answers a test sets: function of the asked JSON -> (status, JSON or text)."
    with Serving(lambda path, asked, headers: place.says(asked)) as place: yield place


def rows(scores): return {'data': [{'index': i, 'label': 'x', 'probs': [1 - p, p]} for i, p in enumerate(scores)]}


def test_a_server_is_asked_in_batches_and_answers_in_any_order(server, monkeypatch):
    monkeypatch.setenv('PRM_KEY', 'secret')
    server.says = lambda asked: (200, {'data': rows([len(x) / 10 for x in asked['input']])['data'][::-1]})
    scorer = make_scorer({'base_url': server.url + '/', 'model': 'm', 'key_from': 'PRM_KEY', 'batch': 2})
    assert_close(scorer.score(['a', 'bb', 'ccc']), [.1, .2, .3])
    said = [(path, len(asked['input']), headers['Authorization']) for path, asked, headers in server.asked]
    assert said == [('/classify', 2, 'Bearer secret'), ('/classify', 1, 'Bearer secret')]


def test_what_a_server_does_not_score_is_missing(server):
    for answer in ((500, 'down'), (200, 'no JSON'), (200, {'error': 'x'}), (200, rows([.5])),
                   (200, {'data': [{'index': 0}] * 2}), (200, rows([math.inf, .5])), (200, []), (200, '[' * 60_000),
                   (200, '[' + '9' * 5_000 + ']'),
                   (200, '{"data": [{"index": 0, "probs": [1' + '0' * 400 + ']}, {"index": 1, "probs": [.5]}]}')):
        server.says = lambda asked: answer
        scorer = ServerScorer(server.url, 'm', tries=2)
        found = scorer.score(['a', 'b'])
        assert found[0] != found[0] and scorer.counts['failures'] >= 1 and all(x != 0 for x in found), answer


def test_an_answer_that_breaks_off_is_missing():
    "Fewer bytes than were announced, and a status line that is none."
    for said in (b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"data"', b'nothing\r\n\r\n'):
        with socket.create_server(('127.0.0.1', 0)) as place:
            def answer():
                with place.accept()[0] as asked: asked.recv(9999), asked.sendall(said)
            threading.Thread(target=answer, daemon=True).start()
            scorer = ServerScorer(f'http://127.0.0.1:{place.getsockname()[1]}', 'm', tries=1)
            assert math.isnan(scorer.score(['a'])[0]) and scorer.counts['failures'] == 1


def test_a_server_that_comes_back_is_asked_again(server):
    server.says = lambda asked: (503, 'busy') if len(server.asked) == 1 else (200, rows([.25] * len(asked['input'])))
    assert ServerScorer(server.url, 'm').score(['a']) == [.25] and len(server.asked) == 2


def test_a_rollout_with_a_missing_score_leaves_the_comparison(server):
    texts = process_texts(GROUP.trajectories[2])
    server.says = lambda asked: (200, rows([-1. if x in texts else .5 for x in asked['input']]))
    method = compose('outcome+prm/turns').bind({'prm': {'base_url': server.url, 'model': 'm'}})
    batch = assign(method, [GROUP], lambda layout, asks: None)
    assert batch.credit.trajectory_weight.tolist() == [1, 1, 0]
    assert batch.credit.advantages[batch.layout.row_trajectory == 0].any()


def test_a_run_does_not_begin_without_its_server():
    method = compose('outcome+prm/turns')
    (part,) = [r for r in method.rewards if r.name == 'prm']
    with pytest.raises(ConnectionError, match='scores'):
        part.service({'prm': {'base_url': 'http://127.0.0.1:9', 'model': 'm', 'tries': 1}}).check()


def test_a_classifier_that_gives_nan_is_an_error_that_names_it(folder):
    scorer = ClassifierScorer(str(folder))
    scorer.model.classifier.weight.data[0] = math.nan
    for look in (scorer.check, lambda: scorer.score(['a', 'b'])):
        with pytest.raises(ValueError, match=f"'{folder}' gives probabilities"): look()
