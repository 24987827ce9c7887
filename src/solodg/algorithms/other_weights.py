"""A backbone under other weights than its own."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.func import functional_call

from solodg.types import Features


def embed_with(backbone: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The embedding under `weights`, by parameter name; those not named are the backbone's own.

    Buffers are copied: statistics under weights that are not kept are not stored.
    """
    buffers = {name: buffer.clone() for name, buffer in backbone.named_buffers()}
    features: Features = functional_call(backbone, {**buffers, **weights}, (x,))
    return features.embedding
