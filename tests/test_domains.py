"""DomainDataset: one label map, honest splits, and a target that training cannot reach."""

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from solodg.data import DATASETS, DomainDataset, Loading
from solodg.data.images import ImageArray
from solodg.data.splits import TEST, TRAIN, VAL
from solodg.errors import UserError


def test_the_type_that_training_gets_does_not_contain_the_target(toy: DomainDataset) -> None:
    """Follow every reference from SourceData: no array in reach holds a target image."""
    marked = toy.images.pixels.clone()
    target = torch.from_numpy(toy.domains == toy.domain_index("sky"))
    marked[target, 0, 0, 0], marked[~target, 0, 0, 0] = 251, 3
    source = replace(toy, images=ImageArray(marked)).leave_out(["sky"])
    assert "sky" not in source.domain_names
    seen, queue, tensors = set(), [source], 0
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            tensors += 1
            assert item.ndim != 4 or (item[:, 0, 0, 0] == 3).all()
            assert item.untyped_storage().nbytes() == item.nbytes  # not a view of more
            continue
        assert not isinstance(item, DomainDataset)
        if isinstance(item, str):
            assert item != "sky"
        module = type(item).__module__
        if module.startswith("solodg") or isinstance(item, dict | list | tuple):
            queue += gc.get_referents(item)
    assert tensors == 3


def test_splits_are_disjoint_complete_stratified_and_seeded(toy: DomainDataset) -> None:
    source = toy.leave_out(["sky"], seed=1, val_fraction=0.2)
    assert len(source.train) + len(source.val) == 270
    cells = source.val.domains * 3 + source.val.labels
    assert np.bincount(cells).tolist() == [6] * 9
    train, val = (set(part.images.keys()) for part in (source.train, source.val))
    assert not train & val
    assert set(toy.leave_out(["sky"], seed=1).val.images.keys()) == val
    assert set(toy.leave_out(["sky"], seed=2).val.images.keys()) != val


def test_the_whole_target_is_scored_unless_it_has_a_test_split(toy: DomainDataset) -> None:
    assert len(toy.targets(["sky"])["sky"]) == 90
    split = np.where(np.arange(len(toy.labels)) % 3 == 0, TEST, TRAIN)
    assert len(replace(toy, split=split).targets(["sky"])["sky"]) == 30


def test_given_splits_are_kept_as_they_are(toy: DomainDataset) -> None:
    split = np.array([TRAIN, VAL, TEST])[np.arange(len(toy.labels)) % 3]
    source = replace(toy, split=split).leave_out(["ash"], seed=5)
    assert [len(p) for p in (source.train, source.val, source.test)] == [90, 90, 90]


def test_groups_stay_on_one_side(toy: DomainDataset) -> None:
    groups = np.arange(len(toy.labels)) // 6
    numbered = replace(
        toy, groups=groups, images=ImageArray(torch.arange(len(groups))[:, None].float())
    )
    source = numbered.leave_out(["sky"], val_fraction=0.3)
    train, val = (
        set((part.images.take(range(len(part)))[:, 0].int() // 6).tolist())
        for part in (source.train, source.val)
    )
    assert not train & val
    assert len(source.val) / 270 == pytest.approx(0.3, abs=0.05)


def test_domain_spelling_does_not_matter_but_names_do(toy: DomainDataset) -> None:
    assert toy.canonical(["SKY", "sky"]) == ("sky",)
    with pytest.raises(UserError, match="Did you mean 'moss'"):
        toy.leave_out(["mos"])


def test_a_class_that_only_the_target_has_is_refused(toy: DomainDataset) -> None:
    labels = np.where(toy.domains == toy.domain_index("sky"), 3, toy.labels)
    wider = replace(toy, labels=labels, classes=(*toy.classes, "star"))
    with pytest.raises(UserError, match="unknown class 'star'"):
        wider.leave_out(["sky"])
    misspelt = replace(toy, labels=labels, classes=(*toy.classes, "rings"))
    with pytest.raises(UserError, match="Did you mean 'ring'"):
        misspelt.leave_out(["sky"])


def test_nothing_is_left_when_all_domains_are_targets(toy: DomainDataset) -> None:
    with pytest.raises(UserError, match="nothing is left"):
        toy.leave_out(["ash", "clay", "moss", "sky"])


def test_the_fingerprint_follows_images_labels_and_names(toy: DomainDataset) -> None:
    pixels = toy.images.pixels.clone()
    pixels[5, 0, 0, 0] += 1
    variants = [
        toy,
        replace(toy, images=ImageArray(pixels)),
        replace(toy, labels=toy.labels[::-1].copy()),
        replace(toy, classes=("x", "y", "z")),
    ]
    assert len({v.fingerprint() for v in variants}) == 4
    again = DATASETS["toy"].load(Loading(Path("elsewhere"), image_size=32, channels=3))
    assert again.fingerprint() == toy.fingerprint()


def test_balanced_takes_the_same_number_of_every_cell(toy: DomainDataset) -> None:
    part = toy.leave_out(["sky"]).train
    chosen = part.balanced(4, seed=0)
    assert np.bincount(chosen.domains * 3 + chosen.labels).tolist() == [4] * 9
    assert np.array_equal(chosen.labels, part.balanced(4, seed=0).labels)
    assert len(part.balanced(10_000, seed=0)) == len(part)


def test_names_that_differ_only_in_punctuation_are_different_domains(toy: DomainDataset) -> None:
    named = replace(toy, domain_names=("-15", "15", "v1.0", "v10"))
    assert named.canonical(["-15"]) == ("-15",)
    assert named.canonical(["v10"]) == ("v10",)
    with pytest.raises(UserError, match="unknown domain"):
        named.canonical(["v1_0"])  # could be either


def test_an_open_image_goes_where_its_group_was_put(toy: DomainDataset) -> None:
    groups = np.arange(len(toy.labels)) // 2
    split = np.where(np.arange(len(groups)) % 2 == 0, np.array([TRAIN, VAL, TEST])[groups % 3], 0)
    numbered = replace(
        toy,
        groups=groups,
        split=split,
        images=ImageArray(torch.arange(len(groups))[:, None].float()),
    )
    source = numbered.leave_out(["sky"])
    for part, remainder in ((source.train, 0), (source.val, 1), (source.test, 2)):
        numbers = part.images.take(range(len(part)))[:, 0].int() // 2
        assert set((numbers % 3).tolist()) == {remainder}


def test_a_group_in_two_given_splits_is_refused(toy: DomainDataset) -> None:
    split = np.where(np.arange(len(toy.labels)) % 2 == 0, TRAIN, VAL)
    with pytest.raises(UserError, match="more than one split"):
        replace(toy, groups=np.arange(len(split)) // 2, split=split).leave_out(["sky"])


def test_a_domain_that_is_one_group_is_not_held_out_whole_in_silence(toy: DomainDataset) -> None:
    with pytest.raises(UserError, match="has no training image"):
        replace(toy, groups=toy.domains).leave_out(["sky"])


def test_the_fingerprint_of_the_source_follows_the_split(toy: DomainDataset) -> None:
    prints = {toy.leave_out(["sky"], seed=seed).fingerprint() for seed in (0, 0, 1)}
    assert len(prints) == 2
