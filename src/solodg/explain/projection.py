"""The projection to two dimensions in which images, class centres and classifiers are drawn.

It is fitted once for each run, on a bounded number of source training images and never on a target
image. It is stored in the run folder, so that figures of different images can be compared.

Its axes are the directions in which pairs of source class centres differ most. Classifiers are
centred before they are projected, since a vector added to all rows changes no probability, and
scaled by one common factor to the size of the class centres.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from solodg.algorithms import Algorithm
from solodg.algorithms.centres import CentreSums
from solodg.data import LabelledImages
from solodg.data.images import digest
from solodg.errors import UserError
from solodg.predict.torch import Predictor
from solodg.progress import NoProgress, Progress, Say
from solodg.runs.checkpoint import WEIGHTS
from solodg.runs.config import Machine
from solodg.runs.folder import read_config, read_machine
from solodg.runs.opened_data import input_batches, reopen_source
from solodg.runs.predictions import Floats
from solodg.runs.scored_data import check_classes
from solodg.storage.tensors import read_tensors, write_tensors

PROJECTION_FILE = "plane.safetensors"  # in a run folder
PROJECTION_FORMAT = "solodg-plane-1"
IMAGES_PER_CELL, MAX_IMAGES = 20, 1500  # of each class in each domain, and in all
THUMBNAIL = 64  # pixels


@dataclass(frozen=True)
class Projection:
    """Two axes through the embeddings, and the source images that they were fitted on."""

    origin: Floats  # (D,) mean of the class centres
    axes: Floats  # (2, D) orthonormal
    centres: Floats  # (C, D) of the source classes
    factor: float  # by which classifiers are scaled
    shown_centres: float  # share of the variance between class centres along the axes
    shown_images: float  # share of the variance between source images along the axes
    embeddings: Floats  # (N, D) of source training images
    labels: NDArray[np.int64]  # (N,)
    domains: NDArray[np.int64]  # (N,)
    domain_names: tuple[str, ...]
    thumbnails: NDArray[np.uint8]  # (N, channels, T, T)

    def embeddings_2d(self, z: Floats) -> Floats:
        """Projects embeddings: (..., D) -> (..., 2)."""
        points: Floats = (z - self.origin) @ self.axes.T
        return points

    def classifier_2d(self, weights: Floats) -> Floats:
        """Projects the rows of a classifier, centred and scaled by `factor`: (C, D) -> (C, 2)."""
        points: Floats = self.factor * centred(weights) @ self.axes.T
        return points


def centred(weights: Floats) -> Floats:
    """Subtracts the mean row of a (C, D) classifier, which changes no probability."""
    result: Floats = weights - weights.mean(0)
    return result


def stored_projection(
    folder: Path,
    predictor: Predictor,
    machine: Machine | None = None,
    *,
    dataset: str | None = None,
    progress: Progress | None = None,
    say: Say = lambda text: None,
) -> Projection:
    """Returns the run's projection: the stored one, if it was fitted for these weights.

    Otherwise it is fitted on source training images, and stored in the run folder if that can be
    written.
    """
    path = folder / PROJECTION_FILE
    weights = digest((folder / WEIGHTS).read_bytes())
    if path.is_file():
        with suppress(
            UserError, LookupError, TypeError, ValueError, RuntimeError
        ):  # a damaged one is fitted again
            tensors, header = read_tensors(path)
            if (header.get("format"), header.get("weights")) == (PROJECTION_FORMAT, weights):
                return _read(tensors, header)
    progress = progress or NoProgress()
    images = _source_images(folder, predictor, machine, dataset, progress, say)
    projection = fit_projection(predictor.algorithm, images, progress)
    tensors, header = _stored_form(projection, weights)
    with suppress(OSError):  # a read-only run can be explained all the same, only not as quickly
        write_tensors(path, tensors, header)
    return _read(tensors, header)  # rounded to float32, as in every later call


@torch.inference_mode()
def fit_projection(algorithm: Algorithm, images: LabelledImages, progress: Progress) -> Projection:
    """Fits the projection on the trained model's embeddings of source training images."""
    device = next(algorithm.parameters()).device
    sums = CentreSums(algorithm.num_classes)
    found, small = [], []
    with progress.bar("Embedding source images", len(images)) as advance:
        for batch in input_batches(images):
            z = algorithm.embed(batch.x.to(device)).cpu()
            sums.add(z, batch.y, batch.domain)
            found.append(z.double().numpy())
            small.append(thumbnails(batch.x))
            advance(len(batch.y))
    embeddings = np.concatenate(found)
    stored = getattr(algorithm, "source_centres", None)  # the classifier is written from these
    centres = (sums.over(sums.domains).mean if stored is None else stored).double().cpu().numpy()
    origin = centres.mean(0)
    axes = principal_axes(centres - origin, embeddings - embeddings.mean(0))
    return Projection(
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
    """Returns the two directions, (2, D), in which pairs of centres differ most.

    The squared difference of a pair is divided by its squared distance. So all pairs weigh the
    same, and one distant class does not push the others into a corner. Where centres differ in one
    direction only, as those of two classes do, the images give the second direction.
    """
    from sklearn.metrics import pairwise_distances  # late: it takes seconds to import

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
    signs = np.sign(axes[np.arange(2), largest])  # SVD leaves the sign open
    oriented: Floats = axes * signs[:, None]
    return oriented


def _share(rows: Floats, axes: Floats) -> float:
    """Returns the share of the variance of centred rows that lies along the axes."""
    share = np.square(rows @ axes.T).sum() / max(np.square(rows).sum(), 1e-12)
    return min(1.0, float(share))  # rounding may go beyond


def _factor(algorithm: Algorithm, centres: Floats, axes: Floats) -> float:
    """Returns the factor that gives the classifier before adaptation the size of the centres."""
    try:
        rows, _ = algorithm.linear_classifier()
    except UserError:  # this method has no linear classifier
        return 1.0
    shown = np.square(centred(rows.detach().double().cpu().numpy()) @ axes.T).sum()
    return float(np.sqrt(np.square(centres @ axes.T).sum() / max(shown, 1e-12)))


def _source_images(
    folder: Path,
    predictor: Predictor,
    machine: Machine | None,
    dataset: str | None,
    progress: Progress,
    say: Say,
) -> LabelledImages:
    config = read_config(folder)
    if dataset is not None:
        config = config.model_copy(update={"dataset": dataset})
    with progress.stage("Opening the data"):
        source, config = reopen_source(config, machine or read_machine(folder), progress, say)
    check_classes(source.classes, predictor.info)
    cells = len(source.classes) * len(source.domain_names)
    return source.train.balanced(max(1, min(IMAGES_PER_CELL, MAX_IMAGES // cells)), config.seed)


def thumbnails(x: Tensor) -> NDArray[np.uint8]:
    """Shrinks (B, channels, H, W) images in [0, 1] to 8 bits and at most THUMBNAIL pixels."""
    if x.shape[-1] > THUMBNAIL:
        x = F.interpolate(x, (THUMBNAIL, THUMBNAIL), mode="bilinear", antialias=True)
    small: NDArray[np.uint8] = (255 * x).round().clamp(0, 255).to(torch.uint8).numpy()
    return small


def _stored_form(projection: Projection, weights: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    names = ("origin", "axes", "centres", "embeddings")
    tensors = {name: torch.from_numpy(getattr(projection, name)).float() for name in names}
    for name in ("labels", "domains", "thumbnails"):
        tensors[name] = torch.from_numpy(getattr(projection, name))
    numbers = {
        name: getattr(projection, name) for name in ("factor", "shown_centres", "shown_images")
    }
    header = {
        "format": PROJECTION_FORMAT,
        "weights": weights,
        "domain_names": projection.domain_names,
        **numbers,
    }
    return tensors, header


def _read(tensors: dict[str, Tensor], header: dict[str, Any]) -> Projection:
    values: dict[str, Any] = {
        name: tensors[name].double().numpy() for name in ("origin", "axes", "centres", "embeddings")
    }
    values |= {name: tensors[name].numpy() for name in ("labels", "domains", "thumbnails")}
    values |= {name: header[name] for name in ("factor", "shown_centres", "shown_images")}
    return Projection(**values, domain_names=tuple(header["domain_names"]))
