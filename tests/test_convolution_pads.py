"""Padding moved into exported convolutions: ONNX Runtime's result before is the oracle."""

import copy

import numpy as np
import onnxruntime
import pytest

import onnx
from onnx import TensorProto, helper, numpy_helper
from solodg.predict.convolution_pads import pad_in_convolutions


def model_of(
    pads: list[int],
    *,
    mode: str = "constant",
    value: float | None = 0.0,
    twice: bool = False,
    public: bool = False,
    automatic: str | None = None,
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
        helper.make_node("Conv", ["wide", "weight"], ["y"], strides=[2, 2],
                         **({"auto_pad": automatic} if automatic else {"pads": [1, 0, 0, 1]})),
    ]  # fmt: skip
    shape = ["n", 3, "h", "w"]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 4)]
    if public:
        outputs.append(helper.make_tensor_value_info("wide", TensorProto.FLOAT, [None] * 4))
    if twice:
        nodes.append(helper.make_node("Abs", ["wide"], ["other"]))
        outputs.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, [None] * 4))
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
@pytest.mark.parametrize("given", [{}, {"value": None}, {"automatic": "VALID"}])
def test_zeros_move_into_the_convolution(pads, given) -> None:
    model = model_of(pads, **given)
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
        {"pads": [0, 0, 1, 1, 0, 0, 1, 1], "public": True},
        {"pads": [0, 0, 1, 1, 0, 0, 1, 1], "automatic": "SAME_UPPER"},
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
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [None] * 4)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    assert pad_in_convolutions(model) == 2


def test_counts_that_depend_on_the_input_are_soon_given_up() -> None:
    model = model_of([0, 0, 0, 0, 0, 0, 1, 1])
    nodes = [helper.make_node("Shape", ["x"], ["s0"])]
    nodes += [helper.make_node("Add", [f"s{i}", f"s{i}"], [f"s{i + 1}"]) for i in range(2000)]
    nodes += [helper.make_node("Concat", ["s2000", "s2000"], ["counts"], axis=0)]
    pad = next(node for node in model.graph.node if node.op_type == "Pad")
    pad.input[1] = "counts"
    kept = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *kept])
    assert pad_in_convolutions(model) == 0


def test_what_a_branch_reads_stays() -> None:
    model = model_of([0, 0, 0, 0, 0, 0, 1, 1])
    inner = helper.make_graph(
        [helper.make_node("Abs", ["wide"], ["inner"])], "branch", [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, [None] * 4)],
    )  # fmt: skip
    branch = helper.make_node("If", ["which"], ["z"], then_branch=inner, else_branch=inner)
    model.graph.node.append(branch)
    assert pad_in_convolutions(model) == 0
