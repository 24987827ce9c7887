"""The division of images into training, validation and test images: given, or drawn by seed."""

import numpy as np
from numpy.typing import NDArray

from solodg.errors import UserError

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

UNASSIGNED, TRAIN, VAL, TEST = 0, 1, 2, 3
SPLIT_NAMES = {"": UNASSIGNED, "train": TRAIN, "val": VAL, "test": TEST,
               "id_val": VAL, "id_test": TEST}  # fmt: skip
# WILDS calls held-out images of the source domains id_val and id_test.


def assign_parts(
    given: Ints,
    here: Bools,
    cells: Ints,
    groups: Ints | None,
    val_fraction: float,
    generator: np.random.Generator,
) -> Ints:
    """Returns the given parts (N,), with training or validation for the unassigned images `here`.

    An unassigned image joins the part of its group. The others are divided by whole groups, or,
    without groups, by the same share of every cell (a class in a domain).
    """
    parts = given.copy()
    unassigned = np.flatnonzero((parts == UNASSIGNED) & here)
    if groups is not None and len(unassigned):
        # What a group has among the images `here` counts more than what it has elsewhere.
        assigned = [np.flatnonzero((given != UNASSIGNED) & mask) for mask in (~here, here)]
        rows = np.concatenate(assigned)
        part_of = dict(zip(groups[rows].tolist(), given[rows].tolist(), strict=True))
        for row in unassigned:
            parts[row] = part_of.get(int(groups[row]), UNASSIGNED)
        unassigned = unassigned[parts[unassigned] == UNASSIGNED]
    if len(unassigned) == 0:
        return parts
    if groups is not None:
        in_val = _group_holdout(groups[unassigned], val_fraction, generator)
    else:
        in_val = _stratified_holdout(cells[unassigned], val_fraction, generator)
    parts[unassigned] = np.where(in_val, VAL, TRAIN)
    return parts


def groups_in_two_parts(groups: Ints, parts: Ints) -> Ints:
    """Returns the groups that have images in more than one part."""
    pairs = np.unique(np.stack([groups, parts]), axis=1)
    found, counts = np.unique(pairs[0], return_counts=True)
    several: Ints = found[counts > 1]
    return several


def _stratified_holdout(cells: Ints, fraction: float, generator: np.random.Generator) -> Bools:
    """Holds out the same share of every cell; a cell of one image stays in training."""
    held = np.zeros(len(cells), dtype=bool)
    for cell in np.unique(cells):
        members = generator.permutation(np.flatnonzero(cells == cell))
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        held[members[:count]] = True
    return held


def _group_holdout(groups: Ints, fraction: float, generator: np.random.Generator) -> Bools:
    """Holds out whole groups in random order up to the share; at least one group is trained on."""
    names, counts = np.unique(groups, return_counts=True)
    if len(names) < 2:
        raise UserError("a split by groups needs at least two groups, and there is one.")
    order = generator.permutation(len(names))
    before = np.concatenate([[0], np.cumsum(counts[order])[:-1]])
    chosen = order[before < fraction * len(groups)][: len(names) - 1]
    held: Bools = np.isin(groups, names[chosen])
    return held
