"""masf, entropy_regularisation, dson, da_erm, l2a_ot against small independent implementations."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional as F

from solodg.adapters import ADAPTERS
from solodg.algorithms import build_algorithm
from solodg.algorithms.da_erm import DAERM
from solodg.algorithms.dson import DomainNorm, images_of
from solodg.algorithms.entropy_regularisation import reverse_gradient
from solodg.algorithms.fast_weights import embed_with
from solodg.algorithms.l2a_ot import Generator, sinkhorn_divergence
from solodg.algorithms.masf import class_means, symmetric_kl, triplet_loss
from solodg.data.transforms import to_unit
from solodg.errors import UserError
from solodg.models.backbones import build_backbone
from solodg.models.extractor import ReadyFeatures
from solodg.runs import checkpoint
from solodg.runs.build import inputs, load_dataset, open_source
from solodg.runs.config import Machine, RunConfig, resolve
from solodg.runs.evaluate import evaluate_run
from solodg.runs.train import train_run
from solodg.types import Batch, Episode

DIM, STYLE = 6, 2


def on_features(name: str, **arguments):
    """On ready features: the gradient of the input is that of the embedding."""
    torch.manual_seed(0)
    backbone = ReadyFeatures(DIM, STYLE)
    return build_algorithm(name, backbone, num_classes=4, num_domains=3, **arguments).double()


def on_images(name: str, backbone: str = "small_cnn", **arguments):
    torch.manual_seed(0)
    built = build_backbone(backbone, channels=3, image_size=32)
    return build_algorithm(name, built, num_classes=4, num_domains=3, **arguments).double()


def images(count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, 32, 32, generator=generator, dtype=torch.float64)


def as_episode(batch: Batch, start: int) -> Episode:
    return Episode(Batch(*(t[:start] for t in batch)), Batch(*(t[start:] for t in batch)), 1)


def feature_batch(count: int = 24, requires_grad: bool = False) -> Batch:
    """Domain 2 lacks class 3."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, DIM + STYLE, generator=generator, dtype=torch.float64)
    domain, y = torch.arange(count) // (count // 3), torch.arange(count) % 4
    return Batch(x.requires_grad_(requires_grad), torch.where(domain == 2, y % 3, y), domain)


# MASF


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


def assert_gradient_of(value: Callable[[], torch.Tensor], weight: nn.Parameter) -> None:
    """By finite differences at some places."""
    (gradient,) = torch.autograd.grad(value(), weight)
    for index in ((0, 0), (2, 5), (3, 1)):
        values = []
        for step in (1e-5, -2e-5):
            with torch.no_grad():
                weight[index] += step
            values.append(value().item())
        with torch.no_grad():
            weight[index] += 1e-5
        assert gradient[index].item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


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


def test_masf_is_that_of_a_plain_loop() -> None:
    masf = on_features("masf", inner_rate=0.5, metric_weight=0.3)
    batch = feature_batch()
    torch.manual_seed(4)
    tested = int(torch.randint(3, ()))
    torch.manual_seed(4)
    losses = masf.losses(as_episode(batch, 16))
    trained = batch.domain != tested
    stepped = copy.deepcopy(masf)
    sgd = torch.optim.SGD(stepped.classifier.parameters(), lr=0.5)
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
        pairs.append(sum(classes) / len(classes))
    alignment = sum(pairs) / 2
    metric = plain_triplet(stepped.metric(batch.x[:, :DIM]), batch.y, 10.0)
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


# Entropy regularisation


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


# DSON


def random_norm() -> DomainNorm:
    torch.manual_seed(0)
    norm = DomainNorm(nn.BatchNorm2d(5).double(), 4)
    for tensor in (norm.weight, norm.bias, norm.mix, norm.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    return norm


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("pixels", [1, 3])
def test_statistics_are_a_mix_of_batch_and_instance_for_each_domain(training, pixels) -> None:
    """Domain 1 has a single image, domain 3 none."""
    norm = random_norm().train(training)
    domain = np.array([0, 2, 0, 1, 2, 0])
    x = torch.randn(6, 5, pixels, pixels, dtype=torch.float64) + 1
    before = {name: value.clone().numpy() for name, value in norm.state_dict().items()}
    with images_of(torch.from_numpy(domain)):
        ours = norm(x).detach().numpy()
    values = x.numpy()
    expected = np.empty_like(values)
    for n in range(6):
        d = domain[n]
        w = 1 / (1 + math.exp(-before["mix"][d]))
        for c in range(5):
            batch = values[domain == d][:, c]
            mean, var = before["running_mean"][d, c], before["running_var"][d, c]
            if training:
                mean, var = batch.mean(), batch.var()
            mean = w * mean + (1 - w) * values[n, c].mean()
            var = w * var + (1 - w) * values[n, c].var()
            normalised = (values[n, c] - mean) / math.sqrt(var + 1e-5)
            expected[n, c] = before["weight"][d, c] * normalised + before["bias"][d, c]
    np.testing.assert_allclose(ours, expected, atol=1e-10)
    for d in range(4):
        batch = values[domain == d].transpose(1, 0, 2, 3).reshape(5, -1)  # (C, values)
        mean, var = before["running_mean"][d], before["running_var"][d]
        if training and batch.size:
            unbiased = batch.var(1, ddof=1 if batch.shape[1] > 1 else 0)
            mean, var = 0.9 * mean + 0.1 * batch.mean(1), 0.9 * var + 0.1 * unbiased
        np.testing.assert_allclose(norm.running_mean[d].numpy(), mean)
        np.testing.assert_allclose(norm.running_var[d].numpy(), var)


def test_gradients_go_through_the_statistics_of_domain_and_image() -> None:
    norm = random_norm().train()
    domain = torch.tensor([0, 2, 0, 1, 2, 0])
    x = torch.randn(6, 5, 2, 2, dtype=torch.float64, requires_grad=True)

    def normalised(x: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        with images_of(domain):
            return torch.func.functional_call(norm, {"mix": mix}, (x,))

    assert torch.autograd.gradcheck(normalised, (x, norm.mix))


def test_dson_averages_probabilities_over_the_branches() -> None:
    dson = on_images("dson")
    x = images(12)
    batch = Batch(x, torch.arange(12) % 4, torch.arange(12) // 4)
    dson.train().losses(as_episode(batch, 8))
    dson.eval()
    for module in dson.modules():
        if isinstance(module, DomainNorm):
            nn.init.normal_(module.weight, 1, 0.3)
    mean = torch.zeros(12, 4, dtype=torch.float64)
    apart = []
    for d in range(3):
        with images_of(torch.full((12,), d)):
            apart.append(torch.softmax(dson.classifier(dson.backbone.embed(x)), 1))
        mean += apart[-1] / 3
    assert (apart[0] - apart[1]).abs().max() > 1e-4
    torch.testing.assert_close(dson(x).exp(), mean)
    torch.testing.assert_close(dson.probabilities(x), mean)


@pytest.mark.parametrize("backbone", ["small_cnn", "resnet18", "tf_efficientnet_lite0"])
def test_on_batch_statistics_alone_dson_starts_as_the_backbone_it_was_given(backbone: str) -> None:
    """Scales, statistics and timm's activations are taken over; the given one stays as it was."""
    given = build_backbone(backbone, channels=3, image_size=32).double()
    with torch.no_grad():
        given.train().embed(images(16))
        for module in given.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1, 0.1)
    given.eval()
    names = set(given.state_dict())
    dson = build_algorithm("dson", given, num_classes=4, num_domains=2).double().eval()
    assert set(given.state_dict()) == names
    norms = [m for m in dson.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms
    for norm in norms:
        assert isinstance(norm, DomainNorm)
        nn.init.constant_(norm.mix, 50.0)
    with torch.no_grad():
        torch.testing.assert_close(dson.embed(images(3)), given.embed(images(3)))


def test_dson_keeps_what_is_frozen_frozen() -> None:
    given = build_backbone("small_cnn", channels=3, image_size=32)
    given.freeze_norm()
    given.train_last(1)
    dson = build_algorithm("dson", given, num_classes=4, num_domains=3).train()
    norms = [m for m in dson.modules() if isinstance(m, DomainNorm)]
    trained = [[p.requires_grad for p in norm.parameters()] for norm in norms]
    assert trained == [[False] * 3] * 3 + [[True] * 3]
    batch = Batch(images(6).float(), torch.arange(6) % 4, torch.arange(6) // 2)
    dson.losses(as_episode(batch, 4))["loss"].backward()
    assert all(norm.running_mean.abs().max() == 0 for norm in norms)


@pytest.mark.parametrize("name", ["bn", "tent"])
def test_adapters_of_batchnorm_work_on_every_branch(name: str) -> None:
    dson = on_images("dson").eval()
    before = copy.deepcopy(dson.state_dict())
    plain = dson(images(5)).detach()
    adapter = ADAPTERS[name](dson).eval()
    with torch.inference_mode():
        adapted = adapter(images(5))
        adapter.reset()
    assert torch.isfinite(adapted).all()
    assert (adapted - plain).abs().max() > 1e-6
    assert all(torch.equal(v, before[k]) for k, v in dson.state_dict().items())


@pytest.mark.parametrize(("name", "word"), [("dson", "BatchNorm"), ("l2a_ot", "stored features")])
def test_stored_features_are_a_user_error(name: str, word: str) -> None:
    with pytest.raises(UserError, match=word):
        on_features(name)


# DA-ERM


def test_a_domain_is_the_mean_code_of_its_images() -> None:
    algorithm = on_features("da_erm").eval()
    batch = feature_batch()
    codes = algorithm.encode(batch.x[:, :DIM])
    centres = [codes[batch.domain == d].mean(0) for d in range(3)]
    with torch.inference_mode():
        algorithm.finalize(Batch(*(t[part] for t in batch)) for part in (slice(5), slice(5, 24)))
    torch.testing.assert_close(algorithm.domain_embedding, sum(centres).detach() / 3)

    losses = algorithm.losses(as_episode(batch, 16))
    both = torch.cat([batch.x[:, :DIM], torch.stack(centres)[batch.domain]], 1)
    expected = F.cross_entropy(algorithm.classifier(both), batch.y)
    torch.testing.assert_close(losses["class"], expected.detach())
    losses["loss"].backward()
    distances = torch.stack([(codes - centre).square().sum(1) for centre in centres], 1)
    own = torch.autograd.grad(
        F.cross_entropy(-distances, batch.domain), list(algorithm.encode.parameters())
    )
    for parameter, gradient in zip(algorithm.encode.parameters(), own, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)  # nothing of the class loss


def test_the_class_loss_alone_reaches_the_embedding() -> None:
    algorithm = on_features("da_erm")
    batch = feature_batch(requires_grad=True)
    algorithm.losses(as_episode(batch, 16))["loss"].backward()
    z = batch.x.detach()[:, :DIM].requires_grad_()
    codes = algorithm.encode(z).detach()
    centres = torch.stack([codes[batch.domain == d].mean(0) for d in range(3)])
    both = torch.cat([z, centres[batch.domain]], 1)
    (expected,) = torch.autograd.grad(F.cross_entropy(algorithm.classifier(both), batch.y), z)
    torch.testing.assert_close(batch.x.grad[:, :DIM], expected)


def test_target_images_change_predictions_until_the_next_finalize() -> None:
    algorithm = on_features("da_erm").eval()
    batch = feature_batch()
    shown = torch.cat([batch.x + shift for shift in (2, 3, 5)])
    with torch.inference_mode():
        algorithm.finalize([batch])
        plain = algorithm(batch.x)
        algorithm.see_target(shown)
        mean = algorithm.encode(shown[:, :DIM]).mean(0)
        torch.testing.assert_close(algorithm.domain_embedding, mean)
        both = torch.cat([batch.x[:, :DIM], mean.expand(len(batch.x), -1)], 1)
        torch.testing.assert_close(algorithm(batch.x), algorithm.classifier(both))
        assert (algorithm(batch.x) - plain).abs().max() > 1e-3
        algorithm.finalize([batch])
        assert torch.equal(algorithm(batch.x), plain)
    assert algorithm.target_images == 256


# L2A-OT


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


# Whole runs


@pytest.mark.parametrize("name", ["dson", "da_erm"])
def test_a_run_is_trained_saved_and_scored(tmp_path: Path, name: str) -> None:
    config = RunConfig(
        dataset="toy", algorithm=name, backbone="small_cnn", steps=2, validate_every=2
    )
    train_run(config, Machine(accelerator="cpu"), tmp_path)
    records = evaluate_run(tmp_path, accelerator="cpu")
    for record in records:
        few = {"target_images": min(256, record.metrics["images"])}  # a domain may have fewer
        assert record.stream == (few if name == "da_erm" else {})


def test_da_erm_sees_images_of_the_scored_domain_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(
        dataset="toy", algorithm="da_erm", backbone="small_cnn", steps=1, validate_every=1
    )
    machine = Machine(accelerator="cpu")
    train_run(config, machine, tmp_path)
    shown: list[torch.Tensor] = []
    monkeypatch.setattr(DAERM, "see_target", lambda _self, x: shown.append(x.clone()))
    monkeypatch.setattr(DAERM, "target_images", 7)
    records = evaluate_run(tmp_path, accelerator="cpu")
    evaluate_run(tmp_path, accelerator="cpu")
    first, again = shown[: len(records)], shown[len(records) :]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    parts = load_dataset(resolve(config), machine).targets(resolve(config).targets)
    for record, images in zip(records, first, strict=True):
        assert record.stream == {"target_images": 7}
        assert len(images) == 7
        if record.role == "target":
            part = parts[record.domain]
            own = {row.numpy().tobytes() for row in to_unit(part.images.take(range(len(part))))}
            assert all(row.numpy().tobytes() in own for row in images)


def test_da_erm_is_validated_with_the_domain_in_sight_and_saved_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(
        dataset="toy", algorithm="da_erm", backbone="small_cnn", steps=3, validate_every=3
    )
    shown: list[torch.Tensor] = []
    see_target = DAERM.see_target

    def watched(self: DAERM, x: torch.Tensor) -> None:
        shown.append(x.clone())
        see_target(self, x)

    monkeypatch.setattr(DAERM, "see_target", watched)
    train_run(config, Machine(accelerator="cpu"), tmp_path)
    saved, _ = checkpoint.load(tmp_path)
    source, _ = open_source(resolve(config), Machine(accelerator="cpu"))
    val = source.val
    for number, x in zip(np.unique(val.domains), shown, strict=True):  # each domain by itself
        own = to_unit(val.images.take(np.flatnonzero(val.domains == number)))
        assert {row.numpy().tobytes() for row in x} <= {row.numpy().tobytes() for row in own}
    before = saved.domain_embedding.clone()
    with torch.inference_mode():
        saved.finalize(inputs(source.train.balanced(config.centre_images, config.seed)))
    torch.testing.assert_close(before, saved.domain_embedding, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["mldg", "masf"])
def test_inner_steps_are_differentiated_through_attention(name: str) -> None:
    backbone = build_backbone("vit_tiny_patch16_224", channels=3, image_size=32)
    algorithm = build_algorithm(name, backbone, num_classes=4, num_domains=3)
    batch = Batch(images(6).float(), torch.arange(6) % 4, torch.arange(6) // 2)
    algorithm.losses(as_episode(batch, 4))["loss"].backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in backbone.parameters())


def test_dson_learns_the_domains_statistics_on_pretrained_weights_too() -> None:
    config = resolve(RunConfig(dataset="toy", algorithm="dson", pretrained=True))
    assert config.freeze_norm is False
    some = config.model_copy(update={"train_stages": 1})
    assert resolve(resolve(some)).freeze_norm is False
    with pytest.raises(UserError, match="no --train-norm"):
        resolve(some.model_copy(update={"algorithm": "erm"}))
