"""Statistics and normalisation of feature maps, with gradients that take few sweeps.

A map is large and its statistics are small, so time goes into sweeps over maps. Derived step by
step, the gradients of image norm take fourteen of them. In closed form they take six:

    statistics     dL/dx = dL/dmean / n + 2 dL/dvar / n (x - mean)          one sweep
    scaled map     dL/dx = g scale,  dL/dscale = sum g x,  dL/dshift = sum g        four

and one to add both, where n = H W, y = scale x + shift, and g = dL/dy.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

# From so many numbers on, a map is read by one kernel that keeps no temporary; for smaller maps
# the calls, one for each image, cost more than they save.
_LARGE = 2**15


class MapStatistics(Function):
    """Mean and variance of each image's channels: (B, C, H, W) -> (B, C) twice."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and variance."""
        if torch._C._get_tracing_state() is not None:
            return _centred(x)
        if _read_image_by_image(x):
            return _by_image(x)
        mean = x.mean((2, 3))
        # Two means are two and a half times as fast on a CPU as var_mean.
        return mean, (x.square().mean((2, 3)) - mean.square()).clamp(min=0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        """Keeps what the gradient needs."""
        ctx.save_for_backward(inputs[0], output[0])

    @staticmethod
    def backward(ctx: Any, of_mean: Tensor, of_var: Tensor) -> Tensor:
        """Returns the gradient of the map."""
        x, mean = ctx.saved_tensors
        pixels = x.shape[2] * x.shape[3]
        factor = 2 * of_var / pixels  # (B, C)
        constant = of_mean / pixels - factor * mean
        return torch.addcmul(constant[:, :, None, None], x, factor[:, :, None, None])


class ScaledMap(Function):
    """Scales and shifts each image's channels: x (B, C, H, W), scale and shift (B, C)."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Returns scale x + shift."""
        return torch.addcmul(shift[..., None, None], x, scale[..., None, None])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        """Keeps what the gradient needs."""
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of map, scale and shift."""
        x, scale = ctx.saved_tensors
        return g * scale[:, :, None, None], (g * x).sum((2, 3)), g.sum((2, 3))


def _read_image_by_image(x: Tensor) -> bool:
    """Returns whether the statistics of maps (B, C, H, W) are computed for one image at a time."""
    return x.device.type == "cpu" and len(x) > 0 and x[0].numel() >= _LARGE


def _by_image(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and variance of each image's channels, by the kernel of BatchNorm in training.

    It reads a map twice, the second time from the cache, and writes nothing of its size.
    """
    found = [torch.batch_norm_update_stats(image, None, None, 0.0) for image in x.split(1)]
    means, variances = zip(*found, strict=True)
    return torch.stack(means), torch.stack(variances)


def _centred(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and variance of each image's channels, in a form for exported graphs.

    ONNX Runtime adds numbers up one after the other, which spoils a sum over many almost equal
    numbers, and a difference of two such sums more. So sums are over rows, then over
    columns, and squares are of differences from the mean.
    """
    mean = x.mean(3).mean(2)  # (B, C)
    return mean, (x - mean[:, :, None, None]).square().mean(3).mean(2)
