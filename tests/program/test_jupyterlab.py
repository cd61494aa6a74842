"""Somebody works in JupyterLab: the tour runs in it, and a line that is edited there is a diff of that line."""
import difflib
import json
import runpy
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest
from browser import find_browser, open_lab, open_tab
from started import copied

from credit_rl.parameters import notebooks_in

ROOT = Path(__file__).resolve().parents[2]
SAVED = runpy.run_path(str(ROOT / 'docs' / 'saved.py'))   # its functions, by name
COPIED = ('nbs', 'credit_rl', 'docs', 'data/tiny_base', 'settings.ini', '.gitignore')


def git(folder, *words):
    identity = ['-c', 'user.name=a', '-c', 'user.email=a@b.org']
    return subprocess.run(['git', *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path):
    "A clone of what the tour needs, all of it committed."
    copy = copied(COPIED, tmp_path / 'clone')
    git(copy, 'init', '-q')
    git(copy, 'add', '-A')
    git(copy, 'commit', '-q', '-m', 'all')
    return copy


def saved_by_jupyterlab(text, line):
    "A notebook's text as JupyterLab's own writer leaves it after each cell was run and the last got another line."
    notebook = nbformat.reads(text, as_version=4)
    for i, cell in enumerate(notebook.cells):
        cell.metadata['trusted'] = True
        if cell.cell_type == 'code': cell.execution_count = i
        for output in cell.get('outputs', ()):
            if 'execution_count' in output: output.execution_count = i
    notebook.metadata['language_info'] = {'name': 'python', 'version': '3.99.1'}
    notebook.cells[-1].source += line
    return nbformat.writes(notebook)


@pytest.mark.parametrize('name', ['000_tour', '1_rules/36_true_credit', '7_elsewhere/82_trl_trainer'])
def test_what_is_saved_has_the_form_that_it_had(root, name):
    text = (root / 'nbs' / f'{name}.ipynb').read_text(encoding='utf-8')
    new = SAVED['as_before'](saved_by_jupyterlab(text, ' More.'), text)
    lines = difflib.ndiff(text.splitlines(), new.splitlines())
    gone, come = [line for line in lines if line[0] in '+-']
    assert gone[0] == '-' and come == f'+{gone[1:-1]} More."'
    assert SAVED['as_before'](text, text) == text


def test_a_new_notebook_is_clean_and_a_changed_output_is_kept():
    pieces = [nbformat.v4.new_output('stream', name='stdout', text=text) for text in ('a\n', 'b\n')]
    output = nbformat.v4.new_output('execute_result', {'text/plain': '2', 'image/png': 'abc\n'}, execution_count=7)
    about = dict(id='a', execution_count=7, metadata={'scrolled': True, 'tags': ['x']}, outputs=[*pieces, output])
    saved = nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell('1 + 1', **about)]))
    [cell] = json.loads(SAVED['as_before'](saved, json.dumps(SAVED['EMPTY'])))['cells']
    assert cell['metadata'] == {'tags': ['x']} and cell['execution_count'] is None and cell['source'] == ['1 + 1']
    printed, shown = cell['outputs']
    assert printed['text'] == ['a\n', 'b\n'] and shown['data'] == {'text/plain': ['2'], 'image/png': 'abc'}
    [again] = json.loads(SAVED['as_before'](saved.replace('"2"', '"3"'), saved))['cells']
    assert again['outputs'][1]['data']['text/plain'] == ['3'] and again['metadata'] == {'scrolled': True, 'tags': ['x']}


def test_make_export_writes_back_what_was_saved(checkout, run_python):
    "A notebook saved by any program, and one that is new; what is as the last commit has it stays untouched."
    path, new = checkout / 'nbs' / '1_rules' / '32_tspo.ipynb', checkout / 'nbs' / '1_rules' / '44_mine.ipynb'
    path.write_text(saved_by_jupyterlab(path.read_text(encoding='utf-8'), ' More.'), encoding='utf-8')
    new.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell('1', execution_count=3)])))
    copies = checkout / 'nbs' / '1_rules' / '.ipynb_checkpoints'
    copies.mkdir()
    shutil.copy(path, copies / '32_tspo-checkpoint.ipynb')
    run_python('docs/saved.py', cwd=checkout, env={'PYTHONPATH': str(checkout)})
    assert git(checkout, 'diff', '--numstat').split() == ['1', '1', 'nbs/1_rules/32_tspo.ipynb']
    assert json.loads(new.read_text())['cells'][0]['execution_count'] is None
    assert new in notebooks_in(checkout / 'nbs') and not [p for p in notebooks_in(checkout) if 'checkpoint' in p.name]


@pytest.mark.long
def test_the_tour_in_a_real_jupyterlab(checkout, tmp_path):
    "Beside its copies, no error and none of them in the map; saved twice, git sees an edited line only."
    find_browser()
    book = '[...window.jupyterapp.shell.widgets("main")].find(widget => widget.context && widget.context.isReady)'
    cells = f'{book}.content.widgets.map(cell => cell.model)'
    how = ('--config', str(checkout / 'docs' / 'saved.py'), '--expose-app-in-browser')
    with open_lab(checkout / 'nbs', tmp_path, *how, PYTHONPATH=str(checkout), OMP_NUM_THREADS='1') as (url, _), \
            open_tab(tmp_path, seconds=240) as tab:
        tab.call('Emulation.setFocusEmulationEnabled', enabled=True)

        def open_notebook(path):
            tab.open(f'{url}lab/tree/{path}?token=x&reset', f'window.jupyterapp && {book}')
            tab.ask(f'{book}.sessionContext.ready.then(() => window.jupyterapp.shell.activateById({book}.id))')
            tab.wait('window.jupyterapp.shell.currentWidget')

        do = lambda command: tab.ask(f'window.jupyterapp.commands.execute("{command}").then(() => null)')
        open_notebook('000_tour.ipynb')
        do('notebook:run-all-cells')
        tab.wait(f'{cells}.filter(cell => cell.type == "code").every(cell => cell.executionCount)')
        assert tab.ask(f'{cells}.flatMap(cell => cell.type == "code" ? cell.outputs.toJSON() : [])'
                       '.filter(output => output.output_type == "error")') == []
        do('docmanager:save')
        assert (checkout / 'nbs' / '.ipynb_checkpoints').is_dir()
        ran = json.loads((checkout / 'nbs' / '000_tour.ipynb').read_text(encoding='utf-8'))['cells']
        shown = json.dumps(ran[-2]['outputs'])
        assert '32_tspo' in shown and 'checkpoint' not in shown

        open_notebook('1_rules/32_tspo.ipynb')
        for word in ('One.', 'Two.'):
            tab.ask(f'(cell => cell.sharedModel.setSource(cell.sharedModel.getSource() + " {word}"))({cells}.at(-1))')
            do('docmanager:save')
            assert tab.ask('[...document.querySelectorAll(".jp-Dialog")].map(dialog => dialog.innerText)') == []
        assert git(checkout, 'diff', '--numstat', 'nbs/1_rules').split() == ['1', '1', 'nbs/1_rules/32_tspo.ipynb']
        assert 'One. Two.' in git(checkout, 'diff', 'nbs/1_rules')
