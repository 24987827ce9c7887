"""Learning to augment by optimal transport (Zhou et al., ECCV 2020).

A generator, conditioned on a domain's number, makes one novel domain of each source domain. It
makes pixels, so it does not work on stored features of a frozen backbone:

    class     CE of real and novel images, half each; that of novel images also trains the generator
              to keep the class
    cycle     L1 between an image and its novel version sent back to its own domain
    novelty   margin - Sinkhorn divergence (cosine distance) between the embeddings of a domain and
              of its novel version, where positive; it trains only the generator
    loss      class + novelty_weight * novelty + cycle_weight * cycle

Departures from the authors: the critic of the divergence is the current backbone, not a domain
classifier trained before; the margin bounds a term that they leave unbounded; novel domains are not
also pushed apart from each other; and all is trained in one step. The weights and the margin are
ours: theirs belong to another critic and another generator.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solodg.algorithms.base import image_channels
from solodg.algorithms.erm import ERM
from solodg.algorithms.fast_weights import embed_with
from solodg.algorithms.ranges import LogUniform, SearchRange
from solodg.models.extractor import Extractor
from solodg.types import Batch, Episode


class L2AOT(ERM):
    """ERM on the images of the source domains and of novel domains from a generator.

    `margin` is the divergence that a novel domain should reach; `novelty_weight` and
    `cycle_weight` weigh the terms of the module's docstring.
    """

    search: ClassVar[dict[str, SearchRange]] = {
        "novelty_weight": LogUniform(0.1, 10.0),
        "cycle_weight": LogUniform(1.0, 100.0),
    }

    def __init__(
        self,
        backbone: Extractor,
        *,
        num_classes: int,
        num_domains: int,
        margin: float = 0.5,
        novelty_weight: float = 1.0,
        cycle_weight: float = 10.0,
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        self.num_domains, self.margin = num_domains, margin
        self.novelty_weight, self.cycle_weight = novelty_weight, cycle_weight
        self.generator = Generator(
            image_channels(backbone, "l2a_ot makes new images"), 2 * num_domains
        )

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns the weighted sum of class, novelty and cycle losses, and each of them."""
        batch = episode.merged
        novel = self.generator(batch.x, batch.domain + self.num_domains)
        cycle = F.l1_loss(self.generator(novel, batch.domain), batch.x)
        real_logits, novel_logits = self(torch.cat([batch.x, novel])).chunk(2)
        class_loss = self.cross_entropy(real_logits, batch.y)
        novel_loss = self.cross_entropy(novel_logits, batch.y)
        novelty = self._novelty(batch, novel)
        return {
            "loss": (class_loss + novel_loss) / 2
            + self.novelty_weight * novelty
            + self.cycle_weight * cycle,
            "class": class_loss.detach(),
            "novel_class": novel_loss.detach(),
            "novelty": novelty.detach(),
            "cycle": cycle.detach(),
        }

    def _novelty(self, batch: Batch, novel: Tensor) -> Tensor:
        """Returns how far the novel domains are below the margin, averaged over domains.

        Its gradient does not reach the backbone. Real and novel images are one batch: BatchNorm
        would hide a shift between two batches.
        """
        fixed = {name: weight.detach() for name, weight in self.backbone.named_parameters()}
        z = F.normalize(embed_with(self.backbone, fixed, torch.cat([batch.x, novel])))
        real, made = z.chunk(2)
        shortfalls = [
            F.relu(self.margin - sinkhorn_divergence(real[rows], made[rows]))
            for rows in (batch.domain == d for d in batch.domain.unique())
        ]
        return torch.stack(shortfalls).mean()


class Generator(nn.Module):
    """Turns images in [0, 1] into images of other domains, given by number.

    It has no normalisation layers, which would remove the information of the domain's number.
    """

    def __init__(self, channels: int, num_domains: int, width: int = 16) -> None:
        super().__init__()
        self.num_domains = num_domains
        self.net = nn.Sequential(
            nn.Conv2d(channels + num_domains, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * channels, 3, padding=1),
        )

    def forward(self, x: Tensor, domain: Tensor) -> Tensor:
        """Returns images (B, C, H, W) in [0, 1] like `x`, in the domains (B,)."""
        code = F.one_hot(domain, self.num_domains).to(x.dtype)[:, :, None, None]
        planes = code.expand(-1, -1, *x.shape[2:])  # (B, domains, H, W)
        content, gate = self.net(torch.cat([x, planes], 1)).sigmoid().chunk(2, 1)
        made: Tensor = x + gate * (content - x)  # between image and new content, pixel by pixel
        return made


def sinkhorn_divergence(
    a: Tensor, b: Tensor, epsilon: float = 0.05, iterations: int = 20
) -> Tensor:
    """Returns the Sinkhorn divergence between points (N, D) and (M, D) of equal weights.

    It is zero for equal sets. The cost is half the squared distance: for unit vectors the cosine
    distance.
    """
    across = _transport(a, b, epsilon, iterations)
    within = _transport(a, a, epsilon, iterations) + _transport(b, b, epsilon, iterations)
    return across - within / 2


def _transport(a: Tensor, b: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Returns the entropic transport cost: the dual's value after some iterations, in logs."""
    mode = "donot_use_mm_for_euclid_dist"  # exact where points are near each other
    cost = torch.cdist(a, b, compute_mode=mode).square() / (2 * epsilon)  # (N, M)
    g = cost.new_zeros(cost.shape[1])
    for _ in range(iterations):
        f = math.log(cost.shape[1]) - (g - cost).logsumexp(1)  # (N,)
        g = math.log(cost.shape[0]) - (f[:, None] - cost).logsumexp(0)  # (M,)
    return epsilon * (f.mean() + g.mean())
