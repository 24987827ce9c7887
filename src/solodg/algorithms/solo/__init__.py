"""The paper's method: a classifier written for every single image."""

from solodg.algorithms.solo.method import Solo, adapts

__all__ = ["Solo", "adapts"]
