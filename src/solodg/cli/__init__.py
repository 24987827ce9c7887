"""The command line. Commands import slow modules only when they run, so that --help is quick."""

import sys
from typing import Annotated

import typer

from solodg.cli.average import average
from solodg.cli.bench import bench
from solodg.cli.cache import cache
from solodg.cli.console import err, out
from solodg.cli.datasets import datasets
from solodg.cli.demo import demo
from solodg.cli.evaluate import evaluate
from solodg.cli.explain import explain
from solodg.cli.export import export
from solodg.cli.predict import predict
from solodg.cli.push import push
from solodg.cli.report import report
from solodg.cli.serve import serve
from solodg.cli.study import study
from solodg.cli.train import train
from solodg.cli.tune import tune
from solodg.cli.write_errors import write_error
from solodg.errors import UserError
from solodg.runs.allocator import keep_freed_memory

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train image classifiers on several domains that adapt to every single test image.",
    epilog="Start with [bold]solodg demo[/bold]: real digits, three methods, a table, a page.",
)
app.command(
    epilog="Examples: [bold]solodg train rotated-mnist --backbone small_cnn --steps 500[/bold]; "
    "a final model: [bold]solodg train scans --pretrained --freeze-backbone --estimate[/bold]"
)(train)
app.command(epilog="Example: [bold]solodg evaluate runs/first[/bold]")(evaluate)
app.command(epilog="Example: [bold]ls *.jpg | solodg predict RUN - --json[/bold]")(predict)
app.command(
    epilog="Example: [bold]solodg average runs/a runs/b runs/c --output runs/mean --greedy[/bold]"
)(average)
app.command(epilog="Example: [bold]solodg explain runs/first docs/disc.png[/bold]")(explain)
app.command(epilog="Example: [bold]solodg report runs/first[/bold]")(report)
app.command(epilog="Example: [bold]solodg export runs/first --onnx model.onnx[/bold]")(export)
app.command(epilog="Example: [bold]solodg serve model.onnx --port 8080[/bold]")(serve)
app.command(epilog="Example: [bold]solodg push runs/first me/first[/bold]")(push)
app.command(epilog="Example: [bold]solodg bench configs/quick/ablation.yaml --dry-run[/bold]")(
    bench
)
app.command(
    epilog="Example: [bold]solodg tune toy --target sky --algorithm coral --backbone small_cnn "
    "--steps 30 --runs 30[/bold]"
)(tune)
app.command(epilog="Example: [bold]solodg study runs/first[/bold]")(study)
app.command()(datasets)
app.command(epilog="Example: [bold]solodg cache --clear maps[/bold]")(cache)
app.command()(demo)

USER_MISTAKE = 2


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        out.print(f"solodg {version('solodg')}")
        raise typer.Exit


@app.callback()
def _options(
    version_: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Runs a command. A user's mistake becomes one line and exit code 2, never a traceback."""
    if sys.argv[1:2] != ["serve"]:  # a server gives memory back between requests
        keep_freed_memory()
    try:
        app()
    except UserError as error:
        err.print(f"error: {error}", style="red")
        sys.exit(USER_MISTAKE)
    except OSError as error:
        text = write_error(error, "".join(sys.argv[1:2]))
        if text is None:
            raise
        err.print(f"error: {text}", style="red")
        sys.exit(USER_MISTAKE)
