"""`solodg cache`."""

from pathlib import Path
from typing import Annotated

import typer

from solodg.cli.console import out, shown
from solodg.cli.options import Quiet
from solodg.errors import unknown_name
from solodg.runs.cache_folder import FEATURES, MAPS, clear, default_cache_dir, holding

_ALL = "all"


def cache(
    delete: Annotated[
        str | None,
        typer.Option(
            "--clear",
            help="Delete maps, features or all. Runs keep their models; what a run needs again is "
            "computed again.",
            metavar="WHAT",
        ),
    ] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(help="The cache folder.  [dim]default: ~/.cache/solodg[/dim]"),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Show how much disk stored features and maps take, or delete them.

    Features are stored by --freeze-backbone, maps by --stored-views.
    """
    folder = cache_dir or default_cache_dir()
    if delete is not None and delete not in (MAPS, FEATURES, _ALL):
        raise unknown_name("--clear", delete, [MAPS, FEATURES, _ALL])
    progress, _ = shown(quiet)
    for name in (FEATURES, MAPS):
        deleted = delete in (name, _ALL)
        with progress.stage(f"Deleting {name}" if deleted else f"Counting {name}"):
            held = clear(folder, name) if deleted else holding(folder, name)
        end = ", deleted" if deleted else ""
        out.print(f"{name}: {held.files} files, {held.gigabytes:.2f} GB in {folder / name}{end}")
