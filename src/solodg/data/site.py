"""Labelled images of a new site, for a model with given classes: a folder or a CSV manifest.

A folder has the layout `class/image` or `domain/class/image`; a manifest needs no column `domain`.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from solodg.data.arrow_file import arrow_files, load_arrow
from solodg.data.decode import EXTENSIONS
from solodg.data.domains import DomainDataset
from solodg.data.folder import dataset_of_files, load_folder
from solodg.data.listing import Listing
from solodg.data.loading import Loading
from solodg.data.manifest import ENDINGS, load_manifest
from solodg.errors import UserError

_LAYOUTS = (
    "a folder class/image or domain/class/image, or a CSV or Parquet file with the columns "
    "path, label and optionally domain and group"
)
_SHOWN = 5  # names in one message


def load_site(path: Path, loading: Loading, classes: Sequence[str]) -> DomainDataset:
    """Reads labelled images, numbered by the classes of a model.

    Classes may be missing. One that the model does not know is an error. Images without a domain
    are of one that is named after the folder or the file.
    """
    if path.exists() and arrow_files(path):
        dataset = load_arrow(path, loading, default_domain=path.stem)
    elif path.is_dir():
        dataset = _load_folder(Path(os.path.abspath(path)), loading, classes)
    elif path.is_file() and path.suffix.lower() in ENDINGS:
        dataset = load_manifest(path, loading, default_domain=path.stem)
    elif path.exists():
        raise UserError(
            f"{path} is neither a folder nor a .csv or .parquet file: expected {_LAYOUTS}."
        )
    else:
        raise UserError(f"nothing at {path}: expected {_LAYOUTS}.")
    return numbered_by(classes, dataset, str(path))


def numbered_by(classes: Sequence[str], dataset: DomainDataset, source: str) -> DomainDataset:
    """Returns labelled images numbered by the classes of a model.

    Classes may be missing. One that the model does not know is an error, in which `source` is the
    name of the data.
    """
    unknown = [name for name in dataset.classes if name not in classes]
    if unknown:
        raise UserError(
            f"{source} has images of {_listed(unknown)}, which the model does not know; it knows "
            f"{_listed(classes)}. Rename or remove them; the layout is {_LAYOUTS}."
        )
    numbers = np.array([list(classes).index(name) for name in dataset.classes], dtype=np.int64)
    return replace(dataset, labels=numbers[dataset.labels], classes=tuple(classes))


def _load_folder(root: Path, loading: Loading, classes: Sequence[str]) -> DomainDataset:
    if not any(entry.is_dir() for entry in root.iterdir()):
        raise UserError(f"no images below {root}: expected {_LAYOUTS}.")
    if not _is_class_layout(root, set(classes)):
        return load_folder(root, loading)
    # Seen from above, the folder is a domain.
    listing = Listing(root.parent)
    images = listing.images(root.name, layout="class/image")
    if not images:
        raise UserError(f"no images below {root}: expected {_LAYOUTS}.")
    return dataset_of_files(root.name, root.parent, images, loading, left_out=listing.left_out)


def _is_class_layout(root: Path, classes: Collection[str]) -> bool:
    """Returns whether the folders below the root are classes, and not domains.

    They are if they hold images and one is named like a class of the model; or if no folder within
    them is named like a class, and one of them is, or holds images.
    """
    folders = [f for f in sorted(root.iterdir()) if f.is_dir() and not f.name.startswith(".")]
    entries = [entry for folder in folders for entry in folder.iterdir()]
    hold_images = any(entry.suffix.lower() in EXTENSIONS and entry.is_file() for entry in entries)
    named_like_class = any(folder.name in classes for folder in folders)
    if hold_images and named_like_class:
        return True
    if any(entry.name in classes and entry.is_dir() for entry in entries):
        return False
    return named_like_class or hold_images


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
