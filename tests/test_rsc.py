"""RSC against small independent implementations."""

import pytest
import torch
from torch.nn import functional as F

from peer_models import (
    MAPS,
    kind_on_images,
    random_episode,
)
from solodg.algorithms.rsc import RSC, keep_least
from solodg.models.backbones import build_backbone
from solodg.models.extractor import ReadyFeatures


def test_the_most_important_third_is_muted() -> None:
    importance = torch.tensor([[3.0, 1.0, 2.0, 9.0, -8.0, 4.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    kept = keep_least(importance, 1 / 3)
    assert kept[0].tolist() == [True, True, True, False, True, False]
    assert (~kept).sum(1).tolist() == [2, 2]
    assert keep_least(torch.randn(2, 1), 1 / 3).all()


def test_rsc_mutes_a_third_of_channels_or_positions_of_a_third_of_the_images() -> None:
    algorithm = kind_on_images(RSC).train()
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
            channels[channel.argsort(descending=True)[:43]] = 0
            places[position.argsort(descending=True)[:5]] = 0
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
        assert muted.sum() == min(5, (fall > 0).sum())
    assert kinds == {0, 43}
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
