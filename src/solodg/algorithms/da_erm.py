"""Domain-adaptive ERM: a classifier with the domain as a second input (Dubey et al., CVPR 2021).

    code               a prototypical network on the image's embedding, trained to recognise the
                       episode's domains by the distances to their mean codes
    domain embedding   mean code of a domain's images, no labels needed
    logits             a small network on [embedding ; domain embedding]

Unlike the other methods it needs a batch of unlabelled images of the test domain (`target_images`):
keep that in mind when comparing. When a domain is scored or validated, these images are drawn from
it, and are scored too. Where the domain is not known (`solodg predict`, an
exported file), it predicts with the mean of the source domains' embeddings. The authors train the
prototypical network first, as a separate network. Here it reads the backbone's embedding and is
trained at the same time; neither loss changes the other's weights.
"""

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from solodg.algorithms.base import Algorithm
from solodg.algorithms.centres import group_means, prototype_loss
from solodg.algorithms.ranges import Choice, SearchRange
from solodg.inference import inference_batch_size
from solodg.models.extractor import Extractor
from solodg.types import Batch, Episode, Size


class DAERM(Algorithm):
    """ERM on [embedding ; domain embedding]; needs 256 unlabelled images of a test domain.

    `code_dim` is the width of the domain embedding, `hidden` that of the hidden layers.
    """

    search: ClassVar[dict[str, SearchRange]] = {"code_dim": Choice((16, 64, 256))}

    target_images: ClassVar[int] = 256

    def __init__(
        self, backbone: Extractor, *, num_classes: int, code_dim: Size = 64, hidden: Size = 256
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        dim = backbone.embedding_dim
        self.encode = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, code_dim))
        self.classifier = nn.Sequential(
            nn.Linear(dim + code_dim, hidden), nn.ReLU(), nn.Linear(hidden, num_classes)
        )
        self.register_buffer("domain_embedding", torch.zeros(code_dim))
        self.domain_embedding: Tensor

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns the sum of the cross-entropies of class and domain, and both terms."""
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
        """Stores the mean of the source domains' embeddings, in place of a target's."""
        coded = [(self.encode(self.embed(batch.x)), batch.domain) for batch in source]
        codes, domains = (torch.cat(parts) for parts in zip(*coded, strict=True))
        self.domain_embedding.copy_(group_means(codes, domains)[0].mean(0).detach())

    def see_target(self, x: Tensor) -> None:
        """Stores the domain embedding of these target images for the predictions that follow."""
        parts = x.split(inference_batch_size(x[0].numel()))
        codes = torch.cat([self.encode(self.embed(part)) for part in parts])
        self.domain_embedding.copy_(codes.mean(0).detach())

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, C) given the stored domain embedding."""
        return self.embed_and_classify(x)[1]

    def embed_and_classify(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns embedding (B, D) and logits (B, C), in one backbone pass."""
        z = self.embed(x)
        return z, self._classify(z, self.domain_embedding.expand(z.shape[0], -1))

    def _classify(self, z: Tensor, domain_embedding: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.cat([z, domain_embedding], 1))
        return logits
