"99_lab: the page of the stored lab, and that what it says of the papers' ideas is in the stored numbers."
from pathlib import Path

from papermilled import papermill, shown

from credit_rl.studies.lab import CHARTS

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_made_of_the_stored_folder(tmp_path):
    code, said, page = papermill(tmp_path / 'report.ipynb', settings={'folder': str(ROOT / 'runs' / 'lab')}, cwd=ROOT,
                                 notebook='99_lab')
    assert code == 0, said
    assert len(shown(page, 'image/png')) == len(CHARTS)
    texts = '\n'.join(map(str, shown(page, 'text/markdown')))
    assert 'expected ratios lie in the interval' in texts and 'independent parts ×1.00 at 1' in texts
    nearest, *_, targets, _, _, _ = map(str, shown(page, 'text/plain'))
    assert 'near miss 0.025' in nearest and targets.count('True') == 6 and targets.count('False') == 1
