"""The folder of a run: the names of its files, and its configuration."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from solodg.errors import UserError
from solodg.runs.config import Machine, ResolvedConfig, portable
from solodg.storage import read_json, write_json

CONFIG, MACHINE, VERSIONS = "config.json", "machine.json", "versions.json"
SOURCE, FINISHED, RESULTS = "source.json", "finished.json", "results.jsonl"
REPORT = "report.html"
_PACKAGES = ("solodg", "torch", "torchvision", "timm", "lightning-fabric", "numpy", "pillow")


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


def read_config(folder: Path) -> ResolvedConfig:
    """Reads the configuration of the run in `folder`."""
    return read_json(folder / CONFIG, ResolvedConfig)


def read_machine(folder: Path) -> Machine:
    """Reads the machine settings with which the run in `folder` was trained."""
    return read_json(folder / MACHINE, Machine)


class _Source(BaseModel):
    fingerprint: str


class _Finished(BaseModel):
    seconds: float


def read_fingerprint(folder: Path) -> str:
    """Reads the fingerprint of the source images that the run in `folder` was trained on."""
    return read_json(folder / SOURCE, _Source).fingerprint


def read_versions(folder: Path) -> dict[str, str]:
    """Reads the versions of the packages with which the run in `folder` was trained."""
    return read_json(folder / VERSIONS, dict[str, str])


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


def claim(folder: Path, config: ResolvedConfig, machine: Machine, fingerprint: str) -> None:
    """Writes the configuration of the run. From now on the folder belongs to this run.

    `fingerprint` is that of the source images.
    """
    write_json(folder / VERSIONS, versions())
    write_json(folder / SOURCE, {"fingerprint": fingerprint})
    write_json(folder / MACHINE, machine.model_dump(mode="json"))
    write_json(folder / CONFIG, config.model_dump(mode="json"))


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a result depends on."""
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return found | {"python": platform.python_version()}


def machine_kind(device: torch.device) -> dict[str, Any]:
    """Returns the facts about this machine that a number may depend on, but never its name."""
    on_gpu = device.type == "cuda"
    return {
        "kind": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
    }
