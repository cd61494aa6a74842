"A chat template that prints today's date makes another prompt every day under the same settings."
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_rl.protocol import PLAIN, PROTOCOLS, Chat, byte_tokenizer, prompt_hash

BODY = "{%- for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ 'assistant: ' if add_generation_prompt }}"
LLAMA = ('{%- if not date_string is defined %}{%- if strftime_now is defined %}'
         '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}'
         '{%- endif %}Today: {{ date_string }}\n' + BODY)
MISTRAL = 'Today is {{ strftime_now("%Y-%m-%d") }}.\n' + BODY


def chat(template, **options): return Chat(PROTOCOLS['tips'], byte_tokenizer(), template, options)


@pytest.mark.parametrize('template, name', [(LLAMA, 'date_string'), (MISTRAL, 'strftime_now')])
def test_a_template_that_prints_todays_date_is_refused_without_a_fixed_one(template, name):
    with pytest.raises(ValueError, match=f"today's date.*{name}"): chat(template)


@settings(max_examples=15)
@given(st.dates())
def test_a_fixed_day_is_the_one_that_is_printed_and_hashed(day):
    text = lambda c: c.tokenizer.decode(c.prompt_ids('Who?'))
    mistral, llama = chat(MISTRAL, strftime_now=str(day)), chat(LLAMA, date_string=str(day))
    assert f'Today is {day.strftime("%Y-%m-%d")}.' in text(mistral) and f'Today: {day}' in text(llama)
    assert mistral.options == {'strftime_now': str(day)}                              # what a manifest records
    other = chat(MISTRAL, strftime_now='1066-10-14')
    assert prompt_hash(mistral.protocol) == prompt_hash(other.protocol) and prompt_hash(mistral) != prompt_hash(other)
    assert prompt_hash(mistral) == prompt_hash(chat(MISTRAL, strftime_now=str(day)))


def test_a_template_that_names_the_function_and_prints_no_date_is_taken():
    assert chat("{%- if false %}{{ strftime_now('%Y') }}{%- endif %}" + BODY).pieces == chat(BODY).pieces
    assert prompt_hash(chat(PLAIN)) != prompt_hash(chat(BODY))
    with pytest.raises(ValueError, match='strftime_now'): chat(MISTRAL, strftime_now='today')
