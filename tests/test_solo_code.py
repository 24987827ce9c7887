"""What `solo_code` adds, against plain loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from solodg.algorithms.centres import prototype_loss
from solodg.algorithms.solo_code import SoloCode
from solodg.algorithms.solo_code import method as solo_code_method
from solodg.algorithms.solo_code.pose import domain_disagreement
from solodg.algorithms.solo_code.style_code import within_domain_shuffle
from solodg.models.backbones import build_backbone
from solodg.models.extractor import ReadyFeatures
from solodg.types import Batch, Episode


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(0, 1000))
def test_the_shuffle_is_a_permutation_within_domains(domains: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    domain = torch.tensor(domains)
    order = within_domain_shuffle(domain)
    assert sorted(order.tolist()) == list(range(len(domains)))
    assert torch.equal(domain[order], domain)


def test_the_shuffle_is_not_the_identity() -> None:
    torch.manual_seed(0)
    domain = torch.arange(4).repeat(25)
    moved = (within_domain_shuffle(domain) != torch.arange(100)).float().mean()
    assert moved > 0.8


def test_the_prototype_loss_is_a_cross_entropy_over_distances() -> None:
    torch.manual_seed(0)
    code, domain = torch.randn(9, 3, dtype=torch.float64), torch.tensor([5, 5, 2, 2, 2, 7, 7, 5, 2])
    total = 0.0
    centres = {d: code[domain == d].mean(0) for d in (2, 5, 7)}
    for row, own in zip(code, domain.tolist(), strict=True):
        scores = {d: torch.exp(-(row - centre).square().sum()) for d, centre in centres.items()}
        total -= torch.log(scores[own] / sum(scores.values()))
    torch.testing.assert_close(prototype_loss(code, domain), total / 9)


def model(**arguments) -> SoloCode:
    torch.manual_seed(0)
    return SoloCode(ReadyFeatures(6, 5), num_classes=3, **arguments)


def episode() -> Episode:
    torch.manual_seed(1)
    x = torch.randn(36, 11, requires_grad=True)
    y, domain = torch.arange(36) % 3, torch.arange(36) // 12
    source = Batch(x[:24], y[:24], domain[:24])
    return Episode(source, Batch(x[24:], y[24:], domain[24:]), 6)


def test_it_starts_as_its_base() -> None:
    """FiLM at the identity, nothing written: the logits are those of the linear classifier."""
    algorithm = model().eval()
    shown = episode().merged
    algorithm.finalize([shown])
    with torch.inference_mode():
        torch.testing.assert_close(algorithm(shown.x), algorithm.base(shown.x[:, :6]))


def test_no_gradient_reaches_the_backbone_through_the_style() -> None:
    shown = episode()
    model().train().losses(shown)["loss"].backward()
    gradient = shown.source.x.grad_fn  # the leaf is shared by both halves
    assert gradient is not None
    leaf = shown.source.x._base
    assert leaf.grad[:, :6].abs().sum() > 0
    assert leaf.grad[:, 6:].abs().sum() == 0


def away_from_the_start(**arguments) -> SoloCode:
    """A finalized model whose classifiers depend on the style."""
    algorithm = model(**arguments).eval()
    for parameter in algorithm.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    algorithm.finalize([episode().merged])
    return algorithm


def test_a_test_image_is_classified_with_its_own_style_code() -> None:
    x = episode().merged.x
    algorithm = away_from_the_start(swap=True)
    with torch.inference_mode():
        features = algorithm.features(x)
        torch.testing.assert_close(algorithm.logits(features), algorithm(x))
        swapped = features._replace(style=features.style.roll(1, 0))
        assert not torch.allclose(algorithm.logits(swapped), algorithm(x))


def test_swap_changes_no_prediction_of_the_same_weights() -> None:
    x = episode().merged.x
    swapping, plain = away_from_the_start(swap=True), away_from_the_start(swap=False)
    plain.load_state_dict(swapping.state_dict())
    with torch.inference_mode():
        assert torch.equal(plain(x), swapping(x))


def test_training_classifies_with_the_code_of_another_image_of_the_domain(monkeypatch) -> None:
    merged = episode().merged
    algorithm = away_from_the_start(domain_weight=0.0)
    order = torch.arange(36).view(3, 12).roll(5, 1).flatten()  # within the domains of 12 images
    monkeypatch.setattr(solo_code_method, "within_domain_shuffle", lambda domain: order)
    found, _ = algorithm._episode_features(merged)
    own = algorithm.features(merged.x)
    expected = algorithm.modulate(own._replace(style=own.style[order]))
    torch.testing.assert_close(found.style, own.style[order])
    torch.testing.assert_close(found.embedding, expected.embedding)
    assert not torch.allclose(found.style, own.style)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_domain_supervision_is_part_of_the_loss(weight: float) -> None:
    shown = episode()

    def trained(domain_weight: float) -> tuple[dict, torch.Tensor, SoloCode]:
        """Losses, and their gradient with respect to the last layer of the style code."""
        algorithm = model(domain_weight=domain_weight).train()
        torch.manual_seed(3)
        losses = algorithm.losses(shown)
        (gradient,) = torch.autograd.grad(losses["loss"], algorithm.encode[2].weight)
        return losses, gradient, algorithm

    found, gradient, algorithm = trained(weight)
    without, gradient_without, _ = trained(0.0)
    x, _, domain = shown.merged
    style = x[:, 6:].detach()
    standardised = (style - style.mean(0)) / (style.var(0, correction=0) + 1e-5).sqrt()
    code = algorithm.encode(standardised)
    centres = torch.stack([code[domain == d].mean(0) for d in range(3)])
    squares = ((code[:, None] - centres) ** 2).sum(2)  # (36, 3)
    right = torch.softmax(-squares, 1)[torch.arange(36), domain]
    expected = -weight * right.log().mean()
    (own,) = torch.autograd.grad(expected, algorithm.encode[2].weight)
    torch.testing.assert_close(found.get("domain", torch.zeros(())), expected.detach())
    torch.testing.assert_close(found["loss"] - without["loss"], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient - gradient_without, own, atol=1e-5, rtol=1e-4)
    assert ("domain" in found) == bool(weight)


def test_the_prior_writes_one_classifier_for_all() -> None:
    shown = episode().merged
    algorithm = model(film=False).eval()
    for parameter in algorithm.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    algorithm.finalize([shown])
    with torch.inference_mode():
        features = algorithm.features(shown.x)
        written = algorithm.amortiser(algorithm.source_centres).mean + algorithm.base.weight
        torch.testing.assert_close(algorithm.prior_logits(features), features.embedding @ written.T)


def test_the_pose_network_learns_from_agreement_alone() -> None:
    torch.manual_seed(0)
    backbone = build_backbone("small_cnn", channels=1, image_size=32)
    algorithm = SoloCode(backbone, num_classes=3, frame=2)
    x, y, domain = torch.rand(36, 1, 32, 32), torch.arange(36) % 3, torch.arange(36) // 12
    parts = [Batch(x[part], y[part], domain[part]) for part in (slice(24), slice(24, 36))]
    terms = algorithm.losses(Episode(*parts, 6))
    terms["loss"].backward()
    found = algorithm.frame.pose.weight.grad.clone()
    assert found.abs().max() > 0
    algorithm.frame.zero_grad()
    loss = domain_disagreement(algorithm.frame(x), y, domain)
    torch.testing.assert_close(terms["frame"], loss.detach())
    loss.backward()
    torch.testing.assert_close(found, algorithm.frame.pose.weight.grad)
