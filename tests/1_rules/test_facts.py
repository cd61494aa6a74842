"Each method's page opens with a box of quick facts, and what it says is what the table of methods says."
import importlib
import json
import re
from pathlib import Path

import pytest

from credit_rl import methods
from credit_rl.methods import METHODS, get_method
from credit_rl.parts import Row

RULES = Path(__file__).resolve().parents[2] / 'nbs' / '1_rules'


def read_box(path):
    "The box of a page: dict; None where its second cell is none."
    cell = json.loads(path.read_text(encoding='utf-8'))['cells'][1]
    rows = re.findall(r'^\| ([^|]+) \| (.*) \|$', ''.join(cell['source']), re.M)
    return dict(rows) if cell['cell_type'] == 'markdown' and rows and rows[0][0] == 'method' else None


BOXES = {path.stem: box for path in sorted(RULES.glob('*.ipynb')) if (box := read_box(path))}


def test_every_page_that_brings_a_method_of_a_paper_has_a_box():
    pages = {path.stem.partition('_')[2]: path.stem for path in RULES.glob('*.ipynb')}
    bring = {m.__name__.rpartition('.')[2] for m in methods.MODULES if any(type(p) is Row for p in m.PARTS)}
    assert {pages[name] for name in bring & set(pages)} - set(BOXES) == {'40_advantages'}   # eight, compared


@pytest.mark.parametrize('stem', BOXES)
def test_a_box_says_what_the_table_of_methods_says(stem):
    box, module = BOXES[stem], importlib.import_module(f'credit_rl.{stem.partition("_")[2]}')
    assert list(box) == ['method', 'equation', 'looks at', 'cost of a step', 'options', 'when it pays', 'paper']
    named = [get_method(name) for name in re.findall('`([^`]+)`', box['method'])]
    assert {p.name for p in module.PARTS if type(p) is Row} & set(METHODS) <= {m.name for m in named}
    brought = [p for p in module.PARTS if any(p in m.parts for m in named)]
    assert box['equation'] == '<br>'.join(f'`{p.name}`: ${p.equation}$' for p in brought)
    given = {p.name: re.findall(f'`{p.name}`: ([^;]*)', box['options']) for p in brought if p.options}
    for p in brought:
        if p.options: assert re.findall('`([^`]+)`', given[p.name][0]) == list(p.options)
        for name, option in p.options.items():
            said = 'none' if option.default is None else repr(option.default)
            assert f'`{name}` {said}' in given[p.name][0], (p.name, name)
    of_rows = [m.paper for m in named if m.name in METHODS]
    assert all(paper in box['paper'] for paper in of_rows or [p.paper for p in brought])
