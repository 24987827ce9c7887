"""Small models and batches for the tests of training-time methods."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from solodg.algorithms import build_algorithm
from solodg.models.backbones import build_backbone
from solodg.models.extractor import ReadyFeatures
from solodg.types import Batch, Episode

MAPS = ["small_cnn", "alexnet", "resnet18", "tf_efficientnet_lite0", "densenet121", "convnext_atto"]
DIM, STYLE = 6, 2


def on_features(name: str, **arguments):
    """Builds a method on ready features: the gradient of the input is that of the embedding."""
    torch.manual_seed(0)
    backbone = ReadyFeatures(DIM, STYLE)
    return build_algorithm(name, backbone, num_classes=4, num_domains=3, **arguments).double()


def on_images(name: str, backbone: str = "small_cnn", **arguments):
    """Builds a method by name on a backbone, in float64."""
    torch.manual_seed(0)
    built = build_backbone(backbone, channels=3, image_size=32)
    return build_algorithm(name, built, num_classes=4, num_domains=3, **arguments).double()


def images(count: int, seed: int = 1) -> torch.Tensor:
    """Returns random images (count, 3, 32, 32) in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, 32, 32, generator=generator, dtype=torch.float64)


def as_episode(batch: Batch, start: int) -> Episode:
    """Splits a batch into meta-source and, from row `start` on, meta-target."""
    return Episode(Batch(*(t[:start] for t in batch)), Batch(*(t[start:] for t in batch)), 1)


def feature_batch(count: int = 24, requires_grad: bool = False) -> Batch:
    """Returns random features of three domains and four classes; domain 2 lacks class 3."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, DIM + STYLE, generator=generator, dtype=torch.float64)
    domain, y = torch.arange(count) // (count // 3), torch.arange(count) % 4
    return Batch(x.requires_grad_(requires_grad), torch.where(domain == 2, y % 3, y), domain)


def uneven_batch(requires_grad: bool = False, seed: int = 1) -> Batch:
    """Returns random features of 8, 3 and 6 images of three domains; domain 2 lacks class 3."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(17, DIM + STYLE, generator=generator, dtype=torch.float64)
    domain = torch.repeat_interleave(torch.arange(3), torch.tensor([8, 3, 6]))
    y = torch.randint(4, (17,), generator=generator)
    return Batch(x.requires_grad_(requires_grad), torch.where(domain == 2, y % 3, y), domain)


def random_episode(
    shape: tuple[int, ...], sizes: tuple[int, ...] = (5, 4, 6), seed: int = 0
) -> Episode:
    """Returns random inputs of three classes; the last of the domains is the meta-target."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(sum(sizes), *shape, generator=generator)
    y = torch.randint(3, (sum(sizes),), generator=generator)
    domain = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    last = domain == len(sizes) - 1
    return Episode(Batch(x[~last], y[~last], domain[~last]), Batch(x[last], y[last], domain[last]))


def kind_on_images(kind, name: str = "small_cnn", size: int = 32, **arguments):
    """Builds a method by its class on a backbone."""
    torch.manual_seed(0)
    backbone = build_backbone(name, channels=3, image_size=size)
    return kind(backbone, num_classes=3, **arguments)


def assert_gradient_of(value: Callable[[], torch.Tensor], weight: nn.Parameter) -> None:
    """Checks some entries of a gradient by finite differences."""
    (gradient,) = torch.autograd.grad(value(), weight)
    for index in ((0, 0), (2, 5), (3, 1)):
        values = []
        for step in (1e-5, -2e-5):
            with torch.no_grad():
                weight[index] += step
            values.append(value().item())
        with torch.no_grad():
            weight[index] += 1e-5
        assert gradient[index].item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)
