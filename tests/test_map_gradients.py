"""Gradients of statistics and of scaled maps in closed form, against autograd and differences."""

import copy
import io

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from solodg.models.image_norm import ImageBatchNorm
from solodg.models.map_gradients import MapStatistics, ScaledMap


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_gradients_and_second_gradients_are_those_of_differences() -> None:
    torch.manual_seed(0)
    x, scale, shift = leaf(3, 4, 5, 6), leaf(3, 4), leaf(3, 4)
    assert torch.autograd.gradcheck(MapStatistics.apply, (x,))
    assert torch.autograd.gradgradcheck(MapStatistics.apply, (x,))
    assert torch.autograd.gradcheck(ScaledMap.apply, (x, scale, shift))
    assert torch.autograd.gradgradcheck(ScaledMap.apply, (x, scale, shift))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [9, 120])  # maps that are read together, and one by one
def test_statistics_are_those_of_each_image(size: int, layout: torch.memory_format) -> None:
    torch.manual_seed(2)
    x = (torch.randn(3, 4, size, size + 1, dtype=torch.float64) + 3).contiguous(
        memory_format=layout
    )
    expected = torch.var_mean(x, dim=(2, 3), correction=0)
    for found in (MapStatistics.forward(x), MapStatistics.apply(x.requires_grad_())):
        torch.testing.assert_close(found, expected[::-1])
    alone = MapStatistics.forward(x[1:2])
    torch.testing.assert_close(alone, (found[0][1:2], found[1][1:2]), rtol=1e-12, atol=1e-12)


class Statistics(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return MapStatistics.forward(x)


def test_exported_statistics_of_an_almost_white_image_are_exact() -> None:
    x = torch.full((1, 2, 224, 224), 5.0)
    x[:, 0, 100:103, 20:200] = 4.0
    x[:, 1, 50:52, 50:150] = 5.5
    file = io.BytesIO()
    torch.onnx.export(Statistics(), (x,), file, dynamo=False)
    session = onnxruntime.InferenceSession(file.getvalue())
    mean, var = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    wide_var, wide_mean = torch.var_mean(x.double(), dim=(2, 3), correction=0)
    np.testing.assert_allclose(mean, wide_mean.numpy(), rtol=1e-5)
    np.testing.assert_allclose(var, wide_var.numpy(), rtol=1e-4)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("source_pixels", [(0.0,), (7.0,), (0.0, 7.0, 60.0)])
def test_image_norm_has_the_gradients_of_its_definition(source_pixels, training) -> None:
    torch.manual_seed(1)
    norm = nn.BatchNorm2d(4).double()
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(tensor)
    ours = ImageBatchNorm(norm, source_pixels).train(training)
    x = leaf(6, 4, 5, 3)
    factor = torch.randn(6, 4, 5, 3, dtype=torch.float64)
    reading = torch.arange(6) % len(source_pixels)
    ours.drawn = reading
    plain = copy.deepcopy(norm)
    (ours(x) * factor).sum().backward()
    found, x.grad = x.grad, None
    # By hand, one image after another, with autograd's own gradients.
    mean, var = plain.running_mean, plain.running_var
    if training:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    total = 0.0
    for image, weight, r in zip(x, factor, reading.tolist(), strict=True):
        share = 15 / (15 + source_pixels[r]) if source_pixels[r] else 0.0
        m = (1 - share) * mean + share * image.mean((1, 2))
        v = (1 - share) * var + share * image.var((1, 2), correction=0)
        z = (image - m[:, None, None]) / (v[:, None, None] + plain.eps).sqrt()
        total = (
            total + ((z * plain.weight[:, None, None] + plain.bias[:, None, None]) * weight).sum()
        )
    total.backward()
    torch.testing.assert_close(found, x.grad)
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad)
    torch.testing.assert_close(ours.bias.grad, plain.bias.grad)
