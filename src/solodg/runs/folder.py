"""The folder of a run: the names of its files, and its configuration."""

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from solodg.data import DATASETS, IN_MEMORY
from solodg.errors import UserError
from solodg.runs.config import Machine, ResolvedConfig, RunConfig
from solodg.runs.origin import Origin
from solodg.runs.stored_arguments import complete_arguments, current_name
from solodg.storage import read_json, try_lock, write_json

CONFIG, MACHINE, VERSIONS = "config.json", "machine.json", "versions.json"
SOURCE, FINISHED, RESULTS = "source.json", "finished.json", "results.jsonl"
EVIDENCE = "evidence.json"  # of the adaptation, where held-out domains decided about it
REPORT = "report.html"
CARD = "README.md"
ESTIMATE = "estimate.json"  # of the scores on a new site, where each domain was left out in turn
TURNS = "estimate"  # folder of the runs that each leave one domain out
LOCK = "train.lock"  # while a process trains in the folder
# Of x86, then of ARM.
_INSTRUCTIONS = ("fma", "avx2", "avx512f", "avx512_vnni", "amx_tile", "asimd", "sve", "sve2")
# A training that goes on with another version of one of these would be a mixture of two.
_NUMERICAL = ("solodg", "torch", "torchvision", "timm", "numpy", "pillow")


def is_finished(folder: Path, config: ResolvedConfig, *, resume: bool) -> bool:
    """Returns whether the run in the folder is finished already.

    Raises `UserError` if the folder holds a run and `resume` is false, or if that run has another
    configuration.
    """
    if not (folder / CONFIG).is_file():
        return False
    if not resume:
        raise UserError(
            f"{folder} holds a run already. Continue it with --resume, or choose another folder "
            "with --output."
        )
    # Files may have moved since; their names may not have changed.
    before, now = (portable(absolute_config(c)) for c in (read_config(folder), config))
    for name, here in now.items():
        there = before[name]
        if there != here:
            raise UserError(
                f"{folder} holds a run with another configuration ({name} is {there!r} there, "
                f"{here!r} here). Repeat its command to resume it, or choose another folder with "
                "--output."
            )
    return (folder / FINISHED).is_file()


@contextmanager
def training_lock(folder: Path) -> Iterator[None]:
    """Keeps other processes from training in the folder; raises `UserError` if one does already.

    It leaves no file, and no folder that was not there before and is empty in the end.
    """
    existed = folder.is_dir()
    try:
        with try_lock(folder / LOCK, remove=True) as locked:
            if not locked:
                raise UserError(
                    f"another process trains in {folder}. Wait for its end, or choose another "
                    "folder with --output."
                )
            yield
    finally:
        if not existed:
            with suppress(OSError):
                folder.rmdir()


def read_config(folder: Path) -> ResolvedConfig:
    """Reads the configuration of the run in `folder`."""
    config = read_json(folder / CONFIG, ResolvedConfig)
    algorithm = current_name(config.algorithm, before_pose="pose" not in config.model_fields_set)
    arguments = complete_arguments(algorithm, config.arguments, config.variant)
    return config.model_copy(update={"algorithm": algorithm, "arguments": arguments})


def read_machine(folder: Path) -> Machine:
    """Reads the machine settings with which the run in `folder` was trained."""
    return read_json(folder / MACHINE, Machine)


class _Finished(BaseModel):
    seconds: float


def read_origin(folder: Path) -> Origin:
    """Reads what the run in `folder` was trained from: source images and initial weights."""
    return read_json(folder / SOURCE, Origin)


def read_versions(folder: Path) -> dict[str, str]:
    """Reads the versions of the packages with which the run in `folder` was trained."""
    return read_json(folder / VERSIONS, dict[str, str])


def read_evidence(folder: Path) -> dict[str, Any]:
    """Reads what held-out source domains decided about the run; empty where nothing was open."""
    path = folder / EVIDENCE
    return read_json(path, dict[str, Any]) if path.is_file() else {}


def check_no_turns(folder: Path) -> None:
    """Raises `UserError` if the run in the folder was begun with `--estimate`."""
    if (folder / TURNS).is_dir():
        raise UserError(
            f"{folder} holds a run that leaves each domain out in turn first. Repeat its command, "
            "with --estimate, to resume it, or choose another folder with --output."
        )


def read_seconds(path: Path) -> float:
    """Reads how many seconds a run took, from its file of this number."""
    return read_json(path, _Finished).seconds


def moved_machine(folder: Path, data_dir: Path | None) -> Machine | None:
    """Returns the machine of the run with `data_dir` as its data folder.

    Returns None where `data_dir` is None, or where the folder has no machine settings.
    """
    if data_dir is None or not (folder / MACHINE).is_file():
        return None
    return read_machine(folder).model_copy(update={"data_dir": data_dir})


def check_unchanged(folder: Path, origin: Origin) -> None:
    """Raises `UserError` if the run in the folder began with other data, weights or versions.

    A folder without a run passes.
    """
    if not (folder / CONFIG).is_file():
        return
    differences = read_origin(folder).differences(origin)
    before, now = read_versions(folder), versions()
    differences += [
        f"{name} was {before[name]} and is {now[name]}"
        for name in _NUMERICAL
        if before.get(name, now[name]) != now[name]
    ]
    if differences:
        raise UserError(
            f"{folder} holds a run that began with something else: {'; '.join(differences)}. "
            "Restore that to resume it. To train from the start, remove the folder or choose "
            "another with --output."
        )


def claim(folder: Path, config: ResolvedConfig, machine: Machine, origin: Origin) -> None:
    """Writes the configuration of the run. From now on the folder belongs to this run."""
    write_json(folder / VERSIONS, versions())
    write_json(folder / SOURCE, origin.model_dump())
    write_json(folder / MACHINE, absolute_machine(machine).model_dump(mode="json"))
    write_json(folder / CONFIG, absolute_config(config).model_dump(mode="json"))


def portable(config: RunConfig) -> dict[str, Any]:
    """Returns the configuration as JSON values, with names of files in place of their paths."""
    values = config.model_dump(mode="json")
    for name in ("dataset", "weights"):
        values[name] = Path(values[name]).name if values[name] else values[name]
    return values


def absolute_config(config: ResolvedConfig) -> ResolvedConfig:
    """Returns the configuration with paths that mean the same in any working folder.

    Links are kept, since a run is known by the names that were given.
    """
    values: dict[str, Any] = {}
    if config.weights:
        values["weights"] = os.path.abspath(config.weights)
    if config.dataset not in DATASETS and not config.dataset.startswith(IN_MEMORY):
        values["dataset"] = os.path.abspath(config.dataset)
    return config.model_copy(update=values)


def absolute_machine(machine: Machine) -> Machine:
    """Returns the machine settings with paths that mean the same in any working folder."""
    paths = {
        name: Path(os.path.abspath(path))
        for name in ("data_dir", "cache_dir")
        if (path := getattr(machine, name)) is not None
    }
    return machine.model_copy(update=paths)


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a result depends on."""
    names = (*_NUMERICAL, "lightning-fabric")
    found = {name: importlib.metadata.version(name) for name in names}
    return found | {"python": platform.python_version()}


def machine_kind(device: torch.device) -> dict[str, Any]:
    """Returns the facts about this machine that a number may depend on, but never its name."""
    on_gpu = device.type == "cuda"
    return {
        "kind": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "capability": torch.backends.cpu.get_cpu_capability(),  # what torch's kernels use
        "instructions": _instructions(),  # what MKL and oneDNN choose theirs by
    }


def _instructions() -> str:
    """Returns which instruction sets for sums and products the processor has, where Linux says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    flags = next((x for x in lines if x.startswith(("flags", "Features"))), "").split()
    return " ".join(name for name in _INSTRUCTIONS if name in flags) or "unknown"
