"""CSD against small independent implementations."""

import pytest
import torch
from torch.nn import functional as F

from peer_models import (
    random_episode,
)
from solodg.algorithms.csd import CSD, orthonormality_loss
from solodg.models.extractor import ReadyFeatures


def test_orthonormality_is_that_of_a_plain_loop_and_zero_for_orthonormal_rows() -> None:
    torch.manual_seed(0)
    components = torch.randn(3, 4, 7, dtype=torch.float64)
    total = 0.0
    for c in range(4):
        for j in range(3):
            for k in range(3):
                total += (float(components[j, c] @ components[k, c]) - (j == k)) ** 2
    assert orthonormality_loss(components).item() == pytest.approx(total / (4 * 9))
    rows = torch.linalg.qr(torch.randn(4, 7, 3, dtype=torch.float64)).Q.permute(2, 0, 1)
    assert orthonormality_loss(rows).item() == pytest.approx(0, abs=1e-20)


def test_csd_classifies_a_domain_by_its_own_mix_and_predicts_by_the_common_one() -> None:
    torch.manual_seed(0)
    algorithm = CSD(ReadyFeatures(5, 2), num_classes=3, num_domains=3, components=3)
    with torch.no_grad():
        algorithm.domain_shares.normal_()
        algorithm.common_share.fill_(0.4)
    batch = random_episode((7,)).merged
    z = batch.x[:, :5]
    weights = torch.cat([algorithm.classifier.weight[None],
                         algorithm.specific.weight.reshape(2, 3, 5)])  # fmt: skip
    biases = torch.cat([algorithm.classifier.bias[None], algorithm.specific.bias.reshape(2, 3)])
    expected = []
    for i, d in enumerate(batch.domain.tolist()):
        shares = torch.tanh(torch.cat([algorithm.common_share[None], algorithm.domain_shares[d]]))
        weight = sum(share * w for share, w in zip(shares, weights, strict=True))
        bias = sum(share * b for share, b in zip(shares, biases, strict=True))
        expected.append(weight @ z[i] + bias)
    losses = algorithm.losses(random_episode((7,)))
    torch.testing.assert_close(
        losses["specific"], F.cross_entropy(torch.stack(expected), batch.y).detach()
    )
    common = F.linear(z, weights[0], biases[0])
    torch.testing.assert_close(algorithm(batch.x), common)
    total = F.cross_entropy(common, batch.y) + losses["specific"] + orthonormality_loss(weights)
    torch.testing.assert_close(losses["loss"], total)
