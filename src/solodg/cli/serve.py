"""`solodg serve`."""

import math
import os
from pathlib import Path
from typing import Annotated

import typer

from solodg.cli.console import shown
from solodg.cli.options import RUN, Accelerator, MovedDataDir, Precision, Quiet
from solodg.errors import UserError


def serve(
    model: Annotated[str, typer.Argument(help=f"{RUN}, or an exported FILE.onnx (no torch).")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 opens it to the network.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    max_batch: Annotated[
        int, typer.Option(help="Most images computed at once, from one request or several.")
    ] = 16,
    max_images: Annotated[int, typer.Option(help="Most images in one request.")] = 32,
    max_mb: Annotated[float, typer.Option(help="Most megabytes in one request.")] = 20.0,
    max_pixels: Annotated[
        int,
        typer.Option(help="Most pixels of an image; a larger one is refused before it is decoded."),
    ] = 50_000_000,
    decode_pixels: Annotated[
        int, typer.Option(help="Most pixels decoded at once, of all requests; other images wait.")
    ] = 50_000_000,
    queue: Annotated[
        int,
        typer.Option(
            help="Images accepted and not yet answered; a request beyond that gets status 429."
        ),
    ] = 128,
    queue_mb: Annotated[
        float,
        typer.Option(
            help="Megabytes of requests accepted and not yet answered, at least --max-mb; a "
            "request beyond that gets status 429."
        ),
    ] = 256.0,
    timeout: Annotated[float, typer.Option(help="Seconds until a request is given up.")] = 30.0,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the bearer token that requests must carry.  "
            "[dim]default: $SOLODG_TOKEN; else none[/dim]"
        ),
    ] = None,
    data_dir: MovedDataDir = None,
    accelerator: Accelerator = None,
    precision: Precision = None,
    quiet: Quiet = False,
) -> None:
    """Serve a model: a page to drop images on, and POST /predict for programs.

    Images of concurrent requests are computed together, which does not change any result.
    With --quiet it says only where it listens.
    Ctrl-C or SIGTERM stops the server after it has answered the requests that it accepted.
    """
    from solodg.cli.devices import load_model
    from solodg.errors import missing_extra
    from solodg.hub.download import local_run

    progress, _ = shown(quiet)
    try:
        with progress.stage("Loading the server"):
            from solodg.model import Model
            from solodg.serving.server import read_token
            from solodg.serving.settings import ServerSettings
    except ModuleNotFoundError as error:
        raise missing_extra("serve", "The server", error) from error
    settings = ServerSettings(
        max_batch=max_batch,
        max_images=max_images,
        max_bytes=_bytes("--max-mb", max_mb),
        max_pixels=max_pixels,
        decode_pixels=decode_pixels,
        queue=queue,
        queue_bytes=_bytes("--queue-mb", queue_mb),
        seconds=timeout,
        token=read_token(token_file, os.environ.get("SOLODG_TOKEN")),
    )
    path = local_run(model)
    served = Model(load_model(path, accelerator, precision, progress), path)
    served.serve(host, port, settings=settings, data_dir=data_dir, verbose=not quiet)


def _bytes(option: str, megabytes: float) -> int:
    if not math.isfinite(megabytes):
        raise UserError(f"{option} {megabytes}: expected a finite number of megabytes.")
    return int(megabytes * 1024**2)
