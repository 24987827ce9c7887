"""`solodg evaluate`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from solodg.cli.console import err, out


def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    adapter: Annotated[str, typer.Option(help="Test-time method around the model.")] = "none",
    data_dir: Annotated[
        Path | None, typer.Option(help="Where datasets lie, if it has moved since training.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Path of your own images, if it has changed since training.")
    ] = None,
    accelerator: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    skip_bad_images: Annotated[
        bool, typer.Option("--skip-bad-images", help="Leave out what cannot be read, and say so.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Records as JSON lines.")] = False,
) -> None:
    """Score the saved model on its unseen domains, and on new images of the seen ones."""
    from solodg.progress import BarProgress
    from solodg.runfolder import MACHINE, RESULTS, read_machine
    from solodg.score import evaluate_run
    from solodg.tables import evaluation_table

    machine = None
    if data_dir is not None and (run / MACHINE).is_file():
        machine = read_machine(run).model_copy(update={"data_dir": data_dir})
    records = evaluate_run(
        run,
        machine,
        dataset=dataset,
        adapter=adapter,
        accelerator=accelerator,
        skip_bad_images=skip_bad_images,
        progress=BarProgress(err),
        say=err.print,
    )
    if json_:
        for record in records:
            sys.stdout.write(record.model_dump_json() + "\n")
        return
    out.print(evaluation_table(records))
    out.print(f"Protocol: {records[0].protocol}. Records: {run / RESULTS}")
