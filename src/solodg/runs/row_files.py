"""Files of rows of numbers, one row for each image of a domain.

A file is written once, by another name first, and ends with its checksum. It is read through a
memory map. A damaged file counts as missing.
"""

import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from solodg.data.images import Images
from solodg.data.labelled_images import LabelledImages

Rows = NDArray[Any]  # (images, width), float32 or float16

_HASH_BYTES = 16


class RowFiles:
    """Reads and writes files of rows, and remembers which of them are intact."""

    def __init__(self) -> None:
        self._intact: set[Path] = set()  # files whose checksum was verified

    def is_intact(self, path: Path) -> bool:
        """Returns whether a file exists and is as it was written."""
        if path not in self._intact and path.is_file() and _has_checksum(path):
            self._intact.add(path)
        return path in self._intact

    def read(self, path: Path) -> Rows:
        """Returns the rows of a file as a memory map."""
        rows: Rows = np.load(path, mmap_mode="r")
        return rows

    def write(self, path: Path, shape: tuple[int, int], kind: str, batches: Iterable[Rows]) -> None:
        """Writes rows of numbers of a kind ("<f4" or "<f2"), batch after batch."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.stem}.{os.getpid()}.npy")
        header = {"descr": kind, "fortran_order": False, "shape": shape}
        start = io.BytesIO()
        np.lib.format.write_array_header_1_0(start, header)
        try:
            # Not written through a memory map: there a full disk would end the process.
            with temporary.open("wb") as file:
                checksum = hashlib.blake2b(start.getvalue(), digest_size=_HASH_BYTES)
                file.write(start.getvalue())
                for batch in batches:
                    content = batch.astype(kind, copy=False).tobytes()
                    checksum.update(content)
                    file.write(content)
                file.write(checksum.digest())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _has_checksum(path: Path) -> bool:
    """Returns whether a file ends with the checksum of all that comes before."""
    found = hashlib.blake2b(digest_size=_HASH_BYTES)
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - _HASH_BYTES
        while left > 0 and (chunk := file.read(min(left, 2**20))):
            found.update(chunk)
            left -= len(chunk)
        return left == 0 and file.read() == found.digest()


class Member(NamedTuple):
    """One image of a domain."""

    position: int  # among the images of all parts, one part after another
    images: Images  # of its part
    row: int  # among the images of its part
    key: str


class Domain(NamedTuple):
    """All images of a domain, whatever their split."""

    name: str
    members: list[Member]  # in the order of their keys, which does not depend on the split


def by_domain(parts: Sequence[LabelledImages]) -> list[Domain]:
    """Groups all images of the parts by domain."""
    members: dict[int, list[Member]] = {}
    position = 0
    for part in parts:
        for index, key in enumerate(part.images.keys()):
            member = Member(position, part.images, index, key)
            members.setdefault(int(part.domains[index]), []).append(member)
            position += 1
    names = parts[0].domain_names
    return [
        Domain(names[number], sorted(members[number], key=lambda member: member.key))
        for number in sorted(members)
    ]


def take_pixels(chunk: list[Member]) -> list[Tensor]:
    """Reads pixels in the order of the chunk; neighbours of one part are read together."""
    groups: list[tuple[Images, list[int]]] = []
    for _, images, index, _ in chunk:
        if groups and groups[-1][0] is images:
            groups[-1][1].append(index)
        else:
            groups.append((images, [index]))
    return [images.take(indices) for images, indices in groups]
