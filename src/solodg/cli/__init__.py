"""The command line. A command is imported when it is called, slow modules when it runs."""

import sys
from typing import Annotated

import typer

from solodg.cli.commands import MARKUP, CommandGroup
from solodg.cli.console import err, out
from solodg.errors import UserError
from solodg.models.allocator import keep_freed_memory

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=MARKUP,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train image classifiers on several domains that adapt to every single test image.",
    epilog="Start with [bold]solodg demo[/bold]: real digits, three methods, a table, a page.",
)

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
        from solodg.cli.write_errors import write_error

        text = write_error(error, "".join(sys.argv[1:2]))
        if text is None:
            raise
        err.print(f"error: {text}", style="red")
        sys.exit(USER_MISTAKE)
