"""A summary of a dataset: how many images each class has in each domain, and what was left out."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from solodg.data.domains import DomainDataset
from solodg.data.listing import LeftOut
from solodg.data.splits import Ints

_SHOWN_REASONS = 8


@dataclass(frozen=True)
class DataSummary:
    """The numbers of images of a dataset, without the images."""

    name: str
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    counts: Ints  # (domains, classes)
    groups: int | None  # how many there are; None: images have no groups
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]
    roles: dict[str, str]  # of domains that are not trained on: target or excluded

    def remarks(self) -> list[str]:
        """Returns lines on what was left out, why, and on how the data was read."""
        lines = [f"Left out, {entry}." for entry in self.left_out[:_SHOWN_REASONS]]
        rest = self.left_out[_SHOWN_REASONS:]
        if rest:
            count = sum(entry.count for entry in rest)
            lines.append(f"Left out, for {len(rest)} further reasons: {count}.")
        return [*lines, *self.notes]

    def as_json(self) -> dict[str, Any]:
        """Returns the summary as JSON values, with all counts."""
        return {
            "name": self.name,
            "images": int(self.counts.sum()),
            "classes": list(self.classes),
            "domains": list(self.domains),
            "counts": {
                domain: dict(zip(self.classes, row.tolist(), strict=True))
                for domain, row in zip(self.domains, self.counts, strict=True)
            },
            "groups": self.groups,
            "left_out": [asdict(entry) for entry in self.left_out],
            "notes": list(self.notes),
        }


def summarise(
    dataset: DomainDataset, targets: Sequence[str] = (), exclude: Sequence[str] = ()
) -> DataSummary:
    """Counts the images of a dataset; `targets` and `exclude` are domains to mark as such."""
    shape = (len(dataset.domain_names), len(dataset.classes))
    cells = dataset.domains * shape[1] + dataset.labels
    groups = dataset.groups
    return DataSummary(
        name=dataset.name,
        classes=dataset.classes,
        domains=dataset.domain_names,
        counts=np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape),
        groups=None if groups is None else len(np.unique(groups)),
        left_out=dataset.left_out,
        notes=dataset.notes,
        roles=dict.fromkeys(exclude, "excluded") | dict.fromkeys(targets, "target"),
    )
