"""What `make quick` chooses, and what the workers of `make test` take at once."""
from types import SimpleNamespace

import conftest
import pytest
import quick


def stems(paths):
    return {p.stem for p in paths}


def test_changed_files_are_known_by_their_modules():
    changed = ['nbs/1_rules/42_vspo.ipynb', 'credit_rl/vspo.py', 'credit_rl/_modidx.py', 'nbs/index.ipynb',
               'tests/tools/hub.py', 'nbs/90_train.ipynb', 'README.md', 'runs/LOG.md']
    assert quick.names_of(changed) == ({'vspo', 'index'}, {'hub'}, {'train'})


def test_a_change_is_looked_at_where_its_module_is_imported():
    notebooks, files = quick.chosen({'vspo'}, set())
    assert {'42_vspo', '60_methods'} <= stems(notebooks) and '40_advantages' not in stems(notebooks)
    assert {'test_vspo', 'test_architecture'} <= stems(files) and 'test_prs' not in stems(files)
    assert not [name for name in stems(notebooks) if '90' <= name < 'a']


def test_a_helper_of_tests_brings_those_that_import_it():
    notebooks, files = quick.chosen(set(), {'hub'})
    assert stems(notebooks) <= {'000_tour'} and {'test_datasets', 'test_evaluate'} <= stems(files)


@pytest.fixture(scope='module')
def shared():
    return 'set up once'


def test_what_shares_a_fixture_stays_with_its_file(request, shared):
    assert not conftest.is_alone(request.node)


def test_what_shares_nothing_may_go_alone(request, root, tmp_path):
    assert conftest.is_alone(request.node)


def test_long_tests_that_share_nothing_are_units_of_their_own():
    recorded = {'a.py::long': (60., True), 'a.py::shares': (60., False), 'a.py::short': (1.5, True)}
    units = {name: conftest.unit_of(name, recorded) for name in [*recorded, 'a.py::new']}
    assert units == {'a.py::long': 'a.py::long', 'a.py::shares': 'a.py', 'a.py::short': 'a.py', 'a.py::new': 'a.py'}


def test_what_below_leaves_out_is_what_from_takes():
    "Tests that took so long or longer, and those marked as sharers of something that takes long."
    item = lambda name, *marks: SimpleNamespace(nodeid=name, get_closest_marker=lambda mark: mark in marks or None)
    items, recorded = [item('brief'), item('new'), item('long'), item('shares', 'long')], {'brief': 19.9, 'long': 20.}
    assert [i.nodeid for i in items if conftest.takes_long(i, recorded, 20)] == ['long', 'shares']


FORKS = """
import multiprocessing, os, conftest
before, own = conftest.cpu_seconds(), sum(os.times()[:4])
child = multiprocessing.get_context('forkserver').Process(target=sum, args=(range(2 * 10 ** 7),))
child.start()
child.join()
print(conftest.cpu_seconds() - before, sum(os.times()[:4]) - own)
"""


def test_what_another_process_forks_for_us_is_counted(run_python, root):
    "Its children are waited for by the forkserver alone, so our own clocks never hear of them."
    said = run_python('-c', FORKS, env={'PYTHONPATH': str(root / 'tests')})
    counted, own = map(float, said.split()[-2:])
    assert counted > 2 * own and counted > .1


LOSES = '''
import os, pytest, time
@pytest.mark.parametrize('i', range(4))
def test_it(i):
    time.sleep(.2)
    if __name__ == 'test_a' and i == {lost}: os._exit(1)
'''


@pytest.mark.parametrize('lost', [1, 3])
def test_a_lost_worker_fails_its_test_and_the_run_ends(run_python, root, tmp_path, lost):
    "The second test of its file, or the last, after which nothing of the file is left to deal out; each runs once."
    for name in 'abc': (tmp_path / f'test_{name}.py').write_text(LOSES.format(lost=lost))
    (tmp_path / 'pytest.ini').write_text('[pytest]')
    said = run_python('-m', 'pytest', tmp_path, '-n', 2, '--dist', 'loadscope', '--no-loadscope-reorder',
                      '--max-worker-restart', 1, '-p', 'conftest', '-p', 'no:cacheprovider', cwd=tmp_path, code=1,
                      env={'PYTHONPATH': str(root / 'tests')})
    assert f"crashed while running 'test_a.py::test_it[{lost}]'" in said and '1 failed, 11 passed' in said
