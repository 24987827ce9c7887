"""The plane in which images, source centres and classifiers are drawn together.

It is fitted once for a run, on a bounded number of source training images, never on a target
image, and kept in the run's folder: pictures of different images compare.

Its axes are the directions in which pairs of class centres of the sources differ most. Classifiers
are drawn in it without what all classes share, since that changes no probability, and by one
common factor that gives them the size of the centres.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import pairwise_distances
from torch import Tensor
from torch.nn import functional as F

from solodg.algorithms import Algorithm
from solodg.algorithms.centres import CentreSums
from solodg.data import LabelledImages
from solodg.data.images import digest
from solodg.errors import UserError
from solodg.predict.torch import Predictor
from solodg.progress import NoProgress, Progress
from solodg.runs.build import input_batches, open_source
from solodg.runs.checkpoint import WEIGHTS
from solodg.runs.config import Machine
from solodg.runs.folder import read_config, read_machine
from solodg.runs.scored_data import check_classes
from solodg.storage import read_tensors, write_tensors

PLANE = "plane.safetensors"
FORMAT = "solodg-plane-1"
PER_CELL, MOST_IMAGES = 20, 1500  # of each class of each domain, and in all
THUMBNAIL = 64  # pixels

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Plane:
    """Two axes through the embeddings, and the source images they were fitted on."""

    origin: Floats  # (D,) mean of the class centres
    axes: Floats  # (2, D) orthonormal
    centres: Floats  # (C, D) of the source classes
    factor: float  # by which classifiers are drawn larger than they are
    shown_centres: float  # share of the variance between class centres that the axes show
    shown_images: float  # share of the variance between source images
    embeddings: Floats  # (N, D) of source training images
    labels: NDArray[np.int64]  # (N,)
    domains: NDArray[np.int64]  # (N,)
    domain_names: tuple[str, ...]
    thumbnails: NDArray[np.uint8]  # (N, channels, T, T)

    def of_embeddings(self, z: Floats) -> Floats:
        """(..., D) -> (..., 2)."""
        shown: Floats = (z - self.origin) @ self.axes.T
        return shown

    def of_classifier(self, rows: Floats) -> Floats:
        """(C, D) -> (C, 2): apart from what the rows share, and enlarged by `factor`."""
        shown: Floats = self.factor * apart(rows) @ self.axes.T
        return shown


def apart(rows: Floats) -> Floats:
    """What tells classes from each other: adding one vector to all changes no probability."""
    result: Floats = rows - rows.mean(0)
    return result


def kept_plane(
    folder: Path,
    predictor: Predictor,
    machine: Machine | None = None,
    *,
    dataset: str | None = None,
    progress: Progress | None = None,
) -> Plane:
    """The run's plane: read, or fitted and kept if there is none of these weights yet."""
    path = folder / PLANE
    weights = digest((folder / WEIGHTS).read_bytes())
    if path.is_file():
        tensors, header = read_tensors(path)
        if (header.get("format"), header.get("weights")) == (FORMAT, weights):
            return _read(tensors, header)
    images = _source_images(folder, predictor, machine, dataset)
    plane = fit_plane(predictor.algorithm, images, progress or NoProgress())
    _write(path, plane, weights)
    return _read(*read_tensors(path))  # the same numbers as every later time


@torch.inference_mode()
def fit_plane(algorithm: Algorithm, images: LabelledImages, progress: Progress) -> Plane:
    """Of source training images, as the trained model sees them."""
    sums = CentreSums(algorithm.num_classes)
    found, small = [], []
    with progress.bar("Looking at source images", len(images)) as advance:
        for batch in input_batches(images):
            z = algorithm.embed(batch.x)
            sums.add(z, batch.y, batch.domain)
            found.append(z.double().numpy())
            small.append(thumbnails(batch.x))
            advance(len(batch.y))
    embeddings = np.concatenate(found)
    own = getattr(algorithm, "source_centres", None)  # those that the classifier is written from
    centres = (sums.over(sums.domains).mean if own is None else own).double().numpy()
    origin = centres.mean(0)
    axes = principal_axes(centres - origin, embeddings - embeddings.mean(0))
    return Plane(
        origin=origin,
        axes=axes,
        centres=centres,
        factor=_factor(algorithm, centres - origin, axes),
        shown_centres=_share(centres - origin, axes),
        shown_images=_share(embeddings - embeddings.mean(0), axes),
        embeddings=embeddings,
        labels=images.labels,
        domains=images.domains,
        domain_names=images.domain_names,
        thumbnails=np.concatenate(small),
    )


def principal_axes(centres: Floats, images: Floats) -> Floats:
    """The two directions, (2, D), in which pairs of centres differ most.

    A pair's squared difference counts over its distance squared, so that all pairs weigh the same
    and one class far from all others does not push these into a corner. Where centres differ in one
    direction only, as those of two classes do, the images give the second.
    """
    squares = np.square(pairwise_distances(centres))
    weights = np.divide(1.0, squares, out=np.zeros_like(squares), where=squares > 1e-12)
    laplacian = np.diag(weights.sum(1)) - weights  # sum over pairs w |x_i - x_j|^2 = x' L x
    values, vectors = np.linalg.eigh(laplacian)
    rows = np.sqrt(values.clip(0))[:, None] * vectors.T @ centres
    _, lengths, directions = np.linalg.svd(rows, full_matrices=False)
    count = min(2, int((lengths > 1e-6 * max(lengths[0], 1e-12)).sum()))
    axes = directions[:count]
    if count < 2:
        rest = images - images @ axes.T @ axes
        axes = np.concatenate([axes, np.linalg.svd(rest, full_matrices=False)[2]])[:2]
    largest = np.abs(axes).argmax(1)
    signs = np.sign(axes[np.arange(2), largest])  # so that it does not depend on the library
    oriented: Floats = axes * signs[:, None]
    return oriented


def _share(rows: Floats, axes: Floats) -> float:
    share = np.square(rows @ axes.T).sum() / max(np.square(rows).sum(), 1e-12)
    return min(1.0, float(share))  # rounding may go beyond


def _factor(algorithm: Algorithm, centres: Floats, axes: Floats) -> float:
    """Gives the classifier that is one for all images the size of the centres."""
    try:
        rows, _ = algorithm.linear_classifier()
    except UserError:  # a method without one
        return 1.0
    shown = np.square(apart(rows.detach().double().numpy()) @ axes.T).sum()
    return float(np.sqrt(np.square(centres @ axes.T).sum() / max(shown, 1e-12)))


def _source_images(
    folder: Path, predictor: Predictor, machine: Machine | None, dataset: str | None
) -> LabelledImages:
    config = read_config(folder)
    if dataset is not None:
        config = config.model_copy(update={"dataset": dataset})
    source, config = open_source(config, machine or read_machine(folder))
    check_classes(source.classes, predictor.info)
    cells = len(source.classes) * len(source.domain_names)
    return source.train.balanced(max(1, min(PER_CELL, MOST_IMAGES // cells)), config.seed)


def thumbnails(x: Tensor) -> NDArray[np.uint8]:
    """(B, C, H, W) in [0, 1] -> 8-bit, at most THUMBNAIL pixels wide."""
    if x.shape[-1] > THUMBNAIL:
        x = F.interpolate(x, (THUMBNAIL, THUMBNAIL), mode="bilinear", antialias=True)
    small: NDArray[np.uint8] = (255 * x).round().clamp(0, 255).to(torch.uint8).numpy()
    return small


def _write(path: Path, plane: Plane, weights: str) -> None:
    names = ("origin", "axes", "centres", "embeddings")
    tensors = {name: torch.from_numpy(getattr(plane, name)).float() for name in names}
    for name in ("labels", "domains", "thumbnails"):
        tensors[name] = torch.from_numpy(getattr(plane, name))
    numbers = {name: getattr(plane, name) for name in ("factor", "shown_centres", "shown_images")}
    header = {"format": FORMAT, "weights": weights, "domain_names": plane.domain_names, **numbers}
    write_tensors(path, tensors, header)


def _read(tensors: dict[str, Tensor], header: dict[str, Any]) -> Plane:
    values: dict[str, Any] = {
        name: tensors[name].double().numpy() for name in ("origin", "axes", "centres", "embeddings")
    }
    values |= {name: tensors[name].numpy() for name in ("labels", "domains", "thumbnails")}
    values |= {name: header[name] for name in ("factor", "shown_centres", "shown_images")}
    return Plane(**values, domain_names=tuple(header["domain_names"]))
