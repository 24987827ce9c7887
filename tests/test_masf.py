"""MASF against small independent implementations."""

import copy

import pytest
import torch
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional as F

from peer_models import (
    DIM,
    as_episode,
    assert_gradient_of,
    feature_batch,
    images,
    on_features,
    on_images,
)
from solodg.algorithms.fast_weights import embed_with
from solodg.algorithms.masf import class_means, symmetric_kl, triplet_loss
from solodg.types import Batch


def plain_symmetric_kl(p_logits: torch.Tensor, q_logits: torch.Tensor) -> torch.Tensor:
    p, q = Categorical(logits=p_logits / 2), Categorical(logits=q_logits / 2)
    return (kl_divergence(p, q) + kl_divergence(q, p)) / 2


def plain_triplet(code: torch.Tensor, y: torch.Tensor, margin: float) -> torch.Tensor:
    terms = []
    distance = [[(a - b).square().sum() for b in code] for a in code]
    for i in range(len(y)):
        others = [distance[i][k] for k in range(len(y)) if y[k] != y[i]]
        for j in range(len(y)):
            if i != j and y[i] == y[j] and others:
                farther = [d for d in others if d > distance[i][j]]
                negative = min(farther) if farther else max(others)
                terms.append(torch.relu(margin + distance[i][j] - negative))
    return sum(terms) / len(terms)


def test_the_inner_step_is_a_step_of_sgd() -> None:
    masf = on_images("masf", inner_rate=0.3).train()
    stepped = copy.deepcopy(masf)
    x, y = images(8), torch.arange(8) % 4
    sgd = torch.optim.SGD(stepped.parameters(), lr=0.3)
    F.cross_entropy(stepped(x), y).backward()
    sgd.step()
    weights = masf.inner_step(F.cross_entropy(masf(x), y))
    expected = {n: p for n, p in stepped.named_parameters() if not n.startswith("metric")}
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name])


def test_the_inner_step_is_differentiated_through() -> None:
    masf = on_features("masf", inner_rate=0.5)
    batch = feature_batch()

    def after() -> torch.Tensor:
        weights = masf.inner_step(F.cross_entropy(masf(batch.x), batch.y))
        return weights["classifier.weight"].pow(3).sum()

    assert_gradient_of(after, masf.classifier.weight)


@pytest.mark.parametrize("tested", [0, 1, 2])
@pytest.mark.parametrize(("means", "leak"), [("fixed", 0.2), ("present", 0.01)])
def test_masf_is_that_of_a_plain_loop(means: str, leak: float, tested: int) -> None:
    """The authors' means are over domains and over all classes; theirs is the default."""
    chosen = {} if means == "fixed" else {"means": means, "leak": leak}
    masf = on_features("masf", inner_rate=0.5, metric_weight=0.3, **chosen)
    some = [0, 1, 2, 4, 5, 8, 9, 10, 16, 17, 18, 19, 20, 21, 22]  # 5, 3 and 7 of the domains
    batch = Batch(*(t[some] for t in feature_batch()))
    seed = next(s for s in range(99) if torch.manual_seed(s) and torch.randint(3, ()) == tested)
    torch.manual_seed(seed)
    losses = masf.losses(as_episode(batch, 8))
    trained = batch.domain != tested
    stepped = copy.deepcopy(masf)
    sgd = torch.optim.SGD(stepped.classifier.parameters(), lr=0.5)
    if means == "fixed":
        own = [batch.domain == d for d in {0, 1, 2} - {tested}]
        class_loss = sum(F.cross_entropy(stepped(batch.x[m]), batch.y[m]) for m in own) / 2
    else:
        class_loss = F.cross_entropy(stepped(batch.x[trained]), batch.y[trained])
    class_loss.backward()
    sgd.step()
    logits = stepped(batch.x)
    pairs = []
    for other in {0, 1, 2} - {tested}:
        classes = []
        for c in range(4):
            sides = [logits[(batch.domain == d) & (batch.y == c)] for d in (tested, other)]
            if all(len(side) for side in sides):
                classes.append(plain_symmetric_kl(*(side.mean(0) for side in sides)))
        assert 0 < len(classes) < 4
        pairs.append(sum(classes) / (4 if means == "fixed" else len(classes)))
    alignment = sum(pairs) / 2
    code = batch.x[:, :DIM]
    for layer in (masf.metric[0], masf.metric[2]):
        code = code @ layer.weight.T + layer.bias
        code = torch.where(code > 0, code, leak * code)
    metric = plain_triplet(code, batch.y, 10.0)
    torch.testing.assert_close(losses["class"], class_loss.detach())
    torch.testing.assert_close(losses["alignment"], alignment.detach())
    torch.testing.assert_close(losses["metric"], metric.detach())
    torch.testing.assert_close(losses["loss"], class_loss + alignment + 0.3 * metric)


def test_masfs_gradient_is_that_of_finite_differences() -> None:
    masf = on_features("masf", inner_rate=0.5, metric_weight=0.3)
    whole = as_episode(feature_batch(), 16)

    def loss() -> torch.Tensor:
        torch.manual_seed(4)  # the same domain is tested
        return masf.losses(whole)["loss"]

    assert_gradient_of(loss, masf.classifier.weight)


def test_symmetric_kl_is_that_of_torch_and_leaves_absent_classes_out() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 4, 4, dtype=torch.float64).unbind()
    known = torch.tensor([True, True, False, True])
    others = torch.tensor([False, True, True, True])
    expected = (plain_symmetric_kl(a[1], b[1]) + plain_symmetric_kl(a[3], b[3])) / 2
    torch.testing.assert_close(symmetric_kl(a, known, b, others, temperature=2.0), expected)
    assert symmetric_kl(a, known, b, ~known, temperature=2.0) == 0  # no class in common
    means, present = class_means(a, torch.tensor([2, 0, 2, 2]), 4)
    torch.testing.assert_close(means[2], (a[0] + a[2] + a[3]) / 3)
    assert present.tolist() == [True, False, True, False]


@pytest.mark.parametrize("margin", [0.1, 3.0])
def test_the_triplet_loss_takes_semi_hard_negatives(margin: float) -> None:
    torch.manual_seed(0)
    code, y = torch.randn(14, 3, dtype=torch.float64), torch.randint(0, 3, (14,))
    torch.testing.assert_close(triplet_loss(code, y, margin), plain_triplet(code, y, margin))


@pytest.mark.parametrize("y", [[1, 1, 1], [0, 1, 2], [0]])
def test_the_triplet_loss_without_a_triplet_is_zero(y: list[int]) -> None:
    code = torch.randn(len(y), 3, requires_grad=True)
    loss = triplet_loss(code, torch.tensor(y), 1.0)
    loss.backward()
    assert loss == 0
    assert torch.equal(code.grad, torch.zeros_like(code))


def test_other_weights_leave_the_backbone_as_it_was() -> None:
    backbone = on_images("erm").backbone.train()
    before = copy.deepcopy(backbone.state_dict())
    twice = {name: 2 * weight for name, weight in backbone.named_parameters()}
    other = copy.deepcopy(backbone)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter *= 2
    torch.testing.assert_close(embed_with(backbone, twice, images(4)), other.embed(images(4)))
    assert all(torch.equal(v, before[k]) for k, v in backbone.state_dict().items())
