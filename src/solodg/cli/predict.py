"""`solodg predict`."""

import csv
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from solodg.cli.console import out, shown
from solodg.cli.options import RUN, Accelerator, Precision, Quiet
from solodg.errors import UserError

if TYPE_CHECKING:
    from solodg.predict.base import ImagePredictor
    from solodg.progress import Progress
    from solodg.runs.predictions import Prediction

    Result = tuple[str, Prediction | UserError]  # the path of an image, and what came of it


def predict(
    run: Annotated[str, typer.Argument(help=f"{RUN}, or an exported FILE.onnx.")],
    images: Annotated[
        list[str], typer.Argument(help="Files, folders, or - for a list of files on stdin.")
    ],
    csv_: Annotated[
        Path | None,
        typer.Option(
            "--csv",
            help="Write one row for each image to this file, with all probabilities, before and "
            "after the adaptation; an existing file is replaced.",
        ),
    ] = None,
    accelerator: Accelerator = None,
    precision: Precision = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line, with all probabilities.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Predict the class of images, with its probability, uncertainty and novelty.

    Uncertainty is 0 for a certain answer and 1 for a guess. Novelty 0.95 says that an image is
    further from the training images than 95% of those of one training domain are from the others;
    a model of an earlier version has none.

    Every image is predicted on its own: the others do not change its result.
    """
    from solodg.cli.devices import load_model
    from solodg.hub.download import local_run

    if csv_ is not None and json_:
        raise UserError("--csv and --json: give one of them.")
    progress, _ = shown(quiet)
    predictor = load_model(local_run(run), accelerator, precision, progress)
    results = _results(predictor, image_paths(images), progress)
    if csv_ is not None:
        failed = _write_csv(csv_, results, predictor.classes)
    else:
        failed = _print_lines(results) if json_ else _print_table(results)
    raise_first(failed)


def _results(
    predictor: "ImagePredictor", paths: list[str], progress: "Progress"
) -> Iterator["Result"]:
    """Yields each image with its prediction or its error."""
    from solodg.runs.predictions import NotFiniteError

    with progress.bar("Predicting", len(paths)) as advance:
        for path, found in zip(paths, predictor.predict_each(paths), strict=True):
            named = isinstance(found, NotFiniteError)
            yield path, UserError(f"{path}: {found}") if named else found
            advance(1)


def _write_csv(file: Path, results: Iterator["Result"], classes: list[str]) -> list[UserError]:
    """Writes a row for each image; returns the errors of those that cannot be predicted."""
    from solodg.predict.csv_rows import csv_header, csv_row
    from solodg.storage import open_atomically

    failed, count = [], 0
    with open_atomically(file) as raw:
        # A name that is not UTF-8 keeps its bytes.
        text = io.TextIOWrapper(raw, "utf-8", errors="surrogateescape", newline="")
        writer = csv.writer(text)
        writer.writerow(csv_header(classes))
        for path, result in results:
            writer.writerow(csv_row(path, result, classes))
            count += 1
            if isinstance(result, UserError):
                failed.append(result)
        text.detach()  # writes what it holds, and leaves the file open
    rows = f"{count} rows" + (f", {len(failed)} of them with an error" if failed else "")
    out.print(f"Wrote {file}, {rows}.")
    return failed


def _print_lines(results: Iterator["Result"]) -> list[UserError]:
    """Prints a JSON object for each image; returns the errors of the others."""
    failed = []
    for path, result in results:
        if isinstance(result, UserError):
            failed.append(result)
        else:
            sys.stdout.write(json.dumps(result.to_json(path), allow_nan=False) + "\n")
    return failed


def _print_table(results: Iterator["Result"]) -> list[UserError]:
    """Prints a table with a row for each image; returns the errors of the others."""
    table = Table(
        Column("image", overflow="fold"), "class", "probability", "uncertainty", "novelty"
    )
    failed = []
    for path, result in results:
        if isinstance(result, UserError):
            failed.append(result)
        else:
            novelty = "-" if result.novelty is None else f"{result.novelty:.2f}"
            numbers = (f"{result.probability:.3f}", f"{result.uncertainty:.3f}", novelty)
            table.add_row(path, result.label, *numbers)
    if table.row_count:
        out.print(table)
    return failed


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
                endings = " ".join(sorted(EXTENSIONS))
                raise UserError(f"no images in folder {argument}: expected files {endings}.")
            paths += [str(p) for p in found]
        else:
            paths.append(argument)
    if not paths:
        raise UserError("no images given: name files or folders, or pipe a list of files to -.")
    return paths
