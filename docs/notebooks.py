"""Notebooks as pages of the site: which there are, in which chapters, and where a link of one file of the repository to
another leads on the site. A page lies where its file lies: nbs/1_rules/32_tspo.ipynb is nbs/1_rules/32_tspo.html."""
import json
import os
import re
import subprocess
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path

from credit_rl.parameters import notebooks_in

TOUR = 'nbs/000_tour.ipynb'
UNNUMBERED = ('machinery', 'experiments', 'papers')   # chapters without a number come last, in this order
COPIED = ('CITATION.cff', 'LICENSE', 'nbs/figures/*', 'runs/params/*.yaml')   # what pages link to besides pages


@dataclass(frozen=True)
class Site:
    "What the site shows of a repository."
    root: Path         # top of the repository
    notebooks: dict    # path in the repository -> notebook, as JSON has it; the tour first, then chapter by chapter
    chapters: dict     # folder below nbs -> paths of its notebooks, in the order in which its README lists them
    pages: dict        # path in the repository, of a file or a folder -> path of its page before it is built
    copied: tuple      # paths of files that are copied as they are
    repository: str    # where the rest is read

    @property
    def stems(self):
        "Name of a notebook -> its path in the repository."
        return {Path(path).stem: path for path in self.notebooks}

    @property
    def guides(self):
        "Pages beside the tour that are no notebooks: list of {their heading: path}."
        heading = lambda path: re.search('^# (.*)', (self.root / path).read_text(encoding='utf-8'), re.M)[1]
        return [{heading(path): path} for path in self.pages if re.fullmatch(r'nbs/\w+\.md', path)]


def read_site(root):
    "Read the `Site` of a repository."
    root = Path(root)
    rank = lambda name: (UNNUMBERED.index(name) + 1 if name in UNNUMBERED else 0, name)
    found = lambda pattern: [str(p.relative_to(root)) for p in sorted(root.glob(pattern))]
    numbered = [p.relative_to(root) for p in notebooks_in(root / 'nbs') if p.name[0].isdigit()]
    of_folder = lambda name: [str(p) for p in numbered if p.parent.name == name]
    chapters = {}
    for folder in sorted({p.parent.name for p in numbered} - {'nbs'}, key=rank):
        listed = (root / 'nbs' / folder / 'README.md').read_text(encoding='utf-8')
        chapters[folder] = sorted(of_folder(folder), key=lambda path: listed.find(f'({Path(path).name})'))
    paths = [*(path for of in chapters.values() for path in of), *of_folder('nbs')]
    paths.sort(key=lambda path: path != TOUR)
    pages = {path: path for path in [*paths, *found('nbs/*.md'), 'runs/LOG.md', *found('runs/log/*.md')[::-1]]}
    pages |= dict.fromkeys(('README.md', 'nbs/index.ipynb'), 'index.md')
    for name in chapters: pages |= dict.fromkeys((f'nbs/{name}', f'nbs/{name}/README.md'), f'nbs/{name}/index.md')
    settings = ConfigParser(delimiters=['='], interpolation=None)
    settings.read(root / 'settings.ini', encoding='utf-8')
    return Site(root, {path: json.loads((root / path).read_text(encoding='utf-8')) for path in paths}, chapters, pages,
                tuple(path for pattern in COPIED for path in found(pattern) if (root / path).is_file()),
                '{git_url}/{{kind}}/{branch}'.format(**settings['DEFAULT']))


# ---- links ----

def address_on_site(
    address,  # of a link
    page,     # path in the repository of the file that it stands in
    site,     # Site
):
    """Where a link leads on the site: str, to a page by the name of its file before it is built. What has no page is
    read in the repository; what is not there at all stays as it is."""
    path, sign, anchor = address.partition('#')
    if not path or re.match(r'\w+:', path): return address
    target = os.path.normpath(os.path.join(os.path.dirname(page), path))
    if target in site.pages or target in site.copied:
        return os.path.relpath(site.pages.get(target, target), os.path.dirname(page) or '.') + sign + anchor
    if target.startswith('..') or not (site.root / target).exists(): return address
    return site.repository.format(kind='tree' if (site.root / target).is_dir() else 'blob') + f'/{target}'


def with_links(
    text,        # Markdown
    page,        # path in the repository of the file that it stands in
    site,        # Site
    built=False, # lead to pages by their addresses on the site, not by their files, which mkdocs looks up in Markdown
):
    "A text whose links lead to the site's pages, and in which each name of a notebook in code type is a link: str."
    def named(match):
        path = site.stems.get(match[1])
        return f'[`{match[1]}`]({os.path.relpath(path, os.path.dirname(page) or ".")})' if path else match[0]

    def led(match):
        address = address_on_site(match[1], page, site)
        if built and ':' not in address: address = re.sub('[.](ipynb|md)(#.*)?$', r'.html\2', address)
        return f']({address})'

    blocks = re.split(r'(^```.*?^```)', text, flags=re.M | re.S)
    for i, block in enumerate(blocks[::2]):
        block = re.sub(r'(?<![\[`])`(\w+)`(?!`)', named, block)
        blocks[2 * i] = re.sub(r'\]\(([^()\s]+)\)', led, block)
    return ''.join(blocks)


# ---- pages ----

def site_notebook(
    notebook,  # dict, as JSON has it
    path,      # in the repository
    site,      # Site
):
    "A notebook as the site shows it: dict. Directives and hidden cells are gone, links lead to pages."
    cells = []
    for cell in notebook['cells']:
        source = ''.join(cell['source'])
        directives = dict(re.findall(r'^#\s*\|\s*(\w+):?[ \t]*(.*?)\s*$', source, re.M))
        outputs = {}
        if cell['cell_type'] == 'markdown':
            source = re.sub('^#.*', lambda m: m[0].replace('`', ''), source, flags=re.M)   # a heading is plain text
            source = with_links(source, path, site, built=True)
        else:
            source = re.sub(r'^#\s*\|.*\n?', '', source, flags=re.M)
            outputs = {'outputs': [_linked_output(output, path, site) for output in cell.get('outputs', [])]}
        if 'hide' in directives or not source.strip(): continue
        tags = [*cell['metadata'].get('tags', [])] + ['no-input'] * (directives.get('echo') == 'false')
        cells.append({**cell, **outputs, 'source': source, 'metadata': {**cell['metadata'], 'tags': tags}})
    return {**notebook, 'cells': cells}


def _linked_output(output, path, site):
    "An output of a cell; in Markdown, its links lead to pages."
    text = output.get('data', {}).get('text/markdown')
    if not text: return output
    return {**output, 'data': {**output['data'], 'text/markdown': with_links(''.join(text), path, site, built=True)}}


def notebook_title(notebook):  # dict, as JSON has it
    "What a notebook calls itself: its first heading."
    prose = ''.join(''.join(c['source']) + '\n' for c in notebook['cells'] if c['cell_type'] == 'markdown')
    return re.search('^# (.*)', prose, re.M)[1]




def chapter_title(folder, site):
    "What a chapter is called: the heading of its README."
    return re.search('^# (.*)', (site.root / 'nbs' / folder / 'README.md').read_text(encoding='utf-8'), re.M)[1]


def notebook_nav(site):
    "The notebooks in the site's contents, as mkdocs.yml has them: a list, a section for each chapter."
    label = lambda path: f'{Path(path).stem.split("_")[0]} · {notebook_title(site.notebooks[path])}'
    entries = lambda paths: [{label(path).replace('`', ''): path} for path in paths]
    sections = [{chapter_title(folder, site): [f'nbs/{folder}/index.md', *entries(paths)]}
                for folder, paths in site.chapters.items()]
    alone = [path for path in site.notebooks if path.count('/') == 1 and path != TOUR]
    return sections + ([{'Runs, for papermill': entries(alone)}] if alone else [])


def kept(
    root,     # top of the repository
    pattern,  # from there, as `Path.glob` takes it
):
    """The paths that match and that git keeps, sorted; all that match where `root` is no clone: list of Path. Pages and
    tests look at these, and leave a reader's own files alone."""
    root = Path(root)
    found = sorted(root.glob(pattern))
    if not (root / '.git').exists(): return found
    names = subprocess.check_output(['git', 'ls-files', '-z'], cwd=root, text=True).split('\0')
    return sorted({*found} & {root / name for name in names})
