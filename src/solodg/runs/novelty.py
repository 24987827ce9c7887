"""How unlike the source images an image is: a score that is calibrated on domains left out.

Two distances of an image are added: that of its embedding to the fifth nearest of some source
training images, by their angle, and the same for the style, each channel in units of its deviation.
To calibrate them, each source domain is left out of these images in turn, and its validation images
are compared with those of the others. Novelty 0.95 then says: further from the sources than 95% of
the images of a source domain are from the other ones. How the forms of the score compare:
docs/when_not_to_answer.md.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from solodg.models.extractor import recorded_features
from solodg.runs.predictions import Floats
from solodg.storage import damaged
from solodg.storage.tensors import read_tensors, write_tensors
from solodg.types import Features

Result = TypeVar("Result")
NOVELTY = "novelty.safetensors"
LEFT_OUT = (
    "0.95: further from the source domains than 95% of the images of a source domain are from the "
    "others, each left out in turn"
)
ONE_DOMAIN = (
    "0.95: further from the training images than 95% of the validation images; no domain could be "
    "left out, so images of a new domain are likely to get 1"
)
_QUANTILES = 101
_NEIGHBOUR = 5  # an outlier among the source images is near to few others
_LEAST = 1e-6  # of a deviation, relative to the mean one


class Described(NamedTuple):
    """The features of labelled images, as arrays."""

    embedding: Floats  # (N, D)
    style: Floats  # (N, S)
    labels: NDArray[np.int64]  # (N,)
    domains: NDArray[np.int64]  # (N,)

    def features(self) -> Features:
        """Returns embedding and style as tensors."""
        return Features(torch.from_numpy(self.embedding), torch.from_numpy(self.style))

    def only(self, chosen: NDArray[np.bool_]) -> "Described":
        """Returns the features of the chosen images."""
        return Described(
            self.embedding[chosen], self.style[chosen], self.labels[chosen], self.domains[chosen]
        )


class Distances(nn.Module):
    """The distances of images to source images near them: in embedding, and in style."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name in ("embeddings", "styles", "scale"):
            self.register_buffer(name, buffers[name].float())
        self.embeddings: Tensor  # (M, D) of source images, of length one
        self.styles: Tensor  # (M, S) of source images, scaled
        self.scale: Tensor  # (S,) one over the deviation
        # Kept, as an exported graph would store the square of every number.
        for name in ("embeddings", "styles"):
            squares = getattr(self, name).square().sum(1)  # (M,)
            self.register_buffer(f"{name}_squares", squares, persistent=False)
        self.embeddings_squares: Tensor
        self.styles_squares: Tensor

    @classmethod
    def of(cls, images: Described) -> "Distances":
        """Keeps the given images to compare others with."""
        embeddings, styles = (torch.from_numpy(a) for a in (images.embedding, images.style))
        deviation = styles.std(0, correction=0)
        scale = 1 / deviation.clamp_min(max(_LEAST * float(deviation.mean()), 1e-12))
        return cls(embeddings=F.normalize(embeddings), styles=styles * scale, scale=scale)

    def forward(self, features: Features) -> Tensor:
        """Returns the distances in embedding and in style, (B, 2)."""
        embedding, style = F.normalize(features.embedding.float()), features.style.float()
        near = [
            _nearest(embedding, self.embeddings, self.embeddings_squares),
            _nearest(style * self.scale, self.styles, self.styles_squares),
        ]
        return torch.stack(near, 1)

    def of_images(self, images: Described) -> Floats:
        """Returns the distances of described images, (N, 2)."""
        found: Floats = self(images.features()).double().numpy()
        return found


class Novelty(nn.Module):
    """The share of calibration images whose distances, added up, are smaller: 0 to 1."""

    def __init__(self, distances: Distances, unit: Tensor, quantiles: Tensor, basis: str) -> None:
        super().__init__()
        self.distances, self.basis = distances, basis
        self.register_buffer("unit", unit.float())
        self.register_buffer("quantiles", quantiles.float())
        self.unit: Tensor  # (2,) the median distances of calibration images
        self.quantiles: Tensor  # (Q,) of their sums

    @classmethod
    def fit(cls, train: Described, val: Described, *, leave_out: bool) -> "Novelty":
        """Computes the score from source images; `val` calibrates it.

        Without `leave_out`, or with a single domain, validation images are compared with their own
        domain too. A domain without validation images is calibrated on its training images.
        """
        domains = np.unique(train.domains)
        leave_out = leave_out and len(domains) > 1
        found = []
        for domain in domains if leave_out else []:
            rest = train.only(train.domains != domain)
            held = val.only((val.domains == domain) & np.isin(val.labels, rest.labels))
            if not len(held.labels):
                held = train.only((train.domains == domain) & np.isin(train.labels, rest.labels))
            if len(held.labels):
                found.append(Distances.of(rest).of_images(held))
        distances = Distances.of(train)
        basis = LEFT_OUT if found else ONE_DOMAIN
        found = found or [distances.of_images(val if len(val.labels) else train)]
        unit = np.mean([np.median(each, 0) for each in found], 0).clip(1e-12)  # (2,)
        grid = np.linspace(0, 1, _QUANTILES)
        # Every domain counts the same, whatever the number of its images.
        sums = np.concatenate([np.quantile((each / unit).sum(1), grid) for each in found])
        quantiles = np.quantile(sums, grid)
        return cls(distances, torch.from_numpy(unit), torch.from_numpy(quantiles), basis)

    def forward(self, seen: Sequence[Features]) -> Tensor:
        """Returns the novelty of images (B,) from the features that their prediction recorded.

        A method that reads an image several times records features each time; they are averaged.
        """
        parts = zip(*seen, strict=True)
        features = Features(*(torch.stack(part).mean(0) for part in parts))
        sums = (self.distances(features) / self.unit).sum(1)  # (B,)
        widths = (self.quantiles[1:] - self.quantiles[:-1]).clamp_min(1e-9)
        shares: Tensor = (sums[:, None] - self.quantiles[:-1]) / widths
        return shares.clamp(0, 1).mean(1)


def with_novelty(
    model: Callable[[Tensor], Result], novelty: Novelty | None, x: Tensor
) -> tuple[Result, Tensor | None]:
    """Runs a model on images; returns its result and their novelty (B,), in one backbone pass."""
    if novelty is None:
        return model(x), None
    with recorded_features() as seen:
        result = model(x)
    return result, novelty(seen)


def save_novelty(folder: Path, novelty: Novelty) -> None:
    """Writes the score of a run to its folder."""
    write_tensors(folder / NOVELTY, novelty.state_dict(), {"basis": novelty.basis})


def load_novelty(folder: Path) -> Novelty | None:
    """Reads the score of a run; None for a run of an earlier version, which has none."""
    path = folder / NOVELTY
    if not path.is_file():
        return None
    state, header = read_tensors(path, checksum_required=True)
    start = "distances."
    inner = {n.removeprefix(start): t for n, t in state.items() if n.startswith(start)}
    try:
        found = Novelty(Distances(**inner), state["unit"], state["quantiles"], str(header["basis"]))
    except KeyError as error:
        raise damaged(str(path), f"it lacks {error}") from error
    return found.eval()


def _nearest(points: Tensor, others: Tensor, squares_of_others: Tensor) -> Tensor:
    """Returns the distance of points (B, D) to the fifth nearest of others (M, D), (B,)."""
    # The small matrix is transposed: an exported graph would store the large one twice.
    products = (others @ points.T).T  # (B, M)
    squares = points.square().sum(1, keepdim=True) + squares_of_others - 2 * products
    near = squares.topk(min(_NEIGHBOUR, len(others)), largest=False).indices[:, -1]  # (B,)
    # Anew: what is left of large squares is mostly rounding where two points are close.
    found: Tensor = (points - others[near]).square().sum(1).sqrt()
    return found
