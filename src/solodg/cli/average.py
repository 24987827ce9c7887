"""`solodg average`."""

from pathlib import Path
from typing import Annotated

import typer

from solodg.cli.console import out, shown
from solodg.cli.options import MovedDataDir, Quiet


def average(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs, two or more.")],
    output: Annotated[Path, typer.Option(help="Folder of the new run.")],
    greedy: Annotated[
        bool,
        typer.Option(
            "--greedy",
            help="Begin with the best run by source validation; add each other one, best first, "
            "if the mean with it validates no worse.",
        ),
    ] = False,
    data_dir: MovedDataDir = None,
    accelerator: Annotated[
        str, typer.Option(help="Kind of device: cpu, cuda, mps, auto.")
    ] = "auto",
    quiet: Quiet = False,
) -> None:
    """Average the weights of finished runs into one model (DiWA).

    The runs must have the same method, backbone, classes, targets, source images and initial
    weights; they may differ in learning rates and other settings of training. Class centres are
    computed anew, on source images. The new folder is a run: evaluate, predict, export and serve
    it. Its model card and its records name the runs.
    """
    progress, say = shown(quiet)
    with progress.stage("Loading PyTorch"):
        from solodg.runs.average import average_runs
        from solodg.runs.checkpoint import selected_steps, selection
        from solodg.runs.folder import moved_machine

    made = average_runs(
        runs,
        output,
        greedy=greedy,
        machine=moved_machine(runs[0], data_dir),
        accelerator=accelerator,
        progress=progress,
        say=say,
    )
    for title, members in (("Averaged", made.runs), ("Left out", made.left_out)):
        for member in members:
            out.print(f"{title}: {member}", markup=False, soft_wrap=True)
    chosen = selection(output)
    accuracy = 100 * chosen["validation"]["accuracy"]
    out.print(f"Model: {output}, {selected_steps(chosen)}; source validation {accuracy:.1f}%")
    say(f"Next: solodg evaluate {output}")
