"The site: its pages are made from the table of methods, and no link of it is dead."
import functools
import http.server
import importlib.util
import json
import os
import re
import shlex
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from credit_rl import api
from credit_rl.methods import METHODS, compose
from credit_rl.options import Option, flat
from credit_rl.parts import Row
from credit_rl.settings import Config, check, make_config
import build as site_build   # docs/build.py and what it is made of
import notebooks
import pages as site_pages
from browser import open_tab
from notebooks import kept
from links import dead_links, foreign_loads
from pages import SECTIONS, method_page, page_name, read_archive, stored_about

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / 'settings.ini').exists())
BUILT_WITH = ('mkdocs', 'material', 'mkdocs_jupyter', 'latex2mathml')    # the extra `docs`
without_docs = pytest.mark.skipif(not all(map(importlib.util.find_spec, BUILT_WITH)), reason="the extra 'docs' is "
                                  'not installed: make docs installs it')


def sections(page):
    "The sections of a page: dict title -> text."
    parts = re.split('^## (.*)\n', page, flags=re.M)
    return dict(zip(parts[1::2], map(str.strip, parts[2::2])))


# ---- pages of methods ----

@pytest.fixture(scope='module')
def archive(root):
    return read_archive(root)


@pytest.mark.long
@pytest.mark.parametrize('name', METHODS)
def test_every_method_has_a_page_in_the_one_form(name, archive):
    "With all sections, and a command that is accepted."
    method, found = METHODS[name], sections(method_page(METHODS[name], stored_about(METHODS[name], archive)))
    assert list(found) == list(SECTIONS) and all(found.values())
    assert all(f'$$\n{p.equation}\n$$' in found['Equation'] and p.paper in found['Equation'] for p in method.parts)
    assert all(f'| `{option}` |' in found['Options'] for option in method.options)
    assert all(p.differs.replace('31_potentials', '`31_potentials`') in found['How ours differs']
               for p in method.parts if p.differs and p.differs in method.differs)
    assert all(site_pages.SEEN[what] in found['What it sees'] for what in method.needs.forwards)
    settings = dict(word.split('=', 1) for word in shlex.split(re.search('credit-rl train (.*)', method_page(method))[1]))
    assert settings['method'] == name
    check(make_config({k: int(v) if type(getattr(Config, k, '')) is int or k == 'max_turns' else v
                       for k, v in settings.items()}))


def test_a_new_row_gives_a_new_page(monkeypatch, tmp_path):
    (tmp_path / 'runs').mkdir()
    before = set(site_pages.made_pages(tmp_path, None, api.HOMES))
    row = Row('up*', 'outcome+folr/turns', 'nobody yet', '#123456', {'alpha': 0.25}, differs='by a quarter')
    monkeypatch.setitem(METHODS, 'up*', compose(row))
    pages = site_pages.made_pages(tmp_path, None, api.HOMES)
    assert set(pages) - before == {'methods/up-star.md'}
    page = pages['methods/up-star.md']
    assert '> nobody yet' in page and '| `alpha` | `0.25` (elsewhere `1.0`) |' in page and '- by a quarter' in page
    assert '[up*](up-star.md)' in pages['methods/index.md'] and 'up*' in pages['api.md'].split('### METHODS')[1]
    nav = {name: of for entry in site_build.site_nav(notebooks.read_site(ROOT)) for name, of in entry.items()}
    assert {'up*': 'methods/up-star.md'} in nav['Methods']


def test_pages_show_what_parts_say():
    method = METHODS['tspo']
    folr = replace(method.rewards[1], equation=r'r = \beta', options={'beta': Option(.5, 'a new one', least=0, most=1)})
    changed = replace(method, rewards=(method.rewards[0], folr), options={**method.options, 'beta': .5})
    page = method_page(changed)
    assert '$$\nr = \\beta\n$$' in page and '| `beta` | `0.5` | a new one | at least 0, at most 1 |' in page
    assert '`alpha`' not in page


# ---- what is stored ----

def test_a_stored_curve_is_drawn_and_its_results_shown(archive, tmp_path):
    about = stored_about(METHODS['tspo'], archive, tmp_path)
    assert (tmp_path / about.picture).read_bytes()[:4] == b'\x89PNG'
    page = method_page(METHODS['tspo'], about)
    assert f']({about.picture})' in page and '| tspo | 3 |' in page
    assert 'is stored' in sections(method_page(METHODS['oracle'], stored_about(METHODS['oracle'], archive)))['Curve']


def test_a_stored_audit_is_shown_on_its_methods_page(tmp_path):
    (tmp_path / 'runs' / 'mine').mkdir(parents=True)
    (tmp_path / 'runs' / 'mine' / 'audit.csv').write_text(
        ',sign,"sign, low","sign, high",signal to noise,seconds\ntspo,0.754,0.6,0.9,0.5,3\nigpo,,,,0.5,1\n')
    audit = {name: sections(method_page(METHODS[name], stored_about(METHODS[name], read_archive(tmp_path))))['Audit']
             for name in ('tspo', 'igpo', 'grpo')}
    assert audit['tspo'].splitlines()[2:] == ['| audit | sign | signal to noise |', '| --- | --- | --- |',
                                              '| `runs/mine` | 0.75 (0.60 to 0.90) | 0.50 |']
    assert audit['igpo'].splitlines()[4] == '| `runs/mine` |  | 0.50 |'
    assert 'No audit' in audit['grpo'] and "'rules=[grpo]'" in audit['grpo']


def test_results_are_the_stored_tables(root):
    page = site_pages.results_page(read_archive(root))
    tables = kept(root, 'runs/*/table.md')
    assert tables and all(table.read_text().strip() in page for table in tables)


def test_own_runs_are_no_part_of_the_site(tmp_path):
    "What git ignores or has not been given, and files of settings too."
    audits = {name: tmp_path / 'runs' / name / 'audit.csv' for name in ('ours', 'mine', 'new')}
    for path in audits.values():
        path.parent.mkdir(parents=True)
        path.write_text(',sign,seconds\ntspo,0.5,3\n')
        (tmp_path / 'runs' / 'params').mkdir(exist_ok=True)
        (tmp_path / 'runs' / 'params' / f'{path.parent.name}.yaml').write_text('method: tspo')
    (tmp_path / '.gitignore').write_text('runs/mine')
    assert set(read_archive(tmp_path).audits['tspo']) == {'runs/ours', 'runs/mine', 'runs/new'}    # no clone yet
    for command in (['init', '-q'], ['add', 'runs/ours', 'runs/params/ours.yaml']):
        subprocess.run(['git', *command], cwd=tmp_path, check=True)
    archive = read_archive(tmp_path)
    assert set(archive.audits['tspo']) == {'runs/ours'} and archive.params == {'tspo': ['runs/params/ours.yaml']}
    assert kept(tmp_path, 'runs/*/audit.csv') == [audits['ours']]


def test_every_setting_and_every_name_has_its_line():
    settings, names = site_pages.settings_page(), site_pages.api_page(api.HOMES)
    assert all(f'| `{name}` |' in settings for name in flat(Config())) and '| `sft.attempts` |' in settings
    assert re.findall('^### (.*)', names, re.M) == list(api.HOMES)
    assert '- `first\\_turn`' not in names and '- `first_turn`: (N,) long' in names


def test_made_pages_name_notebooks_that_there_are(site_read, archive):
    pages = [*map(method_page, METHODS.values()), site_pages.methods_page(), site_pages.settings_page(),
             site_pages.api_page(api.HOMES), site_pages.results_page(archive)]
    named = {name for page in pages for name in re.findall(r'`(\d\d+_\w+)`', page)}
    assert {'97_results', '32_tspo'} < named <= set(site_read.stems)


# ---- notebooks ----

@pytest.fixture(scope='module')
def site_read(root):
    return notebooks.read_site(root)


def test_notebooks_lose_directives_and_hidden_cells_and_keep_outputs(site_read):
    for path, notebook in site_read.notebooks.items():
        shown = notebooks.site_notebook(notebook, path, site_read)['cells']
        assert not [c for c in shown if c['cell_type'] == 'code' and re.search(r'^#\s*\|', c['source'], re.M)]
        left_out = [c for c in notebook['cells'] if re.search(r'^#\s*\|\s*hide\b', ''.join(c['source']), re.M)]
        count = lambda cells: sum(len(c.get('outputs', ())) for c in cells)
        assert count(shown) == count(notebook['cells']) - count(left_out), path


@pytest.fixture
def small(tmp_path):
    "A repository of two chapters, with a tour."
    cell = lambda source, **more: {'cell_type': 'markdown', 'metadata': {}, 'source': [source], **more}
    output = {'output_type': 'display_data', 'metadata': {}, 'data': {'text/markdown': ['[one](1_a/10_one.ipynb)']}}
    for path, cells in {
            'nbs/000_tour.ipynb': [cell('# Tour\n\n> Around.'),
                                   cell('show()', cell_type='code', outputs=[output])],
            'nbs/1_a/10_one.ipynb': [cell('# One\n\n> First.')], 'nbs/machinery/02_two.ipynb': [cell('# Two')],
            'nbs/_old/03_three.ipynb': [], 'nbs/90_train.ipynb': [cell('# Train')]}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(json.dumps({'cells': cells, 'metadata': {}}))
    (tmp_path / 'nbs/machinery/README.md').write_text('# Machinery\n')
    for path in ('README.md', 'nbs/1_a/README.md', 'nbs/your_rule.md', 'runs/LOG.md', 'runs/log/2030-01-02.md',
                 'runs/params/demo.yaml', 'tests/test_it.py'):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text('# The rules\n\n`02_two`\n')
    (tmp_path / 'settings.ini').write_text('[DEFAULT]\ngit_url = https://x.org/r\nbranch = main\n')
    return notebooks.read_site(tmp_path)


def test_the_tour_comes_first_and_its_map_leads_to_pages(small):
    assert list(small.notebooks) == ['nbs/000_tour.ipynb', 'nbs/1_a/10_one.ipynb', 'nbs/machinery/02_two.ipynb',
                                     'nbs/90_train.ipynb']
    nav = site_build.site_nav(small)
    assert nav[1] == {'Tour': 'nbs/000_tour.ipynb'}
    assert nav[2]['Notebooks'] == [{'The rules': ['nbs/1_a/index.md', {'10 · One': 'nbs/1_a/10_one.ipynb'}]},
                                   {'Machinery': ['nbs/machinery/index.md',
                                                  {'02 · Two': 'nbs/machinery/02_two.ipynb'}]},
                                   {'Runs, for papermill': [{'90 · Train': 'nbs/90_train.ipynb'}]}]
    assert nav[3] == {'The rules': 'nbs/your_rule.md'}
    shown = notebooks.site_notebook(small.notebooks['nbs/000_tour.ipynb'], 'nbs/000_tour.ipynb', small)
    assert shown['cells'][1]['outputs'][0]['data']['text/markdown'] == '[one](1_a/10_one.html)'


@pytest.mark.parametrize('page, text, shown', [
    ('nbs/1_a/10_one.ipynb', '`02_two` and `10_gone`', '[`02_two`](../machinery/02_two.html) and `10_gone`'),
    ('nbs/1_a/10_one.ipynb', '[log](../../runs/LOG.md#x) [t](../000_tour.ipynb)',
     '[log](../../runs/LOG.html#x) [t](../000_tour.html)'),
    ('nbs/000_tour.ipynb', '[r](index.ipynb) [c](1_a) [d](1_a/README.md)',
     '[r](../index.html) [c](1_a/index.html) [d](1_a/index.html)'),
    ('nbs/000_tour.ipynb', '[p](../runs/params/demo.yaml) [t](../tests/test_it.py)',
     '[p](../runs/params/demo.yaml) [t](https://x.org/r/blob/main/tests/test_it.py)'),
    ('nbs/000_tour.ipynb', '[f](../tests) [w](https://y.org/z.md)',
     '[f](https://x.org/r/tree/main/tests) [w](https://y.org/z.md)'),
    ('nbs/000_tour.ipynb', '[gone](10_one.ipynb)\n```\n`02_two`\n```\n',
     '[gone](10_one.html)\n```\n`02_two`\n```\n')])
def test_links_lead_to_pages(page, text, shown, small):
    assert notebooks.with_links(text, page, small, built=True) == shown


# ---- the log of findings ----

def test_the_log_has_a_line_for_each_finding_newest_first(root):
    lines = re.findall(r'^- (.*)', (root / 'runs' / 'LOG.md').read_text(encoding='utf-8'), re.M)
    found = [re.fullmatch(r'\[(\d{4}-\d\d-\d\d)\]\(log/(.*)\.md#(.*?)\) — \S.*\.', line) for line in lines]
    assert all(found) and all(m[1] == m[2] for m in found) and max(len(m[0]) - len(m[3]) for m in found) < 300
    days = sorted((p.stem for p in (root / 'runs' / 'log').glob('*.md')), reverse=True)
    headings = [heading for day in days for heading in re.findall(
        '^## (.*)', (root / 'runs' / 'log' / f'{day}.md').read_text(encoding='utf-8'), re.M)]
    assert [m[1] for m in found] == [heading[:10] for heading in headings]
    assert list(dict.fromkeys(m[1] for m in found)) == days
    slug = lambda heading: re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')     # as GitHub makes it
    assert [m[3] for m in found] == [slug(heading) for heading in headings]


# ---- links ----

def test_a_dead_link_put_in_on_purpose_is_found(tmp_path):
    (tmp_path / 'b').mkdir()
    (tmp_path / 'index.html').write_text('<h1 id="top"><a href="b/c.html#x">c</a><a href="https://x.org/y">y</a>')
    (tmp_path / 'b' / 'c.html').write_text('<p id="x"><a href="../index.html#top">up</a><a href="../">up</a>')
    assert dead_links(tmp_path) == []
    page = tmp_path / 'b' / 'c.html'
    for dead in ('<a href="gone.html">', '<img src="../gone.png">', '<a href="#y">', '<a href="../index.html#gone">',
                 '<a href="/site/gone.html">', '<script src="gone.js"></script>'):
        good = page.read_text()
        page.write_text(good + dead)
        assert dead_links(tmp_path, '/site/') == [f'b/c.html: {re.findall(chr(34) + "(.*?)" + chr(34), dead)[0]}']
        page.write_text(good)


@pytest.mark.parametrize('name, text', [
    ('a.html', '<script src="https://cdn.org/x.js"></script>'), ('a.html', '<img src="//cdn.org/x.png">'),
    ('a.html', '<link rel="stylesheet" href="https://fonts.org/f.css">'),
    ('a.html', '<style>@import "http://x.org";</style>'),
    ('a.html', '<script type="module">const m = await import("https://cdn.org/m.js")</script>'),
    ('a.css', 'p {background: url(https://x.org/p.png)}')])
def test_what_comes_from_another_host_is_found(name, text, tmp_path):
    (tmp_path / 'b.html').write_text('<a href="https://x.org">x</a><link rel="canonical" href="https://x.org">')
    assert foreign_loads(tmp_path) == []
    (tmp_path / name).write_text(text)
    assert len(foreign_loads(tmp_path)) == 1


# ---- the whole build ----

@pytest.fixture(scope='module')
def hooks(root):
    spec = importlib.util.spec_from_file_location('site_hooks', root / 'docs' / 'hooks.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@without_docs
def test_equations_become_mathml(hooks):
    page = '<p>$a_i$ <code>$x$</code> costs $5 and $6 or $ 7 <pre>$y$</pre>\n$$\n\\frac12\n$$ and $$b$$</p>'
    shown = hooks.with_equations(page, True)
    assert shown.count('<math') == 3 and '<code>$x$</code> costs $5 and $6 or $ 7 <pre>$y$</pre>' in shown
    assert '<msub>' in shown and '<mfrac>' in shown and 'display="block"' in shown
    marked = hooks.with_equations('<span class="arithmatex">\\(\\log \\pi &lt; 1\\)</span> $z$', False)
    assert marked.count('<math') == 1 and '<mo>&#x0003C;</mo>' in marked and 'mspace' in marked
    assert marked.endswith(' $z$')  # in Markdown arithmatex has marked them all
    for method in METHODS.values():
        for part in method.parts: assert '\\' not in hooks.equation(part.equation, True), part.equation


@without_docs
def test_headings_called_alike_have_ids_of_their_own(hooks):
    page = '<h1 id="a"><a href="#a">A</a></h1><h2 id="b">B</h2>\n<h2 id="a"><a href="#a">A</a></h2>'
    twice = '<h2 id="a"><a href="#a">'
    assert hooks.with_numbered_headings(page) == page.replace(twice, twice.replace('a"', 'a_1"'))


NO_NETWORK = '''
import runpy, socket, sys
def refuse(*args): raise OSError(f'a build asked for {args[1:]}')
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
runpy.run_path(sys.argv[0], run_name='__main__')
'''


@pytest.fixture(scope='module')
def site(run_python, tmp_path_factory, root):
    "The site, built by a process that has no network: its folder."
    out = tmp_path_factory.mktemp('docs')
    code = f'import sys; sys.argv = [{str(root / "docs" / "build.py")!r}, {str(out)!r}]{NO_NETWORK}'
    run_python('-c', code, env={'PYTHONPATH': os.pathsep.join([str(root), str(root / 'docs')]), 'OMP_NUM_THREADS': '1'})
    return out / 'site'


@without_docs
def test_make_docs_builds_a_site_without_a_dead_link(site, root):
    assert not dead_links(site, '/credit_rl/') and not foreign_loads(site)
    pages = {str(p.relative_to(site)): p.read_text() for p in site.rglob('*.html')}
    assert {f'methods/{page_name(name)}.html' for name in METHODS} < set(pages)
    assert {path.replace('.ipynb', '.html') for path in notebooks.read_site(root).notebooks} < set(pages)
    gain = pages['nbs/1_rules/33_information_gain.html']
    assert '<math' in gain and 'href="../3_acting/24_scoring.html"' in gain and '<img' in gain
    assert '#| export' not in gain
    texts = [re.sub(r'<(pre|code|script)\b.*?</\1>', '', page, flags=re.S) for page in pages.values()]
    assert not [text for text in texts if re.search(r'\\(?:frac|operatorname|sum|mathbb)', text)]
    index = json.loads((site / 'search' / 'search_index.json').read_text())['docs']
    assert [d for d in index if 'Information gain' in d['title']
            and d['location'] == 'nbs/1_rules/33_information_gain.html']
    broken = site / 'methods' / 'tspo.html'
    whole = broken.read_text()
    broken.write_text(whole.replace('../nbs/1_rules/32_tspo.html', '../nbs/1_rules/32_gone.html', 1))
    assert dead_links(site, '/credit_rl/') == ['methods/tspo.html: ../nbs/1_rules/32_gone.html']
    broken.write_text(whole)


WIDER = """[...document.querySelectorAll('math[display=block]')].filter((e) => e.scrollWidth > e.clientWidth + 1)
    .map((e) => e.textContent)"""


@without_docs
def test_a_search_finds_the_page_and_no_equation_is_cut(site, tmp_path):
    "In a window of 1,280 pixels; nothing is loaded from another host."
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    top = f'http://127.0.0.1:{server.server_port}/'
    try:
        with open_tab(tmp_path) as tab:
            tab.size(1280, 800)
            tab.open(top + 'index.html?q=information+gain', "document.querySelector('.md-search-result__link')")
            found = tab.ask("document.querySelector('.md-search-result__link').href")
            assert found.startswith(top + 'nbs/1_rules/33_information_gain.html')
            asked = tab.ask("performance.getEntriesByType('resource').map((e) => e.name)")
            assert asked and not [url for url in asked if not url.startswith((top, 'data:', 'blob:'))]
            rules = [p for p in sorted(site.glob('nbs/1_rules/*.html')) if 'display="block"' in p.read_text()]
            for path in rules:
                tab.open(top + path.relative_to(site).as_posix())
                assert not tab.ask(WIDER), path.name
            assert len(rules) > 10 and not tab.errors
    finally: server.shutdown()
