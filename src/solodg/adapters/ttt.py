"""Test-time training (Sun et al., ICML 2020): learns from rotated copies of the single image.

Ten steps of SGD, each on 32 new copies of the test image, train the shared stages of the backbone
and the rotation head of the algorithm `ttt`. Then the image is classified, and the weights are
restored. A copy is augmented and rotated by a random number of quarters. Steps, rate and copies are
those of the authors' slow setting (CIFAR; on ImageNet 64 copies).

Departures: a copy is a random crop of 0.7 to 1 of the area, enlarged, and never mirrored; all
images get the same crops and rotations, in each step others. BatchNorm keeps its stored statistics:
with BatchNorm the authors use those of the copies, and they prefer GroupNorm. With `copies=None`,
as in earlier versions of this package, each step is on the four rotations of the image itself.
"""

from typing import ClassVar

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from solodg.adapters.base import Adapter, Snapshot, learning
from solodg.adapters.crops import random_crops
from solodg.algorithms import Algorithm
from solodg.algorithms.ttt import TTT, rotated
from solodg.errors import UserError


class TestTimeTraining(Adapter):
    """Takes `steps` of SGD on rotated copies of each image; for models of the algorithm `ttt`.

    Each step has new `copies`; None: the four rotations of the image.
    """

    single_sample: ClassVar[bool] = True
    trained_by: ClassVar[str | None] = "ttt"

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        steps: PositiveInt = 10,
        learning_rate: PositiveFloat = 1e-3,
        copies: PositiveInt | None = 32,
    ) -> None:
        super().__init__(algorithm)
        if not isinstance(algorithm, TTT):
            raise UserError("the adapter ttt needs a model trained with --algorithm ttt.")
        self.steps, self.learning_rate, self.copies = steps, learning_rate, copies
        self.weights = algorithm.rotation_weights()
        self.snapshot = Snapshot(list(self.weights))

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, C), with a separate adaptation to each image."""
        return torch.cat([self._adapt_and_classify(image[None]) for image in x])

    def _adapt_and_classify(self, image: Tensor) -> Tensor:
        algorithm = self.algorithm
        assert isinstance(algorithm, TTT)
        with learning(algorithm, self.weights):
            own = image.clone()  # a tensor of inference mode has no gradient
            generator = torch.Generator().manual_seed(0)
            optimizer = torch.optim.SGD(self.weights, lr=self.learning_rate)
            for _ in range(self.steps):
                optimizer.zero_grad()
                algorithm.rotation_loss(*self._rotated_copies(own, generator)).backward()
                optimizer.step()
        with torch.no_grad():
            logits: Tensor = algorithm(image)
        self.snapshot.restore()
        return logits

    def _rotated_copies(self, image: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Returns copies of an image (1, C, H, W), and the quarters by which each is rotated."""
        if self.copies is None:
            quarters = torch.arange(4)
            crops = image.expand(4, -1, -1, -1)
        else:
            quarters = torch.randint(4, (self.copies,), generator=generator)
            crops = random_crops(image, self.copies, generator)
        quarters = quarters.to(image.device)
        return rotated(crops, quarters), quarters

    def reset(self) -> None:
        """Restores the weights."""
        self.snapshot.restore()
