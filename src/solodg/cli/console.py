"""Where commands write: results to stdout, everything else to stderr.

Markup is off, since names of files and classes may contain square brackets.
"""

import sys
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from solodg.progress import Progress, Say

# A table that goes into a file or a pipe is not folded to the width of a terminal.
width = None if sys.stdout.isatty() else 1000
out = Console(highlight=False, markup=False, soft_wrap=True, width=width)
err = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def shown(quiet: bool) -> "tuple[Progress, Say]":
    """Returns what shows progress and messages of a command; with `--quiet` they show nothing."""
    from solodg.progress import BarProgress, NoProgress

    if quiet:
        return NoProgress(), lambda text: None
    return BarProgress(err), err.print
