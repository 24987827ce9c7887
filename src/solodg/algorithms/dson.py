"""Domain-specific optimised normalisation (Seo et al., ECCV 2020).

Every BatchNorm of the backbone becomes one per source domain, with scale and shift of its own. It
normalises image n of domain d by

    mean      w_d * batch mean_d     + (1 - w_d) * instance mean_n
    variance  w_d * batch variance_d + (1 - w_d) * instance variance_n       w_d = sigmoid(mix_d)

per channel, the batch being the images of domain d; at test, its running statistics. A test image
goes through every domain's branch, and the probabilities are averaged: a prediction costs as many
forward passes as there are source domains. It needs BatchNorm, no `--image-norm` (it mixes in the
image's statistics itself), and no frozen backbone; on pretrained weights too the statistics of the
domains are learned, those of stages that `--train-stages` leaves as they are among them.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solodg.algorithms.base import Algorithm
from solodg.errors import UserError
from solodg.models.image_norm import channel_statistics, image_norms, replace_batch_norms, scaled
from solodg.types import Episode

_domain_of_images: ContextVar[Tensor] = ContextVar("domain of each image")  # (B,), by thread


_BATCH_ALONE = 20.0  # whose sigmoid is 1


class DSON(Algorithm):
    """One linear classifier on a backbone that normalises each source domain in its own way."""

    recipes: ClassVar[dict[str, dict[str, Any]]] = Algorithm.recipes | {
        "pretrained": Algorithm.recipes["pretrained"] | {"freeze_norm": False}
    }

    def __init__(self, backbone: nn.Module, *, num_classes: int, num_domains: int) -> None:
        super().__init__(normalised_by_domain(backbone, num_domains), num_classes=num_classes)
        self.num_domains = num_domains
        self.classifier = nn.Linear(int(backbone.embedding_dim), num_classes)  # type: ignore[arg-type]

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        batch = episode.merged
        logits = self.classifier(self._embed_as(batch.x, batch.domain))
        return {"loss": self.cross_entropy(logits, batch.y)}

    def embed(self, x: Tensor) -> Tensor:
        """Mean over the branches."""
        return torch.stack(self._branches(x)).mean(0)

    def forward(self, x: Tensor) -> Tensor:
        """Log of the probabilities' mean over the branches."""
        return self._classify(self._branches(x))

    def embed_and_classify(self, x: Tensor) -> tuple[Tensor, Tensor]:
        branches = self._branches(x)
        return torch.stack(branches).mean(0), self._classify(branches)

    def _classify(self, branches: list[Tensor]) -> Tensor:
        log_p = torch.stack([self.classifier(z).log_softmax(1) for z in branches])
        return log_p.logsumexp(0) - math.log(self.num_domains)

    def _branches(self, x: Tensor) -> list[Tensor]:
        """The embeddings (B, D) of the images as if they were of each source domain in turn."""
        numbers = torch.arange(self.num_domains, device=x.device)
        return [self._embed_as(x, number.expand(x.shape[0])) for number in numbers]

    def _embed_as(self, x: Tensor, domain: Tensor) -> Tensor:
        with images_of(domain):
            return super().embed(x)


@contextmanager
def images_of(domain: Tensor) -> Iterator[None]:
    """What goes through a DomainNorm inside is of these domains: (B,)."""
    token = _domain_of_images.set(domain)
    try:
        yield
    finally:
        _domain_of_images.reset(token)


class DomainNorm(nn.BatchNorm2d):
    """In place of a BatchNorm and whatever activation that has; all domains start as it was.

    A BatchNorm still to those who look for them: options and adapters work on it as on others.
    """

    def __init__(self, norm: nn.BatchNorm2d, num_domains: int) -> None:
        momentum = 0.1 if norm.momentum is None else norm.momentum
        super().__init__(norm.num_features, norm.eps, momentum)
        for name in ("running_mean", "running_var"):
            start = getattr(norm, name)
            start = getattr(self, name) if start is None else start
            setattr(self, name, start.detach().repeat(num_domains, 1))  # (domains, C)
        for name in ("weight", "bias"):
            start = getattr(norm, name)
            start = getattr(self, name) if start is None else start
            each = nn.Parameter(start.detach().repeat(num_domains, 1), start.requires_grad)
            setattr(self, name, each)  # (domains, C)
        like = self.weight
        # Where nothing is trained, there is nothing to learn a mix with: the batch's statistics.
        start = 0.0 if like.requires_grad else _BATCH_ALONE
        self.mix = nn.Parameter(like.detach().new_full((num_domains,), start), like.requires_grad)
        self.drop = getattr(norm, "drop", nn.Identity())  # timm's BatchNormAct2d has both
        self.act = getattr(norm, "act", nn.Identity())
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        domain = _domain_of_images.get()
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        own_mean, own_var = channel_statistics(wide)  # (B, C)
        if self.training:
            mean, var = self._batch_statistics(own_mean, own_var, domain, x.shape[2:].numel())
        else:
            assert self.running_mean is not None
            assert self.running_var is not None
            mean, var = self.running_mean, self.running_var
        share = self.mix.sigmoid()[domain, None]  # (B, 1)
        mean = share * mean[domain] + (1 - share) * own_mean
        var = share * var[domain] + (1 - share) * own_var
        scale = self.weight[domain] * torch.rsqrt(var + self.eps)  # (B, C)
        shift = self.bias[domain] - mean * scale
        normalised = scaled(wide, scale, shift)
        result: Tensor = self.act(self.drop(normalised.to(x.dtype)))
        return result

    def _batch_statistics(
        self, own_mean: Tensor, own_var: Tensor, domain: Tensor, pixels: int
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of each domain's images (domains, C), which are also remembered."""
        members = F.one_hot(domain, len(self.mix)).to(own_mean.dtype)  # (B, domains)
        count = members.sum(0)[:, None]
        share = (members / count.T.clamp(min=1))[:, :, None]  # (B, domains, 1)
        mean = (share * own_mean[:, None]).sum(0)
        spread = own_var + (own_mean - mean[domain]).square()
        var = (share * spread[:, None]).sum(0)
        self._remember(mean.detach(), var.detach(), count, count * pixels)
        return mean, var

    def _remember(self, mean: Tensor, var: Tensor, images: Tensor, values: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked.add_(1)
        here = (images > 0).to(mean.dtype)  # a domain that is not here learns nothing
        rate = self.momentum * here
        unbiased = var * values / (values - 1).clamp(min=1)
        self.running_mean += rate * (mean - self.running_mean)
        self.running_var += rate * (unbiased - self.running_var)


def normalised_by_domain(backbone: nn.Module, num_domains: int) -> nn.Module:
    """A copy of the backbone with a DomainNorm for each BatchNorm."""
    backbone = copy.deepcopy(backbone)  # the caller's stays as it is: it may start another run
    if image_norms(backbone):
        raise UserError(
            "dson mixes the statistics of domain and image itself: it takes no --image-norm."
        )
    if not replace_batch_norms(backbone, lambda norm: DomainNorm(norm, num_domains)):
        raise UserError(
            "dson works on BatchNorm, and the backbone has none (or is frozen and runs on stored "
            "features). Try a backbone with BatchNorm, e.g. resnet18, without --freeze-backbone."
        )
    return backbone
