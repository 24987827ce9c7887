"""Test-time training (Sun et al., ICML 2020): ERM with a second head that recognises rotations.

Both heads share the backbone. At test the adapter `ttt` trains the backbone through the second head
on rotated copies of the single image; without the adapter the model predicts as ERM does. The
authors' heads branch off before the last stage; here both read the embedding, so that any backbone
works.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solodg.algorithms.base import image_channels
from solodg.algorithms.erm import ERM
from solodg.algorithms.ranges import LogUniform, SearchRange
from solodg.models.extractor import Extractor
from solodg.types import Episode


class TTT(ERM):
    """ERM plus the cross-entropy, weighted by `rotation_weight`, of the rotation of images."""

    search: ClassVar[dict[str, SearchRange]] = {"rotation_weight": LogUniform(0.1, 10.0)}

    def __init__(
        self, backbone: Extractor, *, num_classes: int, rotation_weight: float = 1.0
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        image_channels(backbone, "ttt rotates images")
        self.rotation_weight = rotation_weight
        self.rotation = nn.Linear(backbone.embedding_dim, 4)

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns the weighted sum of the cross-entropies of class and rotation, and both terms."""
        batch = episode.merged
        quarters = torch.randint(4, (len(batch.y),), device=batch.y.device)
        class_loss = self.cross_entropy(self(batch.x), batch.y)
        rotation = self.rotation_loss(rotated(batch.x, quarters), quarters)
        return {
            "loss": class_loss + self.rotation_weight * rotation,
            "class": class_loss.detach(),
            "rotation": rotation.detach(),
        }

    def rotation_loss(self, x: Tensor, quarters: Tensor) -> Tensor:
        """Returns the cross-entropy of the number of quarters (B,) by which images are rotated."""
        return F.cross_entropy(self.rotation(self.embed(x)), quarters)


def rotated(x: Tensor, quarters: Tensor) -> Tensor:
    """Returns images (B, C, H, W), each rotated by its number of quarter turns (B,)."""
    result = x.clone()
    for quarter in (1, 2, 3):
        chosen = quarters == quarter
        result[chosen] = torch.rot90(x[chosen], quarter, (2, 3))
    return result
