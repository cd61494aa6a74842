"""The conformance vectors: the stored file is ours, others can check themselves, and altered numbers are found."""
import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from credit_rl import conformance
from credit_rl.advantages import rloo
from credit_rl.tspo import selective_advantages
from credit_rl.groups import at_last_turn, group_normalize
from credit_rl.information_gain import igpo_advantages
from credit_rl.methods import METHODS
from credit_rl.parts import to_tokens
from credit_rl.carl import segment_advantages

ROOT = Path(__file__).resolve().parents[2]
STORED, CHECKER = (ROOT / 'data' / 'conformance' / name for name in ('vectors_v1.json', 'check.py'))


@pytest.fixture(scope='module')
def check():
    spec = importlib.util.spec_from_file_location('conformance_check', CHECKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='module')
def data(check): return check.read(STORED)


def tensors(inputs):
    "An input as tensors: outcome, table of turn rewards, turn_mask, groups, and tokens of turn values."
    number = lambda x: torch.tensor([[float('nan') if v is None else v for v in row] for row in x], dtype=torch.float32)
    outcome, turns = number([inputs['outcome']])[0], number(inputs['turn_rewards'])
    mask = torch.arange(turns.shape[1]) < torch.tensor(inputs['turn_counts'])[:, None]
    gone = outcome.isnan() | turns.isnan().any(1)
    outcome, turns = torch.where(gone, torch.nan, outcome), torch.where(gone[:, None], torch.nan, turns)
    spread = lambda table: to_tokens(table.nan_to_num(), torch.tensor(inputs['token_turns']),
                                     torch.tensor(inputs['row_trajectory'])).tolist()
    return outcome, turns, mask, torch.tensor(inputs['groups']), spread


def by_formula(case, inputs):
    "The case by the formula itself, on tensors of turns: nothing of `assign`, of layouts or of parts."
    outcome, turns, mask, groups, spread = tensors(inputs)
    o, everywhere = case['options'], lambda x: x[:, None] * mask
    if case['sampling'] != 'all': return None
    if case['rule'] == 'group':
        return spread(everywhere(group_normalize(outcome + turns.sum(1), groups, ddof=o['ddof'], eps=o['eps'])))
    if case['rule'] == 'rloo': return spread(everywhere(rloo(outcome + turns.sum(1), groups)))
    if case['rule'] == 'turns':
        right = (outcome >= 1).float()
        return spread(selective_advantages(outcome[:, None] * mask + turns, outcome, right, mask, groups, o['strategy'],
                                           o['ddof'], o['eps']))
    if case['rule'] == 'accumulate':
        table = torch.where(outcome.isnan()[:, None], torch.nan, turns + at_last_turn(outcome.nan_to_num(), mask))
        return spread(igpo_advantages(table, mask, groups, o['gamma'], o['norm'], o['ddof'], o['eps'], o['variant'],
                                      o['parts']))
    if case['rule'] == 'smdp':
        values, at = torch.tensor(inputs['values']), torch.tensor(inputs['token_turns'])
        table = torch.full(mask.shape, torch.nan)
        for r, i in enumerate(inputs['row_trajectory']):
            for k in set(at[r].tolist()) - {-1}: table[i, k] = values[r, (at[r] == k).nonzero()[0, 0]]
        return spread(segment_advantages(table, mask, outcome, o['lam']))


def test_formulas_on_turns_agree_with_the_file(check, data):
    found = check.check(data, by_formula)
    assert {name.split(':')[0] for name in found} >= {'grpo', 'rloo', 'tspo', 'igpo', 'igpo-ig', 'carl'}
    assert len(found) > 40 and not any(found.values()), {k: v for k, v in found.items() if v}


def test_by_hand(data):
    "GRPO and TSPO say nothing where nothing differs; CARL at λ = 0 sums to R − V(s_0); NaN gets nothing."
    case = {c['name']: c for c in data['cases']}
    for name in ('grpo', 'tspo'): assert not any(map(any, case[f'{name}: all right']['advantages']))
    assert any(map(any, case['tspo: all wrong']['advantages']))
    inputs, carl = data['inputs']['usual'], case['carl: usual']['advantages']
    for row, turns, values, outcome in zip(carl, inputs['token_turns'], inputs['values'], inputs['outcome']):
        once = {k: a for a, k in zip(row, turns) if k >= 0}
        assert sum(once.values()) == pytest.approx(outcome - values[turns.index(0)], abs=1e-6)
    for c in data['cases']:
        if c['input'] == 'missing': assert not any(c['advantages'][1]) and not any(c['advantages'][2]), c['name']


def test_the_checker_imports_nothing_of_ours():
    tops = list(ast.walk(ast.parse(CHECKER.read_text())))
    names = [a.name for n in tops if isinstance(n, ast.Import) for a in n.names]
    names += [n.module for n in tops if isinstance(n, ast.ImportFrom)]
    assert names and set(names) <= set(sys.stdlib_module_names) | {'numpy'}
    assert sum(bool(line.strip()) for line in CHECKER.read_text().splitlines()) <= 60


def run(folder, *arguments):
    return subprocess.run([sys.executable, str(CHECKER), *map(str, arguments)], cwd=folder, capture_output=True,
                          text=True, timeout=120)


def test_the_checker_finds_an_altered_number(tmp_path, data):
    "By the command that others type. One in the file itself: 81_conformance."
    answers = {case['name']: case['advantages'] for case in data['cases']}
    (tmp_path / 'answers.json').write_text(json.dumps(answers))
    (tmp_path / 'mine.py').write_text('import json\nanswers = json.load(open("answers.json"))\n'
                                      'def advantages(case, inputs): return answers.get(case["name"])\n')
    good = run(tmp_path, STORED, 'mine:advantages')
    assert good.returncode == 0 and f'{len(answers)} of {len(answers)} cases answered, 0 differ' in good.stdout, good
    answers['tspo: usual'][3][1] += .001
    del answers['grpo: usual']
    (tmp_path / 'answers.json').write_text(json.dumps(answers))
    bad = run(tmp_path, STORED, 'mine:advantages')
    assert bad.returncode == 1 and 'cases answered, 1 differ' in bad.stdout and 'row 3, token 1' in bad.stdout, bad


def test_answers_of_another_shape_and_numbers_that_are_none_differ(check):
    assert check.differences([[1., 2.]], [[1.]], 1e-4) and check.differences([[1.]], [[float('nan')]], 1e-4)
    assert not check.differences([[1e6]], [[1e6 + 10]], 1e-4) and check.differences([[0.]], [[2e-4]], 1e-4)


def test_a_case_that_depends_on_a_draw_is_refused(monkeypatch):
    "VSPO with two groups to draw from and a silent one: another program would draw another."
    inputs = ('', ('010', '010', '010', '010', '010', '010', '010', '010'), None, (0, 0, 1, 1, 2, 2, 3, 3),
              (1, 0, 1, 0, 0, 0, 0, 0), ((0,),) * 8)
    monkeypatch.setattr(conformance, 'INPUTS', {'drawn': inputs})
    monkeypatch.setattr(conformance, 'METHODS', {'vspo': METHODS['vspo']})
    with pytest.raises(ValueError, match='depends'): conformance.cases()
