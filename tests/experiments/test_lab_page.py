"99_lab: the page of the stored lab, and that what it says of the papers' ideas is in the stored numbers."
import math
from pathlib import Path

import numpy as np
import pytest
from papermilled import papermill, shown

from credit_rl.lab import CHARTS, lab_table

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope='module')
def steps(): return lab_table(ROOT / 'runs' / 'lab').set_index(['world', 'rule'])


def test_true_credit_pays_by_the_number_of_independent_turns(steps):
    "Nothing with one turn; more than twice with sixteen; the logarithm of the ratio grows by .3 to .6 of that of K."
    known = [k for k in (1, 2, 4, 8, 16, 32) if not math.isnan(steps.steps[f'parts {k}', 'exact'])]
    ratios = [steps.steps[f'parts {k}', 'exact'] for k in known]
    assert abs(ratios[0] - 1) < .1 and steps.steps['parts 16', 'exact'] >= 2.2
    assert .3 < np.polyfit(np.log(known), np.log(ratios), 1)[0] < .6


def test_near_misses_pay_where_right_is_rare(steps):
    for rule in ('tspo', 'igpo'):
        assert steps.steps['near miss 0.025', rule] >= 1.15 and steps.verdict['near miss 0.025', rule] == 'ahead'
        assert steps.low['near miss 0.3', rule] <= 1.1 and steps.verdict['near miss 0.3', rule] == 'not told apart'


def test_the_page_is_made_of_the_stored_folder(tmp_path):
    code, said, page = papermill(tmp_path / 'report.ipynb', settings={'folder': str(ROOT / 'runs' / 'lab')}, cwd=ROOT,
                                 notebook='99_lab')
    assert code == 0, said
    assert len(shown(page, 'image/png')) == len(CHARTS)
    texts = '\n'.join(map(str, shown(page, 'text/markdown')))
    assert 'expected ratios lie in the interval' in texts and 'independent parts ×1.00 at 1' in texts
    assert 'near miss 0.025' in str(shown(page, 'text/plain')[0])
