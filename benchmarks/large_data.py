"""Data that is larger than the memory for decoded images: peak memory of training and of scoring.

`python -m benchmarks.large_data [--counts 5000,50000] [--memory-gb 0.05]` makes images on disk, and
runs `solodg train` and `solodg evaluate` on them, each in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from benchmarks.timing import table

DOMAINS, CLASSES, SIZE = 4, 5, 64
TARGET = f"domain_{DOMAINS - 1}"
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
_MB = 1024**2


class Peak(NamedTuple):
    """The peak resident memory of a process, in MB, and its seconds."""

    megabytes: float
    seconds: float


def make_images(root: Path, count: int) -> None:
    """Writes `count` JPEG images, `domain_*/class_*/*.jpg`: noise around a colour of the class."""
    generator = np.random.default_rng(0)
    places = [(d, c) for d in range(DOMAINS) for c in range(CLASSES)]
    for number in range(count):
        domain, label = places[number % len(places)]
        folder = root / f"domain_{domain}" / f"class_{label}"
        folder.mkdir(parents=True, exist_ok=True)
        colour = np.array([50 * label, 255 - 50 * label, 60 * domain])
        coarse = generator.integers(-40, 40, (SIZE // 8, SIZE // 8, 3))  # noise that JPEG keeps
        pixels = (colour + coarse.repeat(8, 0).repeat(8, 1)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:06d}.jpg", quality=85)


def peak_of(*arguments: object) -> Peak:
    """Runs `solodg` with the arguments; returns its peak memory."""
    command = [sys.executable, "-m", "solodg", *(str(a) for a in arguments), "--quiet"]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return Peak(usage.ru_maxrss * _RSS_UNIT / _MB, time.perf_counter() - started)


def train_and_score(data: Path, run: Path, memory_gb: float, steps: int) -> tuple[Peak, Peak]:
    """Trains a small CNN on three domains and scores it on the fourth."""
    trained = peak_of(
        "train", data, "--target", TARGET, "--algorithm", "erm", "--backbone", "small_cnn",
        "--image-size", SIZE, "--steps", steps, "--validate-every", steps,
        "--memory-gb", memory_gb, "--output", run,
    )  # fmt: skip
    scored = peak_of("evaluate", run)
    # Of the whole target, with the model that was trained just now.
    record = json.loads((run / "results.jsonl").read_text().splitlines()[-1])
    if record["data"]["images"] != sum(1 for _ in data.glob("*/*/*")):
        raise SystemExit(f"{run}: not all images of {data} were listed")
    return trained, scored


def main() -> None:
    """Prints the peak memory for each number of images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", default="5000,50000")
    parser.add_argument("--memory-gb", default="0.05", help="one or several, as 0.05,4")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where images are made, and kept")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for count in map(int, given.counts.split(",")):
            data = (given.folder or Path(scratch)) / f"images_{count}"
            if not data.is_dir():
                make_images(data, count)
            for memory_gb in map(float, given.memory_gb.split(",")):
                run = Path(scratch) / f"run_{count}_{memory_gb:g}"
                trained, scored = train_and_score(data, run, memory_gb, given.steps)
                rows.append(
                    [
                        f"{count:,}",
                        f"{count * 3 * SIZE**2 / _MB:.0f} MB",
                        f"{memory_gb * 1024:.0f} MB",
                        f"{trained.megabytes:.0f} MB ({trained.seconds:.0f} s)",
                        f"{scored.megabytes:.0f} MB ({scored.seconds:.0f} s)",
                    ]
                )
    header = ["images", "decoded", "--memory-gb", "train, peak (time)", "evaluate, peak (time)"]
    title = f"Peak memory, {SIZE} x {SIZE} JPEG on disk, small CNN"
    sys.stdout.write(table(title, header, rows))


if __name__ == "__main__":
    main()
