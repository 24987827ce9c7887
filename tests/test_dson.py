"""DSON against small independent implementations."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from peer_models import (
    as_episode,
    images,
    on_images,
)
from solodg.adapters import ADAPTERS
from solodg.algorithms import build_algorithm
from solodg.algorithms.dson import DomainNorm, images_of
from solodg.errors import UserError
from solodg.models.backbones import build_backbone
from solodg.runs.config import RunConfig
from solodg.runs.defaults import resolve
from solodg.types import Batch


def random_norm() -> DomainNorm:
    torch.manual_seed(0)
    norm = DomainNorm(nn.BatchNorm2d(5).double(), 4)
    for tensor in (norm.weight, norm.bias, norm.mix, norm.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    return norm


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("pixels", [1, 3])
def test_statistics_are_a_mix_of_batch_and_instance_for_each_domain(training, pixels) -> None:
    """Domain 1 has a single image, domain 3 none."""
    norm = random_norm().train(training)
    domain = np.array([0, 2, 0, 1, 2, 0])
    x = torch.randn(6, 5, pixels, pixels, dtype=torch.float64) + 1
    before = {name: value.clone().numpy() for name, value in norm.state_dict().items()}
    with images_of(torch.from_numpy(domain)):
        ours = norm(x).detach().numpy()
    values = x.numpy()
    expected = np.empty_like(values)
    for n in range(6):
        d = domain[n]
        w = 1 / (1 + math.exp(-before["mix"][d]))
        for c in range(5):
            batch = values[domain == d][:, c]
            mean, var = before["running_mean"][d, c], before["running_var"][d, c]
            if training:
                mean, var = batch.mean(), batch.var()
            mean = w * mean + (1 - w) * values[n, c].mean()
            var = w * var + (1 - w) * values[n, c].var()
            normalised = (values[n, c] - mean) / math.sqrt(var + 1e-5)
            expected[n, c] = before["weight"][d, c] * normalised + before["bias"][d, c]
    np.testing.assert_allclose(ours, expected, atol=1e-10)
    for d in range(4):
        batch = values[domain == d].transpose(1, 0, 2, 3).reshape(5, -1)  # (C, values)
        mean, var = before["running_mean"][d], before["running_var"][d]
        if training and batch.size:
            unbiased = batch.var(1, ddof=1 if batch.shape[1] > 1 else 0)
            mean, var = 0.9 * mean + 0.1 * batch.mean(1), 0.9 * var + 0.1 * unbiased
        np.testing.assert_allclose(norm.running_mean[d].numpy(), mean)
        np.testing.assert_allclose(norm.running_var[d].numpy(), var)


def test_gradients_go_through_the_statistics_of_domain_and_image() -> None:
    norm = random_norm().train()
    domain = torch.tensor([0, 2, 0, 1, 2, 0])
    x = torch.randn(6, 5, 2, 2, dtype=torch.float64, requires_grad=True)

    def normalised(x: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        with images_of(domain):
            return torch.func.functional_call(norm, {"mix": mix}, (x,))

    assert torch.autograd.gradcheck(normalised, (x, norm.mix))


def test_dson_averages_probabilities_over_the_branches() -> None:
    dson = on_images("dson")
    x = images(12)
    batch = Batch(x, torch.arange(12) % 4, torch.arange(12) // 4)
    dson.train().losses(as_episode(batch, 8))
    dson.eval()
    for module in dson.modules():
        if isinstance(module, DomainNorm):
            nn.init.normal_(module.weight, 1, 0.3)
    mean = torch.zeros(12, 4, dtype=torch.float64)
    apart = []
    for d in range(3):
        with images_of(torch.full((12,), d)):
            apart.append(torch.softmax(dson.classifier(dson.backbone.embed(x)), 1))
        mean += apart[-1] / 3
    assert (apart[0] - apart[1]).abs().max() > 1e-4
    torch.testing.assert_close(dson(x).exp(), mean)
    torch.testing.assert_close(dson.probabilities(x), mean)


@pytest.mark.parametrize("backbone", ["small_cnn", "resnet18", "tf_efficientnet_lite0"])
def test_on_batch_statistics_alone_dson_starts_as_the_backbone_it_was_given(backbone: str) -> None:
    """Scales, statistics and timm's activations are taken over; the given one stays as it was."""
    given = build_backbone(backbone, channels=3, image_size=32).double()
    with torch.no_grad():
        given.train().embed(images(16))
        for module in given.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1, 0.1)
    given.eval()
    names = set(given.state_dict())
    dson = build_algorithm("dson", given, num_classes=4, num_domains=2).double().eval()
    assert set(given.state_dict()) == names
    norms = [m for m in dson.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms
    for norm in norms:
        assert isinstance(norm, DomainNorm)
        nn.init.constant_(norm.mix, 50.0)
    with torch.no_grad():
        torch.testing.assert_close(dson.embed(images(3)), given.embed(images(3)))


def test_dson_keeps_what_is_frozen_frozen() -> None:
    given = build_backbone("small_cnn", channels=3, image_size=32)
    given.freeze_norm()
    given.train_last(1)
    dson = build_algorithm("dson", given, num_classes=4, num_domains=3).train()
    norms = [m for m in dson.modules() if isinstance(m, DomainNorm)]
    trained = [[p.requires_grad for p in norm.parameters()] for norm in norms]
    assert trained == [[False] * 3] * 3 + [[True] * 3]
    batch = Batch(images(6).float(), torch.arange(6) % 4, torch.arange(6) // 2)
    dson.losses(as_episode(batch, 4))["loss"].backward()
    assert all(norm.running_mean.abs().max() == 0 for norm in norms)


@pytest.mark.parametrize("name", ["bn", "tent"])
def test_adapters_of_batchnorm_work_on_every_branch(name: str) -> None:
    dson = on_images("dson").eval()
    before = copy.deepcopy(dson.state_dict())
    plain = dson(images(5)).detach()
    adapter = ADAPTERS[name](dson).eval()
    with torch.inference_mode():
        adapted = adapter(images(5))
        adapter.reset()
    assert torch.isfinite(adapted).all()
    assert (adapted - plain).abs().max() > 1e-6
    assert all(torch.equal(v, before[k]) for k, v in dson.state_dict().items())


def test_dson_learns_the_domains_statistics_on_pretrained_weights_too() -> None:
    config = RunConfig(dataset="toy", algorithm="dson", pretrained=True)
    assert resolve(config).freeze_norm is False
    some = config.model_copy(update={"train_stages": 1})
    recorded = RunConfig(**resolve(some).model_dump())
    assert resolve(recorded).freeze_norm is False
    with pytest.raises(UserError, match="no --train-norm"):
        resolve(recorded.model_copy(update={"algorithm": "erm"}))
