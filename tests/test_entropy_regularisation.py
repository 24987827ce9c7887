"""Entropy regularisation against small independent implementations."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from peer_models import (
    DIM,
    as_episode,
    feature_batch,
    on_features,
)
from solodg.algorithms.entropy_regularisation import reverse_gradient
from solodg.types import Batch


def test_gradients_come_back_reversed_and_scaled() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    same = reverse_gradient(x, 0.25)
    assert torch.equal(same, x)
    (same * torch.arange(6.0).reshape(3, 2)).sum().backward()
    assert torch.equal(x.grad, -0.25 * torch.arange(6.0).reshape(3, 2))


def test_each_term_reaches_its_parameters_with_its_sign_and_weight() -> None:
    algorithm = on_features("entropy_regularisation")
    batch = feature_batch(requires_grad=True)
    some = torch.tensor([0, 1, 2, 4, 5, 8, 9, 10, 16, 17, 18, 19, 20, 21, 22])  # 5, 3 and 7
    batch = Batch(batch.x.detach()[some].requires_grad_(), batch.y[some], batch.domain[some])
    algorithm.losses(as_episode(batch, 8))["loss"].backward()

    plain = copy.deepcopy(algorithm)
    z = batch.x.detach()[:, :DIM].requires_grad_()
    rows = range(len(z))

    def by(layer: nn.Linear, image: int, domain: int) -> torch.Tensor:
        logits = layer.weight[4 * domain : 4 * domain + 4] @ z[image]
        logits = logits + layer.bias[4 * domain : 4 * domain + 4]
        return F.cross_entropy(logits, batch.y[image])

    own = batch.domain.tolist()
    share = [1 / (3 * own.count(d)) for d in own]  # every domain counts alike
    told = F.cross_entropy(plain.discriminator(z), batch.domain, reduction="none")
    terms = {
        "class": F.cross_entropy(plain.classifier(z), batch.y),
        "discriminator": sum(share[i] * told[i] for i in rows),
        "fitted": sum(share[i] * by(plain.fitted, i, own[i]) for i in rows),
        "across": sum(
            share[i] / 2 * by(plain.fitted, i, d) for i in rows for d in {0, 1, 2} - {own[i]}
        ),
        "rivals": sum(share[i] * by(plain.rivals, i, own[i]) for i in rows),
    }
    weights = {"class": 1, "discriminator": -0.1, "fitted": 0, "across": 0.05, "rivals": -0.001}
    expected = sum(
        weights[name] * torch.autograd.grad(term, z, retain_graph=True)[0]
        for name, term in terms.items()
    )
    torch.testing.assert_close(batch.x.grad[:, :DIM], expected)
    for name in ("discriminator", "fitted", "rivals"):  # what they learn is their own term, whole
        theirs = torch.autograd.grad(terms[name], getattr(plain, name).parameters())
        for parameter, gradient in zip(getattr(algorithm, name).parameters(), theirs, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
