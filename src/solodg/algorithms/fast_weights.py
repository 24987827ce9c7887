"""Calls a module with other weights than its own, e.g. those after a trial gradient step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from solodg.models.extractor import Extractor
from solodg.types import Features


def stepped(
    weights: Mapping[str, Tensor], loss: Tensor, rate: float, *, second_order: bool = True
) -> dict[str, Tensor]:
    """Returns the weights after one gradient step down the loss, by name.

    With `second_order` the result is differentiable through the gradient; then the loss must have
    been computed inside `twice_differentiable`.
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
    """Inside, attention uses an implementation that has a second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def call_with(module: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> Any:
    """Returns what the module computes with `weights`, by parameter name, in place of its own.

    Parameters that are not named stay the module's own. Buffers are copied, so that running
    statistics under trial weights are not stored.
    """
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return functional_call(module, {**buffers, **weights}, (x,))


def embed_with(backbone: Extractor, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Returns the embedding (B, D) that a backbone computes with `weights` in place of its own."""
    features: Features = call_with(backbone, weights, x)
    return features.embedding
