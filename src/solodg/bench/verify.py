"""A record repeated: the same run again, in a folder of its own, to compare."""

import tempfile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from solodg.data import DATASETS
from solodg.errors import UserError
from solodg.progress import Progress
from solodg.runs.config import SAYS_NO, Machine, RunConfig
from solodg.runs.evaluate import evaluate_run
from solodg.runs.stream import Stream
from solodg.runs.train import train_run
from solodg.types import Record


def read_record(where: str) -> Record:
    """FILE, its first record; or FILE:LINE, the record on that line, counted from 1."""
    name, _, line = where.rpartition(":")
    if not (name and line.isdigit()):
        name, line = where, ""
    path = Path(name)
    if not path.is_file():
        raise UserError(f"no file of records at {path}.")
    lines = path.read_text().splitlines()
    if line and not 1 <= int(line) <= len(lines):
        raise UserError(f"{path} has {len(lines)} lines, and no line {line}.")
    for text in [lines[int(line) - 1]] if line else lines:
        try:
            return Record.model_validate_json(text)
        except ValidationError:
            continue  # a failure, or a line cut off by a crash
    place = f"line {line} of {path}" if line else str(path)
    raise UserError(f"{place} holds no record of this version of solodg.")


def recorded(record: Record) -> dict[str, Any]:
    """The run's configuration. What it went without, no recipe of today may add."""
    return SAYS_NO | {name: value for name, value in record.config.items() if value is not None}


def repeat(
    record: Record,
    machine: Machine,
    progress: Progress,
    *,
    weights: Path | None,
    dataset: str | None,
) -> Record:
    """Train and score again; the record of the same domain."""
    values = recorded(record)
    if values.get("weights"):
        if weights is None or weights.name != values["weights"]:
            raise UserError(f"the record was made with {values['weights']}: --weights FILE.")
        values["weights"] = str(weights)
    if dataset is not None:
        values["dataset"] = dataset
    elif values["dataset"] not in DATASETS:
        raise UserError(f"the record is of own images, {values['dataset']!r}: --dataset PATH.")
    try:
        config = RunConfig(**values)
    except ValidationError as error:
        raise UserError(f"the record's config does not fit this version: {error}") from error
    with tempfile.TemporaryDirectory() as scratch:
        folder = train_run(config, machine, Path(scratch) / "run", progress=progress)
        records = evaluate_run(
            folder,
            machine,
            adapter=record.adapter,
            stream=Stream(**record.stream) if "batch_size" in record.stream else None,
            accelerator=machine.accelerator,
            progress=progress,
        )
    for repeated in records:
        if (repeated.domain, repeated.role) == (record.domain, record.role):
            return repeated
    raise UserError(f"the run gives no score of {record.domain!r} now: is the data another?")
