"""The table of a plan: means over seeds with 95% intervals, beside the numbers of the paper.

It is a pure function of plan and records; the order of the records does not matter.
"""

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from solodg.bench.plan import Plan
from solodg.bench.records import Results
from solodg.runs.statistics import MeanInterval, mean_interval
from solodg.runs.tables import UNSEEN_MEAN
from solodg.types import Record

_SEEN_TITLES = {"in-distribution": "in-distribution", "source-validation": "source validation"}

_LATEX = {c: "\\" + c for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "±": r"$\pm$",
    "°": r"$^\circ$",
}


class Column(NamedTuple):
    """A column of the table: a metric on one domain, or its mean over the domains of a role."""

    title: str
    role: str
    domain: str | None = None  # None: mean over domains
    metric: str = "accuracy"
    percent: bool = True


@dataclass(frozen=True)
class Entry:
    """A cell of text; the best ones are shown in bold."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Grid:
    """A table of text, which can be written in several formats."""

    title: str
    header: list[str]
    rows: list[list[Entry]]
    notes: list[str]

    def rich(self) -> Table:
        """Builds the table for the terminal."""
        table = Table(title=self.title, caption="\n".join(self.notes), caption_justify="left")
        for index, name in enumerate(self.header):
            table.add_column(name, justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*(Text(e.text, style="bold" if e.best else "") for e in row))
        return table

    def markdown(self) -> str:
        """Formats the table as Markdown, with its notes as a list below."""
        lines = [f"### {self.title}", "", _line(self.header), "|---" * len(self.header) + "|"]
        lines += [_line([f"**{e.text}**" if e.best else e.text for e in row]) for row in self.rows]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)]) + "\n"

    def latex(self) -> str:
        """Formats the table as a LaTeX `table` with booktabs rules."""
        columns = "l" + "r" * (len(self.header) - 1)
        rows = [" & ".join(_latex_entry(e) for e in row) + r" \\" for row in self.rows]
        return "\n".join(
            [
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{_latex(self.title)}. {_latex(' '.join(self.notes))}}}",
                rf"\begin{{tabular}}{{{columns}}}",
                r"\toprule",
                " & ".join(_latex(name) for name in self.header) + r" \\",
                r"\midrule",
                *rows,
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )

    def csv(self) -> str:
        """Formats header and rows as CSV."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows([[e.text for e in row] for row in self.rows])
        return out.getvalue()


def plan_table(plan: Plan, results: Results) -> Grid:
    """Builds the table of a plan: a row for each method, means over seeds.

    The best method is bold, and so is every method whose 95% interval overlaps with its interval.
    """
    by_row = runs_by_row(plan, results)
    columns = _columns(plan, by_row)
    paper = list(dict.fromkeys(name for row in plan.rows for name in row.paper))
    estimates = [[column_mean(c, by_row[row.name], plan) for c in columns] for row in plan.rows]
    best = [_best([line[i] for line in estimates], c) for i, c in enumerate(columns)]
    rows = []
    for i, (row, line) in enumerate(zip(plan.rows, estimates, strict=True)):
        unseen_mean = line[[c.title for c in columns].index(UNSEEN_MEAN)]
        seeds = unseen_mean.n if unseen_mean else 0
        ours = [_entry(value, columns[k], i in best[k], seeds) for k, value in enumerate(line)]
        theirs = [Entry(row.paper.get(name, "-")) for name in paper]
        rows.append([Entry(row.name), *ours, Entry(str(seeds)), *theirs])
    header = ["method", *(c.title for c in columns), "seeds", *(f"paper: {name}" for name in paper)]
    return Grid(plan.title, header, rows, [*plan.notes, *_remarks(plan, results)])


def runs_by_row(plan: Plan, results: Results) -> dict[str, list[list[Record]]]:
    """Returns for each row the records of its finished cells."""
    found: dict[str, list[list[Record]]] = {row.name: [] for row in plan.rows}
    for cell in plan.cells():
        if cell.key in results.done:
            found[cell.row].append(results.done[cell.key])
    return found


def records_of(plan: Plan, results: Results) -> list[Record]:
    """Returns the records of all finished cells of a plan."""
    return [record for cell in plan.cells() for record in results.done.get(cell.key, [])]


def column_mean(
    column: Column, runs: Sequence[Sequence[Record]], plan: Plan
) -> MeanInterval | None:
    """Returns the mean of a column over seeds.

    For a mean over targets, a seed counts only if all of its targets are done.
    """
    seeds: dict[int, list[float]] = {}
    complete: dict[int, int] = {}
    for records in runs:
        seed = records[0].seed
        complete[seed] = complete.get(seed, 0) + 1
        seeds.setdefault(seed, []).extend(
            r.metrics[column.metric]
            for r in records
            if r.role == column.role and column.domain in (None, r.domain)
        )
    needed = 1 if column.domain else len(plan.target_sets())
    values = [
        statistics.mean(found)
        for seed, found in sorted(seeds.items())
        if found and complete[seed] >= needed
    ]
    return mean_interval([100 * v if column.percent else v for v in values])


def _columns(plan: Plan, by_row: dict[str, list[list[Record]]]) -> list[Column]:
    """Returns the columns: unseen domains, their mean, seen domains, calibration."""
    records = [r for runs in by_row.values() for one in runs for r in one]
    found = {r.domain for r in records if r.role == "target"}
    named = [domain for targets in plan.target_sets() for domain in targets]
    ordered = [d for d in named if d in found] + sorted(found - set(named))
    columns = [Column(f"unseen {d}", "target", d) for d in ordered] if len(ordered) <= 6 else []
    columns.append(Column(UNSEEN_MEAN, "target"))
    roles = {r.role for r in records}
    columns += [Column(title, role) for role, title in _SEEN_TITLES.items() if role in roles]
    columns.append(Column("unseen NLL", "target", None, "nll", percent=False))
    columns.append(Column("unseen ECE %", "target", None, "ece"))
    return columns


def _entry(value: MeanInterval | None, column: Column, best: bool, seeds: int) -> Entry:
    if value is None:
        return Entry("-")
    text = value.text(1 if column.percent else 3)
    return Entry(text if value.n == seeds else f"{text} (n = {value.n})", best)


def _best(values: Sequence[MeanInterval | None], column: Column) -> set[int]:
    """Returns the rows whose interval overlaps that of the best; none if one has no interval."""
    found = {i: v for i, v in enumerate(values) if v is not None}
    if len(found) < 2 or any(v.half is None for v in found.values()):
        return set()
    if column.metric == "accuracy":
        top = max(found.values(), key=lambda v: v.mean)
        return {i for i, v in found.items() if v.high >= top.low}
    top = min(found.values(), key=lambda v: v.mean)
    return {i for i, v in found.items() if v.low <= top.high}


def _remarks(plan: Plan, results: Results) -> list[str]:
    cells = plan.cells()
    done = sum(cell.key in results.done for cell in cells)
    failed = sum(cell.key in results.failed for cell in cells)
    seconds = sum(
        {
            cell.run_key: results.done[cell.key][0].time.get("training_seconds", 0.0)
            for cell in cells
            if cell.key in results.done
        }.values()
    )
    remarks = [
        "accuracy in %, mean over seeds ± half of the 95% interval (Student t); bold: the best, "
        "and all whose interval overlaps with that of the best; figures of the paper are theirs"
    ]
    if done < len(cells):
        remarks.append(f"{done} of {len(cells)} cells done, {failed} failed")
    remarks.append(f"training took {seconds / 60:.1f} minutes in all")
    records = records_of(plan, results)
    for name in sorted({name for r in records for name in r.data} - {"fingerprint", "images"}):
        found = sorted({str(r.data.get(name)) for r in records})
        if len(found) > 1:
            remarks.append(f"**the records are not of one dataset**: {name} is {', '.join(found)}")
    return remarks


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _latex_entry(entry: Entry) -> str:
    text = _latex(entry.text)
    return rf"\textbf{{{text}}}" if entry.best else text
