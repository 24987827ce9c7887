"""The largest image, and how many go through a model at once at inference: one rule for every use.

Without torch, so that an exported model follows it too.
"""

MAX_IMAGE_SIZE = 4096  # pixels a side; the activations of one such image take gigabytes
MAX_READINGS = 16  # of image norm: how often a backbone reads each image
_NUMBERS = 16 * 3 * 224 * 224  # measured: "Measured batch sizes" in docs/performance.md
_FEWEST, _MOST = 8, 512


def inference_batch_size(numbers: int) -> int:
    """Returns how many inputs of so many numbers each make a batch.

    That is 16 images of 224 pixels, more of smaller ones, and up to 512 rows of features. A larger
    batch is no faster, since its activations leave the processor's cache. No prediction depends on
    the other images of its batch, so the size changes results by rounding at most.
    """
    return max(_FEWEST, min(_MOST, _NUMBERS // max(numbers, 1)))
