"""The size of inference batches: one rule, in the same memory whatever the image size."""

import pytest

from solodg.inference import inference_batch_size
from solodg.models.allocator import images_at_once


@pytest.mark.parametrize(
    ("numbers", "size"),
    [
        (3 * 224 * 224, 16),
        (3 * 112 * 112, 64),
        (3 * 16 * 16, 512),  # no more than 512
        (1280, 512),  # features
        (3 * 1000 * 1000, 8),  # no fewer than 8
    ],
)
def test_smaller_inputs_make_larger_batches(numbers: int, size: int) -> None:
    assert inference_batch_size(numbers) == size


def test_where_freed_memory_is_not_kept_maps_stay_in_blocks_that_are_kept(monkeypatch) -> None:
    numbers, largest = 3 * 224 * 224, 96 * 112 * 112
    monkeypatch.setattr("solodg.models.allocator.freed_memory_is_kept", lambda: True)
    assert images_at_once(numbers, largest) == 16
    monkeypatch.setattr("solodg.models.allocator.freed_memory_is_kept", lambda: False)
    assert images_at_once(numbers, largest) == 6
    assert images_at_once(numbers, 100 * largest) == 1
    assert images_at_once(numbers, 1) == 16
