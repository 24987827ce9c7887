"""T3A: a classifier of prototypes that test images adjust (Iwasawa and Matsuo, NeurIPS 2021).

The first supports are the rows of the classifier. Each test embedding becomes a support of its
predicted class; each class keeps the supports of lowest entropy. Logits are products with their
normalised mean direction. It needs no gradients. Supports stay until `reset`.

The authors have no default for the number of supports: they try 1, 5, 20, 50, 100 and all, and take
the best on source validation images. The 100 here is one of these, not chosen for any data;
`solodg tune` chooses on source domains that are left out. Their "all" drops the least certain
support of each class at every call, by a slip; here it keeps all.
"""

from typing import ClassVar, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor
from torch.nn import functional as F

from solodg.adapters.base import Adapter, entropy
from solodg.algorithms import Algorithm
from solodg.algorithms.ranges import Choice, SearchRange


class T3A(Adapter):
    """Classifies by the mean direction of the `keep` most certain supports of each class."""

    single_sample: ClassVar[bool] = False
    search: ClassVar[dict[str, SearchRange]] = {"keep": Choice((1, 5, 20, 50, 100, "all"))}

    def __init__(self, algorithm: Algorithm, *, keep: PositiveInt | Literal["all"] = 100) -> None:
        super().__init__(algorithm)
        self.keep = keep
        self.supports: Tensor  # (N, D)
        self.classes: Tensor  # (N,) predicted class of each
        self.entropies: Tensor  # (N,)
        self.reset()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, C) after adding the images to the supports."""
        z, logits = self.algorithm.embed_and_classify(x)
        self._add(z, logits)
        directions = F.normalize(F.normalize(self.supports, dim=1).T @ self._one_hot(), dim=0)
        return z @ directions

    def _add(self, z: Tensor, logits: Tensor) -> None:
        self.supports = torch.cat([self.supports, z])
        self.classes = torch.cat([self.classes, logits.argmax(1)])
        self.entropies = torch.cat([self.entropies, entropy(logits)])
        if self.keep == "all":
            return
        order = self.entropies.argsort(stable=True)
        rank = self._one_hot()[order].cumsum(0)[torch.arange(len(order)), self.classes[order]]
        kept = order[rank <= self.keep].sort().values
        self.supports, self.classes = self.supports[kept], self.classes[kept]
        self.entropies = self.entropies[kept]

    def _one_hot(self) -> Tensor:
        return F.one_hot(self.classes, self.algorithm.num_classes).to(self.supports.dtype)

    @torch.no_grad()
    def reset(self) -> None:
        """Starts again with the rows of the classifier as supports."""
        rows, bias = self.algorithm.linear_classifier()
        logits = rows @ rows.T + bias
        self.supports = rows.clone()
        self.classes = logits.argmax(1)
        self.entropies = entropy(logits)
