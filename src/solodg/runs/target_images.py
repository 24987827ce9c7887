"""Unlabelled images of a test domain, for the methods that need some before they predict."""

import numpy as np
import torch

from solodg.algorithms import Algorithm
from solodg.data import LabelledImages
from solodg.data.transforms import to_unit
from solodg.seeding import numpy_generator


def give_target_images(algorithm: Algorithm, part: LabelledImages, device: torch.device) -> int:
    """Gives an algorithm the unlabelled images of a domain that it needs before it predicts.

    Always draws the same images of `part`, which holds one domain. Returns their number; most
    methods need none.
    """
    if not algorithm.target_images:
        return 0
    order = numpy_generator(0, "target-images", *part.domain_names).permutation(len(part))
    chosen = np.sort(order[: algorithm.target_images])
    with torch.inference_mode():
        algorithm.see_target(to_unit(part.images.take(chosen)).to(device))
    return len(chosen)


def split_for_target_images(algorithm: Algorithm, part: LabelledImages) -> list[LabelledImages]:
    """Splits images by domain if the algorithm needs images of each; else returns one part."""
    if not algorithm.target_images:
        return [part]
    return [part.subset(np.flatnonzero(part.domains == d)) for d in np.unique(part.domains)]
