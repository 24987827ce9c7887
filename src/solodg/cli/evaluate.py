"""`solodg evaluate`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from solodg.cli.config_options import options_of, validated, with_options
from solodg.cli.console import err, out
from solodg.cli.options import MovedData, MovedDataDir
from solodg.errors import UserError
from solodg.runs.config import Machine, RunConfig


@with_options(
    *options_of(Machine, "accelerator"),
    *options_of(RunConfig, "skip_bad_images"),
    after={"skip_bad_images": "json_"},
)
def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
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
    data_dir: MovedDataDir = None,
    dataset: MovedData = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the records as JSON lines.")] = False,
    **options: Any,
) -> None:
    """Score the saved model on its unseen domains, and on new images of the seen ones.

    With --adapter, or any option of the stream, test images come in batches and the test-time
    method adapts to them; only the unseen domains are scored then.
    """
    from solodg.cli.train import assignments
    from solodg.progress import BarProgress
    from solodg.runs.evaluate import append_records, evaluate_run
    from solodg.runs.folder import RESULTS, moved_machine
    from solodg.runs.stream import Stream
    from solodg.runs.tables import evaluation_table

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
    records = evaluate_run(
        run,
        moved_machine(run, data_dir),
        dataset=dataset,
        adapter=adapter,
        stream=validated(Stream, given) if given or adapter != "none" else None,
        accelerator=validated(Machine, options).accelerator,
        skip_bad_images=bool(options["skip_bad_images"]),
        write=False,
        progress=BarProgress(err),
        say=err.print,
    )
    problem: OSError | None = None
    try:
        append_records(run, records)  # first: whoever reads the output may close it early
    except OSError as error:
        problem = error
    if json_:
        for record in records:
            sys.stdout.write(record.model_dump_json() + "\n")
    else:
        out.print(evaluation_table(records))
    if problem is not None:
        raise UserError(
            f"the scores above are complete, but cannot be added to {run / RESULTS}: "
            f"{problem.strerror}. Copy the run to a folder that can be written, or keep the output "
            "of --json."
        ) from problem
    if not json_:
        out.print(f"Protocol: {records[0].protocol}. Records: {run / RESULTS}")
