"The README is the index notebook, converted; numbers reach it only through the notebook."
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_readme_is_made_from_the_index():
    from nbconvert import MarkdownExporter
    text, _ = MarkdownExporter().from_filename(str(ROOT/'nbs'/'index.ipynb'))
    assert (ROOT/'README.md').read_text() == text, 'README.md differs from nbs/index.ipynb: run `make readme`'


def test_readme_names_the_commands_that_make_has():
    readme, makefile = (ROOT/'README.md').read_text(), (ROOT/'Makefile').read_text()
    for command in ('demo', 'test', 'compare', 'lab'):
        assert f'make {command}' in readme and f'\n{command}:' in makefile
