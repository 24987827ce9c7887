"""JiGen (Carlucci, D'Innocente, Bucci, Caputo, Tommasi, CVPR 2019): ERM that also solves puzzles.

An image is cut into 3x3 tiles and put together in another order. A second head on the shared
backbone recognises which of 31 orders it is, the right one included:

    loss = CE of the class + 0.7 * CE of the order

A share of 0.9 of the images stays whole; the others get one of the 31 orders at random. Both losses
are over all images. These are the settings of the authors' ResNet-18. Departures: the 30 orders are
those of `distant_orders`, theirs are in a file; single tiles are not turned grey. All images, also
the whole ones, are resized to a multiple of three pixels and back: use an image size that three
divides (the authors take 222).

With `whole=None`, as in earlier versions of this package, every image is used whole for its class
and shuffled for its order: about ten times the pressure of the order. The method needs pixels, and
does not work on stored features of a frozen backbone.
"""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from solodg.algorithms.base import image_channels
from solodg.algorithms.erm import ERM
from solodg.algorithms.ranges import LogUniform, SearchRange
from solodg.models.extractor import Extractor
from solodg.types import Episode, Size

_SIDE = 3  # tiles along a side
_MAX_PERMUTATIONS = 71  # orders besides the right one: see `distant_orders`

Share = Annotated[float, Field(ge=0, lt=1)]


class JiGen(ERM):
    """ERM plus the cross-entropy, weighted by `jigsaw_weight`, of the order of shuffled tiles.

    `permutations` is the number of orders besides the right one, `whole` the share of images that
    stay whole; None: every image is used twice, whole and shuffled.
    """

    search: ClassVar[dict[str, SearchRange]] = {"jigsaw_weight": LogUniform(0.07, 7.0)}

    def __init__(
        self,
        backbone: Extractor,
        *,
        num_classes: int,
        permutations: Size = 30,
        jigsaw_weight: float = 0.7,
        whole: Share | None = 0.9,
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        if not 1 <= permutations <= _MAX_PERMUTATIONS:
            raise ValueError(f"permutations must be from 1 to {_MAX_PERMUTATIONS}")
        image_channels(backbone, "jigen shuffles images")
        self.jigsaw_weight, self.whole = jigsaw_weight, whole
        self.jigsaw = nn.Linear(self.classifier.in_features, permutations + 1)
        self.register_buffer("orders", distant_orders(permutations + 1), persistent=False)
        self.orders: Tensor

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns the weighted sum of the cross-entropies of class and order, and both terms."""
        batch = episode.merged
        drawn = torch.randint(len(self.orders), (len(batch.y),), device=batch.y.device)
        if self.whole is None:
            # In one pass, so that BatchNorm's running statistics fit both kinds of images.
            both = torch.cat([batch.x, puzzle(batch.x, self.orders[drawn])])
            classified, ordered = self.embed(both).chunk(2)
        else:
            drawn = drawn.where(torch.rand(drawn.shape, device=drawn.device) >= self.whole, 0)
            classified = ordered = self.embed(puzzle(batch.x, self.orders[drawn]))
        class_loss = self.cross_entropy(self.classifier(classified), batch.y)
        jigsaw = F.cross_entropy(self.jigsaw(ordered), drawn)
        return {
            "loss": class_loss + self.jigsaw_weight * jigsaw,
            "class": class_loss.detach(),
            "jigsaw": jigsaw.detach(),
        }


def puzzle(x: Tensor, order: Tensor) -> Tensor:
    """Returns images with shuffled tiles, in the same size.

    A size that three does not divide is resized before and after; a strip left in its place would
    give the order away.
    """
    size = x.shape[2:]
    tiled = [_SIDE * max(1, side // _SIDE) for side in size]
    return _resized(shuffled(_resized(x, tiled), order), list(size))


def shuffled(x: Tensor, order: Tensor) -> Tensor:
    """Returns images with tile `order[i, p]` of image i at place p, counted row by row.

    Both sides of the images (B, C, H, W) must be divisible by three.
    """
    count, channels, height, width = x.shape
    high, wide = height // _SIDE, width // _SIDE
    tiles = x.reshape(count, channels, _SIDE, high, _SIDE, wide).permute(0, 2, 4, 1, 3, 5)
    tiles = tiles.flatten(1, 2)  # (B, 9, C, h, w)
    moved = tiles[torch.arange(count, device=x.device)[:, None], order]
    moved = moved.unflatten(1, (_SIDE, _SIDE)).permute(0, 3, 1, 4, 2, 5)
    whole: Tensor = moved.reshape(x.shape)
    return whole


def distant_orders(count: int) -> Tensor:
    """Returns `count` orders of nine tiles (count, 9), the right one first.

    Any two of them agree in at most one place. They are maps p -> a p + b over the field of nine
    elements u i + v, with i^2 = -1 and u, v modulo 3, numbered 3 u + v. There are 72 such maps. No
    larger set has this distance, and no set of more than nine orders has a larger distance.
    """

    def affine(a: int, p: int, b: int) -> int:
        (au, av), (pu, pv), (bu, bv) = divmod(a, 3), divmod(p, 3), divmod(b, 3)
        return 3 * ((au * pv + av * pu + bu) % 3) + (av * pv - au * pu + bv) % 3

    maps = [(a, b) for a in range(1, 9) for b in range(9)]
    if count > 9:  # in strides, so that a and b both vary
        maps = [maps[13 * n % len(maps)] for n in range(count)]
    chosen = maps[:count]  # nine or fewer: all with a = 1, which agree in no place
    return torch.tensor([[affine(a, p, b) for p in range(9)] for a, b in chosen])


def _resized(x: Tensor, size: list[int]) -> Tensor:
    if list(x.shape[2:]) == size:
        return x
    return F.interpolate(x, size, mode="bilinear", align_corners=False, antialias=True)
