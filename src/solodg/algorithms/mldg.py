"""Meta-learning domain generalisation (Li, Yang, Song, Hospedales, AAAI 2018).

A step that serves some domains should serve another. With F the cross-entropy on the meta-source
of the episode, G that on its meta-target (a source domain drawn anew for every episode):

    loss = F(theta) + beta * G(theta - alpha * grad F(theta))

The gradient is exact, through the inner gradient too, unless `second_order` is off. alpha = 0.5 and
beta = 1 are those of the authors' published run, on fixed features.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from solodg.algorithms.erm import ERM
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
        meta_train = self.cross_entropy(self(source.x), source.y)
        logits = functional_call(self, self._stepped(meta_train), (target.x,))
        meta_test = self.cross_entropy(logits, target.y)
        return {
            "loss": meta_train + self.beta * meta_test,
            "class": meta_train.detach(),
            "meta_test": meta_test.detach(),
        }

    def _stepped(self, loss: Tensor) -> dict[str, Tensor]:
        """The state after one step down the loss."""
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(
            loss,
            list(trained.values()),
            retain_graph=True,
            create_graph=self.second_order,
            materialize_grads=True,  # a backbone may have parameters that it does not use
        )
        state = {
            name: parameter - self.alpha * gradient
            for (name, parameter), gradient in zip(trained.items(), gradients, strict=True)
        }
        # Copies: the running statistics of BatchNorm stay those of theta.
        return state | {name: buffer.clone() for name, buffer in self.named_buffers()}
