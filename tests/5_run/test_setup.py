"Models as a run takes them: low-rank additions that train more than themselves are refused, a merge computes the same."
import pytest
import torch

pytest.importorskip('peft', reason='pip install credit_rl[train]')
from transformers import LlamaConfig, LlamaForCausalLM

from credit_rl.settings import check, make_config
from credit_rl.setup import add_lora, make_setup, merge_lora, origin_of

BOTH = ({'target_modules': ['q_proj', 'lm_head']}, {'target_modules': ['embed_tokens']},
        {'target_modules': ['lm_head'], 'ensure_weight_tying': True})
MORE = ({'bias': 'all'}, {'bias': 'lora_only'}, {'lora_bias': True}, {'modules_to_save': ['lm_head']},
        {'modules_to_save': ['embed_tokens']}, {'trainable_token_indices': [1, 2]},
        {'trainable_token_indices': {'embed_tokens': [1]}}, {'layer_replication': [[0, 1], [0, 1]]},
        {'target_parameters': ['x']}, {'peft_type': 'LOHA'})
FINE = ({}, {'use_dora': True}, {'use_rslora': True}, {'target_modules': 'all-linear'}, {'rank_pattern': {'q_proj': 4}},
        {'init_lora_weights': 'pissa'}, {'lora_dropout': .5}, {'bias': 'none', 'modules_to_save': None})


def small(tied):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tied))


@pytest.mark.parametrize('settings', MORE)
@pytest.mark.parametrize('tied', [True, False])
def test_settings_that_train_more_than_additions_are_refused(settings, tied):
    (name,) = settings
    with pytest.raises(ValueError, match=f'lora: {name}='): add_lora(small(tied), {'r': 2, **settings})
    with pytest.raises(ValueError, match=f'lora: {name}='):                    # before a model is loaded
        check(make_config({'lora': {'r': 2, **settings}, 'model': 'data/tiny_base'}))


@pytest.mark.parametrize('wrong', [{'rr': 8}, {'r': '8'}, {'r': 0}, {'alpha': 16}, {'lora_dropout': 2}])
def test_what_peft_does_not_take_is_refused_before_a_model_is_loaded(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))): check(make_config({'lora': wrong, 'model': 'data/tiny_base'}))


@pytest.mark.parametrize('settings', BOTH)
def test_an_addition_to_tied_embeddings_is_refused(settings):
    with pytest.raises(ValueError, match='reading'):
        add_lora(small(True), {'r': 2, **settings})


@pytest.mark.parametrize('settings, tied', [*((s, True) for s in FINE), *((s, False) for s in (*FINE, *BOTH[:2]))])
def test_what_is_taken_merges_into_the_same_logits(settings, tied):
    model = small(tied)
    add_lora(model, {'r': 2, **settings})
    with torch.no_grad():
        for name, p in model.named_parameters():
            assert p.requires_grad == ('.lora_' in name)
            if p.requires_grad: p.add_(torch.randn_like(p) * .1)
    ids = torch.arange(5)[None]
    before = model.eval()(ids).logits
    merge_lora(model)
    assert torch.allclose(model(ids).logits, before, atol=1e-4)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in small(tied).named_parameters()]


@pytest.mark.parametrize('gone_wrong', [1., float('nan')])
def test_a_merge_that_changes_logits_is_refused(gone_wrong, monkeypatch):
    from peft.tuners.lora import Linear
    model = small(True)
    add_lora(model, {'r': 2})
    def merge(layer, safe_merge): layer.get_base_layer().weight.data += gone_wrong
    monkeypatch.setattr(Linear, 'merge', merge)
    with pytest.raises(ValueError, match='changes'): merge_lora(model)


@pytest.mark.parametrize('tokens, told', [(512, []), (99_999, ['max_tokens=99999, but the model has 512 positions'])])
def test_it_is_said_that_rollouts_end_where_positions_do(tokens, told, root):
    s, lines = make_config({'model': str(root / 'data/tiny_base'), 'max_tokens': tokens, 'questions': 2,
                             'dev_questions': 1, 'test_questions': 1}), []
    make_setup(s, origin_of(s), lines.append)
    assert [line.partition(':')[0] for line in lines if 'positions' in line] == told
