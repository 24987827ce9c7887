"""What a test-time method is: a module around a trained algorithm, images to logits."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from solodg.algorithms import Algorithm


class Adapter(nn.Module):
    """Wraps a trained algorithm; `reset` restores it bit for bit.

    Arguments besides the algorithm are the method's own, with its authors' defaults; their types
    say what is allowed. Outside a call the algorithm is as it was, but for what was learned.
    """

    single_sample: ClassVar[bool]  # True: row i of a batch equals image i alone
    trained_by: ClassVar[str | None] = None  # the one algorithm whose models it can adapt

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__()
        self.algorithm = algorithm

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) images -> (B, C) logits."""
        raise NotImplementedError

    def probabilities(self, x: Tensor) -> Tensor:
        return torch.softmax(self(x), dim=1)

    def reset(self) -> None:
        """Forget everything that test images taught."""


class Memory:
    """Tensors as they were, to put back."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.before = [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, value in zip(self.tensors, self.before, strict=True):
            tensor.copy_(value)


@contextmanager
def learning(model: nn.Module, weights: Iterable[Tensor]) -> Iterator[None]:
    """Gradients of these weights and no others, although evaluation around it has none."""
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
    """Of each row's softmax; a class at -inf is no class: (B, C) -> (B,)."""
    log_p = logits.log_softmax(1)
    p = log_p.exp()
    return -(p * log_p.masked_fill(p == 0, 0.0)).sum(1)
