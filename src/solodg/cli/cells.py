"""Runs the cells of plans and searches for a command: in this process, or on a Ray cluster."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from solodg.cli.config_options import options_of, validated
from solodg.errors import UserError
from solodg.runs.config import Machine
from solodg.runs.option import option

if TYPE_CHECKING:
    from solodg.bench.cell import Cell
    from solodg.progress import Progress, Say

SOME_FAILED = 1  # exit code


class Where(BaseModel):
    """Where cells run: in this process, or on a Ray cluster."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    on: Literal["local", "ray"] = option("local", "Where cells run: local, or ray.")
    ray_address: str | None = option(
        None, "Address of a running Ray cluster.", shown_default="start one"
    )
    ray_workers: PositiveInt | None = option(
        None, "CPUs of the Ray cluster that is started.", shown_default="those of this machine"
    )
    ray_cpus_per_cell: PositiveInt | None = option(
        None, "CPUs, and so threads, that each cell takes.", shown_default="1"
    )
    ray_gpus_per_cell: float | None = option(
        None,
        "GPUs that each cell takes; 0.5: two cells share one.",
        shown_default="1 if the cluster has any and --accelerator is not cpu",
        ge=0,
    )
    ray_memory_gb_per_cell: float | None = option(
        None,
        "Memory that each cell takes, in GB; Ray places cells by it, and sets them no limit.",
        shown_default="not looked at",
        gt=0,
    )

    @classmethod
    def checked(cls, options: Mapping[str, Any]) -> "Where":
        """Reads the options; raises `UserError` for those that do not go together."""
        where = validated(cls, options)
        given = where.model_dump(exclude={"on"}, exclude_none=True)
        if where.on == "local" and given:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise UserError(f"{flags}: only with --on ray.")
        if where.ray_address and where.ray_workers:
            raise UserError(
                "--ray-workers is for a Ray cluster that is started: leave it out, or leave out "
                "--ray-address."
            )
        return where


# The options of `bench` and `tune` on where cells run, and with what.
WHERE_OPTIONS = (
    *options_of(Where),
    *options_of(Machine, "data_dir", "cache_dir", "download", "memory_gb", "accelerator"),
)


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

    if where.on == "ray":
        from solodg.bench.ray import CellResources, run_on_ray

        tally = run_on_ray(
            cells,
            machine,
            output,
            CellResources(
                where.ray_cpus_per_cell or 1,
                where.ray_gpus_per_cell,
                where.ray_memory_gb_per_cell,
            ),
            address=where.ray_address,
            workers=where.ray_workers,
            progress=progress,
            say=say,
        )
    else:
        tally = run_serially(cells, machine, output, progress=progress, say=say)
    say(f"{tally.ran} cells run, {tally.failed} failed, in {format_seconds(tally.seconds)}.")
    return tally.failed
