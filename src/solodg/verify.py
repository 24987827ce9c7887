"""A record repeated: the same run again, in a folder of its own, to compare."""

import tempfile
from pathlib import Path

from pydantic import ValidationError

from solodg.config import Machine, RunConfig
from solodg.errors import UserError
from solodg.progress import Progress
from solodg.run import train_run
from solodg.score import evaluate_run
from solodg.storage import read_lines
from solodg.types import Record


def read_record(where: str) -> Record:
    """FILE, its first record; or FILE:LINE, counted from 1."""
    name, _, line = where.rpartition(":")
    if not (name and line.isdigit()):
        name, line = where, "1"
    path = Path(name)
    if not path.is_file():
        raise UserError(f"no file of records at {path}.")
    lines = [value for value in read_lines(path) if "failed" not in value]
    if not 1 <= int(line) <= len(lines):
        raise UserError(f"{path} has {len(lines)} records, and no record {line}.")
    try:
        return Record.model_validate(lines[int(line) - 1])
    except ValidationError as error:
        raise UserError(f"{path}: record {line} is not one of this version of solodg.") from error


def repeat(record: Record, machine: Machine, weights: Path | None, progress: Progress) -> Record:
    """Train and score again; the record of the same domain."""
    values = dict(record.config)
    if values.get("weights") and weights is not None:
        values["weights"] = str(weights)
    try:
        config = RunConfig(**values)
    except ValidationError as error:
        raise UserError(f"the record's config does not fit this version: {error}") from error
    with tempfile.TemporaryDirectory() as scratch:
        folder = train_run(config, machine, Path(scratch) / "run", progress=progress)
        records = evaluate_run(folder, machine, adapter=record.adapter, progress=progress)
    return next(r for r in records if (r.domain, r.role) == (record.domain, record.role))
