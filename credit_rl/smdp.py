"""CARL under the name of its rule: all that `credit_rl.carl` holds."""
from .carl import *
