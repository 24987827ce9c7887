"""The graph of a model with early exit: further readings stand in branches that may be skipped.

Tracing records no branches. So each reading is traced alone, and a script, which does what
`algorithms.early_exit.read_until_clear` does, decides which images go through it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from solodg.algorithms.early_exit import RAMP
from solodg.algorithms.ridge import Ridge, square_rooted
from solodg.data.transforms import to_unit
from solodg.models.backbones import Backbone
from solodg.runs.novelty import Novelty, with_novelty


def early_exit_graph(algorithm: Ridge, novelty: Novelty | None, example: Tensor) -> Any:
    """Returns the model as a script, from 8-bit pixels to logits, probabilities and novelty.

    Without `novelty` the last output means nothing, and is to be removed from the graph.
    """
    backbone = algorithm.backbone
    assert isinstance(backbone, Backbone)
    first = _First(backbone, novelty).eval()
    upright = first(example)[0]
    numbers = range(1, len(backbone.readings))
    further = [_traced(_Further(backbone, number), upright) for number in numbers]
    whole = _EarlyExit(_traced(first, example), further, algorithm)
    return torch.jit.script(whole.eval())


class _First(nn.Module):
    """From pixels to upright images, what is classified of the first reading, and novelty."""

    def __init__(self, backbone: Backbone, novelty: Novelty | None) -> None:
        super().__init__()
        self.backbone, self.novelty = backbone, novelty

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        x = self.backbone.turned_upright(to_unit(pixels))
        with self.backbone.reading_as(self.backbone.readings):
            read = self.backbone.each_reading(x)[0]
            z, novelty = with_novelty(lambda _: square_rooted(read(None)), self.novelty, x)
        return x, z, z[:, 0] if novelty is None else novelty


class _Further(nn.Module):
    """From upright images to what is classified of another reading."""

    def __init__(self, backbone: Backbone, number: int) -> None:
        super().__init__()
        self.backbone, self.number = backbone, number
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        with self.backbone.reading_as(self.backbone.readings):
            return square_rooted(self.backbone.each_reading(x)[self.number](None))


class _EarlyExit(nn.Module):
    """`read_until_clear` over traced readings."""

    def __init__(self, first: Any, further: list[Any], algorithm: Ridge) -> None:
        super().__init__()
        self.first, self.further = first, nn.ModuleList(further)
        self.classifier = algorithm.classifier
        self.margin = float(algorithm.margin)
        self.width = RAMP * self.margin

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, total, novelty = self.first(pixels)
        weight = torch.ones_like(total[:, :1])  # (B, 1)
        weights = weight
        for read in self.further:
            best = self.classifier(total / weights).topk(2, dim=1)[0]
            gap = best[:, :1] - best[:, 1:]
            weight = weight * ((self.margin - gap) / self.width).clamp(0, 1)
            weights = weights + weight
            rows = weight[:, 0].nonzero()[:, 0]
            if rows.numel() > 0:
                total = total.index_add(0, rows, read(x[rows]) * weight[rows])
        logits = self.classifier(total / weights)
        return logits, torch.softmax(logits, dim=1), novelty


def _traced(module: nn.Module, example: Tensor) -> Any:
    return torch.jit.trace(module, example, check_trace=False)
