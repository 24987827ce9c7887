"""Weights that several parts of an ONNX graph share are stored once."""

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto


def remove_repeated_weights(model: "ModelProto") -> None:
    """Keeps one of equal weights of a graph, also for its branches; none is an input any more."""
    graph = model.graph
    kept: dict[bytes, str] = {}  # hash of a weight -> its name
    renamed: dict[str, str] = {}
    weights = list(graph.initializer)
    names = {tensor.name for tensor in weights}
    del graph.initializer[:]
    for tensor in weights:
        name, tensor.name = tensor.name, ""
        first = kept.setdefault(hashlib.blake2b(tensor.SerializeToString()).digest(), name)
        renamed[name] = first
        if first == name:
            tensor.name = name
            graph.initializer.append(tensor)
    for given in [node for node in graph.input if node.name in names]:
        graph.input.remove(given)
    for part in _parts(graph):
        for node in part.node:
            node.input[:] = [renamed.get(name, name) for name in node.input]


def _parts(graph: "GraphProto") -> Iterator["GraphProto"]:
    """Yields a graph and, within it, that of every branch."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _parts(attribute.g)
