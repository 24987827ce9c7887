"""Tensors on disk: safetensors files with a JSON header and a checksum over every byte."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from solodg.storage.checksum import PLACEHOLDER, damaged, is_sealed, sealed
from solodg.storage.files import read_regular, write_atomically
from solodg.storage.json_files import CHECKSUM, parse_json

# One entry of the metadata holds both: safetensors writes several in an order that changes.
_ENTRY, _OLD_ENTRY = "solodg", "header"


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]
) -> None:
    """Writes a safetensors file with a JSON header and a checksum, atomically."""
    ready = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    entry = json.dumps({"header": header, CHECKSUM: PLACEHOLDER}, allow_nan=False)
    write_atomically(path, sealed(save(ready, metadata={_ENTRY: entry})))


def read_tensors(
    path: Path, *, checksum_required: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Reads a safetensors file: its tensors and its JSON header.

    Raises `UserError` if the file has changed since it was written. A file without a checksum is
    accepted, as written by earlier versions, unless `checksum_required`.
    """
    content, name = read_regular(path), str(path)
    has_checksum = is_sealed(content, name)
    metadata = _metadata(content, name)
    if has_checksum:
        entry = parse_json(metadata.get(_ENTRY, ""), name)
        header = entry.get("header") if isinstance(entry, dict) else None
    elif checksum_required or set(metadata) != {_OLD_ENTRY}:
        raise damaged(name, "it has no checksum")
    else:
        header = parse_json(metadata[_OLD_ENTRY], name)
    if not isinstance(header, dict):
        raise damaged(name, "its header is not an object")
    try:
        tensors: dict[str, torch.Tensor] = load(content)
    except Exception as error:  # safetensors raises its own, undocumented types
        raise damaged(name, f"its tensors cannot be read ({error})") from error
    return {name: tensors[name] for name in sorted(tensors)}, header


def _metadata(content: bytes, name: str) -> dict[str, str]:
    """Returns the texts that a safetensors file holds beside its tensors."""
    size = int.from_bytes(content[:8], "little")
    if not 0 < size <= len(content) - 8:
        raise damaged(name, "it is no safetensors file, or was cut off")
    described = parse_json(content[8 : 8 + size], name)
    found = described.get("__metadata__", {}) if isinstance(described, dict) else {}
    return {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}
