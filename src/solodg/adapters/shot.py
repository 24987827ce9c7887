"""Source-hypothesis transfer, online (after Liang, Hu and Feng, ICML 2020).

The classifier stays as it is. The backbone is trained on test batches to give confident predictions
that differ over the batch (information maximisation), and to agree with pseudo-labels, those of the
nearest class centre. Centres are found in two rounds: first from all images, weighted by their
probabilities, then from the images of each pseudo-label; only predicted classes have one. They are
means of embeddings with a constant 1 appended, scaled to length 1, and the nearest is that of the
most similar direction.

Rate (0.001 for a backbone), Nesterov momentum 0.9, weight decay 0.001, the weight of 0.3 and the
two rounds are the authors'. Departures: they train on the whole target set for 15 epochs and label
it anew in each; here each batch is used once, in the order of the stream, and labelled by itself.
Their rate falls as (1 + 10 t / T)^-0.75 over T updates; a stream does not know its T, so it is
constant unless `updates` says it. They have a bottleneck layer with ten times the rate, and
BatchNorm uses batch statistics; here it keeps its stored ones. A single image has no diversity and
only one centre, so the model is not updated on it.
"""

import math
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from solodg.adapters.base import Adapter, Snapshot, entropy, learning
from solodg.algorithms import Algorithm


class Shot(Adapter):
    """Takes `steps` updates on each batch, and keeps them until `reset`.

    `pseudo_weight` weighs the cross-entropy on pseudo-labels, which have `rounds` of centres; None,
    as in earlier versions of this package: one round, of all classes, on embeddings as they are.
    `updates` is the number over which the rate falls, to a sixth; None: it is constant.
    """

    single_sample: ClassVar[bool] = False

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        steps: PositiveInt = 1,
        learning_rate: PositiveFloat = 1e-3,
        pseudo_weight: NonNegativeFloat = 0.3,
        nesterov: bool = True,
        weight_decay: NonNegativeFloat = 1e-3,
        updates: PositiveInt | None = None,
        rounds: PositiveInt | None = 2,
    ) -> None:
        super().__init__(algorithm)
        self.steps, self.learning_rate, self.pseudo_weight = steps, learning_rate, pseudo_weight
        self.nesterov, self.weight_decay = nesterov, weight_decay
        self.updates, self.rounds = updates, rounds
        self.made = 0  # updates since the last reset
        self.weights = list(algorithm.backbone.parameters())
        self.snapshot = Snapshot(list(self.weights))
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            self.weights,
            self.learning_rate,
            momentum=0.9,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
        )

    def _rate(self) -> float:
        """Returns the learning rate of the update that is made next."""
        self.made += 1
        if self.updates is None:
            return self.learning_rate
        return self.learning_rate / math.pow(1 + 10 * min(1.0, self.made / self.updates), 0.75)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, C) after the updates on this batch."""
        with learning(self.algorithm, self.weights):
            x = x.clone()
            for _ in range(self.steps if len(x) > 1 else 0):
                z, logits = self.algorithm.embed_and_classify(x)
                loss = self._loss(logits, z.detach())
                self.optimizer.param_groups[0]["lr"] = self._rate()
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
        if self.rounds is None:
            labels = nearest_centre(z, p.detach())
        else:
            labels = pseudo_labels(z, p.detach(), self.rounds)
        pseudo = F.cross_entropy(logits, labels)
        return entropy(logits).mean() - diversity + self.pseudo_weight * pseudo

    def reset(self) -> None:
        """Restores the weights and the state of the optimiser."""
        self.snapshot.restore()
        self.optimizer = self._optimizer()
        self.made = 0


def pseudo_labels(z: Tensor, p: Tensor, rounds: int) -> Tensor:
    """Returns pseudo-labels (B,) of embeddings z (B, D) with predictions p (B, C), in rounds.

    In each round a centre is the mean of z, of length 1 with a constant appended; in the first one
    it is weighted by p, then it is that of the images with this label.
    """
    directions = F.normalize(torch.cat([z, torch.ones_like(z[:, :1])], 1), dim=1)  # (B, D + 1)
    labels, weights = p.argmax(1), p
    for _ in range(rounds):
        predicted = F.one_hot(labels, p.shape[1]).sum(0) > 0  # (C,)
        centres = F.normalize(weights.T @ directions, dim=1)  # (C, D + 1)
        similar = (directions @ centres.T).masked_fill(~predicted, -torch.inf)
        labels = similar.argmax(1)
        weights = F.one_hot(labels, p.shape[1]).to(p.dtype)
    return labels


def nearest_centre(z: Tensor, p: Tensor) -> Tensor:
    """Returns pseudo-labels (B,): the class whose centre has the most similar direction to z.

    A centre is the mean of the embeddings z (B, D), weighted by the predictions p (B, C).
    """
    centres = F.normalize(p.T @ z, dim=1)  # (C, D)
    return (F.normalize(z, dim=1) @ centres.T).argmax(1)
