"""Pose: rotations, the angles of source domains, and the network that undoes them."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from scipy import ndimage

from solodg.data import LabelledImages, Loading, SourceData, dataset_spec
from solodg.data.episodes import EpisodeSampler
from solodg.data.images import ImageArray
from solodg.data.transforms import PHOTO, to_unit, unaugmented
from solodg.models.backbones import build_backbone
from solodg.models.pose import PoseNetwork, rotate, shrink
from solodg.progress import NoProgress
from solodg.readings import Reading
from solodg.runs.clock import Clock
from solodg.runs.config import Machine
from solodg.runs.domain_rotations import domain_rotations
from solodg.runs.opened_data import input_batches
from solodg.runs.pose_training import train_pose
from solodg.runs.workplace import Workplace


def smooth(*shape: int) -> torch.Tensor:
    noise = np.random.default_rng(0).random(shape)
    return torch.from_numpy(ndimage.gaussian_filter(noise, (0, 0, 2, 2)))


@pytest.mark.parametrize("shape", [(31, 31), (32, 32), (24, 40)])
@pytest.mark.parametrize("degrees", [-120.0, 17.0, 90.0])
def test_a_rotation_is_that_of_scipy(shape: tuple[int, int], degrees: float) -> None:
    x = smooth(1, 2, *shape)
    found = rotate(x, torch.tensor([math.radians(degrees)], dtype=x.dtype))
    expected = ndimage.rotate(x[0], -degrees, axes=(2, 1), reshape=False, order=1, mode="nearest")
    down, right = (np.abs(np.arange(n) - (n - 1) / 2) for n in shape)
    middle = np.hypot(down[:, None], right) < min(shape) / 2 - 1
    np.testing.assert_allclose(found[0].numpy()[:, middle], expected[:, middle], atol=1e-6)


def test_a_rotation_leaves_no_black_corner_and_none_changes_nothing() -> None:
    x = torch.full((3, 1, 32, 32), 0.7)
    angles = torch.tensor([0.3, -1.0, 2.0])
    torch.testing.assert_close(rotate(x, angles), x)
    varied = torch.rand(3, 1, 20, 20)
    torch.testing.assert_close(rotate(varied, torch.zeros(3)), varied)


def test_an_angle_depends_on_the_circle_of_its_own_image_alone() -> None:
    torch.manual_seed(0)
    network = PoseNetwork(3).eval()
    x = torch.rand(4, 3, 32, 32)
    angles = network.angles(x)
    torch.testing.assert_close(network.angles(x[2:3]), angles[2:3])
    torch.testing.assert_close(network.angles(0.3 + 0.5 * x), angles, atol=1e-4, rtol=0)
    first = network.vectors(x)
    corners = x.clone()
    corners[:, :, :4, :4] = 1.0
    torch.testing.assert_close(network.vectors(corners), first)


@pytest.fixture(scope="module")
def rotated_digits() -> SourceData:
    """The digits of the package at 15 to 75 degrees."""
    spec = dataset_spec("rotated-mnist")
    loading = Loading(Path("no-such-folder"), 32, 1, 0, train_images=600)
    return spec.load(loading).leave_out(["0", "90"])


def test_the_rotations_of_domains_are_found(rotated_digits: SourceData) -> None:
    found = domain_rotations(rotated_digits.train, 0)
    degrees = np.array([float(name) for name in rotated_digits.domain_names])
    expected = degrees - degrees.mean()
    assert np.abs(np.abs(found.angles) - np.abs(expected)).max() <= 5
    assert abs(np.corrcoef(found.angles, expected)[0, 1]) > 0.99
    assert found.span == pytest.approx(60, abs=6)
    assert found.alike < 0.9 < 0.97 < found.alike_rotated
    assert found.explain


def changed(images: LabelledImages, change) -> LabelledImages:
    pixels = images.images.take(np.arange(len(images)))
    return LabelledImages(
        ImageArray(change(pixels, images.domains)), images.labels, images.domains,
        images.domain_names,
    )  # fmt: skip


def test_colours_and_noise_are_no_rotation(rotated_digits: SourceData) -> None:
    upright = rotated_digits.train.subset(np.flatnonzero(rotated_digits.train.domains == 2))
    numbers = np.arange(len(upright)) % 3
    three = LabelledImages(upright.images, upright.labels, numbers, ("a", "b", "c"))

    def recolour(pixels: torch.Tensor, domains: np.ndarray) -> torch.Tensor:
        noise = torch.randint(0, 60, pixels.shape, generator=torch.Generator().manual_seed(0))
        inverted, pale = 255 - pixels, pixels // 4 + 150
        choices = torch.stack([(pixels // 2 + noise).byte(), inverted, pale])
        return choices[torch.from_numpy(domains), torch.arange(len(pixels))]

    found = domain_rotations(changed(three, recolour), 0)
    assert found.span < 6
    assert not found.explain
    assert not domain_rotations(three, 0).explain


def test_domains_without_a_class_in_common_have_no_rotation(rotated_digits: SourceData) -> None:
    own = rotated_digits.train
    chosen = np.flatnonzero((own.labels % 5 == own.domains) & (own.labels < 5))
    found = domain_rotations(own.subset(chosen), 0)
    assert not found.explain


def workplace(folder: Path, say=lambda text: None) -> Workplace:
    fabric = Fabric(accelerator="cpu", devices=1)
    return Workplace(fabric, Machine(workers=1), Clock(folder), NoProgress(), say)


@pytest.mark.parametrize("augment", [unaugmented, replace(PHOTO, jitter=0.0)])  # PHOTO mirrors
def test_the_network_learns_to_undo_rotations_beyond_those_of_the_sources(
    tmp_path: Path, augment
) -> None:
    spec = dataset_spec("rotated-mnist")
    data = spec.load(Loading(Path("no-such-folder"), 32, 1, 0, train_images=1000))
    source = data.leave_out(["0", "90"])
    rotations = domain_rotations(source.train, 0)
    backbone = build_backbone("small_cnn", channels=1, image_size=32, pose=True)
    sampler = EpisodeSampler(source.train, context=2, queries=16, seed=0)
    assert rotations.explain
    train_pose(workplace(tmp_path), backbone, source, sampler, augment, steps=120, seed=0)
    assert backbone.pose is not None
    assert not any(p.requires_grad for p in backbone.pose.parameters())
    means = []
    with torch.no_grad():
        for part in data.targets(["0", "45", "90"]).values():
            few = part.subset(np.arange(300))
            angles = torch.cat([backbone.pose.angles(batch.x) for batch in input_batches(few)])
            means.append(float(angles.rad2deg().mean()))
    # In the product a larger name is a rotation to the same side as a larger angle found.
    side = np.sign(rotations.angles[-1] - rotations.angles[0])
    assert abs(means[1]) < 8
    assert -60 < side * means[0] < -25
    assert 25 < side * means[2] < 60


def test_images_of_domains_that_do_not_differ_by_rotation_stay_upright(tmp_path: Path) -> None:
    spec = dataset_spec("toy")
    source = spec.load(Loading(Path("none"), 32, 3, 0)).leave_out(["sky"])
    assert np.all(domain_rotations(source.train, 0).angles == 0)
    backbone = build_backbone("small_cnn", channels=3, image_size=32, pose=True)
    sampler = EpisodeSampler(source.train, context=2, queries=8, seed=0)
    said: list[str] = []
    train_pose(workplace(tmp_path, said.append), backbone, source, sampler, PHOTO, steps=60, seed=0)
    assert any("do not differ by rotation" in text for text in said)
    x = next(input_batches(source.val)).x
    assert backbone.pose is not None
    with torch.no_grad():
        found = backbone.pose.angles(x).abs().rad2deg()
    assert found.mean() < 5
    assert found.max() < 15


@pytest.mark.parametrize("size", [28, 32, 63, 96, 224])
def test_an_image_of_any_size_is_seen_at_32_pixels(size: int) -> None:
    x = smooth(2, 3, size, size).float()
    small = shrink(x)
    assert small.shape == (2, 3, 32, 32)
    torch.testing.assert_close(small.mean((2, 3)), x.mean((2, 3)), atol=0.02, rtol=0)


def test_a_backbone_reads_images_upright_in_training_a_share_of_them() -> None:
    torch.manual_seed(0)
    backbone = build_backbone("small_cnn", channels=1, image_size=32, pose=True, image_norm=(0, 9))
    plain = build_backbone("small_cnn", channels=1, image_size=32)
    plain.load_state_dict(backbone.state_dict(), strict=False)
    x = to_unit(torch.randint(0, 256, (6, 1, 32, 32), dtype=torch.uint8))
    backbone.eval()
    plain.eval()
    assert backbone.pose is not None
    with backbone.reading_as([Reading()], upright=True):
        torch.testing.assert_close(backbone.embed(x), plain.embed(backbone.pose(x)))
    with backbone.reading_as([Reading()], upright=False):
        torch.testing.assert_close(backbone.embed(x), plain.embed(x))
    assert backbone.readings == (Reading(0), Reading(9))
    assert backbone.upright == 1
    backbone.train()
    assert not backbone.pose.training
    backbone.upright = 0.5
    mixed = backbone.turned_upright(x.repeat(20, 1, 1, 1))
    same = (mixed == x.repeat(20, 1, 1, 1)).flatten(1).all(1).float().mean()
    assert 0.3 < same < 0.7
