"""Disk: every command that writes, on a full disk and in a read-only folder.

It says so in one line, and nothing that was there is lost: once there is space again, the same
command gives the answer that it gives undisturbed.
"""

import random
from pathlib import Path
from typing import Any

from torture.commands import COMMANDS, Place, make_place
from torture.forked import Lane
from torture.small_disk import LimitedDisk, MountedDisk, enter_namespace
from torture.tally import Tally

DEFAULT_COUNT = 5  # fillings of the disk for each command
WRITERS = ("train", "resume", "evaluate", "explain", "report", "export", "study", "bench")
READERS = ("predict", "serve", "predict ONNX", "serve ONNX")
GROWING = ("metrics.jsonl", "results.jsonl")  # new lines may follow the old ones


def torture(tally: Tally, scratch: Path, seed: int, count: int) -> None:
    """Runs each command with `count` amounts of free space, and in a read-only folder."""
    scratch.chmod(0o755)  # another user may have to read it
    place = make_place(scratch / "place")

    def work(tally: Tally) -> None:
        disk = MountedDisk(scratch / "disk") if enter_namespace() else LimitedDisk(scratch / "disk")
        try:
            Torture(tally, place, disk, random.Random(f"{seed} disk")).run(count)
        finally:
            disk.close()

    tally.add(Lane(work, scratch).wait())  # a process of its own, for the mounts


class Torture:
    """Runs commands on a copy of a place on a small disk."""

    def __init__(
        self, tally: Tally, place: Place, disk: MountedDisk | LimitedDisk, generator: random.Random
    ) -> None:
        """Stores where everything is."""
        self.tally, self.place, self.disk, self.random = tally, place, disk, generator

    def run(self, count: int) -> None:
        """Runs all commands in all conditions."""
        answers, needs = self._undisturbed()
        for name in WRITERS:
            self._full(name, 0, answers[name])
            for _ in range(count - 1):
                self._full(name, int(self.random.uniform(0, needs[name])), answers[name])
        for name in (*WRITERS, *READERS):
            self._read_only(name, answers[name])
        counts = self.tally.counts
        self.tally.figures += [
            f"disk: {self.disk.kind}",
            f"full: {counts['full']} commands, {counts['full, refused']} of them refused",
            f"read-only: {counts['read-only']} commands, "
            f"{counts['read-only, refused']} of them refused",
        ]

    def _undisturbed(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Returns the answer of each command with enough space, and the bytes that it takes."""
        answers, needs = {}, {}
        for name in (*WRITERS, *READERS):
            place = self._copy()
            before = self.disk.used() if isinstance(self.disk, MountedDisk) else 0
            finished, answers[name] = COMMANDS[name].run(place)
            self.tally.check(finished.code == 0, f"undisturbed: {name}: {finished}")
            # At least what its largest file takes: it is written anew beside the old one.
            sizes = [p.stat().st_size for p in place.folder.rglob("*") if p.is_file()]
            needs[name] = max(self.disk.used() - before, max(sizes))
        return answers, needs

    def _copy(self) -> Place:
        return self.place.copy(self.disk.folder / "place")

    def _full(self, name: str, free: int, answer: Any) -> None:
        place, what = self._copy(), f"{name} with {free:,} bytes free"
        before = _contents(place)
        limits = self.disk.fill(free)
        finished, found = COMMANDS[name].run(place, limits)
        self.disk.release()
        self._count("full", finished.code)
        # A bench may record that cells failed, and end with 1.
        problem = finished.problem((0, 1, 2) if name == "bench" else (0, 2))
        self.tally.check(problem is None, f"{what}: {problem}")
        if free == 0:
            self.tally.check(finished.code != 0, f"{what}: exit code 0, nothing was written")
        if finished.code == 0:
            self.tally.check(found == answer, f"{what}: exit code 0 and another answer: {found}")
        self._nothing_lost(name, what, before, place)
        finished, found = COMMANDS[name].run(place)
        problem = finished.problem((0,))
        self.tally.check(problem is None, f"{what}, again with space: {problem}")
        self.tally.check(found == answer, f"{what}, again with space: another answer: {found}")

    def _read_only(self, name: str, answer: Any) -> None:
        place, what = self._copy(), f"{name} in a read-only folder"
        before = _contents(place)
        finished, found = COMMANDS[name].run(place, self.disk.protect())
        self.disk.release()
        self._count("read-only", finished.code)
        problem = finished.problem((0,) if name in READERS else (0, 2))
        self.tally.check(problem is None, f"{what}: {problem}")
        if finished.code == 0:
            self.tally.check(found == answer, f"{what}: exit code 0 and another answer: {found}")
        self.tally.check(_contents(place) == before, f"{what}: files have changed")

    def _nothing_lost(self, name: str, what: str, before: dict[str, bytes], place: Place) -> None:
        after = _contents(place)
        for file, content in before.items():
            if name == "resume" and file.startswith("half/"):
                continue  # it went on; its end is compared
            kept = after.get(file, b"")
            same = kept == content or (file.endswith(GROWING) and kept.startswith(content))
            self.tally.check(same, f"{what}: {file} is lost or changed")
        left = [f for f in after if Path(f).name.startswith(".") and f not in before]
        self.tally.check(not left, f"{what}: temporary files are left: {left}")

    def _count(self, condition: str, code: int) -> None:
        self.tally.counts[condition] += 1
        self.tally.counts[f"{condition}, refused"] += code != 0


def _contents(place: Place) -> dict[str, bytes]:
    paths = [path for path in place.folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(place.folder)): path.read_bytes() for path in paths}
