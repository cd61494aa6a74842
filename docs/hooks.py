"""What mkdocs is told besides mkdocs.yml: equations become MathML as the site is built, so that a browser needs no
script for them; the style of notebooks stands in one file instead of in every page; and headings have ids of their own.
"""
import re
from collections import Counter
from html import unescape
from pathlib import Path

from latex2mathml.converter import convert

STYLE = 'assets/notebook.css'
CODE = re.compile(r'(<(pre|code|script|style|svg|math)\b.*?</\2>)', re.S)
MARKED = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)
DOLLARS = re.compile(r'\$\$([^$]+)\$\$|\$(?=\S)([^$]+?)(?<=\S)\$(?!\d)', re.S)
NAMED = re.compile(r'(<mi>(?:exp|ln|log|max|min)</mi>)(?=<m(?:i|n|sub|sup|subsup|frac)\b)')   # log π, not logπ
styles = {}


def equation(latex, block):
    "An equation as MathML, left out of the search."
    latex = re.sub(r'\\mathbb\s*\{?1\}?', '𝟙', unescape(latex).strip())            # double-struck letters it knows
    shown = NAMED.sub(r'\1<mspace width="0.17em"></mspace>', convert(latex, display='block' if block else 'inline'))
    return shown.replace('<math', '<math data-search-exclude', 1)


def with_equations(html, dollars):
    "A page with its LaTeX as MathML: what arithmatex marked, and in a notebook what stands between dollar signs."
    html = MARKED.sub(lambda m: equation(m[3], m[2] == '['), html)
    if not dollars: return html
    parts = CODE.split(html)                                     # text, code, its tag, text, code, …
    parts[::3] = [DOLLARS.sub(lambda m: equation(m[1] or m[2], bool(m[1])), part) for part in parts[::3]]
    return ''.join(part for i, part in enumerate(parts) if i % 3 < 2)


def with_numbered_headings(html):
    "A page whose headings that are called alike have ids of their own, as the list of contents links to them."
    seen = Counter()

    def numbered(match):
        name, count = match[2], seen[match[2]]
        seen[name] += 1
        return re.sub(f'(id="|href="#){re.escape(name)}"', rf'\g<1>{name}_{count}"', match[0]) if count else match[0]

    return re.sub(r'<(h[1-6]) id="([^"]*)".*?</\1>', numbered, html, flags=re.S)


def on_page_content(html, page, config, files):
    if not page.file.src_uri.endswith('.ipynb'): return with_equations(html, False)
    before, wrapper, body = html.partition('<div class="jupyter-wrapper">')
    body, _, after = body.rpartition('<style>')
    styles[STYLE] = '\n'.join(re.findall(r'<style[^>]*>(.*?)</style>', before, re.S))
    body = re.sub(r'<div class="zeroclipboard-container">.*?</clipboard-copy>\s*</div>', '', body, flags=re.S)
    body = re.sub(r'<div class="clipboard-copy-txt".*?</div>', '', body, flags=re.S)    # every cell a second time
    body = body.replace('class="anchor-link"', 'class="headerlink"')                 # a sign that no search is for
    up = '../' * page.file.src_uri.count('/')
    body = with_numbered_headings(with_equations(body, True))
    return f'<link rel="stylesheet" href="{up}{STYLE}">{wrapper}{body}'


def on_post_build(config):
    for name, text in styles.items(): (Path(config.site_dir) / name).write_text(text, encoding='utf-8')
