"""Group DRO and V-REx against plain loops over several steps."""

import numpy as np
import pytest
import torch

from peer_models import as_episode, on_features, uneven_batch
from solodg.types import Batch


def plain_losses(algorithm, batch: Batch) -> dict[int, float]:
    """The mean cross-entropy of each domain, by hand."""
    weight = algorithm.classifier.weight.detach().numpy()
    bias = algorithm.classifier.bias.detach().numpy()
    found: dict[int, list[float]] = {}
    for row, y, domain in zip(*(t.detach().numpy() for t in batch), strict=True):
        scores = weight @ row[: weight.shape[1]] + bias
        value = np.log(np.exp(scores).sum()) - scores[y]
        found.setdefault(int(domain), []).append(value)
    return {domain: sum(values) / len(values) for domain, values in sorted(found.items())}


def gradient(losses: dict, algorithm) -> np.ndarray:
    (found,) = torch.autograd.grad(losses["loss"], algorithm.classifier.weight)
    return found.numpy()


def domain_gradient(algorithm, batch: Batch, domain: int) -> np.ndarray:
    """Of the mean cross-entropy of one domain by the classifier's weight, by the formula."""
    own = batch.domain == domain
    z = batch.x[own, : algorithm.classifier.in_features]
    residual = algorithm(batch.x[own]).softmax(1) - torch.eye(4).double()[batch.y[own]]
    return (residual.T @ z / own.sum()).detach().numpy()


@pytest.mark.parametrize("eta", [0.01, 2.0])
def test_group_dro_is_the_plain_loop(eta: float) -> None:
    algorithm = on_features("group_dro", eta=eta)
    q = dict.fromkeys(range(3), 1 / 3)
    for seed in range(4):
        batch = uneven_batch(seed=seed)
        each = plain_losses(algorithm, batch)
        q = {d: q[d] * np.exp(eta * each[d]) for d in q}
        q = {d: value / sum(q.values()) for d, value in q.items()}
        losses = algorithm.losses(as_episode(batch, 9))
        expected = sum(q[d] * each[d] for d in q)
        assert losses["loss"].item() == pytest.approx(expected, rel=1e-12)
        assert losses["largest_weight"].item() == pytest.approx(max(q.values()), rel=1e-12)
        by_weight = sum(q[d] * domain_gradient(algorithm, batch, d) for d in q)  # q is a constant
        np.testing.assert_allclose(gradient(losses, algorithm), by_weight, atol=1e-13)


def test_a_domain_without_images_keeps_its_weight() -> None:
    algorithm = on_features("group_dro", eta=0.5)
    batch = uneven_batch()
    rest = Batch(*(t[batch.domain != 1] for t in batch))
    each = plain_losses(algorithm, rest)
    grown = {d: np.exp(0.5 * each.get(d, 0.0)) for d in range(3)}
    losses = algorithm.losses(as_episode(rest, 8))
    expected = sum(grown[d] * each[d] for d in each) / sum(grown.values())
    assert losses["loss"].item() == pytest.approx(expected, rel=1e-12)


def test_a_large_rate_over_many_steps_stays_finite() -> None:
    algorithm = on_features("group_dro", eta=500.0)
    for _ in range(20):
        value = algorithm.losses(as_episode(uneven_batch(), 9))["loss"]
    worst = max(plain_losses(algorithm, uneven_batch()).values())
    assert value.item() == pytest.approx(worst, rel=1e-9)


def test_vrex_is_the_plain_formula_before_and_after_annealing() -> None:
    algorithm = on_features("vrex", penalty_weight=7.0, anneal_steps=2)
    for step in range(4):
        batch = uneven_batch(seed=step)
        each = plain_losses(algorithm, batch)
        mean = sum(each.values()) / 3
        variance = sum((value - mean) ** 2 for value in each.values()) / 3
        weight = 1.0 if step < 2 else 7.0
        losses = algorithm.losses(as_episode(batch, 9))
        assert losses["loss"].item() == pytest.approx(mean + weight * variance, rel=1e-12)
        expected = sum(
            (1 / 3 + weight * 2 / 3 * (each[d] - mean)) * domain_gradient(algorithm, batch, d)
            for d in each
        )
        np.testing.assert_allclose(gradient(losses, algorithm), expected, atol=1e-13)
