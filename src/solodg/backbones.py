"""Backbones: images in [0, 1] -> Features(embedding, style).

`embedding` is the pooled last feature map, what is classified. `style` is the channel means of
every stage, concatenated: what an image says about its own domain (the paper's multi-level
features). Normalisation is part of the backbone, so whoever holds the model holds its
preprocessing.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from solodg.errors import UserError, unknown
from solodg.image_norm import (
    ImageNorm,
    drawn_readings,
    image_norms,
    normalise_by_image,
    readings_of,
)
from solodg.torchvision_guard import make_torchvision_importable
from solodg.types import Features

make_torchvision_importable()

import timm  # noqa: E402  (needs the guard above)
import torchvision  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from timm.models import adapt_input_conv, group_parameters  # noqa: E402

_CLASSIFIERS = ("classifier.6", "fc", "head", "classifier")  # what a file may hold too much
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


class Stages(NamedTuple):
    """What a network gives: the map of each stage and the pooled embedding."""

    maps: list[Tensor]  # (B, C_i, H_i, W_i), or (B, N_i, C_i) tokens
    embedding: Tensor  # (B, D)


class Network(nn.Module):
    """What shows its stages, and the map that is pooled to the embedding."""

    def forward(self, x: Tensor) -> Stages:
        raise NotImplementedError

    def last_map(self, x: Tensor) -> Tensor:
        """(B, C, H, W), what `pool` takes; the embedding (B, D) where there is no such map."""
        raise NotImplementedError

    def pool(self, last: Tensor) -> Tensor:
        """The embedding of a last map."""
        raise NotImplementedError

    def embed(self, x: Tensor) -> Tensor:
        return self.pool(self.last_map(x))

    def stage_modules(self) -> list[nn.Module]:
        """What gives the map of each stage."""
        raise NotImplementedError

    def stages(self) -> list[list[nn.Parameter]]:
        """Parameters from the first layers to the last."""
        layers = [module for module in self.modules() if not list(module.children())]
        groups = [list(layer.parameters()) for layer in layers]
        return [group for group in groups if group]


class Backbone(nn.Module):
    """A network and its normalisation; `forward` is images -> Features."""

    def __init__(
        self,
        net: Network,
        *,
        channels: int,
        image_size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        readings: tuple[float, ...] = (0.0,),
    ) -> None:
        super().__init__()
        self.net = net
        self.readings = readings  # ways to normalise an image: see image_norm.py
        self.channels, self.image_size = channels, image_size
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("std", torch.tensor(std)[:, None, None])
        self.mean: Tensor
        self.std: Tensor
        self.frozen = False
        self.frozen_norm = False
        # Pixels of one place lie together: convolutions are a third faster so, on CPUs and GPUs.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.embedding_dim, self.style_dim = self._probe()

    def forward(self, x: Tensor) -> Features:
        with self._read_at_random(x) as drawn:
            stages = self.net(self._prepared(x))
        style = torch.cat([_channel_means(m) for m in stages.maps], 1)
        if drawn:
            return Features(stages.embedding, style)
        return Features(self._mean_reading(stages.embedding), self._mean_reading(style))

    def embed(self, x: Tensor) -> Tensor:
        """The embedding alone, for those who have no use for the style."""
        with self._read_at_random(x) as drawn:
            embedding: Tensor = self.net.embed(self._prepared(x))
        return embedding if drawn else self._mean_reading(embedding)

    @contextmanager
    def _read_at_random(self, x: Tensor) -> Iterator[bool]:
        """In training each image is read in one way; False: in all of them."""
        if len(self.readings) == 1 or not self.training:
            yield False
            return
        drawn = torch.randint(len(self.readings), (len(x),), device=x.device)
        with drawn_readings(self.net, drawn):
            yield True

    def _prepared(self, x: Tensor) -> Tensor:
        """Normalised, and unless readings are drawn once for each reading."""
        x = self._normalise(x)
        if len(self.readings) == 1 or self.training:
            return x
        return x.repeat(len(self.readings), 1, 1, 1).contiguous(memory_format=torch.channels_last)

    def _mean_reading(self, found: Tensor) -> Tensor:
        """(readings x B, D) -> (B, D)"""
        if len(self.readings) == 1:
            return found
        return found.reshape(len(self.readings), -1, found.shape[1]).mean(0)

    @contextmanager
    def reading(self, source_pixels: float) -> Iterator[None]:
        """Inside, images are read in this way alone."""
        before, norms = self.readings, image_norms(self.net)
        self.readings = (source_pixels,)
        for norm in norms:
            norm.readings = self.readings
        try:
            yield
        finally:
            self.readings = before
            for norm in norms:
                norm.readings = before

    def last_map(self, x: Tensor) -> Tensor:
        """(B, C, H, W), what `pool` takes; the embedding (B, D) where there is no such map.

        Of several readings in training one at random; otherwise the maps of all, one reading
        after the other.
        """
        with self._read_at_random(x):
            last: Tensor = self.net.last_map(self._prepared(x))
        return last

    def pool(self, last: Tensor) -> Tensor:
        """The embedding of a last map."""
        embedding: Tensor = self.net.pool(last)
        return embedding

    def stage_modules(self) -> list[nn.Module]:
        """The modules whose outputs are the maps of the stages; none where they give no maps."""
        modules = self.net.stage_modules()
        given: list[torch.Size | None] = []

        def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
            given.append(getattr(output, "shape", None))

        hooks = [module.register_forward_hook(note) for module in modules]
        maps = self._blank().maps
        for hook in hooks:
            hook.remove()
        # Tokens, and maps with their channels last, are shown to others in another shape.
        return modules if given == [m.shape for m in maps] and maps[0].ndim == 4 else []

    def _normalise(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.std).contiguous(memory_format=torch.channels_last)

    def freeze(self) -> None:
        """No gradients, and evaluation mode whatever the algorithm around it does."""
        self.frozen = True
        self.requires_grad_(False)
        self.eval()

    def train_last(self, stages: int) -> None:
        """Fix all but the last stages; nothing is computed backwards through what is fixed."""
        groups = self.net.stages()
        if stages > len(groups):
            raise UserError(f"--train-stages {stages}: this backbone has {len(groups)} stages.")
        for group in groups[: len(groups) - stages]:
            for parameter in group:
                parameter.requires_grad_(False)

    def freeze_norm(self) -> None:
        """Keep the statistics of every BatchNorm: small batches of several domains spoil them."""
        self.frozen_norm = True
        self.train(self.training)

    def train(self, mode: bool = True) -> "Backbone":
        super().train(mode and not self.frozen)
        if self.frozen_norm:
            for module in self.modules():
                if isinstance(module, _BATCH_NORMS):
                    module.eval()
        return self

    def _probe(self) -> tuple[int, int]:
        """Embedding and style dimensions, as the network shows them for one image."""
        try:
            stages = self._blank()
        except (RuntimeError, AssertionError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"this backbone cannot take images of {self.image_size} pixels ({reason}). "
                "Try a larger --image-size, e.g. 224."
            ) from error
        style = sum(_channel_means(stage).shape[1] for stage in stages.maps)
        return stages.embedding.shape[1], style

    @torch.no_grad()
    def _blank(self) -> Stages:
        """The stages of an empty image, in evaluation mode."""
        training = self.training
        self.eval()
        shape = (1, self.channels, self.image_size, self.image_size)
        stages: Stages = self.net(self._prepared(torch.zeros(shape, device=self.mean.device)))
        self.train(training)
        return stages


class ReadyFeatures(nn.Module):
    """For features computed beforehand, reading by reading: (B, readings (D + S)) -> Features."""

    def __init__(self, embedding_dim: int, style_dim: int, readings: int = 1) -> None:
        super().__init__()
        self.embedding_dim, self.style_dim, self.readings = embedding_dim, style_dim, readings

    def forward(self, x: Tensor) -> Features:
        embedding, style = self._read(x).split([self.embedding_dim, self.style_dim], dim=1)
        return Features(embedding, style)

    def embed(self, x: Tensor) -> Tensor:
        return self._read(x)[:, : self.embedding_dim]

    def _read(self, x: Tensor) -> Tensor:
        """As a backbone does: in training one reading at random, else the mean of all."""
        if self.readings == 1:
            return x
        each = x.view(len(x), self.readings, -1)  # (B, readings, D + S)
        if not self.training:
            return each.mean(1)
        rows = torch.arange(len(x), device=x.device)
        return each[rows, torch.randint(self.readings, (len(x),), device=x.device)]

    def last_map(self, x: Tensor) -> Tensor:
        """There is none any more: the embedding."""
        return self.embed(x)

    def pool(self, last: Tensor) -> Tensor:
        return last


def build_backbone(
    name: str,
    *,
    channels: int = 3,
    image_size: int = 224,
    pretrained: bool = False,
    weights: str | Path | None = None,
    image_norm: ImageNorm = None,
) -> Backbone:
    """A backbone by name: any timm model, `alexnet`, or `small_cnn`.

    `pretrained` fetches the weights published under the name; `weights` reads them from a
    safetensors file in the model's own naming (a classifier in it is ignored). `image_norm` mixes
    an image's own statistics into every BatchNorm, in one way or several: see `image_norm.py`.
    """
    if name == "small_cnn":
        net: Network = SmallCNN(channels)
    elif name == "alexnet":
        net = AlexNetStages(channels, pretrained)
    else:
        net = _timm_stages(name, channels, image_size, pretrained)
    if weights is not None:
        _load_weights(net, name, Path(weights), channels)
    readings = readings_of(image_norm)
    if readings:
        normalise_by_image(net, readings)
    # Published statistics are for RGB; digits and other grey images get the plain [-1, 1] range.
    config = getattr(getattr(net, "model", None), "default_cfg", {})
    rgb = channels == 3 and name != "small_cnn"
    mean = tuple(config.get("mean", (0.485, 0.456, 0.406))) if rgb else (0.5,) * channels
    std = tuple(config.get("std", (0.229, 0.224, 0.225))) if rgb else (0.5,) * channels
    return Backbone(
        net,
        channels=channels,
        image_size=image_size,
        mean=mean,
        std=std,
        readings=readings or (0.0,),
    )


@cache
def has_batch_norm(name: str) -> bool:
    """Of a backbone by name; of a name that there is not, that it may."""
    if name == "alexnet":
        return False
    if name == "small_cnn" or not timm.is_model(name):
        return True
    with torch.device("meta"):  # the structure alone
        model = timm.create_model(name, num_classes=0)
    return any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def backbone_names() -> list[str]:
    return ["small_cnn", "alexnet", *timm.list_models()]


class SmallCNN(Network):
    """Four strided convolutions with BatchNorm, for quick work on 28-32 pixels."""

    layers = ((32, 5, 2), (64, 3, 2), (128, 3, 2), (128, 3, 1))  # width, kernel, stride

    def __init__(self, channels: int) -> None:
        super().__init__()
        blocks = []
        for width, kernel, stride in self.layers:
            convolution = nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False)
            blocks.append(nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU()))
            channels = width
        self.blocks = nn.ModuleList(blocks)

    def stages(self) -> list[list[nn.Parameter]]:
        return [list(block.parameters()) for block in self.blocks]

    def forward(self, x: Tensor) -> Stages:
        maps = []
        for block in self.blocks:
            x = block(x)
            maps.append(x)
        return Stages(maps, self.pool(x))

    def last_map(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def pool(self, last: Tensor) -> Tensor:
        return last.mean((2, 3))

    def stage_modules(self) -> list[nn.Module]:
        return list(self.blocks)


class AlexNetStages(Network):
    """torchvision's AlexNet; a stage is a convolution with its ReLU."""

    def __init__(self, channels: int, pretrained: bool) -> None:
        super().__init__()
        self.model = torchvision.models.alexnet(weights="DEFAULT" if pretrained else None)
        self.model.classifier[-1] = nn.Identity()
        for layer in self.model.features:
            if isinstance(layer, nn.ReLU):
                layer.inplace = False  # the map is read again for the style
        if channels != 3:
            first = self.model.features[0]
            self.model.features[0] = nn.Conv2d(channels, 64, 11, stride=4, padding=2)
            with torch.no_grad():
                self.model.features[0].weight.copy_(adapt_input_conv(channels, first.weight))
                self.model.features[0].bias.copy_(first.bias)

    def forward(self, x: Tensor) -> Stages:
        maps = []
        for layer in self.model.features:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                maps.append(x)
        return Stages(maps, self.pool(x))

    def last_map(self, x: Tensor) -> Tensor:
        last: Tensor = self.model.features(x)
        return last

    def pool(self, last: Tensor) -> Tensor:
        embedding: Tensor = self.model.classifier(self.model.avgpool(last).flatten(1))
        return embedding

    def stage_modules(self) -> list[nn.Module]:
        return [layer for layer in self.model.features if isinstance(layer, nn.ReLU)]


class TimmNetwork(Network):
    """A timm model, its stages as timm groups them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def stages(self) -> list[list[nn.Parameter]]:
        named = dict(self.model.named_parameters())
        found = group_parameters(self.model, self.model.group_matcher(coarse=True))
        groups: list[list[nn.Parameter]] = []
        for key in sorted(found):
            group = [named[name] for name in found[key]]
            if groups and all(parameter.ndim < 2 for parameter in group):
                groups[-1] += group  # a last norm is no stage of its own
            else:
                groups.append(group)
        return groups

    def last_map(self, x: Tensor) -> Tensor:
        last: Tensor = self.model.forward_features(x)
        is_map = last.ndim == 4 and last.shape[1] == self.model.num_features
        return last if is_map else self._head(last)

    def pool(self, last: Tensor) -> Tensor:
        return self._head(last) if last.ndim == 4 else last

    def stage_modules(self) -> list[nn.Module]:
        named = getattr(self.model, "feature_info", ())
        return [self.model.get_submodule(stage["module"]) for stage in named]

    def _head(self, last: Tensor) -> Tensor:
        embedding: Tensor = self.model.forward_head(last, pre_logits=True)
        return embedding


class TimmStages(TimmNetwork):
    """One that hands out its intermediate maps itself."""

    def forward(self, x: Tensor) -> Stages:
        last, maps = self.model.forward_intermediates(x)
        return Stages(maps, self._head(last))


class HookedTimmStages(TimmNetwork):
    """One that only names its stages: their outputs are taken as they pass."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._maps: dict[int, list[Tensor]] = {}  # by thread: several may predict at once
        for module in self.stage_modules():
            module.register_forward_hook(self._keep)

    def _keep(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        self._maps.setdefault(threading.get_ident(), []).append(output)

    def forward(self, x: Tensor) -> Stages:
        last = self.model.forward_features(x)
        return Stages(self._maps.pop(threading.get_ident()), self._head(last))

    def last_map(self, x: Tensor) -> Tensor:
        last = super().last_map(x)
        del self._maps[threading.get_ident()]
        return last


def _timm_stages(name: str, channels: int, image_size: int, pretrained: bool) -> Network:
    if not timm.is_model(name):
        raise unknown("backbone", name, backbone_names(), "Any timm model name works.")
    arguments: dict[str, Any] = {"num_classes": 0, "in_chans": channels, "pretrained": pretrained}
    try:
        model = _create(name, arguments, image_size)
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise
        reason = str(error).splitlines()[0]
        raise UserError(
            f"cannot fetch the published weights of {name!r} ({reason}). "
            "Give a file with --weights FILE, or train from random weights without --pretrained."
        ) from error
    if hasattr(model, "forward_intermediates"):
        return TimmStages(model)
    if getattr(model, "feature_info", None) and hasattr(model, "forward_head"):
        return HookedTimmStages(model)
    raise UserError(f"backbone {name!r} does not name its stages; try one of the same family.")


def _create(name: str, arguments: dict[str, Any], image_size: int) -> Any:
    """Transformers are made for one image size and take it; convolutional models do not."""
    try:
        return timm.create_model(name, img_size=image_size, **arguments)
    except TypeError:
        return timm.create_model(name, **arguments)


def _load_weights(net: nn.Module, name: str, path: Path, channels: int) -> None:
    if not path.is_file():
        raise UserError(f"no weights file at {path}.")
    try:
        state = load_file(path)
    except Exception as error:  # safetensors raises its own, undocumented types
        raise UserError(f"{path} is not a readable safetensors file ({error}).") from error
    model = cast(nn.Module, getattr(net, "model", net))
    own = model.state_dict()
    for key in set(state) & set(own):
        if channels != 3 and _is_colour_convolution(state[key], own[key]):
            state[key] = adapt_input_conv(channels, state[key])
    heads = getattr(model, "default_cfg", {}).get("classifier") or _CLASSIFIERS
    heads = (heads,) if isinstance(heads, str) else tuple(heads)
    foreign = [k for k in state if k not in own and not k.startswith(heads)]
    fitting = {k: v for k, v in state.items() if k in own and v.shape == own[k].shape}
    # BatchNorm's counter of batches is not a weight, and many published files leave it out.
    missing = [k for k in own if k not in fitting and not k.endswith("num_batches_tracked")]
    if missing or foreign:
        raise UserError(
            f"{path} does not fit backbone {name!r}: {len(missing)} of {len(own)} tensors are "
            f"missing or of another shape, {len(foreign)} are not of this model, "
            f"e.g. {(missing + foreign)[0]!r}. Is it for another model?"
        )
    model.load_state_dict(fitting, strict=False)


def _is_colour_convolution(given: Tensor, own: Tensor) -> bool:
    """The same convolution but for its input channels, which are three."""
    return (
        given.ndim == own.ndim == 4
        and given.shape[1] == 3
        and given.shape[0] == own.shape[0]
        and given.shape[2:] == own.shape[2:]
    )


def _channel_means(stage: Tensor) -> Tensor:
    """(B, C, H, W) maps or (B, N, C) tokens -> (B, C)."""
    if stage.ndim == 4:  # as tokens, so that the gradient too comes with channels last
        stage = stage.permute(0, 2, 3, 1).flatten(1, 2)
    return stage.mean(1)
