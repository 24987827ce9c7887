"""T3A: a classifier of prototypes that test images adjust (Iwasawa and Matsuo, NeurIPS 2021).

Supports start as the rows of the classifier. Each test embedding joins the class it is taken for;
per class the `keep` supports of lowest entropy stay; logits are products with their normalised mean
direction. No gradients. Online: supports stay until `reset`.
"""

from typing import ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor
from torch.nn import functional as F

from solodg.adapters.base import Adapter, entropy
from solodg.algorithms import Algorithm


class T3A(Adapter):
    """`keep` supports per class."""

    single_sample: ClassVar[bool] = False

    def __init__(self, algorithm: Algorithm, *, keep: PositiveInt = 100) -> None:
        super().__init__(algorithm)
        self.keep = keep
        self.supports: Tensor  # (N, D)
        self.classes: Tensor  # (N,) what each is taken for
        self.entropies: Tensor  # (N,)
        self.reset()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        z, logits = self.algorithm.embed_and_classify(x)
        self._learn(z, logits)
        directions = F.normalize(F.normalize(self.supports, dim=1).T @ self._one_hot(), dim=0)
        return z @ directions

    def _learn(self, z: Tensor, logits: Tensor) -> None:
        self.supports = torch.cat([self.supports, z])
        self.classes = torch.cat([self.classes, logits.argmax(1)])
        self.entropies = torch.cat([self.entropies, entropy(logits)])
        order = self.entropies.argsort(stable=True)
        rank = self._one_hot()[order].cumsum(0)[torch.arange(len(order)), self.classes[order]]
        kept = order[rank <= self.keep].sort().values
        self.supports, self.classes = self.supports[kept], self.classes[kept]
        self.entropies = self.entropies[kept]

    def _one_hot(self) -> Tensor:
        return F.one_hot(self.classes, self.algorithm.num_classes).to(self.supports.dtype)

    @torch.no_grad()
    def reset(self) -> None:
        rows, bias = self.algorithm.linear_classifier()
        logits = rows @ rows.T + bias
        self.supports = rows.clone()
        self.classes = logits.argmax(1)
        self.entropies = entropy(logits)
