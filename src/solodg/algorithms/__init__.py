"""Training-time methods by name. Adding one: a file here, an entry below, a row in the README."""

from solodg.algorithms.base import Algorithm
from solodg.algorithms.erm import ERM
from solodg.algorithms.solo import Solo
from solodg.algorithms.solo_plus import SoloPlus
from solodg.algorithms.ttt import TTT

ALGORITHMS: dict[str, type[Algorithm]] = {
    "erm": ERM,
    "solo": Solo,
    "solo_plus": SoloPlus,
    "ttt": TTT,
}

__all__ = ["ALGORITHMS", "Algorithm"]
