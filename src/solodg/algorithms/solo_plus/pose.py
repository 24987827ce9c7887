"""The frame that an image writes for itself: where its pixels go before the backbone reads them.

A small network looks at the image and writes a pose, which starts at none (spatial transformers:
Jaderberg et al., 2015): any turn, and a little stretch and shift. More of those would be a way out:
all images agree when they are made too small to see. It may look again, with the same weights, at
the image in the frame written so far, and add what is still amiss (Lin and Lucey, 2017): a pose
that no source domain has is brought near to one that some have, and from there on as those are.

It learns from `disagreement` alone: images of one class in different domains are to lie alike. So
domains that differ by the pose of what they show come closer to each other, those not seen in
training among them. What classifies the result has no say: it would rather know the training images
as they are (docs/research_notebook.md).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solodg.algorithms.centres import group_means

_LOOK = 32  # pixels a side that are enough to see a pose
_STRETCH = 0.1  # at most, in each of three ways, for a look
_SHIFT = 0.1  # at most, of half a side, for a look
_COARSE = 16  # pixels a side of the images whose means are compared


class Frame(nn.Module):
    """(B, C, H, W) -> the same, each image in its own frame, which it writes in some looks."""

    def __init__(self, channels: int, looks: int = 1) -> None:
        super().__init__()
        self.looks = looks
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
        self.pose = nn.Linear(64, 6)
        nn.init.zeros_(self.pose.weight)
        nn.init.zeros_(self.pose.bias)

    def forward(self, x: Tensor) -> Tensor:
        return resampled(x, self.maps(x))

    def maps(self, x: Tensor) -> Tensor:
        """The affine map of each image, (B, 2, 3), on coordinates in [-1, 1]."""
        small = _shrunk(x)
        maps = self._written(small)
        for _ in range(self.looks - 1):
            maps = composed(maps, self._written(resampled(small, maps)))
        return maps

    def _written(self, small: Tensor) -> Tensor:
        pose: Tensor = self.pose(self.look(small - 0.5))
        return posed(pose[:, 0], _STRETCH * pose[:, 1:4].tanh(), _SHIFT * pose[:, 4:].tanh())


def posed(angle: Tensor, stretch: Tensor, shift: Tensor) -> Tensor:
    """(B,) radians, (B, 3) and (B, 2) -> (B, 2, 3) maps: a stretch, a turn, and a shift."""
    cosine, sine = angle.cos(), angle.sin()
    both, across, skew = stretch.unbind(1)
    turns = torch.stack([cosine, -sine, sine, cosine], 1).view(-1, 2, 2)
    stretches = torch.stack([1 + both + across, skew, skew, 1 + both - across], 1).view(-1, 2, 2)
    return torch.cat([turns @ stretches, shift[:, :, None]], dim=2)


def disagreement(x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
    """How much of what differs between images lies between domains, from 0 to 1, for (B, C, H, W).

    Mean images of each class in each domain: the variance between domains within a class, as a
    share of all their variance. Coarse pixels let images that lie far apart pull at each other.
    """
    pixels = F.adaptive_avg_pool2d(x, _COARSE).flatten(1)
    num_classes = int(y.max()) + 1
    pair = domain * num_classes + y
    means, _ = group_means(pixels, pair)  # of each class in each domain that shows it
    of_class, label = group_means(means, pair.unique() % num_classes)
    within = (means - of_class[label]).square().sum()
    whole = (means - means.mean(0)).square().sum()
    return within / whole.clamp(min=1e-6)


def mean_pose(maps: Tensor) -> Tensor:
    """(B, 2, 3) -> (2, 3): the mean turn, the mean stretch and the mean shift.

    Entry by entry, maps that turn to both sides would have a mean that shrinks.
    """
    left, sizes, right = torch.linalg.svd(maps[:, :, :2])
    stretch = (right.mT @ (sizes[:, :, None] * right)).mean(0)
    left_mean, _, right_mean = torch.linalg.svd((left @ right).mean(0))
    return torch.cat([left_mean @ right_mean @ stretch, maps[:, :, 2].mean(0)[:, None]], dim=1)


def composed(first: Tensor, then: Tensor) -> Tensor:
    """(B, 2, 3) maps: reading by `first`, and what that gives by `then`, in one map."""
    turn = first[:, :, :2]
    return torch.cat([turn @ then[:, :, :2], turn @ then[:, :, 2:] + first[:, :, 2:]], dim=2)


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
