"""Empirical risk minimisation: one linear classifier on the images of all domains (Vapnik, 1998).

The baseline that a domain-generalisation method has to beat at the same budget.
"""

from torch import Tensor, nn

from solodg.algorithms.base import Algorithm
from solodg.models.extractor import Extractor
from solodg.types import Episode


class ERM(Algorithm):
    """A linear classifier on the embedding, trained by cross-entropy on all images alike."""

    def __init__(self, backbone: Extractor, *, num_classes: int) -> None:
        super().__init__(backbone, num_classes=num_classes)
        self.classifier = nn.Linear(backbone.embedding_dim, num_classes)

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns the cross-entropy on all images of the episode."""
        batch = episode.merged
        return {"loss": self.cross_entropy(self(batch.x), batch.y)}

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, C) of images."""
        logits: Tensor = self.classifier(self.embed(x))
        return logits

    def embed_and_classify(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns embedding (B, D) and logits (B, C), in one backbone pass."""
        z = self.embed(x)
        return z, self.classifier(z)

    def linear_classifier(self) -> tuple[Tensor, Tensor]:
        """Returns weight (C, D) and bias (C,) of the classifier."""
        return self.classifier.weight, self.classifier.bias
