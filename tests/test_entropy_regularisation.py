"""Entropy regularisation against small independent implementations."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from peer_models import (
    DIM,
    as_episode,
    feature_batch,
    on_features,
    on_images,
)
from solodg.algorithms.entropy_regularisation import reverse_gradient
from solodg.data import DATASETS, Loading
from solodg.runs.build import make_algorithm, make_backbone
from solodg.runs.config import RunConfig
from solodg.runs.defaults import resolve
from solodg.runs.fit import Schedule, build_optimizer
from solodg.types import Batch


def test_gradients_come_back_reversed_and_scaled() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    same = reverse_gradient(x, 0.25)
    assert torch.equal(same, x)
    (same * torch.arange(6.0).reshape(3, 2)).sum().backward()
    assert torch.equal(x.grad, -0.25 * torch.arange(6.0).reshape(3, 2))


def by_class(losses: dict[int, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    """The mean over classes of the mean loss of the images of each, by number of the image."""
    classes = {int(y[i]) for i in losses}
    means = []
    for c in classes:
        own = [loss for i, loss in losses.items() if y[i] == c]
        means.append(sum(own) / len(own))
    return sum(means) / len(means)


@pytest.mark.parametrize("weighting", ["data", "episode"])
def test_each_term_reaches_its_parameters_with_its_sign_and_weight(weighting: str) -> None:
    """The authors weigh domains by their training images, and classes alike: "data"."""
    algorithm = on_features("entropy_regularisation", weighting=weighting)
    algorithm.domain_images = sizes = (50, 10, 30)
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
    absent = [{0, 1, 2, 3} - {int(batch.y[i]) for i in rows if own[i] == d} for d in range(3)]
    assert absent[2] == {3}
    assert absent[1]
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
    if weighting == "data":
        weight = [1 / sizes[d] for d in own]
        others = [[i for i in rows if own[i] != d] for d in range(3)]
        members = [[i for i in rows if own[i] == d] for d in range(3)]

        def balanced(layer: nn.Linear, images: list[list[int]]) -> torch.Tensor:
            each = [by_class({i: by(layer, i, d) for i in images[d]}, batch.y) for d in range(3)]
            return sum(each) / 3

        terms |= {
            "discriminator": sum(w * t for w, t in zip(weight, told, strict=True)) / sum(weight),
            "fitted": balanced(plain.fitted, members),
            "across": balanced(plain.fitted, others),
            "rivals": balanced(plain.rivals, members),
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


@pytest.mark.parametrize("domain_rate", [0.1, 1.0])
def test_classifiers_of_domains_learn_at_a_rate_of_their_own(domain_rate: float) -> None:
    algorithm = on_images("entropy_regularisation", domain_rate=domain_rate)
    optimizer = build_optimizer(algorithm, Schedule(1, 1, 1e-2, 1e-4, 0.0, 0))
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert len(rates) == len(list(algorithm.parameters()))
    for name, parameter in algorithm.named_parameters():
        part = name.split(".")[0]
        expected = {"fitted": domain_rate * 1e-2, "rivals": domain_rate * 1e-2, "backbone": 1e-4}
        assert rates[id(parameter)] == expected.get(part, 1e-2), name
    groups = 2 if domain_rate == 1.0 else 4  # as before: the optimiser of an old run continues
    assert len(optimizer.param_groups) == groups


def test_training_tells_the_method_how_many_images_a_domain_has() -> None:
    source = DATASETS["toy"].load(Loading(Path("nowhere"), 32, 3)).leave_out(["sky"])
    kept = np.flatnonzero((source.train.domains != 1) | (np.arange(len(source.train)) % 3 == 0))
    fewer = source.mapped(lambda part: part.subset(kept) if part is source.train else part)
    config = resolve(
        RunConfig(dataset="toy", algorithm="entropy_regularisation", backbone="small_cnn")
    )
    algorithm = make_algorithm(config, make_backbone(config), fewer)
    counts = [int((fewer.train.domains == d).sum()) for d in range(3)]
    assert len(set(counts)) > 1
    assert algorithm.domain_images == tuple(counts)
