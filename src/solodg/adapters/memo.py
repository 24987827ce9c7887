"""MEMO: one image, many augmented copies, one step (Zhang, Levine and Finn, NeurIPS 2022).

All weights that the prediction depends on take a step down the entropy of the mean prediction over
augmented copies of the image. Then the image is predicted, and the weights are restored. (`solo`
predicts from buffers that `finalize` wrote, so the weights that wrote them do not change.) The
authors augment by AugMix, which needs further image operations; here a copy is a random crop of 0.7
to 1 of the area, enlarged. All images get the same crops.
"""

import math
from typing import ClassVar

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from solodg.adapters.base import Adapter, Snapshot, learning
from solodg.algorithms import Algorithm


class Memo(Adapter):
    """Takes one step of SGD on `copies` of each image before predicting it."""

    single_sample: ClassVar[bool] = True

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        copies: PositiveInt = 32,
        learning_rate: PositiveFloat = 2.5e-4,
    ) -> None:
        super().__init__(algorithm)
        self.copies, self.learning_rate = copies, learning_rate
        self.weights = [p for p in algorithm.parameters() if p.is_floating_point()]
        self.snapshot = Snapshot(list(self.weights))

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, C), with a separate adaptation to each image."""
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


def random_crops(image: Tensor, count: int) -> Tensor:
    """Returns crops of an image, the same at every call: (1, C, H, W) -> (count, C, H, W)."""
    generator = torch.Generator().manual_seed(0)
    side = (0.7 + 0.3 * torch.rand(count, generator=generator)).sqrt()
    shift = (2 * torch.rand(count, 2, generator=generator) - 1) * (1 - side)[:, None]
    matrix = torch.zeros(count, 2, 3)
    matrix[:, 0, 0] = matrix[:, 1, 1] = side
    matrix[:, :, 2] = shift
    grid = F.affine_grid(matrix.to(image), [count, *image.shape[1:]], align_corners=False)
    copies = image.expand(count, -1, -1, -1)
    return F.grid_sample(copies, grid, padding_mode="border", align_corners=False)
