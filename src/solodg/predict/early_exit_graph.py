"""The graph of a model with early exit: each image is read until its class is clear.

Tracing records no loop. So the steps are exported one by one, and put together here around the
images (Scan) and around the readings of each (Loop), as `algorithms.early_exit.read_until_clear`
does. Every image is computed alone, in a batch too: its maps stay in the cache, and its answer does
not depend on the others. A view is computed when a reading needs it.
"""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from solodg.algorithms.early_exit import further_weight
from solodg.algorithms.ridge import Ridge, square_rooted
from solodg.data.transforms import to_unit
from solodg.models.backbones import Backbone
from solodg.models.image_norm import ImageBatchNorm, image_norms, replace_batch_norms
from solodg.models.views import VIEWS
from solodg.predict.graph_parts import OPSET, Shape, exported, joined, made_node
from solodg.predict.image_norm_graph import mix_in_image_statistics
from solodg.predict.onnx import INPUT, OUTPUTS
from solodg.runs.novelty import Novelty
from solodg.types import Features

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

_IR_VERSION = 8  # the version of the file format that goes with it
_UPRIGHT, _NUMBER = "upright", "number"  # the image, and the number of the reading
_STATE = ("total", "weights", "weight", "first")  # of an image, from one reading to the next


def early_exit_model(algorithm: Ridge, novelty: Novelty | None, example: Tensor) -> "ModelProto":
    """Returns the model from 8-bit pixels to logits, probabilities and novelty, if there is one."""
    from onnx import helper

    backbone, image = algorithm.backbone, example[:1]
    assert isinstance(backbone, Backbone)
    dim, features_dim = backbone.embedding_dim, backbone.embedding_dim + backbone.style_dim
    each = _each_image(algorithm, backbone, image)
    found = torch.zeros(2, dim), torch.zeros(2, features_dim)
    names = [*OUTPUTS[:2], *([] if novelty is None else OUTPUTS[-1:])]
    answer = exported(_Answer(algorithm, novelty, dim), found, ["mean", "first"], names)
    graph = joined(
        "model",
        [made_node("Scan", [INPUT], ["mean", "first"], body=each, num_scan_inputs=1), answer],
        {INPUT: ("batch", *image.shape[1:])},
        {
            name: ("batch",) if name == OUTPUTS[-1] else ("batch", algorithm.num_classes)
            for name in names
        },
        kinds={INPUT: torch.uint8},
    )
    opset = helper.make_opsetid("", OPSET)
    return helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION)


def _each_image(algorithm: Ridge, backbone: Backbone, image: Tensor) -> "GraphProto":
    """Returns the graph from an image to its mean (D,) and its first features (D + S,)."""
    upright = _Upright(backbone)
    dim, features_dim = backbone.embedding_dim, backbone.embedding_dim + backbone.style_dim
    start = {
        "total_0": torch.zeros(1, dim),
        "weights_0": torch.zeros(1, 1),
        "weight_0": torch.ones(1, 1),
        "first_0": torch.zeros(1, features_dim),
        "readings": torch.tensor(len(backbone.readings)),
        "always": torch.tensor(True),
        "rows": torch.tensor([0]),
    }
    ends = [f"{name}_end" for name in _STATE]
    parts: list[Any] = [
        made_node("Unsqueeze", ["image", "rows"], ["pixels_of_one"]),
        exported(upright, (image,), ["pixels_of_one"], [_UPRIGHT]),
        made_node(
            "Loop", ["readings", "always", *(f"{name}_0" for name in _STATE)], ends,
            body=_each_reading(algorithm, backbone, upright(image)),
        ),
        made_node("Div", ["total_end", "weights_end"], ["mean_row"]),
        made_node("Squeeze", ["mean_row", "rows"], ["mean_of_one"]),
        made_node("Squeeze", ["first_end", "rows"], ["first_of_one"]),
    ]  # fmt: skip
    shapes: dict[str, Shape] = {"mean_of_one": (dim,), "first_of_one": (features_dim,)}
    inputs: dict[str, Shape] = {"image": tuple(image.shape[1:])}
    return joined("image", parts, inputs, shapes, start, {"image": torch.uint8})


def _each_reading(algorithm: Ridge, backbone: Backbone, upright: Tensor) -> "GraphProto":
    """Returns the graph of one reading, from the state of an image to its next state."""
    names = list(dict.fromkeys(reading.view for reading in backbone.readings))
    views = [_View(backbone, name) for name in names]
    x = views[0](upright)
    parts, view = _chosen_view(views, upright)
    read = _network_graph(backbone, x, view)
    dim, features_dim = backbone.embedding_dim, backbone.embedding_dim + backbone.style_dim
    sizes = (1, dim), (1, 1), (1, 1), (1, features_dim)
    state: dict[str, Shape] = dict(zip(_STATE, sizes, strict=True))
    total, weights, weight, features = (torch.ones(size) for size in sizes)
    step = exported(
        _Step(algorithm), (features, total, weights, weight),
        ["features", "total", "weights", "weight"],
        ["next_total", "next_weights", "next_weight", "needed"],
    )  # fmt: skip
    arrays = {f"place_{place}": torch.tensor(place) for place in range(len(names))}
    arrays["view_of"] = torch.tensor([names.index(r.view) for r in backbone.readings])
    parts = [
        made_node("Gather", ["view_of", _NUMBER], ["view_number"]),
        *parts,
        read,
        step,
        made_node("Equal", [_NUMBER, "place_0"], ["is_first"]),
        made_node("Where", ["is_first", "features", "first"], ["next_first"]),
    ]
    inputs: dict[str, Shape] = {_NUMBER: (), "condition": (), **state}
    outputs: dict[str, Shape] = {"needed": (), **{f"next_{name}": s for name, s in state.items()}}
    kinds = {_NUMBER: torch.int64, "condition": torch.bool, "needed": torch.bool}
    return joined("reading", parts, inputs, outputs, arrays, kinds)


def _chosen_view(
    views: Sequence["_View"], upright: Tensor, place: int = 0
) -> tuple[list[Any], str]:
    """Returns nodes that compute the view of the reading, by its number, and what they call it."""
    name = f"view_{place}"
    computed = exported(views[place], (upright,), [_UPRIGHT], [name])
    if place == len(views) - 1:
        return [computed], name
    shape: dict[str, Shape] = {name: tuple(upright.shape)}
    others, other = _chosen_view(views, upright, place + 1)
    chosen = f"chosen_{place}"
    choice = made_node(
        "If", [f"is_{name}"], [chosen],
        then_branch=joined(name, [computed], {}, shape),
        else_branch=joined(f"not_{name}", others, {}, {other: tuple(upright.shape)}),
    )  # fmt: skip
    return [made_node("Equal", ["view_number", f"place_{place}"], [f"is_{name}"]), choice], chosen


def _network_graph(backbone: Backbone, x: Tensor, view: str) -> "GraphProto":
    """Returns the graph from a view of an image to its features, with image norm if it has any."""
    network = _Network(backbone)
    if not image_norms(network):
        return exported(network, (x,), [view], ["features"])
    replace_batch_norms(network, _PlainNorm)
    sizes: list[tuple[int, int]] = []
    for norm in network.modules():
        if isinstance(norm, _PlainNorm):
            norm.register_forward_hook(lambda _module, _given, y: sizes.append(tuple(y.shape[2:])))
    network(x)
    maps = list(sizes)  # the exporter calls the network, too
    graph = exported(network, (x,), [view], ["features"], keep_norms=True)
    source_pixels = [reading.source_pixels for reading in backbone.readings]
    return mix_in_image_statistics(graph, maps, source_pixels, _NUMBER)


class _Upright(nn.Module):
    """From the pixels of an image to the upright image."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, pixels: Tensor) -> Tensor:
        return self.backbone.turned_upright(to_unit(pixels))


class _View(nn.Module):
    """From an upright image to what the network is given of it in a view."""

    def __init__(self, backbone: Backbone, name: str) -> None:
        super().__init__()
        self.backbone, self.name = backbone, name

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone.normalised(VIEWS[self.name](x))


class _Network(nn.Module):
    """From a view of an image to embedding and style (1, D + S)."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.net = copy.deepcopy(backbone.net)

    def forward(self, x: Tensor) -> Tensor:
        stages = self.net(x)
        return torch.cat([stages.embedding, stages.style()], 1)


class _PlainNorm(nn.BatchNorm2d):
    """An image norm as a BatchNorm: its statistics are mixed in later."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        assert isinstance(norm, ImageBatchNorm)
        super().__init__(norm.num_features, norm.eps)
        self.load_state_dict(norm.state_dict())
        self.drop, self.act = norm.drop, norm.act
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.drop(super().forward(x)))
        return y


class _Step(nn.Module):
    """Adds a reading to the mean of an image, and decides whether a further one is needed."""

    def __init__(self, algorithm: Ridge) -> None:
        super().__init__()
        self.classifier, self.margin = algorithm.classifier, float(algorithm.margin)
        self.dim = self.classifier.in_features

    def forward(
        self, features: Tensor, total: Tensor, weights: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        total = total + square_rooted(features[:, : self.dim]) * weight  # (1, D)
        weights = weights + weight  # (1, 1)
        further = further_weight(self.classifier(total / weights), self.margin)
        weight = weight * further[:, None]
        return total, weights, weight, (weight > 0).reshape(())


class _Answer(nn.Module):
    """From means (B, D) and features of first readings to logits, probabilities and novelty."""

    def __init__(self, algorithm: Ridge, novelty: Novelty | None, dim: int) -> None:
        super().__init__()
        self.classifier, self.novelty, self.dim = algorithm.classifier, novelty, dim

    def forward(self, mean: Tensor, first: Tensor) -> tuple[Tensor, ...]:
        logits = self.classifier(mean)
        probabilities = torch.softmax(logits, dim=1)
        if self.novelty is None:
            return logits, probabilities
        embedding, style = first[:, : self.dim], first[:, self.dim :]
        return logits, probabilities, self.novelty([Features(embedding, style)])
