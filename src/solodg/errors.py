"""What goes wrong through the user's input: one clear line, exit code 2, no traceback."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """The message says what came, what is allowed and what to try."""


def unknown(kind: str, name: str, known: Iterable[str], hint: str = "") -> UserError:
    """An error for a name that is not in ``known``, with the nearest ones that are."""
    options = sorted(known)
    folded = {option.lower(): option for option in options}
    near = [folded[n] for n in get_close_matches(name.lower(), folded, n=3, cutoff=0.5)]
    if near:
        suggestion = f"Did you mean {' or '.join(repr(n) for n in near)}?"
    elif len(options) <= 30:
        suggestion = f"Known: {', '.join(options)}."
    else:
        suggestion = f"There are {len(options)} known ones."
    return UserError(f"unknown {kind} {name!r}. {suggestion}{' ' + hint if hint else ''}")


def missing_extra(extra: str, what: str, error: ModuleNotFoundError) -> UserError:
    """Returns the error for an optional package that is missing, with the command to install it."""
    return UserError(
        f"{what} is not installed ({error.name} is missing). Try: pip install 'solodg[{extra}]'"
    )
