"""Scripts that put no blanks between words: searched, cut, shown, paid and scored as others are; English as before."""
import dataclasses
import unicodedata
import warnings

import pytest
import torch

from credit_rl.datasets import load_questions
from credit_rl.environment import Conversation, Source, make_environment
from credit_rl.engine import ScriptedEngine
from credit_rl.evaluate import measure
from credit_rl.tspo import first_turns
from credit_rl.metrics import characters, f1, score_answer
from credit_rl.outcome import outcome_rewards
from credit_rl.protocol import byte_tokenizer
from credit_rl.prs import prs_rewards
from credit_rl.readers import Cutting, Passage, cut_paragraphs
from credit_rl.retrieval import BM25, bm25_reference, build_index, read_index, words
from credit_rl.rollout import rollout
from credit_rl.tools import cut
from credit_rl.trajectory import Group, Question, Stop, Trajectory, Turn

# language -> (what is searched for, gold, the passage that says it, another)
PAGES = {'Chinese': ('法国的首都', '巴黎', '法国的首都是巴黎，位于塞纳河畔。', '日本的山很多，富士山最高。'),
         'Japanese': ('フランスの首都', 'パリ', 'フランスの首都はパリである。', '富士山は日本で最も高い山です。'),
         'Thai': ('เมืองหลวงของฝรั่งเศส', 'ปารีส', 'เมืองหลวงของฝรั่งเศสคือปารีส', 'ภูเขาไฟฟูจิอยู่ในญี่ปุ่น'),
         'Khmer': ('រដ្ឋធានីបារាំង', 'ប៉ារីស', 'រដ្ឋធានីបារាំងគឺប៉ារីស', 'ភ្នំហ្វូជីនៅជប៉ុន'),
         'Lao': ('ເມືອງຫຼວງຝຣັ່ງ', 'ປາຣີ', 'ເມືອງຫຼວງຝຣັ່ງແມ່ນປາຣີ', 'ພູຟູຈິຢູ່ຍີ່ປຸ່ນ'),
         'Korean': ('프랑스 수도', '파리', '프랑스의 수도는 파리이다.', '후지산은 일본에서 가장 높다.')}
each = pytest.mark.parametrize('query, gold, page, other', PAGES.values(), ids=PAGES)
ENGLISH = [Passage('0', 'Casablanca', 'Casablanca (卡萨布兰卡) is a 1942 film, isn’t it?'), Passage('1', 'Rome', 'It’s old.')]


@each
def test_a_search_finds_what_is_said_in_the_midst_of_a_clause(query, gold, page, other, tmp_path):
    passages = [Passage('0', '', other), Passage('1', '', page)]
    index = BM25(passages)
    assert index.search([query], 1)[0][0].text == page and index.about()['bigrams'] is True
    assert index.scores([query])[0].tolist() == pytest.approx(bm25_reference(passages, query, bigrams=True))
    index.save(tmp_path / 'saved')
    build_index(iter(passages), tmp_path / 'built')
    for folder in ('saved', 'built'):
        again = BM25.load(tmp_path / folder)
        assert again.bigrams and (again.scores([query]) == index.scores([query])).all()
        assert read_index(tmp_path / folder)['bigrams'] is True
    with pytest.warns(UserWarning, match='bigrams'): BM25(passages, bigrams=False).search([query], 1)


def test_english_is_searched_as_before(tmp_path):
    "Words, scores and what an index says of itself, also where a passage quotes another script."
    index = BM25(ENGLISH)
    assert not index.bigrams and 'bigrams' not in index.about()
    assert cut_paragraphs([ENGLISH[0].text], Cutting(words=2))[0] == 'Casablanca (卡萨布兰卡)'
    assert words(ENGLISH[0].text) == ['casablanca', '卡萨布兰卡', 'is', 'a', '1942', 'film', 'isn', 't', 'it']
    build_index(ENGLISH, tmp_path / 'built')
    assert 'bigrams' not in read_index(tmp_path / 'built') and not BM25.load(tmp_path / 'built').bigrams
    plain = [Passage(p.id, p.title, p.text.replace('卡萨布兰卡', 'x')) for p in ENGLISH]
    assert (BM25(plain, bigrams=True).scores(['old film']) == BM25(plain).scores(['old film'])).all()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        index.search(['Casablanca film'], 1)


def test_a_corpus_of_several_languages_is_told_so():
    mixed = BM25([*ENGLISH, Passage('2', '', PAGES['Chinese'][2])], bigrams=True)
    found = [hits[0].id for hits in mixed.search(['casablanca film', '法国的首都'], 1)]
    assert found == ['0', '2']


TOKENIZER = byte_tokenizer(texts=[p for pages in PAGES.values() for p in pages] * 3, merges=120)   # some hold many letters
CALL = '<tool_call> x </tool_call>'


def play(gold, page, room):
    "A rollout that searches once, and has so many ids for the rest of its row."
    class Index:
        def search(self, queries, k): return [[Passage('0', '', page)] for _ in queries]
    env = make_environment(TOKENIZER, Index(), Conversation('tiny', max_tokens=10 ** 4))
    size = len(env.chat.prompt_ids('Which?')) + len(env.chat.encode(CALL))
    said = iter([CALL, f'<answer> {gold} </answer>'])
    engine = ScriptedEngine(lambda text, rng: next(said), TOKENIZER)
    (group,) = rollout(engine, dataclasses.replace(env, max_tokens=size + room), [Question('q', 'Which?', [gold])])
    return group


@each
def test_what_the_ids_show_is_what_was_returned_and_is_paid(query, gold, page, other):
    "What a cut turn says it was returned stands in its ids; the gold's turn is found once the whole gold does."
    paid = []
    for room in range(20, 200, 7):
        group = play(gold, page, room)
        turn = group.trajectories[0].turns[0]
        held, shown = TOKENIZER.decode(turn.observation_ids), ''.join(turn.returned)
        assert shown in held and page.startswith(shown)
        assert (first_turns([group]).item() == 0) == (gold in shown)
        paid.append(gold in shown)
    assert paid[-1] and not paid[0]


@each
def test_a_cut_is_inside_a_word_that_alone_is_too_long(query, gold, page, other):
    whole = page.split(' ')[0]
    for most in range(1, len(page)):
        part = cut(page, most, count=len)
        assert page.startswith(part) and len(part) <= most
        assert unicodedata.category(page[len(part)])[0] != 'M'                          # no letter is parted from its marks
        if most >= 6 and len(whole) > most: assert part
    passages = cut_paragraphs([page * 9], Cutting(words=5))
    assert max(map(len, passages)) < 40 and ''.join(passages).replace(' ', '') == (page * 9).replace(' ', '')


def asked(gold, answer, tokens):
    meta = {} if tokens is None else {'tokens': tokens}
    question = Question('q', '?', [gold], meta=meta)
    turn = Turn('answer', (1,), (0.,), (), f'<reasoning> x </reasoning> <answer> {answer} </answer>', '')
    return [Group(question, [Trajectory(question, (0,), [turn], Stop.ANSWER, answer)])]


def test_one_option_says_what_a_word_of_an_answer_is():
    "The gold has three letters, the answer the first two: F1 2·2/5, BLEU exp(1 − 3/2); as words, 0 of either."
    told, words_ = asked('北京市', '北京。', 'characters'), asked('北京市', '北京。', 'words')
    assert outcome_rewards(told, 'f1').item() == pytest.approx(.8) and outcome_rewards(words_, 'f1').item() == 0
    bleu = pytest.approx(torch.tensor(-.5).exp().item())
    assert outcome_rewards(told, 'bleu').item() == bleu and outcome_rewards(words_, 'bleu').item() == 0
    assert prs_rewards(told)[1]['answer'].item() == bleu and prs_rewards(words_)[1]['answer'].item() == 0
    assert measure(told[0].trajectories[0])['f1'] == pytest.approx(.8)
    assert outcome_rewards(asked('北京市', '「北京市」', 'characters')).item() == 1


def test_prs_refuses_what_would_be_0_for_all():
    with pytest.raises(ValueError, match='tokens'): prs_rewards(asked('北京市', '北京', None))
    both = [*asked('北京市', '北京', None), *asked('Peking', 'Peking', None)]
    assert prs_rewards(both)[1]['answer'].tolist() == [0, 1]


def test_characters_leave_words_of_other_scripts():
    for text in ('Michael Curtiz', 'the 1,200.50 km²', "O'Brien", 'Zürich', 'a-b', 'हिन्दी भाषा', '5½'):
        assert characters(text) == text


def test_the_option_goes_with_the_questions(root, tmp_path):
    (tmp_path / 'q.jsonl').write_text('{"question": "中国的首都？", "answer": ["北京市"]}\n')
    (q,) = load_questions('nq', str(tmp_path / 'q.jsonl'), tokens=Source(tokens='characters').tokens)
    assert score_answer(f1, q, '北京') == pytest.approx(.8) and load_questions('nq', str(tmp_path / 'q.jsonl'))[0].meta == {}
    with pytest.raises(ValueError, match='tokens'): Source(tokens='letters')
