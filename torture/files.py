"""Files: every file of a run folder and an exported model, damaged; each command on what is left.

A command may refuse the damage with one line and exit code 2, or give the answer that it gives on
the undamaged files. Anything else is a failure: a traceback, a crash, another answer.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torture.commands import COMMANDS, Place, make_place
from torture.forked import Finished, in_lanes
from torture.tally import Tally

DEFAULT_COUNT = 4  # flips of a bit in each file
MANY_FLIPS = 16  # further ones in a file of weights, for the quick command alone
ON_RUN = ("predict", "evaluate", "explain", "report", "export", "study", "serve", "train again")
ON_HALF = ("resume", "predict half")
ON_ONNX = ("predict ONNX", "serve ONNX")
STATED_PART = "only the target is scored"  # said where the data cannot be those of the training
# Figures, pages and logs that commands write and none reads; they are damaged all at once.
ONLY_WRITTEN = (".png", ".svg", ".html", "study.json", "tfevents")


class Damage(NamedTuple):
    """One kind of damage; `change` turns the content of a file into what is left of it."""

    name: str
    change: Callable[[bytes, random.Random], bytes]


class Case(NamedTuple):
    """Files that are damaged in one way, relative to the place, and the commands to run then."""

    files: tuple[str, ...]
    damage: Damage
    number: int  # of the damage, where there are several of a kind
    commands: tuple[str, ...]

    def __str__(self) -> str:
        files = self.files[0] if len(self.files) == 1 else f"{len(self.files)} files"
        return f"{files}, {self.damage.name} ({self.number})"


def torture(tally: Tally, scratch: Path, seed: int, count: int) -> None:
    """Damages every file in every way, with `count` flips each, and runs all commands."""
    place = make_place(scratch / "place")
    answers = _answers(tally, place, scratch)
    cases = _cases(place, count)

    def lane(tally: Tally, cases: Sequence[Case], folder: Path) -> None:
        for case in cases:
            for name in case.commands:
                copy = place.copy(folder / "place")
                generator = random.Random(f"{seed} {case}")
                for file in case.files:
                    path = copy.folder / file
                    path.write_bytes(case.damage.change(path.read_bytes(), generator))
                finished, answer = COMMANDS[name].run(copy)
                problem = finished.problem()
                if problem is None and finished.code == 0:
                    problem = _wrong(case, finished, answer, answers[name])
                tally.check(problem is None, f"{case}: {name}: {problem}")
                tally.counts["refused" if finished.code else "answered as before"] += 1

    random.Random(seed).shuffle(cases)  # so that both lanes have as many long ones
    in_lanes(cases, lane, scratch, tally)
    files = sorted({file for case in cases for file in case.files})
    tally.figures += [
        f"{len(files)} files, {len(cases)} damages, "
        f"{tally.counts['refused'] + tally.counts['answered as before']} commands",
        f"{tally.counts['refused']} refused, {tally.counts['answered as before']} with exit code 0",
    ]


def _wrong(case: Case, finished: Finished, answer: Any, right: Any) -> str | None:
    """Returns what is wrong with the answer of a command that ended with exit code 0, or None."""
    if STATED_PART in finished.err:  # less than the whole answer, and the command says so
        if not isinstance(answer, list):
            return None
        answer, right = [row for row in answer if row not in right], []
    elif case.files == ("half/metrics.jsonl",):  # a damaged log loses lines; the model is the same
        answer, right = answer[0], right[0]
    if answer == right:
        return None
    return f"exit code 0 and another answer: {str(answer)[:500]} in place of {str(right)[:500]}"


def _answers(tally: Tally, place: Place, scratch: Path) -> dict[str, Any]:
    """Returns the answer of each command on undamaged files, and checks that it is always so."""
    answers = {}
    for name in (*ON_RUN, *ON_HALF, *ON_ONNX):
        twice = [COMMANDS[name].run(place.copy(scratch / "undamaged")) for _ in range(2)]
        for finished, _ in twice:
            tally.check(finished.code == 0, f"undamaged: {name}: {finished}")
        tally.check(twice[0][1] == twice[1][1], f"undamaged: {name}: two answers: {twice}")
        answers[name] = twice[0][1]
    return answers


def _cases(place: Place, flips: int) -> list[Case]:
    found = {
        str(path.relative_to(place.folder)): path
        for path in sorted(place.folder.rglob("*"))
        if path.is_file() and path.name != "plan.yaml"
    }
    written = {f for f in found if any(end in Path(f).name for end in ONLY_WRITTEN)}
    written_in_run = tuple(sorted(f for f in written if f.startswith("run/")))
    cases = [Case(written_in_run, damage, 0, ON_RUN) for damage in DAMAGES]
    for file in sorted(found):
        if file in written_in_run:
            continue
        folder = file.split("/")[0]
        commands = {"run": ON_RUN, "half": ON_HALF}.get(folder, ON_ONNX)
        for damage in DAMAGES:
            times = flips if damage is FLIP else 1
            cases += [Case((file,), damage, number, commands) for number in range(times)]
        if file.endswith(("model.safetensors", "state.safetensors", ".onnx")):
            more = range(flips, flips + MANY_FLIPS * flips // DEFAULT_COUNT)
            quick = "resume" if "state" in file else commands[folder == "half"]
            cases += [Case((file,), FLIP, number, (quick,)) for number in more]
    return cases


def _flip(content: bytes, generator: random.Random) -> bytes:
    if not content:
        return b"\x01"
    changed = bytearray(content)
    changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed)


FLIP = Damage("one bit flipped", _flip)
DAMAGES = (
    Damage("cut in half", lambda content, _: content[: len(content) // 2]),
    Damage("cut somewhere", lambda content, g: content[: g.randrange(len(content) or 1)]),
    Damage("emptied", lambda content, _: b""),
    Damage("null in its place", lambda content, _: b"null"),
    Damage("zeros in its place", lambda content, _: bytes(len(content))),
    FLIP,
)
