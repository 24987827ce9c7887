"""Published networks: timm's models, and torchvision's AlexNet.

Importing this module imports all of timm, which takes a second or two.
"""

import threading
from typing import Any

import torch
from torch import Tensor, nn

from solodg.errors import UserError, unknown_name
from solodg.models.stages import Network, Stages
from solodg.torchvision_shim import make_torchvision_importable

make_torchvision_importable()

import timm  # noqa: E402  (needs the call above)
import torchvision  # noqa: E402
from timm.models import adapt_input_conv, group_parameters  # noqa: E402

from solodg.models.same_padding import pad_without_copies  # noqa: E402


def timm_has_batch_norm(name: str) -> bool:
    """Returns whether a timm model has BatchNorm2d layers; True for a name that does not exist."""
    if not timm.is_model(name):
        return True
    with torch.device("meta"):  # the structure without memory for weights
        model = timm.create_model(name, num_classes=0)
    return any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def backbone_names() -> list[str]:
    """Returns the names of all backbones that can be built."""
    return ["small_cnn", "alexnet", *timm.list_models()]


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
        """Returns the map after each ReLU of the convolutions, and the embedding."""
        maps = []
        for layer in self.model.features:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                maps.append(x)
        return Stages(maps, self.pool(x))

    def last_map(self, x: Tensor) -> Tensor:
        """Returns the map of the last convolution, max-pooled."""
        last: Tensor = self.model.features(x)
        return last

    def pool(self, last: Tensor) -> Tensor:
        """Returns the output of the last hidden layer."""
        embedding: Tensor = self.model.classifier(self.model.avgpool(last).flatten(1))
        return embedding

    def stage_modules(self) -> list[nn.Module]:
        """Returns the ReLU of each convolution."""
        return [layer for layer in self.model.features if isinstance(layer, nn.ReLU)]


class TimmNetwork(Network):
    """A timm model; its stages are those that timm defines."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def stages(self) -> list[list[nn.Parameter]]:
        """Returns the parameters in timm's coarse groups; a last norm belongs to the last one."""
        named = dict(self.model.named_parameters())
        found = group_parameters(self.model, self.model.group_matcher(coarse=True))
        groups: list[list[nn.Parameter]] = []
        for key in sorted(found):
            group = [named[name] for name in found[key]]
            if groups and all(parameter.ndim < 2 for parameter in group):
                groups[-1] += group
            else:
                groups.append(group)
        return groups

    def last_map(self, x: Tensor) -> Tensor:
        """Returns the last feature map; the embedding for tokens and other layouts."""
        last: Tensor = self.model.forward_features(x)
        is_map = last.ndim == 4 and last.shape[1] == self.model.num_features
        return last if is_map else self._head(last)

    def pool(self, last: Tensor) -> Tensor:
        """Returns the output of the model's head without its classifier."""
        return self._head(last) if last.ndim == 4 else last

    def stage_modules(self) -> list[nn.Module]:
        """Returns the modules that timm lists as feature stages."""
        named = getattr(self.model, "feature_info", ())
        return [self.model.get_submodule(stage["module"]) for stage in named]

    def _head(self, last: Tensor) -> Tensor:
        embedding: Tensor = self.model.forward_head(last, pre_logits=True)
        return embedding


class TimmStages(TimmNetwork):
    """A timm model that can return its intermediate maps itself."""

    def forward(self, x: Tensor) -> Stages:
        """Returns the intermediate maps and the embedding."""
        last, maps = self.model.forward_intermediates(x)
        return Stages(maps, self._head(last))


class HookedTimmStages(TimmNetwork):
    """A timm model that only names its stages: hooks collect their outputs."""

    maps_by_hooks = True

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._maps: dict[int, list[Tensor]] = {}  # by thread: several threads may predict
        for module in self.stage_modules():
            module.register_forward_hook(self._keep)

    def _keep(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        self._maps.setdefault(threading.get_ident(), []).append(output)

    def forward(self, x: Tensor) -> Stages:
        """Returns the outputs of the stages and the embedding."""
        last = self.model.forward_features(x)
        return Stages(self._maps.pop(threading.get_ident()), self._head(last))

    def last_map(self, x: Tensor) -> Tensor:
        """Returns the last feature map; the embedding for tokens and other layouts."""
        last = super().last_map(x)
        del self._maps[threading.get_ident()]
        return last


def timm_stages(name: str, channels: int, image_size: int, pretrained: bool) -> Network:
    """Builds a timm model by name; `pretrained` downloads the weights published under the name."""
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
    pad_without_copies(model)
    if hasattr(model, "forward_intermediates"):
        return TimmStages(model)
    if getattr(model, "feature_info", None) and hasattr(model, "forward_head"):
        return HookedTimmStages(model)
    raise UserError(
        f"backbone {name!r} does not name its stages, from which the style is computed. "
        "Try another model, e.g. resnet18."
    )


def _create(name: str, arguments: dict[str, Any], image_size: int) -> Any:
    """Creates a timm model; transformers take the image size, convolutional models do not."""
    try:
        return timm.create_model(name, img_size=image_size, **arguments)
    except TypeError:
        return timm.create_model(name, **arguments)
