"""`solodg study`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from solodg.cli.console import out, shown
from solodg.cli.options import MovedDataDir, Quiet


def study(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Runs of solo_plus or solo, e.g. of some seeds: folders or hf:// names."
        ),
    ],
    images: Annotated[
        int | None,
        typer.Option(
            min=2, help="Images of each unseen domain, drawn at random.  [dim]default: all[/dim]"
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            help="Where the picture goes.  [dim]default: study.png in the first run[/dim]"
        ),
    ] = None,
    data_dir: MovedDataDir = None,
    seed: Annotated[int, typer.Option(help="Seed of the images drawn at random.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Test whether the gain comes from the single image: give it the style or pose of another.

    The study replaces the style of each test image, its pose and its statistics (image norm) in
    turn, as far as the model uses them. They then come from another image of its domain,
    from an image of another domain, or from no image: the mean of the sources, no correction at
    all, or the classifier of the prior. Accuracies are those of the mean classifier, without
    sampling; of several runs, their mean with the 95% interval.
    """
    progress, say = shown(quiet)
    with progress.stage("Loading PyTorch"):
        from solodg.explain.study_table import RunAccuracies, means_by_donor, study_table
        from solodg.explain.swap_study import study_run
        from solodg.figures.plots import study_figure
        from solodg.hub.download import local_run
        from solodg.runs.folder import moved_machine, read_config
        from solodg.storage import write_atomically

    by_part: dict[str, list[RunAccuracies]] = {}
    folders = [local_run(run) for run in runs]
    for run in folders:
        machine = moved_machine(run, data_dir)
        found = study_run(run, machine, progress, seed=seed, images=images, say=say)
        write_atomically(run / "study.json", json.dumps(found, indent=2, allow_nan=False).encode())
        for part, accuracies in found.items():
            by_part.setdefault(part, []).append(RunAccuracies(read_config(run).seed, accuracies))
    for part, results in by_part.items():
        out.print(study_table(part, results))
    path = figure or folders[0] / "study.png"
    panels = {f"whose {part}?": means_by_donor(results) for part, results in by_part.items()}
    points = {
        title: [(donor, value.mean, value.half or 0.0) for donor, value in means.items()]
        for title, means in panels.items()
    }
    study_figure(points, path)
    out.print(f"Picture: {path}; numbers: study.json in each run.")
