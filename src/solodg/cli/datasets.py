"""`solodg datasets`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from solodg.cli.console import out


def datasets(
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder to look in.  [dim]default: $SOLODG_DATA or data[/dim]"),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the known datasets, where they were found, and how to get those that were not."""
    from solodg.data import DATASETS, default_data_dir

    folder = data_dir or default_data_dir()
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
