"""Domain-adaptive ERM: a classifier that is told the domain (Dubey et al., CVPR 2021).

    code               a prototypical network on the image's embedding, trained to tell the
                       episode's domains by the distances to their mean codes
    domain embedding   mean code of a domain's images, no labels needed
    logits             a small network on [embedding ; domain embedding]

It needs a batch of unlabelled images of the test domain (`target_images`), which other methods do
without: compare them with that in mind. Scoring a domain, or validating on one, shows them to it,
and they are among the images that are then scored; where the domain is not known (`solodg predict`,
an exported file) it predicts with the mean of the source domains' embeddings. The authors train the
prototypical network first, as a network of its own; here it reads the backbone and is trained
along, and neither loss moves the other's weights.
"""

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from solodg.algorithms.base import Algorithm
from solodg.algorithms.centres import group_means, prototype_loss
from solodg.inference import inference_batch_size
from solodg.types import Batch, Episode


class DAERM(Algorithm):
    """Cross-entropy given the domain's embedding; asks for 256 images of a test domain."""

    target_images: ClassVar[int] = 256

    def __init__(
        self, backbone: nn.Module, *, num_classes: int, code_dim: int = 64, hidden: int = 256
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        dim = int(backbone.embedding_dim)  # type: ignore[arg-type]
        self.encode = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, code_dim))
        self.classifier = nn.Sequential(
            nn.Linear(dim + code_dim, hidden), nn.ReLU(), nn.Linear(hidden, num_classes)
        )
        self.register_buffer("domain_embedding", torch.zeros(code_dim))
        self.domain_embedding: Tensor

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        batch = episode.merged
        z = self.embed(batch.x)
        code = self.encode(z.detach())
        centres, number = group_means(code.detach(), batch.domain)
        class_loss = self.cross_entropy(self._classify(z, centres[number]), batch.y)
        domain_loss = prototype_loss(code, batch.domain)
        return {
            "loss": class_loss + domain_loss,
            "class": class_loss.detach(),
            "domain": domain_loss.detach(),
        }

    def finalize(self, source: Iterable[Batch]) -> None:
        """Forget what was seen of a target: the mean of the source domains' embeddings."""
        seen = [(self.encode(self.embed(batch.x)), batch.domain) for batch in source]
        codes, domains = (torch.cat(parts) for parts in zip(*seen, strict=True))
        self.domain_embedding.copy_(group_means(codes, domains)[0].mean(0).detach())

    def see_target(self, x: Tensor) -> None:
        parts = x.split(inference_batch_size(x[0].numel()))
        codes = torch.cat([self.encode(self.embed(part)) for part in parts])
        self.domain_embedding.copy_(codes.mean(0).detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.embed_and_classify(x)[1]

    def embed_and_classify(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.embed(x)
        return z, self._classify(z, self.domain_embedding.expand(z.shape[0], -1))

    def _classify(self, z: Tensor, domain_embedding: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.cat([z, domain_embedding], 1))
        return logits
