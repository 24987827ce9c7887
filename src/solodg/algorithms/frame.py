"""The frame that an image writes for itself: where its pixels go before the backbone reads them.

A small network looks at the image and writes an affine map, which starts at the identity; it learns
from the losses of whatever reads the result (spatial transformers: Jaderberg et al., 2015). Domains
that differ by the pose of what they show come closer to each other so, those not seen in training
among them.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_LOOK = 32  # pixels a side that are enough to see a pose
_REACH = 0.5  # of the entries of the map for each unit that the network writes


class Frame(nn.Module):
    """(B, C, H, W) -> the same, each image in its own frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(channels, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * (_LOOK // 8) ** 2, 64),
            nn.ReLU(),
        )
        self.write = nn.Linear(64, 6)
        nn.init.zeros_(self.write.weight)
        nn.init.zeros_(self.write.bias)
        self.register_buffer("identity", torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
        self.identity: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return resampled(x, self.maps(x))

    def maps(self, x: Tensor) -> Tensor:
        """The affine map of each image, (B, 2, 3), on coordinates in [-1, 1]."""
        written: Tensor = self.write(self.look(_shrunk(x) - 0.5))
        return self.identity + _REACH * written.view(-1, 2, 3)


def _shrunk(x: Tensor) -> Tensor:
    """(B, C, 32, 32), without aliasing, by what every exporter knows."""
    times = min(x.shape[2:]) // _LOOK
    if times > 1:
        x = F.avg_pool2d(x, times)
    if x.shape[2:] == (_LOOK, _LOOK):
        return x
    return F.interpolate(x, (_LOOK, _LOOK), mode="bilinear")


def resampled(x: Tensor, maps: Tensor) -> Tensor:
    """Each image read at the places that its map sends the pixels' places to; zero outside."""
    height, width = x.shape[2:]
    down, right = (_places(size, x) for size in (height, width))
    grid = torch.stack(  # (H, W, 3): x, y, 1
        [
            right.expand(height, width),
            down[:, None].expand(height, width),
            torch.ones(height, width, dtype=x.dtype, device=x.device),
        ],
        dim=2,
    )
    places = torch.einsum("hwk,bjk->bhwj", grid, maps)
    return F.grid_sample(x, places, mode="bilinear", padding_mode="zeros", align_corners=False)


def _places(size: int, like: Tensor) -> Tensor:
    """Middles of the pixels along one side of the square from -1 to 1."""
    steps = torch.arange(size, dtype=like.dtype, device=like.device)
    return (2 * steps + 1) / size - 1
