"""The benches run, on toys: what they print is ratios of what was measured."""
import json

import pytest


@pytest.mark.parametrize('case', ['search', 'scoring', 'loop-tiny'])
def test_a_bench_of_peers_keeps_ratios_of_what_was_measured(root, run_python, tmp_path, case):
    out = tmp_path / 'result.json'
    said = run_python(root / 'tests' / 'bench' / 'bench_peers.py', case, '--small', '--repeats', '1', '--out', out)
    rows = json.loads(out.read_text())['rows']
    assert rows and all(row['case'] == case.replace('-', ' ') for row in rows), said   # says what was left out, and why
    for row in rows:
        assert f"{row['case']}, {row['peer']} / credit_rl" in said
        for name, (ratio, low, high) in row['ratios'].items():
            # a toy may need no more than its start did, so that a side has 0 bytes above it
            assert low == ratio == high and (ratio > 0 or name == 'bytes above the start'), (name, row)
            ours, theirs = row['credit_rl'][name][0], row['theirs'][name][0]
            assert ratio == pytest.approx(theirs / max(1, ours) if 'bytes' in name else theirs / ours)
