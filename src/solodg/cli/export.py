"""`solodg export`."""

from pathlib import Path
from typing import Annotated

import typer

from solodg.cli.console import out, shown
from solodg.cli.options import Quiet


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    onnx: Annotated[Path, typer.Option("--onnx", help="The file to write.")],
    quiet: Quiet = False,
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
    progress, say = shown(quiet)
    with progress.stage("Loading PyTorch and the model"):
        model = load(run)
    with progress.stage("Exporting, and comparing with PyTorch"):
        difference = model.export(onnx)
    size = onnx.stat().st_size / 1e6
    out.print(f"Wrote {onnx}, {size:.1f} MB; differs from PyTorch by at most {difference:.1e}.")
    domains = len(model.recorded_scores())
    if domains:
        say(f"Its metadata holds the recorded scores of {domains} domain{'s' * (domains > 1)}.")
    else:
        say(f"It holds no scores: none are recorded. Run solodg evaluate {run} first to add them.")
    say(f"Next: solodg predict {onnx} IMAGE")
