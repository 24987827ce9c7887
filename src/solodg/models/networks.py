"""Networks by name, each showing its stages: timm's, AlexNet, and a small one for digits."""

import threading
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from solodg.errors import UserError, unknown_name
from solodg.torchvision_shim import make_torchvision_importable

make_torchvision_importable()

import timm  # noqa: E402  (needs the guard above)
import torchvision  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from timm.models import adapt_input_conv, group_parameters  # noqa: E402

_CLASSIFIERS = ("classifier.6", "fc", "head", "classifier")  # what a file may hold too much


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


def build_network(name: str, channels: int, image_size: int, pretrained: bool) -> Network:
    """By name; `pretrained` with the weights published under it."""
    if name == "small_cnn":
        return SmallCNN(channels)
    if name == "alexnet":
        return AlexNetStages(channels, pretrained)
    return _timm_stages(name, channels, image_size, pretrained)


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
        raise unknown_name("backbone", name, backbone_names(), "Any timm model name works.")
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


def load_weights(net: nn.Module, name: str, path: Path, channels: int) -> None:
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
