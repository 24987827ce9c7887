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
    the source centres alone. Where images write their frame, the same for frames; none: no frame.
    """
    from solodg.progress import BarProgress
    from solodg.runfolder import moved_machine
    from solodg.storage import write_json
    from solodg.style_study import FRAMES, STYLES, frame_study, style_study

    machine, progress = moved_machine(run, data_dir), BarProgress(err)
    found = style_study(run, machine, progress, seed=seed)
    _show(f"Whose style? Accuracy of {run.name} on unseen domains, %", STYLES, found)
    write_json(run / "style_study.json", found)
    written = [run / "style_study.json"]
    framed = frame_study(run, machine, progress, seed=seed)
    if framed is not None:
        _show(f"Whose frame? Accuracy of {run.name} on unseen domains, %", FRAMES, framed)
        write_json(run / "frame_study.json", framed)
        written.append(run / "frame_study.json")
    out.print(f"Figures: {', '.join(map(str, written))}")


def _show(title: str, kinds: tuple[str, ...], found: dict[str, dict[str, float]]) -> None:
    from rich.table import Table

    table = Table(title=title)
    for name in ("domain", *kinds):
        table.add_column(name, justify="left" if name == "domain" else "right")
    for domain, accuracies in found.items():
        table.add_row(domain, *(f"{100 * accuracies[name]:.1f}" for name in kinds))
    out.print(table)
