"""Stored maps: what the frozen first stages of a backbone compute, of images and augmented copies.

With `--stored-views` training reads maps from disk in place of pixels, and computes the trained
stages alone (models/cut.py). Maps are kept in half precision. A copy is augmented by a generator of
its own number and its image, whatever the seed of the run, so that runs share the files.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from solodg.data.images import Indices
from solodg.data.transforms import AUGMENTATIONS, to_unit
from solodg.errors import UserError
from solodg.models.cut import Cut
from solodg.progress import Say
from solodg.runs.cache_folder import free_bytes, holding
from solodg.runs.feature_cache import FeatureStore, Places, StoredFeatures, Way
from solodg.runs.row_files import Member
from solodg.seeding import torch_generator

_LARGEST = float(np.finfo(np.float16).max)


class StoredMaps(StoredFeatures):
    """Stored maps in place of images: of each image in every reading, and of augmented copies.

    Arrays `array[i, :readings]` hold the readings of image i. Those behind them hold its copies;
    each copy is stored in one reading, which changes from copy to copy.
    """

    def take(self, indices: Indices) -> Tensor:
        """Returns the blocks of some images, without augmentation, each with all readings.

        A block is the number of its reading and a row: (N, readings * (1 + width)).
        """
        chosen = np.asarray(indices, dtype=np.int64)
        numbers = np.broadcast_to(np.arange(self.readings), (len(chosen), self.readings))
        return self._blocks(chosen, self._array[chosen, : self.readings], numbers)

    def draw(self, indices: Indices, generator: np.random.Generator) -> Tensor:
        """Returns one block of each image for training: (N, 1 + width).

        Its reading is drawn at random, then one of the image and its copies in that reading.
        Without copies it returns what `take` does: the model then draws the reading.
        """
        copies = self._array.shape[1] - self.readings
        if not copies:
            return self.take(indices)
        chosen = np.asarray(indices, dtype=np.int64)
        numbers = generator.integers(self.readings, size=len(chosen))
        # Columns number, number + readings, number + 2 * readings, ... are of this reading.
        alike = 1 + (copies - numbers + self.readings - 1) // self.readings
        columns = numbers + self.readings * generator.integers(alike)
        return self._blocks(chosen, self._array[chosen, columns][:, None], numbers[:, None])

    def _blocks(self, chosen: Places, array: Places, numbers: Places) -> Tensor:
        rows = self._rows(chosen, array)  # (N, blocks, width)
        blocks = np.concatenate([numbers[:, :, None].astype(rows.dtype), rows], 2)
        return torch.from_numpy(blocks.reshape(len(chosen), -1))


class MapStore(FeatureStore):
    """Computes the maps before a cut once, of images and `copies` of each, and stores them.

    `kind` of the data decides how copies are augmented. Raises `UserError` before anything is
    computed if the disk has no room for it, or if the folder would hold more than `disk_gb`.
    """

    title, number_kind = "Maps", "<f2"
    stored_as = StoredMaps

    def __init__(
        self,
        cut: Cut,
        *arguments: Any,
        copies: int = 0,
        kind: str = "photo",
        disk_gb: float = 20.0,
        say: Say = lambda text: None,
        **options: Any,
    ) -> None:
        self.cut, self.copies, self.augment = cut, copies, AUGMENTATIONS[kind]
        self.disk_gb, self.say = disk_gb, say
        super().__init__(cut.backbone, *arguments, **options)

    def _ways(self) -> list[Way]:
        readings = self.backbone.readings
        copies = [Way(readings[(n - 1) % len(readings)], n) for n in range(1, self.copies + 1)]
        return super()._ways() + copies

    def _weights(self) -> Iterable[Tensor]:
        return self.cut.early_state().values()

    def _text(self, way: Way) -> str:
        names = {id(module): name for name, module in self.backbone.net.named_modules()}
        text = f"{super()._text(way)} maps before {names[id(self.cut.first)]}"
        return text + (f" copy {way.copy} {self.augment}" if way.copy else "")

    @property
    def _width(self) -> int:
        return self.cut.early_dim + int(np.prod(self.cut.shape))

    def _compute(self, pixels: Tensor, members: list[Member], way: Way) -> Tensor:
        rows = self.cut.rows(self._augmented(pixels, members, way.copy))
        if not bool(rows.abs().amax() < _LARGEST):
            raise UserError(
                "a map of this backbone has values that half precision cannot hold (above "
                f"{_LARGEST:.0f}, or NaN). Leave --stored-views out."
            )
        return rows

    def _augmented(self, pixels: Tensor, members: list[Member], copy: int) -> Tensor:
        if not copy:
            return to_unit(pixels)
        # One by one: what an image becomes must not depend on the size of batches.
        each = [
            self.augment(image[None], torch_generator(0, "stored view", copy, member.key))
            for image, member in zip(pixels, members, strict=True)
        ]
        return torch.cat(each)

    def _prepare(self, wanted: list[tuple[Path, int]]) -> None:
        """Says how much disk is needed; raises `UserError` if it is too much."""
        missing = [count for path, count in wanted if not self.files.is_intact(path)]
        if not missing:
            return
        needed = sum(missing) * self._width * 2
        free, held = free_bytes(self.folder), holding(self.folder.parent, self.folder.name)
        text = f"{needed / 1e9:.2f} GB for stored maps"
        if needed > free:
            raise UserError(
                f"{text}, and {free / 1e9:.2f} GB are free in {self.folder}. Make space (`solodg "
                "cache` shows what is stored), or try fewer --stored-views, a smaller "
                "--image-size or another --cache-dir."
            )
        if held.num_bytes + needed > self.disk_gb * 1e9:
            raise UserError(
                f"{text}, beside {held.gigabytes:.2f} GB of other maps in {self.folder}: more than "
                f"the {self.disk_gb:g} GB of --map-disk-gb. Raise it, delete maps with `solodg "
                "cache --clear maps`, or try fewer --stored-views or a smaller --image-size."
            )
        self.say(f"{text} ({free / 1e9:.1f} GB are free in {self.folder}).")
