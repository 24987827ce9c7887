"""`solodg predict`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from solodg.cli.console import err, out
from solodg.errors import UserError

if TYPE_CHECKING:
    from solodg.predict.base import ImagePredictor
    from solodg.runs.predictions import Prediction


def predict(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or an exported FILE.onnx.")],
    images: Annotated[
        list[str], typer.Argument(help="Files, folders, or - for a list of files on stdin.")
    ],
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line, with all probabilities.")
    ] = False,
) -> None:
    """Predict the class of images, with its probability and uncertainty.

    Every image is predicted on its own: the others do not change its result.
    """
    import solodg
    from solodg.progress import BarProgress

    predictor = solodg.load(run)
    paths = image_paths(images)
    table = Table(Column("image", overflow="fold"), "class", "probability", "uncertainty")
    failed = []
    with BarProgress(err).bar("Predicting", len(paths)) as advance:
        for start in range(0, len(paths), predictor.batch_size):
            chunk = paths[start : start + predictor.batch_size]
            for path, prediction in _predict_readable(predictor, chunk):
                if isinstance(prediction, UserError):
                    failed.append(prediction)
                elif json_:
                    sys.stdout.write(json.dumps(prediction.to_json(path), allow_nan=False) + "\n")
                else:
                    numbers = (f"{prediction.probability:.3f}", f"{prediction.uncertainty:.3f}")
                    table.add_row(path, prediction.label, *numbers)
            advance(len(chunk))
    if not json_ and table.row_count:
        out.print(table)
    raise_first(failed)


def raise_first(errors: Sequence[UserError]) -> None:
    """Raises the first of the errors of single images, with the number of the others."""
    if errors:
        more = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
        raise UserError(f"{errors[0]}{more}")


def image_paths(arguments: list[str]) -> list[str]:
    """Returns the image files that the arguments name: files, folders, or - for a list on stdin."""
    from solodg.pixels import EXTENSIONS

    paths: list[str] = []
    for argument in arguments:
        if argument == "-":
            paths += [line.strip() for line in sys.stdin if line.strip()]
        elif Path(argument).is_dir():
            found = [p for p in sorted(Path(argument).rglob("*")) if p.suffix.lower() in EXTENSIONS]
            if not found:
                raise UserError(f"no images in folder {argument}.")
            paths += [str(p) for p in found]
        else:
            paths.append(argument)
    if not paths:
        raise UserError("no images given: name files or folders, or pipe a list of files to -.")
    return paths


def _predict_readable(
    predictor: "ImagePredictor", paths: list[str]
) -> list[tuple[str, "Prediction | UserError"]]:
    """Predicts one batch; if an image is bad, one by one, with its error in place of a result."""
    from solodg.runs.predictions import NotFiniteError

    try:
        return list(zip(paths, predictor.predict(paths), strict=True))
    except UserError:
        results: list[tuple[str, Prediction | UserError]] = []
        for path in paths:
            try:
                results.append((path, predictor.predict(path)))
            except NotFiniteError as error:
                results.append((path, UserError(f"{path}: {error}")))
            except UserError as error:
                results.append((path, error))
        return results
