"""`solodg datasets`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from solodg.cli.config_options import options_of, with_options
from solodg.cli.console import out, shown
from solodg.cli.data_table import print_data
from solodg.cli.options import Quiet
from solodg.errors import UserError, unknown_name
from solodg.runs.config import RunConfig
from solodg.runs.option import pairs_of

if TYPE_CHECKING:
    from solodg.progress import Progress, Say


@with_options(*options_of(RunConfig, "columns", "split_values"))
def datasets(
    data: Annotated[
        str | None,
        typer.Argument(
            help="Show what this dataset holds: a name, a folder domain/class/image, or a CSV, "
            "Parquet or Arrow file. Nothing is trained."
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(help="After [bold]get[/bold]: the dataset to fetch, by name."),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder to look in.  [dim]default: $SOLODG_DATA or data[/dim]"),
    ] = None,
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="With get: accept the licence that it names.")
    ] = False,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="URL",
            help="With get: an address below which the files lie, in place of the published ones.",
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """List the known datasets, where they were found, and how to get those that were not.

    With DATA, count the images of one dataset by class and domain, and say what is left out of it
    and why. [bold]solodg datasets get NAME[/bold] fetches a dataset into the data folder, where
    that is permitted; a fetch that broke off goes on with the same command.
    """
    progress, say = shown(quiet)
    with progress.stage("Loading PyTorch"):
        from solodg.data import DATASETS, default_data_dir

    folder = data_dir or default_data_dir()
    if data == "get" and (name is not None or not Path(data).exists()):
        _get(name, folder, progress, say, accept_licence=accept_licence, source=source)
        return
    if name is not None:
        raise UserError(f"{data} {name}: give one dataset, or `solodg datasets get NAME`.")
    if data is not None:
        pairs = {name: given_pairs(name, options[name]) for name in ("columns", "split_values")}
        _show_dataset(data, folder, pairs, as_json=json_, progress=progress)
        return
    rows: list[dict[str, Any]] = [
        {
            "name": spec.name,
            "title": spec.title,
            "domains": list(spec.domains),
            "default_targets": list(spec.default_targets),
            "found": spec.find(folder),
            "how_to_get": spec.how_to_get,
        }
        for spec in DATASETS.values()
    ]
    if json_:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    table = Table("name", "domains", f"found (in {folder})", show_lines=True)
    for row in rows:
        found = row["found"] or Text(f"no. {row['how_to_get']}", style="dim")
        table.add_row(Text(row["name"], style="bold"), ", ".join(row["domains"]), found)
    out.print(table)
    out.print("Own images: a folder domain/class/image, or a CSV with columns path, label, domain.")


def _get(
    name: str | None,
    folder: Path,
    progress: "Progress",
    say: "Say",
    *,
    accept_licence: bool,
    source: str | None,
) -> None:
    from solodg.data import DATASETS
    from solodg.data.recipes import RECIPES, get_dataset

    if name is None or name not in DATASETS:
        hint = f"Can be fetched: {', '.join(sorted(RECIPES))}."
        raise unknown_name("dataset", name or "", DATASETS, hint)
    spec = DATASETS[name]
    if name not in RECIPES and spec.find(Path("/nowhere")):
        raise UserError(f"{spec.title} needs no files: it is drawn when it is needed.")
    found = get_dataset(
        spec,
        folder,
        progress,
        say,
        accept_licence=accept_licence,
        base=source,
    )
    out.print(f"Fetched {spec.title}: {found}")
    say(f"Next: solodg datasets {name} --data-dir {folder}")


def given_pairs(name: str, texts: list[str] | None) -> dict[str, str] | None:
    """Reads NAME=VALUE options; raises `UserError` that names the option of a wrong one."""
    try:
        pairs: dict[str, str] | None = pairs_of(texts or None)
    except ValueError as error:
        flag = "--column" if name == "columns" else "--split-value"
        raise UserError(f"{flag} {texts!r}: {error}.") from error
    return pairs


def _show_dataset(
    name: str,
    folder: Path,
    columns: dict[str, dict[str, str] | None],
    *,
    as_json: bool,
    progress: "Progress",
) -> None:
    from solodg.data import Loading, dataset_spec
    from solodg.data.summary import summarise

    spec = dataset_spec(name)
    loading = Loading(
        folder,
        image_size=spec.image_size,
        channels=spec.channels,
        columns=columns.get("columns") or {},
        split_values=columns.get("split_values") or {},
    )
    with progress.stage(f"Opening {name}"):
        summary = summarise(spec.load(loading))
    if as_json:
        sys.stdout.write(json.dumps(summary.as_json(), indent=2) + "\n")
    else:
        print_data(summary, out)
