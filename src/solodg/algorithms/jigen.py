"""JiGen (Carlucci, D'Innocente, Bucci, Caputo, Tommasi, CVPR 2019): ERM that also solves puzzles.

An image cut into 3x3 tiles is put together in another order; a second head on the shared backbone
tells which of 31 orders it was, the right one among them:

    loss = CE of the class of whole images + 0.7 * CE of the order of shuffled ones

Every image is seen whole and shuffled, where the authors draw which of the two. It needs pixels:
stored features of a frozen backbone will not do.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solodg.algorithms.base import image_channels
from solodg.algorithms.erm import ERM
from solodg.types import Episode

_SIDE = 3  # tiles
_MOST = 71  # orders besides the right one


class JiGen(ERM):
    """Cross-entropy of class and, by `jigsaw_weight`, of the order of tiles."""

    def __init__(
        self,
        backbone: nn.Module,
        *,
        num_classes: int,
        permutations: int = 30,
        jigsaw_weight: float = 0.7,
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        if not 1 <= permutations <= _MOST:
            raise ValueError(f"permutations must be from 1 to {_MOST}")
        image_channels(backbone, "jigen shuffles images")
        self.jigsaw_weight = jigsaw_weight
        self.jigsaw = nn.Linear(self.classifier.in_features, permutations + 1)
        self.register_buffer("orders", distant_orders(permutations + 1), persistent=False)
        self.orders: Tensor

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        batch = episode.merged
        drawn = torch.randint(len(self.orders), (len(batch.y),), device=batch.y.device)
        # In one pass: BatchNorm is to judge both kinds by the statistics that it remembers.
        shown = torch.cat([batch.x, puzzle(batch.x, self.orders[drawn])])
        whole, puzzles = self.embed(shown).chunk(2)
        class_loss = self.cross_entropy(self.classifier(whole), batch.y)
        jigsaw = F.cross_entropy(self.jigsaw(puzzles), drawn)
        return {
            "loss": class_loss + self.jigsaw_weight * jigsaw,
            "class": class_loss.detach(),
            "jigsaw": jigsaw.detach(),
        }


def puzzle(x: Tensor, order: Tensor) -> Tensor:
    """Shuffled images of the same size; one that three does not divide is fitted, whole or not."""
    size = x.shape[2:]
    tiled = [_SIDE * max(1, side // _SIDE) for side in size]
    # A strip left in its place would give the order away.
    return _resized(shuffled(_resized(x, tiled), order), list(size))


def shuffled(x: Tensor, order: Tensor) -> Tensor:
    """Images of 3x3 tiles with tile `order[i, p]` of image i at place p, counted row by row."""
    count, channels, height, width = x.shape
    high, wide = height // _SIDE, width // _SIDE
    tiles = x.reshape(count, channels, _SIDE, high, _SIDE, wide).permute(0, 2, 4, 1, 3, 5)
    tiles = tiles.flatten(1, 2)  # (B, 9, C, h, w)
    moved = tiles[torch.arange(count, device=x.device)[:, None], order]
    moved = moved.unflatten(1, (_SIDE, _SIDE)).permute(0, 3, 1, 4, 2, 5)
    whole: Tensor = moved.reshape(x.shape)
    return whole


def distant_orders(count: int) -> Tensor:
    """(count, 9) orders of nine tiles, the right one first, any two equal in one place at most.

    They are maps p -> a p + b over the field of nine elements u i + v, with i^2 = -1 and u, v
    modulo 3, numbered 3 u + v. Two such maps agree in at most one p. There are 72 of them, and
    there is no larger set with this distance (nor, at more than nine, one with a larger distance).
    """

    def affine(a: int, p: int, b: int) -> int:
        (au, av), (pu, pv), (bu, bv) = divmod(a, 3), divmod(p, 3), divmod(b, 3)
        return 3 * ((au * pv + av * pu + bu) % 3) + (av * pv - au * pu + bv) % 3

    maps = [(a, b) for a in range(1, 9) for b in range(9)]
    if count > 9:  # in strides, so that they have all kinds of a and b
        maps = [maps[13 * n % len(maps)] for n in range(count)]
    chosen = maps[:count]  # nine or fewer: a = 1, which agree nowhere
    return torch.tensor([[affine(a, p, b) for p in range(9)] for a, b in chosen])


def _resized(x: Tensor, size: list[int]) -> Tensor:
    if list(x.shape[2:]) == size:
        return x
    return F.interpolate(x, size, mode="bilinear", align_corners=False, antialias=True)
