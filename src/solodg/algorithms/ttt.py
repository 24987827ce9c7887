"""Test-time training (Sun et al., ICML 2020): ERM with a second head that recognises rotations.

Both heads share the first stages of the backbone. The second head has a copy of the last
`own_stages` stages to itself, as the authors' has: they branch before the last stage (ImageNet,
after layer 3 of 4) or before the last one of three (CIFAR, after layer 2). At test the adapter
`ttt` trains the shared stages and the second head on rotated copies of the single image; without
the adapter the model predicts as ERM does. With `own_stages=0`, as in earlier versions of this
package, both heads read the embedding. In training each image is rotated once by a random number of
quarters; the authors do this, or (CIFAR) take all four rotations.
"""

import copy
from typing import ClassVar

import torch
from pydantic import NonNegativeInt
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from solodg.algorithms.base import OtherRate, image_channels
from solodg.algorithms.erm import ERM
from solodg.algorithms.ranges import LogUniform, SearchRange
from solodg.models.backbones import Backbone
from solodg.models.extractor import Extractor
from solodg.types import Episode, Features


class TTT(ERM):
    """ERM plus the cross-entropy, weighted by `rotation_weight`, of the rotation of images.

    The head of rotations has `own_stages` last stages of the backbone to itself.
    """

    search: ClassVar[dict[str, SearchRange]] = {"rotation_weight": LogUniform(0.1, 10.0)}

    def __init__(
        self,
        backbone: Extractor,
        *,
        num_classes: int,
        rotation_weight: float = 1.0,
        own_stages: NonNegativeInt = 1,
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        image_channels(backbone, "ttt rotates images")
        self.rotation_weight = rotation_weight
        self.rotation = nn.Linear(backbone.embedding_dim, 4)
        self.own = OwnStages(backbone, own_stages) if own_stages else None

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
        z = self.embed(x) if self.own is None else self.own.embed(self.backbone, x)
        return F.cross_entropy(self.rotation(z), quarters)

    def rotation_weights(self) -> list[nn.Parameter]:
        """Returns the parameters that the loss of rotations depends on."""
        replaced = self.own.names if self.own else []
        shared = [p for name, p in self.backbone.named_parameters() if name not in replaced]
        return [*shared, *(self.own.parameters() if self.own else ()), *self.rotation.parameters()]

    def other_rates(self) -> list[OtherRate]:
        """Returns the head's own stages, which learn at the rate of the backbone."""
        return [OtherRate(self.own, True, 1.0)] if self.own else []


class OwnStages(nn.Module):
    """A copy of the parameters and statistics of the last stages of a backbone."""

    def __init__(self, backbone: Extractor, stages: int) -> None:
        super().__init__()
        assert isinstance(backbone, Backbone)
        groups = backbone.net.stages()
        if stages >= len(groups):
            raise ValueError(f"own_stages must be less than {len(groups)}, the backbone's stages")
        late = {id(parameter) for group in groups[-stages:] for parameter in group}
        self.names: list[str] = []  # of parameters and buffers in the backbone
        for prefix, module in backbone.named_modules():
            own = [id(p) in late for p in module.parameters(recurse=False)]
            if not any(own):
                continue
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                copied = copy.deepcopy(tensor)
                full = f"{prefix}.{name}"
                self.names.append(full)
                if isinstance(copied, nn.Parameter):
                    self.register_parameter(_flat(full), copied)
                else:
                    self.register_buffer(_flat(full), copied)

    def embed(self, backbone: Extractor, x: Tensor) -> Tensor:
        """Returns the embedding (B, D) by the backbone with these stages in place of its last."""
        tensors = {name: getattr(self, _flat(name)) for name in self.names}
        features: Features = functional_call(backbone, tensors, (x,))
        return features.embedding


def _flat(name: str) -> str:
    """Returns the name of a parameter in a nested module without dots, which names may not have."""
    return name.replace(".", "/")


def rotated(x: Tensor, quarters: Tensor) -> Tensor:
    """Returns images (B, C, H, W), each rotated by its number of quarter turns (B,)."""
    result = x.clone()
    for quarter in (1, 2, 3):
        chosen = quarters == quarter
        result[chosen] = torch.rot90(x[chosen], quarter, (2, 3))
    return result
