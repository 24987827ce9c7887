"""DICOM files as grey images, with rescale, window and photometric interpretation; by pydicom."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from solodg.errors import missing_extra

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydicom import Dataset

ENDINGS = frozenset({".dcm", ".dicom"})


class DicomImage(NamedTuple):
    """The values of a DICOM image, and how the file says to show them."""

    image: Image.Image  # rescaled: mode I, or F where values are not whole numbers
    window: tuple[float, float] | None  # the first of the file: values of black and white
    inverted: bool  # MONOCHROME1: large values are dark


def is_dicom(path: str | Path) -> bool:
    """Returns whether a path names a DICOM file, by its ending."""
    return Path(path).suffix.lower() in ENDINGS


def read_dicom(path: str | Path, reserve: "Callable[[int], None]") -> DicomImage:
    """Reads a grey image of one frame; raises `ValueError` for colour and for several frames.

    `reserve` is called with the number of pixels before they are decoded.
    """
    try:
        import pydicom
        from pydicom.errors import InvalidDicomError
        from pydicom.pixels.processing import apply_modality_lut
    except ModuleNotFoundError as error:
        raise missing_extra("medical", "A reader for DICOM files", error) from error
    try:
        dataset = pydicom.dcmread(path)
    except InvalidDicomError:
        raise ValueError("not a DICOM file: its header is missing") from None
    _check(dataset)
    reserve(int(dataset.Rows) * int(dataset.Columns))
    values = np.asarray(apply_modality_lut(dataset.pixel_array, dataset), dtype=np.float64)
    whole = bool((values == np.rint(values)).all()) and bool(np.abs(values).max() < 2**31)
    image = Image.fromarray(values.astype(np.int32 if whole else np.float32))
    return DicomImage(image, _window(dataset), _photometric(dataset) == "MONOCHROME1")


def _check(dataset: "Dataset") -> None:
    if "PixelData" not in dataset:
        raise ValueError("a DICOM file without pixels")
    frames = int(dataset.get("NumberOfFrames") or 1)
    if frames > 1:
        raise ValueError(
            f"a DICOM file of {frames} frames, where one is expected: save each frame that matters "
            "as a file"
        )
    if int(dataset.get("SamplesPerPixel", 1)) != 1 or not _photometric(dataset).startswith("MONO"):
        raise ValueError(
            f"a DICOM file in colour ({_photometric(dataset)}), where grey is expected: convert it "
            "to PNG"
        )


def _photometric(dataset: "Dataset") -> str:
    return str(dataset.get("PhotometricInterpretation", "MONOCHROME2"))


def _window(dataset: "Dataset") -> tuple[float, float] | None:
    """Returns the ends of the file's first window, by PS3.3 C.11.2.1.2; None where it has none."""
    centres, widths = dataset.get("WindowCenter"), dataset.get("WindowWidth")
    if centres is None or widths is None:
        return None
    centre, width = (float(np.atleast_1d(value)[0]) for value in (centres, widths))
    if dataset.get("VOILUTFunction", "LINEAR") == "LINEAR":
        centre, width = centre - 0.5, width - 1
    if not width > 0:
        return None
    return centre - width / 2, centre + width / 2
