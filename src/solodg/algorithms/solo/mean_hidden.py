"""The costliest product of the method, computed in pieces that stay in cache.

It is the mean over L of relu(W relu(a_b + c_lc) + bias) for every image b and class c. Plain
autograd would keep three tensors of shape (B, L, C, H) and go through memory for each. Here a few
images at a time go through all layers, and only the last layer is kept. The backward pass computes
the first layer again, which is only a sum.
"""

from typing import Any

import torch
from torch import Tensor

_PIECE_BYTES = {"cpu": 2 * 1024**2, "cuda": 256 * 1024**2}


def mean_hidden(images: Tensor, classes: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns the mean over L of relu(weight relu(images + classes) + bias).

    Image parts (B, H), class parts (L, C, H), weight (K, H) and bias (K,) -> (B, C, K).
    """
    with torch.autocast(images.device.type, enabled=False):  # single precision from here on
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
        kept = images.new_empty(shape)
        for piece in pieces(len(images), classes.numel(), images, _PIECE_BYTES):
            first = _first(images[piece], classes)  # (b, L, C, H)
            last = kept[piece]
            torch.addmm(bias, first.flatten(0, 2), weight.T, out=last.view(-1, len(weight)))
            torch.mean(last.relu_(), 1, out=out[piece])
        ctx.save_for_backward(images, classes, weight, kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        images, classes, weight, kept = ctx.saved_tensors
        grad = grads[0] / len(classes)
        grad_images = torch.empty_like(images)
        grad_classes, grad_weight = torch.zeros_like(classes), torch.zeros_like(weight)
        grad_bias = weight.new_zeros(len(weight))
        for piece in pieces(len(images), classes.numel(), images, _PIECE_BYTES):
            first = _first(images[piece], classes)
            last = kept[piece]
            grad_last = _through_relu(grad[piece, None].expand_as(last), last).flatten(0, 2)
            grad_weight.addmm_(grad_last.T, first.flatten(0, 2))
            grad_bias += grad_last.sum(0)
            grad_first = _through_relu((grad_last @ weight).view_as(first), first)
            torch.sum(grad_first, (1, 2), out=grad_images[piece])
            grad_classes += grad_first.sum(0)
        return grad_images, grad_classes, grad_weight, grad_bias


def _first(images: Tensor, classes: Tensor) -> Tensor:
    return (images[:, None, None] + classes).relu_()


def _through_relu(grad: Tensor, output: Tensor) -> Tensor:
    """Returns the gradient where the ReLU's output is positive, else zero, in one pass."""
    result: Tensor = torch.ops.aten.threshold_backward(grad, output, 0)
    return result


def pieces(count: int, numbers: int, like: Tensor, budgets: dict[str, int]) -> list[slice]:
    """Splits `count` images into slices whose tensors fit the budget of the device in bytes.

    An image makes a tensor of `numbers` numbers of the type of `like`.
    """
    budget = budgets.get(like.device.type, budgets["cuda"])
    size = max(1, budget // (numbers * like.element_size()))
    return [slice(start, start + size) for start in range(0, count, size)]
