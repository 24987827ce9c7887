"""A tiny generated dataset: three shapes in four domains, which differ in colour and contrast.

It is for tests and first steps: a model trains on it in seconds, and nothing is downloaded.
"""

import numpy as np
import torch

from solodg.data.domains import DomainDataset
from solodg.data.images import ImageArray
from solodg.data.loading import DatasetSpec, Loading
from solodg.data.splits import UNASSIGNED
from solodg.seeding import numpy_generator

_CLASSES = ("bar", "disc", "ring")
_DOMAINS = ("ash", "clay", "moss", "sky")
_COLOURS = {  # background, shape: each domain has its own
    "ash": ((0.1, 0.1, 0.1), (0.9, 0.9, 0.9)),
    "clay": ((0.9, 0.6, 0.4), (0.3, 0.1, 0.0)),
    "moss": ((0.1, 0.4, 0.1), (0.8, 0.9, 0.3)),
    "sky": ((0.7, 0.8, 1.0), (0.2, 0.2, 0.6)),
}
_PER_CELL = 30


def _load(loading: Loading) -> DomainDataset:
    generator = numpy_generator(loading.seed, "toy")
    per_cell = loading.train_images or _PER_CELL
    images, labels, domains = [], [], []
    for d, domain in enumerate(_DOMAINS):
        for c in range(len(_CLASSES)):
            for _ in range(per_cell):
                images.append(_draw(c, domain, loading.image_size, generator))
                labels.append(c)
                domains.append(d)
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)  # (N, 3, H, W)
    if loading.channels == 1:
        pixels = (pixels.sum(1, keepdim=True) // 3).to(torch.uint8)  # a sum of integers
    return DomainDataset(
        name="toy",
        images=ImageArray(pixels.contiguous()),
        labels=np.array(labels, dtype=np.int64),
        domains=np.array(domains, dtype=np.int64),
        classes=_CLASSES,
        domain_names=_DOMAINS,
        split=np.full(len(labels), UNASSIGNED, dtype=np.int64),
        protocol="random-split",
    )


def _draw(
    shape: int, domain: str, size: int, generator: np.random.Generator
) -> "np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]":
    centre_y, centre_x = generator.uniform(0.4, 0.6, 2)
    radius = generator.uniform(0.22, 0.32)
    y, x = np.mgrid[0:size, 0:size] / size
    squared_distance = (y - centre_y) ** 2 + (x - centre_x) ** 2
    if shape == 0:
        mask = (abs(y - centre_y) < radius / 3) & (abs(x - centre_x) < radius * 1.3)
    elif shape == 1:
        mask = squared_distance < radius**2
    else:
        mask = (squared_distance < radius**2) & (squared_distance > (radius * 0.6) ** 2)
    background, colour = (np.array(c) for c in _COLOURS[domain])
    image = np.where(mask[..., None], colour, background)
    image = image + generator.normal(0.0, 0.06, image.shape)
    # Sums and products of float64 are the same on every processor. A library that fuses two of them
    # changes the last of 53 bits, of which 8 are kept.
    return (np.clip(image, 0, 1) * 255).astype(np.uint8)


TOY = DatasetSpec(
    name="toy",
    title="Toy shapes",
    domains=_DOMAINS,
    load=_load,
    find=lambda _: "made on the fly",
    how_to_get="It needs no files.",
    image_size=32,
    default_targets=("sky",),
    takes_train_images=True,
)
