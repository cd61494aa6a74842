"CARL's answers and programs as models write them, its prompts from files, and how much a program may print."
import pytest

from credit_rl.environment import Conversation, make_environment
from credit_rl.metrics import numeric_match, plain_latex
from credit_rl.outcome import extract_answer
from credit_rl.protocol import PROTOCOLS, find_box, byte_tokenizer, parse
from credit_rl.readers import Passage
from credit_rl.retrieval import BM25
from credit_rl.settings import check, make_config
from credit_rl.trajectory import Result
from credit_rl.warmup import with_prompt

CARL = PROTOCOLS['carl']


def test_latex_around_words_is_markup():
    for wrapper in ('text', 'textbf', 'textit', 'mathrm', 'mbox', 'emph', 'underline', 'texttt', 'mathit', 'textsf',
                    'textsc', 'mathtt', 'fbox', 'boldsymbol', 'operatorname'):
        said = rf'So it is \boxed{{\{wrapper}{{Paris}}}}.'
        assert find_box(said) == extract_answer(said, 'boxed') == parse(CARL, said).answer == 'Paris'


def test_it_may_be_nested_and_formulas_stay():
    for inside, wanted in (
            (r'\text{\textbf{Paris}}', 'Paris'), (r'\textbf{New} \emph{York}', 'New York'), (r'\$5', '$5'),
            (r'\text{Marks \& Spencer}', 'Marks & Spencer'), (r'5\text{km}', '5 km'), (r'\text{USD}5', 'USD 5'),
            (r'\frac{1}{2}', r'\frac{1}{2}'), (r'{a}', '{a}'), ('New~York', 'New York'), (r'New\ York', 'New York'),
            (r'{\bf Paris}', 'Paris'), (r'\underline{\texttt{New~York}}', 'New York'), (r'1\,234', '1,234'),
            (r'a\~b', r'a\~b')):
        assert plain_latex(inside) == find_box(rf'\boxed{{{inside}}}') == wanted
    for inside, gold in ((r'\frac{1}{2}', '.5'), (r'1\,234', '1234'), (r'5\text{ km}', '5'), (r'\text{USD}5', '5'),
                         (r'\$5', '5'), (r'\mathbf{5}', '5')):
        assert numeric_match(find_box(rf'\boxed{{{inside}}}'), [gold]) == 1
    assert parse(CARL, r'\boxed{\text{ }}').error


def passages(words):
    return [Passage(str(i), f'Page {i}', ' '.join(['needle', *['haystack'] * words])) for i in range(7)]


def test_seven_passages_of_130_words_are_no_error():
    program = ['print(search("needle"))']
    env = make_environment(byte_tokenizer(), BM25(passages(130)), Conversation(protocol='carl', passages=7))
    (text, result), = env.tool.call(program)
    assert result is Result.OK and len(text) > 7 * 130 * 9 > 4000
    how = Conversation(protocol='carl', passages=7, program={'output_chars': 4000})
    (text, result), = make_environment(byte_tokenizer(), BM25(passages(130)), how).tool.call(program)
    assert result is Result.ERROR and 'longer than 4000 characters' in text


def test_the_other_prompts_come_from_files(tmp_path):
    (tmp_path / 'direct.txt').write_text('Answer the following question directly.')
    (tmp_path / 'forced.txt').write_text('You must use a Python code block.')
    (tmp_path / 'optional.txt').write_text('You may optionally use a Python code block.')
    files = {mode: str(tmp_path / f'{mode}.txt') for mode in ('direct', 'forced')}
    how = Conversation(protocol='carl', prompt_files={'others': files, 'system': str(tmp_path / 'optional.txt')})
    env = make_environment(byte_tokenizer(), BM25(passages(3)), how)
    said = {mode: with_prompt(env, mode).chat.protocol.system for mode in ('direct', 'forced', 'optional', 'multi-hop')}
    assert said == {'direct': 'Answer the following question directly.', 'forced': 'You must use a Python code block.',
                    'optional': 'You may optionally use a Python code block.',
                    'multi-hop': PROTOCOLS['carl-multi-hop'].system}


def test_prompts_that_there_are_not_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'optional'"):
        Conversation(protocol='carl', prompt_files={'others': {'optional': 'x'}})
    with pytest.raises(ValueError, match="protocol='tips'"):
        Conversation(protocol='tips', prompt_files={'others': {'direct': 'x'}})
    lost = dict(protocol='carl-tiny', method='carl', other_prompts={'direct': str(tmp_path / 'none.txt')})
    with pytest.raises(ValueError, match='system_prompt'): check(make_config(lost))
