"""Features of a frozen backbone: computed once, stored on disk, read through a memory map.

A file is named for the backbone's weights and for the images of one domain, whatever their split,
so that runs with other targets, seeds and algorithms find it again. Its checksum follows the
features. A damaged file is computed again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from solodg.data.images import Indices, digest
from solodg.data.labelled_images import LabelledImages
from solodg.data.transforms import to_unit
from solodg.inference import inference_batch_size
from solodg.models.backbones import Backbone
from solodg.pixels import Window
from solodg.progress import Advance, NoProgress, Progress
from solodg.readings import PLAIN, Reading
from solodg.runs.row_files import Domain, Member, RowFiles, Rows, by_domain, take_pixels

Places = NDArray[np.int64]


class StoredFeatures:
    """Stored features in place of the images they were computed from (see `Images`).

    A backbone may read an image in several ways (readings.py); each reading has its own features.
    Those of image i in reading r are row `row[i]` of the array number `array[i, r]`.
    """

    def __init__(
        self,
        arrays: list[Rows],
        array: Places,
        row: Places,
        keys: list[str],
        readings: int | None = None,
    ) -> None:
        self.arrays = arrays
        self._array, self._row, self._keys = array, row, keys
        self.readings = readings or array.shape[1]

    def __len__(self) -> int:
        return len(self._row)

    def take(self, indices: Indices) -> Tensor:
        """Returns the features of some images, each with all readings: (N, readings * (D + S))."""
        chosen = np.asarray(indices, dtype=np.int64)
        rows = self._rows(chosen, self._array[chosen])
        return torch.from_numpy(rows.reshape(len(chosen), -1))

    def subset(self, indices: Indices) -> "StoredFeatures":
        """Returns the features of some images; arrays that hold none of them are dropped."""
        chosen = np.asarray(indices, dtype=np.int64)
        array = self._array[chosen]
        used, renumbered = np.unique(array, return_inverse=True)
        arrays = [self.arrays[number] for number in used] or self.arrays[:1]
        array = renumbered.reshape(array.shape).astype(np.int64)
        keys = [self._keys[i] for i in chosen]
        return type(self)(arrays, array, self._row[chosen], keys, self.readings)

    def keys(self) -> list[str]:
        """Returns the keys of the images that the features are of."""
        return self._keys

    def _rows(self, chosen: Places, array: Places) -> Rows:
        """Reads the rows of chosen images in some arrays (N, K): (N, K, width)."""
        kind, width = self.arrays[0].dtype, self.arrays[0].shape[1]
        out = np.empty((*array.shape, width), dtype=kind)
        row = np.broadcast_to(self._row[chosen][:, None], array.shape)
        for number in np.unique(array):
            here = array == number
            out[here] = self.arrays[number][row[here]]
        return out


class Way(NamedTuple):
    """One way in which every image is stored: a reading, of the image or of an augmented copy."""

    reading: Reading
    copy: int = 0  # 0: the image itself


class FeatureStore:
    """Computes the features of a backbone once and stores them in `folder`."""

    title, number_kind = "Features", "<f4"
    stored_as: type[StoredFeatures] = StoredFeatures

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
        self.files = RowFiles()
        content = b"".join(t.cpu().contiguous().numpy().tobytes() for t in self._weights())
        kind = f"{name} {backbone.channels} {backbone.image_size}"
        if window:  # without one, names are those that earlier versions gave
            kind += f" window {window[0]} {window[1]}"
        # What is stored depends on the reading too, which is not among the weights.
        self.way_keys = {way: digest(content + f"{kind}{self._text(way)}".encode())
                         for way in self._ways()}  # fmt: skip

    def holds(self, parts: Sequence[LabelledImages]) -> bool:
        """Returns whether the features of all these images are stored."""
        return not self.missing(parts)

    def missing(self, parts: Sequence[LabelledImages]) -> dict[Path, int]:
        """Returns the files of these images that are not stored yet, each with its rows."""
        return {
            path: len(domain.members)
            for domain in by_domain(parts)
            for path in self._paths(domain).values()
            if not self.files.is_intact(path)
        }

    def compute(self, part: LabelledImages) -> int:
        """Computes the rows of these images in every way and stores none; returns their number.

        It is for measuring how long that takes.
        """
        rows = 0
        with NoProgress().bar("", len(part)) as advance:
            for way in self.way_keys:
                with self.backbone.reading_as([way.reading]):
                    for domain in by_domain([part]):
                        batches = self._batches(domain.members, way, advance)
                        rows += sum(len(batch) for batch in batches)
        return rows

    def replace_images(self, parts: Sequence[LabelledImages]) -> list[LabelledImages]:
        """Returns parts of a dataset with features in place of pixels.

        Give all parts at once: the features of a domain, whatever its split, make one file.
        """
        count, ways = sum(len(part) for part in parts), len(self.way_keys)
        keys = [""] * count
        arrays: list[Rows] = []
        array = np.zeros((count, ways), dtype=np.int64)
        row = np.zeros(count, dtype=np.int64)
        domains = by_domain(parts)
        self._prepare([(path, len(d.members)) for d in domains for path in self._paths(d).values()])
        for domain in domains:
            for number, member in enumerate(domain.members):
                keys[member.position], row[member.position] = member.key, number
                array[member.position] = np.arange(len(arrays), len(arrays) + ways)
            arrays += self._arrays(domain)
        stored = self.stored_as(arrays, array, row, keys, len(self.backbone.readings))
        ends = np.cumsum([len(part) for part in parts])
        return [
            replace(part, images=stored.subset(np.arange(end - len(part), end)))
            for part, end in zip(parts, ends, strict=True)
        ]

    def _ways(self) -> list[Way]:
        """Returns the ways in which images are stored, in the order of their arrays."""
        return [Way(reading) for reading in self.backbone.readings]

    def _weights(self) -> Iterable[Tensor]:
        """Returns the tensors on which the stored rows depend."""
        return self.backbone.state_dict().values()

    def _text(self, way: Way) -> str:
        """Returns what names a way in the key of its files."""
        reading = way.reading
        norm = f" image-norm {{{reading.source_pixels}}}" if reading.source_pixels else ""
        return norm + (f" view {reading.view}" if reading.view != PLAIN else "")

    def _prepare(self, wanted: list[tuple[Path, int]]) -> None:
        """Called before rows are computed, with the files and how many images each is of."""

    @property
    def _width(self) -> int:
        return self.backbone.embedding_dim + self.backbone.style_dim

    def _compute(self, pixels: Tensor, members: list[Member], way: Way) -> Tensor:
        """Returns the rows (B, width) of some images, in the reading that the backbone has."""
        return torch.cat(self.backbone(to_unit(pixels)), 1)

    def _paths(self, domain: Domain) -> dict[Way, Path]:
        """Returns the file of a domain's rows for each way."""
        images = digest("\n".join(member.key for member in domain.members).encode())
        return {way: self.folder / f"{key}-{images}.npy" for way, key in self.way_keys.items()}

    def _arrays(self, domain: Domain) -> list[Rows]:
        paths = self._paths(domain)
        for number, (way, path) in enumerate(paths.items(), start=1):
            if not self.files.is_intact(path):
                which = f", {number} of {len(paths)}" if len(paths) > 1 else ""
                shape = (len(domain.members), self._width)
                with (
                    self.backbone.reading_as([way.reading]),
                    self.progress.bar(f"{self.title} of {domain.name}{which}", shape[0]) as advance,
                ):
                    batches = self._batches(domain.members, way, advance)
                    self.files.write(path, shape, self.number_kind, batches)
        return [self.files.read(path) for path in paths.values()]

    def _batches(self, members: list[Member], way: Way, advance: Advance) -> Iterator[Rows]:
        backbone = self.backbone.to(self.device).eval()
        size = inference_batch_size(backbone.channels * backbone.image_size**2)
        for first in range(0, len(members), size):
            chunk = members[first : first + size]
            pixels = torch.cat(take_pixels(chunk)).to(self.device)
            with torch.no_grad():  # not inference mode: the backbone may be trained afterwards
                rows = self._compute(pixels, chunk, way)
            yield rows.float().cpu().numpy()
            advance(len(chunk))
