"""Ranges from which `solodg tune` draws the main settings of an algorithm."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

Value = float | int | str | bool


class SearchRange(Protocol):
    """The values that a setting may take in a random search."""

    def draw(self, generator: np.random.Generator, steps: int) -> Value:
        """Returns a random value for a training of so many steps."""


@dataclass(frozen=True)
class Uniform:
    """Numbers between two bounds, all alike."""

    low: float
    high: float

    def draw(self, generator: np.random.Generator, steps: int) -> Value:
        """Returns a random number, with three digits."""
        return _rounded(generator.uniform(self.low, self.high))


@dataclass(frozen=True)
class LogUniform:
    """Positive numbers between two bounds, every order of magnitude alike."""

    low: float
    high: float

    def draw(self, generator: np.random.Generator, steps: int) -> Value:
        """Returns a random number, with three digits."""
        return _rounded(float(np.exp(generator.uniform(np.log(self.low), np.log(self.high)))))


@dataclass(frozen=True)
class StepShare:
    """Numbers of steps: a share of those of the training, between two bounds."""

    low: float
    high: float

    def draw(self, generator: np.random.Generator, steps: int) -> Value:
        """Returns a random number of steps."""
        return round(generator.uniform(self.low, self.high) * steps)


@dataclass(frozen=True)
class Choice:
    """A few values, all alike."""

    values: tuple[Value, ...]

    def draw(self, generator: np.random.Generator, steps: int) -> Value:
        """Returns one of the values."""
        return self.values[int(generator.integers(len(self.values)))]


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
