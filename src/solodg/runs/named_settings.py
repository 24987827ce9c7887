"""The settings of a run from options that a Python program gives by name."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from solodg.errors import UserError, unknown_name, validation_error
from solodg.runs.config import Machine, RunConfig


def named_settings(
    dataset: str, targets: Sequence[str], options: Mapping[str, Any], *, taken: Collection[str] = ()
) -> tuple[RunConfig, Machine]:
    """Returns the configuration of a run and of the machine; an option of None is not given.

    Raises `UserError` for an unknown option, with the nearest names, also of those `taken` by
    arguments that are no options.
    """
    of_run, of_machine = _option_names(RunConfig), _option_names(Machine)
    known = (of_run | of_machine) - {"dataset", "targets"}
    for name in options:
        if name not in known:
            raise unknown_name("option", name, known.union(taken))
    given = {name: value for name, value in options.items() if value is not None}
    run: dict[str, Any] = {"dataset": dataset, "targets": tuple(targets)}
    run |= {name: value for name, value in given.items() if name in of_run}
    try:
        return RunConfig(**run), Machine(**{k: v for k, v in given.items() if k in of_machine})
    except ValidationError as error:
        raise validation_error("wrong option", error) from error


def checked_name(name: str) -> str:
    """Returns the name of data in memory; raises `UserError` if it is empty or has a slash."""
    if not name or Path(name).name != name:
        raise UserError(f"name={name!r}: the name of data in memory is not empty and has no slash.")
    return name


def as_domains(target: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the domains to leave out that a program gives as one name, as several, or as None."""
    if target is None:
        return ()
    return tuple(map(str, target)) if isinstance(target, list | tuple) else (str(target),)


def _option_names(model: type[BaseModel]) -> set[str]:
    """Returns the fields that are options; those without help text are not."""
    return {name for name, field in model.model_fields.items() if field.description}
