"""Image norm in an exported graph, against plain NumPy in double precision."""

import numpy as np
import pytest

from onnx import TensorProto, helper, numpy_helper
from solodg.predict.graph_parts import OPSET
from solodg.predict.image_norm_graph import mix_in_image_statistics
from solodg.predict.onnx import open_session

SOURCE_PIXELS = (900.0, 0.0, 40.0)
EPS = 1e-3


def convolved(x: np.ndarray, filters: np.ndarray, kind: str) -> np.ndarray:
    """A pointwise convolution (inputs, H, W), or one of three pixels for each channel alone."""
    if kind == "pointwise":
        return np.einsum("oi,ihw->ohw", filters[:, :, 0, 0], x)
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1)))
    height, width = x.shape[1:]
    return sum(
        filters[:, 0, i, j, None, None] * padded[:, i : i + height, j : j + width]
        for i in range(3)
        for j in range(3)
    )


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs", "size", "form"),
    [
        ("pointwise", 8, 48, 64, "Sqrt"),  # by the covariance of the inputs
        ("pointwise", 48, 8, 64, "BatchNormalization"),
        ("pointwise", 64, 96, 6, "BatchNormalization"),
        ("depthwise", 16, 16, 112, "BatchNormalization"),
    ],
)
def test_a_norm_mixes_statistics_where_most_pixels_are_equal(
    kind: str, inputs: int, outputs: int, size: int, form: str
) -> None:
    generator = np.random.default_rng(0)
    depthwise = kind == "depthwise"
    shape = (outputs, 1, 3, 3) if depthwise else (outputs, inputs, 1, 1)
    arrays = {
        "filters": generator.normal(size=shape),
        "weight": generator.uniform(0.5, 1.5, outputs),
        "bias": generator.normal(size=outputs),
        "mean": generator.normal(size=outputs),
        "var": generator.uniform(0.5, 1.5, outputs),
    }
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    more = {"group": inputs, "pads": [1] * 4} if depthwise else {}
    nodes = [
        helper.make_node("Conv", ["x", "filters"], ["y"], **more),
        helper.make_node(
            "BatchNormalization", ["y", "weight", "bias", "mean", "var"], ["z"], epsilon=EPS
        ),
    ]
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, count, size, size])]
        for name, count in (("x", inputs), ("z", outputs))
    ]
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    plain = helper.make_graph(nodes, "plain", *ends, weights)
    graph = mix_in_image_statistics(plain, [(size, size)], SOURCE_PIXELS, "number")
    assert form in {node.op_type for node in graph.node}
    graph.input.append(helper.make_tensor_value_info("number", TensorProto.INT64, []))
    opset = helper.make_opsetid("", OPSET)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=8)
    session = open_session(model.SerializeToString(), "the graph")

    x = np.full((inputs, size, size), 2.7, dtype=np.float32)  # as the white around a sketch
    x[:, 2:5, 1:6] = generator.normal(size=(inputs, 3, 5))
    wide = {name: array.astype(np.float64) for name, array in arrays.items()}
    y = convolved(x.astype(np.float64), wide["filters"], kind)
    for number, source_pixels in enumerate(SOURCE_PIXELS):
        share = size**2 / (size**2 + source_pixels) if source_pixels else 0.0
        mean = (1 - share) * wide["mean"] + share * y.mean((1, 2))
        var = (1 - share) * wide["var"] + share * y.var((1, 2))
        scale = (wide["weight"] / np.sqrt(var + EPS))[:, None, None]
        expected = (y - mean[:, None, None]) * scale + wide["bias"][:, None, None]
        (found,) = session.run(None, {"x": x[None], "number": np.array(number)})
        np.testing.assert_allclose(found[0], expected, rtol=1e-3, atol=1e-4)
