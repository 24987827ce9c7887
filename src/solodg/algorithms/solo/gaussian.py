"""Diagonal Gaussians over classifier weights: sampling, KL, and logits without sampled weights.

For w ~ N(m, diag(s^2)) and an embedding z, the logit w.z is N(m.z, s^2.z^2). Sampling logits of
shape (B, M, C) therefore replaces sampling weights of shape (B, M, C, D): same distribution.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Gaussian(NamedTuple):
    """A diagonal Gaussian: `mean` and the positive `scale` have the same shape."""

    mean: Tensor
    scale: Tensor

    def sample(self, count: int) -> Tensor:
        """Returns `count` reparameterised samples along a new first axis."""
        noise = torch.randn(count, *self.mean.shape, dtype=self.mean.dtype, device=self.mean.device)
        return self.mean + self.scale * noise


class LogitMoments(NamedTuple):
    """Mean and standard deviation of each logit under a Gaussian classifier."""

    mean: Tensor  # (B, C)
    scale: Tensor  # (B, C)

    def sample(self, count: int) -> Tensor:
        """Returns `count` sampled logits for each image: (B, M, C)."""
        noise = torch.randn(
            len(self.mean),
            count,
            self.mean.shape[1],
            dtype=self.mean.dtype,
            device=self.mean.device,
        )
        return self.sample_with(noise)

    def sample_with(self, noise: Tensor) -> Tensor:
        """Returns logits for given standard normal noise: (M, C) or (B, M, C) -> (B, M, C)."""
        return self.mean[:, None] + self.scale[:, None] * noise


def shared_logits(classifier: Gaussian, z: Tensor) -> LogitMoments:
    """Returns the logits of one Gaussian classifier (C, D) for all embeddings z (B, D)."""
    mean = z @ classifier.mean.T  # (B, C)
    variance = z.square() @ classifier.scale.square().T  # (B, C)
    return LogitMoments(mean, safe_sqrt(variance))


def logit_scale(scale: Tensor, z: Tensor) -> Tensor:
    """Returns the standard deviation (B, C) of w.z, for scales (B, C, D) and embeddings (B, D)."""
    return safe_sqrt(torch.einsum("bcd,bd->bc", scale.square(), z.square()))


def safe_sqrt(variance: Tensor) -> Tensor:
    """Returns the square root; its gradient stays finite where an embedding is all zero."""
    return variance.clamp_min(1e-12).sqrt()


def kl(q: Gaussian, p: Gaussian) -> Tensor:
    """Returns KL(q || p), summed over the last axis; the other axes broadcast."""
    precision = p.scale.reciprocal()  # p is usually one classifier, and q one per image
    ratio = q.scale * precision
    distance = (q.mean - p.mean) * precision
    squares = _squared_norm(ratio) + _squared_norm(distance) - q.mean.shape[-1]
    return 0.5 * squares - ratio.log().sum(-1)


def _squared_norm(x: Tensor) -> Tensor:
    """Sums squares over the last axis; a product has a cheaper gradient than a power."""
    return (x * x).sum(-1)
