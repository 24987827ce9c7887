"""The paper's method on a style code, with FiLM and a pose learned from agreement of domains."""

from solodg.algorithms.solo_code.method import SoloCode

__all__ = ["SoloCode"]
