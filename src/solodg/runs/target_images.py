"""Unlabelled images of a test domain, for the methods that must see some before they predict."""

import numpy as np
import torch

from solodg.algorithms import Algorithm
from solodg.data import LabelledImages
from solodg.data.transforms import to_unit
from solodg.seeding import numpy_generator


def show_target(algorithm: Algorithm, part: LabelledImages, device: torch.device) -> int:
    """Images of one domain, always the same, to a method that says it needs them; how many."""
    if not algorithm.target_images:
        return 0
    order = numpy_generator(0, "target-images", *part.domain_names).permutation(len(part))
    chosen = np.sort(order[: algorithm.target_images])
    with torch.inference_mode():
        algorithm.see_target(to_unit(part.images.take(chosen)).to(device))
    return len(chosen)


def seen_apart(algorithm: Algorithm, part: LabelledImages) -> list[LabelledImages]:
    """The domains of a part, where a method must see each before it is asked; else all as one."""
    if not algorithm.target_images:
        return [part]
    return [part.subset(np.flatnonzero(part.domains == d)) for d in np.unique(part.domains)]
