"""How published datasets are fetched: addresses, checksums, licences, and where files go.

Addresses are those of the authors, of torchvision or of DomainBed. For a dataset without a recipe
no address is known from which a program may surely fetch it: for PACS, for one, no licence was
found. `get_dataset` then says where a person gets it.
"""

import json
import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from solodg.data.fetch import RECORD, RemoteFile, fetch_file
from solodg.data.loading import DatasetSpec
from solodg.errors import UserError
from solodg.progress import Progress, Say
from solodg.storage import read_regular

_LOCATIONS = ("38", "43", "46", "100")
_ANIMALS = ("bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon",
            "squirrel")  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """The files of a dataset: for each folder below the data folder, what is fetched into it."""

    licence: str
    free: bool  # whether the licence permits any use; otherwise the user accepts it first
    files: dict[str, tuple[RemoteFile, ...]]
    arrange: Callable[[Path], None] | None = None  # unpacks what was fetched into the first folder


def get_dataset(
    spec: DatasetSpec,
    data_dir: Path,
    progress: Progress,
    say: Say,
    *,
    accept_licence: bool = False,
    base: str | None = None,
) -> Path:
    """Fetches a dataset into the data folder; returns the folder.

    Raises `UserError` for one that a program may not fetch, which says how to get it, and for one
    whose licence is not accepted. `base` is an address below which the files lie, in place of the
    published mirrors.
    """
    recipe = RECIPES.get(spec.name)
    if recipe is None:
        reason = f"{spec.title} is not fetched: no address is known from which a program may."
        if found := spec.find(data_dir):
            raise UserError(f"{reason} It is already at {found}.")
        raise UserError(
            f"{reason} {spec.how_to_get} Put the folders of the domains, "
            f"{', '.join(spec.domains)}, each with a folder a class, into {data_dir / spec.name}. "
            f"To see whether they are found: solodg datasets {spec.name} --data-dir {data_dir}"
        )
    if not recipe.free and not accept_licence:
        raise UserError(
            f"{spec.title}: {recipe.licence} If you accept that, repeat the command with "
            "--accept-licence."
        )
    say(f"{spec.title}: {recipe.licence}")
    for name, files in recipe.files.items():
        for file in files:
            fetch_file(file, data_dir / name, data_dir / RECORD, progress, say, base=base)
    first = data_dir / next(iter(recipe.files))
    if recipe.arrange is not None:
        recipe.arrange(first)
    return first


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a zip or tar archive; nothing of it can be written outside of the folder."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as content:
                content.extractall(folder)
        else:
            with tarfile.open(archive) as content_of_tar:
                content_of_tar.extractall(folder, filter="data")
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise UserError(
            f"cannot unpack {archive}: {error}. Remove it to fetch it again."
        ) from error


def _arrange_domainnet(folder: Path) -> None:
    for archive in sorted(folder.glob("*.zip")):
        if not (folder / archive.stem).is_dir():
            with tempfile.TemporaryDirectory(prefix=".unpacked-", dir=folder) as temporary:
                unpack(archive, Path(temporary))
                os.replace(Path(temporary) / archive.stem, folder / archive.stem)


def _arrange_terra(folder: Path) -> None:
    """Puts the images of four locations into folders `location_38/bird/...`, as DomainBed does."""
    if all((folder / f"location_{name}").is_dir() for name in _LOCATIONS):
        return
    with tempfile.TemporaryDirectory(prefix=".unpacked-", dir=folder) as temporary:
        inner = Path(temporary)
        for archive in (_TERRA_IMAGES, _TERRA_LABELS):
            unpack(folder / archive, inner)
        (described,) = inner.glob("caltech_images_*.json")
        described_images = json.loads(read_regular(described))
        kinds = {each["id"]: each["name"] for each in described_images["categories"]}
        images = {
            each["id"]: each
            for each in described_images["images"]
            if str(each["location"]) in _LOCATIONS
        }
        for label in described_images["annotations"]:
            image, kind = images.get(label["image_id"]), kinds[label["category_id"]]
            if image is None or kind not in _ANIMALS:
                continue
            name = Path(image["file_name"]).name
            source = inner / "eccv_18_all_images_sm" / name
            if source.is_file():
                target = inner / f"location_{image['location']}" / kind / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        for location in _LOCATIONS:
            if not (inner / f"location_{location}").is_dir():
                raise UserError(f"the archives in {folder} hold no image of location {location}.")
            os.replace(inner / f"location_{location}", folder / f"location_{location}")


def _idx(mirrors: tuple[str, ...], checksums: tuple[str, str, str, str]) -> tuple[RemoteFile, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        RemoteFile(f"{name}-ubyte.gz", tuple(f"{m}{name}-ubyte.gz" for m in mirrors), f"md5:{md5}")
        for name, md5 in zip(names, checksums, strict=True)
    )


_MNIST = _idx(
    ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
    ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432",
     "9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c"),
)  # fmt: skip
_FASHION = _idx(
    ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
     "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"),
    ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe",
     "bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310"),
)  # fmt: skip
_SVHN = RemoteFile(
    "train_32x32.mat",
    ("http://ufldl.stanford.edu/housenumbers/train_32x32.mat",),
    "md5:e26dedcc434d2e4c54c9b2d4a06d8373",
)
_BU = "http://csr.bu.edu/ftp/visda/2019/multi-source/"
_DOMAINNET = tuple(
    RemoteFile(path.rpartition("/")[2], (f"{_BU}{path}",))
    for path in ("groundtruth/clipart.zip", "infograph.zip", "groundtruth/painting.zip",
                 "quickdraw.zip", "real.zip", "sketch.zip")
)  # fmt: skip
_LILA = ("https://storage.googleapis.com/public-datasets-lila/caltechcameratraps/",
         "https://lilablobssc.blob.core.windows.net/caltechcameratraps/")  # fmt: skip
_TERRA_IMAGES = "eccv_18_all_images_sm.tar.gz"
_TERRA_LABELS = "caltech_camera_traps.json.zip"

RECIPES = {
    "rotated-mnist": Recipe("MNIST, CC BY-SA 3.0.", True, {"mnist": _MNIST}),
    "rotated-fashion-mnist": Recipe("Fashion-MNIST, MIT.", True, {"fashion-mnist": _FASHION}),
    "svhn-mnist": Recipe(
        "SVHN is for non-commercial use only (http://ufldl.stanford.edu/housenumbers). MNIST, CC "
        "BY-SA 3.0.",
        False,
        {"svhn": (_SVHN,), "mnist": _MNIST},
    ),
    "domainnet": Recipe(
        "DomainNet holds images of many owners; read the fair use notice of its authors "
        "(http://ai.bu.edu/M3SDA). About 18 GB, and as much again unpacked.",
        False,
        {"domain_net": _DOMAINNET},
        _arrange_domainnet,
    ),
    "terra-incognita": Recipe(
        "Caltech Camera Traps, Community Data License Agreement (permissive); about 6 GB.",
        True,
        {"terra_incognita": (
            RemoteFile(_TERRA_IMAGES, tuple(f"{base}{_TERRA_IMAGES}" for base in _LILA)),
            RemoteFile(_TERRA_LABELS, tuple(f"{base}labels/{_TERRA_LABELS}" for base in _LILA)),
        )},
        _arrange_terra,
    ),
}  # fmt: skip
