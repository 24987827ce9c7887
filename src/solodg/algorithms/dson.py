"""Domain-specific optimised normalisation (Seo et al., ECCV 2020).

Every BatchNorm of the backbone becomes one per source domain, each with its own scale and shift. It
normalises image n of domain d by

    mean      w_d * batch mean_d     + (1 - w_d) * instance mean_n
    variance  w_d * batch variance_d + (1 - w_d) * instance variance_n       w_d = sigmoid(mix_d)

per channel. The batch is the episode's images of domain d; at test its running statistics are used.

The weight w_d is one number for each domain and each layer, 0.5 at first. The paper has been read
in two ways: the abstract of its first preprint shares the weight of a domain between all layers,
that of the second has one for each domain and layer, that of the published paper says "in each
domain". We know of no code of its authors. The sigmoid and the start at 0.5 are ours.

A test image goes through every domain's branch, and the probabilities are averaged: a prediction
costs as many forward passes as there are source domains. It needs a backbone with BatchNorm that is
not frozen, and no `--image-norm` (it mixes in the image's statistics itself). It learns statistics
of the domains even in pretrained stages that `--train-stages` does not train.
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

from solodg.algorithms.base import Algorithm, image_channels
from solodg.errors import UserError
from solodg.models.extractor import Extractor
from solodg.models.image_norm import channel_statistics, image_norms, normalise, replace_batch_norms
from solodg.types import Episode

_domain_of_images: ContextVar[Tensor] = ContextVar("domain of each image")  # (B,), by thread

_BATCH_ONLY = 20.0  # its sigmoid is 1: only the batch's statistics count


class DSON(Algorithm):
    """ERM on a backbone with normalisation layers for each of `num_domains` source domains."""

    recipes: ClassVar[dict[str, dict[str, Any]]] = Algorithm.recipes | {
        "pretrained": Algorithm.recipes["pretrained"] | {"freeze_norm": False}
    }

    def __init__(self, backbone: Extractor, *, num_classes: int, num_domains: int) -> None:
        super().__init__(normalised_by_domain(backbone, num_domains), num_classes=num_classes)
        self.num_domains = num_domains
        self.classifier = nn.Linear(backbone.embedding_dim, num_classes)

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns the cross-entropy with each image in the branch of its domain."""
        batch = episode.merged
        logits = self.classifier(self._embed_as(batch.x, batch.domain))
        return {"loss": self.cross_entropy(logits, batch.y)}

    def embed(self, x: Tensor) -> Tensor:
        """Returns the embedding (B, D), averaged over the branches."""
        return torch.stack(self._branches(x)).mean(0)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the log of the probabilities (B, C), averaged over the branches."""
        return self._classify(self._branches(x))

    def embed_and_classify(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean embedding (B, D) and log probabilities (B, C), in one pass per branch."""
        branches = self._branches(x)
        return torch.stack(branches).mean(0), self._classify(branches)

    def _classify(self, branches: list[Tensor]) -> Tensor:
        log_p = torch.stack([self.classifier(z).log_softmax(1) for z in branches])
        return log_p.logsumexp(0) - math.log(self.num_domains)

    def _branches(self, x: Tensor) -> list[Tensor]:
        """Returns the embeddings (B, D) of the images in the branch of each source domain."""
        numbers = torch.arange(self.num_domains, device=x.device)
        return [self._embed_as(x, number.expand(x.shape[0])) for number in numbers]

    def _embed_as(self, x: Tensor, domain: Tensor) -> Tensor:
        with images_of(domain):
            return super().embed(x)


@contextmanager
def images_of(domain: Tensor) -> Iterator[None]:
    """Inside, DomainNorm layers take the images of a batch to be of these domains (B,)."""
    token = _domain_of_images.set(domain)
    try:
        yield
    finally:
        _domain_of_images.reset(token)


class DomainNorm(nn.BatchNorm2d):
    """Replaces a BatchNorm (with its activation, if any) by one per domain, all starting as it.

    It is a subclass of BatchNorm2d, so that options and adapters for BatchNorm work on it.
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
        # A layer that is not trained cannot learn a mix: it uses the batch's statistics.
        start = 0.0 if like.requires_grad else _BATCH_ONLY
        self.mix = nn.Parameter(like.detach().new_full((num_domains,), start), like.requires_grad)
        self.drop = getattr(norm, "drop", nn.Identity())  # timm's BatchNormAct2d has both
        self.act = getattr(norm, "act", nn.Identity())
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised and activated maps (B, C, H, W) of images inside `images_of`."""
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
        normalised = normalise(wide, mean, var, self.eps, self.weight[domain], self.bias[domain])
        result: Tensor = self.act(self.drop(normalised.to(x.dtype)))
        return result

    def _batch_statistics(
        self, own_mean: Tensor, own_var: Tensor, domain: Tensor, pixels: int
    ) -> tuple[Tensor, Tensor]:
        """Returns mean and variance of each domain's images (domains, C), and stores them."""
        members = F.one_hot(domain, len(self.mix)).to(own_mean.dtype)  # (B, domains)
        count = members.sum(0)[:, None]
        share = (members / count.T.clamp(min=1))[:, :, None]  # (B, domains, 1)
        mean = (share * own_mean[:, None]).sum(0)
        spread = own_var + (own_mean - mean[domain]).square()
        var = (share * spread[:, None]).sum(0)
        self._update_running(mean.detach(), var.detach(), count, count * pixels)
        return mean, var

    def _update_running(self, mean: Tensor, var: Tensor, images: Tensor, values: Tensor) -> None:
        """Updates the running statistics of the domains that have images in this batch."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked.add_(1)
        present = (images > 0).to(mean.dtype)  # (domains, 1)
        rate = self.momentum * present
        unbiased = var * values / (values - 1).clamp(min=1)
        self.running_mean += rate * (mean - self.running_mean)
        self.running_var += rate * (unbiased - self.running_var)


def normalised_by_domain(backbone: Extractor, num_domains: int) -> Extractor:
    """Returns a copy of the backbone with a DomainNorm in the place of each BatchNorm."""
    image_channels(backbone, "dson has norms of its own in every stage")
    backbone = copy.deepcopy(backbone)  # the caller may start another run with it
    if image_norms(backbone):
        raise UserError(
            "dson mixes the statistics of domain and image itself: it takes no --image-norm."
        )
    if not replace_batch_norms(backbone, lambda norm: DomainNorm(norm, num_domains)):
        raise UserError(
            "dson works on BatchNorm, and the backbone has none. Try a backbone with BatchNorm, "
            "e.g. resnet18."
        )
    return backbone
