"""Declares a setting that is both a field of a configuration and an option of the command line."""

from typing import Any

from pydantic import Field


def option(
    default: Any,
    help_text: str,
    *,
    flag: str | None = None,
    shown_default: str | None = None,
    metavar: str | None = None,
    **limits: Any,
) -> Any:
    """Declares a field that is also an option of the command line.

    `flag` is the option's name, if it is not that of the field. `shown_default` describes in words
    what happens if the option is not given. `metavar` names the kind of value, if the type of the
    field does not. `limits` are those of pydantic's `Field`: gt, ge, lt, le.
    """
    extra: dict[str, Any] = {"flag": flag, "shown_default": shown_default, "metavar": metavar}
    return Field(default=default, description=help_text, json_schema_extra=extra, **limits)
