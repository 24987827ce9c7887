"""DICOM files, written by pydicom: rescale, window, photometric interpretation; what is refused."""

import csv
import sys
from pathlib import Path

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.pixels import apply_modality_lut, apply_voi_lut
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

from conftest import write_images
from solodg.data.folder import load_folder
from solodg.data.loading import Loading
from solodg.errors import UserError
from solodg.pixels import BadImageError, decode_pixels
from solodg.runs.config import Machine, RunConfig
from solodg.runs.train import train_run

STORED = np.linspace(0, 4095, 64).astype(np.uint16).reshape(8, 8)


def written(path: Path, stored: np.ndarray = STORED, **tags) -> Path:
    """A DICOM file with these stored values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.TransferSyntaxUID = CTImageStorage, ExplicitVRLittleEndian
    meta.MediaStorageSOPInstanceUID = generate_uid()
    dataset = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    dataset.SOPClassUID = CTImageStorage
    dataset.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    dataset.Rows, dataset.Columns = stored.shape[-2:]
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    bits = 8 * stored.dtype.itemsize
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = bits, bits, bits - 1
    dataset.PixelRepresentation = int(stored.dtype.kind == "i")
    dataset.PixelData = stored.tobytes()
    for name, value in tags.items():
        setattr(dataset, name, value)
    dataset.save_as(path, enforce_file_format=True)
    return path


def levels(values: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.rint(255 * np.clip((values - low) / (high - low), 0, 1)).astype(np.uint8)


def read(path: Path, **options) -> np.ndarray:
    return decode_pixels(path, channels=1, size=8, **options)[0]


CT = {"RescaleSlope": 2, "RescaleIntercept": -1024}


def test_values_are_rescaled_before_the_window_of_the_run(tmp_path) -> None:
    path = written(tmp_path / "a.dcm", **CT, WindowCenter=40, WindowWidth=400)
    wanted = levels(STORED * 2.0 - 1024, -1000, 400)
    assert np.array_equal(read(path, window=(-1000.0, 400.0)), wanted)


@pytest.mark.parametrize("function", [None, "LINEAR_EXACT"])
def test_the_first_window_of_the_file_is_that_of_pydicom(tmp_path, function) -> None:
    tags = {"VOILUTFunction": function} if function else {}
    path = written(tmp_path / "a.DCM", **CT, WindowCenter=[40, 500], WindowWidth=[400, 90], **tags)
    dataset = pydicom.dcmread(path)
    shown = apply_voi_lut(apply_modality_lut(dataset.pixel_array, dataset), dataset, index=0)
    wanted = 255 * (shown - shown.min()) / (shown.max() - shown.min())
    guessed: list[int] = []
    found = read(path, on_guess=lambda: guessed.append(1))
    assert np.abs(found - wanted).max() <= 0.5 + 1e-3
    assert not guessed


def test_without_a_window_the_range_is_guessed_as_for_other_files(tmp_path) -> None:
    path = written(tmp_path / "a.dcm")
    Image.fromarray(STORED).save(tmp_path / "a.png")
    guessed: list[int] = []
    found = read(path, on_guess=lambda: guessed.append(1))
    assert np.array_equal(found, read(tmp_path / "a.png"))
    assert guessed == [1]
    eight = np.arange(64, dtype=np.uint8).reshape(8, 8)
    assert np.array_equal(read(written(tmp_path / "b.dcm", eight)), eight)


@pytest.mark.parametrize("window", [None, (0.0, 4000.0)])
def test_monochrome1_is_inverted(tmp_path, window) -> None:
    plain = read(written(tmp_path / "a.dcm"), window=window)
    dark = written(tmp_path / "b.dcm", PhotometricInterpretation="MONOCHROME1")
    assert np.array_equal(read(dark, window=window), 255 - plain)


def test_a_colour_model_reads_grey_in_three_channels(tmp_path) -> None:
    path = written(tmp_path / "a.dcm")
    found = decode_pixels(path, channels=3, size=8)
    assert np.array_equal(found, np.repeat(read(path)[None], 3, 0))


def test_signed_values_need_a_window(tmp_path) -> None:
    signed = np.linspace(-1000, 1000, 64).astype(np.int16).reshape(8, 8)
    path = written(tmp_path / "a.dcm", signed)
    with pytest.raises(BadImageError, match="negative pixel values"):
        read(path)
    assert np.array_equal(read(path, window=(-500.0, 500.0)), levels(signed, -500, 500))


def test_what_is_no_grey_image_of_one_frame_is_refused(tmp_path) -> None:
    frames = written(tmp_path / "a.dcm", np.stack([STORED] * 3), NumberOfFrames=3)
    with pytest.raises(BadImageError, match="3 frames, where one is expected"):
        read(frames)
    colour = written(tmp_path / "b.dcm", np.zeros((24, 8), np.uint8), Rows=8, SamplesPerPixel=3,
                     PhotometricInterpretation="RGB", PlanarConfiguration=0)  # fmt: skip
    with pytest.raises(BadImageError, match=r"in colour \(RGB\)"):
        read(colour)
    (tmp_path / "c.dcm").write_bytes(b"no image")
    with pytest.raises(BadImageError, match="not a DICOM file"):
        read(tmp_path / "c.dcm")
    with pytest.raises(BadImageError, match="no such file"):
        read(tmp_path / "d.dcm")
    cut = written(tmp_path / "e.dcm")
    cut.write_bytes(cut.read_bytes()[:-50])
    with pytest.raises(BadImageError, match=r"e\.dcm") as found:
        read(cut)
    assert "\n" not in str(found.value)


def test_a_missing_package_names_the_extra_and_is_no_bad_image(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(UserError, match=r"pip install 'solodg\[medical\]'") as found:
        read(written(tmp_path / "a.dcm"))
    assert not isinstance(found.value, BadImageError)


def test_dicom_files_are_trained_on_predicted_and_scored(solodg, tmp_path) -> None:
    images = write_images(tmp_path / "own", {(d, c): 8 for d in "abc" for c in ("ill", "well")})
    rows = []
    for path in sorted(images.rglob("*.png")):
        grey = np.array(Image.open(path).convert("L"))
        written(path.with_suffix(".dcm"), grey.astype(np.uint16) * 8, WindowCenter=1000,
                WindowWidth=2000)  # fmt: skip
        path.unlink()
        rows.append((path.with_suffix(".dcm").relative_to(images), path.parent.name))
    loading = Loading(Path("nowhere"), image_size=16, channels=1)
    assert len(load_folder(images, loading).labels) == 48
    config = RunConfig(dataset=str(images), targets=("c",), algorithm="erm", image_size=32,
                       backbone="small_cnn", steps=4, batch_size=8, context_images=2)  # fmt: skip
    run = train_run(config, Machine(accelerator="cpu"), tmp_path / "run")
    with (images / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    for on in (images, images / "list.csv"):
        code, _, err = solodg("evaluate", run, "--on", on)
        assert code == 0, err
    code, out, err = solodg("predict", run, images / "c", "--json")
    assert code == 0, err
    assert out.count(".dcm") == 16
