"""Features of a frozen backbone: computed once, stored on disk, read through a memory map.

A file is named for the backbone's weights and for the images of one domain, whatever their split,
so that runs with other targets, seeds and algorithms find it again. Its checksum follows the
features. A damaged file is computed again.
"""

import hashlib
import io
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from solodg.data.images import Images, Indices, digest
from solodg.data.labelled_images import LabelledImages
from solodg.data.transforms import to_unit
from solodg.inference import inference_batch_size
from solodg.models.backbones import Backbone
from solodg.pixels import Window
from solodg.progress import Progress
from solodg.readings import PLAIN, Reading

FeatureArrays = tuple[NDArray[np.float32], ...]  # for each reading, (images, D + S)


class StoredFeatures:
    """Stored features in place of the images they were computed from (see `Images`).

    A backbone may read an image in several ways (readings.py); each reading has its own features.
    """

    def __init__(
        self,
        files: list[FeatureArrays],
        file: NDArray[np.int64],
        row: NDArray[np.int64],
        keys: list[str],
    ) -> None:
        self.files = files
        self._file, self._row, self._keys = file, row, keys  # where each image's features are

    def __len__(self) -> int:
        return len(self._row)

    def take(self, indices: Indices) -> Tensor:
        """Returns the features of some images, each with all readings: (N, readings * (D + S))."""
        chosen = np.asarray(indices, dtype=np.int64)
        file, row = self._file[chosen], self._row[chosen]
        width = self.files[0][0].shape[1]
        out = np.empty((len(chosen), len(self.files[0]), width), dtype=np.float32)
        for number in np.unique(file):
            in_file = file == number
            for place, features in enumerate(self.files[number]):
                out[in_file, place] = features[row[in_file]]
        return torch.from_numpy(out.reshape(len(chosen), -1))

    def subset(self, indices: Indices) -> "StoredFeatures":
        """Returns the features of some images; files that hold none of them are dropped."""
        chosen = np.asarray(indices, dtype=np.int64)
        used, renumbered = np.unique(self._file[chosen], return_inverse=True)
        files = [self.files[n] for n in used] or self.files[:1]
        keys = [self._keys[i] for i in chosen]
        return StoredFeatures(files, renumbered.astype(np.int64), self._row[chosen], keys)

    def keys(self) -> list[str]:
        """Returns the keys of the images that the features are of."""
        return self._keys


class FeatureStore:
    """Computes the features of a backbone once and stores them in `folder`."""

    def __init__(
        self,
        backbone: Backbone,
        name: str,
        folder: Path,
        device: torch.device,
        progress: Progress,
        *,
        window: Window | None = None,
    ) -> None:
        self.backbone, self.folder = backbone, folder
        self.device, self.progress = device, progress
        self._intact: set[Path] = set()  # files whose checksum was verified
        state = backbone.state_dict()
        content = b"".join(t.cpu().contiguous().numpy().tobytes() for t in state.values())
        kind = f"{name} {backbone.channels} {backbone.image_size}"
        if window:  # without one, names are those that earlier versions gave
            kind += f" window {window[0]} {window[1]}"
        # Features depend on the reading too, which is not among the weights.
        self.backbone_keys: dict[Reading, str] = {}
        for reading in backbone.readings:
            norm = f" image-norm {{{reading.source_pixels}}}" if reading.source_pixels else ""
            view = f" view {reading.view}" if reading.view != PLAIN else ""
            self.backbone_keys[reading] = digest(content + f"{kind}{norm}{view}".encode())

    def holds(self, parts: Sequence[LabelledImages]) -> bool:
        """Returns whether the features of all these images are stored."""
        paths = [path for domain in _domains(parts) for path in self._paths(domain).values()]
        return all(self._is_intact(path) for path in paths)

    def replace_images(self, parts: Sequence[LabelledImages]) -> list[LabelledImages]:
        """Returns parts of a dataset with features in place of pixels.

        Give all parts at once: the features of a domain, whatever its split, make one file.
        """
        count = sum(len(part) for part in parts)
        keys = [""] * count
        files: list[FeatureArrays] = []
        file = np.zeros(count, dtype=np.int64)
        row = np.zeros(count, dtype=np.int64)
        for domain in _domains(parts):
            for number, member in enumerate(domain.members):
                keys[member.position] = member.key
                file[member.position], row[member.position] = len(files), number
            files.append(self._arrays(domain))
        stored = StoredFeatures(files, file, row, keys)
        ends = np.cumsum([len(part) for part in parts])
        return [
            replace(part, images=stored.subset(np.arange(end - len(part), end)))
            for part, end in zip(parts, ends, strict=True)
        ]

    def _paths(self, domain: "_Domain") -> dict[Reading, Path]:
        """Returns the file of a domain's features for each reading."""
        images = digest("\n".join(member.key for member in domain.members).encode())
        return {
            reading: self.folder / f"{backbone_key}-{images}.npy"
            for reading, backbone_key in self.backbone_keys.items()
        }

    def _arrays(self, domain: "_Domain") -> FeatureArrays:
        arrays = []
        paths = self._paths(domain)
        for number, (reading, path) in enumerate(paths.items(), start=1):
            if not self._is_intact(path):
                which = f", reading {number} of {len(paths)}" if len(paths) > 1 else ""
                with self.backbone.reading_as([reading]):
                    self._compute(domain.members, f"Features of {domain.name}{which}", path)
            arrays.append(np.load(path, mmap_mode="r"))
        return tuple(arrays)

    def _is_intact(self, path: Path) -> bool:
        """Returns whether a file of features exists and is as it was written."""
        if path not in self._intact and path.is_file() and _has_checksum(path):
            self._intact.add(path)
        return path in self._intact

    @torch.no_grad()  # not inference mode: the backbone may be trained afterwards
    def _compute(self, members: list["_Member"], title: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.stem}.{os.getpid()}.npy")
        width = self.backbone.embedding_dim + self.backbone.style_dim
        header = {"descr": "<f4", "fortran_order": False, "shape": (len(members), width)}
        start = io.BytesIO()
        np.lib.format.write_array_header_1_0(start, header)
        backbone = self.backbone.to(self.device).eval()
        size = inference_batch_size(backbone.channels * backbone.image_size**2)
        try:
            # Not written through a memory map: there a full disk would end the process.
            with (
                temporary.open("wb") as file,
                self.progress.bar(title, len(members)) as advance,
            ):
                checksum = hashlib.blake2b(start.getvalue(), digest_size=_HASH_BYTES)
                file.write(start.getvalue())
                for first in range(0, len(members), size):
                    chunk = members[first : first + size]
                    pixels = torch.cat(_take(chunk)).to(self.device)
                    features = torch.cat(backbone(to_unit(pixels)), 1)
                    content = features.float().cpu().numpy().astype("<f4").tobytes()
                    checksum.update(content)
                    file.write(content)
                    advance(len(chunk))
                file.write(checksum.digest())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


_HASH_BYTES = 16


def _has_checksum(path: Path) -> bool:
    """Returns whether a file ends with the checksum of all that comes before."""
    found = hashlib.blake2b(digest_size=_HASH_BYTES)
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - _HASH_BYTES
        while left > 0 and (chunk := file.read(min(left, 2**20))):
            found.update(chunk)
            left -= len(chunk)
        return left == 0 and file.read() == found.digest()


class _Member(NamedTuple):
    """One image of a domain."""

    position: int  # among the images of all parts, one part after another
    images: Images  # of its part
    row: int  # among the images of its part
    key: str


class _Domain(NamedTuple):
    name: str
    members: list[_Member]  # in the order of their keys, which does not depend on the split


def _domains(parts: Sequence[LabelledImages]) -> list[_Domain]:
    """Groups all images of the parts by domain."""
    members: dict[int, list[_Member]] = {}
    position = 0
    for part in parts:
        for index, key in enumerate(part.images.keys()):
            member = _Member(position, part.images, index, key)
            members.setdefault(int(part.domains[index]), []).append(member)
            position += 1
    names = parts[0].domain_names
    return [
        _Domain(names[number], sorted(members[number], key=lambda member: member.key))
        for number in sorted(members)
    ]


def _take(chunk: list[_Member]) -> list[Tensor]:
    """Reads pixels in the order of the chunk; neighbours of one part are read together."""
    groups: list[tuple[Images, list[int]]] = []
    for _, images, index, _ in chunk:
        if groups and groups[-1][0] is images:
            groups[-1][1].append(index)
        else:
            groups.append((images, [index]))
    return [images.take(indices) for images, indices in groups]


def default_cache_dir() -> Path:
    """Returns the cache folder of the user: $SOLODG_CACHE, or the usual place."""
    root = os.environ.get("SOLODG_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "solodg"
