"""Representation self-challenging (Huang, Wang, Xing, Huang, ECCV 2020).

It mutes the features that the classifier relies on most. With z the last feature map (or the
embedding, where a backbone has no map) and g the gradient of the true class's logit by z:

    importance of a channel    mean of g over positions
    importance of a position   sum over channels of z times the channel's importance

A step mutes the most important third of the channels or, as often, of the positions. It does so in
the third of the images whose probability of the true class falls most. The loss is the
cross-entropy on the remaining features. The authors let the share of images grow during training;
here it is constant.
"""

from typing import ClassVar

import torch
from torch import Tensor

from solodg.algorithms.erm import ERM
from solodg.algorithms.ranges import SearchRange, Uniform
from solodg.models.extractor import Extractor
from solodg.types import Episode


class RSC(ERM):
    """ERM on the last feature map without its most important channels or positions.

    `feature_share` is the share of features that are muted, `image_share` that of images.
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
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        if not (0 < feature_share < 1 and 0 < image_share <= 1):
            raise ValueError("feature_share must lie between 0 and 1, image_share be 1 at most")
        self.feature_share, self.image_share = feature_share, image_share

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
            kept = keep_least(position, self.feature_share)[:, None, :]
        else:
            kept = keep_least(channel, self.feature_share)[:, :, None]
        with torch.no_grad():
            muted = self._classify((z * kept).reshape_as(last))
            lost = (logits.softmax(1) - muted.softmax(1)).gather(1, true_class)[:, 0]  # (B,)
        self.train(training)
        spared = keep_least(lost[None], self.image_share)[0] | (lost <= 0)
        return (kept | spared[:, None, None]).expand_as(z).reshape_as(last)

    def _classify(self, last: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.backbone.pool(last))
        return logits


def keep_least(importance: Tensor, share: float) -> Tensor:
    """Returns a mask (B, N) that is False for the largest `share` of each row, rounded."""
    count = round(share * importance.shape[1])
    most = importance.topk(count, dim=1).indices
    return torch.ones_like(importance, dtype=torch.bool).scatter(1, most, False)
