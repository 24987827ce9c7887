"""Test-time training (Sun et al., ICML 2020): ERM with a head that tells how an image was turned.

The head shares the backbone. At test the adapter `ttt` trains the backbone on it, on turned copies
of the one image; without the adapter the model predicts as ERM does. The authors branch off before
the last stage; here both heads read the embedding, so that any backbone will do.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solodg.algorithms.base import image_channels
from solodg.algorithms.erm import ERM
from solodg.types import Episode


class TTT(ERM):
    """Cross-entropy of class and, by `rotation_weight`, of quarter turns."""

    def __init__(
        self, backbone: nn.Module, *, num_classes: int, rotation_weight: float = 1.0
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        image_channels(backbone, "ttt turns images")
        self.rotation_weight = rotation_weight
        self.rotation = nn.Linear(int(backbone.embedding_dim), 4)  # type: ignore[arg-type]

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        batch = episode.merged
        turns = torch.randint(4, (len(batch.y),), device=batch.y.device)
        class_loss = self.cross_entropy(self(batch.x), batch.y)
        rotation = self.rotation_loss(turned(batch.x, turns), turns)
        return {
            "loss": class_loss + self.rotation_weight * rotation,
            "class": class_loss.detach(),
            "rotation": rotation.detach(),
        }

    def rotation_loss(self, x: Tensor, turns: Tensor) -> Tensor:
        return F.cross_entropy(self.rotation(self.embed(x)), turns)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Each image by its number of quarter turns."""
    result = x.clone()
    for quarter in (1, 2, 3):
        chosen = turns == quarter
        result[chosen] = torch.rot90(x[chosen], quarter, (2, 3))
    return result
