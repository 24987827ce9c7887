"""The folder of a run: which files it holds, and whose it is."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError

from solodg.runs.config import Machine, RunConfig, portable
from solodg.errors import UserError
from solodg.storage import read_json, write_json

CONFIG, MACHINE, VERSIONS = "config.json", "machine.json", "versions.json"
SOURCE, FINISHED, RESULTS = "source.json", "finished.json", "results.jsonl"
REPORT = "report.html"
Settings = TypeVar("Settings", bound=BaseModel)
_PACKAGES = ("solodg", "torch", "torchvision", "timm", "lightning-fabric", "numpy", "pillow")


def is_finished(folder: Path, config: RunConfig, *, resume: bool) -> bool:
    """Whether the run is done already; an error if the folder holds something else."""
    if not (folder / CONFIG).is_file():
        return False
    if not resume:
        raise UserError(
            f"{folder} holds a run already. Continue it with --resume, or choose another folder "
            "with --output."
        )
    before, now = portable(read_config(folder)), portable(config)  # files may have moved
    for name, here in now.items():
        there = before[name]
        if there != here:
            raise UserError(
                f"{folder} holds a run with another configuration ({name} is {there!r} there, "
                f"{here!r} here). Repeat its command to resume it, or choose another folder with "
                "--output."
            )
    return (folder / FINISHED).is_file()


def read_config(folder: Path) -> RunConfig:
    return _read(folder / CONFIG, RunConfig)


def read_machine(folder: Path) -> Machine:
    return _read(folder / MACHINE, Machine)


def moved_machine(folder: Path, data_dir: Path | None) -> Machine | None:
    """Where the run happened, but for data that has moved; None: nothing has."""
    if data_dir is None or not (folder / MACHINE).is_file():
        return None
    return read_machine(folder).model_copy(update={"data_dir": data_dir})


def _read(path: Path, kind: type[Settings]) -> Settings:
    try:
        return kind.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"{path} does not fit this version of solodg: {where}: {first['msg'].lower()}."
        ) from error


def claim(folder: Path, config: RunConfig, machine: Machine, fingerprint: str) -> None:
    """Write what the run is. From now on the folder is this run's."""
    write_json(folder / VERSIONS, versions())
    write_json(folder / SOURCE, {"fingerprint": fingerprint})
    write_json(folder / MACHINE, machine.model_dump(mode="json"))
    write_json(folder / CONFIG, config.model_dump(mode="json"))


def versions() -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return found | {"python": platform.python_version()}


def machine_kind(device: torch.device) -> dict[str, Any]:
    """What a number may depend on besides the versions; no name of a machine."""
    on_gpu = device.type == "cuda"
    return {
        "kind": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
    }
