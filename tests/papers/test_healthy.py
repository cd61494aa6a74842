"What a run looks like when it goes well: three lines in every file of runs/params, with their source."
import re
from pathlib import Path

import pytest
import yaml

from credit_rl.compare import plan_jobs
from credit_rl.evaluate import Evaluation
from credit_rl.studies.papers import paper_numbers
from credit_rl.prepare import make_warming
from credit_rl.settings import make_config
from credit_rl.runlog import MAY_CHANGE
from credit_rl.train import train
from notebooks import kept

ROOT = Path(__file__).resolve().parents[2]
FILES = {p.stem: p for p in kept(ROOT, 'runs/params/*.yaml')}
PAPERS = {'1': 'tips', '2': 'tspo', '3': 'igpo', '4': 'prs', '5': 'carl'}


def lines_of(name): return yaml.safe_load(FILES[name].read_text())['healthy'].splitlines()


def unsaid(line):
    "What a line says with numbers behind its last source."
    tail = re.split(r'\([^()]*\b(?:tables?|figure|appendix|runs)\b[^()]*\)', line)[-1]
    return re.findall(r'(?<![\w.])\.?\d[^;]*', re.sub(r'(at )?step 20', '', tail))


@pytest.mark.parametrize('name', FILES)
def test_every_file_says_in_three_lines_what_one_sees_when_it_goes_well(name):
    lines = lines_of(name)
    assert len(lines) == 3 and [unsaid(line) for line in lines] == [[], [], []]
    either = r'\(.*(table|figure|appendix|runs/)|nobody says|not kept|no run is kept'
    assert all(re.search(either, line) for line in lines)


def test_a_number_without_a_source_is_noticed():
    assert unsaid('reward: .54 at step 20') == ['.54 '] and unsaid('turns: nobody says') == []
    assert unsaid('reward: .54 (table 1); 30 s a step') == ['30 s a step']


def cited(line):
    "(numbers of tables, the numbers before them that belong to them) of a line."
    for said, tables in re.findall(r'([^()]*)\((tables? \d+(?: and \d+)*)\)', line):
        plain = re.sub(r'steps? [\d,]+( to [\d,]+)?|k = \d|[\d.]+(?=B\b)|2Wiki|over 2,100.*1,900', '', said)
        yield re.findall(r'\d+', tables), re.findall(r'(?<![\w.,])\d*[.,]?\d+(?!\w|,\d)', plain)


@pytest.mark.parametrize('name', [n for n in FILES if re.search(r'\(paper|paper \(', FILES[n].read_text()[:120])])
def test_the_numbers_are_those_of_the_papers_tables(name):
    "Up to their rounding, and shares may be percent; tables of settings are not kept as numbers."
    (paper,) = {PAPERS[n] for n in re.findall(r'[(]?paper [(]?(\d)', FILES[name].read_text()[:200])}
    numbers = paper_numbers(paper)
    for tables, found in (pair for line in lines_of(name) for pair in cited(line)):
        kept = numbers[numbers.table.isin([f'table {n}' for n in tables])].value.dropna()
        for text in found if len(kept) else ():
            text = text.replace(',', '')
            half = .5 * 10 ** -len(text.partition('.')[2]) + 1e-9
            assert any(abs(v * scale - float(text)) <= half for v in kept for scale in (1, 100, .01)), (tables, text)


def test_a_dry_run_prints_them(tmp_path):
    lines, told = [], 'reward: up\nturns: three\nKL: low'
    train(dict(model=str(ROOT / 'data' / 'tiny_base'), run=str(tmp_path / 'run'), dry_run=True, healthy=told),
          say=lines.append)
    assert f'when it goes well:\n{told}' in lines and not (tmp_path / 'run').exists()


def test_they_change_nothing():
    "Of a run that is resumed, and of a comparison whose runs were made before the file had them."
    params = yaml.safe_load(FILES['sweep'].read_text())
    assert 'healthy' in MAY_CHANGE and 'healthy' not in plan_jobs(['tspo'], [201], params, 'runs/sweep')[0].settings
    assert make_config({'healthy': 'up'}).healthy == make_warming({'healthy': 'up'}).healthy == 'up'
    assert Evaluation(healthy='up').healthy == 'up' and make_config({}).healthy == ''
