"""Exported convolutions that pad their input themselves.

PyTorch's convolutions pad both sides alike, so where a network pads one side more, the exported
graph holds a Pad before the Conv: a copy of the map, and one in another layout than that in which
ONNX Runtime keeps maps between convolutions. ONNX's own convolution has a padding for each side.
"""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

_DEEPEST = 20  # nodes between the counts of a Pad and the constants that they are computed from


def pad_in_convolutions(model: "ModelProto") -> int:
    """Moves padding by zeros into the convolution that reads it; returns how many were moved."""
    return sum(_pad_in_convolutions(graph, model) for graph in _graphs(model.graph))


def _graphs(graph: "GraphProto") -> Iterator["GraphProto"]:
    """Yields a graph and the graphs of its branches."""
    from onnx import AttributeProto

    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


def _pad_in_convolutions(graph: "GraphProto", model: "ModelProto") -> int:
    values = _Values(graph, model)
    readers = Counter(output.name for output in graph.output)
    for each in _graphs(graph):  # a branch may read what the graph around it computes
        readers.update(name for node in each.node for name in node.input)
    moved = 0
    for node in [node for node in graph.node if node.op_type == "Conv"]:
        pad = values.makers.get(node.input[0])
        if pad is None or pad.op_type != "Pad" or readers[node.input[0]] > 1:
            continue
        around = _zeros_around(pad, values)
        if around is None or not _add_padding(node, around):
            continue
        node.input[0] = pad.input[0]
        graph.node.remove(pad)
        moved += 1
    return moved


class _Values:
    """The values of a graph that do not depend on its inputs."""

    def __init__(self, graph: "GraphProto", model: "ModelProto") -> None:
        from onnx import numpy_helper

        self.makers = {name: node for node in graph.node for name in node.output}
        self.opsets = model.opset_import
        self.known: dict[str, Any] = {
            each.name: numpy_helper.to_array(each) for each in graph.initializer
        }

    def of(self, name: str, depth: int = 0) -> Any:
        """Returns an array; None if it depends on an input, or on more than a few nodes."""
        if name not in self.known:
            self.known[name] = self._computed(name, depth) if depth < _DEEPEST else None
        return self.known[name]

    def _computed(self, name: str, depth: int) -> Any:
        from onnx.reference import ReferenceEvaluator

        from onnx import TensorProto, helper

        maker = self.makers.get(name)
        if maker is None:
            return None
        given = {each: self.of(each, depth + 1) for each in maker.input if each}
        if any(array is None for array in given.values()):
            return None
        inputs = [
            helper.make_tensor_value_info(each, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for each, a in given.items()
        ]
        output = helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None)
        part = helper.make_graph([maker], "part", inputs, [output])
        alone = helper.make_model(part, opset_imports=self.opsets)
        (found,) = ReferenceEvaluator(alone).run([name], given)
        return found


def _zeros_around(pad: "NodeProto", values: _Values) -> list[int] | None:
    """Returns the zeros (top, left, bottom, right) of a Pad; None if it does anything else."""
    if any(a.name == "mode" and a.s != b"constant" for a in pad.attribute) or len(pad.input) > 3:
        return None
    if len(pad.input) == 3 and pad.input[2] and np.any(values.of(pad.input[2]) != 0):
        return None
    each = values.of(pad.input[1])
    if each is None or len(each) != 8 or each.min() < 0 or each[[0, 1, 4, 5]].any():
        return None
    return [int(count) for count in each[[2, 3, 6, 7]]]


def _add_padding(convolution: "NodeProto", around: list[int]) -> bool:
    """Adds padding to that of a convolution; returns False if that one depends on the size."""
    from onnx import helper

    attributes = {attribute.name: attribute for attribute in convolution.attribute}
    automatic = attributes.get("auto_pad")
    if automatic is not None and automatic.s not in (b"NOTSET", b"VALID"):
        return False
    if "pads" in attributes:
        around = [a + b for a, b in zip(around, attributes["pads"].ints, strict=True)]
    for name in attributes.keys() & {"auto_pad", "pads"}:
        convolution.attribute.remove(attributes[name])
    convolution.attribute.append(helper.make_attribute("pads", around))
    return True
