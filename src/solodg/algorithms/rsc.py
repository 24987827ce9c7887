"""Representation self-challenging (Huang, Wang, Xing, Huang, ECCV 2020).

What the classifier relies on most is taken away from it. Of the last feature map z (of the
embedding, where a backbone has no map) with g the gradient of the true class's logit by z:

    importance of a channel    mean of g over positions
    importance of a position   sum over channels of z times the channel's importance

A step mutes the most important third of the channels or, as often, of the positions; only in the
third of the images whose probability of the true class that lowers most. The loss is the
cross-entropy on what is left. The authors let the share of images grow in training; here it stays.
"""

import torch
from torch import Tensor, nn

from solodg.algorithms.erm import ERM
from solodg.types import Episode


class RSC(ERM):
    """Cross-entropy on features without those that matter most."""

    def __init__(
        self,
        backbone: nn.Module,
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
        batch = episode.merged
        last: Tensor = self.backbone.last_map(batch.x)  # type: ignore[operator]
        kept = self.challenge(last.detach(), batch.y)
        return {"loss": self.cross_entropy(self._classify(last * kept), batch.y)}

    def challenge(self, last: Tensor, y: Tensor) -> Tensor:
        """What stays, the rest being muted, of last maps (B, C, H, W) or embeddings (B, D)."""
        training = self.training
        self.eval()  # without dropout, and no BatchNorm learns from what is only asked
        with torch.enable_grad():
            asked = last.clone().requires_grad_()
            logits = self._classify(asked)
            own = y[:, None]
            (gradient,) = torch.autograd.grad(logits.gather(1, own).sum(), asked)
        z = last.flatten(2) if last.ndim == 4 else last[:, :, None]  # (B, C, P)
        channel = gradient.reshape_as(z).mean(2)  # (B, C)
        if z.shape[2] > 1 and torch.rand(()) < 0.5:
            position = (z * channel[:, :, None]).sum(1)  # (B, P)
            kept = keep_least(position, self.feature_share)[:, None, :]
        else:
            kept = keep_least(channel, self.feature_share)[:, :, None]
        with torch.no_grad():
            muted = self._classify((z * kept).reshape_as(last))
            lost = (logits.softmax(1) - muted.softmax(1)).gather(1, own)[:, 0]  # (B,)
        self.train(training)
        spared = keep_least(lost[None], self.image_share)[0] | (lost <= 0)
        return (kept | spared[:, None, None]).expand_as(z).reshape_as(last)

    def _classify(self, last: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.backbone.pool(last))  # type: ignore[operator]
        return logits


def keep_least(importance: Tensor, share: float) -> Tensor:
    """(B, N) -> (B, N): False for the `share` of a row, rounded, that matters most."""
    count = round(share * importance.shape[1])
    most = importance.topk(count, dim=1).indices
    return torch.ones_like(importance, dtype=torch.bool).scatter(1, most, False)
