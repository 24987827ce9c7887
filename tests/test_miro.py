"""MIRO against torch's own Gaussian density, on pixels and on stored maps."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from peer_models import as_episode, images, on_features, on_images
from solodg.algorithms import build_algorithm
from solodg.errors import UserError
from solodg.models.backbones import build_backbone
from solodg.models.cut import Cut
from solodg.models.map_backbone import MapBackbone
from solodg.types import Batch


def batch_of(count: int = 9) -> Batch:
    """Images of three unequal domains; the last lacks class 3."""
    domain = torch.tensor([0] * (count - 4) + [1] + [2] * 3)
    y = torch.arange(count) % 4
    return Batch(images(count), torch.where(domain == 2, y % 3, y), domain)


def maps_of(backbone, x: torch.Tensor) -> list[torch.Tensor]:
    """By hooks of this test."""
    found: list[torch.Tensor] = []
    modules = backbone.stage_modules()
    hooks = [m.register_forward_hook(lambda *call: found.append(call[2])) for m in modules]
    backbone.embed(x)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def shake(module: nn.Module) -> None:
    """As if it had been trained."""
    generator = torch.Generator().manual_seed(4)
    for parameter in module.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.05 * noise)


def density_loss(maps, oracle, spreads) -> torch.Tensor:
    """Negative log-densities by torch.distributions, without the constant."""
    total = torch.zeros((), dtype=torch.float64)
    constant = torch.distributions.Normal(0.0, 1.0).log_prob(torch.tensor(0.0)).double()
    for own, other, b in zip(maps, oracle, spreads, strict=True):
        s = torch.log1p(torch.exp(10 * b)) + 1e-5
        normal = torch.distributions.Normal(own, s.sqrt()[:, None, None].expand_as(own))
        total = total + (constant - normal.log_prob(other)).mean()
    return total


def test_miro_is_the_gaussian_density_of_the_initial_maps() -> None:
    algorithm = on_images("miro", weight=0.3).train()
    algorithm.backbone.freeze_norm()
    initial = copy.deepcopy(algorithm.backbone).eval()
    shake(algorithm)
    batch = batch_of()
    losses = algorithm.losses(as_episode(batch, 6))
    maps, oracle = maps_of(algorithm.backbone, batch.x), maps_of(initial, batch.x)
    assert [m.shape[1] for m in maps] == [32, 64, 128, 128]
    distance = density_loss(maps, oracle, algorithm.spread.split([32, 64, 128, 128]))
    class_loss = F.cross_entropy(algorithm(batch.x), batch.y)
    expected = class_loss + 0.3 * distance
    torch.testing.assert_close(losses["loss"], expected)
    wanted = [p for p in algorithm.parameters() if p.requires_grad]
    ours = torch.autograd.grad(losses["loss"], wanted)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, wanted))


@pytest.mark.parametrize("name", ["test_resnet", "densenet121", "test_vit"])
def test_untrained_maps_equal_the_oracles_and_variances_start_at_a_tenth(name: str) -> None:
    algorithm = on_images("miro", backbone=name)
    torch.testing.assert_close(algorithm.variances(), torch.full_like(algorithm.spread, 0.1))
    algorithm.eval()
    distance = algorithm.losses(as_episode(batch_of(), 6))["distance"]
    _, maps = algorithm.backbone.embed_with_maps(images(1))
    expected = len(maps) * torch.tensor(0.1, dtype=torch.float64).log() / 2
    torch.testing.assert_close(distance, expected)


def test_stored_maps_give_the_gradients_of_pixels() -> None:
    torch.manual_seed(0)
    backbone = build_backbone("small_cnn", channels=3, image_size=32)
    backbone.freeze_norm()
    backbone.train_last(2)
    tail = MapBackbone(Cut(backbone, 2))
    options = {"num_classes": 4, "num_domains": 3}
    whole, short = (build_algorithm("miro", b, **options).train() for b in (backbone, tail))
    short.classifier.load_state_dict(whole.classifier.state_dict())
    shake(backbone)
    batch = batch_of()
    x = batch.x.float()
    with torch.no_grad():
        rows = torch.cat([torch.zeros(9, 1), Cut(backbone, 2).rows(x)], 1)
    trained = [p for p in backbone.parameters() if p.requires_grad]
    found = []
    for algorithm, inputs in ((whole, x), (short, rows)):
        loss = algorithm.losses(as_episode(batch._replace(x=inputs), 6))["loss"]
        found.append(torch.autograd.grad(loss, trained))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    assert whole.state_dict().keys() >= short.state_dict().keys()
    assert whole.spread.shape == short.spread.shape  # so that a model for images loads them


def test_the_oracle_is_not_saved_and_what_has_none_is_refused() -> None:
    algorithm = on_images("miro")
    erm = on_images("erm")
    assert algorithm.state_dict().keys() - erm.state_dict().keys() == {"spread"}
    with pytest.raises(UserError, match="stored features are of a frozen one"):
        on_features("miro")
    readings = build_backbone("small_cnn", channels=3, image_size=32, image_norm=(0.0, 40.0))
    with pytest.raises(UserError, match="one number to --image-norm"):
        build_algorithm("miro", readings, num_classes=4, num_domains=3)
