"""What a built site links to, and what its pages load: links that lead nowhere, and addresses of other hosts."""
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class PageLinks(HTMLParser):
    """What a page links to and loads: `links`, a list of (tag, address); `loads`, addresses that a browser asks for by
    itself; `ids`, the elements that can be linked to."""
    LOADING = ('stylesheet', 'icon', 'preload', 'preconnect', 'prefetch', 'dns-prefetch', 'modulepreload', 'manifest')

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.ids, self._within = [], [], set(), None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs, self._within = dict(attrs), tag
        self.ids |= {attrs[name] for name in ('id', 'name') if attrs.get(name)}
        address = attrs.get('src') or attrs.get('href') or attrs.get('data' if tag == 'object' else '')
        if not address: return
        self.links.append((tag, address))
        loads = any(rel in self.LOADING for rel in attrs.get('rel', '').split()) if tag == 'link' else tag != 'a'
        if loads: self.loads.append(address)

    def handle_data(self, data):
        if self._within == 'style': self.loads += css_loads(data)
        if self._within == 'script': self.loads += re.findall(r'''(?:import\(|from\s|src\s*=)\s*["']([^"']+)''', data)

    def handle_endtag(self, tag): self._within = None


def css_loads(text):
    "Addresses that a style sheet loads: list."
    return re.findall(r'''url\(\s*["']?([^"')]+)''', text) + re.findall(r'''@import\s+["']([^"']+)''', text)


def _target(site, page, address, base):
    "The file inside the site that an address of a page means."
    path = unquote(urlsplit(address).path)
    if path.startswith(base): place = site/path[len(base):]
    else: place = (page.parent/path) if path else page
    return place/'index.html' if place.is_dir() else place


def dead_links(
    site,      # folder of built pages
    base='/',  # what stands before the path of a page on its host
):
    "What leads nowhere in a built site: list of str, page and address."
    site = Path(site).resolve()
    pages = {path: PageLinks(path.read_text(encoding='utf-8')) for path in sorted(site.rglob('*.html'))}
    found = []
    for path, page in pages.items():
        for tag, address in dict.fromkeys(page.links):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc: continue
            place = Path(os.path.normpath(_target(site, path, address, base)))
            anchor = unquote(parts.fragment)
            gone = not place.exists() or anchor and place in pages and anchor not in pages[place].ids
            if gone: found.append(f'{path.relative_to(site)}: {address}')
    return found


def foreign_loads(site):  # folder of built pages
    "What the pages and style sheets of a site load from another host: list of str, file and address."
    site = Path(site)
    loads = [(path, a) for path in sorted(site.rglob('*.html'))
             for a in PageLinks(path.read_text(encoding='utf-8')).loads]
    loads += [(path, a) for path in sorted(site.rglob('*.css')) for a in css_loads(path.read_text(encoding='utf-8'))]
    return [f'{path.relative_to(site)}: {a}' for path, a in dict.fromkeys(loads) if re.match('(https?:)?//', a)]
