"""Test-time training (Sun et al., ICML 2020): learn from the one image how it was turned.

Ten steps of SGD on quarter turns of the test image train the backbone through the rotation head
that the algorithm `ttt` has; then the image is classified, and all is put back.
"""

from typing import ClassVar

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from solodg.adapters.base import Adapter, Memory, learning
from solodg.algorithms import Algorithm
from solodg.algorithms.ttt import TTT, turned
from solodg.errors import UserError


class TestTimeTraining(Adapter):
    """For models trained by the algorithm `ttt`."""

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
        self.memory = Memory(list(self.weights))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self._one(image[None]) for image in x])

    def _one(self, image: Tensor) -> Tensor:
        algorithm = self.algorithm
        assert isinstance(algorithm, TTT)
        with learning(algorithm, self.weights):
            turns = torch.arange(4, device=image.device)
            copies = turned(image.clone().expand(4, -1, -1, -1), turns)
            optimizer = torch.optim.SGD(self.weights, lr=self.learning_rate)
            for _ in range(self.steps):
                optimizer.zero_grad()
                algorithm.rotation_loss(copies, turns).backward()
                optimizer.step()
        with torch.no_grad():
            logits: Tensor = algorithm(image)
        self.memory.restore()
        return logits

    def reset(self) -> None:
        self.memory.restore()
