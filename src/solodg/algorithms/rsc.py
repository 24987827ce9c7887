"""Representation self-challenging (Huang, Wang, Xing, Huang, ECCV 2020).

It mutes the features that the classifier relies on most. With z the last feature map (or the
embedding, where a backbone has no map) and g the gradient of the true class's logit by z:

    importance of a channel    mean of g over positions
    importance of a position   sum over channels of z times the channel's importance

A step mutes the most important channels or, as often, positions. It does so in the third of the
images whose probability of the true class falls most. The loss is the cross-entropy on the
remaining features.

The authors' code mutes 1 / 3.2 of the channels and a third of the positions, each rounded up: 160
of 512 and 17 of 49. It leaves an image alone whose probability falls by 0.0001 or less. So does
this. Departures: their share of images is 0.3, then 0.5 in the second half of training (a third in
the paper), here it is constant; they add the mirrored images to every batch.
"""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from solodg.algorithms.erm import ERM
from solodg.algorithms.ranges import SearchRange, Uniform
from solodg.models.extractor import Extractor
from solodg.types import Episode


class RSC(ERM):
    """ERM on the last feature map without its most important channels or positions.

    `feature_share` is the share of positions that are muted, `channel_share` that of channels,
    both rounded up; `image_share` is the share of images. With `channel_share=None`, as in earlier
    versions of this package, `feature_share` is that of both, rounded to the nearest number.
    """

    search: ClassVar[dict[str, SearchRange]] = {
        "feature_share": Uniform(0.05, 0.5),
        "image_share": Uniform(0.05, 0.5),
    }

    def __init__(
        self,
        backbone: Extractor,
        *,
        num_classes: int,
        feature_share: float = 1 / 3,
        image_share: float = 1 / 3,
        channel_share: float | None = 1 / 3.2,
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        shares = (feature_share, feature_share if channel_share is None else channel_share)
        if not (all(0 < share < 1 for share in shares) and 0 < image_share <= 1):
            raise ValueError("feature shares must lie between 0 and 1, image_share be 1 at most")
        self.position_share, self.channel_share = shares
        self.image_share = image_share
        as_before = channel_share is None
        self.count: Callable[[float], int] = round if as_before else math.ceil
        self.least_fall = 0.0 if as_before else 1e-4  # of the probability, for an image to be muted

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns the cross-entropy on the features that are not muted."""
        batch = episode.merged
        last = self.backbone.last_map(batch.x)
        kept = self.challenge(last.detach(), batch.y)
        return {"loss": self.cross_entropy(self._classify(last * kept), batch.y)}

    def challenge(self, last: Tensor, y: Tensor) -> Tensor:
        """Returns a mask of the features to keep, for maps (B, C, H, W) or embeddings (B, D)."""
        training = self.training
        self.eval()  # no dropout, and no update of BatchNorm's running statistics
        with torch.enable_grad():
            copied = last.clone().requires_grad_()
            logits = self._classify(copied)
            true_class = y[:, None]
            (gradient,) = torch.autograd.grad(logits.gather(1, true_class).sum(), copied)
        z = last.flatten(2) if last.ndim == 4 else last[:, :, None]  # (B, C, P)
        channel = gradient.reshape_as(z).mean(2)  # (B, C)
        if z.shape[2] > 1 and torch.rand(()) < 0.5:
            position = (z * channel[:, :, None]).sum(1)  # (B, P)
            count = self.count(self.position_share * position.shape[1])
            kept = keep_least(position, count)[:, None, :]
        else:
            count = self.count(self.channel_share * channel.shape[1])
            kept = keep_least(channel, count)[:, :, None]
        with torch.no_grad():
            muted = self._classify((z * kept).reshape_as(last))
            lost = (logits.softmax(1) - muted.softmax(1)).gather(1, true_class)[:, 0]  # (B,)
        self.train(training)
        most = round(self.image_share * len(lost))
        spared = keep_least(lost[None], most)[0] | (lost <= self.least_fall)
        return (kept | spared[:, None, None]).expand_as(z).reshape_as(last)

    def _classify(self, last: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.backbone.pool(last))
        return logits


def keep_least(importance: Tensor, count: int) -> Tensor:
    """Returns a mask (B, N) that is False for the `count` largest of each row."""
    most = importance.topk(count, dim=1).indices
    return torch.ones_like(importance, dtype=torch.bool).scatter(1, most, False)
