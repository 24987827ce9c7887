"""Domain generalisation via entropy regularisation (Zhao et al., NeurIPS 2020).

It learns features whose distribution is the same in all domains, both overall and within each
class. With z the embedding:

    loss   CE of the class
           + CE of the domain by a discriminator; its gradient reaches z reversed, by `adversary`
           + CE of one classifier per domain on its own domain; its gradient does not reach z
           + CE of these classifiers, frozen, on the other domains, by `across`
           + CE of a second classifier per domain on its own; its gradient reaches z reversed, by
             `within`: no domain should have a class boundary of its own

The discriminator weighs each domain by the inverse number of its training images. The classifiers
of the domains weigh all classes of an episode alike; a frozen classifier is averaged over the
images of all other domains, then over the classifiers. They learn at a tenth of the rate of the
rest. This and the three weights are the authors'. Departures: their domain classifiers and
discriminator are networks of 1024 and 256 units with dropout, here they are linear and one of 1024
units; theirs are updated in a separate step before they are used on other domains, here all is one
step; they start with all losses weighed by 0.01.
"""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solodg.algorithms.base import OtherRate
from solodg.algorithms.erm import ERM
from solodg.algorithms.ranges import LogUniform, SearchRange
from solodg.models.extractor import Extractor
from solodg.types import Episode


class EntropyRegularisation(ERM):
    """ERM with an adversarial domain discriminator and adversarial classifiers of each domain.

    `adversary`, `across` and `within` weigh the terms of the module's docstring. `domain_rate` is
    the factor of the learning rate of the domains' classifiers. `weighting`: "data" as in the
    module's docstring; "episode", as in earlier versions of this package, weighs each domain alike
    in all terms but the class loss, however many images an episode has of it, and no classes.
    """

    search: ClassVar[dict[str, SearchRange]] = {
        "adversary": LogUniform(1e-2, 1.0),
        "across": LogUniform(5e-3, 0.5),
    }

    def __init__(
        self,
        backbone: Extractor,
        *,
        num_classes: int,
        num_domains: int,
        adversary: float = 0.1,
        across: float = 0.05,
        within: float = 0.001,
        weighting: Literal["data", "episode"] = "data",
        domain_rate: float = 0.1,
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        self.num_domains = num_domains
        self.weighting, self.domain_rate = weighting, domain_rate
        self.adversary, self.across, self.within = adversary, across, within
        dim = backbone.embedding_dim
        self.discriminator = nn.Sequential(
            nn.Linear(dim, 1024), nn.ReLU(), nn.Linear(1024, num_domains)
        )
        # One classifier per domain, side by side in one layer.
        self.fitted = nn.Linear(dim, num_domains * num_classes)
        self.rivals = nn.Linear(dim, num_domains * num_classes)

    def other_rates(self) -> list[OtherRate]:
        """Returns the classifiers of the domains, which learn at a lower rate."""
        if self.domain_rate == 1.0:
            return []
        return [OtherRate(m, False, self.domain_rate) for m in (self.fitted, self.rivals)]

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns the sum of the five cross-entropies, and each of them."""
        batch = episode.merged
        z = self.embed(batch.x)
        class_loss = self.cross_entropy(self.classifier(z), batch.y)
        terms = {
            "discriminator": F.cross_entropy(
                self.discriminator(reverse_gradient(z, self.adversary)),
                batch.domain,
                weight=self._domain_weights(batch.domain).to(z.dtype),
            ),
            "fitted": self._own_domain_loss(self.fitted(z.detach()), batch.y, batch.domain),
            "across": self.across * self._other_domains_loss(z, batch.y, batch.domain),
            "within": self._own_domain_loss(
                self.rivals(reverse_gradient(z, self.within)), batch.y, batch.domain
            ),
        }
        loss = class_loss + sum(terms.values())
        parts = {"class": class_loss} | terms
        return {"loss": loss} | {name: value.detach() for name, value in parts.items()}

    def _domain_weights(self, domain: Tensor) -> Tensor:
        """Returns the weight of each domain (domains,) for the discriminator."""
        if self.weighting == "episode":
            counts = domain.bincount(minlength=self.num_domains)
        else:
            images = self.domain_images or (1,) * self.num_domains
            counts = torch.tensor(images, device=domain.device)
        return 1 / counts.clamp(min=1)

    def _balanced(self, logits: Tensor, y: Tensor) -> Tensor:
        """Returns the mean over the classes of each class's mean cross-entropy."""
        each = [self.cross_entropy(logits[y == c], y[y == c]) for c in y.unique()]
        return torch.stack(each).mean()

    def _own_domain_loss(self, logits: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        """Returns the cross-entropy of each image under the classifier of its domain."""
        by_domain = logits.unflatten(1, (self.num_domains, self.num_classes))  # (B, domains, C)
        if self.weighting == "data":
            each = [
                self._balanced(by_domain[domain == d, d], y[domain == d]) for d in domain.unique()
            ]
            return torch.stack(each).sum() / self.num_domains
        members = [(domain == d, d) for d in domain.unique()]
        return torch.stack(
            [self.cross_entropy(by_domain[rows, d], y[rows]) for rows, d in members]
        ).mean()

    def _other_domains_loss(self, z: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        """Returns the cross-entropy of each image under the frozen classifiers of other domains."""
        logits = F.linear(z, self.fitted.weight.detach(), self.fitted.bias.detach())
        by_domain = logits.unflatten(1, (self.num_domains, self.num_classes))  # (B, domains, C)
        if self.weighting == "data":
            apart = [(d, domain != d) for d in range(self.num_domains)]
            each = [self._balanced(by_domain[o, d], y[o]) for d, o in apart if o.any()]
            return torch.stack([*each, z.new_zeros(())]).sum() / self.num_domains
        others = F.one_hot(domain, self.num_domains) == 0  # (B, domains)
        pairs = [others & (domain == d)[:, None] for d in domain.unique()]
        return torch.stack(
            [self.cross_entropy(by_domain[o], y[:, None].expand_as(o)[o]) for o in pairs]
        ).mean()


class _ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradients[0], None


def reverse_gradient(x: Tensor, scale: float) -> Tensor:
    """Returns x; its gradient is multiplied by -scale."""
    reversed_: Tensor = _ReverseGradient.apply(x, scale)  # type: ignore[no-untyped-call]
    return reversed_
