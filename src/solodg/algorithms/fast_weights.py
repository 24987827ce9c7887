"""A module under other weights than its own, e.g. those after a step that is not taken."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from solodg.types import Features


def stepped(
    weights: Mapping[str, Tensor], loss: Tensor, rate: float, *, second_order: bool = True
) -> dict[str, Tensor]:
    """The weights after one step down the loss; with `second_order` differentiable through it.

    The loss must come from inside `twice_differentiable` then.
    """
    gradients = torch.autograd.grad(
        loss,
        list(weights.values()),
        retain_graph=True,
        create_graph=second_order,
        materialize_grads=True,  # a backbone may have parameters that it does not use
    )
    pairs = zip(weights.items(), gradients, strict=True)
    return {name: weight - rate * gradient for (name, weight), gradient in pairs}


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Inside, attention is computed in a form that has a second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def call_with(module: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> Any:
    """What the module says under `weights`, by parameter name; those not named are its own.

    Buffers are copied: statistics under weights that are not kept are not stored.
    """
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return functional_call(module, {**buffers, **weights}, (x,))


def embed_with(backbone: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """`call_with` of a backbone: the embedding."""
    features: Features = call_with(backbone, weights, x)
    return features.embedding
