"""By how much the source domains are rotated against each other, found without training.

The mean image of a class looks alike in two domains that do not differ by rotation. If they do, one
rotation, the same for all classes, makes the means alike. Rotating a mean image is as good as
rotating all its images, so all angles are tried for each pair of domains at no cost worth mention.
Images are compared as grey layouts: without their mean and contrast, and up to the sign, so that
colour, brightness and inversion do not matter.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from solodg.data import LabelledImages
from solodg.models.pose import disc, layout, rotate, shrink
from solodg.runs.opened_data import input_batches

_SIZE = 16  # pixels a side of the mean images
_STEP = 5  # degrees between the angles that are tried
_LEAST = 10.0  # degrees between two domains that count as a rotation
_PER_CELL = 200  # images of a class and domain whose mean is taken, at most
_IMAGES = 10_000  # that are read in all, about

Floats = NDArray[np.float64]


class DomainRotations(NamedTuple):
    """The angle of each source domain, and how well rotations explain how domains differ."""

    angles: Floats  # (D,) in degrees, clockwise; their mean direction is 0
    alike: float  # mean correlation of the mean images of two domains, as they are
    alike_rotated: float  # the same after the best rotation

    @property
    def span(self) -> float:
        """Returns the degrees between the two domains that lie farthest apart, at most 180."""
        return min(180.0, float(np.ptp(self.angles)))

    @property
    def explain(self) -> bool:
        """Returns whether the domains differ by rotation.

        Some of them lie at least 10 degrees apart, and rotations remove at least half of what
        keeps the mean images from being equal, in the pairs of domains taken together.
        """
        return self.span >= _LEAST and 1 - self.alike_rotated <= 0.5 * (1 - self.alike)


def domain_rotations(images: LabelledImages, seed: int) -> DomainRotations:
    """Finds the rotation of each domain against the others, from the mean images of its classes.

    Where rotations do not explain how the domains differ, all angles are zero.
    """
    cells = len(images.domain_names) * (int(images.labels.max(initial=0)) + 1)
    few = images.balanced(max(10, min(_PER_CELL, _IMAGES // cells)), seed)
    means = _class_means(few)  # (D, C, H, W), NaN where none
    tried = torch.arange(-180, 180, _STEP)
    zero, count = 180 // _STEP, len(means)
    turns = np.ones((count, count), dtype=np.complex128)  # exp(i angle) of a against b
    plain, best = [], []
    for a in range(count):
        for b in range(a):
            found = _correlations(means[a], means[b], tried)
            top = int(found.argmax()) if found.max() > found[zero] else zero
            turns[a, b] = np.exp(1j * np.deg2rad(float(tried[top])))
            turns[b, a] = turns[a, b].conj()
            plain.append(float(found[zero]))
            best.append(float(found[top]))
    # The angles of which all pairs are the differences, as nearly as can be: the first eigenvector.
    _, vectors = np.linalg.eigh(turns)
    directions = vectors[:, -1] / np.abs(vectors[:, -1]).clip(1e-9)
    centred = directions * np.exp(-1j * np.angle(directions.sum()))
    angles = np.rad2deg(np.angle(centred))
    if not plain:
        return DomainRotations(0 * angles, 1.0, 1.0)
    result = DomainRotations(angles, float(np.mean(plain)), float(np.mean(best)))
    return result if result.explain else result._replace(angles=0 * angles)


def _class_means(images: LabelledImages) -> Tensor:
    """Returns the mean grey layout of each class in each domain, (D, C, 16, 16); NaN for none."""
    domains, classes = len(images.domain_names), int(images.labels.max()) + 1
    sums = torch.zeros(domains * classes, _SIZE, _SIZE)
    counts = torch.zeros(domains * classes)
    for batch in input_batches(images):
        grey = batch.x.mean(1, keepdim=True)
        cell = batch.domain * classes + batch.y
        sums.index_add_(0, cell, layout(shrink(grey, _SIZE), disc(_SIZE))[:, 0])
        counts.index_add_(0, cell, torch.ones(len(cell)))
    return (sums / counts[:, None, None]).view(domains, classes, _SIZE, _SIZE)


def _correlations(fixed: Tensor, turned: Tensor, degrees: Tensor) -> Tensor:
    """Returns the correlation of mean images (C, 16, 16) after each rotation of the second ones.

    Over all classes that both domains have, up to its sign; 1 if there is none.
    """
    both = ~(fixed.isnan() | turned.isnan()).flatten(1).any(1)
    if not both.any():
        return torch.ones(len(degrees))
    inside = disc(_SIZE)
    here, there = fixed[both] * inside, turned[both]  # (C, 16, 16)
    angles = torch.deg2rad(degrees.float())
    stack = there[None].expand(len(angles), *there.shape)  # classes take the place of channels
    rotated = rotate(stack, angles) * inside  # (angles, C, 16, 16)
    products = (rotated * here).sum((1, 2, 3))
    scale = rotated.square().sum((1, 2, 3)).sqrt() * here.square().sum().sqrt()
    return (products / scale.clamp(min=1e-9)).abs()
