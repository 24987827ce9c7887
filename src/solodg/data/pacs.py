"""PACS (Li et al., 2017): 9,991 images of 7 classes as photo, art painting, cartoon, sketch.

The split is the authors' fixed one, as in the paper, where their lists are found
(`<domain>_{train,crossval}_kfold.txt`), otherwise a random one by seed. The whole target domain is
scored either way.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from solodg.data.domains import DomainDataset
from solodg.data.folder import load_folder, published, require_folder
from solodg.data.images import ImageFiles
from solodg.data.loading import Loading
from solodg.data.splits import TRAIN, VAL
from solodg.errors import UserError
from solodg.storage import read_text

_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
_FOLDERS = ("PACS", "pacs", "PACS/kfold", "pacs/kfold")
_HOW = (
    "Get it from https://domaingeneralization.github.io: 9,991 images. The authors' split is used "
    "if their lists (art_painting_train_kfold.txt, ...) lie in a folder PACS-splits beside it."
)
_LISTS = {"train": TRAIN, "crossval": VAL}


def _load(loading: Loading) -> DomainDataset:
    root = require_folder("PACS", loading.data_dir, _FOLDERS, _DOMAINS, _HOW)
    dataset = load_folder(root, loading, name="pacs", domains=_DOMAINS)
    lists = _find_lists(root, loading.data_dir)
    if lists is None:
        return dataset
    return replace(dataset, split=_read_split(dataset, lists), protocol="li2017-lists")


def _find_lists(root: Path, data_dir: Path) -> Path | None:
    for folder in (
        root,
        root / "splits",
        root.parent / "splits",
        root.parent / "PACS-splits",
        data_dir / "PACS-splits",
    ):
        if all((folder / f"{d}_train_kfold.txt").is_file() for d in _DOMAINS):
            return folder
    return None


def _read_split(
    dataset: DomainDataset, lists: Path
) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Reads the authors' split. Labels in the lists are 1-based and must agree with the folders."""
    assert isinstance(dataset.images, ImageFiles)
    position = {Path(p).as_posix(): i for i, p in enumerate(dataset.images.paths)}
    split = np.zeros(len(position), dtype=np.int64)
    for domain in _DOMAINS:
        for part, code in _LISTS.items():
            path = lists / f"{domain}_{part}_kfold.txt"
            if not path.is_file():
                raise UserError(f"{path} is missing beside the other lists.")
            for line in read_text(path).splitlines():
                if not line.strip():
                    continue
                name, _, label = line.strip().rpartition(" ")
                if not label.isdigit():
                    raise UserError(f"{path}: expected 'image label', found {line!r}.")
                if name not in position:
                    raise UserError(f"{path} lists {name}, which is not in the image folder.")
                if int(label) - 1 != dataset.labels[position[name]]:
                    raise UserError(
                        f"{path} gives {name} the label {label}, but its folder says "
                        f"{dataset.classes[dataset.labels[position[name]]]!r}."
                    )
                split[position[name]] = code
    unlisted = int((split == 0).sum())
    if unlisted:
        raise UserError(f"{unlisted} images of PACS are in none of the lists in {lists}.")
    return split


PACS = replace(
    published("pacs", "PACS", _FOLDERS, _DOMAINS, _HOW),
    load=_load,
)
