__version__ = "0.1.0"

from credit_rl.api import HOMES, MODULES, find


def __getattr__(name):
    "The names that 88_api lists, each imported when it is first asked for (PEP 562)."
    return find(name)


def __dir__():
    return sorted({*globals(), *HOMES, *MODULES})
