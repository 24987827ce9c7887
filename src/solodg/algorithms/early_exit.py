"""Early exit: an image whose class is clear after some readings is not read again.

Readings (readings.py) are computed one after the other. The gap of an image is the difference
between its two largest logits, from the readings so far. Where the gap reaches the margin, no
further reading is computed. Below it, the weight of every further reading grows from 0, at the
margin, to 1. So predictions do not jump where a gap lies near the margin, and a change of
rounding, such as that by another batch size, changes a prediction by rounding alone.

A prediction depends on its own image only. The margin is chosen on source domains that are held
out: the smallest with which at most a share `MOST_LOST` of their images turns from right to wrong.
What turns from wrong to right does not count, since it is about as much, by chance.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from solodg.models.extractor import ReadRows, rows_of

NEVER = 1e9  # a margin that no gap reaches
LARGEST = 1e6  # above it are `NEVER`, and means of margins with it
MARGINS = (0.05, 0.075, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3, 0.4, 0.6, NEVER)
MOST_LOST = 0.01  # of held-out images: right by all readings, and wrong with the margin
RAMP = 0.25  # the weight of further readings reaches 1 at a gap of so much less, of the margin


def gap(logits: Tensor) -> Tensor:
    """Returns the difference between the two largest logits of each image: (B, C) -> (B,).

    It is 0 where there is one class.
    """
    if logits.shape[1] == 1:
        return torch.zeros_like(logits[:, 0])
    best = logits.topk(2, dim=1).values
    return best[:, 0] - best[:, 1]


def further_weight(logits: Tensor, margin: float) -> Tensor:
    """Returns the weight of the next reading of each image, 0 to 1: (B, C) -> (B,)."""
    return ((margin - gap(logits)) / (RAMP * margin)).clamp(0, 1)


def read_until_clear(
    readers: Sequence[ReadRows], classify: Callable[[Tensor], Tensor], margin: float
) -> tuple[Tensor, Tensor]:
    """Returns the weighted mean over the readings (B, D), and how many were computed (B,).

    `classify` returns the logits (B, C) of means. The weight of the first reading is 1, and that of
    each other one the product of its `further_weight` and of all before.
    """
    total = readers[0](None)
    weight = total.new_ones(len(total))  # of the reading just added
    weights, count = weight, torch.ones_like(weight)
    for read in readers[1:]:
        weight = weight * further_weight(classify(total / weights[:, None]), margin)
        rows = weight.nonzero()[:, 0]
        if not len(rows):
            break
        everywhere = len(rows) == len(total)
        found = read(None if everywhere else rows) * weight[rows, None]
        total = total + found if everywhere else total.index_add(0, rows, found)
        weights = weights + weight
        count = count + (weight > 0)
    return total / weights[:, None], count


def mean_until_clear(logits: Tensor, margin: float) -> Tensor:
    """Returns the mean (B, C) that `read_until_clear` makes of all readings' logits (R, B, C)."""
    readers: list[ReadRows] = [partial(rows_of, each) for each in logits]
    return read_until_clear(readers, lambda mean: mean, margin)[0]


class MarginChoice:
    """Counts, over batches of held-out images, what each margin loses.

    Each held-out domain weighs the same.
    """

    def __init__(self, domains: Sequence[int]) -> None:
        self._lost = {domain: torch.zeros(len(MARGINS)) for domain in domains}
        self._images = dict.fromkeys(domains, 0)

    def add(self, domain: int, logits: Tensor, y: Tensor) -> None:
        """Adds images of a domain, from the logits of each reading (R, B, C)."""
        right = logits.mean(0).argmax(1) == y
        for place, margin in enumerate(MARGINS):
            chosen = mean_until_clear(logits, margin).argmax(1)
            self._lost[domain][place] += (right & (chosen != y)).sum().cpu()
        self._images[domain] += len(y)

    def lost(self) -> Tensor:
        """Returns the share of images that each margin loses, mean over domains with images."""
        shares = [self._lost[domain] / count for domain, count in self._images.items() if count]
        return torch.stack(shares).mean(0)

    def best(self) -> float:
        """Returns the smallest margin that loses at most `MOST_LOST`."""
        return MARGINS[int((self.lost() <= MOST_LOST).nonzero()[0])]
