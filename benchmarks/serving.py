"""The server under load from a second process: micro-batches beside one request at a time.

`python -m benchmarks.serving [MODEL IMAGES] [--seconds N] [--clients N]` prints the table: a run or
an exported file, and a folder of images; without them ResNet-18 with random weights, on noise.
Every answer is held against what `predict` says of the image alone.
"""

import argparse
import asyncio
import io
import json
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

import solodg
from benchmarks.server_process import Server, served
from benchmarks.timing import table
from solodg.pixels import EXTENSIONS
from solodg.serving.schemas import image_prediction

MODES = {"micro-batches of up to 16": 16, "one at a time": 1}
ROUNDS, WARM = 2, 3.0  # modes take turns; seconds of load before anything is counted


@dataclass
class Load:
    """What was measured of one mode of the server."""

    seconds: float = 0.0
    times: list[float] = field(default_factory=list)  # of each answered request
    wrong: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    memory: list[float] = field(default_factory=list)  # MB, at the start and end of each round
    batch: list[float] = field(default_factory=list)
    alone: int = 0

    def row(self, name: str) -> list[str]:
        """Returns the row of the table for this mode."""
        p50, p99 = np.percentile(self.times, [50, 99]) * 1000
        failed = sum(n for status, n in self.statuses.items() if status != 200)
        memory = [f"{a:.0f} to {b:.0f}" for a, b in zip(*[iter(self.memory)] * 2, strict=True)]
        return [name, f"{len(self.times) / self.seconds:.0f}", f"{p50:.0f} ms", f"{p99:.0f} ms",
                str(len(self.times)), str(failed), str(self.wrong),
                f"{np.mean(self.batch):.1f}", f"{100 * self.alone / len(self.times):.0f}%",
                ", ".join(memory)]  # fmt: skip


HEADER = ["", "images/s", "p50", "p99", "requests", "failed", "other answers than `predict`",
          "mean batch", "computed again alone", "memory by round, MB"]  # fmt: skip


async def client(
    host: str, port: int, images: list[bytes], expected: list[object], until: float, load: Load,
    start: int,
) -> None:  # fmt: skip
    """Sends requests over one connection, each as soon as the last is answered."""
    reader, writer = await asyncio.open_connection(host, port)
    number = start
    while time.perf_counter() < until:
        number = (number + 1) % len(images)
        length = f"Content-Length: {len(images[number])}"
        head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n"
        started = time.perf_counter()
        writer.write(head.encode() + images[number])
        answer = await reader.readuntil(b"\r\n\r\n")
        size = int(re.search(rb"content-length: (\d+)", answer)[1])  # type: ignore[index]
        body = json.loads(await reader.readexactly(size))
        load.times.append(time.perf_counter() - started)
        status = int(answer.split()[1])
        load.statuses[status] += 1
        load.wrong += status == 200 and body["predictions"][0] != expected[number]
    writer.close()


async def press(
    server: Server, images: list[bytes], expected: list[object], seconds: float,
    clients: int, load: Load,
) -> None:  # fmt: skip
    """Puts a server under the load of many clients and adds what it measures to `load`."""
    host, port = server.host, server.port

    async def crowd(seconds: float, into: Load) -> None:
        until = time.perf_counter() + seconds
        starts = range(0, len(images), max(1, len(images) // clients))
        await asyncio.gather(*(
            client(host, port, images, expected, until, into, starts[i % len(starts)])
            for i in range(clients)
        ))  # fmt: skip

    await crowd(WARM, Load())
    before = _counts(host, port)
    load.memory.append(server.memory().now)
    started = time.perf_counter()
    await crowd(seconds, load)
    load.seconds += time.perf_counter() - started
    load.memory.append(server.memory().now)
    images_, batches, alone = (b - a for a, b in zip(before, _counts(host, port), strict=True))
    load.batch.append(images_ / batches)
    load.alone += int(alone)


def _counts(host: str, port: int) -> tuple[float, ...]:
    text = urllib.request.urlopen(f"http://{host}:{port}/metrics").read().decode()
    names = ("solodg_batch_images_sum", "solodg_batch_images_count", "solodg_computed_alone_total")
    return tuple(float(re.search(rf"^{name} (\S+)", text, re.MULTILINE)[1]) for name in names)  # type: ignore[index]


def noise(folder: Path) -> tuple[Path, list[bytes]]:
    """Exports ResNet-18 with random weights; returns its file and 64 images of noise."""
    from benchmarks.onnx import build
    from solodg.predict.export import export_onnx

    export_onnx(build("resnet18"), folder / "resnet18.onnx")
    generator = np.random.default_rng(0)
    images = []
    for _ in range(64):
        file = io.BytesIO()
        pixels = generator.integers(0, 256, (14, 14, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((224, 224)).save(file, "JPEG")
        images.append(file.getvalue())
    return folder / "resnet18.onnx", images


def main() -> None:
    """Loads the server in turns of each mode and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("images", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each mode")
    parser.add_argument("--clients", type=int, default=16)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if given.model is None or given.images is None:
            model, images = noise(Path(scratch))
        else:
            model = given.model
            paths = [p for p in sorted(given.images.rglob("*")) if p.suffix.lower() in EXTENSIONS]
            images = [p.read_bytes() for p in paths[:: max(1, len(paths) // 256)]]
        alone = solodg.load(model)
        expected = [
            image_prediction(None, alone.predict(image)).model_dump(by_alias=True)
            for image in images
        ]
        del alone
        loads = {name: Load() for name in MODES}
        for _ in range(ROUNDS):
            for name, max_batch in MODES.items():
                with served(model, "--max-batch", str(max_batch)) as server:
                    seconds = given.seconds / ROUNDS
                    load = loads[name]
                    asyncio.run(press(server, images, expected, seconds, given.clients, load))
    rows = [load.row(name) for name, load in loads.items()]
    title = f"Serving {model.name}, {given.clients} clients, {len(images)} images"
    sys.stdout.write(table(title, HEADER, rows))


if __name__ == "__main__":
    main()
