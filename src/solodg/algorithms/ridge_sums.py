"""Ridge regression from sums over images: sums of domains add up, and classifiers follow from them.

The classifier minimises, over weight W and bias b,

    mean over images of |W z + b - y|^2  +  shrinkage |W|^2

where z is an embedding whose features are standardised and y the one-hot class. Images weigh so
that every class of every domain counts the same. All that the solution needs are sums over images
of 1, z, y, z z^T and z y^T, so leaving a domain out, or adding one, needs no second pass over
the images.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_LEAST_SHARE = 1e-5  # of variance in the mean square of a feature; less is rounding


class RidgeSums(NamedTuple):
    """Weighted sums over images, in float64."""

    weight: Tensor  # () of the weights
    z: Tensor  # (D,)
    y: Tensor  # (C,)
    zz: Tensor  # (D, D)
    zy: Tensor  # (D, C)

    @classmethod
    def zero(cls, features: int, classes: int, device: torch.device | None = None) -> "RidgeSums":
        """Returns the sums over no image."""
        shapes: tuple[tuple[int, ...], ...] = (
            (),
            (features,),
            (classes,),
            (features, features),
            (features, classes),
        )
        return cls(*(torch.zeros(s, dtype=torch.float64, device=device) for s in shapes))

    def add_images(self, z: Tensor, y: Tensor, weight: Tensor) -> None:
        """Adds images in place: embeddings (B, D), classes (B,) and weights (B,)."""
        weighted = weight[:, None] * z
        wide = weighted.double()
        labels = torch.nn.functional.one_hot(y, len(self.y)).double()
        self.weight.add_(weight.double().sum())
        self.z.add_(wide.sum(0))
        self.y.add_(weight.double() @ labels)
        self.zz.add_((weighted.T @ z).double())  # each batch in single precision, then summed
        self.zy.add_(wide.T @ labels)

    def plus(self, other: "RidgeSums") -> "RidgeSums":
        """Returns the sums over both sets of images."""
        return RidgeSums(*(a + b for a, b in zip(self, other, strict=True)))

    def solve(self, shrinkage: float) -> tuple[Tensor, Tensor]:
        """Returns weight (C, D) and bias (C,) of the classifier, for embeddings as they are."""
        mean, share = self.z / self.weight, self.y / self.weight
        covariance = self.zz / self.weight - torch.outer(mean, mean)
        variance, square = covariance.diagonal(), self.zz.diagonal() / self.weight
        # A feature that does not vary gets weight zero: its scale is infinite.
        scale = torch.where(variance > _LEAST_SHARE * square, variance, torch.inf).sqrt()
        matrix = covariance / torch.outer(scale, scale)
        matrix.diagonal().add_(shrinkage)
        right = (self.zy / self.weight - torch.outer(mean, share)) / scale[:, None]
        factor = torch.linalg.cholesky(matrix)
        weight = (torch.cholesky_solve(right, factor) / scale[:, None]).T
        return weight, share - weight @ mean


def total(sums: list[RidgeSums]) -> RidgeSums:
    """Returns the sums over all sets of images."""
    result = sums[0]
    for other in sums[1:]:
        result = result.plus(other)
    return result
