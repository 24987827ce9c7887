"""Meta-learning domain generalisation (Li, Yang, Song, Hospedales, AAAI 2018).

A step that serves some domains should serve another. With F the cross-entropy on the meta-source
of the episode, G that on its meta-target (a source domain drawn anew for every episode):

    loss = F(theta) + beta * G(theta - alpha * grad F(theta))

The gradient is exact, through the inner gradient too, unless `second_order` is off. alpha = 0.5 and
beta = 1 are those of the authors' published run, on fixed features.
"""

from contextlib import nullcontext
from typing import Any, ClassVar

from torch import Tensor, nn

from solodg.algorithms.erm import ERM
from solodg.algorithms.fast_weights import call_with, stepped, twice_differentiable
from solodg.types import Episode


class MLDG(ERM):
    """Cross-entropy on some domains, and on another after a step of gradient descent on it."""

    variants: ClassVar[dict[str, dict[str, Any]]] = {
        "default": {},
        "first-order": {"second_order": False},
    }

    def __init__(
        self,
        backbone: nn.Module,
        *,
        num_classes: int,
        alpha: float = 0.5,
        beta: float = 1.0,
        second_order: bool = True,
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        self.alpha, self.beta, self.second_order = alpha, beta, second_order

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        source, target = episode.source, episode.target
        with twice_differentiable() if self.second_order else nullcontext():
            meta_train = self.cross_entropy(self(source.x), source.y)
        weights = {name: p for name, p in self.named_parameters() if p.requires_grad}
        after = stepped(weights, meta_train, self.alpha, second_order=self.second_order)
        meta_test = self.cross_entropy(call_with(self, after, target.x), target.y)
        return {
            "loss": meta_train + self.beta * meta_test,
            "class": meta_train.detach(),
            "meta_test": meta_test.detach(),
        }
