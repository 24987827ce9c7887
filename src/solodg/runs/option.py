"""Declares and reads settings that are fields of a configuration and command-line options."""

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


def pairs_of(value: Any) -> Any:
    """Reads a dictionary of texts that is given as texts NAME=VALUE; None stays None."""
    if value is None or isinstance(value, dict):
        return value
    pairs = [str(text).partition("=") for text in value]
    if not all(name and sign and text for name, sign, text in pairs):
        raise ValueError("expected NAME=VALUE, e.g. label=tumor")
    return {name: text for name, _, text in pairs}


def weight_average_of(value: Any) -> float | str | None:
    """Reads the decay of a moving average, or `swad`; raises `ValueError` for anything else."""
    if value is None or value == "swad":
        return None if value is None else "swad"
    try:
        decay = float(value)
    except (TypeError, ValueError):
        decay = -1.0
    if not 0 < decay < 1:
        raise ValueError("give a decay above 0 and below 1, e.g. 0.99, or swad")
    return decay


def ordered_window(window: tuple[float, float] | None) -> tuple[float, float] | None:
    """Returns the window; raises `ValueError` if its ends are not in order."""
    if window is not None and window[0] >= window[1]:
        raise ValueError("the first number must be below the second")
    return window
