__version__ = "0.1.0"

import sys

if sys.argv[:1] == ['-m'] and any(word.startswith('credit_rl.') for word in sys.orig_argv):
    # `python -m credit_rl.MODULE`: this process is ours, and Python is about to look for the module that it will run
    from credit_rl.launch import let_threads_sleep
    let_threads_sleep()


def __getattr__(name):
    "The names that 88_api lists, each imported when it is first asked for (PEP 562)."
    from credit_rl.api import find
    return find(name)


def __dir__():
    from credit_rl.api import HOMES, MODULES
    return sorted({*globals(), *HOMES, *MODULES})
