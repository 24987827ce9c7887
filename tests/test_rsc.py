"""RSC against small independent implementations."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from peer_models import (
    MAPS,
    as_episode,
    kind_on_images,
    random_episode,
)
from solodg.algorithms.rsc import RSC, keep_least
from solodg.models.backbones import build_backbone
from solodg.models.extractor import Extractor, ReadyFeatures
from solodg.types import Batch


def test_the_most_important_are_muted() -> None:
    importance = torch.tensor([[3.0, 1.0, 2.0, 9.0, -8.0, 4.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    kept = keep_least(importance, 2)
    assert kept[0].tolist() == [True, True, True, False, True, False]
    assert (~kept).sum(1).tolist() == [2, 2]
    assert keep_least(torch.randn(2, 1), 0).all()


class Maps(Extractor):
    """Feature maps as they come, pooled by their mean."""

    embedding_dim, style_dim = 512, 0

    def last_map(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def pool(self, last: torch.Tensor) -> torch.Tensor:
        return last.mean((2, 3))


@pytest.mark.parametrize("seed", range(4))
def test_rsc_mutes_as_many_channels_and_positions_as_the_authors(seed: int) -> None:
    """Of maps (512, 7, 7): what exceeds the 161st channel or 18th position, both in plain loops."""
    torch.manual_seed(0)
    rsc = RSC(Maps(), num_classes=4, image_share=0.3).double()
    x = torch.randn(11, 512, 7, 7, dtype=torch.float64).relu()
    y = torch.tensor([0, 0, 1, 1, 1, 1, 3, 3, 3, 3, 3])  # class 2 is missing
    domain = torch.tensor([0] * 2 + [1] * 8 + [2])
    weight, bias = (p.detach().numpy() for p in (rsc.classifier.weight, rsc.classifier.bias))

    def probability(maps: np.ndarray, label: int) -> float:
        logits = weight @ maps.mean((1, 2)) + bias
        return float(np.exp(logits[label]) / np.exp(logits).sum())

    torch.manual_seed(seed)
    spatial = torch.rand(()) < 0.5
    masked, fall = [], []
    for maps, label in zip(x.numpy(), y.tolist(), strict=True):
        channel = np.full((7, 7), 1 / 49)[None] * weight[label][:, None, None]  # the gradient
        channel = channel.mean((1, 2))
        mask = np.ones_like(maps)
        if spatial:
            position = (maps * channel[:, None, None]).sum(0)
            mask[:, position > np.sort(position.ravel())[::-1][math.ceil(49 / 3)]] = 0
            assert (mask[0] == 0).sum() == 17
        else:
            mask[channel > np.sort(channel)[::-1][math.ceil(512 / 3.2)]] = 0
            assert (mask[:, 0, 0] == 0).sum() == 160
        masked.append(maps * mask)
        fall.append(max(0.0, probability(maps, label) - probability(masked[-1], label) - 1e-4))
    threshold = sorted(fall, reverse=True)[round(11 * 0.3)]
    used = [m if f > threshold else own for m, f, own in zip(masked, fall, x.numpy(), strict=True)]
    expected = -np.mean([np.log(probability(m, k)) for m, k in zip(used, y.tolist(), strict=True)])
    torch.manual_seed(seed)
    losses = rsc.losses(as_episode(Batch(x, y, domain), 10))
    assert losses["loss"].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "channels_muted", "places_muted", "least"),
    [({}, 40, 6, 1e-4), ({"channel_share": None}, 43, 5, 0.0)],
)
def test_rsc_mutes_channels_or_positions_of_a_third_of_the_images(
    arguments: dict, channels_muted: int, places_muted: int, least: float
) -> None:
    algorithm = kind_on_images(RSC, **arguments).train()
    batch = random_episode((3, 32, 32)).merged
    last = algorithm.backbone.last_map(batch.x).detach()  # (15, 128, 4, 4)
    weight = algorithm.classifier.weight
    kinds = set()
    for seed in range(8):
        torch.manual_seed(seed)
        kept = algorithm.challenge(last, batch.y)
        muted = (~kept).flatten(1).any(1)
        probability = []
        for i in range(15):
            # By hand: the map is pooled by its mean, so the gradient is the class's row over 16.
            channel = weight[batch.y[i]] / 16
            position = (last[i] * channel[:, None, None]).sum(0).flatten()
            channels, places = torch.ones(128), torch.ones(16)
            channels[channel.argsort(descending=True)[:channels_muted]] = 0
            places[position.argsort(descending=True)[:places_muted]] = 0
            by_channel = (~kept[i]).flatten(1).all(1).sum().item()
            if muted[i]:
                kinds.add(by_channel)
                expected = channels[:, None] if by_channel else places[None]
                assert torch.equal(kept[i].flatten(1), expected.bool().expand(128, 16))
            probability.append((channels, places))
        # The images that are muted are those whose probability falls most.
        spatial = any((~kept[i]).flatten(1).all(1).sum() == 0 for i in range(15) if muted[i])
        masks = torch.stack([(p[None] if spatial else c[:, None]).expand(128, 16)
                             for c, p in probability]).reshape_as(last)  # fmt: skip
        logits = [algorithm.classifier(m.mean((2, 3))) for m in (last, last * masks)]
        own = [lo.softmax(1).gather(1, batch.y[:, None])[:, 0] for lo in logits]
        fall = own[0] - own[1]
        assert fall[muted].min() >= fall[~muted].clamp_min(0).max() - 1e-6
        assert muted.sum() == min(5, (fall > least).sum())
    assert kinds == {0, channels_muted}
    assert algorithm.training


def test_the_loss_of_rsc_is_on_features_that_are_not_muted(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = kind_on_images(RSC).eval()
    one = random_episode((3, 32, 32))
    last = algorithm.backbone.last_map(one.merged.x)
    kept = torch.rand_like(last) < 0.6
    monkeypatch.setattr(algorithm, "challenge", lambda _last, _y: kept)
    left = F.cross_entropy(algorithm.classifier((last * kept).mean((2, 3))), one.merged.y)
    torch.testing.assert_close(algorithm.losses(one)["loss"], left)


def test_rsc_works_on_embeddings_where_there_is_no_map() -> None:
    torch.manual_seed(0)
    stored = RSC(ReadyFeatures(9, 2), num_classes=3)
    batch = random_episode((11,)).merged
    kept = stored.challenge(stored.backbone.last_map(batch.x), batch.y)
    assert kept.shape == (15, 9)
    assert set((~kept).sum(1).tolist()) == {0, 3}
    tokens = kind_on_images(RSC, "vit_tiny_patch16_224", 32).train()
    losses = tokens.losses(random_episode((3, 32, 32), (1, 2)))
    losses["loss"].backward()
    assert tokens.backbone.last_map(torch.rand(2, 3, 32, 32)).shape == (2, 192)


@pytest.mark.parametrize("name", MAPS)
def test_the_last_map_pooled_is_the_embedding(name: str) -> None:
    torch.manual_seed(0)
    backbone = build_backbone(name, channels=3, image_size=64).eval()
    x = torch.rand(2, 3, 64, 64)
    last = backbone.last_map(x)
    assert last.ndim == 4
    torch.testing.assert_close(backbone.pool(last), backbone(x).embedding)
