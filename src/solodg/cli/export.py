"""`solodg export`."""

from pathlib import Path
from typing import Annotated

import typer

from solodg.cli.console import out, shown
from solodg.cli.options import RUN, Quiet
from solodg.errors import UserError


def export(
    run: Annotated[str, typer.Argument(help=f"{RUN}; for --web, also an exported FILE.onnx.")],
    onnx: Annotated[Path | None, typer.Option("--onnx", help="The file to write.")] = None,
    web: Annotated[
        Path | None,
        typer.Option(
            "--web", help="The new folder of a page that classifies images in the browser."
        ),
    ] = None,
    onnxruntime_web: Annotated[
        Path | None,
        typer.Option(
            help="For --web: the folder of the npm package onnxruntime-web.  "
            "[dim]default: node_modules/onnxruntime-web, here or above[/dim]"
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Write a model as one ONNX file: images in, probabilities out, adaptation included.

    Decoding and resizing stay outside: the file takes 8-bit pixels (batch, channels, size, size).
    Use it with [bold]solodg predict FILE.onnx IMAGE[/bold], which needs no torch, or in any program
    that runs ONNX. Its results are compared with those of PyTorch, on the CPU and at 32 bits,
    before it is written.

    With [bold]--web DIR[/bold], write a page with the same model in it. It reads and classifies
    images in the browser, from which no image is sent. Any web server of static files can serve it.
    """
    from solodg.model import load
    from solodg.predict.onnx import check_suffix
    from solodg.predict.web_page import check_folder, find_runtime

    if onnx is None and web is None:
        raise UserError("nothing to write: give --onnx FILE, --web DIR, or both.")
    if onnx is not None:
        check_suffix(onnx)  # before a model is loaded
    if web is not None:
        check_folder(web)
        find_runtime(onnxruntime_web)
    progress, say = shown(quiet)
    with progress.stage("Loading PyTorch and the model"):
        model = load(run)
    if onnx is not None:
        with progress.stage("Exporting, and comparing with PyTorch"):
            difference = model.export(onnx)
        size = onnx.stat().st_size / 1e6
        out.print(f"Wrote {onnx}, {size:.1f} MB; differs from PyTorch by at most {difference:.1e}.")
        domains = len(model.recorded_scores())
        if domains:
            say(f"Its metadata holds the recorded scores of {domains} domain{'s' * (domains > 1)}.")
        else:
            say(f"It holds no scores: none are recorded. `solodg evaluate {run}` first adds them.")
        say(f"Next: solodg predict {onnx} IMAGE")
    if web is not None:
        with progress.stage("Writing the page"):
            size = model.export_web(web, onnxruntime_web) / 1e6
        out.print(f"Wrote {web}, {size:.1f} MB: a page that classifies images in the browser.")
        say(f"Next: python -m http.server --directory {web}")
