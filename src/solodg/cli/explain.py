"""`solodg explain`."""

from pathlib import Path
from typing import Annotated

import typer

from solodg.cli.console import out, shown
from solodg.cli.options import RUN, Accelerator, MovedData, MovedDataDir, Precision, Quiet
from solodg.errors import UserError


def explain(
    run: Annotated[str, typer.Argument(help=f"{RUN}; of any algorithm.")],
    images: Annotated[
        list[str], typer.Argument(help="Files, folders, or - for a list of files on stdin.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="Where figures go.  [dim]default: RUN/explain[/dim]")
    ] = None,
    data_dir: MovedDataDir = None,
    dataset: MovedData = None,
    accelerator: Accelerator = None,
    precision: Precision = None,
    quiet: Quiet = False,
) -> None:
    """Draw what the adaptation does to an image, as a figure (PNG and SVG).

    The figure shows the image, the source class centres and the classifier before and after the
    adaptation in one plane; how far each prototype moved; the probabilities, also of sampled
    classifiers; and the nearest source images. The plane is fitted on source training images the
    first time, and kept in the run.
    """
    from solodg.cli.devices import load_run
    from solodg.cli.predict import image_paths, raise_first
    from solodg.hub.download import local_run

    progress, say = shown(quiet)
    source = local_run(run)
    predictor = load_run(source, accelerator, precision, progress)
    from solodg.explain.explanation import explain as explain_image
    from solodg.explain.figure import explain_figure, headline
    from solodg.explain.projection import stored_projection
    from solodg.figures.style import png, svg
    from solodg.runs.folder import moved_machine
    from solodg.runs.predictions import NotFiniteError
    from solodg.storage import write_atomically

    paths = image_paths(images)
    projection = stored_projection(
        source,
        predictor,
        moved_machine(source, data_dir),
        dataset=dataset,
        progress=progress,
        say=say,
    )
    folder = output or source / "explain"
    failed: list[UserError] = []
    used: set[str] = set()
    with progress.bar("Drawing figures", len(paths)) as advance:
        for path in paths:
            try:
                found = explain_image(predictor, projection, path)
            except UserError as error:
                named = isinstance(error, NotFiniteError)
                failed.append(UserError(f"{path}: {error}") if named else error)
                continue
            name = _free_name(Path(path), used)
            figure = explain_figure(found, Path(path).name)
            write_atomically(folder / f"{name}.png", png(figure))
            write_atomically(folder / f"{name}.svg", svg(figure))
            out.print(f"{path}: {headline(found)}. Figure: {folder / name}.png, .svg")
            advance(1)
    raise_first(failed)


def _free_name(path: Path, used: set[str]) -> str:
    """Returns the name of the image, with that of its folder where another image has it."""
    name = path.stem
    if name in used:
        name = f"{path.parent.name}-{path.stem}"
    number = 2
    while name in used:
        name, number = f"{path.stem}-{number}", number + 1
    used.add(name)
    return name
