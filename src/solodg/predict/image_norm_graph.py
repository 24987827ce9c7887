"""Image norm in an exported graph of one image: few nodes, few sweeps over maps, small rounding.

The network is exported with a plain BatchNormalization for each norm. `mix_in_image_statistics`
replaces their source statistics by the mixture of models/image_norm.py, for the reading that the
graph is given by its number. With a the share of the image, there are two forms:

    sweeps       y = conv(x) - source mean;  statistics of y;  BatchNormalization of y by a mean(y)
                 and (1 - a) source variance + a var(y)
    covariance   of a convolution W of one pixel with few inputs, var(W x) = diag(W cov(x) W^T): the
                 norm becomes part of its weights, and no sweep over its output is left

ONNX Runtime adds numbers up one after the other, which spoils sums over many equal pixels. So means
of large maps are those of rows and then of columns, and variances are those of what lies near zero.
"""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

Floats = NDArray[np.float32]
# The covariance form pays while its products take less time than the sweeps that it saves.
_PRODUCTS_PER_NUMBER = 20  # of products, in the time that sweeps need for one number of a map
_FEW_PIXELS = 32 * 32  # whose sum needs no second step
_LARGE_MAP = 28 * 28  # pixels from which on another layout of the map costs more than it gains


class _Norm(NamedTuple):
    """A BatchNormalization and what it normalises."""

    node: "NodeProto"
    conv: "NodeProto | None"  # that computes its input, and that of no other node
    height: int
    width: int
    eps: float
    weight: Floats  # (C,), as all others
    bias: Floats
    mean: Floats
    var: Floats

    @property
    def pixels(self) -> int:
        return self.height * self.width


def mix_in_image_statistics(
    graph: "GraphProto",
    sizes: Sequence[tuple[int, int]],
    source_pixels: Sequence[float],
    number: str,
) -> "GraphProto":
    """Returns the graph of one image with an image norm in place of each BatchNormalization.

    `sizes` are height and width of the map of each, in the order of the nodes, `source_pixels`
    those of each reading; `number` is the name of the input with the number of the reading.
    """
    return _Rewriter(graph, sizes, source_pixels, number).rewritten()


class _Rewriter:
    def __init__(
        self,
        graph: "GraphProto",
        sizes: Sequence[tuple[int, int]],
        source_pixels: Sequence[float],
        number: str,
    ) -> None:
        from onnx import numpy_helper

        self.graph, self.number = graph, number
        self.arrays = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
        self.nodes: list[NodeProto] = []
        self.made: dict[str, NDArray[Any]] = {}
        self.source_pixels = np.array(source_pixels, dtype=np.float64)
        self.norms = self._norms(sizes)

    def rewritten(self) -> "GraphProto":
        by_output = {norm.node.output[0]: norm for norm in self.norms}
        convs = {norm.conv.output[0] for norm in self.norms if norm.conv is not None}
        shares, sources = self._mixtures()
        for node in list(self.graph.node):
            if node.output[0] in convs:
                continue  # computed where its norm is
            norm = by_output.get(node.output[0])
            if norm is None:
                self.nodes.append(node)
                continue
            share, rest = shares[norm.pixels]
            source = sources[norm.node.output[0]]
            if norm.conv is not None and self._by_covariance(norm):
                self._write_covariance(norm, share, rest, source)
            else:
                self._write_sweeps(norm, share, source)
        return self._finished()

    def _norms(self, sizes: Sequence[tuple[int, int]]) -> list[_Norm]:
        users: dict[str, int] = {}
        for name in [name for node in self.graph.node for name in node.input]:
            users[name] = users.get(name, 0) + 1
        for output in self.graph.output:
            users[output.name] = users.get(output.name, 0) + 1
        makers = {node.output[0]: node for node in self.graph.node}
        nodes = [node for node in self.graph.node if node.op_type == "BatchNormalization"]
        norms = []
        for node, (height, width) in zip(nodes, sizes, strict=True):
            maker = makers.get(node.input[0])
            known = (
                maker is not None
                and maker.op_type == "Conv"
                and all(name in self.arrays for name in maker.input[1:])
                and users[maker.output[0]] == 1
            )
            weight, bias, mean, var = (self.arrays[name] for name in node.input[1:])
            eps = _attribute(node, "epsilon", 1e-5)
            conv = maker if known else None
            norms.append(_Norm(node, conv, height, width, eps, weight, bias, mean, var))
        return norms

    def _mixtures(self) -> tuple[dict[int, tuple[str, str]], dict[str, str]]:
        """Writes what depends on the reading: shares a and 1 - a by the pixels of a map, and the
        part of the sources in each variance, eps included.
        """
        pixels = sorted({norm.pixels for norm in self.norms})
        shares = {each: self._share(each) for each in pixels}  # (R,)
        pairs = [np.stack([shares[each], 1 - shares[each]], 1) for each in pixels]  # (R, 2)
        names = self._split(np.concatenate(pairs, 1), [1] * (2 * len(pixels)), "share")
        sources = [
            (1 - shares[norm.pixels])[:, None] * norm.var + norm.eps for norm in self.norms
        ]  # (R, C)
        counts = [part.shape[1] for part in sources]
        parts = self._split(np.concatenate(sources, 1), counts, "source")
        each = {size: (names[2 * i], names[2 * i + 1]) for i, size in enumerate(pixels)}
        keys = [norm.node.output[0] for norm in self.norms]
        return each, dict(zip(keys, parts, strict=True))

    def _share(self, pixels: int) -> NDArray[np.float64]:
        """Returns the share of the image in each reading (R,)."""
        known = self.source_pixels > 0
        return np.where(known, pixels / (pixels + np.where(known, self.source_pixels, 1)), 0.0)

    def _split(self, table: NDArray[Any], counts: list[int], name: str) -> list[str]:
        """Writes the row of a table (R, N) for the reading, in parts; returns their names."""
        row = self._node("Gather", self._array(f"{name}_table", table), self.number, axis=0)
        if len(counts) == 1:
            return [row]
        outputs = [f"{name}_{place}" for place in range(len(counts))]
        sizes = self._array(f"{name}_sizes", np.array(counts))
        self._add("Split", [row, sizes], outputs, axis=0)
        return outputs

    def _by_covariance(self, norm: _Norm) -> bool:
        """Returns whether the covariance form is possible and pays."""
        if not self._is_pointwise(norm):
            return False
        filters, inputs = self._filters(norm).shape[:2]
        products = inputs**2 * (norm.pixels + filters)
        return bool(products < _PRODUCTS_PER_NUMBER * filters * norm.pixels)

    def _is_pointwise(self, norm: _Norm) -> bool:
        conv = norm.conv
        assert conv is not None
        return (
            self._filters(norm).shape[2:] == (1, 1)
            and _attribute(conv, "group", 1) == 1
            and set(_attribute(conv, "strides", [1])) == {1}
            and set(_attribute(conv, "pads", [0])) == {0}
        )

    def _filters(self, norm: _Norm) -> Floats:
        assert norm.conv is not None
        return self.arrays[norm.conv.input[1]]

    def _centred_bias(self, norm: _Norm) -> Floats:
        """Returns the bias (C,) of a convolution without the source mean of its output."""
        assert norm.conv is not None
        bias = self.arrays[norm.conv.input[2]] if len(norm.conv.input) > 2 else 0.0
        centred: Floats = np.asarray(bias - norm.mean, dtype=np.float32)
        return centred

    def _write_covariance(self, norm: _Norm, share: str, rest: str, source: str) -> None:
        assert norm.conv is not None
        name, x = norm.node.output[0], norm.conv.input[0]
        filters = self._filters(norm)[:, :, 0, 0]  # (C, inputs)
        count, inputs = filters.shape
        weight = self._array(f"{name}_filters", filters)
        mean = self._mean(x, norm.pixels, keep=True)  # (1, inputs, 1, 1)
        centred = self._node("Sub", x, mean)
        rows = self._reshape(centred, (inputs, norm.pixels))
        covariance = self._node("Gemm", rows, rows, transB=1, alpha=1 / norm.pixels)
        products = self._node("Mul", self._node("MatMul", weight, covariance), weight)
        own = self._node("ReduceSum", products, self._ints(1), keepdims=1)  # (C, 1)
        column = self._reshape(source, (count, 1))
        var = self._node("Add", self._node("Mul", own, share), column)
        scale = self._node(
            "Div", self._column(f"{name}_scale", norm.weight), self._node("Sqrt", var)
        )
        # The mean of the output, less that of the sources; the convolution is given centred maps.
        bias = self._column(f"{name}_bias", self._centred_bias(norm))
        shifted = self._node("Gemm", weight, self._reshape(mean, (inputs, 1)), bias)
        shift = self._node("Mul", self._node("Mul", shifted, rest), scale)
        shift = self._node("Add", shift, self._column(f"{name}_shift", norm.bias))
        scaled = self._reshape(self._node("Mul", weight, scale), (count, inputs, 1, 1))
        self._add("Conv", [centred, scaled, self._reshape(shift, (count,))], [name])

    def _write_sweeps(self, norm: _Norm, share: str, source: str) -> None:
        name, channels = norm.node.output[0], len(norm.mean)
        y = self._centred(norm)
        map_ = self._reshape(y, (channels, norm.height, norm.width))
        mean = self._mean(map_, norm.pixels, keep=False)  # (C,)
        square = self._mean(self._node("Mul", map_, map_), norm.pixels, keep=False)
        own = self._node("Sub", square, self._node("Mul", mean, mean))
        own = self._node("Relu", own)  # not below 0 by rounding
        var = self._node("Add", self._node("Mul", own, share), source)
        inputs = [y, *norm.node.input[1:3], self._node("Mul", mean, share), var]
        self._add("BatchNormalization", inputs, [name], epsilon=0.0)

    def _centred(self, norm: _Norm) -> str:
        """Writes the input of a norm without the source mean; returns its name."""
        name = norm.node.output[0]
        if norm.conv is None:
            mean = self._array(f"{name}_mean", norm.mean[:, None, None])
            return self._node("Sub", norm.node.input[0], mean)
        bias, filters = self._centred_bias(norm), self._filters(norm)
        if norm.pixels >= _LARGE_MAP and self._is_pointwise(norm):
            count, inputs = filters.shape[:2]
            rows = self._reshape(norm.conv.input[0], (inputs, norm.pixels))
            weight = self._array(f"{name}_filters", filters[:, :, 0, 0])
            found = self._node("Gemm", weight, rows, self._column(f"{name}_bias", bias))
            return self._reshape(found, (1, count, norm.height, norm.width))
        added = self._array(f"{name}_bias", bias)
        conv = copy.deepcopy(norm.conv)
        del conv.input[2:]
        conv.input.append(added)
        self.nodes.append(conv)
        return str(conv.output[0])

    def _mean(self, x: str, pixels: int, *, keep: bool) -> str:
        """Writes the mean over the last two axes; returns its name."""
        if pixels <= _FEW_PIXELS:
            return self._node("ReduceMean", x, self._ints(-2, -1), keepdims=int(keep))
        rows = self._node("ReduceMean", x, self._ints(-1), keepdims=int(keep))
        return self._node("ReduceMean", rows, self._ints(-2 if keep else -1), keepdims=int(keep))

    def _reshape(self, x: str, shape: tuple[int, ...]) -> str:
        return self._node("Reshape", x, self._ints(*shape))

    def _ints(self, *values: int) -> str:
        text = "_".join(map(str, values)).replace("-", "m")
        return self._array(f"ints_{text}", np.array(values, dtype=np.int64))

    def _column(self, name: str, values: Floats) -> str:
        return self._array(name, values[:, None])

    def _array(self, name: str, values: NDArray[Any]) -> str:
        kind = np.int64 if values.dtype.kind == "i" else np.float32
        self.made[f"norm/{name}"] = np.ascontiguousarray(values, dtype=kind)
        return f"norm/{name}"

    def _node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Adds a node with one output; returns its name."""
        output = f"norm/{kind}_{len(self.nodes)}"
        self._add(kind, list(inputs), [output], **attributes)
        return output

    def _add(self, kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> None:
        from onnx import helper

        self.nodes.append(helper.make_node(kind, inputs, outputs, outputs[0], **attributes))

    def _finished(self) -> "GraphProto":
        """Returns the graph of the nodes, with the arrays that they use."""
        from onnx import helper, numpy_helper

        used = {name for node in self.nodes for name in node.input}
        kept = [tensor for tensor in self.graph.initializer if tensor.name in used]
        kept += [numpy_helper.from_array(array, name) for name, array in self.made.items()]
        ends = self.graph.input, self.graph.output
        return helper.make_graph(self.nodes, self.graph.name, *ends, kept)


def _attribute(node: "NodeProto", name: str, default: Any) -> Any:
    from onnx import helper

    for attribute in node.attribute:
        if attribute.name == name:
            return helper.get_attribute_value(attribute)
    return default
