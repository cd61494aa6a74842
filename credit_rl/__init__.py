__version__ = "0.1.0"

import sys

from credit_rl.api import HOMES, MODULES, Documented, find

sys.meta_path.insert(0, Documented)   # help() of a function says what its arguments are, see 88_api


def __getattr__(name):
    "The names that 88_api lists, each imported when it is first asked for (PEP 562)."
    return find(name)


def __dir__():
    return sorted({*globals(), *HOMES, *MODULES})
