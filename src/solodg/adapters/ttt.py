"""Test-time training (Sun et al., ICML 2020): learns from rotated copies of the single image.

Ten steps of SGD on rotations of the test image train the backbone through the rotation head of the
algorithm `ttt`. Then the image is classified, and the weights are restored.
"""

from typing import ClassVar

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from solodg.adapters.base import Adapter, Snapshot, learning
from solodg.algorithms import Algorithm
from solodg.algorithms.ttt import TTT, rotated
from solodg.errors import UserError


class TestTimeTraining(Adapter):
    """Takes `steps` of SGD on rotations of each image; for models of the algorithm `ttt`."""

    single_sample: ClassVar[bool] = True
    trained_by: ClassVar[str | None] = "ttt"

    def __init__(
        self, algorithm: Algorithm, *, steps: PositiveInt = 10, learning_rate: PositiveFloat = 1e-3
    ) -> None:
        super().__init__(algorithm)
        if not isinstance(algorithm, TTT):
            raise UserError("the adapter ttt needs a model trained with --algorithm ttt.")
        self.steps, self.learning_rate = steps, learning_rate
        self.weights = [*algorithm.backbone.parameters(), *algorithm.rotation.parameters()]
        self.snapshot = Snapshot(list(self.weights))

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, C), with a separate adaptation to each image."""
        return torch.cat([self._adapt_and_classify(image[None]) for image in x])

    def _adapt_and_classify(self, image: Tensor) -> Tensor:
        algorithm = self.algorithm
        assert isinstance(algorithm, TTT)
        with learning(algorithm, self.weights):
            quarters = torch.arange(4, device=image.device)
            copies = rotated(image.clone().expand(4, -1, -1, -1), quarters)
            optimizer = torch.optim.SGD(self.weights, lr=self.learning_rate)
            for _ in range(self.steps):
                optimizer.zero_grad()
                algorithm.rotation_loss(copies, quarters).backward()
                optimizer.step()
        with torch.no_grad():
            logits: Tensor = algorithm(image)
        self.snapshot.restore()
        return logits

    def reset(self) -> None:
        """Restores the weights."""
        self.snapshot.restore()
