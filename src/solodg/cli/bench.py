"""`solodg bench`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from solodg.cli.cells import SOME_FAILED, WHERE_OPTIONS, Where, run_cells
from solodg.cli.config_options import validated, with_options
from solodg.cli.console import err, out, shown
from solodg.cli.options import Quiet
from solodg.errors import UserError
from solodg.runs.config import Machine

if TYPE_CHECKING:
    from solodg.bench.plan import Plan
    from solodg.progress import Progress, Say


@with_options(*WHERE_OPTIONS)
def bench(
    config: Annotated[
        Path | None, typer.Argument(help="A plan, e.g. configs/quick/ablation.yaml.")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Folder for records, runs and tables; plans may share it.")
    ] = Path("runs/bench"),
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show what would be run, and estimate how long it takes."),
    ] = False,
    table_only: Annotated[
        bool,
        typer.Option("--table-only", help="Run nothing; write the table of the records so far."),
    ] = False,
    records: Annotated[
        Path | None,
        typer.Option(help="With --table-only: a file of records other than OUTPUT/results.jsonl."),
    ] = None,
    verify: Annotated[
        str | None,
        typer.Option(
            metavar="FILE[:LINE]",
            help="Only repeat the run of one record, and say whether the numbers agree.",
        ),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Path of the weights file that the plan names.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="With --verify: path of your own images, if the record is of such."),
    ] = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Run a plan (methods x targets x seeds), record the scores and write a table.

    A plan may name several datasets: its table then compares the methods on each target.

    After an interruption the same command continues where it stopped. A cell is one method, target
    and seed. A finished cell is never run twice, and plans with the same --output share their runs.
    If a cell fails, the others still run, and the exit code is 1.

    --verify gives one of three verdicts: equal to the last bit; the same data on another kind of
    machine, differing by no more than seeds do, or by more; other data or code. The exit code is 0
    for the first, and for the second where the file has two other seeds of the run and the
    difference is inside their spread, else 1.
    """
    machine, (progress, say) = validated(Machine, options), shown(quiet)
    if verify is not None:
        _verify(verify, machine, weights, dataset, progress)
        return
    if config is None:
        raise UserError("give a plan, e.g. solodg bench configs/quick/ablation.yaml.")
    where = Where.checked(options)
    with progress.stage("Loading PyTorch"):
        from solodg.bench.plan import read_plans

    plans = read_plans(config, weights=weights)
    if dry_run:
        for plan in plans:
            _show_plan(plan, machine, output, progress)
        return
    _check_records(records, table_only)
    # Seed by seed over all plans, so that a command stopped early leaves complete seeds.
    cells = sorted((c for plan in plans for c in plan.cells()), key=lambda c: c.config.seed)
    failed = 0 if table_only else run_cells(cells, machine, output, where, progress, say)
    with progress.stage("Writing tables"):
        if len(plans) > 1:
            _write_comparison(config.stem, plans, output, records, say)
        else:
            _write_tables(plans[0], output, records, say)
    if failed:
        err.print(f"{failed} cell(s) failed: repeat the command to try them again.", style="red")
        raise typer.Exit(SOME_FAILED)


def _check_records(records: Path | None, table_only: bool) -> None:
    if records is not None and not table_only:
        raise UserError("--records is for --table-only: new records go to OUTPUT/results.jsonl.")
    if records is not None and not records.is_file():
        raise UserError(f"no file of records at {records}.")


def _write_comparison(
    name: str, plans: list["Plan"], output: Path, records: Path | None, say: "Say"
) -> None:
    from solodg.bench.comparison import comparison_table
    from solodg.bench.records import RECORDS, read_results
    from solodg.bench.table import records_of
    from solodg.storage import write_atomically, write_lines

    file = records or output / RECORDS
    results = read_results(file, say)
    grid = comparison_table(plans[0].title.rpartition(": ")[0], plans, results)
    folder = output / "tables"
    write_atomically(folder / f"{name}.md", grid.markdown().encode())
    write_atomically(folder / f"{name}.tex", grid.latex().encode())
    write_atomically(folder / f"{name}.csv", grid.csv().encode())
    own = [record.model_dump() for plan in plans for record in records_of(plan, results)]
    write_lines(folder / f"{name}.jsonl", own)
    out.print(grid.rich())
    say(f"Table: {folder / name}.md, .tex, .csv; its records: .jsonl")
    say(f"All records: {file}")


def _write_tables(plan: "Plan", output: Path, records: Path | None, say: "Say") -> None:
    from solodg.bench.page import POINTS_LABEL, plan_points, write_plan_page
    from solodg.bench.records import RECORDS, read_results
    from solodg.bench.stream_curves import draw_streams, stream_table
    from solodg.bench.table import plan_table, records_of
    from solodg.figures.plots import plan_figure
    from solodg.storage import write_atomically, write_lines

    file = records or output / RECORDS
    results = read_results(file, say)
    grid = plan_table(plan, results)
    folder = output / "tables"
    by_stream = stream_table(plan, results)
    for table, name in ((grid, plan.name), (by_stream, f"{plan.name}-streams")):
        if table is not None:
            write_atomically(folder / f"{name}.md", table.markdown().encode())
            write_atomically(folder / f"{name}.tex", table.latex().encode())
            write_atomically(folder / f"{name}.csv", table.csv().encode())
    plan_records = [record.model_dump() for record in records_of(plan, results)]
    write_lines(folder / f"{plan.name}.jsonl", plan_records)
    points = plan_points(plan, results)
    if points:
        plan_figure(plan.title, POINTS_LABEL, points, folder / f"{plan.name}.png")
    streams = draw_streams(plan, results, folder)
    page = write_plan_page(plan, results, output, streams)
    out.print((by_stream or grid).rich())
    say(f"Tables: {folder / plan.name}.md, .tex, .csv, .png; its records: .jsonl")
    if by_stream is not None:
        say(f"By batch size and stream: {folder / plan.name}-streams.md, .tex, .csv")
    say(f"Page: {page}")
    say(f"All records: {file}")


def _show_plan(plan: "Plan", machine: Machine, output: Path, progress: "Progress") -> None:
    from rich.table import Table

    from solodg.bench.duration import estimate_training_seconds
    from solodg.bench.records import RECORDS, read_results
    from solodg.bench.runner import format_seconds

    results = read_results(output / RECORDS, err.print)
    cells = plan.cells()
    seconds = estimate_training_seconds(cells, machine, results, progress)
    table = Table(title=plan.title)
    for name in ("method", "target", "seed", "steps", "state", "about"):
        table.add_column(name)
    left: dict[str, float] = {}  # by training, which several cells may share
    for cell in cells:
        state = "done" if cell.key in results.done else "to do"
        if cell.key in results.failed:
            state = "failed before"
        time = seconds.get(cell.run_key)
        if state != "done":
            left[cell.run_key] = time or 0.0
        shown = "-" if state == "done" else "?" if time is None else format_seconds(time)
        targets = " ".join(cell.config.targets)
        table.add_row(
            cell.row, targets, str(cell.config.seed), str(cell.config.steps), state, shown
        )
    out.print(table)
    todo = sum(cell.key not in results.done for cell in cells)
    in_all = format_seconds(sum(left.values()))
    out.print(f"{todo} of {len(cells)} cells to do, about {in_all} on this machine.")
    if any(cell.adapter != "none" and cell.key not in results.done for cell in cells):
        out.print(
            "Adaptation at test time is not included: a step takes about as long as in training."
        )


def _verify(
    where: str, machine: Machine, weights: Path | None, dataset: str | None, progress: "Progress"
) -> None:
    from rich.table import Table

    with progress.stage("Loading PyTorch"):
        from solodg.bench.verdict import compare, environment_changes
        from solodg.bench.verify import read_record, records_beside, repeat

    record = read_record(where)
    repeated = repeat(record, machine, progress, weights=weights, dataset=dataset)
    verdict = compare(record, repeated, records_beside(where))
    table = Table(
        title=f"{record.algorithm} ({record.variant}), {record.domain}, seed {record.seed}"
    )
    for name in ("", "recorded", "repeated", "difference", "spread of seeds"):
        table.add_column(name, justify="right" if name else "left")
    for name, value in record.metrics.items():
        now, spread = repeated.metrics.get(name, float("nan")), verdict.spread.get(name)
        shown = "-" if spread is None else f"{spread:.2g}"
        table.add_row(name, f"{value:.6g}", f"{now:.6g}", f"{now - value:+.2g}", shown)
    out.print(table)
    for change in environment_changes(record, repeated):
        out.print(change)
    if not verdict.ok:
        err.print(str(verdict), style="red")
        raise typer.Exit(SOME_FAILED)
    out.print(str(verdict))
