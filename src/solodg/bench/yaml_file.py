"""Reads a YAML file within limits: of its size, its depth, and of what its aliases repeat."""

from pathlib import Path
from typing import Any

import yaml

from solodg.errors import UserError
from solodg.storage import read_text

_MAX_BYTES = 2**20
_MAX_NODES = 200_000  # values, those that aliases repeat counted each time


def read_yaml(path: Path) -> Any:
    """Reads a YAML file; raises `UserError` for what is no YAML, or beyond the limits."""
    text = read_text(path, _MAX_BYTES)
    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None
            _count(root, {})
            return loader.construct_document(root)
        finally:
            loader.dispose()
    except RecursionError as error:
        raise UserError(f"{path} is nested too deeply.") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # e.g. a date that does not exist
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Returns the number of values below a node, itself included; raises ValueError if too many.

    `known` has the numbers found so far, so that what aliases repeat is counted and not visited.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in known:
        if not known[id(node)]:
            raise ValueError("an alias refers to the value that it is part of")
        return known[id(node)]
    known[id(node)] = 0  # under way
    pairs = [entry if isinstance(entry, tuple) else (entry,) for entry in node.value]
    total = 1 + sum(_count(part, known) for pair in pairs for part in pair)
    if total > _MAX_NODES:
        raise ValueError(f"its aliases make more than {_MAX_NODES:,} values of it")
    known[id(node)] = total
    return total
