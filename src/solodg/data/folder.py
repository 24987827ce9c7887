"""Image files in folders `domain/class/image`: the user's own, or a published dataset."""

import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from solodg.data.decode import EXTENSIONS
from solodg.data.domains import DomainDataset, normalise_name
from solodg.data.images import ImageFiles, Images
from solodg.data.listing import LeftOut, ListedImage, Listing
from solodg.data.loading import DatasetSpec, Loading
from solodg.data.splits import UNASSIGNED, Ints
from solodg.errors import UserError


def load_folder(
    root: Path, loading: Loading, *, name: str | None = None, domains: Sequence[str] | None = None
) -> DomainDataset:
    """Reads a folder `domain/class/image`. The classes are those of all domains, sorted.

    `domains` are the names of a published dataset; other folders are then left out, and an empty
    domain is an error.
    """
    listing = Listing(root)
    found = listing.domains()
    if domains is not None:
        folders = _published_domains(root, found, domains)
        listing.skip_domains(folder for folder in found if folder not in folders.values())
    else:
        folders = {folder: folder for folder in found}
    images: list[ListedImage] = []
    for domain, folder in folders.items():
        listed = listing.images(folder)
        if not listed and domains is not None:
            raise _no_images(root / folder, "class/image", listing.left_out)
        # Published names take the place of the folders' spelling.
        images += [image._replace(domain=domain) for image in listed]
    if not images:
        raise _no_images(root, "domain/class/image", listing.left_out)
    return dataset_of_files(
        name or root.name,
        root,
        images,
        loading,
        domain_order=domains,
        left_out=listing.left_out,
    )


def _no_images(root: Path, layout: str, left_out: Iterable[LeftOut]) -> UserError:
    found = "; ".join(str(entry) for entry in left_out)
    return UserError(
        f"no images below {root}: expected {layout} with endings {' '.join(sorted(EXTENSIONS))}."
        + (f" Left out: {found}." if found else "")
    )


def published(
    name: str,
    title: str,
    folders: Sequence[str],
    domains: Sequence[str],
    how_to_get: str,
) -> DatasetSpec:
    """Returns a registry entry for a published dataset in the folder layout.

    `folders` are the names that its folder may have below the data folder.
    """

    def find(data_dir: Path) -> str | None:
        return _find_folder(data_dir, folders, domains)

    def load(loading: Loading) -> DomainDataset:
        root = require_folder(title, loading.data_dir, folders, domains, how_to_get)
        return load_folder(root, loading, name=name, domains=domains)

    return DatasetSpec(name, title, tuple(domains), load, find, how_to_get)


def require_folder(
    title: str, data_dir: Path, folders: Sequence[str], domains: Sequence[str], how_to_get: str
) -> Path:
    """Returns the folder of a published dataset; the error for a missing one says how to get it."""
    found = _find_folder(data_dir, folders, domains)
    if found is None:
        raise UserError(
            f"{title} not found: looked for {' or '.join(folders)} in {data_dir}. {how_to_get} "
            "Point to the folder that holds it with --data-dir."
        )
    return Path(found)


def _find_folder(data_dir: Path, folders: Sequence[str], domains: Sequence[str]) -> str | None:
    wanted = {normalise_name(d) for d in domains}
    for candidate in (*(data_dir / folder for folder in folders), data_dir):
        if candidate.is_dir() and wanted <= {normalise_name(d.name) for d in candidate.iterdir()}:
            return str(candidate)
    return None


def _published_domains(root: Path, found: list[str], domains: Sequence[str]) -> dict[str, str]:
    """Returns the folder of each published domain, whatever its spelling."""
    folders = {}
    for domain in domains:
        alike = [folder for folder in found if normalise_name(folder) == normalise_name(domain)]
        if not alike:
            raise UserError(f"{root} lacks the folder of domain {domain!r}.")
        if len(alike) > 1:
            raise UserError(
                f"{root} has several folders for domain {domain!r}: {', '.join(alike)}. Keep one."
            )
        folders[domain] = alike[0]
    return folders


def dataset_of_files(
    name: str,
    root: Path,
    images: Sequence[ListedImage],
    loading: Loading,
    *,
    domain_order: Sequence[str] | None = None,
    left_out: tuple[LeftOut, ...] = (),
) -> DomainDataset:
    """Builds the dataset of image files below `root`, as `build_dataset` does."""
    paths, labels, domains = zip(*images, strict=True)
    return build_dataset(
        name,
        image_files(root, paths, loading),
        labels,
        domains,
        domain_order=domain_order,
        left_out=left_out,
    )


def image_files(root: Path, paths: Sequence[str], loading: Loading) -> ImageFiles:
    """Returns the image files below `root` as the settings of a dataset read them."""
    return ImageFiles(
        root,
        paths,
        channels=loading.channels,
        size=loading.image_size,
        budget=loading.budget,
        window=loading.window,
    )


def build_dataset(
    name: str,
    images: Images,
    labels: Sequence[str],
    domains: Sequence[str],
    *,
    splits: Sequence[int] | None = None,
    domain_order: Sequence[str] | None = None,
    left_out: tuple[LeftOut, ...] = (),
) -> DomainDataset:
    """Builds the dataset of images with the names of their classes and domains, sorted by name.

    Raises `UserError` if two classes or two domains differ in case or Unicode form alone.
    """
    classes = sorted(set(labels))
    domain_names = list(domain_order or sorted(set(domains)))
    check_spelling("classes", classes)
    check_spelling("domains", domain_names)
    class_index = {c: i for i, c in enumerate(classes)}
    domain_index = {d: i for i, d in enumerate(domain_names)}
    split = np.array(splits or [UNASSIGNED] * len(labels), dtype=np.int64)
    return DomainDataset(
        name=name,
        images=images,
        labels=np.array([class_index[c] for c in labels], dtype=np.int64),
        domains=np.array([domain_index[d] for d in domains], dtype=np.int64),
        classes=tuple(classes),
        domain_names=tuple(domain_names),
        split=split,
        protocol=_protocol(split),
        left_out=left_out,
    )


def check_spelling(kind: str, names: Iterable[str]) -> None:
    """Raises `UserError` if two names are equal but for case or Unicode form."""
    seen: dict[str, str] = {}
    for name in names:
        # Case folding can undo the composition of letters and accents, so it goes in between.
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        other = seen.setdefault(folded, name)
        if other != name:
            raise UserError(
                f"the {kind} {other!r} and {name!r} ({other!a}, {name!a}) differ in case "
                "or Unicode form alone. Give them one spelling, or names that differ."
            )


def _protocol(split: Ints) -> str:
    if (split != UNASSIGNED).all():
        return "given-split"
    return "given-and-random-split" if (split != UNASSIGNED).any() else "random-split"
