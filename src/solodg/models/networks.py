"""Networks by name that return the feature maps of all their stages.

They are timm's models, torchvision's AlexNet, and a small network for digits.
"""

from functools import cache

from torch import Tensor, nn

from solodg.models.stages import Network, Stages


def build_network(name: str, channels: int, image_size: int, pretrained: bool) -> Network:
    """Builds a network by name; `pretrained` downloads the weights published under the name."""
    if name == "small_cnn":
        return SmallCNN(channels)
    from solodg.models import published_networks as published  # late: it imports all of timm

    if name == "alexnet":
        return published.AlexNetStages(channels, pretrained)
    return published.timm_stages(name, channels, image_size, pretrained)


@cache
def has_batch_norm(name: str) -> bool:
    """Returns whether a backbone has BatchNorm2d layers; True for a name that does not exist."""
    if name in ("small_cnn", "alexnet"):
        return name == "small_cnn"
    from solodg.models.published_networks import timm_has_batch_norm  # late: as above

    return timm_has_batch_norm(name)


class SmallCNN(Network):
    """Four convolutions with BatchNorm, for quick work on images of 28 to 32 pixels."""

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
        """Returns the parameters of each block."""
        return [list(block.parameters()) for block in self.blocks]

    def forward(self, x: Tensor) -> Stages:
        """Returns the map of each block, and the last one pooled."""
        maps = []
        for block in self.blocks:
            x = block(x)
            maps.append(x)
        return Stages(maps, self.pool(x))

    def last_map(self, x: Tensor) -> Tensor:
        """Returns the map of the last block."""
        for block in self.blocks:
            x = block(x)
        return x

    def pool(self, last: Tensor) -> Tensor:
        """Returns the mean of the last map over its pixels."""
        return last.mean((2, 3))

    def stage_modules(self) -> list[nn.Module]:
        """Returns the blocks."""
        return list(self.blocks)
