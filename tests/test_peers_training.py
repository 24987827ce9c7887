"""Training-time methods against small independent implementations."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from solodg.algorithms import ALGORITHMS
from solodg.algorithms.coral import moment_distance
from solodg.algorithms.csd import CSD, orthonormality_loss
from solodg.algorithms.jigen import JiGen, distant_orders, puzzle, shuffled
from solodg.algorithms.mixstyle import MixStyle, mix_styles
from solodg.algorithms.mldg import MLDG
from solodg.algorithms.rsc import RSC, keep_least
from solodg.errors import UserError
from solodg.models.backbones import build_backbone
from solodg.models.extractor import ReadyFeatures
from solodg.types import Batch, Episode


def episode(shape: tuple[int, ...], sizes: tuple[int, ...] = (5, 4, 6), seed: int = 0) -> Episode:
    """Random inputs of three classes; the last of the domains is the meta-target."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(sum(sizes), *shape, generator=generator)
    y = torch.randint(3, (sum(sizes),), generator=generator)
    domain = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    last = domain == len(sizes) - 1
    return Episode(Batch(x[~last], y[~last], domain[~last]), Batch(x[last], y[last], domain[last]))


def on_images(kind, name: str = "small_cnn", size: int = 32, **arguments):
    torch.manual_seed(0)
    backbone = build_backbone(name, channels=3, image_size=size)
    return kind(backbone, num_classes=3, **arguments)


# CORAL


def plain_distance(z: np.ndarray, domain: np.ndarray) -> float:
    """Loops over pairs, coordinates and images."""
    total, pairs, dim = 0.0, 0, z.shape[1]
    numbers = sorted(set(domain.tolist()))
    for i, d in enumerate(numbers):
        for e in numbers[i + 1 :]:
            moments = []
            for part in (z[domain == d], z[domain == e]):
                mean = [sum(row[j] for row in part) / len(part) for j in range(dim)]
                cov = [
                    [
                        sum((row[j] - mean[j]) * (row[k] - mean[k]) for row in part)
                        / (len(part) - 1)
                        for k in range(dim)
                    ]
                    for j in range(dim)
                ]
                moments.append((np.array(mean), np.array(cov)))
            (m1, c1), (m2, c2) = moments
            total += ((m1 - m2) ** 2).sum() / dim + ((c1 - c2) ** 2).sum() / dim**2
            pairs += 1
    return total / pairs


def test_corals_distance_is_that_of_a_plain_loop() -> None:
    generator = np.random.default_rng(0)
    z = generator.normal(size=(14, 5)) * generator.uniform(0.5, 3, size=5)
    domain = np.array([2] * 4 + [0] * 7 + [5] * 3)
    mixed = generator.permutation(14)
    ours = moment_distance(torch.from_numpy(z[mixed]), torch.from_numpy(domain[mixed]))
    assert ours.item() == pytest.approx(plain_distance(z, domain), rel=1e-12)


def test_corals_distance_is_zero_for_equal_domains_and_defined_for_one_image() -> None:
    z = torch.randn(6, 4, dtype=torch.float64)
    twice = torch.cat([z, z]), torch.arange(2).repeat_interleave(6)
    assert moment_distance(*twice).item() == pytest.approx(0, abs=1e-20)
    alone = moment_distance(z, torch.tensor([0] * 5 + [1]))
    torch.testing.assert_close(alone, F.mse_loss(z[:5].mean(0), z[5]))


def test_coral_adds_the_distance_by_gamma() -> None:
    torch.manual_seed(0)
    algorithm = ALGORITHMS["coral"](ReadyFeatures(4, 2), num_classes=3, gamma=0.3).double()
    source, target = (b._replace(x=b.x.double()) for b in episode((6,))[:2])
    whole = Episode(source, target)
    z, domain = whole.merged.x[:, :4], whole.merged.domain
    expected = F.cross_entropy(algorithm.classifier(z), whole.merged.y).item()
    expected += 0.3 * plain_distance(z.numpy(), domain.numpy())
    assert algorithm.losses(whole)["loss"].item() == pytest.approx(expected, rel=1e-12)


# MixStyle


def test_mixed_maps_have_the_mix_of_means_and_deviations() -> None:
    torch.manual_seed(0)
    maps = (3 * torch.randn(4, 6, 5, 7) + torch.randn(4, 6, 1, 1)).double()
    share, other = torch.rand(4).double(), torch.tensor([2, 0, 1, 3])
    mixed = mix_styles(maps, share, other)
    for i, j in enumerate(other.tolist()):
        for statistic in (torch.mean, lambda m, dim: m.std(dim, correction=0)):
            own, foreign = statistic(maps[i], (1, 2)), statistic(maps[j], (1, 2))
            expected = share[i] * own + (1 - share[i]) * foreign
            torch.testing.assert_close(statistic(mixed[i], (1, 2)), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mix_styles(maps, torch.ones(4).double(), other), maps)


def test_mixing_has_no_gradient_through_statistics_and_takes_maps_of_one_pixel() -> None:
    maps = torch.randn(2, 3, 1, 1, requires_grad=True)
    mixed = mix_styles(maps, torch.tensor([0.3, 1.0]), torch.tensor([1, 0]))
    torch.testing.assert_close(mixed[0], 0.3 * maps[0] + 0.7 * maps[1])
    mixed[1].sum().backward()
    torch.testing.assert_close(maps.grad, torch.tensor([0.0, 1.0])[:, None, None, None] + 0 * maps)


MAPS = ["small_cnn", "alexnet", "resnet18", "tf_efficientnet_lite0", "densenet121", "convnext_atto"]


@pytest.mark.parametrize("name", MAPS)
def test_three_stages_are_mixed_in_training_and_none_at_test(name: str, monkeypatch) -> None:
    algorithm = on_images(MixStyle, name, 64, probability=1.0)
    one = episode((3, 64, 64), (2, 2))
    calls = []
    monkeypatch.setattr(
        "solodg.algorithms.mixstyle.mix_styles",
        lambda maps, share, other: calls.append(maps.shape) or mix_styles(maps, share, other),
    )
    algorithm.train().losses(one)["loss"].backward()
    assert len(calls) == 3
    assert all(len(shape) == 4 for shape in calls)
    assert [s[2] for s in calls] == sorted((s[2] for s in calls), reverse=True)
    algorithm.eval()
    plain = ALGORITHMS["erm"](algorithm.backbone, num_classes=3).eval()
    plain.classifier = algorithm.classifier
    assert torch.equal(algorithm(one.merged.x), plain(one.merged.x))
    torch.testing.assert_close(algorithm.losses(one)["loss"], plain.losses(one)["loss"])
    assert len(calls) == 3


def test_mixing_changes_the_loss_about_as_often_as_its_probability() -> None:
    algorithm = on_images(MixStyle).train()
    algorithm.backbone.freeze_norm()  # or BatchNorm would change the loss too
    copied, one = copy.deepcopy(algorithm), episode((3, 32, 32), (2, 2))
    plain = ALGORITHMS["erm"].losses(algorithm, one)["loss"].item()
    with torch.no_grad():
        values = [copied.losses(one)["loss"].item() for _ in range(80)]
    # Three stages, each left alone with probability one half.
    assert 2 <= sum(value == plain for value in values) <= 20


def test_mixstyle_without_maps_is_a_user_error() -> None:
    with pytest.raises(UserError, match="tokens"):
        on_images(MixStyle, "vit_tiny_patch16_224", 32)
    with pytest.raises(UserError, match="frozen"):
        MixStyle(ReadyFeatures(4, 2), num_classes=3)


# RSC


def test_the_most_important_third_is_muted() -> None:
    importance = torch.tensor([[3.0, 1.0, 2.0, 9.0, -8.0, 4.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    kept = keep_least(importance, 1 / 3)
    assert kept[0].tolist() == [True, True, True, False, True, False]
    assert (~kept).sum(1).tolist() == [2, 2]
    assert keep_least(torch.randn(2, 1), 1 / 3).all()


def test_rsc_mutes_a_third_of_channels_or_positions_of_a_third_of_the_images() -> None:
    algorithm = on_images(RSC).train()
    batch = episode((3, 32, 32)).merged
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
    algorithm = on_images(RSC).eval()
    one = episode((3, 32, 32))
    last = algorithm.backbone.last_map(one.merged.x)
    kept = torch.rand_like(last) < 0.6
    monkeypatch.setattr(algorithm, "challenge", lambda _last, _y: kept)
    left = F.cross_entropy(algorithm.classifier((last * kept).mean((2, 3))), one.merged.y)
    torch.testing.assert_close(algorithm.losses(one)["loss"], left)


def test_rsc_works_on_embeddings_where_there_is_no_map() -> None:
    torch.manual_seed(0)
    stored = RSC(ReadyFeatures(9, 2), num_classes=3)
    batch = episode((11,)).merged
    kept = stored.challenge(stored.backbone.last_map(batch.x), batch.y)
    assert kept.shape == (15, 9)
    assert set((~kept).sum(1).tolist()) == {0, 3}
    tokens = on_images(RSC, "vit_tiny_patch16_224", 32).train()
    losses = tokens.losses(episode((3, 32, 32), (1, 2)))
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


# MLDG


def plain_loss_and_gradient(theta: np.ndarray, x: np.ndarray, y: np.ndarray):
    """Softmax regression by hand; theta is (3, D + 1), the bias last."""
    inputs = np.concatenate([x, np.ones((len(x), 1))], 1)
    logits = inputs @ theta.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    p[np.arange(len(y)), y] -= 1
    return loss, p.T @ inputs / len(y)


@pytest.mark.parametrize("second_order", [True, False])
def test_mldgs_gradient_is_that_of_finite_differences(second_order: bool) -> None:
    torch.manual_seed(0)
    alpha, beta = 0.7, 1.3
    algorithm = MLDG(
        ReadyFeatures(4, 2), num_classes=3, alpha=alpha, beta=beta, second_order=second_order
    ).double()
    one = episode((6,), seed=3)
    source, target = (b._replace(x=4 * b.x.double() - 2) for b in one[:2])
    losses = algorithm.losses(Episode(source, target))
    losses["loss"].backward()
    linear = algorithm.classifier
    theta = torch.cat([linear.weight, linear.bias[:, None]], 1).detach().numpy()
    ours = torch.cat([linear.weight.grad, linear.bias.grad[:, None]], 1).numpy()
    (xs, ys), (xt, yt) = ((b.x[:, :4].numpy(), b.y.numpy()) for b in (source, target))
    fixed = plain_loss_and_gradient(theta, xs, ys)[1]

    def objective(at: np.ndarray) -> float:
        first, gradient = plain_loss_and_gradient(at, xs, ys)
        step = gradient if second_order else fixed
        return first + beta * plain_loss_and_gradient(at - alpha * step, xt, yt)[0]

    assert losses["loss"].item() == pytest.approx(objective(theta), rel=1e-12)
    expected = np.zeros_like(theta)
    for place in np.ndindex(*theta.shape):
        shift = np.zeros_like(theta)
        shift[place] = 1e-5
        expected[place] = (objective(theta + shift) - objective(theta - shift)) / 2e-5
    np.testing.assert_allclose(ours, expected, atol=1e-9)


def test_mldg_leaves_weights_and_the_statistics_of_its_inner_step_behind() -> None:
    algorithm = on_images(MLDG).train()
    plain = copy.deepcopy(algorithm)
    one = episode((3, 32, 32))
    algorithm.losses(one)["loss"].backward()
    with torch.no_grad():
        plain(one.source.x)
    for (name, own), other in zip(
        algorithm.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert torch.equal(own, other), name


def test_mldg_trains_what_may_be_trained() -> None:
    algorithm = on_images(MLDG).train()
    algorithm.backbone.train_last(1)
    algorithm.losses(episode((3, 32, 32)))["loss"].backward()
    trained = {name.split(".")[-3] for name, p in algorithm.backbone.named_parameters()
               if p.grad is not None}  # fmt: skip
    assert trained == {"3"}


# CSD


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
    batch = episode((7,)).merged
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
    losses = algorithm.losses(episode((7,)))
    torch.testing.assert_close(
        losses["specific"], F.cross_entropy(torch.stack(expected), batch.y).detach()
    )
    common = F.linear(z, weights[0], biases[0])
    torch.testing.assert_close(algorithm(batch.x), common)
    total = F.cross_entropy(common, batch.y) + losses["specific"] + orthonormality_loss(weights)
    torch.testing.assert_close(losses["loss"], total)


# JiGen


@pytest.mark.parametrize("count", [2, 31, 72])
def test_orders_are_distinct_and_as_far_apart_as_can_be(count: int) -> None:
    orders = distant_orders(count)
    assert orders[0].tolist() == list(range(9))
    assert all(sorted(order) == list(range(9)) for order in orders.tolist())
    distance = (orders[:, None] != orders[None]).sum(2)
    least = (distance + 9 * torch.eye(count, dtype=torch.long)).min()
    assert least == (9 if count <= 9 else 8)
    # More than nine orders cannot all differ in nine places: two begin with the same tile.


def test_the_default_orders_put_every_tile_everywhere() -> None:
    orders = distant_orders(31)
    assert all(len(set(orders[:, place].tolist())) == 9 for place in range(9))


def test_shuffling_back_gives_the_image() -> None:
    torch.manual_seed(0)
    x, order = torch.rand(31, 2, 6, 9), distant_orders(31)
    moved = shuffled(x, order)
    assert torch.equal(shuffled(moved, order.argsort(1)), x)
    assert torch.equal(moved[0], x[0])
    for i in (3, 17):
        for place, tile in enumerate(order[i].tolist()):
            (r, c), (from_r, from_c) = divmod(place, 3), divmod(tile, 3)
            ours = moved[i, :, 2 * r : 2 * r + 2, 3 * c : 3 * c + 3]
            theirs = x[i, :, 2 * from_r : 2 * from_r + 2, 3 * from_c : 3 * from_c + 3]
            assert torch.equal(ours, theirs)


def test_puzzles_have_the_size_of_images_and_need_images() -> None:
    x = torch.rand(2, 3, 32, 32)
    assert puzzle(x, distant_orders(2)).shape == x.shape
    assert torch.equal(puzzle(x[..., :30, :30], distant_orders(2))[0], x[0, :, :30, :30])
    with pytest.raises(UserError, match="frozen"):
        JiGen(ReadyFeatures(4, 2), num_classes=3)


def test_jigen_classifies_whole_images_and_orders_of_puzzles() -> None:
    algorithm = on_images(JiGen, jigsaw_weight=0.7).eval()
    assert algorithm.jigsaw.out_features == 31
    one = episode((3, 32, 32))
    torch.manual_seed(5)
    drawn = torch.randint(31, (15,))
    torch.manual_seed(5)
    losses = algorithm.losses(one)
    puzzles = puzzle(one.merged.x, distant_orders(31)[drawn])
    order = F.cross_entropy(algorithm.jigsaw(algorithm.embed(puzzles)), drawn)
    expected = F.cross_entropy(algorithm(one.merged.x), one.merged.y) + 0.7 * order
    torch.testing.assert_close(losses["loss"], expected)


def test_jigens_running_statistics_are_of_whole_images_and_puzzles_alike() -> None:
    algorithm = on_images(JiGen).train()
    plain, one = copy.deepcopy(algorithm), episode((3, 32, 32))
    torch.manual_seed(5)
    drawn = torch.randint(31, (15,))
    torch.manual_seed(5)
    algorithm.losses(one)
    puzzles = puzzle(one.merged.x, distant_orders(31)[drawn])
    plain.embed(torch.cat([one.merged.x, puzzles]))
    for (name, own), other in zip(algorithm.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(own, other, msg=name)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("csd", {"components": 1, "num_domains": 3}),
        ("jigen", {"permutations": 72}),
        ("mixstyle", {"probability": 1.5}),
        ("rsc", {"feature_share": 1.0}),
    ],
)
def test_impossible_arguments_are_refused(name: str, arguments: dict) -> None:
    with pytest.raises(ValueError, match="must"):
        on_images(ALGORITHMS[name], **arguments)
