"""Pages that are made from what the code says of itself, so that none can fall behind it: one for every method in one
form, the settings, the names of the package, the results. In a page a notebook's name in code type becomes a link."""
import importlib
import inspect
import io
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import yaml
from fastcore.docments import docments

from credit_rl import parameters, settings
from credit_rl.audit import AuditChoice
from credit_rl.compare import (curve_panels, find_runs, learning_curves, load_runs, markdown_table, named_runs,
                               run_label)
from credit_rl.methods import METHODS, MODULES, extra_passes, method_table
from credit_rl.parameters import by_group
from credit_rl.parts import Facts, Loss
from credit_rl.prepare import WarmUpChoice
from credit_rl.runlog import read_params, read_summary, read_text, stored_folders
from credit_rl.settings import Config
from credit_rl.sft import Imitation
from notebooks import kept


# ---- pages of methods ----

def page_name(name):  # str: of a method
    "The name of a method's page, without its ending: str."
    return name.replace('*', '-star').replace('+', '-plus-').strip('-').replace('--', '-')


def notebook_of(module):  # ModuleType
    "The notebook that a module is exported from, by its name in code type."
    path = re.search(r'File to edit: (.*)\.ipynb', Path(module.__file__).read_text(encoding='utf-8'))[1]
    return f'`{Path(path).name}`'


@dataclass(frozen=True)
class Stored:
    "What the repository holds about a method besides its code."
    runs: str = ''      # folder of the comparison that the curve is from, '' where there is none
    table: str = ''     # of its results there, in Markdown
    picture: str = ''   # its curve: path from the page
    audits: dict = field(default_factory=dict)   # folder of an audit -> row of its table, column -> text
    params: tuple = ()  # files of settings that name it: paths from the top of the repository


def _homes():
    "Part of a method -> module that defines it, by the parts' identities."
    return {id(part): module for module in MODULES for part in module.PARTS}


def equation_section(method, stored):
    "The parts of a method: what each is called, its equation, its paper, its notebook."
    homes, lines = _homes(), []
    spelling = f'{"+".join(r.name for r in method.rewards)}/' + '/'.join(p.name for p in method.parts[-3:])
    kinds = ['Reward'] * len(method.rewards) + ['Rule', 'Sampling', 'Loss']
    for kind, p in zip(kinds, method.parts):
        home = f', {notebook_of(homes[id(p)])}' if id(p) in homes else ''
        lines.append(f'**{kind} `{p.name}`** ({p.paper}{home})\n\n$$\n{p.equation}\n$$\n')
    return '\n'.join([f'As parts: `{spelling}`. Any of them can be exchanged ([all methods](index.md)).\n', *lines])


SEEN = {
    'gold': 'how probable the policy itself finds each gold answer, at the state before every turn',
    'teacher': 'how probable a teacher, a frozen model, finds each gold answer, at the state before every turn',
    'values': "a critic's values",
}


def sees_section(method, stored):
    "What a method reads of a rollout, as a list."
    needs, rule = method.needs, method.rule
    lines = ['the text of the rollouts: what was called, shown and answered', *(SEEN[name] for name in needs.forwards)]
    if needs.plays: lines.append(f'{needs.plays} games that the policy plays on from the state before every turn')
    if rule.compares: lines.append('other attempts at the same question, so `group_size` is two or more')
    lines += [f'rollouts of at most {most} turns' for most in _turns(method).values()]
    return '\n'.join(f'- {line}' for line in lines)


def cost_section(method, stored):
    "What a step by a method takes besides rollouts and update."
    passes, needs = extra_passes(method), method.needs
    lines = [f'{n} forward{"s" * (n > 1)} of the {model} over the batch, without gradient'
             for model, n in passes.items()]
    if method.rule.critic: lines.append('a critic that learns beside the policy')
    if needs.plays: lines.append(f'{needs.plays} games played on from every state')
    if needs.rounds > 1: lines.append(f'up to {needs.rounds} rounds of rollouts, until enough groups are worth an update')
    shown = '\n'.join(f'- {line}' for line in lines)
    return shown or 'Nothing besides rollouts and update: it is computed from their text.'


def _cell(text):
    "A text as a cell of a table in Markdown."
    return ' '.join(str(text).split()).replace('|', r'\|')


def _in_code(text):
    "A text with the names of notebooks in code type."
    return re.sub(r'\b(\d\d_[a-z_]+)', r'`\1`', text)


def option_table(options, values=None):
    """A table in Markdown of options (dict name -> Option): default, one line, range. `values` (dict name -> value)
    are what stands in place of the default."""
    lines = ['| name | default | what it is | allowed |', '|---|---|---|---|']
    for name, o in options.items():
        default = f'`{o.default!r}`'
        if values is not None and values[name] != o.default: default = f'`{values[name]!r}` (elsewhere {default})'
        lines.append('| ' + ' | '.join(map(_cell, (f'`{name}`', default, _in_code(o.about), o.range()))) + ' |')
    return '\n'.join(lines)


def options_section(method, stored):
    "A method's options and a line on how they are set."
    return ('Set as `options.NAME=value` on a command line; in a file as `options: {NAME: value}`. What every run has '
            f'besides stands among the [settings](../settings.md).\n\n{option_table(method.knobs, method.options)}')


def differs_section(method, stored):
    "How ours differs from the paper: of each part, or what the row says itself."
    of_parts = [p.differs for p in method.parts if p.differs]
    lines = of_parts if method.differs == '; '.join(of_parts) else [method.differs]
    return '\n'.join(f'- {_in_code(line)}' for line in lines) or 'No difference is known.'


def _row_command(method, **more):
    "The settings that train by a method and nothing else, as typed in a shell."
    given = {'method': method.name, **_turns(method), **more}
    return ' '.join(shlex.quote(f'{name}={value}') for name, value in given.items())


def _turns(method): return {'max_turns': 2} if method.rule.fits(Facts(max_turns=3), {}) else {}


def curve_section(method, stored):
    "The learning curve of a method, and its results."
    if not stored.runs:
        pair = ' '.join(shlex.quote(n) for n in dict.fromkeys((method.name, 'grpo')))
        turns = ''.join(f' {name}={value}' for name, value in _turns(method).items())
        return ('No run of it by this code is stored. This command makes three, three of GRPO, and a report:\n\n'
                f'    python -m credit_rl.compare --methods {pair} --seeds 1 2 3 --out '
                f'runs/{page_name(method.name)}{turns}')
    return (f'On the tiny world, from the stored runs in `{stored.runs}` ([results](../results.md) has the other '
            f'methods):\n\n![exact match on development questions by training step, {method.name}]({stored.picture})'
            f'\n\n{stored.table}')


def audit_section(method, stored):
    "What audits found about a method, or the command of one."
    if not stored.audits:
        return ('No audit of it is stored. This command asks how well its credit agrees with true credit, on a '
                f"checkpoint and the agent's own rollouts ({notebook_of(inspect.getmodule(AuditChoice))}):\n\n"
                f'    credit-rl audit model=FOLDER {shlex.quote(f"rules=[{method.name}]")}')
    columns = list(dict.fromkeys(column for row in stored.audits.values() for column in row))
    rows = [[f'`{folder}`', *(row.get(c, '') for c in columns)] for folder, row in stored.audits.items()]
    lines = [['audit', *columns], ['---'] * (1 + len(columns)), *rows]
    about = 'How well its credit agrees with true credit, by audit; in brackets 95 % intervals:\n\n'
    return about + '\n'.join('| ' + ' | '.join(map(_cell, line)) + ' |' for line in lines)


def command_section(method, stored):
    "The commands that train by a method."
    lines = ['On the tiny world, in minutes on a CPU:', '',
             '    credit-rl train ' + _row_command(method, run=f'runs/{page_name(method.name)}'), '']
    if stored.params:
        lines += ['By a file of settings that names it; `dry_run=true` only says what a run would take:', '']
        lines += [f'    credit-rl train --params {path} dry_run=true' for path in stored.params]
        lines += ['', 'The files: ' + ', '.join(f'[{Path(p).stem}](../{p})' for p in stored.params)]
    return '\n'.join(lines)


SECTIONS = {
    'Equation': equation_section, 'What it sees': sees_section, 'Cost': cost_section, 'Options': options_section,
    'How ours differs': differs_section, 'Curve': curve_section, 'Audit': audit_section, 'Command': command_section,
}


def method_page(
    method,           # Method
    stored=Stored(),  # what the repository holds about it
):
    "The page of a method, in Markdown: the same sections for each."
    parts = [f'# {method.name}\n\n> {method.paper}']
    parts += [f'## {title}\n\n{section(method, stored)}' for title, section in SECTIONS.items()]
    return '\n\n'.join(parts) + '\n'


def methods_page():
    "The table of all methods, in Markdown, each with a link to its page."
    rows = [re.split(r'(?<!\\)\|', line)[1:6] for line in method_table().split('\n')]   # the rest is on the pages
    for row, name in zip(rows[2:], METHODS): row[0] = f' [{name}]({page_name(name)}.md) '
    lines = ['|' + '|'.join(row) + '|' for row in rows]
    return ('# Methods\n\nA method is a choice of parts: rewards, a rule that compares them, groups that are worth an '
            f'update, and a loss ({notebook_of(inspect.getmodule(method_table))}).\n\n' + '\n'.join(lines) + '\n')


# ---- what is stored ----

def kept_folders(
    root,     # top of the repository
    pattern,  # of a file, from `runs/`
):
    "Folders of stored runs with such a file; a reader's own, of which git keeps nothing, are no part of the site."
    runs = Path(root, 'runs')
    ours = {path.relative_to(runs).parts[0] for path in kept(root, 'runs/**/*')}
    return [folder for folder in stored_folders(runs, pattern) if folder.relative_to(runs).parts[0] in ours]


def comparisons(root):  # top of the repository
    """Folders of stored runs and what was compared there, the widest first: dict folder -> names of runs, without the
    seed, of methods and variants that have a curve."""
    found = {}
    for folder in sorted({run.parent for run in kept_folders(root, '*/*/params.yaml')}):
        runs = {run: read_params(run) for run in find_runs(folder) if read_summary(run) is not None}
        found[folder] = sorted({stem for run, params in runs.items() if (stem := run.name.rpartition('-')[0]) in
                                (run_label(run, params), *_stems(params['method']))})
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _stems(name): return name, page_name(name)   # what the folders of a method's runs are called, before the seed


MEASURES = ('within rollouts', 'within groups', 'sign', 'signal to noise', 'signal to noise over grpo')


def _measures(row):
    """The measures of an audit's row, each with its 95 % interval: dict column -> text, '' where it was not measured.
    An older audit has a cosine, and a signal to noise whose interval does not cover: it is left out."""
    number = lambda name: f'{float(row[name]):.2f}'
    def said(name):
        if not row[name]: return ''
        if 'cosine' in row and name.startswith('signal'): return number(name)
        low, high = f'{name}, low', f'{name}, high'
        return number(name) + (f' ({number(low)} to {number(high)})' if row.get(low) and row.get(high) else '')
    return {name: said(name) for name in MEASURES if name in row}


def stored_audits(root):
    "Rows of the audits that are stored, by MEASURES: dict method -> folder -> column -> text."
    found = {}
    for folder in kept_folders(root, '**/audit.csv'):
        table = pd.read_csv(io.StringIO(read_text(folder/'audit.csv')), index_col=0, dtype=str, keep_default_na=False)
        for name, row in table.iterrows():
            found.setdefault(name, {})[str(folder.relative_to(root))] = _measures(row.to_dict())
    return found


def params_files(root):
    "Files of settings by the method that they name: dict method -> paths from `root`."
    found = {}
    for path in kept(root, 'runs/params/*.yaml'):
        name = yaml.safe_load(path.read_text(encoding='utf-8')).get('method')
        if name: found.setdefault(name, []).append(str(path.relative_to(root)))
    return found


@dataclass(frozen=True)
class Archive:
    "What the repository holds about all methods, read once."
    root: Path          # top of the repository
    comparisons: dict   # folder -> names of runs, without the seed, of methods that have a curve
    audits: dict        # method -> folder -> column -> text
    params: dict        # method -> paths of files of settings


def read_archive(root):
    "Read the `Archive` of a repository."
    return Archive(Path(root), comparisons(root), stored_audits(root), params_files(root))


def _draw(runs, path):
    "Draw the curves of runs into a file; many methods get a panel each."
    table = load_runs(runs)
    figure = (learning_curves if table.method.nunique() <= 7 else curve_panels)(table)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def stored_about(
    method,    # Method
    archive,   # Archive
    out=None,  # folder of the page, which gets the picture; None: nothing is drawn
):
    "What the repository holds about a method: `Stored`."
    name, wide = method.name, archive.comparisons
    folder, stem = next(((folder, stem) for folder, found in wide.items() for stem in _stems(name) if stem in found),
                        (None, None))
    audits, params = archive.audits.get(name, {}), tuple(archive.params.get(name, ()))
    if folder is None: return Stored(audits=audits, params=params)
    runs = named_runs(folder, *dict.fromkeys([stem] + ['grpo'] * ('grpo' in wide[folder])))
    picture = f'curves/{page_name(name)}.png'
    if out is not None: _draw(runs, Path(out)/picture)
    columns = ['method', 'seeds', 'base EM', 'final EM', 'gain', 'minutes', 'note']
    return Stored(str(folder.relative_to(archive.root)), markdown_table(runs, columns=columns), picture, audits, params)


# ---- results, settings, names ----

def _about_file(path):
    "The comment at the top of a file of settings, as Markdown; '' without a file."
    if not path.exists(): return ''
    lines = path.read_text(encoding='utf-8').splitlines()
    head = lines[:next((i for i, line in enumerate(lines) if line[:1] != '#'), len(lines))]
    return '\n'.join(line.removeprefix('#').removeprefix(' ') for line in head)


def results_page(
    archive,   # Archive
    out=None,  # folder of the page, which gets the pictures; None: nothing is drawn
):
    "The tables of the stored comparisons with their curves, in Markdown."
    parts = ['# Results\n\nTest exact match on the tiny world: mean over seeds (lowest to highest). What the tables '
             'mean, and what they do not show, stands in `97_results`, which `make reports` runs, and in the '
             '[log of findings](runs/LOG.md).']
    for folder, methods in archive.comparisons.items():
        if not (folder/'table.md').exists(): continue
        name = str(folder.relative_to(archive.root))
        if out is not None: _draw(named_runs(folder, *methods), Path(out)/'curves'/f'{folder.name}.png')
        parts.append('\n\n'.join(text for text in [
            f'## {name}', _about_file(archive.root/'runs'/'params'/f'{folder.name}.yaml'),
            f'![exact match on development questions by training step, {name}](curves/{folder.name}.png)',
            (folder/'table.md').read_text(encoding='utf-8').strip()] if text))
    return '\n\n'.join(parts) + '\n'


COMMANDS = {  # verb of credit-rl -> groups of settings that no other command has, what stands before their names
    'audit': (AuditChoice, ''), 'warmup': (WarmUpChoice, ''), 'sft': (Imitation, 'sft.'),
}


def settings_page():
    "All settings by group, in Markdown."
    parts = ["# Settings\n\nOne name sets a run in a YAML file, on a command line (`name=value`) and in a notebook "
             'that papermill runs (`-p name value`); see ' + notebook_of(parameters) + ' and '
             + notebook_of(settings) + '. A value out of its range is refused before anything is computed. '
             "What a method takes besides, its `options`, stands on its [page](methods/index.md)."]
    parts += [f'## {head}\n\n{option_table(options)}' for head, options in by_group(Config).items()]
    parts.append('## Fields of `loss`\n\nSet as `loss.NAME=value`; a method has its own where a run says nothing.\n\n'
                 + option_table(next(iter(by_group(Loss).values()))))
    for verb, (group, prefix) in COMMANDS.items():
        head, options = next(iter(by_group(group, prefix=prefix).items()))
        parts.append(f'## credit-rl {verb}\n\n{head}. Besides the settings of a training run:\n\n'
                     f'{option_table(options)}')
    return '\n\n'.join(parts) + '\n'


def _plain(text):
    "A text whose signs mean nothing to Markdown."
    return re.sub(r'([*_<|])', r'\\\1', text)


def name_entry(name, module):  # module: ModuleType
    "What the page says of one name: signature, docstring, and of the arguments what the comments beside them say."
    thing = getattr(module, name)
    if not callable(thing): return f'### {name}\n\n`{type(thing).__name__}` of {len(thing)}: {", ".join(thing)}'
    signature = str(inspect.signature(thing))
    if len(signature) > 100: signature = '(\n    ' + signature[1:].replace(', ', ',\n    ').replace(')', ',\n)', 1)
    about = {} if thing is settings.Config else docments(thing, returns=False)   # settings have a page of their own
    lines = [f'- `{argument}`: {_plain(" ".join(text.split()))}' for argument, text in about.items() if text]
    text = _plain(inspect.getdoc(thing).split('\n\n')[0])
    return '\n\n'.join([f'### {name}', f'```python\n{name}{signature}\n```', text, '\n'.join(lines)]).strip()


def api_page(homes):  # dict name -> name of the module that it lives in
    "The names that the package gives, by module, in Markdown."
    parts = ['# The package from outside\n\n`import credit_rl` gives these names and imports nothing heavy before one '
             'is used: `credit_rl.tspo_advantages(…)`. N trajectories, K turns, T tokens.']
    for home in dict.fromkeys(homes.values()):
        module = importlib.import_module(f'credit_rl.{home}')
        about = inspect.getdoc(module).split('\n\n')[0]
        parts.append(f'## credit_rl.{home}\n\n{about} {notebook_of(module)}')
        parts += [name_entry(name, module) for name, of in homes.items() if of == home]
    return '\n\n'.join(parts) + '\n'


def made_pages(
    root,   # top of the repository
    out,    # folder of the pages, into which pictures are drawn; None: nothing is drawn
    homes,  # name that the package gives -> its module
):
    "The pages that are made from the code: dict path -> Markdown."
    archive, folder = read_archive(root), Path(out)/'methods' if out else None
    pages = {f'methods/{page_name(m.name)}.md': method_page(m, stored_about(m, archive, folder))
             for m in METHODS.values()}
    return {**pages, 'methods/index.md': methods_page(), 'settings.md': settings_page(), 'api.md': api_page(homes),
            'results.md': results_page(archive, out)}
