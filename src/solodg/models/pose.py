"""Pose: a small network estimates by how much an image is rotated, and the rotation is undone.

It reads the image at 32 pixels inside a circle, so that corners tell nothing, and without its mean
colour and contrast. It returns a vector (x, y) whose direction is the angle. It is trained to the
least squared error (`solodg.runs.pose_training`), so where an image does not show its angle, the
vector is the mean over all angles that it may have, and points to zero: no rotation. The network
then reads the image that it has rotated and corrects its estimate, so an image in a pose that is
rare in training first comes nearer to the frequent ones.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_SIZE = 32  # pixels a side that are enough to see a rotation
_ESTIMATES = 2  # the first, and a correction of it


class PoseNetwork(nn.Module):
    """Estimates the angle of each image and returns the image upright."""

    disc: Tensor  # (32, 32) 1 inside the circle that touches the sides

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs, kernel in ((channels, 16, 5), (16, 32, 3), (32, 32, 3)):
            layers += [
                nn.Conv2d(inputs, outputs, kernel, stride=2, padding=kernel // 2, bias=False),
                nn.GroupNorm(4, outputs),  # no BatchNorm: those are adapted to test images
                nn.ReLU(),
            ]
        width = 32 * (_SIZE // 8) ** 2
        layers += [nn.Flatten(), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 2)]
        self.layers = nn.Sequential(*layers)
        self.register_buffer("disc", disc(_SIZE), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns images (B, C, H, W) with their rotation undone."""
        return rotate(x, -self.angles(x))

    def angles(self, x: Tensor) -> Tensor:
        """Returns the angle (B,) of each image, in radians; zero is upright."""
        small = shrink(x)
        angles = _direction(self.vectors(small))
        for _ in range(_ESTIMATES - 1):
            angles = angles + _direction(self.vectors(rotate(small, -angles)))
        return angles

    def vectors(self, small: Tensor) -> Tensor:
        """Returns a vector (B, 2) for images of 32 pixels; its direction is the angle."""
        vectors: Tensor = self.layers(layout(small, self.disc))
        return vectors


def turned_upright(pose: PoseNetwork, x: Tensor, share: float = 1.0) -> Tensor:
    """Returns images with their rotation undone: all of them, or a random share."""
    chosen = None if share == 1 else torch.rand(len(x), device=x.device) < share
    if chosen is not None and not chosen.any():
        return x
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):  # too coarse for angles
        upright: Tensor = pose(x if chosen is None else x[chosen])
    return upright if chosen is None else x.index_put((chosen,), upright)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Returns images (B, C, H, W) rotated clockwise about their centres by angles (B,), in radians.

    Where a rotated image would be empty, its border pixels go on: black corners would be an edge
    that a network sees.
    """
    height, width = x.shape[2:]
    down, right = (pixel_centres(size, x) for size in (height, width))
    down = down * (height / width)  # in units of half a width, so that a rotation keeps the shape
    cosine, sine = angles.cos()[:, None, None], angles.sin()[:, None, None]
    across, along = right[None, None, :], down[None, :, None]
    places = torch.stack(
        [
            cosine * across + sine * along,
            (cosine * along - sine * across) * (width / height),
        ],
        dim=3,
    )  # (B, H, W, 2)
    return F.grid_sample(x, places, mode="bilinear", padding_mode="border", align_corners=False)


def layout(x: Tensor, inside: Tensor) -> Tensor:
    """Returns images (B, C, H, W) without the mean of each channel, and of mean square 1.

    Only pixels where `inside` (H, W) is 1 count; the others become 0.
    """
    share = inside.mean()
    x = (x - (x * inside).mean((2, 3), keepdim=True) / share) * inside
    return x / (x.square().mean((1, 2, 3), keepdim=True) / share).sqrt().clamp(min=1e-3)


def shrink(x: Tensor, size: int = _SIZE) -> Tensor:
    """Returns images (B, C, size, size) without aliasing, by operators that every exporter has."""
    times = int(min(x.shape[2:]) // size)  # older versions of torch trace a tensor
    if times > 1:
        x = F.avg_pool2d(x, times)
    if x.shape[2:] == (size, size):
        return x
    return F.interpolate(x, (size, size), mode="bilinear")


def disc(size: int) -> Tensor:
    """Returns a square (size, size) that is 1 inside the circle that touches its sides, else 0."""
    centres = pixel_centres(size, torch.zeros(()))
    return (centres[:, None].square() + centres.square() <= 1).float()


def _direction(vectors: Tensor) -> Tensor:
    """Returns the angle (B,) of vectors (B, 2) against the x axis; zero for a zero vector."""
    return torch.atan2(vectors[:, 1], vectors[:, 0])


def pixel_centres(size: int, like: Tensor) -> Tensor:
    """Returns the coordinates (size,) of the pixels along a side from -1 to 1."""
    steps = torch.arange(size, dtype=like.dtype, device=like.device)
    return (2 * steps + 1) / size - 1
