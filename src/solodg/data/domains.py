"""Images with their classes and domains, and the part of them that training receives.

`DomainDataset.leave_out(targets)` returns a `SourceData` without the target domains: it holds
neither their images nor their labels, nor a reference to anything that does. Only
`DomainDataset.targets` returns images of target domains.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from solodg.data.images import Images, Indices, digest
from solodg.errors import UserError, unknown_name
from solodg.seeding import numpy_generator
from solodg.types import Batch

Ints = NDArray[np.int64]
Kind = Literal["photo", "digit"]  # decides the augmentation

UNASSIGNED, TRAIN, VAL, TEST = 0, 1, 2, 3
SPLIT_NAMES = {"": UNASSIGNED, "train": TRAIN, "val": VAL, "test": TEST}


@dataclass(frozen=True)
class LabelledImages:
    """Images with their classes and domains; `domains` are positions in `domain_names`."""

    images: Images
    labels: Ints
    domains: Ints
    domain_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def domain_name(self) -> str:
        """Returns the name of the domain of images that are all of one domain."""
        return self.domain_names[int(self.domains[0])]

    def subset(self, indices: Indices) -> "LabelledImages":
        """Returns the chosen images with their labels; the others cannot be reached from it."""
        chosen = np.asarray(indices, dtype=np.int64)
        return replace(
            self,
            images=self.images.subset(chosen),
            labels=self.labels[chosen],
            domains=self.domains[chosen],
        )

    def batch(self, indices: Indices) -> Batch:
        """Reads the chosen images as one batch."""
        chosen = np.asarray(indices, dtype=np.int64)
        return Batch(
            self.images.take(chosen),
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


@dataclass(frozen=True)
class SourceData:
    """The data that training receives: images of the source domains, and the names of classes."""

    train: LabelledImages
    val: LabelledImages
    test: LabelledImages  # neither trained on nor used to select a model; may be empty
    classes: tuple[str, ...]
    kind: Kind

    @property
    def domain_names(self) -> tuple[str, ...]:
        """Returns the names of the source domains."""
        return self.train.domain_names

    def check(self) -> None:
        """Raises `UserError` if a class or domain has no training image, or if `val` is empty."""
        missing = sorted(set(range(len(self.classes))) - set(self.train.labels.tolist()))
        if missing:
            raise unknown_name(
                "class",
                self.classes[missing[0]],
                [c for i, c in enumerate(self.classes) if i not in missing],
                f"No source domain ({', '.join(self.domain_names)}) has a training image of it: "
                "rename its folder, remove it, or add images of it to a source domain.",
            )
        for number, name in enumerate(self.domain_names):
            if not (self.train.domains == number).any():
                raise UserError(
                    f"source domain {name!r} has no training image: all of them are held out. Give "
                    "it some with a split column, or make groups smaller than domains."
                )
        if len(self.val) == 0:
            raise UserError(
                "no validation images: every class of every domain has a single image. Add images, "
                "or mark some with split val in a CSV manifest."
            )

    def holding_out(self, domain: int) -> "SourceData":
        """Returns the data without one domain, but with its validation images for validation."""

        def without(part: LabelledImages) -> LabelledImages:
            kept = part.subset(np.flatnonzero(part.domains != domain))
            names = tuple(n for i, n in enumerate(part.domain_names) if i != domain)
            numbers = kept.domains - (kept.domains > domain)
            return replace(kept, domains=numbers, domain_names=names)

        held = self.val.subset(np.flatnonzero(self.val.domains == domain))
        return replace(self, train=without(self.train), val=held, test=without(self.test))

    def fingerprint(self) -> str:
        """Returns a hash that changes when an image changes or moves to another part."""
        parts = (self.train, self.val, self.test)
        return digest("\n\n".join("\n".join(part.images.keys()) for part in parts).encode())

    def mapped(self, change: Callable[[LabelledImages], LabelledImages]) -> "SourceData":
        """Returns the data with `change` applied to each of its parts."""
        return replace(self, train=change(self.train), val=change(self.val), test=change(self.test))


@dataclass(frozen=True)
class DomainDataset:
    """Every image of every domain.

    All domains share one list of classes: where a domain lacks a class, the others keep their
    numbers.
    """

    name: str
    images: Images
    labels: Ints  # (N,) positions in classes
    domains: Ints  # (N,) positions in domain_names
    classes: tuple[str, ...]
    domain_names: tuple[str, ...]
    split: Ints  # (N,) UNASSIGNED, TRAIN, VAL or TEST
    protocol: str  # names the way `split` was made
    kind: Kind = "photo"
    groups: Ints | None = None  # (N,) images of one group are always in the same part
    facts: dict[str, Any] = field(default_factory=dict)  # provenance, for records

    def domain_index(self, name: str) -> int:
        """Returns the number of a domain by its name.

        Case, spaces, dashes and underscores are ignored unless two names differ in them alone.
        """
        if name in self.domain_names:
            return self.domain_names.index(name)
        wanted = normalise_name(name)
        alike = [i for i, n in enumerate(self.domain_names) if normalise_name(n) == wanted]
        if len(alike) != 1:
            raise unknown_name(f"domain of {self.name}", name, self.domain_names)
        return alike[0]

    def canonical(self, targets: Sequence[str]) -> tuple[str, ...]:
        """Returns the targets as the dataset spells them, each once."""
        if not targets:
            raise UserError(
                f"{self.name} needs a target: --target with one of {', '.join(self.domain_names)}."
            )
        return tuple(dict.fromkeys(self.domain_names[self.domain_index(t)] for t in targets))

    def leave_out(
        self, targets: Sequence[str], *, seed: int = 0, val_fraction: float = 0.2
    ) -> SourceData:
        """Returns the other domains, split into training, validation and test images.

        Images without a given part go to training or validation, by `seed` and `val_fraction`.
        """
        left_out = {self.domain_index(name) for name in self.canonical(targets)}
        kept = [i for i in range(len(self.domain_names)) if i not in left_out]
        if not kept:
            raise UserError(f"all domains of {self.name} are targets: nothing is left to train on.")
        split = self._assigned(kept, seed, val_fraction)
        parts = {
            part: self._part((split == part) & np.isin(self.domains, kept), kept)
            for part in (TRAIN, VAL, TEST)
        }
        self._check_groups(split)
        source = SourceData(parts[TRAIN], parts[VAL], parts[TEST], self.classes, self.kind)
        source.check()
        return source

    def targets(self, names: Sequence[str], part: int = TEST) -> dict[str, LabelledImages]:
        """Returns the images to score of each target domain: its test images, or all of them.

        With `part=VAL` these are its validation images. Plans that choose settings score them,
        with a source domain in place of the target, so that no test image is used.
        """
        result = {}
        for name in self.canonical(names):
            index = self.domain_index(name)
            mask = self.domains == index
            if (self.split[mask] == part).any():
                mask &= self.split == part
            result[name] = self._part(mask, [index])
        return result

    def fingerprint(self) -> str:
        """Returns a hash that changes when an image, a label, a name or the given split does."""
        names = "\n".join((*self.images.keys(), "", *self.classes, "", *self.domain_names))
        arrays = (self.labels, self.domains, self.split)
        return digest(names.encode() + b"".join(a.tobytes() for a in arrays))

    def _part(self, mask: NDArray[np.bool_], kept: list[int]) -> LabelledImages:
        indices = np.flatnonzero(mask)
        renumber = np.full(len(self.domain_names), -1, dtype=np.int64)
        renumber[kept] = np.arange(len(kept))
        return LabelledImages(
            self.images.subset(indices),
            self.labels[indices],
            renumber[self.domains[indices]],
            tuple(self.domain_names[i] for i in kept),
        )

    def _assigned(self, kept: list[int], seed: int, val_fraction: float) -> Ints:
        """Returns `split` with the unassigned images of the kept domains divided by `seed`."""
        split = self.split.copy()
        unassigned = np.flatnonzero((split == UNASSIGNED) & np.isin(self.domains, kept))
        if len(unassigned) == 0:
            return split
        generator = numpy_generator(seed, "split", self.name)
        if self.groups is not None:
            given = {
                int(group): int(part)
                for group, part in zip(self.groups, self.split, strict=True)
                if part != UNASSIGNED
            }
            for row in unassigned:  # an unassigned image joins the part of its group
                split[row] = given.get(int(self.groups[row]), UNASSIGNED)
            unassigned = unassigned[split[unassigned] == UNASSIGNED]
            if len(unassigned) == 0:
                return split
            in_val = _group_holdout(self.groups[unassigned], val_fraction, generator)
        else:
            cells = self.domains[unassigned] * len(self.classes) + self.labels[unassigned]
            in_val = _stratified_holdout(cells, val_fraction, generator)
        split[unassigned] = np.where(in_val, VAL, TRAIN)
        return split

    def _check_groups(self, split: Ints) -> None:
        """Raises `UserError` if images of one group are in two parts."""
        if self.groups is None:
            return
        pairs = np.unique(np.stack([self.groups, split])[:, split != UNASSIGNED], axis=1)
        groups, counts = np.unique(pairs[0], return_counts=True)
        if (counts > 1).any():
            member = int(np.flatnonzero(self.groups == groups[counts > 1][0])[0])
            raise UserError(
                f"{int((counts > 1).sum())} group(s) of {self.name} are in more than one split, "
                f"e.g. that of {self.images.keys()[member].rsplit(':', 1)[0]}. Give all images "
                "of a group the same split."
            )


def normalise_name(name: str) -> str:
    """Returns the lower-case letters and digits of a name: `Real World` becomes `realworld`."""
    return "".join(c for c in name.lower() if c.isalnum())


def _stratified_holdout(
    cells: Ints, fraction: float, generator: np.random.Generator
) -> NDArray[np.bool_]:
    """Holds out the same share of every cell; a cell of one image stays in training."""
    held = np.zeros(len(cells), dtype=bool)
    for cell in np.unique(cells):
        members = generator.permutation(np.flatnonzero(cells == cell))
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        held[members[:count]] = True
    return held


def _group_holdout(
    groups: Ints, fraction: float, generator: np.random.Generator
) -> NDArray[np.bool_]:
    """Holds out whole groups in random order up to the share; at least one group is trained on."""
    names, counts = np.unique(groups, return_counts=True)
    if len(names) < 2:
        raise UserError("a grouped split needs at least two groups in the source domains.")
    order = generator.permutation(len(names))
    before = np.concatenate([[0], np.cumsum(counts[order])[:-1]])
    chosen = order[before < fraction * len(groups)][: len(names) - 1]
    return np.isin(groups, names[chosen])
