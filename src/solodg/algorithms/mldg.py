"""Meta-learning domain generalisation (Li, Yang, Song, Hospedales, AAAI 2018).

A gradient step on some domains should also help another one. With F the cross-entropy on the
meta-source of the episode, summed over its domains, and G that on its meta-target (a source domain
drawn for every episode):

    loss = F(theta) + beta * G(theta - alpha * grad F(theta))

The gradient includes that of the inner gradient, unless `second_order` is off. The sum, alpha = 0.5
and beta = 1 are those of the authors' published run: a network of one hidden layer on fixed
features, two meta-source domains of 64 images. They ask to tune both for other data; a whole
network needs a far smaller alpha (docs/results.md, table of PACS). With the mean over all
meta-source images (`meta_train="mean"`, as in earlier versions of this package) the same loss, up
to a factor, has alpha k times and beta 1 / k times as large for k domains of equal size.
"""

from contextlib import nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from solodg.algorithms.erm import ERM
from solodg.algorithms.fast_weights import call_with, stepped, twice_differentiable
from solodg.algorithms.ranges import LogUniform, SearchRange
from solodg.models.extractor import Extractor
from solodg.types import Batch, Episode


class MLDG(ERM):
    """ERM on the meta-source, plus ERM on the meta-target after a gradient step on the meta-source.

    `alpha` is the rate of that step, `beta` the weight of the second term. `meta_train` is how the
    loss on the meta-source is put together: "sum" of the mean of each domain, or "mean" over all
    images.
    """

    search: ClassVar[dict[str, SearchRange]] = {
        "alpha": LogUniform(1e-4, 1.0),
        "beta": LogUniform(0.1, 10.0),
    }

    variants: ClassVar[dict[str, dict[str, Any]]] = {
        "default": {},
        "first-order": {"second_order": False},
    }

    def __init__(
        self,
        backbone: Extractor,
        *,
        num_classes: int,
        alpha: float = 0.5,
        beta: float = 1.0,
        second_order: bool = True,
        meta_train: Literal["sum", "mean"] = "sum",
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        self.meta_train = meta_train
        self.alpha, self.beta, self.second_order = alpha, beta, second_order

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns the cross-entropies on meta-source and, after the step, on meta-target."""
        source, target = episode.source, episode.target
        with twice_differentiable() if self.second_order else nullcontext():
            meta_train = self._meta_train_loss(source)
        weights = {name: p for name, p in self.named_parameters() if p.requires_grad}
        after = stepped(weights, meta_train, self.alpha, second_order=self.second_order)
        meta_test = self.cross_entropy(call_with(self, after, target.x), target.y)
        return {
            "loss": meta_train + self.beta * meta_test,
            "class": meta_train.detach(),
            "meta_test": meta_test.detach(),
        }

    def _meta_train_loss(self, source: Batch) -> Tensor:
        logits = self(source.x)  # one pass, so that BatchNorm sees all domains
        if self.meta_train == "mean":
            return self.cross_entropy(logits, source.y)
        members = [source.domain == d for d in source.domain.unique()]
        return torch.stack([self.cross_entropy(logits[m], source.y[m]) for m in members]).sum()
