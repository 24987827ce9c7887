"""Gaussians against torch.distributions, in float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Independent, Normal, kl_divergence

from solodg.algorithms.solo.gaussian import Gaussian, LogitMoments, kl, safe_sqrt, shared_logits


def random_gaussian(*shape: int, seed: int = 0) -> Gaussian:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(*shape, generator=generator, dtype=torch.float64)
    scale = torch.rand(*shape, generator=generator, dtype=torch.float64) * 2 + 0.05
    return Gaussian(mean, scale)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**31))
def test_kl_equals_torch_distributions(batch: int, classes: int, dim: int, seed: int) -> None:
    q, p = (
        random_gaussian(batch, classes, dim, seed=seed),
        random_gaussian(classes, dim, seed=seed + 1),
    )
    expected = kl_divergence(Independent(Normal(*q), 1), Independent(Normal(*p), 1))
    torch.testing.assert_close(kl(q, p), expected, atol=1e-10, rtol=1e-10)


def test_kl_of_a_distribution_with_itself_is_zero() -> None:
    q = random_gaussian(3, 5)
    assert kl(q, q).abs().max() < 1e-12


def test_kl_is_positive_between_different_distributions() -> None:
    assert (kl(random_gaussian(9, 4, seed=1), random_gaussian(9, 4, seed=2)) > 0).all()


def test_shared_logits_have_the_moments_of_sampled_weights() -> None:
    classifier = random_gaussian(4, 6)
    z = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    moments = shared_logits(classifier, z)
    for b in range(5):
        for c in range(4):
            # w.z for independent normals: means and variances add up, coordinate by coordinate.
            mean = sum(classifier.mean[c, d] * z[b, d] for d in range(6))
            variance = sum((classifier.scale[c, d] * z[b, d]) ** 2 for d in range(6))
            torch.testing.assert_close(moments.mean[b, c], mean)
            torch.testing.assert_close(moments.scale[b, c], variance.sqrt())


def test_sampled_logits_have_the_distribution_of_sampled_weights() -> None:
    torch.manual_seed(0)
    classifier = random_gaussian(3, 4)
    z = torch.randn(1, 4, dtype=torch.float64)
    count = 200_000
    weights = Normal(*classifier).sample((count,))  # (M, C, D)
    by_weights = weights @ z[0]
    by_logits = shared_logits(classifier, z).sample(count)[0]  # (M, C)
    tolerance = {"atol": 0.08, "rtol": 0.02}  # 5 standard errors of the estimates
    torch.testing.assert_close(by_logits.mean(0), by_weights.mean(0), **tolerance)
    torch.testing.assert_close(by_logits.T.cov(), torch.diag(by_weights.var(0)), **tolerance)


def test_logit_samples_are_shaped_batch_sample_class() -> None:
    moments = LogitMoments(torch.zeros(2, 5), torch.ones(2, 5))
    assert moments.sample(7).shape == (2, 7, 5)
    shared = torch.arange(15.0).view(3, 5)
    torch.testing.assert_close(moments.sample_with(shared)[1], shared)


def test_the_square_root_has_a_finite_gradient_at_zero() -> None:
    variance = torch.zeros(3, requires_grad=True)
    safe_sqrt(variance).sum().backward()
    assert torch.isfinite(variance.grad).all()
