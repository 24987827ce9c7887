"""Runs the cells of plans and searches for a command: in this process, or on a Ray cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from solodg.errors import UserError
from solodg.runs.config import Machine

if TYPE_CHECKING:
    from solodg.bench.cell import Cell
    from solodg.progress import Progress, Say

SOME_FAILED = 1  # exit code

OnOption = Annotated[str, typer.Option(help="Where cells run: local, or ray.")]
RayAddressOption = Annotated[
    str | None,
    typer.Option(help="Address of a running Ray cluster.  [dim]default: start one[/dim]"),
]
RayWorkersOption = Annotated[
    int | None, typer.Option(help="Workers of the Ray cluster that is started.", min=1)
]


@dataclass(frozen=True)
class Where:
    """Where cells run: in this process, or on a Ray cluster."""

    on_ray: bool
    address: str | None  # of a running cluster; None: a local one is started
    workers: int | None  # of a cluster that is started

    @classmethod
    def checked(cls, on: str, address: str | None, workers: int | None) -> "Where":
        """Reads the options; raises `UserError` for those that do not go together."""
        if on not in ("local", "ray"):
            raise UserError(f"--on {on!r}: choose local or ray.")
        if on == "local" and (address or workers):
            raise UserError("--ray-address and --ray-workers go with --on ray.")
        return cls(on == "ray", address, workers)


def run_cells(
    cells: Sequence["Cell"],
    machine: Machine,
    output: Path,
    where: Where,
    progress: "Progress",
    say: "Say",
) -> int:
    """Runs the cells that have no records yet; returns how many failed."""
    from solodg.bench.runner import format_seconds, run_serially

    if where.on_ray:
        from solodg.bench.ray import run_on_ray

        tally = run_on_ray(
            cells,
            machine,
            output,
            address=where.address,
            workers=where.workers,
            progress=progress,
            say=say,
        )
    else:
        tally = run_serially(cells, machine, output, progress=progress, say=say)
    say(f"{tally.ran} cells run, {tally.failed} failed, in {format_seconds(tally.seconds)}.")
    return tally.failed
