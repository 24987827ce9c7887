"""Images with their classes and domains, as subsets and batches of them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from solodg.data.images import DrawnImages, Images, Indices
from solodg.data.splits import Ints
from solodg.seeding import numpy_generator
from solodg.types import Batch


@dataclass(frozen=True)
class LabelledImages:
    """Images with their classes and domains; `domains` are positions in `domain_names`."""

    images: Images
    labels: Ints
    domains: Ints
    domain_names: tuple[str, ...]
    groups: Ints | None = None  # (N,) numbers of groups, such as patients

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def domain_name(self) -> str:
        """Returns the name of the domain of images that are all of one domain."""
        return self.domain_names[int(self.domains[0])]

    @property
    def domain_sizes(self) -> tuple[int, ...]:
        """Returns the number of images of each domain, in the order of `domain_names`."""
        return tuple(np.bincount(self.domains, minlength=len(self.domain_names)).tolist())

    def subset(self, indices: Indices) -> "LabelledImages":
        """Returns the chosen images with their labels; the others cannot be reached from it."""
        chosen = np.asarray(indices, dtype=np.int64)
        return replace(
            self,
            images=self.images.subset(chosen),
            labels=self.labels[chosen],
            domains=self.domains[chosen],
            groups=None if self.groups is None else self.groups[chosen],
        )

    def batch(self, indices: Indices) -> Batch:
        """Reads the chosen images as one batch."""
        chosen = np.asarray(indices, dtype=np.int64)
        return Batch(
            self.images.take(chosen),
            torch.from_numpy(self.labels[chosen]),
            torch.from_numpy(self.domains[chosen]),
        )

    def drawn_batch(self, indices: Indices, generator: np.random.Generator) -> Batch:
        """Reads the chosen images as a batch for training.

        Where augmented copies of images are stored, it reads one copy of each, drawn at random.
        """
        if not isinstance(self.images, DrawnImages):
            return self.batch(indices)
        chosen = np.asarray(indices, dtype=np.int64)
        return Batch(
            self.images.draw(chosen, generator),
            torch.from_numpy(self.labels[chosen]),
            torch.from_numpy(self.domains[chosen]),
        )

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Yields all images once, in order."""
        for start in range(0, len(self), batch_size):
            yield self.batch(np.arange(start, min(start + batch_size, len(self))))

    def balanced(self, per_cell: int, seed: int) -> "LabelledImages":
        """Draws at most `per_cell` images of every class in every domain, by `seed`."""
        generator = numpy_generator(seed, "balanced")
        order = generator.permutation(len(self))
        cells = self.domains[order] * (int(self.labels.max(initial=0)) + 1) + self.labels[order]
        chosen = [order[cells == cell][:per_cell] for cell in np.unique(cells)]
        return self.subset(np.sort(np.concatenate(chosen)))
