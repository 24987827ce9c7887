"""MixStyle against small independent implementations."""

import copy

import pytest
import torch

from peer_models import (
    MAPS,
    kind_on_images,
    random_episode,
)
from solodg.algorithms import ALGORITHMS
from solodg.algorithms.mixstyle import MixStyle, mix_styles
from solodg.errors import UserError
from solodg.models.extractor import ReadyFeatures


def test_mixed_maps_have_the_mix_of_means_and_deviations() -> None:
    torch.manual_seed(0)
    maps = (3 * torch.randn(4, 6, 5, 7) + torch.randn(4, 6, 1, 1)).double()
    share, other = torch.rand(4).double(), torch.tensor([2, 0, 1, 3])
    mixed = mix_styles(maps, share, other)
    for i, j in enumerate(other.tolist()):
        for statistic in (torch.mean, lambda m, dim: m.std(dim, correction=0)):
            own, foreign = statistic(maps[i], (1, 2)), statistic(maps[j], (1, 2))
            expected = share[i] * own + (1 - share[i]) * foreign
            torch.testing.assert_close(statistic(mixed[i], (1, 2)), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mix_styles(maps, torch.ones(4).double(), other), maps)


def test_mixing_has_no_gradient_through_statistics_and_takes_maps_of_one_pixel() -> None:
    maps = torch.randn(2, 3, 1, 1, requires_grad=True)
    mixed = mix_styles(maps, torch.tensor([0.3, 1.0]), torch.tensor([1, 0]))
    torch.testing.assert_close(mixed[0], 0.3 * maps[0] + 0.7 * maps[1])
    mixed[1].sum().backward()
    torch.testing.assert_close(maps.grad, torch.tensor([0.0, 1.0])[:, None, None, None] + 0 * maps)


@pytest.mark.parametrize("name", MAPS)
def test_three_stages_are_mixed_in_training_and_none_at_test(name: str, monkeypatch) -> None:
    algorithm = kind_on_images(MixStyle, name, 64, probability=1.0)
    one = random_episode((3, 64, 64), (2, 2))
    calls = []
    monkeypatch.setattr(
        "solodg.algorithms.mixstyle.mix_styles",
        lambda maps, share, other: calls.append(maps.shape) or mix_styles(maps, share, other),
    )
    algorithm.train().losses(one)["loss"].backward()
    assert len(calls) == 3
    assert all(len(shape) == 4 for shape in calls)
    assert [s[2] for s in calls] == sorted((s[2] for s in calls), reverse=True)
    algorithm.eval()
    plain = ALGORITHMS["erm"](algorithm.backbone, num_classes=3).eval()
    plain.classifier = algorithm.classifier
    assert torch.equal(algorithm(one.merged.x), plain(one.merged.x))
    torch.testing.assert_close(algorithm.losses(one)["loss"], plain.losses(one)["loss"])
    assert len(calls) == 3


def test_mixing_changes_the_loss_about_as_often_as_its_probability() -> None:
    algorithm = kind_on_images(MixStyle).train()
    algorithm.backbone.freeze_norm()  # or BatchNorm would change the loss too
    copied, one = copy.deepcopy(algorithm), random_episode((3, 32, 32), (2, 2))
    plain = ALGORITHMS["erm"].losses(algorithm, one)["loss"].item()
    with torch.no_grad():
        values = [copied.losses(one)["loss"].item() for _ in range(80)]
    # Three stages, each left alone with probability one half.
    assert 2 <= sum(value == plain for value in values) <= 20


def test_mixstyle_without_maps_is_a_user_error() -> None:
    with pytest.raises(UserError, match="tokens"):
        kind_on_images(MixStyle, "vit_tiny_patch16_224", 32)
    with pytest.raises(UserError, match="stored features"):
        MixStyle(ReadyFeatures(4, 2), num_classes=3)
