"""CARL under its own name: all that `credit_rl.smdp` holds."""
from .smdp import *
