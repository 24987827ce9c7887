"""Model-agnostic learning of semantic features (Dou et al., NeurIPS 2019).

One random domain of the episode is meta-test, the others are meta-train:

    theta'      theta - inner_rate * gradient of the meta-train cross-entropy
    alignment   symmetric KL between meta-train and meta-test of the prediction for each class, the
                softmax of the class's mean logits at a temperature, under theta'
    metric      triplet loss with semi-hard negatives on a small network of the embedding, under
                theta', over all domains
    loss        meta-train cross-entropy + alignment + metric_weight * metric

The cross-entropy is the mean over domains of each domain's mean. The alignment is the mean over
meta-train domains of the mean over all classes; a class that one of the two batches lacks counts as
zero. These means, the inner rate, the margin, the weights and the slope of the metric network's
LeakyReLU (0.2) are those of the authors' code.

Departures: their inner gradient is the sum over the images of a domain, clipped for each tensor to
a norm of 2, so the inner step is at most 2e-5 long; here it is that of the mean, not clipped. They
drop the second derivatives; here the gradient goes through theta'. They have an optimiser with a
rate of 1e-5 for each of cross-entropy, alignment with metric loss (clipped), and metric network;
here the run's optimiser minimises the sum. Their metric loss takes a third of each batch, here all.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solodg.algorithms.erm import ERM
from solodg.algorithms.fast_weights import embed_with, stepped, twice_differentiable
from solodg.algorithms.ranges import LogUniform, SearchRange
from solodg.models.extractor import Extractor
from solodg.types import Batch, Episode


class MASF(ERM):
    """ERM whose gradient step on the meta-train domains must align the classes of meta-test.

    `inner_rate` is the step's learning rate, `temperature` softens the aligned predictions,
    `metric_weight` and `margin` belong to the triplet loss, `leak` is the slope of the LeakyReLU of
    its network. `means`: "fixed" divides by the numbers of domains and of classes; "present", as in
    earlier versions of this package, by those of images and of classes that both batches have.
    """

    search: ClassVar[dict[str, SearchRange]] = {
        "inner_rate": LogUniform(1e-6, 1e-3),
        "metric_weight": LogUniform(5e-4, 5e-2),
    }

    def __init__(
        self,
        backbone: Extractor,
        *,
        num_classes: int,
        inner_rate: float = 1e-5,
        temperature: float = 2.0,
        metric_weight: float = 0.005,
        margin: float = 10.0,
        leak: float = 0.2,
        means: Literal["fixed", "present"] = "fixed",
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        self.means = means
        self.inner_rate, self.temperature = inner_rate, temperature
        self.metric_weight, self.margin = metric_weight, margin
        dim = backbone.embedding_dim
        self.metric = nn.Sequential(
            nn.Linear(dim, 1024), nn.LeakyReLU(leak), nn.Linear(1024, 256), nn.LeakyReLU(leak)
        )

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns cross-entropy plus alignment plus weighted metric loss, and each term."""
        batch = episode.merged
        domains = batch.domain.unique().tolist()
        tested = domains.pop(int(torch.randint(len(domains), ())))
        trained = batch.domain != tested
        with twice_differentiable():
            class_loss = self._class_loss(Batch(*(t[trained] for t in batch)))
        z, logits = self._classify_with(self.inner_step(class_loss), batch.x)
        predicted = {  # domain -> mean logits of each class
            d: class_means(logits[batch.domain == d], batch.y[batch.domain == d], self.num_classes)
            for d in (tested, *domains)
        }
        alignment = torch.stack(
            [
                symmetric_kl(
                    *predicted[tested],
                    *predicted[d],
                    temperature=self.temperature,
                    over_all=self.means == "fixed",
                )
                for d in domains
            ]
        ).mean()
        metric = triplet_loss(self.metric(z), batch.y, self.margin)
        return {
            "loss": class_loss + alignment + self.metric_weight * metric,
            "class": class_loss.detach(),
            "alignment": alignment.detach(),
            "metric": metric.detach(),
        }

    def _class_loss(self, batch: Batch) -> Tensor:
        """Returns the cross-entropy on the meta-train domains, each counting alike if so asked."""
        logits = self(batch.x)
        if self.means == "present":
            return self.cross_entropy(logits, batch.y)
        members = [batch.domain == d for d in batch.domain.unique()]
        return torch.stack([self.cross_entropy(logits[m], batch.y[m]) for m in members]).mean()

    def inner_step(self, loss: Tensor) -> dict[str, Tensor]:
        """Returns the weights of backbone and classifier after the inner step, by name."""
        weights = {
            name: parameter
            for name, parameter in self.named_parameters()
            if parameter.requires_grad and not name.startswith("metric.")
        }
        return stepped(weights, loss, self.inner_rate)

    def _classify_with(self, weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns embedding (B, D) and logits (B, C) computed with the given weights."""
        prefix = "backbone."
        backbone = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        z = embed_with(self.backbone, backbone, x)
        return z, F.linear(z, weights["classifier.weight"], weights["classifier.bias"])


def class_means(logits: Tensor, y: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Returns the mean logits of each class's images (C, C), and which classes occur (C,)."""
    members = F.one_hot(y, num_classes).to(logits.dtype)  # (B, C)
    count = members.sum(0)
    return members.T @ logits / count.clamp(min=1)[:, None], count > 0


def symmetric_kl(
    logits: Tensor,
    present: Tensor,
    others: Tensor,
    others_present: Tensor,
    *,
    temperature: float,
    over_all: bool = False,
) -> Tensor:
    """Returns (KL(p, q) + KL(q, p)) / 2 of softened rows: the mean over the rows that both have.

    `present` and `others_present` (C,) tell which rows (classes) each side has. With `over_all` the
    sum over these rows is divided by the number of all.
    """
    log_p, log_q = (t.div(temperature).log_softmax(1) for t in (logits, others))
    rows = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(1) / 2
    shared = present & others_present
    return (rows * shared).sum() / (len(shared) if over_all else shared.sum().clamp(min=1))


def triplet_loss(code: Tensor, y: Tensor, margin: float) -> Tensor:
    """Returns the triplet loss with semi-hard negatives over all pairs of images of a class.

    The negative is the nearest one that is farther than the positive, or the farthest one if there
    is none. Distances between codes (B, K) are squared.
    """
    distance = torch.cdist(code, code).square()  # (B, B)
    same = y[:, None] == y[None]
    negatives = (~same).sum(1, keepdim=True)
    ordered = distance.masked_fill(same, torch.inf).sort(1).values
    place = torch.searchsorted(ordered.detach(), distance.detach(), right=True)
    negative = ordered.gather(1, place.minimum(negatives - 1).clamp(min=0))
    pairs = same & ~torch.eye(len(y), dtype=torch.bool, device=y.device) & (negatives > 0)
    hinge = F.relu(margin + distance - negative)
    return hinge.where(pairs, 0.0).sum() / pairs.sum().clamp(min=1)
