"""The pose of an image: a network estimates it and undoes it before the backbone reads the image.

A small network estimates an affine map (spatial transformers: Jaderberg et al., 2015): any
rotation, and a little stretch and shift. A larger stretch is not allowed: the loss below would
shrink all images until they agree because nothing can be seen. The network may then read the
resampled image and refine its estimate, with the same weights (Lin and Lucey, 2017). So an image in
a pose that no source domain has first comes nearer to the poses of the sources, and the refinement
undoes the rest.

The network learns from `domain_disagreement` alone: images of one class should have the same pose
in all domains. So domains that differ by pose come closer to each other, unseen ones included. The
classification loss does not train it: with that loss, accuracy on unseen angles was lower
(docs/research_notebook.md).

In arguments, records and checkpoints this part is called `frame` for historical reasons.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solodg.algorithms.centres import group_means
from solodg.models.pose import pixel_centres, shrink

_INPUT_SIZE = 32  # pixels a side that are enough to see a pose
_STRETCH = 0.1  # at most, in each of three ways, for one estimate
_SHIFT = 0.1  # at most, of half a side, for one estimate
_COARSE = 16  # pixels a side of the images whose means are compared


class PoseNetwork(nn.Module):
    """Estimates the pose of each image and returns the image with its pose undone.

    The first estimate is followed by `refinements`, each on the image resampled so far. The poses
    start at the identity. `look` and `pose` are names in checkpoints.
    """

    def __init__(self, channels: int, refinements: int = 0) -> None:
        super().__init__()
        self.refinements = refinements
        self.look = nn.Sequential(
            nn.Conv2d(channels, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * (_INPUT_SIZE // 8) ** 2, 64),
            nn.ReLU(),
        )
        self.pose = nn.Linear(64, 6)
        nn.init.zeros_(self.pose.weight)
        nn.init.zeros_(self.pose.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Returns images (B, C, H, W) resampled by their poses."""
        return resample(x, self.poses(x))

    def poses(self, x: Tensor) -> Tensor:
        """Returns the pose of each image: affine maps (B, 2, 3) on coordinates in [-1, 1]."""
        small = shrink(x, _INPUT_SIZE)
        poses = self._estimate(small)
        for _ in range(self.refinements):
            poses = compose(poses, self._estimate(resample(small, poses)))
        return poses

    def _estimate(self, small: Tensor) -> Tensor:
        pose: Tensor = self.pose(self.look(small - 0.5))  # (B, 6)
        return pose_maps(pose[:, 0], _STRETCH * pose[:, 1:4].tanh(), _SHIFT * pose[:, 4:].tanh())


def pose_maps(angle: Tensor, stretch: Tensor, shift: Tensor) -> Tensor:
    """Returns affine maps (B, 2, 3): a stretch, then a rotation, then a shift.

    Angles (B,) in radians, stretches (B, 3) and shifts (B, 2).
    """
    cosine, sine = angle.cos(), angle.sin()
    both, across, skew = stretch.unbind(1)
    rotations = torch.stack([cosine, -sine, sine, cosine], 1).view(-1, 2, 2)
    stretches = torch.stack([1 + both + across, skew, skew, 1 + both - across], 1).view(-1, 2, 2)
    return torch.cat([rotations @ stretches, shift[:, :, None]], dim=2)


def domain_disagreement(x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
    """Returns the share, from 0 to 1, of the variance of images (B, C, H, W) between domains.

    It compares the mean images of each class in each domain: their variance between domains within
    a class, over all their variance. Coarse pixels give a gradient even where images lie far apart.
    """
    pixels = F.adaptive_avg_pool2d(x, _COARSE).flatten(1)
    num_classes = int(y.max()) + 1
    pair = domain * num_classes + y
    means, _ = group_means(pixels, pair)  # one row per class and domain that occur together
    class_means, label = group_means(means, pair.unique() % num_classes)
    within = (means - class_means[label]).square().sum()
    total = (means - means.mean(0)).square().sum()
    return within / total.clamp(min=1e-6)


def mean_pose(poses: Tensor) -> Tensor:
    """Returns the mean rotation, stretch and shift of poses as one map: (B, 2, 3) -> (2, 3).

    A mean entry by entry would shrink the image where poses rotate to both sides.
    """
    left, sizes, right = torch.linalg.svd(poses[:, :, :2])
    stretch = (right.mT @ (sizes[:, :, None] * right)).mean(0)
    left_mean, _, right_mean = torch.linalg.svd((left @ right).mean(0))
    return torch.cat([left_mean @ right_mean @ stretch, poses[:, :, 2].mean(0)[:, None]], dim=1)


def compose(first: Tensor, then: Tensor) -> Tensor:
    """Returns maps (B, 2, 3) that resample like `first` and, on the result, `then`."""
    linear = first[:, :, :2]
    return torch.cat([linear @ then[:, :, :2], linear @ then[:, :, 2:] + first[:, :, 2:]], dim=2)


def resample(x: Tensor, poses: Tensor) -> Tensor:
    """Returns images (B, C, H, W) read where the maps (B, 2, 3) send each pixel; zero outside."""
    height, width = x.shape[2:]
    down, right = (pixel_centres(size, x) for size in (height, width))
    grid = torch.stack(  # (H, W, 3): x, y, 1
        [
            right.expand(height, width),
            down[:, None].expand(height, width),
            torch.ones(height, width, dtype=x.dtype, device=x.device),
        ],
        dim=2,
    )
    places = torch.einsum("hwk,bjk->bhwj", grid, poses)  # (B, H, W, 2)
    return F.grid_sample(x, places, mode="bilinear", padding_mode="zeros", align_corners=False)
