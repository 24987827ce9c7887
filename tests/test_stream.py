"""Streams: every image once, answers back in place, resets when they were asked for."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from solodg.adapters import Adapter
from solodg.data.images import ImageArray
from solodg.data.labelled_images import LabelledImages
from solodg.errors import UserError
from solodg.runs.stream import Stream, make_adapter, predict_stream
from test_adapters import model

CPU = torch.device("cpu")


def part(name: str, start: int, count: int) -> LabelledImages:
    """Image number n is all n."""
    pixels = torch.arange(start, start + count, dtype=torch.uint8)[:, None, None, None]
    labels = np.arange(count) % 4
    return LabelledImages(
        ImageArray(pixels.expand(-1, 3, 2, 2).contiguous()), labels, np.zeros(count, int), (name,)
    )


class Diary(Adapter):
    """Writes down what it is shown; its answer names the image."""

    single_sample: ClassVar[bool] = True

    def __init__(self, algorithm) -> None:
        super().__init__(algorithm)
        self.events: list[object] = []

    def probabilities(self, x: Tensor) -> Tensor:
        seen = (x[:, 0, 0, 0] * 255).round()
        self.events.append([int(v) for v in seen])
        return seen[:, None].expand(-1, 4)

    def reset(self) -> None:
        self.events.append("reset")


def run(**values):
    diary = Diary(model())
    parts = [part("a", 0, 7), part("b", 100, 5)]
    found = predict_stream(diary, parts, Stream(**values), CPU, lambda count: None)
    return diary.events, found


@pytest.mark.parametrize("domains", ["single", "mixed"])
@pytest.mark.parametrize("batch_size", [1, 3, 50])
def test_every_answer_comes_back_to_its_image(domains: str, batch_size: int) -> None:
    events, found = run(domains=domains, batch_size=batch_size)
    assert found[0].probabilities[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert found[1].probabilities[:, 0].tolist() == [100, 101, 102, 103, 104]
    shown = [n for event in events if event != "reset" for n in event]
    assert sorted(shown) == [0, 1, 2, 3, 4, 5, 6, 100, 101, 102, 103, 104]
    assert max(len(event) for event in events if event != "reset") <= batch_size


def test_domains_come_one_after_another_or_mixed() -> None:
    events, _ = run(batch_size=4)
    batches = [e for e in events if e != "reset"]
    assert all(max(b) < 100 or min(b) >= 100 for b in batches)
    mixed, _ = run(batch_size=4, domains="mixed")
    assert any(min(e) < 100 <= max(e) for e in mixed if e != "reset")


@pytest.mark.parametrize(("reset", "count"), [("never", 1), ("domain", 3), ("batch", 1 + 3 + 2)])
def test_resets_are_where_they_were_asked_for(reset: str, count: int) -> None:
    events, _ = run(batch_size=3, reset=reset)
    assert events[0] == "reset"  # nothing is left of what came before
    assert events.count("reset") == count


def test_the_order_is_seeded_and_shuffled() -> None:
    first, again, other = (run(batch_size=50, order_seed=s)[0] for s in (0, 0, 1))
    assert first == again
    assert first != other
    assert first[-1] != sorted(first[-1])


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("tont", {}, "tent"),
        ("tent", {"stepps": 3}, "steps"),
        ("tent", {"steps": "many"}, "steps=many"),
        ("tent", {"steps": 0}, "greater than 0"),
        ("bn", {"steps": 1}, "takes no 'steps'"),
    ],
)
def test_mistakes_say_what_is_allowed(name: str, arguments: dict, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        make_adapter(name, model(), arguments)


def test_tent_at_batch_one_reset_each_time_depends_on_no_other_image() -> None:
    generator = np.random.default_rng(0)
    pixels = torch.from_numpy(generator.integers(0, 255, (6, 3, 32, 32), dtype=np.uint8))
    images = LabelledImages(ImageArray(pixels), np.zeros(6, int), np.zeros(6, int), ("a",))
    answers = [
        predict_stream(
            make_adapter("tent", model(), {}),
            [images],
            Stream(batch_size=1, reset="batch", order_seed=seed),
            CPU,
            lambda count: None,
        )[0].probabilities
        for seed in (0, 1)
    ]
    np.testing.assert_array_equal(*answers)


def test_some_images_are_drawn_by_the_seed() -> None:
    whole = part("a", 0, 50)
    chosen = [Stream(images=8, order_seed=seed).draw(whole) for seed in (0, 0, 1)]
    assert [len(c) for c in chosen] == [8, 8, 8]
    shown = [c.images.take(range(8))[:, 0, 0, 0].tolist() for c in chosen]
    assert shown[0] == shown[1] == sorted(shown[0])
    assert shown[0] != shown[2]
    assert Stream(images=99).draw(whole) is whole
