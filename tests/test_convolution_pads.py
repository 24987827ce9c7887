"""Padding moved into exported convolutions: ONNX Runtime's result before is the oracle."""

import copy

import numpy as np
import onnxruntime
import pytest

import onnx
from onnx import TensorProto, helper, numpy_helper
from solodg.predict.convolution_pads import pad_in_convolutions


def model_of(
    pads: list[int], *, mode: str = "constant", value: float | None = 0.0, twice: bool = False
) -> onnx.ModelProto:
    """A Pad whose counts two other nodes compute, and a convolution that pads by itself too."""
    weight = np.random.default_rng(0).normal(size=(2, 3, 3, 3)).astype(np.float32)
    constants = {"weight": weight, "half": np.array(pads[:4]), "rest": np.array(pads[4:])}
    if value is not None:
        constants["value"] = np.array(value, dtype=np.float32)
    nodes = [
        helper.make_node("Concat", ["half", "rest"], ["pads"], axis=0),
        helper.make_node("Pad", ["x", "pads", *(["value"] if value is not None else [])],
                         ["wide"], mode=mode),
        helper.make_node("Conv", ["wide", "weight"], ["y"], strides=[2, 2], pads=[1, 0, 0, 1]),
    ]  # fmt: skip
    shape = ["n", 3, "h", "w"]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    if twice:
        nodes.append(helper.make_node("Abs", ["wide"], ["other"]))
        outputs.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, None))
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)], outputs,
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def run(model: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    onnx.checker.check_model(model)
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})


X = np.random.default_rng(1).normal(size=(2, 3, 9, 8)).astype(np.float32)


@pytest.mark.parametrize("pads", [[0, 0, 0, 0, 0, 0, 1, 1], [0, 0, 2, 1, 0, 0, 0, 3]])
@pytest.mark.parametrize("value", [0.0, None])
def test_zeros_move_into_the_convolution(pads, value) -> None:
    model = model_of(pads, value=value)
    before = run(model, X)
    assert pad_in_convolutions(model) == 1
    assert "Pad" not in {node.op_type for node in model.graph.node}
    for found, expected in zip(run(model, X), before, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "given",
    [
        {"pads": [0, 0, 1, 1, 0, 0, 1, 1], "mode": "reflect", "value": None},
        {"pads": [0, 0, 1, 1, 0, 0, 1, 1], "value": 2.0},
        {"pads": [0, 0, 0, -1, 0, 0, 1, 1]},
        {"pads": [1, 0, 0, 0, 0, 0, 1, 1]},
        {"pads": [0, 0, 1, 1, 0, 0, 1, 1], "twice": True},
    ],
)
def test_any_other_padding_stays(given) -> None:
    model = model_of(**given)
    before = copy.deepcopy(model)
    assert pad_in_convolutions(model) == 0
    assert model == before


def test_branches_are_searched_too() -> None:
    inner = model_of([0, 0, 0, 0, 0, 0, 1, 1]).graph
    del inner.input[:]
    branch = helper.make_node("If", ["which"], ["z"], then_branch=inner, else_branch=inner)
    shape = ["n", 3, "h", "w"]
    graph = helper.make_graph(
        [branch], "outer",
        [helper.make_tensor_value_info("which", TensorProto.BOOL, []),
         helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    assert pad_in_convolutions(model) == 2
