"""MixStyle (Zhou, Yang, Qiao, Xiang, ICLR 2021): images in the mixed styles of two images.

In training, after each of stages 1-3 and with probability 1/2 for a batch, the channel means and
standard deviations of an image's map are mixed with those of another image of the batch, with a
weight from Beta(0.1, 0.1). Prediction is that of ERM.

In networks with more than four stages the first ones count as the stem: stages 1-3 are those at a
quarter, an eighth and a sixteenth of the resolution in common networks. It needs convolutional maps
and works neither on a transformer's tokens nor on stored features of a frozen backbone.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from solodg.algorithms.base import image_channels
from solodg.algorithms.erm import ERM
from solodg.algorithms.ranges import LogUniform, SearchRange, Uniform
from solodg.errors import UserError
from solodg.models.extractor import Extractor
from solodg.types import Episode

_EPS = 1e-6


class MixStyle(ERM):
    """ERM on images whose styles are mixed inside the backbone.

    `probability` is that of mixing at a stage; `concentration` is the parameter of the Beta.
    """

    search: ClassVar[dict[str, SearchRange]] = {
        "probability": Uniform(0.1, 0.9),
        "concentration": LogUniform(0.03, 1.0),
    }

    def __init__(
        self,
        backbone: Extractor,
        *,
        num_classes: int,
        probability: float = 0.5,
        concentration: float = 0.1,
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        if not 0 <= probability <= 1 or concentration <= 0:
            raise ValueError("probability must be from 0 to 1, concentration above 0")
        self.probability, self.concentration = probability, concentration
        self.mixed_stages = _stages_to_mix(backbone)

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns the cross-entropy on the episode's images in mixed styles."""
        # Hooks exist only in here, so that none is left when the model predicts.
        hooks = [stage.register_forward_hook(self._mix) for stage in self.mixed_stages]
        try:
            return super().losses(episode)
        finally:
            for hook in hooks:
                hook.remove()

    def _mix(self, _stage: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        if not self.training or torch.rand(()) >= self.probability:
            return output
        weight = torch.full((len(output),), self.concentration, device=output.device)
        share = torch.distributions.Beta(weight, weight).sample().to(output.dtype)
        return mix_styles(output, share, torch.randperm(len(output), device=output.device))


def mix_styles(maps: Tensor, share: Tensor, other: Tensor) -> Tensor:
    """Returns maps (B, C, H, W) with a share (B,) of their own style and the rest of `other`'s.

    `other` (B,) is the row of the other map.
    """
    with torch.no_grad():
        mean = maps.mean((2, 3), keepdim=True)  # (B, C, 1, 1)
        # Without Bessel's correction: a map may have a single pixel.
        std = (maps.var((2, 3), correction=0, keepdim=True) + _EPS).sqrt()
        share = share[:, None, None, None]
        new_mean = share * mean + (1 - share) * mean[other]
        new_std = share * std + (1 - share) * std[other]
    return (maps - mean) / std * new_std + new_mean


def _stages_to_mix(backbone: Extractor) -> list[nn.Module]:
    """Returns the last four stages but the very last."""
    image_channels(backbone, "mixstyle mixes feature maps")
    stages = backbone.stage_modules()[-4:-1]
    if not stages:
        raise UserError(
            "mixstyle mixes feature maps, and the stages of this backbone give none (a transformer "
            "gives tokens). Try a convolutional one, e.g. --backbone resnet18."
        )
    return stages
