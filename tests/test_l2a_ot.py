"""L2A-OT against small independent implementations."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from peer_models import (
    as_episode,
    images,
    on_images,
)
from solodg.algorithms.l2a_ot import Generator, sinkhorn_divergence
from solodg.types import Batch


def plain_transport(a: np.ndarray, b: np.ndarray, epsilon: float, rounds: int) -> float:
    """Cost of the plan plus epsilon times its divergence from independence."""
    cost = np.array([[((p - q) ** 2).sum() / 2 for q in b] for p in a])
    kernel = np.exp(-cost / epsilon)
    v = np.ones(len(b))
    for _ in range(rounds):
        u = 1 / (kernel @ v / len(b))
        v = 1 / (kernel.T @ u / len(a))
    plan = u[:, None] * kernel * v[None] / (len(a) * len(b))
    return float((plan * cost).sum() + epsilon * (plan * np.log(plan * len(a) * len(b))).sum())


def test_the_sinkhorn_divergence_is_that_of_a_plain_loop() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(7, 3)), generator.normal(size=(5, 3)) + 0.5
    across, left, right = (plain_transport(*pair, 0.5, 500) for pair in ((a, b), (a, a), (b, b)))
    ours = sinkhorn_divergence(torch.from_numpy(a), torch.from_numpy(b), 0.5, 500)
    assert ours.item() == pytest.approx(across - (left + right) / 2, abs=1e-8)


def test_the_sinkhorn_divergence_is_zero_for_equal_clouds_and_grows_with_a_shift() -> None:
    torch.manual_seed(0)
    a = torch.randn(9, 4, dtype=torch.float64)
    values = [sinkhorn_divergence(a, a + shift).item() for shift in (0.0, 0.2, 0.5, 1.0, 3.0)]
    assert abs(values[0]) < 1e-12
    assert values == sorted(values)
    assert values[-1] == pytest.approx(4 * 9 / 2, rel=0.05)  # half the squared shift
    one = sinkhorn_divergence(a[:1], a[1:2])  # a domain may have one image
    torch.testing.assert_close(one, (a[0] - a[1]).square().sum() / 2)


def test_the_generator_makes_images_by_domain() -> None:
    torch.manual_seed(0)
    generator = Generator(3, 6).double()
    x = images(2)
    made = [generator(x, torch.tensor([d, d])) for d in (0, 5)]
    for image in made:
        assert image.shape == x.shape
        assert image.min() >= 0
        assert image.max() <= 1
    assert (made[0] - made[1]).abs().max() > 1e-3


def test_novelty_trains_the_generator_alone_and_away_from_the_real_images() -> None:
    algorithm = on_images("l2a_ot", margin=5.0).train()
    batch = Batch(images(7), torch.arange(7) % 4, torch.tensor([0, 0, 0, 1, 2, 2, 2]))
    before = copy.deepcopy(algorithm.backbone.state_dict())

    def novelty() -> torch.Tensor:
        novel = algorithm.generator(batch.x, batch.domain + 3)
        return algorithm._novelty(batch, novel)

    first = novelty()
    first.backward()
    assert all(p.grad is None for p in algorithm.backbone.parameters())
    assert all(torch.equal(v, before[k]) for k, v in algorithm.backbone.state_dict().items())
    with torch.no_grad():
        for parameter in algorithm.generator.parameters():
            parameter -= 1e-2 * parameter.grad
    assert novelty() < first  # margin - distance: the distance has grown
    algorithm.margin = 0.0
    assert novelty() == 0  # far enough: nothing to gain


def test_the_loss_of_l2a_ot_is_the_weighted_sum_of_its_terms() -> None:
    algorithm = on_images("l2a_ot", margin=2.0, novelty_weight=0.7, cycle_weight=3.0).eval()
    batch = Batch(images(6), torch.arange(6) % 4, torch.arange(6) // 2)
    losses = algorithm.losses(as_episode(batch, 4))
    novel = algorithm.generator(batch.x, batch.domain + 3)
    cycle = (algorithm.generator(novel, batch.domain) - batch.x).abs().mean()
    real, made = (F.normalize(algorithm.embed(x)) for x in (batch.x, novel))
    far = sum(sinkhorn_divergence(real[i : i + 2], made[i : i + 2]) for i in (0, 2, 4)) / 3
    classes = sum(F.cross_entropy(algorithm(x), batch.y) for x in (batch.x, novel)) / 2
    torch.testing.assert_close(losses["loss"], classes + 0.7 * (2 - far) + 3 * cycle)


def test_the_generator_learns_from_the_classes_of_what_it_makes() -> None:
    algorithm = on_images("l2a_ot", novelty_weight=0.0, cycle_weight=0.0).train()
    batch = Batch(images(6), torch.arange(6) % 4, torch.arange(6) // 2)
    algorithm.losses(as_episode(batch, 4))["loss"].backward()
    assert all(p.grad.abs().max() > 0 for p in algorithm.generator.parameters())
