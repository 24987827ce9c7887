"""Fishr against per-image gradients by autograd, over several steps."""

import pytest
import torch
from torch.nn import functional as F

from peer_models import DIM, as_episode, on_features, uneven_batch
from solodg.algorithms.fishr import gradient_variance
from solodg.types import Batch


def image_gradients(linear, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One image at a time: (B, C * D + C), differentiable."""
    rows = []
    for i in range(len(z)):
        loss = F.cross_entropy(linear(z[i : i + 1]), y[i : i + 1])
        parts = torch.autograd.grad(loss, (linear.weight, linear.bias), create_graph=True)
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


class PlainFishr:
    """The penalty with a moving average of each domain in a dictionary."""

    def __init__(self, ema: float) -> None:
        self.ema = ema
        self.kept: dict[int, torch.Tensor] = {}

    def penalty(self, linear, batch: Batch) -> torch.Tensor:
        unscaled = []
        for d in range(3):
            own = batch.domain == d
            gradients = image_gradients(linear, batch.x[own][:, :DIM], batch.y[own])
            variance = gradients.var(0, correction=0)
            before = self.kept.get(d, torch.zeros_like(variance))
            mean = self.ema * before + (1 - self.ema) * variance
            self.kept[d] = mean.detach()
            unscaled.append(mean / (1 - self.ema))
        centre = sum(unscaled) / 3
        return sum(((u - centre) ** 2).mean() for u in unscaled) / 3


def test_fishr_is_the_penalty_on_the_variance_of_per_image_gradients() -> None:
    algorithm = on_features("fishr", penalty_weight=50.0, anneal_steps=1, ema=0.8)
    plain = PlainFishr(0.8)
    for step in range(3):
        batch = uneven_batch(requires_grad=True, seed=step)
        losses = algorithm.losses(as_episode(batch, 9))
        expected = F.cross_entropy(algorithm(batch.x), batch.y)
        penalty = plain.penalty(algorithm.classifier, batch)
        assert losses["penalty"].item() == pytest.approx(penalty.item(), rel=1e-10)
        expected = expected + (0.0 if step < 1 else 50.0) * penalty
        torch.testing.assert_close(losses["loss"], expected)
        wanted = (batch.x, algorithm.classifier.weight, algorithm.classifier.bias)
        ours = torch.autograd.grad(losses["loss"], wanted)
        torch.testing.assert_close(ours, torch.autograd.grad(expected, wanted))


def test_equal_domains_have_no_penalty_and_one_image_has_no_variance() -> None:
    algorithm, batch = on_features("fishr"), uneven_batch()
    one = Batch(*(t[:8] for t in batch))
    twice = Batch(
        *(torch.cat([t, t]) for t in one[:2]), torch.arange(2).repeat_interleave(8)
    )  # fmt: skip
    assert algorithm.losses(as_episode(twice, 9))["penalty"].item() == pytest.approx(0, abs=1e-20)
    z = batch.x[:1, :DIM]
    variance = gradient_variance(z, algorithm.classifier(z), batch.y[:1])
    torch.testing.assert_close(variance, torch.zeros_like(variance))


def test_a_decay_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="ema must"):
        on_features("fishr", ema=1.0)
