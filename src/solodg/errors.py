"""Errors that the user's input causes. The command line shows them as one line, exit code 2."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


_MOST_REASONS = 5  # that one line shows


class UserError(Exception):
    """An error whose message says what was given, what is allowed and what to try."""


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str = "") -> UserError:
    """Returns the error for a name that is not in `known`, with the nearest names that are."""
    options = sorted(known)
    lower_case = {option.lower(): option for option in options}
    near = [lower_case[n] for n in get_close_matches(name.lower(), lower_case, n=3, cutoff=0.5)]
    if near:
        suggestion = f"Did you mean {' or '.join(repr(n) for n in near)}?"
    elif len(options) <= 30:
        suggestion = f"Choose from: {', '.join(options)}."
    else:
        suggestion = f"There are {len(options)} to choose from."
    return UserError(f"unknown {kind} {name!r}. {suggestion}{' ' + hint if hint else ''}")


def validation_error(what: str, error: "ValidationError", *, fields: bool = True) -> UserError:
    """Returns a failed validation as one line: `what: field: reason; field: reason.`

    With `fields=False`, `what` names the value already: the line is `what: reason.`
    """
    details = error.errors()
    if not fields:
        return UserError(f"{what}: {details[0]['msg'].lower()}.")
    reasons = [
        ": ".join([".".join(str(part) for part in d["loc"]), d["msg"].lower()]).removeprefix(": ")
        for d in details[:_MOST_REASONS]
    ]
    if len(details) > len(reasons):
        reasons.append(f"and {len(details) - len(reasons)} more")
    return UserError(f"{what}: {'; '.join(reasons)}.")


def missing_extra(extra: str, what: str, error: ModuleNotFoundError) -> UserError:
    """Returns the error for an optional package that is missing, with the command to install it."""
    return UserError(
        f"{what} is not installed ({error.name} is missing). Try: pip install 'solodg[{extra}]'"
    )
