"""What every network returns: the feature maps of its stages, and an embedding."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn


class Stages(NamedTuple):
    """The feature map of each stage of a network, and the pooled embedding."""

    maps: list[Tensor]  # (B, C_i, H_i, W_i), or (B, N_i, C_i) tokens
    embedding: Tensor  # (B, D)

    def style(self) -> Tensor:
        """Returns the channel means of all maps, (B, S)."""
        return torch.cat([channel_means(stage) for stage in self.maps], 1)


class Network(nn.Module):
    """A network that returns the maps of its stages; `pool` makes the embedding of the last one."""

    maps_by_hooks: ClassVar[bool] = False  # hooks collect the maps, in place of `forward`

    def forward(self, x: Tensor) -> Stages:
        """Returns the map of each stage and the embedding of normalised images."""
        raise NotImplementedError

    def last_map(self, x: Tensor) -> Tensor:
        """Returns the last feature map (B, C, H, W), or the embedding (B, D) without a map."""
        raise NotImplementedError

    def pool(self, last: Tensor) -> Tensor:
        """Returns the embedding (B, D) of what `last_map` returned."""
        raise NotImplementedError

    def embed(self, x: Tensor) -> Tensor:
        """Returns the embedding (B, D) of normalised images."""
        return self.pool(self.last_map(x))

    def stage_modules(self) -> list[nn.Module]:
        """Returns the module that computes the map of each stage."""
        raise NotImplementedError

    def stages(self) -> list[list[nn.Parameter]]:
        """Returns the parameters in groups, from the first stage to the last."""
        layers = [module for module in self.modules() if not list(module.children())]
        groups = [list(layer.parameters()) for layer in layers]
        return [group for group in groups if group]


def channel_means(stage: Tensor) -> Tensor:
    """Averages maps (B, C, H, W) or tokens (B, N, C) over positions: (B, C)."""
    if stage.ndim == 4:  # as tokens, so that the gradient has channels last too
        stage = stage.permute(0, 2, 3, 1).flatten(1, 2)
    return stage.mean(1)


def modules_of_maps(net: Network, run: Callable[[], list[Tensor]]) -> list[nn.Module]:
    """Returns the stage modules of a network if their outputs are the maps (B, C, H, W) of stages.

    `run` runs the network and returns these maps. The list is empty where a stage gives tokens, or
    maps in another layout.
    """
    modules = net.stage_modules()
    shapes: list[torch.Size | None] = []

    def keep_shape(_module: nn.Module, _inputs: Any, output: Any) -> None:
        shapes.append(getattr(output, "shape", None))

    hooks = [module.register_forward_hook(keep_shape) for module in modules]
    maps = run()
    for hook in hooks:
        hook.remove()
    return modules if shapes == [m.shape for m in maps] and maps[0].ndim == 4 else []
