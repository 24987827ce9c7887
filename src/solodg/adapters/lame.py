"""LAME: Laplacian-adjusted maximum likelihood (Boudiaf, Mueller, Ben Ayed, Bertinetto, CVPR 2022).

It changes no weights: it corrects the predictions of a batch, so that images with similar
embeddings get similar ones. With q_i the model's probabilities for image i and w_ij the affinity
of two images, it looks for the probabilities z of the batch that minimise

    sum over i of KL(z_i || q_i) - 1/2 sum over i and j of w_ij z_i z_j

by z_i <- softmax(log q_i + sum over j of w_ij z_j), from z = q on. For a positive semi-definite w
no step raises the objective. Affinities are of embeddings of length 1:

    rbf    exp(-|a - b|^2 / (2 sigma^2)), with sigma the mean distance of an image to its furthest
           neighbour; an image counts as the first of its own `neighbours`, as in the authors' code
    knn    1 for the `neighbours` nearest other images, else 0; neither symmetric nor positive
           semi-definite, as in the authors' code

rbf and 5 are the defaults of the authors' code. It stops after 100 steps, or once the objective
changes by less than 1e-8 of itself; the authors look at the objective's upper bound. A single image
has no neighbour and keeps its prediction.

With rbf every image of the batch pulls. Where embeddings of different classes are alike, the sum
outweighs log q, and the whole batch gets one class; with the authors' code too. Batches of few
classes, as of neighbouring frames, are what the method is for.
"""

from typing import ClassVar, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor
from torch.nn import functional as F

from solodg.adapters.base import Adapter
from solodg.algorithms import Algorithm

Affinity = Literal["rbf", "knn"]

_STEPS, _TOLERANCE = 100, 1e-8
_LEAST = 1e-10  # is added to probabilities before their logarithm, as in the authors' code


class Lame(Adapter):
    """Corrects the predictions of a batch by the affinity of its images."""

    single_sample: ClassVar[bool] = False

    def __init__(
        self, algorithm: Algorithm, *, affinity: Affinity = "rbf", neighbours: PositiveInt = 5
    ) -> None:
        super().__init__(algorithm)
        self.affinity, self.neighbours = affinity, neighbours

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Returns the corrected predictions of a batch as logits (B, C)."""
        z, logits = self.algorithm.embed_and_classify(x)
        if len(x) == 1:
            return logits
        kind = torch.promote_types(logits.dtype, torch.float32)  # of half precision
        log_q = (logits.to(kind).softmax(1) + _LEAST).log()
        directions = F.normalize(z.to(kind), dim=1)
        affinities = rbf_affinity if self.affinity == "rbf" else knn_affinity
        return corrected(log_q, affinities(directions, self.neighbours)).to(logits.dtype)


def corrected(log_q: Tensor, affinity: Tensor) -> Tensor:
    """Returns the logarithm of the corrected probabilities (B, C), for affinities (B, B)."""
    log_z = log_q.log_softmax(1)
    before = objective(log_z, log_q, affinity)
    for _ in range(_STEPS):
        log_z = (log_q + affinity @ log_z.exp()).log_softmax(1)
        now = objective(log_z, log_q, affinity)
        if abs(now - before) <= _TOLERANCE * abs(before):
            break
        before = now
    return log_z


def objective(log_z: Tensor, log_q: Tensor, affinity: Tensor) -> float:
    """Returns what the correction minimises, for the logarithms of z and q (B, C)."""
    z = log_z.exp()
    divergence = (z * (log_z - log_q)).sum()
    return float(divergence - (z * (affinity @ z)).sum() / 2)


def rbf_affinity(directions: Tensor, neighbours: int) -> Tensor:
    """Returns Gaussian affinities (B, B) of rows (B, D)."""
    distance = _distances(directions)
    furthest = distance.sort(1).values[:, min(neighbours, len(distance)) - 1]  # (B,)
    sigma = furthest.mean().clamp_min(1e-6)  # 0 where all images are alike
    return torch.exp(-distance.square() / (2 * sigma.square()))


def knn_affinity(directions: Tensor, neighbours: int) -> Tensor:
    """Returns for each row (B, D) which others are nearest: 1 or 0, (B, B)."""
    distance = _distances(directions).fill_diagonal_(torch.inf)
    nearest = distance.argsort(dim=1, stable=True)[:, : min(neighbours, len(distance) - 1)]
    return torch.zeros_like(distance).scatter_(1, nearest, 1.0)


def _distances(rows: Tensor) -> Tensor:
    """Returns distances (B, B), by differences: products are inexact where they are small."""
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
