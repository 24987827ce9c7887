"""Options of the command line, derived from the fields of a configuration.

`solodg.runs.config` declares every option once: its type, its default and its help text.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from solodg.errors import validation_error

Command = Callable[..., None]
Model = TypeVar("Model", bound=BaseModel)


def options_of(model: type[BaseModel], *names: str) -> list[inspect.Parameter]:
    """Returns the named fields of a model as parameters of a command; all, if none is named.

    A field without help text is not an option.
    """
    fields = model.model_fields
    chosen = names or [name for name, field in fields.items() if field.description]
    return [_parameter(name, fields[name]) for name in chosen]


def with_options(
    *options: inspect.Parameter, after: Mapping[str, str] | None = None
) -> Callable[[Command], Command]:
    """Gives a command further options, which reach it as its keyword arguments.

    They follow the command's own parameters. `after` moves some of these behind an option: it maps
    the name of the option to the name of the parameter.
    """
    moved = after or {}

    def decorate(command: Command) -> Command:
        own = {
            name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        parameters = [p for name, p in own.items() if name not in moved.values()]
        for option in options:
            parameters.append(option)
            if option.name in moved:
                parameters.append(own[moved[option.name]])
        command.__dict__["__signature__"] = inspect.Signature(parameters)  # which typer reads
        return command

    return decorate


def validated(model: type[Model], values: Mapping[str, Any]) -> Model:
    """Builds a model from the options that were given; the rest take their defaults.

    Values of other models are left out. The error for a wrong value names its option.
    """
    fields = model.model_fields
    given = {k: v for k, v in values.items() if k in fields and v is not None and v != []}
    try:
        return model(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        what = f"{_flag(name, fields[name])} {first['input']!r}"
        raise validation_error(what, error, fields=False) from error


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    kind, keyword = _value_type(field.annotation), inspect.Parameter.KEYWORD_ONLY
    if field.is_required():
        required = Annotated[kind, typer.Argument(help=field.description)]  # type: ignore[valid-type]
        return inspect.Parameter(name, keyword, annotation=required)
    option = typer.Option(
        _flag(name, field), help=_help(field), metavar=_extra(field).get("metavar")
    )
    # None marks an option that was not given. It must differ from an option given with the value
    # of the default: a preset overrides defaults, and given options override the preset.
    optional = Annotated[kind | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, keyword, default=None, annotation=optional)


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def _flag(name: str, field: FieldInfo) -> str:
    return _extra(field).get("flag") or f"--{name.replace('_', '-')}"


def _help(field: FieldInfo) -> str:
    """Returns the help text with the default; `shown_default` of the field goes first."""
    default = _extra(field).get("shown_default")
    if default is None and isinstance(field.default, str | int | float):
        default = None if isinstance(field.default, bool) else field.default
    return f"{field.description}" + ("" if default is None else f"  [dim]default: {default}[/dim]")


def _value_type(annotation: Any) -> Any:
    """Returns the type that the command line reads for a field; the model validates the rest."""
    if get_origin(annotation) in (Union, UnionType):
        members = [member for member in get_args(annotation) if member is not NoneType]
        return _value_type(members[0]) if len(members) == 1 else str
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value_type(arguments[0])
    if origin is Literal:
        return type(arguments[0])
    if origin is tuple and Ellipsis not in arguments:
        return annotation  # a fixed number of values
    if origin in (tuple, dict):
        return list[str]
    return annotation if annotation in (bool, int, float, Path) else str
