"A setting that the chosen data does not read is refused with what to say instead; a stored run goes on with it."
import pytest
import yaml

from credit_rl import setup as staging
from credit_rl.options import flat
from credit_rl.protocol import byte_tokenizer
from credit_rl.settings import check, make_config
from credit_rl.tiny import tiny_tokenizer


@pytest.mark.parametrize('given', [
    {'path': 'questions.jsonl'}, {'corpus': 'docs'}, {'dense': {'nprobe': 4}}, {'patience': {'tries': 2}},
    {'mix': {'nq': 1}}, {'splits': {'train': 'dev'}}, {'tokens': 'characters'}, {'observation': {'tokens': 9}},
    {'template': 'chatml'}])
def test_the_tiny_world_refuses_what_it_does_not_read(given, tmp_path):
    (name,) = given
    with pytest.raises(ValueError, match=f'{name}=.*would not be read.*data=NAME'): check(make_config(given))
    stored = make_config({**given, 'run': str(tmp_path), 'resume': True})
    (tmp_path / 'params.yaml').write_text(yaml.safe_dump(flat(stored)))
    if name != 'path': check(stored)                                   # begun before this was refused: as it was


@pytest.mark.parametrize('given, said', [
    ({'data': 'nq', 'world': {'size': 60}}, "data='tiny'"),
    ({'data': 'gsm8k', 'protocol': 'direct', 'corpus': 'http://localhost:1'}, 'without a search')])
def test_other_data_refuse_what_they_do_not_read(given, said):
    with pytest.raises(ValueError, match=f'{said}.*would not be read'): check(make_config({**given, 'model': 'a/b'}))


def test_an_own_model_in_the_tiny_world_is_refused_before_the_ceiling_is_played():
    "A TypeError of the scripted player's."
    s = make_config({'test_questions': 2, 'dev_questions': 1, 'questions': 1, 'world': {'size': 60}})
    worlds = staging.tiny_worlds(s.world, s.sizes, 0)
    assert staging._tiny_environments(s, worlds, tiny_tokenizer())
    with pytest.raises(ValueError, match="model='tiny'.*data=NAME"):
        staging._tiny_environments(s, worlds, byte_tokenizer())
