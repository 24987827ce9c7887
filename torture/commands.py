"""The commands that the torture runs on a small trained model, and the answer of each.

An answer is what a command says or writes, without times and paths. It is the same bits whenever
the same command meets the same files, so answers are compared for equality.
"""

import hashlib
import http.client
import io
import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from torture.forked import COMMAND_SECONDS, Child, Finished, run

IMAGE = Path(__file__).parents[1] / "docs" / "disc.png"
SMALL = ("--target", "sky", "--backbone", "small_cnn", "--batch-size", 8, "--context-images", 2,
         "--centre-images", 5, "--accelerator", "cpu")  # fmt: skip
STEPS = ("--steps", 12, "--validate-every", 3)
PLAN = """
title: Torture
dataset: toy
targets: [sky]
seeds: [0, 1]
run: {backbone: small_cnn, steps: 6, batch_size: 8, context_images: 2, validate_every: 3,
      centre_images: 5, train_images: 10}
rows:
  - {name: ERM, run: {algorithm: erm}}
  - {name: solo, run: {algorithm: solo}}
"""


class Place(NamedTuple):
    """A folder with a finished run, a run that was killed, an exported model and a plan."""

    folder: Path

    @property
    def run(self) -> Path:
        """Returns the folder of the finished run, on which every command has been run once."""
        return self.folder / "run"

    @property
    def half(self) -> Path:
        """Returns the folder of the run that was killed in the middle."""
        return self.folder / "half"

    @property
    def onnx(self) -> Path:
        """Returns the exported model."""
        return self.folder / "model.onnx"

    def copy(self, folder: Path) -> "Place":
        """Copies everything into a new folder, in place of what it holds."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)
        return Place(folder)


class Command(NamedTuple):
    """A command, and how its answer is read once it has ended with exit code 0."""

    arguments: Callable[[Place], list[Any]]
    answer: Callable[[Place, Finished], Any]
    serves: bool = False  # it does not end by itself

    def run(self, place: Place, before: Callable[[], None] = lambda: None) -> tuple[Finished, Any]:
        """Runs the command; returns how it ended, and its answer where the exit code is 0."""
        if self.serves:
            return _serve(self.arguments(place), before)
        finished = run(*self.arguments(place), before=before)
        if finished.code != 0:
            return finished, None
        try:
            return finished, self.answer(place, finished)
        except (OSError, ValueError, KeyError, IndexError) as error:
            return finished, f"no answer can be read: {error!r}"


def train_arguments(output: Path) -> list[Any]:
    """Returns the training that every place begins with."""
    return ["train", "toy", *SMALL, *STEPS, "--output", output, "--resume"]


def make_place(folder: Path) -> Place:
    """Trains, interrupts and exports; then runs every command once, so that all files exist."""
    folder.mkdir(parents=True)
    place = Place(folder)
    (folder / "plan.yaml").write_text(PLAN)
    _must(run(*train_arguments(place.run)))
    _interrupt(place.half)
    _must(run("export", place.run, "--onnx", place.onnx))
    for name in ("evaluate", "explain", "report", "study"):
        _must(COMMANDS[name].run(place)[0])
    return place


def export_model(folder: Path) -> Path:
    """Trains a small model and exports it; returns the ONNX file."""
    path = folder / "model.onnx"
    _must(run(*train_arguments(folder / "run")))
    _must(run("export", folder / "run", "--onnx", path))
    return path


def pictures(seed: int, count: int) -> list[bytes]:
    """Returns PNG files of noise, each of another."""
    generator = np.random.default_rng(seed)
    files = []
    for pixels in generator.integers(0, 256, (count, 48, 48, 3), dtype=np.uint8):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        files.append(file.getvalue())
    return files


def _must(finished: Finished) -> None:
    if finished.code != 0:
        raise RuntimeError(f"an undisturbed command failed: {finished}")


def _interrupt(folder: Path) -> None:
    """Kills a training after its second validation."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        child = Child(train_arguments(folder))
        while child.poll() is None:
            if len(read_lines(folder / "metrics.jsonl")) >= 2 and _state_files(folder):
                child.kill()
            time.sleep(0.001)
        if not (folder / "finished.json").exists() and _state_files(folder):
            return
    raise RuntimeError("no training could be interrupted between two validations")


def _state_files(folder: Path) -> list[Path]:
    return list(folder.glob("state.*")) if folder.is_dir() else []


def read_lines(path: Path) -> list[Any]:
    """Reads the JSON lines of a file, without those that are cut off."""
    values = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            values.append(json.loads(line))
        except ValueError:
            continue
    return values


def weights(path: Path) -> str:
    """Returns a hash of the names, types, shapes and bits of all tensors of a safetensors file."""
    from safetensors import safe_open

    found = hashlib.sha256()
    with safe_open(path, framework="np") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            found.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + tensor.tobytes())
    return found.hexdigest()


def trained(folder: Path) -> tuple[str, list[Any]]:
    """Returns what a training leaves: its weights and its metrics."""
    return weights(folder / "model.safetensors"), read_lines(folder / "metrics.jsonl")


def recorded(output: Path) -> dict[str, list[Any]]:
    """Returns the metrics of every finished cell of a bench, by key and then by part."""
    cells: dict[str, dict[int, Any]] = {}
    for line in read_lines(output / "results.jsonl"):
        if isinstance(line.get("cell"), dict):
            scores = (line["domain"], line["role"], line["metrics"])
            cells.setdefault(line["cell"]["key"], {})[line["cell"]["part"]] = scores
    return {key: [parts[i] for i in sorted(parts)] for key, parts in sorted(cells.items())}


def _said(place: Place, finished: Finished) -> str:
    return finished.out.replace(str(place.folder), "PLACE")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _scores(place: Place, finished: Finished) -> Any:
    records = [json.loads(line) for line in finished.out.splitlines()]
    return [(r["domain"], r["role"], r["metrics"]) for r in records]


def _page(place: Place, finished: Finished) -> str:
    """Returns the page without its facts and curves, which repeat notes and do not predict."""
    text = (place.run / "report.html").read_text()
    parts = re.split(r'<h2 id="(domains|curves|calibration)">', text)
    return hashlib.sha256((parts[2] + parts[6]).encode()).hexdigest()


def _figure(place: Place, finished: Finished) -> tuple[str, str]:
    return _said(place, finished), _digest(place.run / "explain" / "disc.png")


def _study(place: Place, finished: Finished) -> tuple[str, str]:
    return _said(place, finished), (place.run / "study.json").read_text()


def _serve(arguments: list[Any], before: Callable[[], None]) -> tuple[Finished, Any]:
    """Starts a server, asks it once, and stops it."""
    child = Child(arguments, before)
    deadline = time.monotonic() + COMMAND_SECONDS
    while child.poll() is None and time.monotonic() < deadline:
        if found := re.search(r"http://([0-9.]+):(\d+)\s", child.said()):
            break
        time.sleep(0.005)
    else:
        return child.finish(0), None
    connection = http.client.HTTPConnection(found[1], int(found[2]), timeout=60)
    try:
        connection.request("POST", "/predict", IMAGE.read_bytes())
        response = connection.getresponse()
        answer: Any = (response.status, json.loads(response.read()))
    except (OSError, ValueError, http.client.HTTPException) as error:
        answer = f"no answer: {error!r}"
    finally:
        connection.close()
        child.signal(signal.SIGTERM)
    return child.finish(), answer


COMMANDS = {
    "predict": Command(lambda p: ["predict", p.run, IMAGE, "--json"], _said),
    "evaluate": Command(lambda p: ["evaluate", p.run, "--json", "--accelerator", "cpu"], _scores),
    "explain": Command(lambda p: ["explain", p.run, IMAGE], _figure),
    "report": Command(lambda p: ["report", p.run, "--images", 2], _page),
    "export": Command(lambda p: ["export", p.run, "--onnx", p.onnx], lambda p, _: _digest(p.onnx)),
    "study": Command(lambda p: ["study", p.run, "--images", 4], _study),
    "serve": Command(lambda p: ["serve", p.run, "--port", 0], _said, serves=True),
    "train again": Command(lambda p: train_arguments(p.run), _said),
    "resume": Command(lambda p: train_arguments(p.half), lambda p, _: trained(p.half)),
    "predict half": Command(lambda p: ["predict", p.half, IMAGE, "--json"], _said),
    "predict ONNX": Command(lambda p: ["predict", p.onnx, IMAGE, "--json"], _said),
    "serve ONNX": Command(lambda p: ["serve", p.onnx, "--port", 0], _said, serves=True),
    "train": Command(
        lambda p: train_arguments(p.folder / "new"), lambda p, _: trained(p.folder / "new")
    ),
    "bench": Command(
        lambda p: ["bench", p.folder / "plan.yaml", "--output", p.folder / "bench"],
        lambda p, _: recorded(p.folder / "bench"),
    ),
}
