__version__ = "0.1.0"

import sys

from credit_rl.api import HOMES, MODULES, Documented, find

sys.meta_path.insert(0, Documented)   # help() of a function says what its arguments are, see 88_api


def _interrupted(kind, error, traceback, usual=sys.excepthook):
    "What `sys.excepthook` does in a command: Ctrl-C is a line, also in the seconds in which modules are imported."
    if not issubclass(kind, KeyboardInterrupt): return usual(kind, error, traceback)
    print('credit_rl: interrupted; give the same command again', file=sys.stderr)


if sys.argv[:1] == ['-m']: sys.excepthook = _interrupted   # so it is while `python -m credit_rl.MODULE` looks for it


def __getattr__(name):
    "The names that 88_api lists, each imported when it is first asked for (PEP 562)."
    return find(name)


def __dir__():
    return sorted({*globals(), *HOMES, *MODULES})
