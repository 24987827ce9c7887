"""Repeats the run of a record in a temporary folder, so that both can be compared."""

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from solodg.algorithms import ALGORITHMS
from solodg.data import DATASETS
from solodg.errors import UserError, validation_error
from solodg.progress import Progress
from solodg.runs.config import OFF_VALUES, Machine, RunConfig
from solodg.runs.defaults import OF_STEPS
from solodg.runs.evaluate import evaluate_run
from solodg.runs.stored_arguments import complete_adapter_arguments, complete_config
from solodg.runs.stream import Stream
from solodg.runs.train import train_run
from solodg.storage import parse_line, raw_lines, read_lines
from solodg.types import Record


def read_record(where: str) -> Record:
    """Reads one record: `FILE` is the first one, `FILE:LINE` that on a line, counted from 1."""
    path, line = _place(where)
    if not path.is_file():
        raise UserError(f"no file of records at {path}: give FILE or FILE:LINE.")
    lines = raw_lines(path)
    if line and not 1 <= int(line) <= len(lines):
        raise UserError(f"{path} has {len(lines)} lines, and no line {line}.")
    for text in [lines[int(line) - 1]] if line else lines:
        with suppress(ValidationError):  # a failure, or a line cut off by a crash
            return Record.model_validate(parse_line(text))
    place = f"line {line} of {path}" if line else str(path)
    raise UserError(f"{place} holds no undamaged record that this version of solodg can read.")


def _place(where: str) -> tuple[Path, str]:
    """Splits `FILE:LINE` or `FILE` into the file and the line, which may be empty."""
    name, _, line = where.rpartition(":")
    return (Path(name), line) if name and line.isdecimal() else (Path(where), "")


def records_beside(where: str) -> list[Record]:
    """Reads all records of the file that `where` names, as `read_record` reads one of them."""
    records = []
    for line in read_lines(_place(where)[0]):
        with suppress(ValidationError, UserError):  # a failure, or a line of another version
            record = Record.model_validate(line)
            recorded_config(record)
            records.append(record)
    return records


def recorded_config(record: Record) -> dict[str, Any]:
    """Returns the configuration of the record's run.

    Settings that the run did not have are turned off, so that a newer recipe does not add them;
    arguments that an old record does not name have the defaults of its time. A classifier in closed
    form has no settings of training by steps.
    """
    complete = complete_config(record.config)
    values = OFF_VALUES | {name: value for name, value in complete.items() if value is not None}
    kind = ALGORITHMS.get(values["algorithm"])
    if kind is not None and kind.is_closed_form(values["arguments"]):
        return {name: value for name, value in values.items() if name not in OF_STEPS}
    return values


def recorded_stream(record: Record) -> Stream | None:
    """Returns the stream of test images that a record was scored on; None: each image alone.

    Arguments that an old record does not name have the defaults of its time.
    """
    if "batch_size" not in record.stream:
        return None
    stream = Stream(**record.stream)
    arguments = complete_adapter_arguments(record.adapter, stream.arguments)
    return stream.model_copy(update={"arguments": arguments})


def repeat(
    record: Record,
    machine: Machine,
    progress: Progress,
    *,
    weights: Path | None,
    dataset: str | None,
) -> Record:
    """Trains and scores the run of a record again, and returns the new record of its domain."""
    if record.averaged:
        raise UserError(
            "the record is of a mean of several runs, which one training does not repeat. Repeat "
            "the runs that it names, and average them with solodg average."
        )
    values = recorded_config(record)
    if values.get("weights"):
        if weights is None or weights.name != values["weights"]:
            raise UserError(
                f"the record was made with {values['weights']}: give its path with --weights FILE."
            )
        values["weights"] = str(weights)
    if dataset is not None:
        values["dataset"] = dataset
    elif values.get("dataset") not in DATASETS:
        raise UserError(
            f"the record is of own images, {values.get('dataset')!r}: give their path with "
            "--dataset."
        )
    try:
        config = RunConfig(**values)
        stream = recorded_stream(record)
    except ValidationError as error:
        raise validation_error("the record does not fit this version", error) from error
    with tempfile.TemporaryDirectory() as scratch:
        folder = train_run(config, machine, Path(scratch) / "run", progress=progress)
        records = evaluate_run(
            folder,
            machine,
            adapter=record.adapter,
            stream=stream,
            accelerator=machine.accelerator,
            progress=progress,
        )
    for repeated in records:
        if (repeated.domain, repeated.role) == (record.domain, record.role):
            return repeated
    raise UserError(f"the repeated run has no score of {record.domain!r}: has the data changed?")
