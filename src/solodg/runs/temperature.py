"""The temperature of a model's probabilities: what source validation says, and what it changes.

Probabilities to the power of 1 / T, scaled to a sum of one (Guo et al., 2017): above 1 a model is
less sure. It is fitted on images of domains that the model has seen, on which it is right more
often than on a new one. So it is reported and not applied: predictions are those of T = 1.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from solodg.runs.metrics import metrics
from solodg.runs.predictions import Floats, Predictions
from solodg.storage import read_json, write_json

TEMPERATURE = "temperature.json"
_SMALLEST = 1e-12  # of a probability, as in the NLL
_RANGE = (-3.0, 3.0)  # of the logarithm


class Temperature(BaseModel):
    """The temperature with the lowest NLL on source validation images, and its effect there."""

    model_config = ConfigDict(extra="forbid")

    temperature: float = Field(gt=0)
    images: int
    before: dict[str, float]  # NLL and ECE
    after: dict[str, float]

    def effect(
        self, predictions: Predictions, labels: NDArray[np.int64]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Returns NLL and ECE on other images without and with it."""
        return calibration_effect(predictions, labels, self.temperature)

    def sentence(self) -> str:
        """Returns what was fitted, and that it is not applied."""
        return (
            f"Temperature {self.temperature:.2f}, fitted on {self.images} source validation "
            f"images: {effect_text(self.before, self.after)} there. It is reported, not applied: "
            "all probabilities are those of temperature 1."
        )


def fit_temperature(predictions: Predictions, labels: NDArray[np.int64]) -> Temperature:
    """Fits the temperature on images of the given (N,) classes."""
    from scipy.optimize import minimize_scalar  # late: it takes half a second to import

    def nll(log_temperature: float) -> float:
        return metrics(at_temperature(predictions, np.exp(log_temperature)), labels)["nll"]

    best = float(np.exp(minimize_scalar(nll, bounds=_RANGE, method="bounded").x))
    before, after = calibration_effect(predictions, labels, best)
    return Temperature(temperature=best, images=len(labels), before=before, after=after)


def at_temperature(predictions: Predictions, temperature: float) -> Predictions:
    """Returns predictions with their probabilities at a temperature; nothing else changes."""
    logs = np.log(np.clip(predictions.probabilities, _SMALLEST, None)) / temperature
    powers: Floats = np.exp(logs - logs.max(1, keepdims=True))
    return Predictions(powers / powers.sum(1, keepdims=True))


def calibration_effect(
    predictions: Predictions, labels: NDArray[np.int64], temperature: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns NLL and ECE without and with a temperature."""
    found = (metrics(p, labels) for p in (predictions, at_temperature(predictions, temperature)))
    before, after = ({name: each[name] for name in ("nll", "ece")} for each in found)
    return before, after


def effect_text(before: dict[str, float], after: dict[str, float]) -> str:
    """Returns the effect of a temperature in words, e.g. `NLL 0.50 to 0.40, ECE 8.0 to 3.1%`."""
    return (
        f"NLL {before['nll']:.3f} to {after['nll']:.3f}, "
        f"ECE {100 * before['ece']:.1f} to {100 * after['ece']:.1f}%"
    )


def save_temperature(folder: Path, found: Temperature) -> None:
    """Writes the temperature of a run to its folder."""
    write_json(folder / TEMPERATURE, found.model_dump())


def load_temperature(folder: Path) -> Temperature | None:
    """Reads the temperature of a run; None for a run of an earlier version, which has none."""
    path = folder / TEMPERATURE
    return read_json(path, Temperature) if path.is_file() else None
