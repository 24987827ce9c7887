"""What the default costs: `solo_plus` beside ERM on real images, from one pass to a server.

`python -m benchmarks.default DATA_DIR WEIGHTS` prints one table of ratios. DATA_DIR holds PACS,
WEIGHTS are those of tf_efficientnet_lite0. Both methods are trained on the same frozen network with
sketch left out, and are given sketches: how often an image is read depends on the image.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import solodg
from benchmarks.model import noise_episode, predictor, updater
from benchmarks.server_process import served
from benchmarks.serving import Load, press
from benchmarks.timing import Timing, alternate, ratio, table
from solodg.algorithms.early_exit import NEVER
from solodg.algorithms.ridge import Ridge
from solodg.data import DATASETS
from solodg.data.transforms import to_unit
from solodg.figures.style import BLUE, INK, new_figure, save_figure
from solodg.models.allocator import keep_freed_memory
from solodg.models.backbones import build_backbone
from solodg.predict.export import export_onnx
from solodg.predict.torch import Predictor
from solodg.runs.config import Machine, RunConfig
from solodg.runs.train import train_run
from solodg.serving.schemas import image_prediction

TARGET = "sketch"
IMAGES = 64
FOLDER_IMAGES = 1000
SERVER_SECONDS = 10.0
Row = list[str]


def main() -> None:
    """Prints the table, row by row as it is measured."""
    keep_freed_memory()  # as the command line does, for all that is compared
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--cache-dir", type=Path, help="keeps the features of the images")
    parser.add_argument("--picture", type=Path, help="draws the ratios")
    given = parser.parse_args()
    if not DATASETS["pacs"].find(given.data_dir) or not given.weights.is_file():
        sys.stderr.write("Give the folder that holds PACS, and a weights file: left out.\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        machine = Machine(
            data_dir=given.data_dir, cache_dir=given.cache_dir or Path(scratch) / "cache"
        )
        runs = train_both(machine, given.weights, Path(scratch))
        paths = sketches(given.data_dir)
        rows: list[Row] = []
        for measure in (model_rows, predict_rows, onnx_rows, server_rows, folder_rows, start_rows):
            rows += measure(runs, paths, Path(scratch))
            sys.stderr.write(f"{rows[-1][0]}: {rows[-1][1]}\n")
    for network in ("tf_efficientnet_lite0", "resnet18"):
        rows += backbone_rows(network)
    rows.append(step_row())
    sys.stdout.write(table("The default beside ERM", ["what", "measured", "of"], rows))
    if given.picture:
        draw(rows, given.picture)


def draw(rows: list[Row], path: Path) -> None:
    """Draws the ratios to ERM, or to the plain network, as bars."""
    shown = [row for row in rows if row[2].startswith(("ERM", "plain")) and "/s" not in row[1]]
    figure = new_figure(8, 0.34 * len(shown) + 0.8, layout="constrained")
    axes = figure.subplots()
    names = [row[0].replace("`", "").replace("batch 1 / 32", "batch 1") for row in shown]
    values = [float(row[1].split()[0].rstrip(";")) for row in shown]
    bars = axes.barh(names, values, color=BLUE, height=0.6)
    axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=3)
    axes.axvline(1, color=INK, linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("time / ERM or plain network")
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def train_both(machine: Machine, weights: Path, scratch: Path) -> dict[str, Path]:
    """Trains ERM, for a few steps, and solves `solo_plus`; returns their folders."""
    folders = {}
    for name, steps in (("erm", 50), ("solo_plus", None)):
        config = RunConfig(
            dataset="pacs", targets=(TARGET,), algorithm=name, backbone="tf_efficientnet_lite0",
            weights=str(weights), freeze_backbone=True, steps=steps,
        )  # fmt: skip
        folders[name] = train_run(config, machine, scratch / name)
    return folders


def sketches(data_dir: Path) -> list[Path]:
    """Returns the paths of some images of the target, spread over its classes."""
    found = DATASETS["pacs"].find(data_dir)
    assert found is not None
    paths = sorted(Path(data_dir).rglob(f"{TARGET}/*/*"))
    return paths[:: max(1, len(paths) // FOLDER_IMAGES)][:FOLDER_IMAGES]


def all_readings(run: Path) -> Predictor:
    """Loads a run and turns its early exit off."""
    model = Predictor.load(run)
    assert isinstance(model.algorithm, Ridge)
    model.algorithm.margin.fill_(NEVER)
    return model


def models_of(runs: dict[str, Path]) -> dict[str, Predictor]:
    """Returns ERM, the default, and the default without early exit."""
    both = {name: Predictor.load(folder) for name, folder in runs.items()}
    return {**both, "all readings": all_readings(runs["solo_plus"])}


def against_erm(measured: dict[str, Timing]) -> str:
    """Formats the ratios of the default, and of all its readings, to ERM."""
    erm = measured["erm"]
    both = [ratio(measured[name], erm) for name in ("solo_plus", "all readings")]
    return f"{both[0]}; all readings {both[1]}"


def model_rows(runs: dict[str, Path], paths: Sequence[Path], scratch: Path) -> list[Row]:
    """Measures the networks on sketches, one by one and in a batch."""
    models = models_of(runs)
    pixels = np.stack([models["erm"].pixels(path) for path in spread(paths)])
    x = to_unit(torch.from_numpy(pixels))
    with torch.inference_mode():
        readings = models["solo_plus"].algorithm.outputs(x).readings
    passes = "1" if readings is None else f"{float(readings.mean()):.2f}"

    def one_by_one(model: nn.Module) -> Callable[[], object]:
        alone = [predictor(model, x[i : i + 1]) for i in range(0, IMAGES, 4)]
        return lambda: [predict() for predict in alone]

    rows: list[Row] = []
    batches = {"batch 1": one_by_one, "batch 64": lambda model: predictor(model, x)}
    for name, make in batches.items():
        work = {key: make(model.algorithm) for key, model in models.items()}
        measured = alternate(work, rounds=5, warmup=1)
        of = f"ERM; {passes} readings an image"
        rows.append([f"solo_plus, lite0 at 224 pixels, {name}", against_erm(measured), of])
    return rows


def spread(paths: Sequence[Path]) -> list[Path]:
    """Returns `IMAGES` of the paths, from all over them."""
    return list(paths[:: len(paths) // IMAGES][:IMAGES])


def predict_rows(runs: dict[str, Path], paths: Sequence[Path], scratch: Path) -> list[Row]:
    """Measures `predict`, from paths to predictions."""
    models, chosen = models_of(runs), spread(paths)
    rows: list[Row] = []
    for name, groups in {"batch 1": [[p] for p in chosen[::4]], "batch 64": [chosen]}.items():
        work = {
            key: lambda model=model: [model.predict(group) for group in groups]  # noqa: B023
            for key, model in models.items()
        }
        measured = alternate(work, rounds=5, warmup=1)
        rows.append([f"solo_plus, `predict`, {name}", against_erm(measured), "ERM"])
    return rows


def onnx_rows(runs: dict[str, Path], paths: Sequence[Path], scratch: Path) -> list[Row]:
    """Exports both models, and measures the default in ONNX Runtime beside PyTorch."""
    for name, run in runs.items():
        export_onnx(Predictor.load(run), scratch / f"{name}.onnx")
    models = {"torch": Predictor.load(runs["solo_plus"]), "erm": Predictor.load(runs["erm"])}
    files = {f"{name} file": solodg.load(scratch / f"{name}.onnx") for name in runs}
    chosen = spread(paths)[::4]
    pixels = [models["torch"].pixels(path)[None] for path in chosen]
    work = {
        name: lambda model=model: [model.compute(one) for one in pixels]
        for name, model in {**models, **files}.items()
    }
    measured = alternate(work, rounds=5, warmup=1)
    ours = measured["solo_plus file"]
    return [
        ["solo_plus, ONNX Runtime, batch 1", ratio(ours, measured["torch"]), "PyTorch"],
        ["solo_plus, ONNX Runtime, batch 1", ratio(ours, measured["erm file"]), "ERM's file"],
    ]


def server_rows(runs: dict[str, Path], paths: Sequence[Path], scratch: Path) -> list[Row]:
    """Puts a server with each exported model under load, in turns."""
    chosen = spread(paths)
    images, loads = [path.read_bytes() for path in chosen], {name: Load() for name in runs}
    for _ in range(2):
        for name in runs:
            file = scratch / f"{name}.onnx"
            alone = solodg.load(file)
            expected: list[object] = [
                image_prediction(None, found).model_dump(by_alias=True)
                for found in alone.predict(chosen)
            ]
            with served(file) as server:
                asyncio.run(press(server, images, expected, SERVER_SECONDS, 16, loads[name]))
    rates = {name: len(load.times) / load.seconds for name, load in loads.items()}
    shown = f"{rates['solo_plus'] / rates['erm']:.2f} ({rates['solo_plus']:.0f} images/s)"
    return [["solo_plus, served images a second, 16 clients", shown, "ERM's file"]]


def folder_rows(runs: dict[str, Path], paths: Sequence[Path], scratch: Path) -> list[Row]:
    """Measures `predict` of many images beside decoding them alone and computing them alone."""
    model = Predictor.load(runs["solo_plus"])
    decoded: list[np.ndarray] = []
    size = model.batch_size
    chunks = [paths[start : start + size] for start in range(0, len(paths), size)]
    decoding = seconds(
        lambda: decoded.extend(np.stack([model.pixels(p) for p in chunk]) for chunk in chunks)
    )
    computing = seconds(lambda: [model.compute(pixels) for pixels in decoded])
    both = seconds(lambda: list(model.predict_each(paths)))
    slower = max(decoding, computing)
    title = f"`predict` of {len(paths)} images"
    return [[title, f"{both / slower:.2f}", "the slower of decoding and computing"]]


def seconds(work: Callable[[], object]) -> float:
    """Returns how long some work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def start_rows(runs: dict[str, Path], paths: Sequence[Path], scratch: Path) -> list[Row]:
    """Measures commands from their start, the fastest of three."""
    program, image = [sys.executable, "-m", "solodg"], str(paths[0])
    commands = {
        "`solodg --help`": ["--help"],
        "`solodg predict FILE.onnx IMAGE`": ["predict", str(scratch / "solo_plus.onnx"), image],
        "`solodg predict RUN IMAGE`": ["predict", str(runs["solo_plus"]), image],
    }
    rows = []
    for name, words in commands.items():
        taken = min(
            seconds(lambda: subprocess.run([*program, *words], check=True, capture_output=True))  # noqa: B023
            for _ in range(3)
        )
        rows.append([name, f"{taken:.2f} s", "from start to end"])

    starts = []
    for _ in range(3):
        started = time.perf_counter()
        with served(scratch / "solo_plus.onnx"):
            starts.append(time.perf_counter() - started)
    taken = min(starts)
    return [*rows, ["`solodg serve FILE.onnx`", f"{taken:.2f} s", "from start to first answer"]]


def backbone_rows(network: str) -> list[Row]:
    """Measures image norm in one reading and in three, beside the plain network."""
    norms = {"plain": None, "one reading": 300.0, "three readings": (1000.0, 0.0, 100.0)}
    built = {n: build_backbone(network, image_norm=norm).eval() for n, norm in norms.items()}

    def embedding(backbone: nn.Module, x: Tensor) -> Callable[[], object]:
        def compute() -> None:
            with torch.inference_mode():
                backbone.embed(x)  # type: ignore[operator]

        return compute

    found: dict[str, list[str]] = {"one reading": [], "three readings": []}
    for batch, rounds in ((1, 30), (32, 5)):
        x = torch.rand(batch, 3, 224, 224)
        work = {name: embedding(backbone, x) for name, backbone in built.items()}
        measured = alternate(work, rounds=rounds, warmup=2)
        for name, ratios in found.items():
            ratios.append(ratio(measured[name], measured["plain"]))
    return [
        [f"{network}, image norm in {name}, batch 1 / 32", " / ".join(ratios), "plain"]
        for name, ratios in found.items()
    ]


def step_row() -> Row:
    """Measures a training step of the default with pose on digits of 32 pixels, beside ERM."""
    defaults = RunConfig(dataset="rotated-mnist")
    shown = noise_episode(defaults.context_images, defaults.batch_size)
    work = {name: updater(name, shown) for name in ("erm", "solo_plus")}
    measured = alternate(work, rounds=9, warmup=2)
    found = ratio(measured["solo_plus"], measured["erm"])
    return ["solo_plus, training step at 32 pixels, ResNet-18, with pose", found, "ERM"]


if __name__ == "__main__":
    main()
