"""The pose that `solo_code` learns from agreement: estimated, refined and undone."""

import math

import pytest
import torch
from torch.nn import functional as F

from solodg.algorithms.solo_code.pose import (
    PoseNetwork,
    compose,
    domain_disagreement,
    mean_pose,
    pose_maps,
    resample,
)


@pytest.mark.parametrize("size", [28, 32, 48])
def test_it_starts_at_the_identity(size: int) -> None:
    x = torch.rand(3, 1, size, size)
    torch.testing.assert_close(PoseNetwork(1)(x), x, atol=1e-5, rtol=0)


def test_maps_are_those_of_affine_grid() -> None:
    x = torch.rand(4, 3, 20, 31, dtype=torch.float64)
    maps = torch.eye(2, 3, dtype=torch.float64) + 0.3 * torch.randn(4, 2, 3, dtype=torch.float64)
    grid = F.affine_grid(maps, list(x.shape), align_corners=False)
    expected = F.grid_sample(x, grid, align_corners=False)
    torch.testing.assert_close(resample(x, maps), expected)


def test_a_quarter_turn_map_rotates_by_a_quarter() -> None:
    x = torch.rand(1, 1, 8, 8)
    turn = torch.tensor([[[0.0, -1.0, 0.0], [1.0, 0.0, 0.0]]])
    torch.testing.assert_close(resample(x, turn), x.rot90(1, (2, 3)), atol=1e-5, rtol=0)


def test_it_learns_to_undo_a_rotation() -> None:
    torch.manual_seed(0)
    upright = torch.zeros(1, 1, 32, 32)
    upright[:, :, 6:26, 12:20] = 1
    cosine, sine = 0.866, 0.5  # 30 degrees
    turned = resample(upright, torch.tensor([[[cosine, -sine, 0.0], [sine, cosine, 0.0]]]))
    network = PoseNetwork(1)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(150):
        loss = (network(turned) - upright).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5 * (turned - upright).square().mean()


def test_each_image_has_its_own_network() -> None:
    torch.manual_seed(0)
    network = PoseNetwork(1)
    torch.nn.init.normal_(network.pose.weight, std=0.1)
    x = torch.rand(3, 1, 32, 32)
    torch.testing.assert_close(network(x)[1:2], network(x[1:2]))
    maps = network.poses(x)
    assert not torch.allclose(maps[0], maps[1])


def test_a_pose_is_a_rotation_of_a_stretch() -> None:
    angle, stretch = torch.tensor([0.7]), torch.tensor([[0.1, -0.05, 0.02]])
    map_ = pose_maps(angle, stretch, torch.tensor([[0.3, -0.2]]))[0]
    left, sizes, right = torch.linalg.svd(map_[:, :2])
    turn = left @ right  # the turn of the polar decomposition
    assert math.atan2(turn[1, 0], turn[0, 0]) == pytest.approx(0.7, abs=1e-6)
    expected = torch.linalg.eigvalsh(torch.tensor([[1.05, 0.02], [0.02, 1.15]]))
    torch.testing.assert_close(sizes.sort().values, expected)
    torch.testing.assert_close(map_[:, 2], torch.tensor([0.3, -0.2]))


def test_no_image_can_be_made_too_small_to_disagree() -> None:
    torch.manual_seed(0)
    network = PoseNetwork(1, refinements=1)
    torch.nn.init.normal_(network.pose.weight, std=100.0)
    areas = torch.linalg.det(network.poses(torch.rand(50, 1, 32, 32))[:, :, :2])
    assert areas.min() > 0.62  # 0.79 for one estimate
    assert areas.max() < 1.47  # 1.21


def test_composed_poses_send_points_where_both_do() -> None:
    first, then = torch.randn(2, 5, 2, 3, dtype=torch.float64)
    points = torch.randn(5, 2, 7, dtype=torch.float64)

    def sent(maps: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return maps[:, :, :2] @ to + maps[:, :, 2:]

    # What `then` reads at p is what `first` has there, which lies at first(then(p)).
    torch.testing.assert_close(sent(compose(first, then), points), sent(first, sent(then, points)))


def test_the_mean_of_rotations_to_both_sides_is_no_rotation_and_does_not_shrink() -> None:
    angle = torch.tensor([1.2, -1.2, 0.4, -0.4])
    stretch = torch.tensor([[0.1, 0.0, 0.0]]).expand(4, 3)
    shift = torch.tensor([[0.2, 0.0], [0.0, 0.0], [0.0, 0.0], [-0.2, 0.4]])
    expected = torch.tensor([[1.1, 0.0, 0.0], [0.0, 1.1, 0.1]])
    torch.testing.assert_close(mean_pose(pose_maps(angle, stretch, shift)), expected)


def test_a_second_look_is_at_the_image_in_its_first_network() -> None:
    torch.manual_seed(0)
    network = PoseNetwork(1, refinements=1)
    torch.nn.init.normal_(network.pose.weight, std=0.1)
    x = torch.rand(3, 1, 32, 32)
    once = PoseNetwork(1)
    once.load_state_dict(network.state_dict())
    first = once.poses(x)
    expected = compose(first, once.poses(resample(x, first)))
    torch.testing.assert_close(network.poses(x), expected)
    assert not torch.allclose(network.poses(x), first, atol=1e-3)


def test_disagreement_is_the_share_of_variance_between_domains() -> None:
    torch.manual_seed(0)
    y = torch.tensor([0, 0, 4, 4, 0, 4, 4, 2])
    domain = torch.tensor([7, 7, 7, 7, 3, 3, 3, 3])  # class 2 is in one domain only
    x = torch.rand(8, 2, 32, 32, dtype=torch.float64)
    coarse = x.view(8, 2, 16, 2, 16, 2).mean((3, 5)).flatten(1)
    cells = {}
    for d in (3, 7):
        for c in (0, 2, 4):
            rows = [coarse[i] for i in range(8) if y[i] == c and domain[i] == d]
            if rows:
                cells[c, d] = sum(rows) / len(rows)
    everything = sum(cells.values()) / len(cells)
    within = whole = 0.0
    for (c, _), mean in cells.items():
        same = [m for (other, _), m in cells.items() if other == c]
        within += float((mean - sum(same) / len(same)).square().sum())
        whole += float((mean - everything).square().sum())
    assert domain_disagreement(x, y, domain).item() == pytest.approx(within / whole, rel=1e-9)


def test_domains_that_lie_alike_do_not_disagree_and_blank_images_do_no_harm() -> None:
    x = torch.rand(3, 1, 20, 20)
    y, domain = torch.arange(3).repeat(2), torch.arange(2).repeat_interleave(3)
    assert domain_disagreement(torch.cat([x, x]), y, domain) < 1e-9
    blank = torch.zeros(6, 1, 20, 20, requires_grad=True)
    domain_disagreement(blank, y, domain).backward()
    assert torch.isfinite(blank.grad).all()


def test_poses_learn_to_agree_without_labels_of_the_pose() -> None:
    torch.manual_seed(0)
    bars = torch.zeros(2, 1, 32, 32)
    bars[0, :, 6:26, 13:19] = 1
    bars[1, :, 4:12, 8:24] = 1
    cosine, sine = 0.866, 0.5  # 30 degrees
    turn = torch.tensor([[[cosine, -sine, 0.0], [sine, cosine, 0.0]]]).expand(2, 2, 3)
    x = torch.cat([bars, resample(bars, turn)])
    y, domain = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])
    network = PoseNetwork(1, refinements=1)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    before = domain_disagreement(network(x), y, domain).item()
    for _ in range(100):
        loss = domain_disagreement(network(x), y, domain)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3 * before
