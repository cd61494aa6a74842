"""A slice of the campaign of faults, tests/tools/campaign.py: a few of several kinds, on the jobs that cost least."""
import json
from pathlib import Path

import pytest

pytest.importorskip('psutil', reason='psutil is not installed')
import campaign                                                                                  # noqa: E402

KINDS = ('kill', 'interrupt', 'cut', 'stop', 'disk')


@pytest.mark.long          # in processes of a process's own, which no recorded duration counts
def test_faults_at_random_moments_lose_nothing(run_python, tmp_path):
    said = run_python('tests/tools/campaign.py', '--faults', 4, '--seed', 0, '--stop', 1, '--out', tmp_path, '--jobs',
                      'index', 'training', '--kinds', *KINDS, env={'OMP_NUM_THREADS': '1'})
    rows = campaign.read_rows(tmp_path / 'faults.jsonl')
    assert len(rows) == 4 and len({row['kind'] for row in rows}) >= 3
    assert {row['outcome'] for row in rows} <= {'same', 'told'}, said
    assert '| all | 4 |' in said


def test_a_campaign_goes_on_where_it_ended(tmp_path, monkeypatch):
    "Faults that are over are not made again: here all are."
    monkeypatch.setattr(campaign, 'own_mounts', lambda: False)                # they are this process's own for good
    row = {'job': 'training', 'kind': 'kill', 'outcome': 'same', 'note': '', 'seconds': 1}
    rows = [{'number': n, **row} for n in (0, 1)]
    (tmp_path / 'faults.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    (tmp_path / 'shared').mkdir()
    (tmp_path / 'shared' / 'corpus.jsonl').write_text('')
    assert campaign.main(['--faults', '2', '--out', str(tmp_path), '--jobs', 'training', '--kinds', 'kill']) == 0
    assert campaign.read_rows(tmp_path / 'faults.jsonl') == rows


def place_of(tmp_path, **files):
    place = campaign.Place(tmp_path / 'work', tmp_path, {})
    place.run.mkdir(parents=True, exist_ok=True)
    for name, text in files.items(): (place.run / name.replace('__', '.')).write_text(text)
    return place


def test_results_are_compared_without_clocks_and_places(tmp_path):
    place = place_of(tmp_path, metrics__jsonl='{"step": 1, "loss": 0.5, "seconds": 3}\n')
    wanted = campaign.results(place)
    place_of(tmp_path, metrics__jsonl='{"step": 1, "loss": 0.5, "seconds": 4.5}\n')
    assert campaign.results(place) == wanted
    place_of(tmp_path, metrics__jsonl='{"step": 1, "loss": 0.5000001, "seconds": 3}\n')
    assert campaign.differing(campaign.results(place), wanted) == 'metrics.jsonl other'
    (place.run / 'metrics.jsonl').unlink()
    assert campaign.differing(campaign.results(place), wanted) == 'metrics.jsonl missing'


def test_clocks_of_a_table_are_left_out(tmp_path):
    table = '| method | final EM | minutes |\n| --- | ---: | ---: |\n| grpo | {em} | {minutes} |\n'.format
    wanted = campaign.results(place_of(tmp_path, table__md=table(em=.5, minutes=3)))
    assert campaign.results(place_of(tmp_path, table__md=table(em=.5, minutes=4))) == wanted
    other = campaign.results(place_of(tmp_path, table__md=table(em=.6, minutes=3)))
    assert campaign.differing(other, wanted) == 'table.md other'


def test_what_a_checkpoint_covers_must_stay(tmp_path):
    place = place_of(tmp_path, metrics__jsonl=''.join(f'{{"step": {n}, "seconds": {n}.5}}\n' for n in range(4)))
    assert campaign.complete(place.run) == {}
    (place.run / 'checkpoints' / 'step-000002').mkdir(parents=True)
    assert sorted(campaign.complete(place.run)) == [f'metrics.jsonl, step {n}' for n in range(3)]


def test_faults_are_drawn_by_their_number():
    pairs = campaign.pairs_of(['training', 'index'], campaign.KINDS, True)
    drawn = [campaign.drawn(n, 0, pairs) for n in range(300)]
    assert drawn == [campaign.drawn(n, 0, pairs) for n in range(300)] and set(drawn) == set(pairs)
    assert ('index', 'cut') not in pairs and ('training', 'child dies') not in pairs
    assert not any(kind in ('disk', 'read-only') for _, kind in campaign.pairs_of(['training'], campaign.KINDS, False))
    assert 170 < sum(job == 'training' for job, _ in drawn) < 230                         # weights of 6 and 3


@pytest.mark.skipif(not Path('/proc').exists(), reason='needs /proc')
def test_mounts_are_counted():
    assert campaign.mounted('/') >= 1 and campaign.mounted('/no/such/place') == 0
