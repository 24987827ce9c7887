"""The one costly product of the method, in pieces that stay in cache.

Computes the mean over L of relu(W relu(a_b + c_lc) + bias) for every image b and class c. Plain
autograd would keep three tensors of shape (B, L, C, H) and walk through memory for each; here a
few images at a time go through all layers, and only the sign of the last layer is kept, a byte
where autograd keeps two floats. The first layer is computed again on the way back: it is a sum.
"""

from typing import Any

import torch
from torch import Tensor

_PIECE_BYTES = {"cpu": 2 * 1024**2, "cuda": 256 * 1024**2}


def mean_hidden(images: Tensor, classes: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(B, H), (L, C, H), (K, H), (K,) -> (B, C, K)."""
    with torch.autocast(images.device.type, enabled=False):  # mixed precision ends before here
        dtype = torch.promote_types(weight.dtype, torch.float32)
        inputs = (tensor.to(dtype) for tensor in (images, classes, weight, bias))
        result: Tensor = _MeanHidden.apply(*inputs)  # type: ignore[no-untyped-call]
    return result


class _MeanHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, classes: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        samples, num_classes, _ = classes.shape
        shape = (len(images), samples, num_classes, len(weight))
        out = images.new_empty(len(images), num_classes, len(weight))
        active = torch.empty(shape, dtype=torch.bool, device=images.device)
        for piece in _pieces(images, classes):
            first = _first(images[piece], classes)  # (b, L, C, H)
            last = torch.addmm(bias, first.flatten(0, 2), weight.T).view(-1, *shape[1:])
            torch.gt(last, 0, out=active[piece])
            torch.mean(last.relu_(), 1, out=out[piece])
        ctx.save_for_backward(images, classes, weight, active)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        images, classes, weight, active = ctx.saved_tensors
        grad = grads[0] / len(classes)
        grad_images = torch.empty_like(images)
        grad_classes, grad_weight = torch.zeros_like(classes), torch.zeros_like(weight)
        grad_bias = weight.new_zeros(len(weight))
        for piece in _pieces(images, classes):
            first = _first(images[piece], classes)
            grad_last = (grad[piece, None] * active[piece]).flatten(0, 2)  # (bLC, K)
            grad_weight.addmm_(grad_last.T, first.flatten(0, 2))
            grad_bias += grad_last.sum(0)
            grad_first = (grad_last @ weight).view_as(first)
            grad_first = torch.ops.aten.threshold_backward(grad_first, first, 0)
            torch.sum(grad_first, (1, 2), out=grad_images[piece])
            grad_classes += grad_first.sum(0)
        return grad_images, grad_classes, grad_weight, grad_bias


def _first(images: Tensor, classes: Tensor) -> Tensor:
    return (images[:, None, None] + classes).relu_()


def _pieces(images: Tensor, classes: Tensor) -> list[slice]:
    """A few images at a time."""
    budget = _PIECE_BYTES.get(images.device.type, _PIECE_BYTES["cuda"])
    size = max(1, budget // (classes.numel() * classes.element_size()))
    return [slice(start, start + size) for start in range(0, len(images), size)]
