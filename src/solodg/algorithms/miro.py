"""MIRO, mutual information regularisation with an oracle (Cha, Lee, Park, Chun, ECCV 2022).

The oracle is the backbone as it was before training. With f_l the map of stage l and o_l that of
the oracle for the same images, a variational bound of their mutual information is kept high:

    loss = CE + weight * sum over stages l of mean of [(f_l - o_l)^2 / s_l + log s_l] / 2

s_l is a trained variance for each channel, softplus(b) + 1e-5, which starts at 0.1. The mean
encoder is the identity, as in the authors' code. Their weight is 0.1 by default, 0.01 for PACS; b
learns at ten times the rate of the network. Here b is ten times a parameter, which does the same to
Adam's steps at the rate of all that is not the backbone. The stages are those that timm defines;
the authors take four blocks and the end of the stem. The oracle normalises by stored statistics.

Stages before the trained ones equal the oracle's: with stored maps their terms, which have no
gradient by the backbone, are left out. The oracle is the initial backbone at every start of a
training, resumed ones too, so it is not saved with the model.
"""

import copy
import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solodg.algorithms.erm import ERM
from solodg.algorithms.ranges import LogUniform, SearchRange
from solodg.errors import UserError
from solodg.models.extractor import Extractor
from solodg.types import Episode

_RATE = 10.0  # of the variances, in learning rates
_START, _LEAST = 0.1, 1e-5  # of the variances


class MIRO(ERM):
    """ERM whose maps stay close to those of the initial backbone, weighted by `weight`."""

    search: ClassVar[dict[str, SearchRange]] = {"weight": LogUniform(1e-3, 1.0)}

    def __init__(self, backbone: Extractor, *, num_classes: int, weight: float = 0.1) -> None:
        super().__init__(backbone, num_classes=num_classes)
        _check(backbone)
        self.weight = weight
        start = math.log(math.expm1(_START - _LEAST)) / _RATE
        # One for each channel, stage after stage: as many as the style has numbers.
        self.spread = nn.Parameter(torch.full((backbone.style_dim,), start))
        # In a tuple, so that it is no part of the model. A pose network is trained before the
        # model is: both share it.
        pose = getattr(backbone, "pose", None)
        oracle = copy.deepcopy(backbone, {id(pose): pose}).requires_grad_(False)
        self._oracle = (oracle.eval(),)

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns the cross-entropy plus the weighted distance to the oracle, and both terms."""
        batch = episode.merged
        z, maps = self.backbone.embed_with_maps(batch.x)
        class_loss = self.cross_entropy(self.classifier(z), batch.y)
        distance = map_distance(maps, self._oracle_maps(batch.x), self.variances())
        return {
            "loss": class_loss + self.weight * distance,
            "class": class_loss.detach(),
            "distance": distance.detach(),
        }

    def variances(self) -> Tensor:
        """Returns the variance of each channel, stage after stage."""
        return F.softplus(_RATE * self.spread) + _LEAST

    @torch.no_grad()
    def _oracle_maps(self, x: Tensor) -> list[Tensor]:
        (oracle,) = self._oracle
        return oracle.to(self.spread).embed_with_maps(x)[1]


def map_distance(maps: list[Tensor], oracle: list[Tensor], variances: Tensor) -> Tensor:
    """Returns the sum over stages of the mean negative Gaussian log-density, without its constant.

    Maps are (B, C, H, W), or (B, N, C) for tokens. The last of the variances are theirs.
    """
    channels = [own.shape[1] if own.ndim == 4 else own.shape[2] for own in maps]
    each = variances[len(variances) - sum(channels) :].split(channels)
    total = variances.new_zeros(())
    for own, other, variance in zip(maps, oracle, each, strict=True):
        s = variance[:, None, None] if own.ndim == 4 else variance
        total = total + ((own - other).square() / s + s.log()).mean() / 2
    return total


def _check(backbone: Extractor) -> None:
    """Raises `UserError` for a backbone that is not trained, or that has several readings."""
    if not any(parameter.requires_grad for parameter in backbone.parameters()):
        raise UserError(
            "miro keeps a backbone near its initial weights while it is trained, and stored "
            "features are of a frozen one. Train without --freeze-backbone, e.g. with "
            "--train-stages 2 --stored-views 6, or use --algorithm erm."
        )
    if len(getattr(backbone, "readings", ())) > 1:
        raise UserError(
            "miro compares maps of one reading with the same maps of the initial backbone: give "
            "one number to --image-norm, or leave it out."
        )
