"""Kills: training, benches of two runners and feature caches, killed and resumed until they end.

The moment of a kill is random over the time that the work takes undisturbed. A third of the kills
wait for a file to be half written, which random moments seldom meet.
"""

import hashlib
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torture.commands import PLAN, SMALL, read_lines, recorded, trained
from torture.forked import Child, in_lanes, run
from torture.tally import Tally

DEFAULT_COUNT = 200
SHARES = {"training": 0.4, "bench": 0.35, "feature cache": 0.25}  # of the kills
AIMED = 1 / 3  # of the kills: at a file that is half written
WRITES = 8  # an aimed kill waits for at most so many
SECONDS = 60.0  # without an end, after the last kill, is a failure


class Work(NamedTuple):
    """Something that is killed and resumed."""

    command: Callable[[Path], list[Any]]
    end: Callable[[Path], Any]  # what it comes to
    phase: Callable[[Path, int], str]  # where a process was killed, by the files that exist
    runners: int = 1


def torture(tally: Tally, scratch: Path, seed: int, count: int) -> None:
    """Kills `count` times in all, and compares every end with that of undisturbed work."""
    works = _works(scratch)
    wanted = {name: round(share * count) for name, share in SHARES.items()}
    wanted["training"] += count - sum(wanted.values())
    undisturbed = {}
    for name, work in works.items():
        folder = scratch / f"undisturbed {name}"
        started = time.monotonic()
        finished = run(*work.command(folder))
        if not tally.check(finished.code == 0, f"{name}, undisturbed: {finished}"):
            return
        undisturbed[name] = (time.monotonic() - started, work.end(folder))

    def lane(tally: Tally, quotas: Sequence[tuple[str, int, int]], folder: Path) -> None:
        for name, kills, number in quotas:
            generator = random.Random(f"{seed} {name} {number}")
            killer = Killer(tally, name, works[name], *undisturbed[name], generator)
            killer.kill_often(kills, folder)

    halves = [(name, (wanted[name] + i) // 2, i) for name in works for i in range(2)]
    in_lanes(halves, lane, scratch, tally)
    kills = sum(tally.counts[f"kills of {name}"] for name in works)
    tally.check(kills >= count, f"only {kills} of {count} kills")
    for name in works:
        tally.figures.append(_figure(tally, name))


def _figure(tally: Tally, name: str) -> str:
    start = f"{name}: "
    met = {k.removeprefix(start): n for k, n in tally.counts.items() if k.startswith(start)}
    phases = ", ".join(f"{n} {phase}" for phase, n in sorted(met.items(), key=lambda x: -x[1]))
    kills, ends = tally.counts[f"kills of {name}"], tally.counts[f"ends of {name}"]
    return f"{name}: {kills} kills ({phases}), {ends} ends compared"


class Killer:
    """Kills one kind of work over and over, and compares what it comes to."""

    def __init__(
        self, tally: Tally, name: str, work: Work, seconds: float, end: Any,
        generator: random.Random,
    ) -> None:  # fmt: skip
        """Stores what the work comes to undisturbed, and the seconds that this takes."""
        self.tally, self.name, self.work = tally, name, work
        self.seconds, self.end, self.random = seconds, end, generator
        self.left = 0  # kills

    def kill_often(self, kills: int, folder: Path) -> None:
        """Works from the start to the end, again and again, until there have been enough kills."""
        self.left, number = kills, 0
        while self.left:
            number += 1
            self._work(folder / f"{self.name} {number}")

    def _work(self, folder: Path) -> None:
        """Starts from nothing, resumes after every kill until the end, and checks the end."""
        victims = [self._start(folder) for _ in range(self.work.runners)]
        calm = time.monotonic()  # since when there was no kill
        while victims:
            for place, victim in enumerate(victims):
                if victim.child.poll() is not None:
                    victims.pop(place)
                    finished = victim.child.finish()
                    self.tally.check(finished.code == 0, f"{folder}, resumed: {finished}")
                    break
                if self.left and victim.due():
                    victim.child.kill()
                    if victim.child.code != -signal.SIGKILL:  # it ended at this very moment
                        continue
                    victim.child.close()
                    self.left -= 1
                    self.tally.counts[f"kills of {self.name}"] += 1
                    phase = self.work.phase(folder, victim.child.pid)
                    self.tally.counts[f"{self.name}: {phase}"] += 1
                    victims[place] = self._start(folder)
                    calm = time.monotonic()
            if time.monotonic() > calm + SECONDS:
                for victim in victims:
                    victim.child.kill()
                self.tally.check(False, f"{folder}: no end within {SECONDS:.0f} s of the last kill")
                return
            time.sleep(0.0005)
        self.tally.counts[f"ends of {self.name}"] += 1
        try:
            found = self.work.end(folder)
        except Exception as error:
            found = repr(error)
        same = found == self.end
        self.tally.check(same, f"{folder}: the end is {str(found)[:2000]}, not {self.end}")

    def _start(self, folder: Path) -> "Victim":
        child = Child(self.work.command(folder))
        aimed = self.random.random() < AIMED
        return Victim(
            child,
            time.monotonic() + self.random.uniform(0, self.seconds),
            Writes(folder, child.pid, self.random.randint(1, WRITES)) if aimed else None,
        )


class Writes:
    """Watches the folders of a process for files that it has not finished to write."""

    def __init__(self, folder: Path, pid: int, number: int) -> None:
        """Stores which write to wait for, counted from 1."""
        self.folder, self.pid, self.left = folder, pid, number
        self.writing = False

    def reached(self) -> bool:
        """Returns whether the process is in the write that was waited for."""
        before, self.writing = self.writing, bool(half_written(self.folder, self.pid))
        self.left -= self.writing and not before
        return self.left <= 0


class Victim(NamedTuple):
    """A process that is to be killed, at a moment or in a write."""

    child: Child
    moment: float
    writes: Writes | None

    def due(self) -> bool:
        """Returns whether the process is to be killed now."""
        if self.writes is None:
            return time.monotonic() >= self.moment
        return self.writes.reached()


def half_written(folder: Path, pid: int) -> list[Path]:
    """Returns the temporary files of a process, which bear its number in their names."""
    return [path for path in folder.rglob(".*") if f".{pid}." in path.name]


def _works(scratch: Path) -> dict[str, Work]:
    (scratch / "plan.yaml").write_text(PLAN)
    weights = scratch / "weights.safetensors"
    _save_random_weights(weights)
    train = ["train", "toy", *SMALL, "--resume"]
    frozen = ["--freeze-backbone", "--weights", weights, "--image-norm", "0,3000,300",
              "--image-size", 128, "--steps", 4, "--validate-every", 2]  # fmt: skip
    return {
        "training": Work(
            lambda f: [*train, "--steps", 24, "--validate-every", 3, "--output", f],
            trained,
            _training_phase,
        ),
        "bench": Work(
            lambda f: ["bench", scratch / "plan.yaml", "--output", f], _bench_end, _bench_phase, 2
        ),
        "feature cache": Work(
            lambda f: [*train, *frozen, "--cache-dir", f / "cache", "--output", f / "run"],
            lambda f: (_cache(f / "cache"), trained(f / "run")),
            _cache_phase,
        ),
    }


def _save_random_weights(path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from solodg.models.backbones import build_backbone

    torch.manual_seed(0)
    net = build_backbone("small_cnn", channels=3, image_size=32).net
    save_file({name: tensor.contiguous() for name, tensor in net.state_dict().items()}, path)


def _training_phase(folder: Path, pid: int) -> str:
    if half_written(folder, pid):
        return "in a write"
    if not (folder / "config.json").exists():
        return "before the folder was claimed"
    if (folder / "finished.json").exists():
        return "after the end of training"
    if (folder / "state.safetensors").exists():
        return "after a validation"
    return "before the first validation"


def _bench_phase(folder: Path, pid: int) -> str:
    if half_written(folder, pid):
        return "in a write"
    runs = list((folder / "runs").glob("*"))
    if not runs:
        return "before the first run"
    if not all((run / "finished.json").exists() for run in runs):
        return "beside an unfinished run"
    return "beside finished runs"


def _cache_phase(folder: Path, pid: int) -> str:
    if any(path.suffix == ".npy" for path in half_written(folder, pid)):
        return "in the computation of features"
    if (folder / "run" / "config.json").exists():
        return "in the training on them"
    return "before or between them"


def _bench_end(folder: Path) -> Any:
    """Returns the metrics of every cell, and how often each was recorded or failed."""
    lines = read_lines(folder / "results.jsonl")
    parts: dict[str, dict[int, int]] = {}
    for line in lines:
        if isinstance(line.get("cell"), dict):
            cell = parts.setdefault(line["cell"]["key"], {})
            cell[line["cell"]["part"]] = cell.get(line["cell"]["part"], 0) + 1
    # A kill may cut off a record; then its cell is recorded again, and other parts of it twice.
    recorded_ = {key: min(times.values()) for key, times in sorted(parts.items())}
    return recorded(folder), recorded_, [line["failed"] for line in lines if "failed" in line]


def _cache(folder: Path) -> dict[str, str]:
    """Returns a hash of every file of stored features."""
    paths = sorted(path for path in folder.rglob("*.npy") if not path.name.startswith("."))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
