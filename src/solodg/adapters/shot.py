"""Source-hypothesis transfer, online (after Liang, Hu and Feng, ICML 2020).

The classifier stays as it is. The backbone is trained on test batches to give confident predictions
that differ over the batch (information maximisation), and to agree with pseudo-labels from the
nearest of the batch's class centres. The authors train on the whole target set for many epochs;
here each batch is used once, in the order of the stream. BatchNorm keeps its stored statistics. A
single image has no diversity and only one centre, so the model is not updated on it.
"""

from typing import ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from solodg.adapters.base import Adapter, Snapshot, entropy, learning
from solodg.algorithms import Algorithm


class Shot(Adapter):
    """Takes `steps` updates on each batch, and keeps them until `reset`.

    `pseudo_weight` weighs the cross-entropy on pseudo-labels.
    """

    single_sample: ClassVar[bool] = False

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        steps: PositiveInt = 1,
        learning_rate: PositiveFloat = 1e-4,
        pseudo_weight: NonNegativeFloat = 0.3,
    ) -> None:
        super().__init__(algorithm)
        self.steps, self.learning_rate, self.pseudo_weight = steps, learning_rate, pseudo_weight
        self.weights = list(algorithm.backbone.parameters())
        self.snapshot = Snapshot(list(self.weights))
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.weights, self.learning_rate, momentum=0.9)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, C) after the updates on this batch."""
        with learning(self.algorithm, self.weights):
            x = x.clone()
            for _ in range(self.steps if len(x) > 1 else 0):
                z, logits = self.algorithm.embed_and_classify(x)
                loss = self._loss(logits, z.detach())
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
        with torch.no_grad():
            updated: Tensor = self.algorithm(x)
        return updated

    def _loss(self, logits: Tensor, z: Tensor) -> Tensor:
        p = logits.softmax(1)
        mean = p.mean(0, keepdim=True)
        diversity = -(mean * mean.clamp_min(1e-12).log()).sum()
        pseudo = F.cross_entropy(logits, nearest_centre(z, p.detach()))
        return entropy(logits).mean() - diversity + self.pseudo_weight * pseudo

    def reset(self) -> None:
        """Restores the weights and the state of the optimiser."""
        self.snapshot.restore()
        self.optimizer = self._optimizer()


def nearest_centre(z: Tensor, p: Tensor) -> Tensor:
    """Returns pseudo-labels (B,): the class whose centre has the most similar direction to z.

    A centre is the mean of the embeddings z (B, D), weighted by the predictions p (B, C).
    """
    centres = F.normalize(p.T @ z, dim=1)  # (C, D)
    return (F.normalize(z, dim=1) @ centres.T).argmax(1)
