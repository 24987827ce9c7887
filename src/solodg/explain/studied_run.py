"""A trained model with the images of a swap study, and the choice of donors among them."""

from typing import NamedTuple

import torch
from torch import Tensor

from solodg.algorithms import Algorithm
from solodg.data import LabelledImages

Accuracies = dict[str, dict[str, float]]  # unseen domain -> donor -> accuracy


class StudiedRun(NamedTuple):
    """A trained model with its unseen domains, and source images for means."""

    algorithm: Algorithm
    source: LabelledImages
    targets: dict[str, LabelledImages]
    device: torch.device


def random_derangement(count: int, generator: torch.Generator) -> Tensor:
    """Returns a random permutation, (count,), that leaves no element in its place."""
    order = torch.randperm(count, generator=generator)
    other = torch.empty_like(order)
    other[order] = order.roll(1)
    return other
