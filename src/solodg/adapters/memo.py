"""MEMO: one image, many augmented copies, one step (Zhang, Levine and Finn, NeurIPS 2022).

All weights that the prediction depends on take a step down the entropy of the mean prediction over
augmented copies of the image. Then the image is predicted, and the weights are restored. (`solo`
predicts from buffers that `finalize` wrote, so the weights that wrote them do not change.)

The defaults are those of the authors' ResNet-50 on ImageNet: 64 copies, a rate of 0.00025, and
BatchNorm with 16/17 of the stored statistics and 1/17 of those of what is read: of the copies in
the step, of the image in its prediction. On CIFAR, with GroupNorm, they have 32 copies and a rate
of 0.005. `prior=None` keeps the stored statistics. Departures: the authors augment by AugMix, which
needs further image operations; here a copy is a random crop of 0.7 to 1 of the area, enlarged, and
all images get the same crops. Image norm and `dson` mix in the image's statistics themselves, so
`prior` does not change their layers.
"""

import math
from typing import ClassVar

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from solodg.adapters.base import Adapter, Snapshot, learning
from solodg.adapters.bn import mixed_statistics, plain_batch_norms
from solodg.adapters.crops import random_crops
from solodg.algorithms import Algorithm


class Memo(Adapter):
    """Takes one step of SGD on `copies` of each image before predicting it.

    `prior` is the weight of BatchNorm's stored statistics where those of what is read weigh 1.
    """

    single_sample: ClassVar[bool] = True

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        copies: PositiveInt = 64,
        learning_rate: PositiveFloat = 2.5e-4,
        prior: PositiveFloat | None = 16.0,
    ) -> None:
        super().__init__(algorithm)
        self.norms = [] if prior is None else plain_batch_norms(algorithm)
        self.stored_share = 1.0 if prior is None else prior / (prior + 1)
        self.copies, self.learning_rate = copies, learning_rate
        self.weights = [p for p in algorithm.parameters() if p.is_floating_point()]
        self.snapshot = Snapshot(list(self.weights))

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, C), with a separate adaptation to each image."""
        with mixed_statistics(self.norms, self.stored_share):
            return torch.cat([self._adapt_and_classify(image[None]) for image in x])

    def _adapt_and_classify(self, image: Tensor) -> Tensor:
        with learning(self.algorithm, self.weights):
            image = image.clone()
            log_p = self.algorithm(random_crops(image, self.copies)).log_softmax(1)
            mean = log_p.logsumexp(0) - math.log(self.copies)
            loss = -(mean.exp() * mean.masked_fill(mean == -math.inf, 0.0)).sum()
            gradients = torch.autograd.grad(loss, self.weights, allow_unused=True)
        with torch.no_grad():
            for weight, gradient in zip(self.weights, gradients, strict=True):
                if gradient is not None:
                    weight.sub_(self.learning_rate * gradient)
            logits: Tensor = self.algorithm(image)
        self.snapshot.restore()
        return logits

    def reset(self) -> None:
        """Restores the weights."""
        self.snapshot.restore()
