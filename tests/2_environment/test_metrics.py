"Answer metrics against independent implementations and their own identities."
import math
import warnings

import pytest
from hypothesis import given, settings, strategies as st

from credit_rl.datasets import load_questions
from credit_rl.metrics import (benchmark_metric, carl_match, cover_match, exact_match, f1, normalize, numeric_match,
                               parse_number, search_r1_answer, search_r1_em, short_bleu)

WORDS = st.sampled_from(['Budapest', 'the', 'a', 'An', 'city', 'of', 'x', 'X.', 'y', 'é', '"z"', '-1.5', '15', "o'clock"])
TEXT = st.lists(WORDS, max_size=8).map(' '.join)
GOLDS = st.lists(TEXT, min_size=1, max_size=3)
METRICS = [exact_match, carl_match, cover_match, f1, short_bleu, numeric_match]


@given(TEXT, GOLDS)
def test_order_and_range(p, golds):
    golds = [g for g in golds if normalize(g)] or ['x']      # others are compared unstripped by exact match and F1 alone
    em, carl, cover, f, b = (m(p, golds) for m in METRICS[:5])
    assert em <= carl <= cover and em <= f + 1e-12 and em <= b + 1e-12
    assert all(0.0 <= x <= 1.0 + 1e-12 for x in (em, carl, cover, f, b))
    assert all(isinstance(x, float) for x in (em, carl, cover, f, b))
    assert cover_match(p, golds, whole_words=True) <= cover


@given(TEXT, GOLDS, TEXT, st.sampled_from(METRICS))
def test_another_gold_never_hurts_and_order_does_not_matter(p, golds, extra, metric):
    assert metric(p, golds + [extra]) >= metric(p, golds)
    assert metric(p, golds[::-1]) == metric(p, golds)


def test_the_door():
    for metric in METRICS:
        for given, error, said in ((('Ada', 'Ada'), TypeError, 'strings'), (('42', [42]), TypeError, 'strings'),
                                   ((42, ['42']), TypeError, 'prediction'), (('Ada', []), ValueError, 'empty')):
            with pytest.raises(error, match=said): metric(*given)
        assert metric(None, ['Ada']) == metric('', ['Ada']) == 0.0 and metric('Ada', ('Ada',)) == 1.0
    for rel_tol in (-0.1, 1, math.nan):
        with pytest.raises(ValueError, match='rel_tol'): numeric_match('1', ['1'], rel_tol)


@settings(max_examples=60)
@given(TEXT, GOLDS)
def test_em_and_f1_agree_with_torchmetrics_squad(p, golds):
    squad = pytest.importorskip('torchmetrics.functional.text').squad
    golds = [g for g in golds if normalize(g)]   # empty golds are a stated difference
    if not golds: return
    out = squad([{'prediction_text': p, 'id': '0'}],
                [{'answers': {'answer_start': [0] * len(golds), 'text': golds}, 'id': '0'}])
    assert exact_match(p, golds) == pytest.approx(out['exact_match'].item() / 100)
    assert f1(p, golds) == pytest.approx(out['f1'].item() / 100, abs=1e-6)


@given(st.lists(st.sampled_from('uvwxyz'), max_size=7), st.lists(st.sampled_from('uvwxyz'), min_size=1, max_size=7),
       st.booleans())
def test_short_bleu_agrees_with_nltk(p, g, smooth):
    bleu = pytest.importorskip('nltk.translate.bleu_score')
    max_n, expected = min(4, len(p)), 0.0
    if max_n:
        method = bleu.SmoothingFunction().method2 if smooth else bleu.SmoothingFunction().method0
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            expected = bleu.sentence_bleu([g], p, weights=(1 / max_n,) * max_n, smoothing_function=method)
    if expected < 1e-60: expected = 0.0          # nltk's stand-in for a missing n-gram
    assert short_bleu(' '.join(p), [' '.join(g)], smooth=smooth) == pytest.approx(expected, abs=1e-9)


@given(st.floats(-1e6, 1e6).map(lambda x: round(x, 3)))
def test_a_number_in_any_dress_is_the_same_number(x):
    plain, commas = f'{x:.3f}', f'{x:,.3f}'
    dressed = [plain, commas, f'${commas}', f'{commas} dollars', f'about {plain} kg.', plain.replace('-', '\u2212'),
               plain.replace('-', '-$')]
    for text in dressed:
        assert parse_number(text) == (float(plain), False), text
        assert numeric_match(text, [plain], rel_tol=0) == 1.0
    assert parse_number(f'{plain}%') == parse_number(f'{plain} percent') == (float(plain), True)
    if x: assert numeric_match(plain, [f'{-x:.3f}']) == 0.0
    if x: assert numeric_match(plain.replace('.', ''), [plain]) == 0.0


def test_what_is_not_one_number():
    for text in ('none', '-', '%', '$', '.', '12, 13', '2009-10-01', '1234,567', 'x2', '1e999'):
        assert parse_number(text) is None and numeric_match(text, ['12']) == 0.0
    for text in (r'\frac{x}{2}', r'\sqrt{2}', r'2\sqrt{x}', r'\frac{1}{0}', r'-\frac{-1}{2}', r'1.5\frac{1}{2}',
                 r'\frac{1}{2}5', r'12 \text{ or } 13', r'10^6', r'1\,5', r'\{1, 2\}', '12 % of 30',
                 'between $3 and $4'):
        assert parse_number(text) is None


@given(st.integers(-999_999, 999_999).filter(bool))
def test_percent_is_read_either_way_but_only_on_one_side(n):
    x = n / 1000
    assert numeric_match(f'{x}%', [str(x)]) == numeric_match(f'{x}%', [f'{x / 100:.10f}']) == 1.0
    assert numeric_match(str(x), [f'{x}%']) == numeric_match(f'{x / 100:.10f}', [f'{x}%']) == 1.0
    assert numeric_match(f'{x * 100:.3f}%', [f'{x}%']) == 0.0
    assert numeric_match(str(x), [f'{x / 100:.10f}']) == 0.0


@given(st.floats(-1e6, 1e6).map(lambda x: round(x, 2)))
def test_latex_around_a_number_changes_nothing(x):
    plain, commas = f'{x:.2f}', f'{x:,.2f}'
    for text in (f'${plain}$', rf'\({plain}\)', *(commas.replace(',', comma) for comma in ('{,}', r'\,', r'\!')),
                 rf'{plain} \text{{ kg}}', rf'\text{{{plain}}}', rf'\$ {plain}', rf'\mathrm{{{plain}}}', f'**{plain}**'):
        assert parse_number(text) == (float(plain), False), text
    for text in (rf'{plain}\%', rf'${plain}\%$', rf'{plain}\,\%', rf'{plain} \text{{ percent}}', f'{plain} pct'):
        assert parse_number(text) == (float(plain), True), text


@given(st.integers(0, 99), st.integers(0, 999), st.integers(1, 999), st.sampled_from(['frac', 'dfrac', 'tfrac']),
       st.sampled_from(['', '-']))
def test_a_fraction_is_the_number_that_it_is(whole, above, below, name, sign):
    value, factor = above / below, -1 if sign else 1
    assert parse_number(rf'{sign}\{name}{{{above}}}{{{below}}}') == (factor * value, False)
    assert parse_number(rf'{sign}{whole}\{name}{{{above}}}{{{below}}}') == (factor * (whole + value), False)
    assert parse_number(rf'\{name}{{{sign}{above}}}{{{below}}} \text{{ km}}') == (factor * value, False)
    assert parse_number(rf'\{name}{{{above}}}{{{below}}}\%') == (value, True)
    assert numeric_match(rf'\{name}{{{above}}}{{{below}}}', [repr(value)]) == 1


@given(st.lists(st.sampled_from(['<answer>', '</answer>', 'x', ' y\n', 'z<']), max_size=12).map(''.join),
       st.integers(0, 3))
def test_search_r1_pairs_each_opening_with_the_next_closing_tag(text, prompt_answers):
    pairs, at = [], 0
    # by hand, without a pattern
    while (start := text.find('<answer>', at)) >= 0 and (end := text.find('</answer>', start)) >= 0:
        pairs.append(text[start + len('<answer>'):end].strip())
        at = end + len('</answer>')
    assert search_r1_answer(text, prompt_answers) == (pairs[-1] if len(pairs) > prompt_answers else None)


def test_search_r1_counts_the_pair_that_the_published_prompt_makes_by_naming_its_tags():
    from credit_rl.protocol import PROTOCOLS
    prompt = PROTOCOLS['search-r1'].user.replace('{question}', 'Where?')
    assert search_r1_answer(prompt + ' I do not know.') == 'Beijing'                  # as published
    assert search_r1_answer(prompt + ' I do not know.', prompt_answers=2) is None
    for n in (1, 2): assert search_r1_em(prompt + ' <answer> the Budapest </answer>', ['Budapest'], n) == 1.0
    assert search_r1_em('<answer></answer>', ['the'], 0) == 0.0                       # an empty gold matches nothing
    with pytest.raises(ValueError, match='prompt_answers'): search_r1_em(prompt, ['Budapest'], -1)


def test_benchmark_metric():
    assert benchmark_metric('NQ') is exact_match and benchmark_metric('2wiki') is exact_match
    gsm, fin = benchmark_metric('gsm8k'), benchmark_metric('finqa')
    assert gsm('$10,000.00 a day', ['10000']) == 1.0 and gsm('9999', ['10000']) == 0.0 and gsm('-7', ['7']) == 0.0
    assert fin('34%', ['0.34011']) == fin('0.340', ['0.34011']) == fin('34.01', ['34.01%']) == fin('No.', ['no']) == 1.0
    assert fin('33%', ['0.34011']) == fin('3.4%', ['0.34011']) == fin('yes', ['no']) == fin('34', ['0.34011']) == 0.0
    with pytest.raises(ValueError, match='Known'): benchmark_metric('zzz')


@pytest.mark.parametrize('name, split', [('gsm8k', 'train'), ('gsm8k', 'test'), ('finqa', 'train'), ('finqa', 'dev')])
def test_real_numbers(data, name, split):
    "Every gold is one number (or yes, no) and meets itself; another question's gold seldom does."
    metric, questions = benchmark_metric(name), load_questions(name, data / name, split)
    hits = 0
    for q, other in zip(questions, questions[1:]):
        gold = q.answers[0]
        number = parse_number(gold)
        assert metric(gold, q.answers) == 1.0 and all(metric(a, q.answers) == 1.0 for a in q.answers)
        if gold in ('yes', 'no'): continue
        assert number is not None and not number[1]
        assert metric(f'It is {gold} dollars.', [gold]) == 1.0 == metric(f'{number[0] * 100:.6f}%', [gold])
        if number[0]: assert metric(f'{-number[0]!r}', [gold]) == 0.0 and metric(f'{number[0] * 1.02!r}', [gold]) == 0.0
        hits += metric(other.answers[0], q.answers) == 1.0
    assert hits < len(questions) / 15


DRESSES = [str, lambda x: f'It is {x}.', lambda x: f'${x}', lambda x: f'({x})', lambda x: rf'\text{{{x}}}',
           lambda x: f'{x} km', lambda x: f'[{x}]']
MINUSES = [lambda x, d: d(f'-{x}'), lambda x, d: f'-{d(x)}', lambda x, d: f'\u2212({x})', lambda x, d: f'-$({x})',
           lambda x, d: f'-(({x}))', lambda x, d: rf'-\left({x}\right)', lambda x, d: f'\u2013({x})']
GOES_ON = ['³', '⁻³', '½', ' ½', '¾', '_000', 'x10', 'x3', '₂', '⅓', 'xff', '²', '_']


@settings(max_examples=200)
@given(st.decimals(0, 9999, places=2) | st.integers(0, 9999), st.sampled_from(DRESSES),
       st.sampled_from([None, *MINUSES]), st.sampled_from([*GOES_ON, *[''] * 9]))
def test_a_number_is_read_whole_with_its_sign_or_not_at_all(x, dress, minus, more):
    text = f'{x}{more}'
    if minus is None: text, meant = dress(text), float(x)
    else: text, meant = minus(text, dress if dress in (str, DRESSES[3], DRESSES[2]) else str), -float(x)
    found = parse_number(text)
    assert found is None if more else found == (meant, False), (text, found)


def test_brackets_alone_are_no_minus_and_units_are_none_of_the_number():
    for text, value in (('$(1,234)', 1234.), ('5x faster', 5.), ('x-(3.2)', 3.2), ('-(3.2 km)', -3.2)):
        assert parse_number(text)[0] == value


@given(st.sampled_from(['A', 'The The', 'an', '!', 'A.', ' the ', '?!']),
       st.sampled_from(['a', 'an', 'the', '!', 'the the']))
def test_a_gold_that_normalises_to_nothing_is_compared_unstripped_by_em_and_f1_alone(gold, said):
    alike = ' '.join(gold.lower().replace('.', '').split()) == said
    assert exact_match(said, [gold]) == float(alike) and (f1(said, [gold]) == 1) == alike
    assert exact_match(said, [gold, 'Ada']) == float(alike) and exact_match('Ada', [gold, 'Ada']) == 1
    assert cover_match(said, [gold]) == short_bleu(said, [gold]) == carl_match(said, [gold]) == 0
    assert exact_match('', [gold]) == exact_match(None, [gold]) == exact_match(gold, [' ']) == 0


def test_a_power_is_no_number():
    for text in ('2x10^5', '1.5x10^3', 'x^2', '10^{3}', '2^-5'):
        assert [numeric_match(text, [gold]) for gold in ('5', '3', '2', '10', '-5')] == [0.] * 5
    assert numeric_match(r'90^\circ', ['90']) == numeric_match('$90^{\\circ}$', ['90']) == 1.
