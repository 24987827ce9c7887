"""The size of inference batches: one rule, in the same memory whatever the image size."""

import pytest

from solodg.inference import inference_batch_size


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
