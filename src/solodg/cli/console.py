"""Where commands write: answers to stdout, everything else to stderr."""

import sys

from rich.console import Console

# A table that goes into a file or a pipe is not folded to the width of a terminal.
out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 1000)
err = Console(stderr=True, highlight=False, soft_wrap=True)
