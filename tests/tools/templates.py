"""Chat templates of published model families, and tokenizers that speak them: a byte-level BPE trained on the spot,
with the family's special tokens.

`fixtures/templates/` holds texts of our own with the families' markup. TRL brings the published texts themselves;
where it is installed, `PUBLISHED` has them too, and what is proved of ours is proved of theirs.
"""
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from credit_rl.protocol import byte_tokenizer

FOLDER = Path(__file__).resolve().parents[1] / 'fixtures' / 'templates'
_found = importlib.util.find_spec('trl')
TRL = Path(_found.submodule_search_locations[0]) / 'chat_templates' if _found else None

# what the byte-level BPE learns its merges from: tags, markup, line breaks, two languages
TEXTS = [
    '<think>\nThe film is directed by Michael Curtiz, who was born in '
    'Budapest.\n</think>\n\n<tool_call>\n{"name": "search", "arguments": '
    '{"query_list": ["who directed Casablanca", "when"]}}\n</tool_call>', '<search> capital of Hungary '
    '</search>\n\n<information>Doc 1 '
    '(Title: "Budapest") '
    'Budapest is the capital of Hungary.</information>\n\n', '<tool_response>\nDoc 1 (Title: "Rabat") Rabat is a '
    'city.\n</tool_response>', '<answer> Beijing </answer>', 'system\n', 'user\n', 'assistant\n',
    'Die Stadt ist schön, und der Fluß auch.', '東京 は 日本 の 首都 です'
] * 3


@dataclass(frozen=True)
class Family:
    "How one family's tokenizer differs."
    eos: str
    special: tuple
    bos: str = None


FAMILIES = {'qwen2_5': Family('<|im_end|>', ('<|im_start|>',)), 'qwen3': Family('<|im_end|>', ('<|im_start|>',)),
            'llama3_1': Family('<|eot_id|>', ('<|start_header_id|>', '<|end_header_id|>'), '<|begin_of_text|>'),
            'plain': Family('<|endoftext|>', ())}
PUBLISHED = [name for name in FAMILIES if TRL and (TRL / f'{name}.jinja').is_file()]


def template_text(name, published=False):
    "The jinja text of a family's template: ours, or the one that TRL brings."
    return ((TRL if published else FOLDER) / f'{name}.jinja').read_text(encoding='utf-8')


@lru_cache
def family_tokenizer(name, published=False, merges=400):
    "A tokenizer with a family's special tokens and template, and `merges` trained merges."
    family = FAMILIES[name]
    return byte_tokenizer(template_text(name, published), eos=family.eos, bos=family.bos, special=family.special,
                          texts=TEXTS, merges=merges)
