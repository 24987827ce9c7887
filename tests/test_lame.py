"""LAME against a plain loop, and what its authors prove of it."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from peer_models import on_features, uneven_batch
from solodg.adapters.lame import Lame, corrected, knn_affinity, objective, rbf_affinity


def plain_affinity(z: np.ndarray, kind: str, neighbours: int) -> np.ndarray:
    unit = [row / np.sqrt((row**2).sum()) for row in z]
    count = len(unit)
    distance = np.array([[np.sqrt(((a - b) ** 2).sum()) for b in unit] for a in unit])
    w = np.zeros((count, count))
    if kind == "knn":
        for i in range(count):
            others = sorted((j for j in range(count) if j != i), key=lambda j: distance[i, j])
            for j in others[:neighbours]:
                w[i, j] = 1.0
        return w
    furthest = [sorted(row)[min(neighbours, count) - 1] for row in distance]
    sigma = sum(furthest) / count
    for i in range(count):
        for j in range(count):
            w[i, j] = np.exp(-(distance[i, j] ** 2) / (2 * sigma**2))
    return w


def plain_correction(q: np.ndarray, w: np.ndarray, steps: int) -> np.ndarray:
    z = q.copy()
    for _ in range(steps):
        new = np.zeros_like(z)
        for i in range(len(z)):
            pull = sum(w[i, j] * z[j] for j in range(len(z)))
            new[i] = q[i] * np.exp(pull)
            new[i] /= new[i].sum()
        z = new
    return z


@pytest.mark.parametrize("kind", ["rbf", "knn"])
@pytest.mark.parametrize("neighbours", [2, 3, 5, 40])
def test_lame_is_the_plain_loop(kind: str, neighbours: int) -> None:
    algorithm, x = on_features("erm"), uneven_batch().x
    with torch.no_grad():
        z, logits = algorithm.embed_and_classify(x)
    w = plain_affinity(z.numpy(), kind, neighbours)
    ours = Lame(algorithm, affinity=kind, neighbours=neighbours)(x).exp()
    expected = plain_correction(logits.softmax(1).numpy(), w, 100)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=2e-5)
    assert np.abs(ours.numpy() - logits.softmax(1).numpy()).max() > 0.05


def test_lames_objective_never_rises_and_its_end_is_a_fixed_point() -> None:
    generator = torch.Generator().manual_seed(2)
    log_q = torch.randn(30, 5, generator=generator, dtype=torch.float64).mul(3).log_softmax(1)
    z = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    w = rbf_affinity(torch.nn.functional.normalize(z, dim=1), 5)
    assert torch.linalg.eigvalsh(w).min() > -1e-12  # positive semi-definite
    log_z, values = log_q, [objective(log_q, log_q, w)]
    for _ in range(40):
        log_z = (log_q + w @ log_z.exp()).log_softmax(1)
        values.append(objective(log_z, log_q, w))
    assert all(later <= before + 1e-12 for before, later in pairwise(values))
    assert values[-1] < values[0] - 1
    end = corrected(log_q, w)
    again = (log_q + w @ end.exp()).log_softmax(1)
    torch.testing.assert_close(again.exp(), end.exp(), atol=1e-4, rtol=0)
    z_end = end.exp()
    by_hand = sum(torch.kl_div(log_q[i], z_end[i]).sum() for i in range(30))
    by_hand -= sum(w[i, j] * (z_end[i] @ z_end[j]) for i in range(30) for j in range(30)) / 2
    assert objective(end, log_q, w) == pytest.approx(by_hand.item(), rel=1e-12)


def test_lame_of_one_image_or_without_affinity_is_the_model() -> None:
    algorithm, x = on_features("erm"), uneven_batch().x
    with torch.no_grad():
        assert torch.equal(Lame(algorithm)(x[:1]), algorithm(x[:1]))
        log_q = algorithm(x).log_softmax(1)
    torch.testing.assert_close(corrected(log_q, torch.zeros(17, 17).double()), log_q)


def test_images_that_are_all_alike_and_classes_that_are_impossible_are_no_error() -> None:
    algorithm, x = on_features("erm"), uneven_batch().x[:1].expand(4, -1)
    for kind in ("rbf", "knn"):
        assert torch.isfinite(Lame(algorithm, affinity=kind)(x)).all()
    assert knn_affinity(x, 9).sum(1).tolist() == [3.0] * 4
    with torch.no_grad():
        algorithm.classifier.bias[2] = -torch.inf
    p = Lame(algorithm).probabilities(uneven_batch().x)
    assert torch.isfinite(p).all()
    assert p[:, 2].max() < 1e-4
