"""Empirical risk minimisation: one linear classifier on the images of all domains (Vapnik, 1998).

The baseline that a domain-generalisation method has to beat at the same budget.
"""

from torch import Tensor, nn

from solodg.algorithms.base import Algorithm
from solodg.types import Episode


class ERM(Algorithm):
    """Cross-entropy on the merged episode."""

    def __init__(self, backbone: nn.Module, *, num_classes: int) -> None:
        super().__init__(backbone, num_classes=num_classes)
        self.classifier = nn.Linear(int(backbone.embedding_dim), num_classes)  # type: ignore[arg-type]

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        batch = episode.merged
        return {"loss": self.cross_entropy(self(batch.x), batch.y)}

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.embed(x))
        return logits

    def embed_and_classify(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.embed(x)
        return z, self.classifier(z)

    def linear_classifier(self) -> tuple[Tensor, Tensor]:
        return self.classifier.weight, self.classifier.bias
