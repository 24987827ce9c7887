"""`solodg demo`."""

from pathlib import Path
from typing import Annotated

import typer

from solodg.cli.console import out, shown
from solodg.cli.options import Quiet


def demo(
    output: Annotated[Path, typer.Option(help="Folder for runs, picture and page.")] = Path(
        "runs/demo"
    ),
    steps: Annotated[int, typer.Option(help="Training steps of each method.", min=1)] = 200,
    seed: Annotated[int, typer.Option(help="Another seed gives other numbers.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Train ERM and two single-sample methods on real rotated digits, and compare them.

    The result is a table, a picture and a page.
    """
    progress, say = shown(quiet)
    with progress.stage("Loading PyTorch"):
        from solodg.demo import run_demo

    run_demo(output, steps=steps, seed=seed, out=out, progress=progress, say=say)
