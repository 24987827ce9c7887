"""`solodg export`."""

from pathlib import Path
from typing import Annotated

import typer

from solodg.cli.console import out
from solodg.cli.options import RUN


def export(
    run: Annotated[str, typer.Argument(help=f"{RUN}.")],
    onnx: Annotated[Path, typer.Option("--onnx", help="The file to write.")],
) -> None:
    """Write a model as one ONNX file: images in, probabilities out, adaptation included.

    Decoding and resizing stay outside: the file takes 8-bit pixels (batch, channels, size, size).
    Use it with [bold]solodg predict FILE.onnx IMAGE[/bold], which needs no torch, or in any program
    that runs ONNX. Its results are compared with those of PyTorch, on the CPU and at 32 bits,
    before it is written.
    """
    from solodg.model import load
    from solodg.predict.onnx import check_suffix

    check_suffix(onnx)  # before a model is loaded
    difference = load(run).export(onnx)
    size = onnx.stat().st_size / 1e6
    out.print(f"Wrote {onnx}, {size:.1f} MB; differs from PyTorch by at most {difference:.1e}.")
    out.print(f"Next: solodg predict {onnx} IMAGE", style="dim")
