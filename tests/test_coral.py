"""CORAL against small independent implementations."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from peer_models import random_episode
from solodg.algorithms import ALGORITHMS
from solodg.algorithms.coral import moment_distance
from solodg.models.extractor import ReadyFeatures
from solodg.types import Episode


def plain_distance(z: np.ndarray, domain: np.ndarray) -> float:
    """Loops over pairs, coordinates and images."""
    total, pairs, dim = 0.0, 0, z.shape[1]
    numbers = sorted(set(domain.tolist()))
    for i, d in enumerate(numbers):
        for e in numbers[i + 1 :]:
            moments = []
            for part in (z[domain == d], z[domain == e]):
                mean = [sum(row[j] for row in part) / len(part) for j in range(dim)]
                cov = [
                    [
                        sum((row[j] - mean[j]) * (row[k] - mean[k]) for row in part)
                        / (len(part) - 1)
                        for k in range(dim)
                    ]
                    for j in range(dim)
                ]
                moments.append((np.array(mean), np.array(cov)))
            (m1, c1), (m2, c2) = moments
            total += ((m1 - m2) ** 2).sum() / dim + ((c1 - c2) ** 2).sum() / dim**2
            pairs += 1
    return total / pairs


def test_corals_distance_is_that_of_a_plain_loop() -> None:
    generator = np.random.default_rng(0)
    z = generator.normal(size=(14, 5)) * generator.uniform(0.5, 3, size=5)
    domain = np.array([2] * 4 + [0] * 7 + [5] * 3)
    mixed = generator.permutation(14)
    ours = moment_distance(torch.from_numpy(z[mixed]), torch.from_numpy(domain[mixed]))
    assert ours.item() == pytest.approx(plain_distance(z, domain), rel=1e-12)


def test_corals_distance_is_zero_for_equal_domains_and_defined_for_one_image() -> None:
    z = torch.randn(6, 4, dtype=torch.float64)
    twice = torch.cat([z, z]), torch.arange(2).repeat_interleave(6)
    assert moment_distance(*twice).item() == pytest.approx(0, abs=1e-20)
    alone = moment_distance(z, torch.tensor([0] * 5 + [1]))
    torch.testing.assert_close(alone, F.mse_loss(z[:5].mean(0), z[5]))


def test_coral_adds_the_distance_by_gamma() -> None:
    torch.manual_seed(0)
    algorithm = ALGORITHMS["coral"](ReadyFeatures(4, 2), num_classes=3, gamma=0.3).double()
    source, target = (b._replace(x=b.x.double()) for b in random_episode((6,))[:2])
    whole = Episode(source, target)
    z, domain = whole.merged.x[:, :4], whole.merged.domain
    expected = F.cross_entropy(algorithm.classifier(z), whole.merged.y).item()
    expected += 0.3 * plain_distance(z.numpy(), domain.numpy())
    assert algorithm.losses(whole)["loss"].item() == pytest.approx(expected, rel=1e-12)
