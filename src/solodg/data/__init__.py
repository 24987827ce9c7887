"""Datasets by name. To add one: a file here (or an entry below), and a row in docs/datasets.md."""

from collections.abc import Callable
from pathlib import Path

from solodg.data.arrow_file import arrow_files, load_arrow
from solodg.data.domains import DomainDataset, SourceData
from solodg.data.folder import load_folder, published
from solodg.data.in_memory import IN_MEMORY, gone_from_memory
from solodg.data.lab import LAB
from solodg.data.labelled_images import LabelledImages
from solodg.data.loading import DatasetSpec, Loading, default_data_dir
from solodg.data.manifest import ENDINGS, load_manifest
from solodg.data.office_home import OFFICE_HOME
from solodg.data.pacs import PACS
from solodg.data.rotated import ROTATED_FASHION_MNIST, ROTATED_MNIST
from solodg.data.svhn_mnist import SVHN_MNIST
from solodg.data.toy import TOY
from solodg.errors import UserError, unknown_name

DATASETS: dict[str, DatasetSpec] = {
    spec.name: spec
    for spec in (
        ROTATED_MNIST,
        ROTATED_FASHION_MNIST,
        PACS,
        OFFICE_HOME,
        published(
            "vlcs",
            "VLCS",
            ("VLCS", "vlcs"),
            ("Caltech101", "LabelMe", "SUN09", "VOC2007"),
            "DomainBed's download script fetches it.",
        ),
        published(
            "terra-incognita",
            "Terra Incognita",
            ("terra_incognita", "TerraIncognita", "terra-incognita"),
            ("location_38", "location_43", "location_46", "location_100"),
            "DomainBed's download script fetches it.",
        ),
        published(
            "domainnet",
            "DomainNet",
            ("domain_net", "DomainNet", "domainnet"),
            ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
            "Get it from http://ai.bu.edu/M3SDA.",
        ),
        SVHN_MNIST,
        TOY,
        *LAB,
    )
}


def dataset_spec(name: str) -> DatasetSpec:
    """Returns a registered dataset by name, or own images by the path of a folder or a file.

    Data of a finished run that was in memory has an entry too, which says that it is gone.
    """
    if name in DATASETS:
        return DATASETS[name]
    if name.startswith(IN_MEMORY):
        return gone_from_memory(name)
    path = Path(name)
    if path.exists() and arrow_files(path):
        return _own_images(path, lambda loading: load_arrow(path, loading))
    if path.is_dir():
        return _own_images(path, lambda loading: load_folder(path, loading))
    if path.is_file() and path.suffix.lower() in ENDINGS:
        return _own_images(path, lambda loading: load_manifest(path, loading))
    hint = "Or give the path of a folder domain/class/image, or of a CSV, Parquet or Arrow file."
    if path.exists():
        raise UserError(f"{name} is neither a folder nor a .csv, .parquet or .arrow file. {hint}")
    if path.suffix or len(path.parts) > 1:  # no dataset is named so
        raise UserError(
            f"nothing at {name}: expected a folder domain/class/image, a CSV, Parquet or Arrow "
            "file, or the name of a dataset. `solodg datasets` lists these."
        )
    raise unknown_name("dataset", name, DATASETS, hint)


def _own_images(path: Path, load: Callable[[Loading], DomainDataset]) -> DatasetSpec:
    return DatasetSpec(
        name=str(path),
        title=f"own images in {path.name}",
        domains=(),
        load=load,
        find=lambda _: str(path),
        how_to_get="",
    )


__all__ = [
    "DATASETS",
    "IN_MEMORY",
    "DatasetSpec",
    "DomainDataset",
    "LabelledImages",
    "Loading",
    "SourceData",
    "dataset_spec",
    "default_data_dir",
]
