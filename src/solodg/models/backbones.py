"""Backbones: images in [0, 1] -> Features(embedding, style).

The embedding is the pooled last feature map; it is classified. The style is the concatenated
channel means of every stage (the paper's multi-level features); it describes an image's domain. A
backbone normalises its images itself, so that a saved model holds its preprocessing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from solodg.errors import UserError
from solodg.models.allocator import images_at_once
from solodg.models.extractor import Extractor, ReadRows, is_recording, recorded, rows_of
from solodg.models.image_norm import (
    drawn_readings,
    freeze_statistics,
    image_norms,
    let_norms_overwrite,
    normalise_by_image,
)
from solodg.models.networks import build_network
from solodg.models.passes import (
    divisible,
    every_reading,
    features,
    in_reading,
    mean_features,
    mean_reading,
    probed,
)
from solodg.models.pose import PoseNetwork, turned_upright
from solodg.models.stages import Network, Stages, modules_of_maps
from solodg.models.views import VIEWS
from solodg.models.weights import load_weights
from solodg.readings import ImageNorm, Reading, readings_of
from solodg.seeding import torch_generator
from solodg.types import Features


class Backbone(Extractor):
    """Computes features of images (B, C, H, W) by a network, after normalising the images.

    `mean` and `std` normalise each channel. `readings` are the ways in which it reads an image
    (readings.py). With `pose` the rotation of images is undone first (pose.py), in training that of
    a random share `upright` of them.
    """

    channels: int

    def __init__(
        self,
        net: Network,
        *,
        channels: int,
        image_size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        readings: tuple[Reading, ...] = (Reading(),),
        pose: bool = False,
    ) -> None:
        super().__init__()
        self.net = net
        self.pose = PoseNetwork(channels).requires_grad_(False) if pose else None
        self.upright = 1.0
        self.readings = readings
        self.channels, self.image_size = channels, image_size
        self._shape = (1, channels, image_size, image_size)
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("std", torch.tensor(std)[:, None, None])
        self.mean: Tensor
        self.std: Tensor
        self.frozen = self.frozen_norm = False
        # Convolutions are a third faster with channels last, on CPUs and GPUs.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.embedding_dim, self.style_dim = self._probe()

    def forward(self, x: Tensor) -> Features:
        """Returns embedding (B, D) and style (B, S) of images, averaged over the readings.

        In training each image goes through one random reading.
        """
        with self._random_readings(x) as drawn:
            if drawn is not None:
                stages: Stages = self.net(self.prepared(x, drawn))
                return Features(stages.embedding, stages.style())
        return recorded(mean_features(*self._every_reading(x, styled=True)))

    def embed(self, x: Tensor) -> Tensor:
        """Returns the embedding (B, D) of images without computing their style."""
        if is_recording():
            return self(x).embedding  # type: ignore[no-any-return]
        with self._random_readings(x) as drawn:
            if drawn is not None:
                return self.net.embed(self.prepared(x, drawn))
        return mean_reading(self._every_reading(x, styled=False)[0])

    def embed_with_maps(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns the embedding and the map of every stage, of a backbone with one reading."""
        stages = self.net(self.prepared(x, None))
        return stages.embedding, stages.maps

    def embed_each(self, x: Tensor) -> Tensor:
        """Returns the embedding of each reading (R, B, D); in training too, all of them."""
        each = self._every_reading(x, styled=is_recording())
        if is_recording():
            recorded(mean_features(*each))
        return each[0]

    def each_reading(self, x: Tensor) -> list[ReadRows]:
        """Returns a function for each reading: it computes (and records, the first) some images."""
        upright = self.turned_upright(x)
        return [partial(self._one_reading, upright, place) for place in range(len(self.readings))]

    def _one_reading(self, x: Tensor, place: int, rows: Tensor | None) -> Tensor:
        """Returns the embedding of upright images in the reading at a place; records the first."""
        styled, x = is_recording() and not place, rows_of(x, rows)
        view = VIEWS[self.readings[place].view]
        prepared = (self.normalised(view(piece)) for piece in self._pieces(x))
        embedding, *style = in_reading(self.net, prepared, place, styled=styled)
        return recorded(Features(embedding, style[0])).embedding if styled else embedding

    def _every_reading(self, x: Tensor, *, styled: bool) -> list[Tensor]:
        """Returns the embedding (R, B, D), and if wanted the style (R, B, S), of every reading.

        All readings of a few images are one batch. A larger one is divided (models/passes.py).
        """
        count = len(self.readings)
        if count * len(x) <= self._rows_at_once(x) or not divisible(self.net):
            found = features(self.net, self.prepared(x, None), styled=styled)
            return [rows.reshape(count, -1, rows.shape[1]) for rows in found]
        pieces = map(self._views, self._pieces(self.turned_upright(x)))
        views = [reading.view for reading in self.readings]
        return every_reading(self.net, pieces, views, styled=styled)

    def _pieces(self, x: Tensor) -> Sequence[Tensor]:
        """Returns images in pieces that go through the network at once, at inference."""
        return x.split(self._rows_at_once(x)) if divisible(self.net) else (x,)

    def _rows_at_once(self, x: Tensor) -> int:
        """Returns how many images go through the network at once."""
        largest = self._largest_map if x.is_cpu else 0
        return images_at_once(self.channels * self.image_size**2, largest)

    @contextmanager
    def _random_readings(self, x: Tensor) -> Iterator[Tensor | None]:
        """Draws a reading for each image in training; yields the number of each, or None."""
        if len(self.readings) == 1 or not self.training:
            yield None
            return
        drawn = torch.randint(len(self.readings), (len(x),), device=x.device)
        with drawn_readings(self.net, drawn):
            yield drawn

    def prepared(self, x: Tensor, drawn: Tensor | None) -> Tensor:
        """Returns upright, normalised images: each once as drawn, or all once per reading."""
        names, views = [r.view for r in self.readings], self._views(self.turned_upright(x))
        if len(views) > 1 and drawn is not None:
            each = torch.stack([views[name] for name in names])  # (readings, B, C, H, W)
            return each[drawn, torch.arange(len(x), device=x.device)]
        if len(names) == 1 or drawn is not None:
            return views[names[0]]
        rows = torch.cat([views[name] for name in names])
        return rows.contiguous(memory_format=torch.channels_last)

    def _views(self, x: Tensor) -> dict[str, Tensor]:
        """Returns upright images, normalised, in the view of each reading."""
        names = dict.fromkeys(reading.view for reading in self.readings)
        return {name: self.normalised(VIEWS[name](x)) for name in names}

    def turned_upright(self, x: Tensor) -> Tensor:
        """Returns images with their rotation undone, in training a random share of them."""
        if self.pose is None or not self.upright:
            return x
        return turned_upright(self.pose, x, self.upright if self.training else 1.0)

    @contextmanager
    def reading_as(self, readings: Sequence[Reading], *, upright: bool = False) -> Iterator[None]:
        """Inside, the backbone has these readings, and without `upright` no pose."""
        before, share = self.readings, self.upright
        self.readings, self.upright = tuple(readings), float(upright)
        self._tell_norms()
        try:
            yield
        finally:
            self.readings, self.upright = before, share
            self._tell_norms()

    def _tell_norms(self) -> None:
        """Gives every ImageBatchNorm the source pixels of the readings."""
        for norm in image_norms(self.net):
            norm.source_pixels = tuple(reading.source_pixels for reading in self.readings)

    def last_map(self, x: Tensor) -> Tensor:
        """Returns the last feature map (B, C, H, W), or the embedding where there is no map.

        With several readings: in training the map of a random reading; otherwise the maps of all,
        one reading after the other (readings * B, C, H, W).
        """
        with self._random_readings(x) as drawn:
            return self.net.last_map(self.prepared(x, drawn))

    def pool(self, last: Tensor) -> Tensor:
        """Returns the embedding (B, D) of a last map."""
        return self.net.pool(last)

    def stage_modules(self) -> list[nn.Module]:
        """Returns the modules whose outputs are the feature maps of the stages.

        Returns an empty list where a stage gives tokens, or maps in another layout.
        """
        return modules_of_maps(self.net, lambda: self.blank().maps)

    def normalised(self, x: Tensor) -> Tensor:
        """Returns images with each channel normalised, channels last."""
        return ((x - self.mean) / self.std).contiguous(memory_format=torch.channels_last)

    def freeze(self) -> None:
        """Turns off gradients and keeps the backbone in evaluation mode, even in training."""
        self.frozen = True
        self.requires_grad_(False).eval()

    def train_last(self, stages: int) -> None:
        """Turns off the gradients of all parameters but those of the last `stages` stages."""
        groups = self.net.stages()
        if stages > len(groups):
            raise UserError(f"--train-stages {stages}: this backbone has {len(groups)} stages.")
        for parameter in chain(*groups[: len(groups) - stages]):
            parameter.requires_grad_(False)

    def freeze_norm(self) -> None:
        """Keeps the statistics of every BatchNorm: small batches of several domains spoil them."""
        self.frozen_norm = True
        self.train(self.training)

    def train(self, mode: bool = True) -> "Backbone":
        """Sets training mode, except for the pose and what `freeze` and `freeze_norm` keep."""
        super().train(mode and not self.frozen)
        if self.pose is not None:
            self.pose.eval()
        if self.frozen_norm:
            freeze_statistics(self)
        return self

    def _probe(self) -> tuple[int, int]:
        """Returns embedding and style dimensions, found on a blank image."""
        stages, largest = probed(self.net, self.blank, self.image_size)
        self._largest_map = largest // len(self.readings)
        let_norms_overwrite(
            self.net, torch.rand(self._shape, generator=torch_generator(0, "probe"))
        )
        return stages.embedding.shape[1], stages.style().shape[1]

    @torch.no_grad()
    def blank(self) -> Stages:
        """Returns the stages of a blank image, computed in evaluation mode."""
        x, training = torch.zeros(self._shape, device=self.mean.device), self.training
        self.eval()
        stages: Stages = self.net(self.prepared(x, None))
        self.train(training)
        return stages


def build_backbone(
    name: str,
    *,
    channels: int = 3,
    image_size: int = 224,
    pretrained: bool = False,
    weights: str | Path | None = None,
    image_norm: ImageNorm = None,
    pose: bool = False,
) -> Backbone:
    """Builds a backbone by name: any timm model, `alexnet`, or `small_cnn`.

    `pretrained` downloads the weights published under the name; `weights` reads them from a
    safetensors file in the model's own naming (a classifier in it is ignored). `image_norm` mixes
    the image's own statistics into every BatchNorm, in one reading or several (readings.py).
    `pose` undoes the rotation of each image first (pose.py); its network has random weights.
    """
    net = build_network(name, channels, image_size, pretrained)
    if weights is not None:
        load_weights(net, name, Path(weights), channels)
    readings = readings_of(image_norm)
    if any(reading.source_pixels for reading in readings):
        normalise_by_image(net, [reading.source_pixels for reading in readings])
    # Published statistics are for RGB; digits and other grey images get the plain [-1, 1] range.
    config = getattr(getattr(net, "model", None), "default_cfg", {})
    rgb = channels == 3 and name != "small_cnn"
    mean = tuple(config.get("mean", (0.485, 0.456, 0.406))) if rgb else (0.5,) * channels
    std = tuple(config.get("std", (0.229, 0.224, 0.225))) if rgb else (0.5,) * channels
    return Backbone(
        net, channels=channels, image_size=image_size, mean=mean, std=std,
        readings=readings or (Reading(),), pose=pose,
    )  # fmt: skip
