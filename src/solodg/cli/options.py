"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

MovedDataDir = Annotated[
    Path | None,
    typer.Option(help="Folder that holds the datasets, if it has moved since training."),
]
MovedData = Annotated[
    str | None, typer.Option(help="Path of your own images, if it has changed since training.")
]
