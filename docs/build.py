"""`make docs`, or `python docs/build.py FOLDER` for another folder than _docs: writes the pages into _docs/pages, has
mkdocs make _docs/site of them, and reads every built page again. A link that leads nowhere, or anything that would be
loaded from another host, ends it with 1."""
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]


def build(out):  # Path
    "Build the site below a folder. Returns what is wrong with it: list of str."
    import shutil
    from credit_rl import api, site_pages
    from mkdocs.commands.build import build as build_site
    from mkdocs.config import load_config
    nav = site_pages.write_pages(ROOT, out / 'pages', api.HOMES)
    shutil.copy(ROOT / 'docs' / 'style.css', out / 'pages' / 'style.css')
    config = load_config(str(ROOT / 'docs' / 'mkdocs.yml'), nav=nav, strict=True, docs_dir=str(out / 'pages'),
                         site_dir=str(out / 'site'))
    config.plugins.on_startup(command='build', dirty=False)
    build_site(config)
    config.plugins.on_shutdown()
    base = urlsplit(config.site_url).path
    dead = [f'leads nowhere: {what}' for what in site_pages.dead_links(out / 'site', base)]
    return dead + [f'loads from elsewhere: {what}' for what in site_pages.foreign_loads(out / 'site')]


if __name__ == '__main__':
    out = Path(sys.argv[1] if sys.argv[1:] else '_docs').resolve()
    since, wrong = time.monotonic(), build(out)
    if wrong: sys.exit('\n'.join([*wrong, f'docs: {len(wrong)} addresses are wrong']))
    print(f'{out}/site/index.html, built in {time.monotonic() - since:.0f} s; its search wants a server: '
          f'python -m http.server -d {out}/site')
