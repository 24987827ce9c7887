"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

RUN = "The folder of a run, or hf://OWNER/NAME[@REVISION] on the Hugging Face Hub"
MovedDataDir = Annotated[
    Path | None,
    typer.Option(help="Folder that holds the datasets, if it has moved since training."),
]
Accelerator = Annotated[
    str | None,
    typer.Option(help="Kind of device: cpu, cuda, mps, auto.  [dim]default: cpu[/dim]"),
]
Precision = Annotated[
    str | None,
    typer.Option(help="32-true, 16-mixed or bf16-mixed.  [dim]default: 32-true[/dim]"),
]
MovedData = Annotated[
    str | None, typer.Option(help="Path of your own images, if it has changed since training.")
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Show neither progress nor messages: the result alone."),
]
