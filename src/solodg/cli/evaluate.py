"""`solodg evaluate`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from solodg.cli.config_options import options_of, validated, with_options
from solodg.cli.console import out, shown
from solodg.cli.options import RUN, MovedData, MovedDataDir, Quiet
from solodg.errors import UserError
from solodg.runs.config import Machine, RunConfig

if TYPE_CHECKING:
    from solodg.progress import Progress
    from solodg.runs.evaluate import ScoredRecord
    from solodg.runs.operating_point import OperatingPoint
    from solodg.runs.scores import Scores
    from solodg.runs.temperature import Temperature

_MOST_CLASSES = 20  # in a table on the terminal; --json has all


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
    with progress.stage("Loading PyTorch"):
        from solodg.cli.train import assignments
        from solodg.hub.download import local_run
        from solodg.predict.exported_site import score_exported
        from solodg.predict.onnx import OnnxPredictor, is_onnx
        from solodg.runs.checkpoint import load_info
        from solodg.runs.evaluate import append_records, score_run
        from solodg.runs.folder import CARD, RESULTS, moved_machine
        from solodg.runs.model_card import write_card
        from solodg.runs.operating_point import operating_point
        from solodg.runs.recorded_scores import recordable
        from solodg.runs.stream import Stream
        from solodg.runs.temperature import load_temperature

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
        exported = OnnxPredictor.load(folder)
        scored = score_exported(exported, labelled, **common)
        found = intervals(scored, exported.classes, progress)
        show_scores(scored, found, None, None, json_)
        return
    common |= {"dataset": dataset, "accelerator": validated(Machine, options).accelerator}
    info, machine = load_info(folder), moved_machine(folder, data_dir)
    point = None
    if sensitivity is not None:
        point = operating_point(
            folder, machine, sensitivity=sensitivity, positive=positive, **common
        )
    scored = score_run(
        folder,
        machine,
        on=on,
        adapter=adapter,
        stream=validated(Stream, given) if as_stream else None,
        **common,
    )
    found = intervals(scored, info.classes, progress)
    problem: OSError | None = None
    try:  # first: whoever reads the output may close it early
        append_records(
            folder,
            [
                domain.record.model_copy(update={"scores": recordable(scores.to_json())})
                for domain, scores in zip(scored, found, strict=True)
            ],
        )
        if not as_stream and (folder / CARD).is_file():
            write_card(folder)
    except OSError as error:
        problem = error
    temperature = None if as_stream else load_temperature(folder)
    show_scores(scored, found, point, temperature, json_)
    if problem is not None:
        raise UserError(
            f"the scores above are complete, but cannot be added to {folder / RESULTS}: "
            f"{problem.strerror}. Copy the run to a folder that can be written, or keep the output "
            "of --json."
        ) from problem
    if not json_:
        out.print(f"Protocol: {scored[0].record.protocol}.")
        say(f"Records: {folder / RESULTS}")


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


def show_scores(
    scored: Sequence["ScoredRecord"],
    found: Sequence["Scores"],
    point: "OperatingPoint | None",
    temperature: "Temperature | None",
    json_: bool,
) -> None:
    """Prints the scores of every domain: as JSON lines, or as tables."""
    from solodg.runs.coverage import coverage, coverage_table
    from solodg.runs.tables import ROLES, UNSEEN, class_table, evaluation_table, threshold_table
    from solodg.runs.temperature import effect_text

    at_threshold = [
        point.scores(s.predictions, s.labels, s.groups) if point else {} for s in scored
    ]
    if json_:
        for domain, scores, chosen in zip(scored, found, at_threshold, strict=True):
            line = domain.record.model_dump() | {"scores": scores.to_json()}
            line["coverage"] = coverage(domain.predictions, domain.labels)
            if temperature:
                effect = temperature.effect(domain.predictions, domain.labels)
                line["temperature"] = {"temperature": temperature.temperature} | dict(
                    zip(("before", "after"), effect, strict=True)
                )
            if point:
                values = {name: value._asdict() for name, value in chosen.items()}
                line["threshold"] = point.to_json() | values
            sys.stdout.write(json.dumps(line, allow_nan=False) + "\n")
        return
    records = [domain.record for domain in scored]
    out.print(evaluation_table(records, found))
    for record, scores in zip(records, found, strict=True):
        if record.role in UNSEEN and len(scores.classes) <= _MOST_CLASSES:
            out.print(class_table(record.domain, scores))
    if point:
        rows = [(r.domain, ROLES[r.role]) for r in records]
        out.print(threshold_table(point.title(), rows, at_threshold))
    unseen = [s for s in scored if s.record.role in UNSEEN] or scored
    out.print(coverage_table([(s.record.domain, s.predictions, s.labels) for s in unseen]))
    if temperature:
        out.print(temperature.sentence())
        for s in unseen:
            change = effect_text(*temperature.effect(s.predictions, s.labels))
            out.print(f"On {s.record.domain} it would change {change}.")
    for text in dict.fromkeys(scores.remark() for scores in found):
        out.print(text)
