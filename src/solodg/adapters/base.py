"""The interface of test-time methods: a module around a trained algorithm, images to logits."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from solodg.algorithms import Algorithm
from solodg.algorithms.ranges import SearchRange


class Adapter(nn.Module):
    """Adapts a trained algorithm to test images; `reset` restores the algorithm bit for bit.

    Further arguments of a subclass are those of its method; their types say which values are
    allowed, and its module's docstring says where the defaults are not the authors'. Between two
    calls only the weights that the method trains may have changed.
    """

    single_sample: ClassVar[bool]  # whether row i of a batch equals image i alone
    trained_by: ClassVar[str | None] = None  # the only algorithm that it can adapt
    # The arguments that `solodg tune` searches, and the values that they may take.
    search: ClassVar[dict[str, SearchRange]] = {}

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__()
        self.algorithm = algorithm

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, C) of images (B, ...), and may adapt to them."""
        raise NotImplementedError

    def probabilities(self, x: Tensor) -> Tensor:
        """Returns class probabilities (B, C) of images, and may adapt to them."""
        return torch.softmax(self(x), dim=1)

    def reset(self) -> None:
        """Undoes all adaptation to test images."""


class Snapshot:
    """Keeps copies of tensors, to restore them in place."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.before = [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Sets the tensors to their values at the time of the copy."""
        for tensor, value in zip(self.tensors, self.before, strict=True):
            tensor.copy_(value)


@contextmanager
def learning(model: nn.Module, weights: Iterable[Tensor]) -> Iterator[None]:
    """Inside, these weights of a model have gradients and its others have none.

    It works inside inference mode, in which evaluation calls adapters.
    """
    before = [(p, p.requires_grad) for p in model.parameters()]
    chosen = {id(weight) for weight in weights}
    for parameter, _ in before:
        parameter.requires_grad_(id(parameter) in chosen)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for parameter, needed in before:
            parameter.requires_grad_(needed)
            parameter.grad = None


def entropy(logits: Tensor) -> Tensor:
    """Returns the entropy (B,) of the softmax of logits (B, C); classes with -inf do not count."""
    log_p = logits.log_softmax(1)
    p = log_p.exp()
    return -(p * log_p.masked_fill(p == 0, 0.0)).sum(1)
