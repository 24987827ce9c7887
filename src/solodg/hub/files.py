"""The files of a run that are pushed to the Hub, without paths of the machine that trained it."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from solodg.errors import UserError
from solodg.runs import checkpoint
from solodg.runs.folder import (
    CARD,
    CONFIG,
    ESTIMATE,
    EVIDENCE,
    FINISHED,
    MACHINE,
    RESULTS,
    SOURCE,
    VERSIONS,
    portable,
    read_config,
)
from solodg.runs.metrics_log import METRICS
from solodg.storage import read_json, read_lines, read_regular, write_json, write_lines

ONNX = "model.onnx"
_COPIED = (
    checkpoint.DESCRIPTION, checkpoint.WEIGHTS, SOURCE, VERSIONS, FINISHED, EVIDENCE, ESTIMATE,
    METRICS,
)  # fmt: skip
# All that is ever read from the Hub: JSON, safetensors, ONNX and the card. Nothing is executed.
KNOWN = (*_COPIED, CONFIG, MACHINE, RESULTS, CARD, ONNX)
LARGE = (ONNX,)  # not needed for a run: fetched by its own name


def stage(run: Path, folder: Path) -> None:
    """Copies to `folder` what is pushed of a run; the card and the ONNX file are written later.

    The configuration has names of files in place of their paths, and the machine its defaults.
    """
    if not (run / FINISHED).is_file():
        raise UserError(f"{run} is not finished: continue its training with --resume first.")
    for name in _COPIED:
        if (run / name).is_file():
            shutil.copyfile(run / name, folder / name)
    write_json(folder / CONFIG, portable(read_config(run)))
    write_json(folder / MACHINE, {})
    if (run / RESULTS).is_file():
        lines = read_lines(run / RESULTS)
        write_lines(folder / RESULTS, [_without_origin(line) for line in lines])


def check_private(run: Path, folder: Path) -> None:
    """Raises `UserError` if a staged file holds a path of this machine."""
    private = _private_paths(run)
    for file in sorted(folder.iterdir()):
        content = read_regular(file)
        for path in private:
            if os.fsencode(path) in content:
                raise UserError(
                    f"{file.name} holds the path {path}, which would be published. Nothing was "
                    "pushed: remove it from the run, or train with names that hold no path."
                )


def _private_paths(run: Path) -> list[str]:
    """Returns the folders of the user that a file of the run could name."""
    config = read_config(run)
    found = [Path.home(), Path.cwd(), run.resolve()]
    found += [Path(name).parent for name in (config.dataset, config.weights) if name]
    if (run / MACHINE).is_file():
        machine = read_json(run / MACHINE)
        found += [Path(machine[name]) for name in ("data_dir", "cache_dir") if machine.get(name)]
    # "/" and "/root" are in many texts; a path below them is one of the others.
    return sorted({str(path) for path in found if path.is_absolute() and len(path.parts) > 2})


def _without_origin(line: dict[str, Any]) -> dict[str, Any]:
    """Returns a record in which a path to the images is replaced by the name of the folder."""
    data = line.get("data")
    if not isinstance(data, dict):
        return line
    return {**line, "data": {name: _name_only(value) for name, value in data.items()}}


def _name_only(value: Any) -> Any:
    if isinstance(value, str) and os.path.isabs(value):
        return Path(value).name
    return value


def missing(names: Iterable[str]) -> list[str]:
    """Returns the files without which a repository holds no run of solodg."""
    found = set(names)
    return [n for n in (checkpoint.DESCRIPTION, checkpoint.WEIGHTS) if n not in found]
