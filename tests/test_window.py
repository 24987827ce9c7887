"""Pixel values of more than 8 bits: refused where they mean nothing, mapped by a fixed window."""

import io
import json
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

import solodg as package
from serving_process import listening
from solodg import pixels
from solodg.bench.cell import Cell
from solodg.errors import UserError
from solodg.explain.explanation import explain
from solodg.explain.projection import stored_projection
from solodg.models.backbones import build_backbone
from solodg.pixels import BadImageError, decode_pixels, pixels_of
from solodg.predict.torch import Predictor
from solodg.report.run_page import write_report
from solodg.runs.config import Machine, RunConfig
from solodg.runs.defaults import resolve
from solodg.runs.folder import portable
from solodg.runs.train import train_run
from test_features import save_weights

SCAN = np.linspace(-1200, 600, 64).reshape(8, 8)  # as in CT: air, lung, tissue, bone
CT = (-1000.0, 400.0)


def by_hand(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Black up to `low`, white from `high` on."""
    levels = [255 * (min(max(v, low), high) - low) / (high - low) for v in values.flat]
    return np.array([round(level) for level in levels], np.uint8).reshape(values.shape)


def saved(path: Path, values: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)
    return path


@pytest.mark.parametrize("window", [None, CT])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([np.nan], "1 NaN of 64"),
        ([np.inf], "1 infinite of 64"),
        ([np.nan, -np.inf, np.nan], "2 NaN and 1 infinite of 64"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(tmp_path, wrong, said, window) -> None:
    values = np.full((8, 8), 0.5, np.float32)
    values.flat[10 : 10 + len(wrong)] = wrong
    path = saved(tmp_path / "scan.tif", values)
    with pytest.raises(BadImageError, match=rf"scan\.tif: {said}"):
        decode_pixels(path, channels=1, size=8, window=window)
    for array in (values, torch.from_numpy(values)[None]):
        with pytest.raises(BadImageError, match=said):
            pixels_of(array, channels=1, size=8, window=window)


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_negative_values_need_a_window(tmp_path: Path, kind) -> None:
    path = saved(tmp_path / "scan.tif", SCAN.astype(kind))
    with pytest.raises(BadImageError, match=r"scan\.tif: negative .*-1200.*--window LOW HIGH"):
        decode_pixels(path, channels=1, size=8)


@pytest.mark.parametrize("kind", [np.float32, np.int32, np.uint16])
@pytest.mark.parametrize("window", [CT, (0.0, 500.0), (-0.5, 1e6)])
def test_a_window_maps_values_as_by_hand(tmp_path: Path, kind, window) -> None:
    values = (SCAN.clip(0) if kind is np.uint16 else SCAN).astype(kind)
    path = saved(tmp_path / ("scan.png" if kind is np.uint16 else "scan.tif"), values)
    found = decode_pixels(path, channels=1, size=8, window=window)[0]
    assert np.abs(found.astype(int) - by_hand(values, *window)).max() <= 1  # halves may round up
    assert np.array_equal(found, pixels_of(values, channels=1, size=8, window=window)[0])
    tensor = torch.from_numpy(values.astype(np.int32 if kind is np.uint16 else kind))[None]
    assert np.array_equal(found, pixels_of(tensor, channels=1, size=8, window=window)[0])


def test_a_window_gives_a_value_one_meaning_in_all_images(tmp_path: Path) -> None:
    dark, bright = np.full((8, 8), 900, np.uint16), np.full((8, 8), 900, np.uint16)
    bright[7] = 40_000
    one, other = (saved(tmp_path / f"{n}.png", v) for n, v in (("a", dark), ("b", bright)))

    def first_row(path: Path, window: tuple[float, float] | None) -> list[int]:
        return decode_pixels(path, channels=1, size=8, window=window)[0, 0].tolist()

    assert first_row(one, None) != first_row(other, None)  # the guess depends on the image
    assert first_row(one, (0, 4095)) == first_row(other, (0, 4095)) == [56] * 8


def test_images_of_eight_bits_are_refused_where_there_is_a_window(tmp_path: Path) -> None:
    for shape in ((8, 8), (8, 8, 3), (8, 8, 4)):
        path = saved(tmp_path / "x.png", np.zeros(shape, np.uint8))
        with pytest.raises(BadImageError, match=r"x\.png: a colour or 8-bit .*-1000 to 400"):
            decode_pixels(path, channels=3, size=8, window=CT)
        with pytest.raises(BadImageError, match=r"uint8.*window -1000 to 400"):
            pixels_of(np.zeros(shape, np.uint8), channels=3, size=8, window=CT)


@pytest.mark.parametrize("mode", ["RGBA", "P", "CMYK", "LA", "I;16", "I", "F", "transparent"])
def test_a_large_image_is_converted_in_strips_like_a_small_one(mode, tmp_path, monkeypatch) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (37, 29, 4), dtype=np.uint8)
    image = Image.fromarray(noise)
    if mode in ("I", "F", "I;16"):
        grey = noise[..., 0].astype({"I": np.int32, "F": np.float32, "I;16": np.uint16}[mode])
        image = Image.fromarray(grey * grey.dtype.type(200))
    elif mode == "transparent":
        image = image.convert("P")
        image.info["transparency"] = 3
    else:
        image = image.convert("RGB").convert(mode) if mode in ("P", "CMYK") else image.convert(mode)
    whole = [decode_pixels(image, channels=c, size=16) for c in (1, 3)]
    monkeypatch.setattr(pixels, "_STRIP_PIXELS", 100)
    strips = [decode_pixels(image, channels=c, size=16) for c in (1, 3)]
    assert all(np.array_equal(a, b) for a, b in zip(whole, strips, strict=True))


# A run with a window


def write_scans(root: Path) -> Path:
    """Two classes of scans with negative values, in three domains."""
    generator = np.random.default_rng(0)
    for number, domain in enumerate("abc"):
        for label, level in (("lung", -800), ("bone", 300)):
            for i in range(6):
                values = generator.normal(level + 30 * number, 80, (24, 24))
                saved(root / domain / label / f"{i}.tif", values.astype(np.int32))
    return root


FAST = ["--backbone", "small_cnn", "--image-size", "32", "--steps", "2", "--batch-size", "4",
        "--context-images", "2", "--accelerator", "cpu"]  # fmt: skip


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scans(tmp_path_factory.mktemp("scans") / "own")


@pytest.fixture(scope="module")
def run(scans: Path) -> Path:
    config = RunConfig(dataset=str(scans), targets=("b",), backbone="small_cnn", image_size=32,
                       steps=4, batch_size=4, context_images=2, window=CT)  # fmt: skip
    return train_run(config, Machine(accelerator="cpu"), scans.parent / "run")


def test_the_command_line_takes_a_window_and_refuses_a_wrong_one(scans, tmp_path, solodg) -> None:
    common = ["train", scans, "--target", "b", *FAST, "--output", tmp_path / "r"]
    code, _, err = solodg(*common)
    assert code == 2
    assert "negative pixel values" in err
    assert "--window LOW HIGH" in err
    wrong = {("400", "-1000"): "below the second", ("0", "0"): "below the second",
             ("nan", "1"): "finite", ("0", "inf"): "finite"}  # fmt: skip
    for window, reason in wrong.items():
        code, _, err = solodg(*common, "--window", *window)
        assert code == 2
        assert "--window" in err
        assert reason in err
    code, _, err = solodg(*common, "--window", "-1000", "400")
    assert code == 0, err
    for file in ("config.json", "model.json"):
        assert json.loads((tmp_path / "r" / file).read_text())["window"] == [-1000, 400]
    code, _, err = solodg("train", "toy", "--target", "sky", *FAST, "--window", "0", "9")
    assert code == 2
    assert "toy has 8-bit images" in err


def test_all_that_reads_an_image_uses_the_window_of_the_model(run, scans, tmp_path, solodg) -> None:
    file = tmp_path / "model.onnx"
    assert solodg("export", run, "--onnx", file)[0] == 0
    scan = scans / "b" / "bone" / "0.tif"
    expected = decode_pixels(scan, channels=3, size=32, window=CT)
    with Image.open(scan) as image:
        forms = [scan, scan.read_bytes(), image, np.array(image)]
        for model in (package.load(run), package.load(file)):
            assert model.info.window == CT
            assert all(np.array_equal(model.pixels(form), expected) for form in forms)
    answer = package.load(run).predict(scan)
    content = io.BytesIO(scan.read_bytes()).getvalue()
    eight_bits = io.BytesIO()
    Image.new("L", (8, 8)).save(eight_bits, "PNG")
    with listening(package.load(file)) as url:
        served = httpx.post(f"{url}/predict", content=content, timeout=20).json()
        refused = httpx.post(f"{url}/predict", content=eight_bits.getvalue(), timeout=20)
    assert served["predictions"][0]["probability"] == pytest.approx(answer.probability, abs=2e-3)
    assert refused.status_code == 422
    assert "window -1000 to 400" in refused.json()["error"]


def test_figures_and_reports_read_images_by_the_window(run: Path, scans: Path) -> None:
    predictor = Predictor.load(run)
    scan = scans / "b" / "lung" / "1.tif"
    found = explain(predictor, stored_projection(run, predictor), scan)
    assert np.array_equal(found.pixels, decode_pixels(scan, channels=3, size=32, window=CT))
    assert write_report(run, images=4, per_gallery=1).is_file()


def test_features_of_one_window_are_not_taken_for_those_of_another(scans, tmp_path) -> None:
    weights = tmp_path / "w.safetensors"
    save_weights(build_backbone("small_cnn", channels=3, image_size=32), weights)
    machine = Machine(accelerator="cpu", cache_dir=tmp_path / "cache")
    stored: list[set[Path]] = []
    for number, window in enumerate([CT, (-200.0, 200.0), CT]):
        config = RunConfig(dataset=str(scans), targets=("b",), backbone="small_cnn", steps=1,
                           image_size=32, weights=str(weights), freeze_backbone=True,
                           context_images=2, algorithm="erm", window=window)  # fmt: skip
        train_run(config, machine, tmp_path / f"run{number}")
        stored.append(set((tmp_path / "cache").rglob("*.npy")))
    assert len(stored[0]) == 2
    assert len(stored[1]) == 4
    assert stored[2] == stored[1]


def test_training_says_once_that_it_guesses_ranges(tmp_path: Path) -> None:
    for domain in "abc":
        for label in "xy":
            for i in range(4):
                values = np.full((8, 8), 500 * i, np.uint16)
                saved(tmp_path / "own" / domain / label / f"{i}.png", values)
    said: list[str] = []
    config = RunConfig(dataset=str(tmp_path / "own"), targets=("b",), backbone="small_cnn",
                       image_size=32, steps=1, context_images=2)  # fmt: skip
    for name, window in (("guessed", None), ("fixed", (0, 4095))):
        config = config.model_copy(update={"window": window})
        train_run(config, Machine(accelerator="cpu"), tmp_path / name, say=said.append)
        hints = [text for text in said if "--window LOW HIGH" in text]
        assert len(hints) == 1
        assert hints[0].startswith("16 image(s) have more than 8 bits")


def test_a_window_is_part_of_a_runs_key_and_none_is_not(monkeypatch) -> None:
    plain = resolve(RunConfig(dataset="toy", targets=("sky",)))
    key = Cell("row", "none", plain).run_key
    assert Cell("row", "none", plain.model_copy(update={"window": CT})).run_key != key
    values = {name: value for name, value in portable(plain).items() if name != "window"}
    monkeypatch.setattr("solodg.bench.cell.portable", lambda config: values)
    assert Cell("row", "none", plain).run_key == key  # that of versions without the option


def test_without_a_window_the_error_for_wide_arrays_names_the_option() -> None:
    for array in (np.zeros((8, 8), np.int16), np.full((8, 8), 700.0)):
        with pytest.raises(UserError, match="--window LOW HIGH"):
            pixels_of(array, channels=1, size=8)
