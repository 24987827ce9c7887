"""Finds references to other files in an ONNX model, before a runtime opens it.

A tensor of an ONNX file may name a file that holds its values. Such a model would read files of the
machine that runs it, and is not what was exported. The protobuf messages are walked here, because
the package `onnx` is not needed to predict.
"""

from collections.abc import Iterator

# For each message of onnx.proto: the fields that may hold tensors, and the kinds of their messages.
_NESTED: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14  # of a tensor; the location is 0 for the file itself
_MAX_DEPTH = 64
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


def has_external_data(content: bytes) -> bool:
    """Returns whether a tensor of the model lies in another file.

    Raises ValueError for what is not an ONNX model.
    """
    todo = [("model", memoryview(content), 0)]
    while todo:
        message, view, depth = todo.pop()
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        for number, value in _fields(view):
            if message == "tensor" and (
                number == _EXTERNAL_DATA or (number == _DATA_LOCATION and value != 0)
            ):
                return True
            inner = _NESTED[message].get(number)
            if inner is not None:
                if not isinstance(value, memoryview):
                    raise ValueError("a field of another type than expected")
                todo.append((inner, value, depth + 1))
    return False


def _fields(view: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yields the number of each field of a message, and its value where it may matter."""
    at = 0
    while at < len(view):
        key, at = _varint(view, at)
        number, kind = key >> 3, key & 7
        value: int | memoryview = 0
        if kind == _VARINT:
            value, at = _varint(view, at)
        elif kind == _BYTES:
            size, at = _varint(view, at)
            value = view[at : at + size]
            at += size
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError("not a protobuf message")
        if at > len(view):
            raise ValueError("cut off")
        yield number, value


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """Reads a number of up to ten bytes; returns it and the place behind it."""
    value = 0
    for count in range(10):
        if at + count >= len(view):
            raise ValueError("cut off")
        byte = view[at + count]
        value |= (byte & 127) << (7 * count)
        if byte < 128:
            return value, at + count + 1
    raise ValueError("not a protobuf message")
