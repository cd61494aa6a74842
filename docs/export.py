"""`make export`, or `python docs/export.py`: writes credit_rl/ from the notebooks (`nbdev_export`), and into docstrings
what the comments beside arguments say of them, as a section "Parameters" (numpy's style), so that `help` shows it. A
public function and a public method get theirs; what the comments of `__init__` say stands in the class's docstring."""
import ast
import functools
import io
import os
import re
import textwrap
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDEST, HEAD = 120, ('Parameters', '----------')
wrapped = functools.partial(textwrap.wrap, break_on_hyphens=False, break_long_words=False)


def comments_in(header):
    "The comments of a signature: dict line, from 0 → (column, text, whether it stands alone on its line)."
    tokens = tokenize.generate_tokens(io.StringIO(header).readline)
    return {t.start[0] - 1: (t.start[1], t.string.lstrip('# ').rstrip(), not t.line[:t.start[1]].strip())
            for t in tokens if t.type == tokenize.COMMENT}


def argument_comments(function, lines):
    """What a function of the source in `lines` says of its arguments: behind each and, indented further, below that, or
    on lines of their own before it: dict name → text. A comment behind a signature of one line is of all of them."""
    a, body = function.args, function.body[0]
    above, last = lines[function.lineno - 1:body.lineno - 1], lines[body.lineno - 1].encode()[:body.col_offset].decode()
    comments, names, found = comments_in('\n'.join([*above, last])), {}, {}
    usual = dict(zip([x.arg for x in (*a.posonlyargs, *a.args)][::-1], a.defaults[::-1]))
    usual |= {x.arg: d for x, d in zip(a.kwonlyargs, a.kw_defaults) if d}
    for x in filter(None, (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg)):
        start, end = x.lineno - function.lineno, usual.get(x.arg, x).end_lineno - function.lineno
        if x.arg not in ('self', 'cls'): names[x.arg] = start, end
    if of_all := re.search(r'\):\s+#\s*(.*)', lines[function.lineno - 1]):
        return {', '.join(names): of_all[1].strip()} if names else {}
    indent_alone = lambda i: comments[i][0] if i in comments and comments[i][2] else -1
    begins = {start: name for name, (start, _) in [*names.items()][::-1]}  # the first argument of a line
    ends = {end: name for name, (_, end) in names.items()}                 # the last that ends on it
    for name, (start, end) in names.items():
        first, after, line = start, end, lines[function.lineno - 1 + start]
        indent = len(line) - len(line.lstrip())
        while begins[start] == name and indent_alone(first - 1) == indent: first -= 1
        text = [comments[i][1] for i in range(first, start)]
        if ends[end] == name and end in comments:
            while indent_alone(after + 1) > indent: after += 1
            text += [comments[i][1] for i in range(end, after + 1)]
        if text: found[name] = ' '.join(text)
    return found


def documented(docstring, said, indent):
    "A docstring, as a source has it, with a section on arguments; one that has such a section stays as it is."
    parts = re.fullmatch(r'(r?)("""|\'\'\'|"|\')(.*)\2', docstring, re.S)
    if not parts or HEAD[1] in docstring: return docstring
    raw, _, text = parts.groups()
    first, *rest = text.rstrip().split('\n')
    if indent + 3 + len(first) > WIDEST: first = ('\n' + ' ' * indent).join(wrapped(first, WIDEST - indent - 3))
    entries = [f'{name} : {about}' if raw else f'{name} : {about}'.replace('\\', r'\\') for name, about in said.items()]
    lines = [line for entry in entries for line in wrapped(entry, WIDEST - indent, subsequent_indent='    ')]
    return '\n'.join([f'{raw}"""{first}', *rest, '', *(' ' * indent + line for line in (*HEAD, *lines, '"""'))])


def with_parameters(source):
    "A module's source with sections on arguments in its docstrings."
    lines, places, tree = source.split('\n'), [], ast.parse(source)
    for owner in (tree, *(n for n in tree.body if isinstance(n, ast.ClassDef))):
        for f in owner.body:
            if not isinstance(f, ast.FunctionDef) or f.name.startswith('_') and f.name != '__init__': continue
            where = owner if f.name == '__init__' else f
            said = argument_comments(f, lines)
            if said and ast.get_docstring(where): places.append((where.body[0], said, where.col_offset + 4))
    for node, said, indent in sorted(places, key=lambda place: -place[0].lineno):
        rows = [line.encode() for line in lines[node.lineno - 1:node.end_lineno]]
        before, after = rows[0][:node.col_offset], rows[-1][node.end_col_offset:]
        rows[-1] = rows[-1][:node.end_col_offset]
        rows[0] = rows[0][node.col_offset:]
        new = documented(b'\n'.join(rows).decode(), said, indent)
        lines[node.lineno - 1:node.end_lineno] = (before.decode() + new + after.decode()).split('\n')
    return '\n'.join(lines)


def main():
    from nbdev.doclinks import nbdev_export
    os.chdir(ROOT)
    nbdev_export()
    for path in sorted((ROOT / 'credit_rl').glob('[!_]*.py')):
        source = path.read_text(encoding='utf-8')
        if (new := with_parameters(source)) != source: path.write_text(new, encoding='utf-8')


if __name__ == '__main__':
    main()
