"""Files in the IDX format, in which MNIST and Fashion-MNIST are published."""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from solodg.errors import UserError
from solodg.pixels import Pixels


def read_idx(folder: Path, name: str) -> Pixels:
    """Reads an IDX file of bytes, plain or gzipped."""
    path = folder / name
    try:
        if path.is_file():
            data = path.read_bytes()
        else:
            data = gzip.decompress((folder / f"{name}.gz").read_bytes())
        kind, dimensions = data[2], data[3]
        shape = struct.unpack(f">{dimensions}I", data[4 : 4 + 4 * dimensions])
        if data[:2] != b"\0\0" or kind != 8:
            raise ValueError("not an IDX file of bytes")
        return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()
    except (OSError, EOFError, IndexError, ValueError, struct.error, zlib.error) as error:
        raise UserError(f"cannot read {path}[.gz]: {error}") from error
