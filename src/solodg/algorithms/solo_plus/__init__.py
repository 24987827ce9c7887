"""The paper's method with further parts of an image's adaptation: pose, statistics, style code."""

from solodg.algorithms.solo_plus.method import SoloPlus

__all__ = ["SoloPlus"]
