"""`solodg tune`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from solodg.cli.cells import SOME_FAILED, WHERE_OPTIONS, Where, run_cells
from solodg.cli.config_options import options_of, validated, with_options
from solodg.cli.console import err, out, shown
from solodg.cli.options import Quiet
from solodg.cli.train import config_of
from solodg.errors import UserError
from solodg.runs.config import Machine, RunConfig

if TYPE_CHECKING:
    from solodg.bench.row import Row
    from solodg.bench.search import Outcome, Search
    from solodg.progress import Say

_PLAN_ENDINGS = (".yaml", ".yml")
_NOT_OPTIONS = ("devices", "num_nodes", "select")
_OPTIONS = [o for o in options_of(RunConfig) if o.name not in _NOT_OPTIONS]


@with_options(*_OPTIONS, *WHERE_OPTIONS)
def tune(
    output: Annotated[
        Path, typer.Option(help="Folder for records, runs and tables; searches may share it.")
    ] = Path("runs/tune"),
    runs: Annotated[
        int,
        typer.Option(
            help="Models that the search may score; with a plan, for each row and target. A "
            "trial takes one for each source domain. Each is trained anew, unless an adapter is "
            "searched.",
            min=1,
        ),
    ] = 60,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Choose learning rates and main settings of a method on source domains that are left out.

    DATASET and options are those of [bold]solodg train[/bold]; or give a plan of
    [bold]solodg bench[/bold], and nothing else: each of its methods is searched for each target.
    A row with an adapter has the settings of the adapter searched, and one model for each source
    domain serves all of its trials.

    A random search. In every trial each source domain is left out once, and its validation images
    are scored; the target is never read. What the options or the plan set is not searched. After
    an interruption the same command goes on. It prints the trials, the best settings as options of
    [bold]solodg train[/bold], and as a row of a plan.
    """
    progress, say = shown(quiet)
    with progress.stage("Loading PyTorch"):
        from solodg.bench.search import Search, searches_of

    where = Where.checked(options)
    machine = validated(Machine, options)
    found: list[tuple[Row | None, Search]]
    if Path(options["dataset"]).suffix.lower() in _PLAN_ENDINGS:
        from solodg.bench.plan import read_plan

        _refuse_with_plan(options)
        plan = read_plan(Path(options["dataset"]))
        found = [*searches_of(plan, machine, runs)]
    else:
        config = config_of(options)
        found = [(None, Search(_name(config), config, machine, runs))]
    cells = [cell for _, search in found for cell in search.cells()]
    trainings = len({cell.run_key for cell in cells})
    say(
        f"{sum(len(search.trials) for _, search in found)} trials, {trainings} trainings. Left out "
        "in turn: " + "; ".join(dict.fromkeys(", ".join(s.sources) for _, s in found)) + "."
    )
    failed = run_cells(cells, machine, output, where, progress, say)
    _show(found, output, say)
    if failed:
        err.print(f"{failed} run(s) failed: repeat the command to try them again.", style="red")
        raise typer.Exit(SOME_FAILED)


def _refuse_with_plan(options: dict[str, Any]) -> None:
    """Raises `UserError` for options of training beside a plan, which sets them itself."""
    names = [o.name for o in _OPTIONS if o.name != "dataset"]
    given = [name for name in names if options.get(name) not in (None, [])]
    if given:
        raise UserError(
            f"{', '.join(given)}: a plan sets these itself. Change it there, under run, or give a "
            "dataset in place of the plan."
        )


def _name(config: RunConfig) -> str:
    """Returns the name of the files of a search."""
    from solodg.data.domains import normalise_name

    words = (Path(config.dataset).stem, *config.targets, config.algorithm, config.variant)
    return "-".join(filter(None, map(normalise_name, words)))[:150]


def _show(found: "list[tuple[Row | None, Search]]", output: Path, say: "Say") -> None:
    """Writes and prints the table of every search, and what it chose."""
    from solodg.bench.records import RECORDS, read_results
    from solodg.bench.row import Row
    from solodg.bench.search import best, row_with
    from solodg.storage import write_atomically

    results = read_results(output / RECORDS, say)
    chosen: dict[str, Row] = {}
    for row, search in found:
        outcomes = search.outcomes(results)
        if not outcomes:
            err.print(f"{search.title()}: no trial is complete.", style="red")
            continue
        grid = search.table(outcomes)
        write_atomically(output / "tables" / f"{search.name}.md", grid.markdown().encode())
        out.print(grid.rich())
        winner = best(outcomes)
        out.print(_words(search, winner), markup=False)
        given = row or Row(name=search.config.algorithm, run=_run_of(search.config))
        chosen[given.name] = row_with(chosen.get(given.name, given), search, winner.trial)
    if not chosen:
        return
    text = _yaml(list(chosen.values()))
    path = output / "tables" / f"{found[0][1].name}.yaml"
    write_atomically(path, text.encode())
    out.print("As rows of a plan:")
    out.print(text, markup=False, highlight=False, soft_wrap=True)
    say(f"Rows: {path}")
    say(f"All records: {output / RECORDS}")


def _words(search: "Search", winner: "Outcome") -> str:
    from solodg.runs.tables import percent

    text = (
        f"Best: trial {winner.trial.number}, {percent(winner.mean)}% on "
        f"{len(search.sources)} held-out source domains."
    )
    options = winner.trial.options()
    return f"{text} Options: {options}" if options else f"{text} Its settings are those given."


def _run_of(config: RunConfig) -> dict[str, Any]:
    """Returns the settings of a configuration that were given, for a row of a plan."""
    not_of_rows = {"dataset", "targets", "seed"}
    given = config.model_dump(mode="json", exclude_unset=True, exclude=not_of_rows)
    return {name: value for name, value in given.items() if value not in (None, {}, [])}


def _yaml(rows: "list[Row]") -> str:
    import yaml

    values = [row.model_dump(mode="json", exclude_defaults=True) for row in rows]
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=100)
