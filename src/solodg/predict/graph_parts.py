"""Parts of an ONNX graph: modules that are exported one by one, and graphs that join them."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

OPSET = 18
Shape = Sequence[int | str]


def exported(
    module: nn.Module,
    example: tuple[Tensor, ...],
    inputs: list[str],
    outputs: list[str],
    *,
    keep_norms: bool = False,
) -> "GraphProto":
    """Exports a step; all its other names begin with that of its first output."""
    import onnx

    batches = len(example[0]) > 1
    kept = torch.onnx.TrainingMode.PRESERVE if keep_norms else torch.onnx.TrainingMode.EVAL
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.onnx"
        torch.onnx.export(
            module.eval(),
            example,
            file,
            dynamo=False,
            opset_version=OPSET,
            training=kept,
            keep_initializers_as_inputs=True,  # else it joins equal weights
            input_names=inputs,
            output_names=outputs,
            dynamic_axes={name: {0: "batch"} for name in (*inputs, *outputs)} if batches else None,
        )
        graph = onnx.load(file).graph
    public = {*inputs, *outputs, ""}
    for node in graph.node:
        node.name = f"{outputs[0]}/{node.name}"
        for names in (node.input, node.output):
            names[:] = [n if n in public else f"{outputs[0]}/{n}" for n in names]
    for tensor in graph.initializer:
        tensor.name = f"{outputs[0]}/{tensor.name}"
    return graph


def made_node(kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> "NodeProto":
    """Returns a node; its name is that of its first output."""
    from onnx import helper

    return helper.make_node(kind, inputs, outputs, outputs[0], **attributes)


def joined(
    name: str,
    parts: Sequence["NodeProto | GraphProto"],
    inputs: Mapping[str, Shape],
    outputs: Mapping[str, Shape],
    arrays: Mapping[str, Tensor] | None = None,
    kinds: Mapping[str, torch.dtype] | None = None,
) -> "GraphProto":
    """Joins nodes and graphs; inputs and outputs are numbers unless `kinds` says otherwise."""
    from onnx import NodeProto, TensorProto, helper, numpy_helper

    types = {
        torch.uint8: TensorProto.UINT8, torch.int64: TensorProto.INT64,
        torch.bool: TensorProto.BOOL, torch.float32: TensorProto.FLOAT,
    }  # fmt: skip
    nodes: list[NodeProto] = []
    weights: list[TensorProto] = []
    for part in parts:
        if isinstance(part, NodeProto):
            nodes.append(part)
        else:
            nodes += part.node
            weights += part.initializer
    weights += [numpy_helper.from_array(a.numpy(), n) for n, a in (arrays or {}).items()]
    given, found = (
        [
            helper.make_tensor_value_info(n, types[(kinds or {}).get(n, torch.float32)], shape)
            for n, shape in named.items()
        ]
        for named in (inputs, outputs)
    )
    return helper.make_graph(nodes, name, given, found, weights)
