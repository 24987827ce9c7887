"""Extractors: modules that turn inputs into an embedding and a style, from pixels or features."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor, nn

from solodg.readings import Reading
from solodg.types import Features

ReadRows = Callable[[Tensor | None], Tensor]  # computes (B, D) for the given rows; None: for all
_recorded: ContextVar[list[Features] | None] = ContextVar("recorded", default=None)


@contextmanager
def recorded_features() -> Iterator[list[Features]]:
    """Inside, extractors append the features of every batch that they read to the yielded list.

    So the embedding and the style of an image are known after its prediction, without a second
    pass. It holds for the current thread alone.
    """
    found: list[Features] = []
    token = _recorded.set(found)
    try:
        yield found
    finally:
        _recorded.reset(token)


def is_recording() -> bool:
    """Returns whether extractors have to compute and record both parts of the features."""
    return _recorded.get() is not None


def recorded(features: Features) -> Features:
    """Records features, if wanted, and returns them."""
    found = _recorded.get()
    if found is not None:
        found.append(features)
    return features


def rows_of(x: Tensor, rows: Tensor | None) -> Tensor:
    """Returns the given rows of a batch; None: all."""
    return x if rows is None else x[rows]


class Extractor(nn.Module):
    """Turns a batch of inputs into `Features`; every algorithm is built on one.

    `Backbone` computes features from images. `ReadyFeatures` and `Standardised` take features that
    were computed beforehand. They have no feature maps, so the last map is the embedding itself.

    It is a base class and not a `Protocol`, since an algorithm registers its extractor as a module,
    and since the methods for feature maps are shared by all that have none.
    """

    embedding_dim: int  # D
    style_dim: int  # S
    channels: int | None = None  # of the images that it reads; None: stored features or maps

    def forward(self, x: Tensor) -> Features:
        """Returns embedding (B, D) and style (B, S) of a batch."""
        raise NotImplementedError

    def embed(self, x: Tensor) -> Tensor:
        """Returns the embedding (B, D) without computing the style."""
        raise NotImplementedError

    def embed_each(self, x: Tensor) -> Tensor:
        """Returns the embedding of each reading (R, B, D); in training too, all of them."""
        return self.embed(x)[None]

    def each_reading(self, x: Tensor) -> list[ReadRows]:
        """Returns a function for each reading: it computes the embedding of some rows of x.

        The rows are given by number; None: all.
        """
        return [partial(rows_of, each) for each in self.embed_each(x)]

    def embed_with_maps(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns the embedding and the maps of the stages that it computes, of one reading."""
        return self.embed(x), []

    def last_map(self, x: Tensor) -> Tensor:
        """Returns the last feature map (B, C, H, W), or the embedding where there is no map."""
        return self.embed(x)

    def pool(self, last: Tensor) -> Tensor:
        """Returns the embedding (B, D) of what `last_map` returned."""
        return last

    def stage_modules(self) -> list[nn.Module]:
        """Returns the modules whose outputs are the feature maps of the stages, if any."""
        return []

    @contextmanager
    def reading_as(self, readings: Sequence[Reading], *, upright: bool = False) -> Iterator[None]:
        """Inside, only these of its readings are used.

        `upright`: whether the rotation of images is undone, where it has a pose network.
        """
        yield


class ReadyFeatures(Extractor):
    """Reads features that a frozen backbone computed beforehand, once per reading.

    A reading is one way to read an image (readings.py). An input row holds the embedding
    and the style of every reading: (B, readings * (D + S)).
    """

    def __init__(
        self, embedding_dim: int, style_dim: int, readings: Sequence[Reading] = (Reading(),)
    ) -> None:
        super().__init__()
        self.embedding_dim, self.style_dim = embedding_dim, style_dim
        self.row_width = embedding_dim + style_dim  # of each reading
        self.readings = tuple(readings)
        self._used = list(range(len(self.readings)))  # their places in a row

    def forward(self, x: Tensor) -> Features:
        """Returns the stored embedding (B, D) and style (B, S) of each image."""
        embedding, style = self._read(x).split([self.embedding_dim, self.style_dim], dim=1)
        return recorded(Features(embedding, style))

    def embed(self, x: Tensor) -> Tensor:
        """Returns the stored embedding (B, D) of each image."""
        if is_recording():
            return self(x).embedding  # type: ignore[no-any-return]
        return self._read(x)[:, : self.embedding_dim]

    def embed_each(self, x: Tensor) -> Tensor:
        """Returns the stored embedding of each reading that is used (R, B, D)."""
        if is_recording():
            self(x)
        each = x.view(len(x), len(self.readings), -1)[:, self._used, : self.embedding_dim]
        return each.transpose(0, 1)

    def each_reading(self, x: Tensor) -> list[ReadRows]:
        """Returns a function for each reading that is used: it takes the embedding of some rows.

        The features of the first are recorded when it is called.
        """
        each = x.view(len(x), len(self.readings), -1)[:, self._used]  # (B, used, D + S)
        return [partial(self._one_reading, each, place) for place in range(len(self._used))]

    def _one_reading(self, each: Tensor, place: int, rows: Tensor | None) -> Tensor:
        """Returns the embedding of rows (B, used, D + S) in the reading at a place."""
        z = rows_of(each[:, place], rows)
        features = Features(z[:, : self.embedding_dim], z[:, self.embedding_dim :])
        return (features if place else recorded(features)).embedding

    def _read(self, x: Tensor) -> Tensor:
        """Returns a random reading of each image in training, else their mean: (B, D + S)."""
        if len(self.readings) == 1:
            return x
        each = x.view(len(x), len(self.readings), -1)[:, self._used]  # (B, used, D + S)
        if not self.training:
            return each.mean(1)
        rows = torch.arange(len(x), device=x.device)
        return each[rows, torch.randint(each.shape[1], (len(x),), device=x.device)]

    def use(self, readings: Sequence[Reading]) -> None:
        """From now on, only these of the stored readings are used."""
        self._used = [self.readings.index(reading) for reading in readings]

    @contextmanager
    def reading_as(self, readings: Sequence[Reading], *, upright: bool = False) -> Iterator[None]:
        """Inside, only these of the stored readings are used."""
        before = self._used
        self.use(readings)
        try:
            yield
        finally:
            self._used = before


class Standardised(Extractor):
    """Standardises given feature vectors and uses them as both embedding and style.

    Mean and scale of each feature come from the training features (N, D).
    """

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.embedding_dim = self.style_dim = features.shape[1]
        self.register_buffer("mean", features.mean(0))
        self.register_buffer("scale", features.std(0, correction=0).clamp_min(1e-6))
        self.mean: Tensor
        self.scale: Tensor

    def forward(self, x: Tensor) -> Features:
        """Returns the standardised vectors (B, D), as embedding and as style."""
        z = self.embed(x)
        return recorded(Features(z, z))

    def embed(self, x: Tensor) -> Tensor:
        """Returns the standardised vectors (B, D)."""
        return (x - self.mean) / self.scale
