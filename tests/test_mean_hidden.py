"""The cache-friendly product against plain autograd."""

import pytest
import torch
from torch.nn import functional as F

from solodg.algorithms.solo import mean_hidden as module
from solodg.algorithms.solo.mean_hidden import mean_hidden


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 4), (3, 2, 4), (6, 4), (6,))  # B H, L C H, K H, K
    return [torch.randn(s, generator=generator, dtype=dtype, requires_grad=True) for s in shapes]


def plain(images, classes, weight, bias) -> torch.Tensor:
    return F.linear((images[:, None, None] + classes).relu(), weight, bias).relu().mean(1)


@pytest.mark.parametrize("images_a_piece", [1, 2, 3, 5, 100])
def test_values_and_gradients_do_not_depend_on_the_pieces(monkeypatch, images_a_piece) -> None:
    monkeypatch.setitem(module._PIECE_BYTES, "cpu", images_a_piece * 3 * 2 * 4 * 8)
    tensors = inputs()
    expected, got = plain(*tensors), mean_hidden(*tensors)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)
    direction = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, tensors, direction)
    for a, b in zip(torch.autograd.grad(got, tensors, direction), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_gradients_agree_with_finite_differences() -> None:
    assert torch.autograd.gradcheck(mean_hidden, inputs())


def test_it_stays_in_single_precision_under_mixed_precision() -> None:
    tensors = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = mean_hidden(*tensors)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, plain(*tensors))


def test_no_images_give_no_rows() -> None:
    _, classes, weight, bias = inputs()
    assert mean_hidden(torch.empty(0, 4, dtype=torch.float64), classes, weight, bias).shape == (
        0,
        2,
        6,
    )
