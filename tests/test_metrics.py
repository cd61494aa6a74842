"Answer metrics against independent implementations and their own identities."
import math
import warnings

import pytest
from hypothesis import given, settings, strategies as st

from credit_rl.metrics import (carl_match, cover_match, exact_match, f1, normalize, numeric_match, parse_number, short_bleu)

WORDS = st.sampled_from(['Budapest', 'the', 'a', 'An', 'city', 'of', 'x', 'X.', 'y', 'é', '"z"', '-1.5', '15', "o'clock"])
TEXT = st.lists(WORDS, max_size=8).map(' '.join)
GOLDS = st.lists(TEXT, min_size=1, max_size=3)
METRICS = [exact_match, carl_match, cover_match, f1, short_bleu, numeric_match]


@given(st.text(max_size=30))
def test_normalize_is_idempotent_on_words(text):
    once = normalize(text)
    assert once == ' '.join(once.split())
    assert not set('.,!?"\'-') & set(once)


@given(TEXT, GOLDS)
def test_order_and_range(p, golds):
    em, carl, cover, f, b = (m(p, golds) for m in METRICS[:5])
    assert em <= carl <= cover and em <= f + 1e-12 and em <= b + 1e-12
    assert all(0.0 <= x <= 1.0 + 1e-12 for x in (em, carl, cover, f, b))
    assert all(isinstance(x, float) for x in (em, carl, cover, f, b))
    assert cover_match(p, golds, whole_words=True) <= cover


@given(TEXT, TEXT)
def test_f1_is_symmetric(p, g):
    assert f1(p, [g]) == f1(g, [p])


@given(TEXT, GOLDS, TEXT)
@pytest.mark.parametrize('metric', METRICS, ids=lambda m: m.__name__)
def test_another_gold_never_hurts_and_order_does_not_matter(metric, p, golds, extra):
    assert metric(p, golds + [extra]) >= metric(p, golds)
    assert metric(p, golds[::-1]) == metric(p, golds)


@pytest.mark.parametrize('metric', METRICS, ids=lambda m: m.__name__)
def test_the_door(metric):
    with pytest.raises(TypeError, match='list of strings'): metric('Ada', 'Ada')
    with pytest.raises(TypeError, match='golds must be strings'): metric('42', [42])
    with pytest.raises(TypeError, match='prediction'): metric(42, ['42'])
    with pytest.raises(ValueError, match='empty'): metric('Ada', [])
    assert metric(None, ['Ada']) == 0.0 and metric('', ['Ada']) == 0.0
    assert metric('Ada', ('Ada',)) == 1.0


@pytest.mark.parametrize('metric', METRICS[:5], ids=lambda m: m.__name__)
@pytest.mark.parametrize('gold', ['', ' ', 'the', '?!', 'A.'])
def test_an_empty_normalised_gold_never_matches(metric, gold):
    for p in ('', 'the', '?', 'Budapest'): assert metric(p, [gold]) == 0.0


@settings(deadline=None, max_examples=150)
@given(TEXT, GOLDS)
def test_em_and_f1_agree_with_torchmetrics_squad(p, golds):
    squad = pytest.importorskip('torchmetrics.functional.text').squad
    golds = [g for g in golds if normalize(g)]   # empty golds are a stated difference
    if not golds: return
    out = squad([{'prediction_text': p, 'id': '0'}], [{'answers': {'answer_start': [0] * len(golds), 'text': golds}, 'id': '0'}])
    assert exact_match(p, golds) == pytest.approx(out['exact_match'].item() / 100)
    assert f1(p, golds) == pytest.approx(out['f1'].item() / 100, abs=1e-6)


@settings(deadline=None)
@given(st.lists(st.sampled_from('uvwxyz'), max_size=7), st.lists(st.sampled_from('uvwxyz'), min_size=1, max_size=7), st.booleans())
def test_short_bleu_agrees_with_nltk(p, g, smooth):
    bleu = pytest.importorskip('nltk.translate.bleu_score')
    max_n = min(4, len(p))
    expected = 0.0
    if max_n:
        method = bleu.SmoothingFunction().method2 if smooth else bleu.SmoothingFunction().method0
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            expected = bleu.sentence_bleu([g], p, weights=(1 / max_n,) * max_n, smoothing_function=method)
    if expected < 1e-60: expected = 0.0          # nltk's stand-in for a missing n-gram
    assert short_bleu(' '.join(p), [' '.join(g)], smooth=smooth) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.sampled_from('uvwxyz'), min_size=1, max_size=9).map(' '.join))
def test_an_exact_match_of_any_length_has_short_bleu_1(text):
    assert short_bleu(text, [text]) == pytest.approx(1.0) and short_bleu(text, [text], smooth=True) == pytest.approx(1.0)
    assert short_bleu('', [text]) == 0.0


def test_short_bleu_counts_repeated_words_once():
    assert short_bleu('x', ['x y']) == pytest.approx(math.exp(-1))     # p_1 = 1, c = 1, r = 2
    assert short_bleu('x x', ['x']) == 0.0                             # p_1 = 1/2, p_2 = 0
    assert short_bleu('x x', ['x'], smooth=True) == pytest.approx(0.5) # p_1 = 1/2, p_2 = 1/2


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


@pytest.mark.parametrize('text', ['', 'none', '-', '%', '$', '.', '12 or 13', '12, 13', '10-20', '2009-10-01', '1,5', '1234,567', '1/2',
                                  '3.14.15', 'B52', 'x2', '1e999'])
def test_what_is_not_one_number(text):
    assert parse_number(text) is None and numeric_match(text, ['12']) == 0.0


@given(st.floats(1e-3, 1e6), st.floats(-0.4, 0.4), st.sampled_from([1e-4, 1e-2, 0.1]))
def test_tolerance_is_relative_to_the_gold(gold, shift, rel_tol):
    if abs(abs(shift) - rel_tol) < 1e-6: return
    assert numeric_match(f'{gold * (1 + shift):.12f}', [f'{gold:.12f}'], rel_tol) == float(abs(shift) <= rel_tol)


@given(st.integers(-999_999, 999_999).filter(bool))
def test_percent_is_read_either_way_but_only_on_one_side(n):
    x = n / 1000
    assert numeric_match(f'{x}%', [str(x)]) == numeric_match(f'{x}%', [f'{x / 100:.10f}']) == 1.0
    assert numeric_match(str(x), [f'{x}%']) == numeric_match(f'{x / 100:.10f}', [f'{x}%']) == 1.0
    assert numeric_match(f'{x * 100:.3f}%', [f'{x}%']) == 0.0
    assert numeric_match(str(x), [f'{x / 100:.10f}']) == 0.0


@pytest.mark.parametrize('rel_tol', [-0.1, 1, 5, math.nan])
def test_a_senseless_tolerance_is_refused(rel_tol):
    with pytest.raises(ValueError, match='rel_tol'): numeric_match('1', ['1'], rel_tol)
