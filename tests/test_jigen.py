"""JiGen against small independent implementations."""

import copy

import pytest
import torch
from torch.nn import functional as F

from peer_models import (
    kind_on_images,
    random_episode,
)
from solodg.algorithms.jigen import JiGen, distant_orders, puzzle, shuffled
from solodg.errors import UserError
from solodg.models.extractor import ReadyFeatures
from solodg.types import Episode


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
    with pytest.raises(UserError, match="stored features"):
        JiGen(ReadyFeatures(4, 2), num_classes=3)


def plain_puzzle(image: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Tile `order[p]` of an image (C, H, W) at place p."""
    side = image.shape[1] // 3
    result = torch.empty_like(image)
    for place, tile in enumerate(order):
        (r, c), (a, b) = divmod(place, 3), divmod(tile, 3)
        result[:, side * r : side * (r + 1), side * c : side * (c + 1)] = image[
            :, side * a : side * (a + 1), side * b : side * (b + 1)
        ]
    return result


def test_jigen_is_that_of_a_plain_loop_with_the_authors_settings() -> None:
    """Nine of ten images stay whole; both losses are over all, the second weighs 0.7."""
    algorithm = kind_on_images(JiGen, size=33).double().eval()
    one = random_episode((3, 33, 33), (9, 3, 14))
    batch = one.merged._replace(x=one.merged.x.double())
    orders = distant_orders(31).tolist()
    torch.manual_seed(5)
    drawn, chance = torch.randint(31, (26,)).tolist(), torch.rand(26).tolist()
    torch.manual_seed(5)
    losses = algorithm.losses(Episode(*(b._replace(x=b.x.double()) for b in one[:2])))
    total, shuffled_images = 0.0, 0
    for i in range(26):
        order = drawn[i] if chance[i] >= 0.9 else 0
        shuffled_images += order != 0
        z = algorithm.embed(plain_puzzle(batch.x[i], orders[order])[None])
        of_class = algorithm.classifier(z).softmax(1)[0, batch.y[i]]
        of_order = algorithm.jigsaw(z).softmax(1)[0, order]
        total += -of_class.log() - 0.7 * of_order.log()
    assert 0 < shuffled_images < 8
    torch.testing.assert_close(losses["loss"], total / 26)


def test_without_a_share_jigen_classifies_whole_images_and_orders_of_puzzles() -> None:
    algorithm = kind_on_images(JiGen, jigsaw_weight=0.7, whole=None).eval()
    assert algorithm.jigsaw.out_features == 31
    one = random_episode((3, 32, 32))
    torch.manual_seed(5)
    drawn = torch.randint(31, (15,))
    torch.manual_seed(5)
    losses = algorithm.losses(one)
    puzzles = puzzle(one.merged.x, distant_orders(31)[drawn])
    order = F.cross_entropy(algorithm.jigsaw(algorithm.embed(puzzles)), drawn)
    expected = F.cross_entropy(algorithm(one.merged.x), one.merged.y) + 0.7 * order
    torch.testing.assert_close(losses["loss"], expected)


def test_jigens_running_statistics_are_of_whole_images_and_puzzles_alike() -> None:
    algorithm = kind_on_images(JiGen, whole=None).train()
    plain, one = copy.deepcopy(algorithm), random_episode((3, 32, 32))
    torch.manual_seed(5)
    drawn = torch.randint(31, (15,))
    torch.manual_seed(5)
    algorithm.losses(one)
    puzzles = puzzle(one.merged.x, distant_orders(31)[drawn])
    plain.embed(torch.cat([one.merged.x, puzzles]))
    for (name, own), other in zip(algorithm.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(own, other, msg=name)
