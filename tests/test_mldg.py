"""MLDG against small independent implementations."""

import copy

import numpy as np
import pytest
import torch

from peer_models import (
    kind_on_images,
    random_episode,
)
from solodg.algorithms.mldg import MLDG
from solodg.models.extractor import ReadyFeatures
from solodg.types import Episode


def plain_loss_and_gradient(theta: np.ndarray, x: np.ndarray, y: np.ndarray):
    """Softmax regression by hand; theta is (3, D + 1), the bias last."""
    inputs = np.concatenate([x, np.ones((len(x), 1))], 1)
    logits = inputs @ theta.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    p[np.arange(len(y)), y] -= 1
    return loss, p.T @ inputs / len(y)


def summed(theta: np.ndarray, parts: list[tuple[np.ndarray, np.ndarray]]):
    """Loss and gradient, summed over parts of the data."""
    each = [plain_loss_and_gradient(theta, x, y) for x, y in parts]
    return sum(loss for loss, _ in each), sum(gradient for _, gradient in each)


def unequal_episode() -> Episode:
    """Sources of five and four images, of which the second lacks class 2; six of the target."""
    source, target = random_episode((6,), seed=3)[:2]
    y = torch.where(source.domain == 1, source.y % 2, source.y)
    assert set(y[source.domain == 0].tolist()) == {0, 1, 2}
    scaled = [b._replace(x=4 * b.x.double() - 2) for b in (source._replace(y=y), target)]
    return Episode(*scaled)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"second_order": False}, {"meta_train": "mean", "alpha": 0.7, "beta": 1.3}],
    ids=["as the authors", "first order", "mean over images"],
)
def test_mldgs_gradient_is_that_of_finite_differences(arguments: dict) -> None:
    """The authors sum the mean losses of the meta-train domains; alpha 0.5, beta 1."""
    torch.manual_seed(0)
    algorithm = MLDG(ReadyFeatures(4, 2), num_classes=3, **arguments).double()
    alpha, beta = arguments.get("alpha", 0.5), arguments.get("beta", 1.0)
    second_order = arguments.get("second_order", True)
    source, target = unequal_episode()[:2]
    losses = algorithm.losses(Episode(source, target))
    losses["loss"].backward()
    linear = algorithm.classifier
    theta = torch.cat([linear.weight, linear.bias[:, None]], 1).detach().numpy()
    ours = torch.cat([linear.weight.grad, linear.bias.grad[:, None]], 1).numpy()
    (xs, ys), (xt, yt) = ((b.x[:, :4].numpy(), b.y.numpy()) for b in (source, target))
    parts = [(xs, ys)] if "meta_train" in arguments else [(xs[:5], ys[:5]), (xs[5:], ys[5:])]
    fixed = summed(theta, parts)[1]

    def objective(at: np.ndarray) -> float:
        first, gradient = summed(at, parts)
        step = gradient if second_order else fixed
        return first + beta * plain_loss_and_gradient(at - alpha * step, xt, yt)[0]

    assert losses["loss"].item() == pytest.approx(objective(theta), rel=1e-12)
    expected = np.zeros_like(theta)
    for place in np.ndindex(*theta.shape):
        shift = np.zeros_like(theta)
        shift[place] = 1e-5
        expected[place] = (objective(theta + shift) - objective(theta - shift)) / 2e-5
    np.testing.assert_allclose(ours, expected, atol=1e-9)


def test_the_sum_is_the_mean_with_another_alpha_and_beta() -> None:
    one = random_episode((6,), (4, 4, 4, 5))  # three meta-source domains
    losses = []
    for arguments in ({}, {"meta_train": "mean", "alpha": 0.5 * 3, "beta": 1 / 3}):
        torch.manual_seed(0)
        algorithm = MLDG(ReadyFeatures(4, 2), num_classes=3, **arguments)
        losses.append(algorithm.losses(one)["loss"])
    torch.testing.assert_close(losses[0], 3 * losses[1])


def test_mldg_leaves_weights_and_the_statistics_of_its_inner_step_behind() -> None:
    algorithm = kind_on_images(MLDG).train()
    plain = copy.deepcopy(algorithm)
    one = random_episode((3, 32, 32))
    algorithm.losses(one)["loss"].backward()
    with torch.no_grad():
        plain(one.source.x)
    for (name, own), other in zip(
        algorithm.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert torch.equal(own, other), name


def test_mldg_trains_what_may_be_trained() -> None:
    algorithm = kind_on_images(MLDG).train()
    algorithm.backbone.train_last(1)
    algorithm.losses(random_episode((3, 32, 32)))["loss"].backward()
    trained = {name.split(".")[-3] for name, p in algorithm.backbone.named_parameters()
               if p.grad is not None}  # fmt: skip
    assert trained == {"3"}
