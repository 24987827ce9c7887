"""`solodg study`."""

from pathlib import Path
from typing import Annotated

import typer

from solodg.cli.console import err, out
from solodg.cli.options import MovedDataDir


def study(
    run: Annotated[Path, typer.Argument(help="The folder of a run of solo or solo_plus.")],
    data_dir: MovedDataDir = None,
    seed: Annotated[int, typer.Option(help="Of the styles drawn at random.")] = 0,
) -> None:
    """Is it the single image? Accuracy with each image's own style, and with others'.

    own: the method. same domain: the style of another image of its domain. other domain: of an
    image of another one. mean: the mean style of the sources. prior: the classifier written from
    the source centres alone.
    """
    from rich.table import Table

    from solodg.progress import BarProgress
    from solodg.runfolder import moved_machine
    from solodg.storage import write_json
    from solodg.style_study import STYLES, style_study

    found = style_study(run, moved_machine(run, data_dir), BarProgress(err), seed=seed)
    table = Table(title=f"Whose style? Accuracy of {run.name} on unseen domains, %")
    for name in ("domain", *STYLES):
        table.add_column(name, justify="left" if name == "domain" else "right")
    for domain, accuracies in found.items():
        table.add_row(domain, *(f"{100 * accuracies[name]:.1f}" for name in STYLES))
    out.print(table)
    write_json(run / "style_study.json", found)
    out.print(f"Figures: {run / 'style_study.json'}")
