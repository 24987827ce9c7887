"""`solodg push`."""

from pathlib import Path
from typing import Annotated

import typer

from solodg.cli.console import out, shown
from solodg.cli.options import Quiet


def push(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    name: Annotated[
        str, typer.Argument(help="OWNER/NAME of the repository, optionally with @BRANCH.")
    ],
    public: Annotated[
        bool, typer.Option("--public", help="If the repository is new, open it to everybody.")
    ] = False,
    licence: Annotated[
        str | None,
        typer.Option(help="Licence of the weights, as the Hub names it, e.g. cc-by-4.0."),
    ] = None,
    onnx: Annotated[
        bool, typer.Option("--onnx/--no-onnx", help="Push the exported file model.onnx too.")
    ] = True,
    message: Annotated[str | None, typer.Option(help="Message of the commit.")] = None,
    quiet: Quiet = False,
) -> None:
    """Push a run to the Hugging Face Hub: weights, description, records, ONNX file, model card.

    A new repository is private, unless --public. Names of domains, classes and the dataset are
    pushed; paths of this machine are not. Log in first with [bold]hf auth login[/bold], or set
    HF_TOKEN. Load it with [bold]solodg predict hf://OWNER/NAME IMAGE[/bold].
    """
    progress, say = shown(quiet)
    with progress.stage("Loading PyTorch"):
        from solodg.hub.names import parse_hub_name
        from solodg.model import load

        model = load(run)
    with progress.stage(f"Pushing to {name}"):
        url = model.push_to_hub(name, public=public, licence=licence, onnx=onnx, message=message)
    out.print(f"Pushed: {url}")
    say(f"Next: solodg predict {parse_hub_name(name)} IMAGE")
