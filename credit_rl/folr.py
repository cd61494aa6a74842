"""TSPO under the name of its reward: all that `credit_rl.tspo` holds."""
from .tspo import *
