"""Where commands write: results to stdout, everything else to stderr.

Markup is off, since names of files and classes may contain square brackets.
"""

import sys

from rich.console import Console

# A table that goes into a file or a pipe is not folded to the width of a terminal.
width = None if sys.stdout.isatty() else 1000
out = Console(highlight=False, markup=False, soft_wrap=True, width=width)
err = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
