"""Images with their classes and domains, and the part of them that training receives.

`DomainDataset.leave_out(targets)` returns a `SourceData` without the target domains: it holds
neither their images nor their labels, nor a reference to anything that does. Only
`DomainDataset.targets` returns images of target domains.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from solodg.data.images import Images, digest
from solodg.data.labelled_images import LabelledImages
from solodg.data.listing import EMPTY_DOMAIN, LeftOut
from solodg.data.splits import (
    TEST,
    TRAIN,
    UNASSIGNED,
    VAL,
    Bools,
    Ints,
    assign_parts,
    groups_in_two_parts,
)
from solodg.errors import UserError, unknown_name
from solodg.seeding import numpy_generator

Kind = Literal["photo", "digit"]  # decides the augmentation


@dataclass(frozen=True)
class SourceData:
    """The data that training receives: images of the source domains, and the names of classes."""

    train: LabelledImages
    val: LabelledImages
    test: LabelledImages  # neither trained on nor used to select a model; may be empty
    classes: tuple[str, ...]
    kind: Kind
    shared_groups: int = 0  # groups that the images to score share with `train` or `val`

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
        """Returns the data without one domain, which then serves for validation."""

        def without(part: LabelledImages) -> LabelledImages:
            kept = part.subset(np.flatnonzero(part.domains != domain))
            names = tuple(n for i, n in enumerate(part.domain_names) if i != domain)
            numbers = kept.domains - (kept.domains > domain)
            return replace(kept, domains=numbers, domain_names=names)

        held = self.held_out(domain)
        return replace(self, train=without(self.train), val=held, test=without(self.test))

    def held_out(self, domain: int) -> LabelledImages:
        """Returns the images that validate a model trained without one domain.

        These are its validation images. A split by groups may give a domain none: then they are
        its training images, which such a model does not train on, but without the groups that
        other domains train on. Raises `UserError` if no image is left.
        """
        val = np.flatnonzero(self.val.domains == domain)
        if len(val):
            return self.val.subset(val)
        own = self.train.domains == domain
        if self.train.groups is not None:
            own &= ~np.isin(self.train.groups, self.train.groups[~own])
        if not own.any():
            raise UserError(
                f"source domain {self.domain_names[domain]!r} cannot be held out: it has no "
                "validation image, and other domains train on all its groups. Mark some groups "
                "with split val, or select by source validation (without --select)."
            )
        return self.train.subset(np.flatnonzero(own))

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
    left_out: tuple[LeftOut, ...] = ()  # of the folder
    notes: tuple[str, ...] = ()  # remarks for the user on how the data was read

    def domain_index(self, name: str) -> int:
        """Returns the number of a domain by its name.

        Case, spaces, dashes and underscores are ignored unless two names differ in them alone.
        """
        if name in self.domain_names:
            return self.domain_names.index(name)
        wanted = normalise_name(name)
        alike = [i for i, n in enumerate(self.domain_names) if normalise_name(n) == wanted]
        if len(alike) != 1:
            empty = [str(entry) for entry in self.left_out if entry.reason == EMPTY_DOMAIN]
            hint = f"Left out: {empty[0]}." if empty else ""
            raise unknown_name(f"domain of {self.name}", name, self.domain_names, hint)
        return alike[0]

    def canonical(self, targets: Sequence[str]) -> tuple[str, ...]:
        """Returns the targets as the dataset spells them, each once."""
        return tuple(dict.fromkeys(self.domain_names[self.domain_index(t)] for t in targets))

    def leave_out(
        self,
        targets: Sequence[str],
        *,
        exclude: Sequence[str] = (),
        part: int = TEST,
        seed: int = 0,
        val_fraction: float = 0.2,
        allow_shared_groups: bool = False,
    ) -> SourceData:
        """Returns the other domains, split into training, validation and test images.

        Without targets these are all domains, but for those to `exclude`.
        Images without a given part go to training or validation, by `seed` and `val_fraction`.
        Raises `UserError` if a group with images to score, the `part` of the targets, is also
        among the training or validation images, unless `allow_shared_groups`. Of the domains to
        `exclude` nothing is scored, so their groups are not compared.
        """
        scored = [self.domain_index(name) for name in self.canonical(targets)]
        left_out = {*scored, *(self.domain_index(name) for name in exclude)}
        kept = [i for i in range(len(self.domain_names)) if i not in left_out]
        if not kept:
            raise UserError(f"no domain of {self.name} is a source: nothing is left to train on.")
        split, in_source = self._assigned(kept, seed, val_fraction), np.isin(self.domains, kept)
        self._check_groups(split, in_source)
        to_score = np.zeros(len(self.labels), dtype=bool)
        for index in scored:
            to_score |= self._scored(index, part, seed, val_fraction)
        used = in_source & np.isin(split, (TRAIN, VAL))
        if part == VAL:  # given validation images of all domains are on one side of the split
            used &= self.split != VAL
        shared = self._shared_groups(used, to_score, allow_shared_groups)
        train, val, test = (
            self._part(in_source & (split == code), kept) for code in (TRAIN, VAL, TEST)
        )
        source = SourceData(train, val, test, self.classes, self.kind, shared)
        source.check()
        return source

    def targets(
        self,
        names: Sequence[str],
        part: int = TEST,
        *,
        seed: int = 0,
        val_fraction: float = 0.2,
    ) -> dict[str, LabelledImages]:
        """Returns the images to score of each target domain: its test images, or all of them.

        With `part=VAL` these are its validation images. Plans that choose settings score them,
        with a source domain in place of the target, so that no test image is used. Where none are
        given, they are drawn by `seed` and `val_fraction` as for a source domain.
        """
        return {
            name: self._part(self._scored(index, part, seed, val_fraction), [index])
            for name in self.canonical(names)
            for index in (self.domain_index(name),)
        }

    def fingerprint(self) -> str:
        """Returns a hash that changes when an image, a label, a name or the given split does.

        Groups count where they decide the split: where some image has no given part.
        """
        names = "\n".join((*self.images.keys(), "", *self.classes, "", *self.domain_names))
        arrays = [self.labels, self.domains, self.split]
        if self.groups is not None and (self.split == UNASSIGNED).any():
            arrays.append(self.groups)
        return digest(names.encode() + b"".join(a.tobytes() for a in arrays))

    def _part(self, mask: Bools, kept: list[int]) -> LabelledImages:
        indices = np.flatnonzero(mask)
        renumber = np.full(len(self.domain_names), -1, dtype=np.int64)
        renumber[kept] = np.arange(len(kept))
        return LabelledImages(
            self.images.subset(indices),
            self.labels[indices],
            renumber[self.domains[indices]],
            tuple(self.domain_names[i] for i in kept),
            None if self.groups is None else self.groups[indices],
        )

    def _assigned(self, kept: list[int], seed: int, val_fraction: float) -> Ints:
        """Returns `split` with the unassigned images of the kept domains divided by `seed`."""
        cells = self.domains * len(self.classes) + self.labels
        generator = numpy_generator(seed, "split", self.name)
        here = np.isin(self.domains, kept)
        return assign_parts(self.split, here, cells, self.groups, val_fraction, generator)

    def _scored(self, domain: int, part: int, seed: int, val_fraction: float) -> Bools:
        """Returns which images of a domain are scored, (N,)."""
        own: Bools = self.domains == domain
        found: Bools = own & (self.split == part)
        if part == VAL and not found.any():
            found = own & (self._assigned([domain], seed, val_fraction) == VAL)
            if not found.any():
                raise UserError(
                    f"domain {self.domain_names[domain]!r} of {self.name} has no validation image "
                    "to score. Mark some of its images with split val, or leave some without a "
                    "split."
                )
        return found if found.any() else own

    def _check_groups(self, split: Ints, in_source: Bools) -> None:
        """Raises `UserError` if source images of one group are in two parts."""
        if self.groups is None:
            return
        torn = groups_in_two_parts(self.groups[in_source], split[in_source])
        if len(torn):
            raise UserError(
                f"{len(torn)} group(s) of {self.name} are in more than one split, e.g. that of "
                f"{self._example(in_source, torn[0])}. Give all images of a group the same split."
            )

    def _shared_groups(self, used: Bools, scored: Bools, allowed: bool) -> int:
        """Returns how many groups have both used and scored images: an error unless allowed."""
        if self.groups is None:
            return 0
        shared = np.intersect1d(self.groups[used], self.groups[scored])
        if len(shared) and not allowed:
            raise UserError(
                f"{len(shared)} group(s) of {self.name} have images both in the source domains and "
                f"among the target images to score, e.g. {self._example(used, shared[0])} and "
                f"{self._example(scored, shared[0])}: the score would not be one of unseen groups. "
                "Keep each group on one side (remove its images on the other, or mark its source "
                "images with split test), or add --allow-shared-groups: every record then says so."
            )
        return len(shared)

    def _example(self, among: Bools, group: int) -> str:
        """Returns the path of the first image of a group; the hash of one that has no file."""
        first = np.flatnonzero(among & (self.groups == group))[:1]
        return self.images.subset(first).keys()[0].rsplit(":", 1)[0]


def normalise_name(name: str) -> str:
    """Returns the lower-case letters and digits of a name: `Real World` becomes `realworld`."""
    return "".join(c for c in name.lower() if c.isalnum())
