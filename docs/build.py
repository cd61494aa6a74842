"""`make docs`, or `python docs/build.py FOLDER` for another folder than _docs: writes the pages into _docs/pages, has
mkdocs make _docs/site of them, and reads every built page again. A link that leads nowhere, or anything that would be
loaded from another host, ends it with 1."""
import json
import shutil
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import links
import notebooks
import pages
from credit_rl.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
HIDDEN = {'methods/index.md': 'toc',                      # page -> list beside it that is left out
          **dict.fromkeys(('index.md', 'settings.md', 'api.md', 'runs/LOG.md'), 'navigation')}


def site_nav(site):  # notebooks.Site
    "The site's contents, as mkdocs.yml has them: list."
    days = [path for path in site.pages if path.startswith('runs/log/')]
    return [{'Home': 'index.md'}, *([{'Tour': notebooks.TOUR}] if notebooks.TOUR in site.notebooks else []),
            {'Notebooks': notebooks.notebook_nav(site)}, *site.guides,
            {'Methods': ['methods/index.md', *({m: f'methods/{pages.page_name(m)}.md'} for m in METHODS)]},
            {'Settings': 'settings.md'}, {'Package': 'api.md'},
            {'Results': ['results.md', {'Log of findings': ['runs/LOG.md', *({Path(day).stem: day} for day in days)]}]}]


def write_pages(
    site,   # notebooks.Site
    out,    # folder of pages, made anew
    homes,  # name that the package gives -> its module
):
    "Write everything that the site is built from."
    shutil.rmtree(out, ignore_errors=True)
    sources = {page: path for path, page in site.pages.items() if path.endswith('.md')}
    texts = {page: notebooks.with_links((site.root/path).read_text(encoding='utf-8'), path, site)
             for page, path in sources.items()}
    texts |= {page: notebooks.with_links(text, page, site)
              for page, text in pages.made_pages(site.root, out, homes).items()}
    hides = HIDDEN | {page: 'navigation' for guide in site.guides for page in guide.values()}
    for page, hidden in hides.items(): texts[page] = f'---\nhide: [{hidden}]\n---\n{texts[page]}'
    texts |= {path: json.dumps(notebooks.site_notebook(nb, path, site)) for path, nb in site.notebooks.items()}
    for page, text in texts.items():
        (out/page).parent.mkdir(parents=True, exist_ok=True)
        (out/page).write_text(text, encoding='utf-8')
    for path in site.copied:
        (out/path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(site.root/path, out/path)
    shutil.copy(site.root/'docs'/'style.css', out/'style.css')


def build(out):  # Path
    "Build the site below a folder. Returns what is wrong with it: list of str."
    from credit_rl import api
    from mkdocs.commands.build import build as build_site
    from mkdocs.config import load_config
    site = notebooks.read_site(ROOT)
    write_pages(site, out/'pages', api.HOMES)
    config = load_config(str(ROOT/'docs'/'mkdocs.yml'), nav=site_nav(site), strict=True, docs_dir=str(out/'pages'),
                         site_dir=str(out/'site'))
    config.plugins.on_startup(command='build', dirty=False)
    build_site(config)
    config.plugins.on_shutdown()
    dead = links.dead_links(out/'site', urlsplit(config.site_url).path)
    return [f'leads nowhere: {what}' for what in dead] + [f'loads from elsewhere: {what}'
                                                          for what in links.foreign_loads(out/'site')]


if __name__ == '__main__':
    out = Path(sys.argv[1] if sys.argv[1:] else '_docs').resolve()
    since, wrong = time.monotonic(), build(out)
    if wrong: sys.exit('\n'.join([*wrong, f'docs: {len(wrong)} addresses are wrong']))
    print(f'{out}/site/index.html, built in {time.monotonic() - since:.0f} s; its search wants a server: '
          f'python -m http.server -d {out}/site')
