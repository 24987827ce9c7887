"""Image norms write over their input where nothing else reads it, and only there."""

import pytest
import torch
from torch import Tensor, nn

from solodg.models import build_backbone
from solodg.models.image_norm import ImageBatchNorm, image_norms, let_norms_overwrite
from solodg.models.stages import Stages


class Residual(nn.Module):
    """A network whose norm reads a map that is read again, as before the activation in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = ImageBatchNorm(nn.BatchNorm2d(4), [100.0])

    def forward(self, x: Tensor) -> Stages:
        first = self.conv(x)
        both = first + self.norm(first).relu() if self.read_again else self.norm(first).relu()
        return Stages([both], both.mean((2, 3)))

    read_again = True


def test_a_map_that_is_read_again_is_kept() -> None:
    net = Residual()
    let_norms_overwrite(net, torch.rand(1, 3, 8, 8))
    assert not net.norm.overwrites
    net.read_again = False
    let_norms_overwrite(net, torch.rand(1, 3, 8, 8))
    assert net.norm.overwrites
    assert net.training


def test_images_are_kept_where_the_first_layer_is_a_norm() -> None:
    net = Residual()
    net.conv, net.norm = nn.Identity(), ImageBatchNorm(nn.BatchNorm2d(3), [100.0])  # type: ignore[assignment]
    net.read_again = False
    let_norms_overwrite(net, torch.rand(1, 3, 8, 8))
    assert not net.norm.overwrites


@pytest.mark.parametrize("name", ["resnet18", "tf_efficientnet_lite0", "small_cnn"])
def test_features_are_those_of_norms_that_make_new_maps(name: str) -> None:
    backbone = build_backbone(name, image_size=32, image_norm=(0.0, 100.0)).eval()
    assert all(norm.overwrites for norm in image_norms(backbone.net))
    x = torch.rand(3, 3, 32, 32)
    given = x.clone()
    with torch.inference_mode():
        features = backbone(x)
        for norm in image_norms(backbone.net):
            norm.overwrites = False
        expected = backbone(x)
    assert torch.equal(x, given)
    assert torch.equal(features.embedding, expected.embedding)
    assert torch.equal(features.style, expected.style)


def test_norms_before_the_convolution_keep_their_input() -> None:
    backbone = build_backbone("densenet121", image_size=32, image_norm=100.0)
    assert not any(norm.overwrites for norm in image_norms(backbone.net))


def test_gradients_are_those_of_norms_that_make_new_maps() -> None:
    backbone = build_backbone("small_cnn", image_size=32, image_norm=100.0).eval()
    x = torch.rand(2, 3, 32, 32)
    gradients = []
    for overwrites in (True, False):
        for norm in image_norms(backbone.net):
            norm.overwrites = overwrites
        backbone.zero_grad()
        backbone(x).embedding.square().sum().backward()
        gradients.append([p.grad.clone() for p in backbone.parameters() if p.grad is not None])
    assert gradients[0]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
