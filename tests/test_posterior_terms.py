"""Logit variance and divergence of a classifier per image, against the plain form."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from solodg.algorithms.solo import posterior_terms as module
from solodg.algorithms.solo.gaussian import Gaussian
from solodg.algorithms.solo.posterior_terms import posterior_terms
from solodg.algorithms.solo.writer import GaussianWriter


@pytest.fixture(params=[1, 200, 10**6])
def piece_bytes(request, monkeypatch) -> None:
    """One image a piece, a few, all: the same numbers."""
    monkeypatch.setitem(module._PIECE_BYTES, "cpu", request.param)


def given(batch: int = 5, classes: int = 3, hidden: int = 4, dim: int = 6):
    torch.manual_seed(0)
    writer = GaussianWriter(dim, hidden).double()
    tensors = {
        "hidden": torch.rand(batch, classes, hidden, dtype=torch.float64),
        "z": torch.randn(batch, dim, dtype=torch.float64),
        "mean": torch.randn(classes, dim, dtype=torch.float64),
        "scale": torch.rand(classes, dim, dtype=torch.float64) + 0.2,
    }
    return writer, {name: t.requires_grad_() for name, t in tensors.items()}


def test_it_is_the_plain_form(piece_bytes) -> None:
    writer, t = given()
    terms = posterior_terms(t["hidden"], t["z"], writer, Gaussian(t["mean"], t["scale"]))
    mean, scale = writer.mean(t["hidden"]), writer.scale(t["hidden"])
    plain = kl_divergence(Normal(mean, scale), Normal(t["mean"], t["scale"])).sum(-1)
    torch.testing.assert_close(terms.kl, plain)
    variance = torch.stack([(scale[:, c] ** 2 * t["z"] ** 2).sum(-1) for c in range(3)], 1)
    torch.testing.assert_close(terms.variance, variance)


def test_gradients_are_those_of_the_plain_form(piece_bytes) -> None:
    writer, t = given()
    weights = torch.randn(2, 5, 3, dtype=torch.float64)
    inputs = [*t.values(), *writer.mean.parameters(), *writer.pre_scale.parameters()]
    terms = posterior_terms(t["hidden"], t["z"], writer, Gaussian(t["mean"], t["scale"]))
    ours = torch.autograd.grad((weights[0] * terms.variance + weights[1] * terms.kl).sum(), inputs)
    scale = writer.scale(t["hidden"])
    variance = torch.einsum("bcd,bd->bc", scale**2, t["z"] ** 2)
    q, p = Normal(writer.mean(t["hidden"]), scale), Normal(t["mean"], t["scale"])
    loss = (weights[0] * variance + weights[1] * kl_divergence(q, p).sum(-1)).sum()
    for found, expected in zip(ours, torch.autograd.grad(loss, inputs), strict=True):
        torch.testing.assert_close(found, expected)


def test_gradients_pass_finite_differences() -> None:
    writer, t = given(batch=2, classes=2, hidden=3, dim=3)

    def function(hidden, z, mean, scale):
        return posterior_terms(hidden, z, writer, Gaussian(mean, scale))

    assert torch.autograd.gradcheck(function, tuple(t.values()))


def test_half_precision_embeddings_do_not_overflow() -> None:
    writer, t = given()
    z = torch.full((5, 6), 300.0, dtype=torch.float16)  # its square is beyond float16
    terms = posterior_terms(t["hidden"], z, writer, Gaussian(t["mean"], t["scale"]))
    assert torch.isfinite(terms.variance).all()
