"""Predictions outside the model, without torch: of one image and of many.

Class probabilities have three forms between the model and the reader:

    Outputs       tensors (B, C) inside a model: logits, probabilities, probabilities before
                  adaptation (`algorithms.base`)
    Predictions   arrays (N, C) of many images: what metrics, reports and figures compute with
    Prediction    one image, by class name: what `predict`, the server and a card of a report show

`Predictions.from_tensors` makes the second from the first, and `Predictions.named` the third from
the second. `Prediction.to_json` returns the JSON of `solodg predict --json` and of the server.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

import numpy as np
from numpy.typing import NDArray

from solodg.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float64]
NOVELTY_DIGITS = 2  # it is a share of some hundred images


class NotFiniteError(UserError):
    """Probabilities that are NaN or infinite, which mean nothing."""


@dataclass(frozen=True)
class Prediction:
    """The predicted class of one image, with the probabilities of all classes."""

    label: str
    probability: float
    uncertainty: float  # 0: certain; 1: a guess
    probabilities: dict[str, float]  # by class
    before: dict[str, float] | None = None  # by class, before adaptation; None: nothing adapts
    novelty: float | None = None  # 1: further from the sources than all of them from each other

    def rounded(self, digits: int) -> "Prediction":
        """Returns this prediction with every number rounded, and kept within [0, 1].

        Sums of float32 may end slightly beyond that range. Novelty gets
        `NOVELTY_DIGITS`.
        """

        def short(value: float) -> float:
            return min(max(round(value, digits), 0.0), 1.0)

        before = self.before and {name: short(value) for name, value in self.before.items()}
        after = {name: short(value) for name, value in self.probabilities.items()}
        novelty = (
            None
            if self.novelty is None
            else min(max(round(self.novelty, NOVELTY_DIGITS), 0.0), 1.0)
        )
        return Prediction(
            self.label, short(self.probability), short(self.uncertainty), after, before, novelty
        )

    def to_json(self, image: str | None) -> dict[str, Any]:
        """Returns the JSON object of this prediction; `image` is the name of the image."""
        return {
            "image": image,
            "class": self.label,
            "probability": self.probability,
            "uncertainty": self.uncertainty,
            "novelty": self.novelty,
            "probabilities": self.probabilities,
            "before": self.before,
        }


@dataclass(frozen=True, eq=False)
class Predictions:
    """The class probabilities of N images, all finite: `NotFiniteError` is raised otherwise."""

    probabilities: Floats  # (N, C)
    before: Floats | None = None  # (N, C) before adaptation; None: nothing adapts
    novelty: Floats | None = None  # (N,) see `runs.novelty`; None: the model does not tell
    readings: Floats | None = None  # (N,) how often each was read; None: alike for all, or unknown

    def __post_init__(self) -> None:
        check_finite(self.probabilities)
        if self.before is not None:
            check_finite(self.before)
        if self.novelty is not None:
            check_finite(self.novelty[:, None])

    def __len__(self) -> int:
        return len(self.probabilities)

    @classmethod
    def from_tensors(
        cls,
        probabilities: "Tensor",
        before: Union["Tensor", None] = None,
        novelty: Union["Tensor", None] = None,
        readings: Union["Tensor", None] = None,
    ) -> "Predictions":
        """Copies a model's tensors to float64 arrays, from whatever device they are on."""
        return cls(
            *(
                None if tensor is None else tensor.double().cpu().numpy()
                for tensor in (probabilities, before, novelty, readings)
            )  # type: ignore[arg-type]
        )

    @classmethod
    def concatenate(cls, parts: Sequence["Predictions"]) -> "Predictions":
        """Joins the predictions of consecutive batches of one model."""
        columns = zip(*((p.before, p.novelty, p.readings) for p in parts), strict=True)
        found = [[rows for rows in column if rows is not None] for column in columns]
        return cls(
            np.concatenate([part.probabilities for part in parts]),  # (sum of N, C)
            *(np.concatenate(rows) if rows else None for rows in found),
        )

    @property
    def chosen(self) -> NDArray[np.int64]:
        """The number of the most probable class of each image, (N,)."""
        best: NDArray[np.int64] = self.probabilities.argmax(1)
        return best

    @property
    def chosen_before(self) -> NDArray[np.int64] | None:
        """The number of the most probable class before adaptation, (N,); None: nothing adapts."""
        return None if self.before is None else self.before.argmax(1)

    @property
    def uncertainty(self) -> Floats:
        """The uncertainty of each image, (N,)."""
        return uncertainty(self.probabilities)

    def of_image(self, index: int) -> "Predictions":
        """Returns the predictions of one image alone, (1, C)."""
        row = slice(index, index + 1)
        before = None if self.before is None else self.before[row]
        novelty = None if self.novelty is None else self.novelty[row]
        readings = None if self.readings is None else self.readings[row]
        return Predictions(self.probabilities[row], before, novelty, readings)

    def named(self, classes: Sequence[str]) -> list[Prediction]:
        """Returns one `Prediction` per image, with the names of the classes."""
        earlier = [None] * len(self) if self.before is None else list(self.before)
        novelty = [None] * len(self) if self.novelty is None else self.novelty.tolist()
        return [
            _named(row, before, novel, classes)
            for row, before, novel in zip(self.probabilities, earlier, novelty, strict=True)
        ]


def _named(
    row: Floats, before: Floats | None, novelty: float | None, classes: Sequence[str]
) -> Prediction:
    best = int(row.argmax())
    return Prediction(
        classes[best],
        float(row[best]),
        float(uncertainty(row)),
        dict(zip(classes, row.tolist(), strict=True)),
        None if before is None else dict(zip(classes, before.tolist(), strict=True)),
        novelty,
    )


def check_finite(probabilities: Floats) -> None:
    """Raises `NotFiniteError` if a number of (N, C) probabilities is NaN or infinite."""
    broken = int((~np.isfinite(probabilities)).any(axis=1).sum())
    if broken:
        raise NotFiniteError(
            f"the class probabilities of {broken} of {len(probabilities)} image(s) are not "
            "finite (NaN): the model cannot be trusted. Load it from a copy, or train it again."
        )


def uncertainty(probabilities: Floats) -> Floats:
    """Returns the entropy of (..., C) probabilities over its largest possible value.

    0 is certain, 1 is a guess.
    """
    p = np.clip(probabilities, 1e-12, 1.0)
    result: Floats = -(p * np.log(p)).sum(-1) / np.log(p.shape[-1])
    return result


def top_class(probabilities: dict[str, float]) -> str:
    """Returns the most probable class with its probability as text: `dog (0.87)`."""
    label = max(probabilities, key=probabilities.__getitem__)
    return f"{label} ({probabilities[label]:.2f})"
