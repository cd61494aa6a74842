"The README is the index notebook, converted; numbers reach it only through the notebook."
import json
import re
from pathlib import Path

import pytest

from credit_rl.parameters import notebooks_in

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / 'README.md').read_text(encoding='utf-8')
CHAPTERS = sorted({p.parent for p in notebooks_in(ROOT / 'nbs')} - {ROOT / 'nbs'})


def cells_of(name):
    return json.loads((ROOT / 'nbs' / f'{name}.ipynb').read_text(encoding='utf-8'))['cells']


def shown_texts(cells):
    "What code cells show as Markdown."
    return [''.join(o['data']['text/markdown']) for c in cells for o in c.get('outputs', ())
            if 'text/markdown' in o.get('data', {})]


def converted():
    "The index as `make readme` converts it: (text, {path: bytes} of its pictures)."
    from nbconvert import MarkdownExporter
    from traitlets.config import Config
    config = Config()
    config.TagRemovePreprocessor.enabled = True
    config.TagRemovePreprocessor.remove_input_tags = {'remove-input'}
    config.RegexRemovePreprocessor.patterns = [r'#\| hide[\s\S]*']
    config.ExtractOutputPreprocessor.output_filename_template = 'readme_{cell_index}{extension}'
    text, resources = MarkdownExporter(config=config).from_filename(
        str(ROOT / 'nbs' / 'index.ipynb'), resources={'output_files_dir': 'nbs/figures'})
    beside = r'\]\(([1-7]_[a-z]+/|machinery/|experiments/|papers/|\d+_|your_|on_gpus)'
    return re.sub(beside, r'](nbs/\1', text).replace('](../', ']('), resources['outputs']


def test_readme_is_made_from_the_index():
    text, pictures = converted()
    assert README == text, 'README.md differs from nbs/index.ipynb: run `make readme`'
    for path, data in pictures.items():
        assert (ROOT / path).read_bytes() == data, f'{path} is not the picture of the index: run `make readme`'
    assert {str(p.relative_to(ROOT)) for p in (ROOT / 'nbs' / 'figures').glob('[!.]*')} == set(pictures)
    assert len(pictures) == 1 and all(len(data) < 200_000 for data in pictures.values())


def test_links_lead_somewhere():
    for text, place in ((README, ROOT), (''.join(''.join(c['source']) for c in cells_of('index')), ROOT / 'nbs')):
        links = re.findall(r'\]\(([^)]+)\)', text)
        assert len(links) > 10 and not [x for x in links if not x.startswith('https://') and not (place / x).exists()]


def pages_of(folder):
    "Pages that a chapter's README lists, in its order: list of (name of the notebook, what is said of it)."
    return re.findall(r'^- \[.*\]\((\w+)\.ipynb\): (.*)$', (folder / 'README.md').read_text(encoding='utf-8'), re.M)


@pytest.mark.parametrize('folder', CHAPTERS, ids=lambda folder: folder.name)
def test_a_chapter_lists_its_pages_once_and_they_lead_on_in_its_order(folder):
    names = [name for name, _ in pages_of(folder)]
    assert sorted(names) == sorted(p.stem for p in notebooks_in(folder))
    following = dict(zip(names, names[1:])) | {'60_methods': '63_train'}           # the path goes on to the loop
    for name, said in pages_of(folder):
        prose = '\n'.join(''.join(c['source']) for c in cells_of(f'{folder.name}/{name}')
                          if c['cell_type'] == 'markdown')
        assert f'\n> {said}\n' in prose, f'{folder.name}/README.md says of {name} what its page does not say of itself'
        assert re.findall(r'Next, `(\w+)`', prose) in ([], [following.get(name)]), name


def test_every_page_on_the_path_leads_to_the_next():
    rules = [f'1_rules/{name}' for name, _ in pages_of(ROOT / 'nbs' / '1_rules')]
    path = ['000_tour', *rules[:rules.index('1_rules/60_methods') + 1]]
    for name, after in zip(path, [*path[1:], '5_run/63_train']):
        assert f'Next, `{Path(after).name}`' in ''.join(cells_of(name)[-1]['source']), name


def test_the_tour_maps_every_notebook():
    (table,) = shown_texts(cells_of('000_tour'))
    for folder in CHAPTERS:
        about = (folder / 'README.md').read_text(encoding='utf-8').split('\n\n')[1].strip()
        (row,) = (line for line in table.splitlines() if line.startswith(f'| `{folder.name}` |'))
        links = re.findall(r'\]\(([^)]+)\)', row)
        assert about in row and sorted(links) == \
            sorted(f'{p.parent.name}/{p.name}' for p in notebooks_in(folder)), 'execute nbs/000_tour.ipynb again'


def test_the_readmes_numbers_are_computed():
    said = [''.join(c['source']) for c in cells_of('index') if c['cell_type'] == 'markdown']
    typed = re.sub(r'`[^`]*`|\[[^]]*\]\([^)]*\)|^ {4}.*$', '', '\n'.join(said), flags=re.M)  # neither code nor links
    assert not re.findall(r'(?<!\d)0?\.\d{2,}|\d+ ?%', typed), 'a result is typed by hand'
