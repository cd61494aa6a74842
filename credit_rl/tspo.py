"""TSPO under its own name: all that `credit_rl.folr` holds."""
from .folr import *
