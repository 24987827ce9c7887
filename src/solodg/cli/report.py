"""`solodg report`."""

from pathlib import Path
from typing import Annotated

import typer

from solodg.cli.console import out, shown
from solodg.cli.options import RUN, MovedData, MovedDataDir, Quiet


def report(
    run: Annotated[str, typer.Argument(help=f"{RUN}; of any algorithm.")],
    output: Annotated[
        Path | None, typer.Option(help="The page.  [dim]default: RUN/report.html[/dim]")
    ] = None,
    images: Annotated[
        int | None,
        typer.Option(
            help="Images of each domain, drawn at random.  [dim]default: all[/dim]", min=1
        ),
    ] = None,
    data_dir: MovedDataDir = None,
    dataset: MovedData = None,
    quiet: Quiet = False,
) -> None:
    """Write one HTML page on a run: curves, tables, calibration, and images before and after.

    The page needs no network and no other file: send it, open it anywhere.
    """
    progress, say = shown(quiet)
    with progress.stage("Loading PyTorch"):
        from solodg.hub.download import local_run
        from solodg.report.run_page import write_report
        from solodg.runs.folder import moved_machine

    folder = local_run(run)
    path = write_report(
        folder,
        moved_machine(folder, data_dir),
        output=output,
        dataset=dataset,
        images=images,
        progress=progress,
        say=say,
    )
    out.print(f"Report: {path} ({path.stat().st_size / 1e6:.1f} MB)")
