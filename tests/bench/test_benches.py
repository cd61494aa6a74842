"""The bench of peers runs on a toy, and its ratios are of what was measured in one repeat."""
import json

import pytest
from bench_peers import compared


def test_a_bench_of_peers_says_what_it_measured(root, run_python, tmp_path):
    out = tmp_path / 'result.json'
    said = run_python(root / 'tests' / 'bench' / 'bench_peers.py', 'search', '--small', '--repeats', '1', '--out', out)
    rows = json.loads(out.read_text())['rows']
    assert rows and all(row['case'] == 'search' for row in rows), said       # says what was left out, and why
    for row in rows:
        assert f"{row['case']}, {row['peer']} / credit_rl" in said
        assert row['credit_rl']['clock seconds per query'][0] > 0 < row['theirs']['clock seconds per query'][0]


def test_ratios_are_of_the_same_repeat():
    "Median, lowest and highest of 3 / 1, 4 / 2, 4 / 4."
    runs = lambda *seconds: [dict(processor=s, clock=s, queries=10, peak=100 * s, before=50) for s in seconds]
    row = compared('search', 'peer', ('queries',), runs(1., 2., 4.), runs(3., 4., 4.))
    assert row['ratios']['processor seconds per query'] == pytest.approx([2., 1., 3.])
