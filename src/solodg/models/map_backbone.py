"""Computes features from stored maps: the last stages of a backbone, without its first ones."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from solodg.models.cut import Cut
from solodg.models.extractor import Extractor, is_recording, recorded
from solodg.models.image_norm import drawn_readings, freeze_statistics, image_norms
from solodg.models.stages import Stages, channel_means
from solodg.readings import Reading
from solodg.types import Features


class MapBackbone(Extractor):
    """Computes features of stored rows by the tail of a network (models/cut.py).

    An input row holds a block for each reading of the backbone, or one block alone in training. A
    block is the number of its reading, the early style (E) and the map with channels last:
    (B, readings * (1 + E + H * W * C)). Its modules are those of the backbone, so that training it
    trains the backbone.
    """

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        backbone = cut.backbone
        self.net = cut.tail
        self.readings = backbone.readings
        self.embedding_dim, self.style_dim = backbone.embedding_dim, backbone.style_dim
        self.shape, self.early_dim, self.late_stages = cut.shape, cut.early_dim, cut.late_stages
        self.row_width = 1 + cut.early_dim + math.prod(cut.shape)  # of each reading
        self.frozen_norm = backbone.frozen_norm
        self._used = list(range(len(self.readings)))  # their places in a row
        self.train(backbone.training)

    def forward(self, x: Tensor) -> Features:
        """Returns embedding (B, D) and style (B, S) of rows, averaged over the readings.

        In training each row goes through one reading: that of its block, or a random one.
        """
        with self._read(x, every=not self.training) as (early, maps):
            stages: Stages = self.net(maps)
        late = stages.maps[len(stages.maps) - self.late_stages :]
        style = torch.cat([early, *map(channel_means, late)], 1)
        return recorded(
            Features(self._mean_reading(stages.embedding, x), self._mean_reading(style, x))
        )

    def embed(self, x: Tensor) -> Tensor:
        """Returns the embedding (B, D) of rows without computing their style."""
        if is_recording():
            return self(x).embedding  # type: ignore[no-any-return]
        with self._read(x, every=not self.training) as (_, maps):
            embedding = self.net.embed(maps)
        return self._mean_reading(embedding, x)

    def embed_with_maps(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns the embedding and the maps of the stages after the cut, of one reading."""
        with self._read(x, every=not self.training) as (_, maps):
            stages: Stages = self.net(maps)
        return stages.embedding, stages.maps[len(stages.maps) - self.late_stages :]

    def embed_each(self, x: Tensor) -> Tensor:
        """Returns the embedding of each reading (R, B, D); in training too, all of them."""
        if is_recording():
            self(x)
        with self._read(x, every=True) as (_, maps):
            rows = self.net.embed(maps)
        return rows.view(-1, len(x), rows.shape[1])

    def last_map(self, x: Tensor) -> Tensor:
        """Returns the last feature map (B, C, H, W), or the embedding where there is no map.

        With several readings: in training the map of one reading; otherwise the maps of all, one
        reading after the other (readings * B, C, H, W).
        """
        with self._read(x, every=not self.training) as (_, maps):
            return self.net.last_map(maps)

    def pool(self, last: Tensor) -> Tensor:
        """Returns the embedding (B, D) of a last map."""
        return self.net.pool(last)

    @contextmanager
    def _read(self, x: Tensor, *, every: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields early style and maps: of every reading that is used, or of one for each row.

        Inside, every ImageBatchNorm knows the reading of each row.
        """
        height_first = (self.shape[1], self.shape[2], self.shape[0])
        width = self.row_width
        blocks = x.view(len(x), -1, width)  # (B, blocks, width)
        drawn: Tensor | None = None
        if every:
            rows = blocks[:, self._used].transpose(0, 1).flatten(0, 1)  # (used * B, width)
        elif len(self._used) == 1:
            rows = blocks[:, self._used[0]]
        elif blocks.shape[1] == 1:
            rows, drawn = blocks[:, 0], blocks[:, 0, 0].long()
        else:
            drawn = torch.randint(len(self._used), (len(x),), device=x.device)
            places = torch.tensor(self._used, device=x.device)[drawn]
            rows = blocks[torch.arange(len(x), device=x.device), places]
        _, early, maps = rows.split([1, self.early_dim, width - 1 - self.early_dim], dim=1)
        maps = maps.to(torch.float32).view(-1, *height_first).permute(0, 3, 1, 2)
        if drawn is None:
            yield early.to(torch.float32), maps
            return
        with drawn_readings(self.net, drawn):
            yield early.to(torch.float32), maps

    def _mean_reading(self, rows: Tensor, x: Tensor) -> Tensor:
        """Averages features over the readings: (readings * B, D) -> (B, D)."""
        return rows if len(rows) == len(x) else rows.view(-1, len(x), rows.shape[1]).mean(0)

    def use(self, readings: Sequence[Reading]) -> None:
        """From now on, only these of the stored readings are used."""
        self._used = [self.readings.index(reading) for reading in readings]
        for norm in image_norms(self.net):
            norm.source_pixels = tuple(reading.source_pixels for reading in readings)

    @contextmanager
    def reading_as(self, readings: Sequence[Reading], *, upright: bool = False) -> Iterator[None]:
        """Inside, only these of the stored readings are used."""
        before = [self.readings[place] for place in self._used]
        self.use(readings)
        try:
            yield
        finally:
            self.use(before)

    def freeze_norm(self) -> None:
        """Keeps the statistics of every BatchNorm, also in training."""
        self.frozen_norm = True
        self.train(self.training)

    def train(self, mode: bool = True) -> "MapBackbone":
        """Sets training mode, except for norms that `freeze_norm` keeps."""
        super().train(mode)
        if self.frozen_norm:
            freeze_statistics(self)
        return self

    def stage_modules(self) -> list[nn.Module]:
        """Returns an empty list: the first stages are not there."""
        return []
