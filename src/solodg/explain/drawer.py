"""Draws explanations of single images while a model is served."""

from collections.abc import Callable
from pathlib import Path

from solodg.errors import UserError
from solodg.explain.explanation import explain_pixels
from solodg.explain.figure import explain_figure
from solodg.explain.projection import stored_projection
from solodg.figures.style import themed_svg
from solodg.pixels import Pixels
from solodg.predict.torch import Predictor
from solodg.progress import Progress, Say
from solodg.runs.folder import moved_machine


def figure_drawer(
    run: Path, predictor: Predictor, data_dir: Path | None, progress: Progress, say: Say
) -> Callable[[Pixels], bytes] | None:
    """Returns a function that draws the explanation of an image as SVG.

    Returns None, and says why, if the source images of the run are not found. `data_dir` is the
    folder of the datasets, if it has moved since training.
    """
    try:
        projection = stored_projection(
            run, predictor, moved_machine(run, data_dir), progress=progress, say=say
        )
    except (UserError, OSError) as error:
        say(f"No figures: {error}")
        return None

    def draw(pixels: Pixels) -> bytes:
        return themed_svg(explain_figure(explain_pixels(predictor, projection, pixels)))

    return draw
