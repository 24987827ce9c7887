"""The commands of the program: the help of the program lists them without importing any of them."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

MARKUP: Final = "rich"


class Entry(NamedTuple):
    """What the help of the program says of a command, and the last line of the command's own."""

    summary: str  # the first sentence of the docstring
    epilog: str | None = None


# The command NAME is the function NAME of the module solodg.cli.NAME.
COMMANDS = {
    "train": Entry(
        "Train on all domains but the target, and keep the model that is best on source "
        "validation.",
        "Examples: [bold]solodg train rotated-mnist --backbone small_cnn --steps 500[/bold]; "
        "a final model: [bold]solodg train scans --pretrained --freeze-backbone --estimate[/bold]",
    ),
    "evaluate": Entry(
        "Score the saved model on its unseen domains, and on new images of the seen ones.",
        "Example: [bold]solodg evaluate runs/first[/bold]",
    ),
    "predict": Entry(
        "Predict the class of images, with its probability, uncertainty and novelty.",
        "Example: [bold]ls *.jpg | solodg predict RUN - --json[/bold]",
    ),
    "average": Entry(
        "Average the weights of finished runs into one model (DiWA).",
        "Example: [bold]solodg average runs/a runs/b runs/c --output runs/mean --greedy[/bold]",
    ),
    "explain": Entry(
        "Draw what the adaptation does to an image, as a figure (PNG and SVG).",
        "Example: [bold]solodg explain runs/first docs/disc.png[/bold]",
    ),
    "report": Entry(
        "Write one HTML page on a run: curves, tables, calibration, and images before and after.",
        "Example: [bold]solodg report runs/first[/bold]",
    ),
    "export": Entry(
        "Write a model as one ONNX file: images in, probabilities out, adaptation included.",
        "Example: [bold]solodg export runs/first --onnx model.onnx[/bold]",
    ),
    "serve": Entry(
        "Serve a model: a page to drop images on, and POST /predict for programs.",
        "Example: [bold]solodg serve model.onnx --port 8080[/bold]",
    ),
    "push": Entry(
        "Push a run to the Hugging Face Hub: weights, description, records, ONNX file, model card.",
        "Example: [bold]solodg push runs/first me/first[/bold]",
    ),
    "bench": Entry(
        "Run a plan (methods x targets x seeds), record the scores and write a table.",
        "Example: [bold]solodg bench configs/quick/ablation.yaml --dry-run[/bold]",
    ),
    "tune": Entry(
        "Choose learning rates and main settings of a method on source domains that are left out.",
        "Example: [bold]solodg tune toy --target sky --algorithm coral --backbone small_cnn "
        "--steps 30 --runs 30[/bold]",
    ),
    "study": Entry(
        "Test whether the gain comes from the single image: give it the style or pose of another.",
        "Example: [bold]solodg study runs/first[/bold]",
    ),
    "datasets": Entry(
        "List the known datasets, where they were found, and how to get those that were not."
    ),
    "cache": Entry(
        "Show how much disk stored features and maps take, or delete them.",
        "Example: [bold]solodg cache --clear maps[/bold]",
    ),
    "demo": Entry(
        "Train ERM and two single-sample methods on real rotated digits, and compare them."
    ),
}


class CommandGroup(TyperGroup):
    """The commands of `COMMANDS`, each imported when it is asked for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Imported()  # type: ignore[assignment]  # nothing is added to it
        self._lists = False

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Returns the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """Returns a command by its name; for the list of commands, only its name and summary."""
        if self._lists and cmd_name in COMMANDS:
            return TyperCommand(cmd_name, help=COMMANDS[cmd_name].summary)
        return self.commands.get(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help of the program, with a line for each command."""
        self._lists = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._lists = False


class _Imported(Mapping[str, Any]):
    """The commands by name."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        entry = COMMANDS[name]
        if name not in self._found:
            function = getattr(import_module(f"solodg.cli.{name}"), name)
            alone = typer.Typer(add_completion=False, rich_markup_mode=MARKUP)
            alone.command(name, epilog=entry.epilog)(function)
            self._found[name] = typer.main.get_command(alone)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)
