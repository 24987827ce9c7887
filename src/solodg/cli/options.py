"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

DataDir = Annotated[
    Path | None,
    typer.Option(help="Where datasets lie.  [dim]default: $SOLODG_DATA or data[/dim]"),
]
MovedDataDir = Annotated[
    Path | None, typer.Option(help="Where datasets lie, if it has moved since training.")
]
MovedData = Annotated[
    str | None, typer.Option(help="Path of your own images, if it has changed since training.")
]
CacheDir = Annotated[
    Path | None,
    typer.Option(help="For features of frozen backbones.  [dim]default: ~/.cache/solodg[/dim]"),
]
Download = Annotated[
    bool, typer.Option("--download", help="Fetch MNIST, Fashion-MNIST or SVHN if missing.")
]
Accelerator = Annotated[str | None, typer.Option(help="auto, cpu, cuda, mps.")]
