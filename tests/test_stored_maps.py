"""Stored maps: the frozen first stages are computed once, and the rest is trained on them."""

import copy

import pytest
import torch

from solodg.errors import UserError
from solodg.models.backbones import Backbone, build_backbone
from solodg.models.cut import Cut
from solodg.models.map_backbone import MapBackbone

READINGS = ("small_cnn", "test_resnet", "test_efficientnet", "test_byobnet")


def backbone_of(name: str, image_norm=None) -> Backbone:
    """A backbone with random weights and statistics, so that every layer does something."""
    torch.manual_seed(0)
    backbone = build_backbone(name, channels=3, image_size=32, image_norm=image_norm)
    for module in backbone.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_mean, -0.2, 0.2)
            torch.nn.init.uniform_(module.running_var, 0.5, 2.0)
    backbone.freeze_norm()
    return backbone.eval()


def blocks_of(cut: Cut, x: torch.Tensor) -> torch.Tensor:
    """Rows with all readings, as a store gives them: (B, readings * width)."""
    readings = cut.backbone.readings
    rows = cut.rows(x).view(len(readings), len(x), -1)
    numbers = torch.arange(len(readings))[:, None, None].expand(-1, len(x), 1)
    return torch.cat([numbers, rows], 2).transpose(0, 1).flatten(1)


def cuts(*names: str) -> list[tuple[str, int]]:
    counts = {n: len(build_backbone(n, channels=3, image_size=32).net.stages()) for n in names}
    return [(name, stages) for name in names for stages in range(1, counts[name])]


@pytest.mark.parametrize(("name", "stages"), cuts(*READINGS, "test_convnext"))
def test_a_cut_is_exact_at_every_stage(name: str, stages: int) -> None:
    backbone = backbone_of(name, None if name == "test_convnext" else (0.0, 40.0, "grey:40"))
    cut = Cut(backbone, stages)
    tail = MapBackbone(cut).eval()
    x = torch.rand(3, 3, 32, 32)
    with torch.no_grad():
        rows, whole = blocks_of(cut, x), backbone(x)
        torch.testing.assert_close(tail(rows).embedding, whole.embedding, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tail(rows).style, whole.style, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tail.embed(rows), backbone.embed(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tail.embed_each(rows), backbone.embed_each(x))
        torch.testing.assert_close(tail.last_map(rows), backbone.last_map(x))
        last = backbone.last_map(x)
        torch.testing.assert_close(tail.pool(last), backbone.pool(last))


@pytest.mark.parametrize(("name", "stages"), cuts(*READINGS))
def test_the_tail_holds_the_trained_parameters_of_the_backbone(name: str, stages: int) -> None:
    backbone = backbone_of(name)
    backbone.train_last(stages)
    tail = MapBackbone(Cut(backbone, stages))
    trained = {n: p for n, p in backbone.named_parameters() if p.requires_grad}
    assert trained
    assert {n: id(p) for n, p in tail.named_parameters()} == {n: id(p) for n, p in trained.items()}
    assert tail.state_dict().keys() < backbone.state_dict().keys()


def test_in_training_every_row_is_read_by_the_reading_of_its_block() -> None:
    backbone = backbone_of("small_cnn", (0.0, 40.0))
    cut = Cut(backbone, 2)
    tail = MapBackbone(cut)
    x = torch.rand(4, 3, 32, 32)
    rows = blocks_of(cut, x).view(4, 2, -1)
    numbers = torch.tensor([1, 0, 0, 1])
    with torch.no_grad():
        found = tail.train()(rows[torch.arange(4), numbers])
        tail.eval()
        for number, reading in enumerate(backbone.readings):
            with backbone.reading_as([reading]), torch.no_grad():
                expected = backbone(x)
            own = numbers == number
            torch.testing.assert_close(found.embedding[own], expected.embedding[own])
            torch.testing.assert_close(found.style[own], expected.style[own])
            with tail.reading_as([reading]):
                torch.testing.assert_close(tail.embed(rows.flatten(1)), expected.embedding)
    torch.manual_seed(3)
    drawn = tail.train().embed(rows.flatten(1))
    torch.manual_seed(3)
    torch.testing.assert_close(drawn, backbone.train().embed(x))


def test_cutting_leaves_the_backbone_as_it_was() -> None:
    backbone = backbone_of("test_efficientnet", (0.0, 40.0)).train()
    before = copy.deepcopy(backbone.state_dict())
    modes = [module.training for module in backbone.modules()]
    state = torch.random.get_rng_state()
    Cut(backbone, 2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [module.training for module in backbone.modules()] == modes
    assert all(torch.equal(t, before[n]) for n, t in backbone.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in backbone.modules())


@pytest.mark.parametrize(
    ("name", "stages", "text"),
    [
        ("small_cnn", 4, "none of them is frozen"),
        ("test_vit", 2, "cannot be cut before its last 2"),
        ("test_nfnet", 1, "cannot be cut"),
    ],
)
def test_a_backbone_that_cannot_be_cut_is_refused(name: str, stages: int, text: str) -> None:
    with pytest.raises(UserError, match=text):
        Cut(build_backbone(name, channels=3, image_size=160 if "vit" in name else 32), stages)
