"""The frame that an image writes for itself."""

import pytest
import torch
from torch.nn import functional as F

from solodg.algorithms.frame import Frame, resampled


@pytest.mark.parametrize("size", [28, 32, 48])
def test_it_starts_at_the_identity(size: int) -> None:
    x = torch.rand(3, 1, size, size)
    torch.testing.assert_close(Frame(1)(x), x, atol=1e-5, rtol=0)


def test_maps_are_those_of_affine_grid() -> None:
    x = torch.rand(4, 3, 20, 31, dtype=torch.float64)
    maps = torch.eye(2, 3, dtype=torch.float64) + 0.3 * torch.randn(4, 2, 3, dtype=torch.float64)
    grid = F.affine_grid(maps, list(x.shape), align_corners=False)
    expected = F.grid_sample(x, grid, align_corners=False)
    torch.testing.assert_close(resampled(x, maps), expected)


def test_a_quarter_turn_is_a_quarter_turn() -> None:
    x = torch.rand(1, 1, 8, 8)
    turn = torch.tensor([[[0.0, -1.0, 0.0], [1.0, 0.0, 0.0]]])
    torch.testing.assert_close(resampled(x, turn), x.rot90(1, (2, 3)), atol=1e-5, rtol=0)


def test_it_learns_to_undo_a_turn() -> None:
    torch.manual_seed(0)
    upright = torch.zeros(1, 1, 32, 32)
    upright[:, :, 6:26, 12:20] = 1
    cosine, sine = 0.866, 0.5  # 30 degrees
    turned = resampled(upright, torch.tensor([[[cosine, -sine, 0.0], [sine, cosine, 0.0]]]))
    frame = Frame(1)
    optimizer = torch.optim.Adam(frame.parameters(), lr=3e-3)
    for _ in range(150):
        loss = (frame(turned) - upright).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5 * (turned - upright).square().mean()


def test_each_image_has_its_own_frame() -> None:
    torch.manual_seed(0)
    frame = Frame(1)
    torch.nn.init.normal_(frame.write.weight, std=0.1)
    x = torch.rand(3, 1, 32, 32)
    torch.testing.assert_close(frame(x)[1:2], frame(x[1:2]))
    maps = frame.maps(x)
    assert not torch.allclose(maps[0], maps[1])
