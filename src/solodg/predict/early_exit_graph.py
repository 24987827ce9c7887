"""The graph of a model with early exit: a loop over the readings, which ends when all are clear.

Tracing records no loop. So one reading is traced, with its source pixels as an input, and a script
repeats it for the images that need it, as `algorithms.early_exit.read_until_clear` does.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from solodg.algorithms.early_exit import RAMP
from solodg.algorithms.ridge import Ridge, square_rooted
from solodg.data.transforms import to_unit
from solodg.models.backbones import Backbone
from solodg.models.image_norm import NO_SHARE, one_reading
from solodg.models.views import VIEWS
from solodg.runs.novelty import Novelty
from solodg.types import Features

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto


def early_exit_graph(algorithm: Ridge, novelty: Novelty | None, example: Tensor) -> Any:
    """Returns the model as a script, from 8-bit pixels to logits, probabilities and novelty.

    Without `novelty` the last output means nothing, and is to be removed from the graph.
    """
    backbone = algorithm.backbone
    assert isinstance(backbone, Backbone)
    views = _Views(backbone).eval()
    read = _Reading(backbone).eval()
    image = views(example)[0], torch.tensor(1.0)
    features = read(*image)
    whole = _EarlyExit(
        _traced(views, example),
        _traced(read, *image),
        _traced(_NoveltyOf(novelty, backbone.embedding_dim).eval(), features),
        algorithm,
        backbone,
    )
    return torch.jit.script(whole.eval())


def store_weights_in_loops(model: "ModelProto") -> None:
    """Moves weights that a loop alone uses into its body; no weight is an input of the graph.

    ONNX Runtime arranges weights for its kernels where they stand beside the nodes that use them.
    """
    graph = model.graph
    names = {tensor.name for tensor in graph.initializer}
    for given in [node for node in graph.input if node.name in names]:
        graph.input.remove(given)
    bodies = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    outside = {name for node in graph.node for name in node.input}
    inside = [_names_in(body) for body in bodies]
    for tensor in list(graph.initializer):
        users = [body for body, used in zip(bodies, inside, strict=True) if tensor.name in used]
        if len(users) == 1 and tensor.name not in outside:
            users[0].initializer.append(tensor)
            graph.initializer.remove(tensor)


def _names_in(graph: "GraphProto") -> set[str]:
    """Returns the names that nodes of a graph, and of graphs within it, take as inputs."""
    found = {name for node in graph.node for name in node.input}
    inner = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return found.union(*map(_names_in, inner))


def _view_names(backbone: Backbone) -> list[str]:
    """Returns the views that its readings have, each once."""
    return list(dict.fromkeys(reading.view for reading in backbone.readings))


class _Views(nn.Module):
    """From pixels to upright images in each view, (views, B, C, H, W)."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.backbone.turned_upright(to_unit(pixels))
        return torch.stack([VIEWS[name](x) for name in _view_names(self.backbone)])


class _Reading(nn.Module):
    """From upright images in a view to embedding and style (B, D + S), by one reading."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, x: Tensor, source_pixels: Tensor) -> Tensor:
        with one_reading(source_pixels):
            stages = self.backbone.net(self.backbone.normalised(x))
        return torch.cat([stages.embedding, stages.style()], 1)


class _NoveltyOf(nn.Module):
    """From features (B, D + S) to novelty (B,)."""

    def __init__(self, novelty: Novelty | None, embedding_dim: int) -> None:
        super().__init__()
        self.novelty, self.embedding_dim = novelty, embedding_dim

    def forward(self, features: Tensor) -> Tensor:
        if self.novelty is None:
            return features[:, 0]
        embedding, style = features[:, : self.embedding_dim], features[:, self.embedding_dim :]
        novelty: Tensor = self.novelty([Features(embedding, style)])
        return novelty


class _EarlyExit(nn.Module):
    """`read_until_clear` over a traced reading."""

    def __init__(
        self, views: Any, read: Any, novelty: Any, algorithm: Ridge, backbone: Backbone
    ) -> None:
        super().__init__()
        readings = backbone.readings
        names = _view_names(backbone)
        pixels = [reading.source_pixels or NO_SHARE for reading in readings]
        self.views, self.read, self.novelty = views, read, novelty
        self.classifier = algorithm.classifier
        self.register_buffer("source_pixels", torch.tensor(pixels))
        self.register_buffer("view", torch.tensor([names.index(r.view) for r in readings]))
        self.source_pixels: Tensor
        self.view: Tensor
        self.dim: int = backbone.embedding_dim
        self.features_dim: int = backbone.embedding_dim + backbone.style_dim
        self.count: int = len(readings)
        self.margin = float(algorithm.margin)
        self.width = RAMP * self.margin

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        views = self.views(pixels)
        weight = torch.ones_like(views[0, :, 0, 0, :1])  # (B, 1) of the next reading
        weights = torch.zeros_like(weight)
        total = weights.repeat(1, self.dim)
        first = weights.repeat(1, self.features_dim)  # of the first reading
        number = 0
        needed = True
        while needed:
            rows = weight[:, 0].nonzero()[:, 0]
            x = views[self.view[number]][rows]
            features = self.read(x, self.source_pixels[number])
            z = features[:, : self.dim]
            total = total.index_add(0, rows, square_rooted(z) * weight[rows])
            first = first.index_add(0, rows, features * float(number == 0))
            weights = weights + weight
            best = self.classifier(total / weights).topk(2, dim=1)[0]
            gap = best[:, :1] - best[:, 1:]
            weight = weight * ((self.margin - gap) / self.width).clamp(0, 1)
            number = number + 1
            needed = number < self.count and bool((weight > 0).any())
        logits = self.classifier(total / weights)
        return logits, torch.softmax(logits, dim=1), self.novelty(first)


def _traced(module: nn.Module, *example: Tensor) -> Any:
    return torch.jit.trace(module, example, check_trace=False)
