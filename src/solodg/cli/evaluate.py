"""`solodg evaluate`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from solodg.cli.config_options import options_of, validated, with_options
from solodg.cli.console import out, shown
from solodg.cli.options import RUN, MovedData, MovedDataDir, Quiet
from solodg.cli.score_output import show_scores
from solodg.cli.train import assignments
from solodg.errors import UserError
from solodg.hub.download import local_run
from solodg.predict.onnx import is_onnx
from solodg.runs.config import Machine, RunConfig

if TYPE_CHECKING:
    from solodg.progress import Progress
    from solodg.runs.evaluate import ScoredRecord
    from solodg.runs.scores import Scores


@with_options(
    *options_of(Machine, "accelerator"),
    *options_of(RunConfig, "skip_bad_images"),
    after={"skip_bad_images": "json_"},
)
def evaluate(
    run: Annotated[str, typer.Argument(help=f"{RUN}; with --on also an exported FILE.onnx.")],
    on: Annotated[
        Path | None,
        typer.Option(
            help="Score these labelled images alone: a folder class/image or domain/class/image, "
            "or a CSV with path, label and optionally domain, group."
        ),
    ] = None,
    adapter: Annotated[
        str,
        typer.Option(
            help="Test-time method around the model: none, bn, tent, t3a, memo, ttt, shot."
        ),
    ] = "none",
    batch_size: Annotated[
        int | None,
        typer.Option(help="Test images in a batch of the stream.  [dim]default: 64[/dim]"),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Updates per batch, for tent, ttt and shot.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Argument of the adapter, NAME=VALUE; repeat for several."),
    ] = None,
    stream: Annotated[
        str | None,
        typer.Option(
            help="single: one target domain after another; mixed: all of them, shuffled together."
        ),
    ] = None,
    reset: Annotated[
        str | None,
        typer.Option(
            help="When the adapter is reset: batch (before each), domain (before each), or never."
        ),
    ] = None,
    order_seed: Annotated[int | None, typer.Option(help="Seed of the order of the images.")] = None,
    images: Annotated[
        int | None,
        typer.Option(help="Images of each target, drawn by --order-seed.  [dim]default: all[/dim]"),
    ] = None,
    sensitivity: Annotated[
        float | None,
        typer.Option(
            help="Of two classes: choose a threshold on source validation images that finds at "
            "least this share of --positive, e.g. 0.95, and score it."
        ),
    ] = None,
    positive: Annotated[
        str | None,
        typer.Option(
            help="The class that --sensitivity is about.  [dim]default: the second one[/dim]"
        ),
    ] = None,
    data_dir: MovedDataDir = None,
    dataset: MovedData = None,
    json_: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the records as JSON lines, with intervals and each class."
        ),
    ] = False,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Score the saved model on its unseen domains, and on new images of the seen ones.

    With --on, score it on the labelled images of a new site; no training data is needed. Of a model
    that was trained on all domains, only new images of these can be scored without --on.

    Metrics have 95% intervals, by a bootstrap over images, or over groups (patients) where the data
    has them. With --adapter, or any option of the stream, test images come in batches and the
    test-time method adapts to them; only unseen domains are scored then.
    """
    progress, say = shown(quiet)
    arguments = assignments(set_ or []) | ({"steps": steps} if steps is not None else {})
    values = {
        "arguments": arguments or None,
        "batch_size": batch_size,
        "domains": stream,
        "reset": reset,
        "order_seed": order_seed,
        "images": images,
    }
    given = {name: value for name, value in values.items() if value is not None}
    as_stream = bool(given) or adapter != "none"
    _check_threshold(sensitivity, positive, as_stream)
    common: dict[str, Any] = {
        "skip_bad_images": bool(options["skip_bad_images"]),
        "progress": progress,
        "say": say,
    }
    folder = local_run(run)
    if is_onnx(folder):
        labelled = _check_exported(folder, on, as_stream, sensitivity, options["accelerator"])
        _evaluate_exported(folder, labelled, common, json_)
        return
    common |= {"dataset": dataset, "accelerator": validated(Machine, options).accelerator}
    threshold = None if sensitivity is None else {"sensitivity": sensitivity, "positive": positive}
    test_time = (adapter, given) if as_stream else None
    _evaluate_run(folder, data_dir, on, test_time, threshold, common, json_)


def _evaluate_exported(file: Path, on: Path, common: dict[str, Any], json_: bool) -> None:
    """Scores an exported file on labelled images; nothing is recorded."""
    progress = common["progress"]
    with progress.stage("Loading ONNX Runtime"):
        from solodg.predict.exported_site import score_exported
        from solodg.predict.onnx import OnnxPredictor

    exported = OnnxPredictor.load(file)
    scored = score_exported(exported, on, **common)
    found = intervals(scored, exported.classes, progress)
    show_scores(scored, found, None, None, json_)


def _evaluate_run(
    folder: Path,
    data_dir: Path | None,
    on: Path | None,
    test_time: tuple[str, dict[str, Any]] | None,
    threshold: dict[str, Any] | None,
    common: dict[str, Any],
    json_: bool,
) -> None:
    """Scores a run, shows the scores and records them.

    `test_time` is an adapter with the options of its stream; `threshold` has the sensitivity that
    is wanted, and of which class.
    """
    with common["progress"].stage("Loading PyTorch"):
        from solodg.runs.checkpoint import load_info
        from solodg.runs.evaluate import score_run
        from solodg.runs.folder import RESULTS, moved_machine
        from solodg.runs.operating_point import operating_point
        from solodg.runs.stream import Stream
        from solodg.runs.temperature import load_temperature

    info, machine = load_info(folder), moved_machine(folder, data_dir)
    point = operating_point(folder, machine, **threshold, **common) if threshold else None
    adapter, stream = "none", None
    if test_time:
        adapter, stream = test_time[0], validated(Stream, test_time[1])
    scored = score_run(folder, machine, on=on, adapter=adapter, stream=stream, **common)
    found = intervals(scored, info.classes, common["progress"])
    # First: whoever reads the output may close it early.
    problem = _record(folder, scored, found, write_card_too=stream is None)
    show_scores(scored, found, point, None if stream else load_temperature(folder), json_)
    if problem is not None:
        raise UserError(
            f"the scores above are complete, but cannot be added to {folder / RESULTS}: "
            f"{problem.strerror}. Copy the run to a folder that can be written, or keep the output "
            "of --json."
        ) from problem
    if not json_:
        out.print(f"Protocol: {scored[0].record.protocol}.")
        common["say"](f"Records: {folder / RESULTS}")


def _record(
    folder: Path,
    scored: Sequence["ScoredRecord"],
    found: Sequence["Scores"],
    *,
    write_card_too: bool,
) -> OSError | None:
    """Adds the scores to the records of a run and to its card; returns what prevented it."""
    from solodg.runs.evaluate import append_records
    from solodg.runs.folder import CARD
    from solodg.runs.model_card import write_card
    from solodg.runs.recorded_scores import recordable

    records = [
        domain.record.model_copy(update={"scores": recordable(scores.to_json())})
        for domain, scores in zip(scored, found, strict=True)
    ]
    try:
        append_records(folder, records)
        if write_card_too and (folder / CARD).is_file():
            write_card(folder)
    except OSError as error:
        return error
    return None


def _check_threshold(sensitivity: float | None, positive: str | None, as_stream: bool) -> None:
    if positive is not None and sensitivity is None:
        raise UserError("--positive names the class of --sensitivity: give both.")
    if sensitivity is not None and as_stream:
        raise UserError(
            "--sensitivity chooses a threshold for the model itself: leave out --adapter and the "
            "options of the stream."
        )


def _check_exported(
    file: Path,
    on: Path | None,
    as_stream: bool,
    sensitivity: float | None,
    accelerator: str | None,
) -> Path:
    """Returns what to score; raises `UserError` for what needs more than an exported file."""
    if on is None:
        raise UserError(
            f"{file} is an exported file, without the images of its training: name labelled images "
            "to score with --on FOLDER or --on FILE.csv."
        )
    if as_stream:
        raise UserError("test-time methods need the folder of a run, not an exported file.")
    if sensitivity is not None:
        raise UserError(
            "--sensitivity chooses a threshold on the source validation images of a run: give the "
            "folder of the run that the file was exported from."
        )
    if accelerator not in (None, "auto", "cpu"):
        raise UserError(f"--accelerator {accelerator}: an exported file is computed on the CPU.")
    return on


def intervals(
    scored: Sequence["ScoredRecord"], classes: Sequence[str], progress: "Progress"
) -> list["Scores"]:
    """Computes all metrics of every domain, with their intervals."""
    from solodg.runs.scores import score

    with progress.stage("Computing intervals"):
        return [score(s.predictions, s.labels, classes, s.groups) for s in scored]
