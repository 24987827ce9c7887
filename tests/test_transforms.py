"""Augmentation of whole batches against torchvision, image by image."""

import pytest
import torch
from torchvision.transforms.v2 import functional as TF

from solodg.data.transforms import (
    AUGMENTATIONS,
    DIGIT,
    PHOTO,
    Augmentation,
    jitter_colours,
    to_unit,
)


@pytest.fixture
def photos() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(6, 3, 5, 5, generator=generator) * 0.5 + 0.2
    return torch.nn.functional.interpolate(coarse, size=20, mode="bilinear")


def constant(value: float) -> torch.Tensor:
    return torch.full((6,), value)


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.25])
@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_each_colour_change_equals_torchvision(photos, name: str, factor: float) -> None:
    factors = {k: constant(1.0) for k in ("brightness", "contrast", "saturation")}
    factors[name] = constant(factor)
    got = jitter_colours(photos, **factors, hue=constant(0.0))
    expected = torch.stack([getattr(TF, f"adjust_{name}")(image, factor) for image in photos])
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=0)


def test_a_hue_turn_keeps_brightness_and_a_full_turn_changes_nothing(photos) -> None:
    one = constant(1.0)
    grey = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    turned = jitter_colours(photos * 0.3 + 0.35, one, one, one, constant(0.3))
    torch.testing.assert_close((turned * grey).sum(1), ((photos * 0.3 + 0.35) * grey).sum(1))
    torch.testing.assert_close(jitter_colours(photos, one, one, one, constant(1.0)), photos)


def test_each_image_gets_its_own_factor(photos) -> None:
    one = constant(1.0)
    got = jitter_colours(photos, torch.linspace(0.5, 1, 6), one, one, constant(0.0))
    torch.testing.assert_close(got[0], photos[0] * 0.5)
    torch.testing.assert_close(got[-1], photos[-1])


def test_a_crop_is_a_part_of_the_image_at_full_size(photos) -> None:
    """A horizontal ramp stays a ramp, over a part of its range; mirrored if flipped."""
    ramp = torch.linspace(0, 1, 32).expand(200, 1, 32, 32)
    out = Augmentation(min_area=0.5, flip=True, jitter=0.0)(ramp, torch.Generator().manual_seed(0))
    slope = out[:, 0, 0, -1] - out[:, 0, 0, 0]
    assert out.shape == ramp.shape
    assert slope.abs().max() <= 1.0
    assert slope.abs().min() > 0.55  # sqrt(0.5 * 3 / 4), less the borders
    assert 60 < (slope < 0).sum() < 140  # about half are flipped


def test_digits_are_never_mirrored() -> None:
    ramp = torch.linspace(0, 1, 32).expand(100, 1, 32, 32)
    out = DIGIT(ramp, torch.Generator().manual_seed(0))
    assert (out[:, 0, 0, -1] > out[:, 0, 0, 0]).all()


def test_the_same_generator_gives_the_same_images_and_another_does_not(photos) -> None:
    first, again, other = (PHOTO(photos, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("kind", AUGMENTATIONS)
def test_pixels_end_in_the_unit_range_and_ready_features_pass(kind: str) -> None:
    pixels = torch.randint(0, 256, (4, 3, 9, 9), dtype=torch.uint8)
    out = AUGMENTATIONS[kind](pixels, torch.Generator())
    assert 0 <= out.min() <= out.max() <= 1
    features = torch.randn(3, 8)
    assert torch.equal(AUGMENTATIONS[kind](features, torch.Generator()), features)
    assert to_unit(torch.tensor([255], dtype=torch.uint8)).item() == 1.0
