"""A plan of experiments: rows of a table x target domains x seeds, read from one YAML file."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from solodg.adapters import ADAPTERS
from solodg.bench.cell import Cell
from solodg.bench.row import Row, for_target
from solodg.bench.yaml_file import read_yaml
from solodg.data import DATASETS, dataset_spec
from solodg.data.domains import normalise_name
from solodg.errors import UserError, unknown_name, validation_error
from solodg.runs.config import RunConfig
from solodg.runs.defaults import resolve
from solodg.runs.stream import Stream, adapter_arguments

MAX_CELLS = 100_000  # of a plan
_LONGEST_NAME = 200  # of a plan; file systems allow 255 bytes, and names of files have endings


class Plan(BaseModel):
    """The experiments of one table: rows x target domains x seeds.

    `targets` is "each" (every domain in turn), or a list of domains or of sets of domains that
    are left out together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # of its files in the output folder
    title: str
    dataset: str
    targets: Literal["each"] | list[list[str]] | None = None  # None: the dataset's default
    seeds: list[int] = Field(min_length=1)
    run: dict[str, Any] = Field(default_factory=dict)  # fields of RunConfig, for all rows
    rows: list[Row] = Field(min_length=1)
    notes: list[str] = Field(default_factory=list)  # under the table: settings, differences

    @field_validator("name")
    @classmethod
    def _is_file_name(cls, value: str) -> str:
        """Keeps the plan's files in the output folder."""
        refused = re.search(r"^[.]|^$|[/\\]", value) or not value.isprintable()
        if refused or len(value.encode()) > _LONGEST_NAME:
            raise ValueError(
                f"{value[:80]!r} cannot name files: a name has 1 to {_LONGEST_NAME} bytes, no "
                "slash and no control character, and does not begin with a dot"
            )
        return value

    @field_validator("targets", mode="before")
    @classmethod
    def _as_names(cls, value: Any) -> Any:
        """Reads `[photo, sketch]` as one target at a time, and numbers such as 90 as names."""
        if not isinstance(value, list):
            return value
        if not value:
            raise ValueError("no target in the list; leave the line out for the dataset's default")
        sets = [entry if isinstance(entry, list) else [entry] for entry in value]
        return [[str(name) for name in entry] for entry in sets]

    @model_validator(mode="after")
    def _all_rows(self) -> "Plan":
        """Puts the rows of every sweep in its place, once their cells are counted."""
        counts = (math.prod(len(values) for values in row.sweep.values()) for row in self.rows)
        cells = sum(counts) * self._count_target_sets() * len(self.seeds)
        if cells > MAX_CELLS:
            raise ValueError(
                f"{cells:,} cells, at most {MAX_CELLS:,} are allowed: sweep fewer values, or "
                "divide the plan"
            )
        rows = [row for given in self.rows for row in given.swept()]
        object.__setattr__(self, "rows", rows)  # a plan is frozen for everyone else
        return self

    def _count_target_sets(self) -> int:
        if isinstance(self.targets, list):
            return len(self.targets)
        named = self.targets == "each" and self.dataset in DATASETS
        return len(DATASETS[self.dataset].domains) if named else 1

    @field_validator("seeds")
    @classmethod
    def _once_each(cls, value: list[int]) -> list[int]:
        if len(set(value)) != len(value):
            raise ValueError("a seed is listed twice: each may be there once")
        return value

    def target_sets(self) -> list[tuple[str, ...]]:
        """Returns the sets of domains that are left out, spelled as the dataset spells them."""
        spec = dataset_spec(self.dataset)
        if self.targets == "each":
            if not spec.domains:
                raise UserError(
                    f"plan {self.name!r}: targets: each needs a dataset by name; list the domains."
                )
            return [(domain,) for domain in spec.domains]
        given = [spec.default_targets] if self.targets is None else self.targets
        if not all(given):
            raise UserError(
                f"plan {self.name!r}: name the domains to leave out, e.g. targets: [[DOMAIN]]; "
                f"{self.dataset} has no default target."
            )
        spelled = {normalise_name(name): name for name in spec.domains}
        return [tuple(spelled.get(normalise_name(n), n) for n in names) for names in given]

    def cells(self) -> list[Cell]:
        """Returns all cells, seed by seed, so that a plan stopped early has complete seeds."""
        return [
            self._cell(row, targets, seed)
            for seed in self.seeds
            for targets in self.target_sets()
            for row in self.rows
        ]

    def given(self, row: Row, targets: tuple[str, ...], seed: int) -> dict[str, Any]:
        """Returns the fields of `RunConfig` that plan and row give a cell."""
        row_settings = row.run | self._settings_for(targets, row)
        for name in ("dataset", "targets", "seed", "devices", "num_nodes"):
            if name in self.run or name in row_settings:
                raise UserError(
                    f"row {row.name!r}: {name} cannot be set under run. dataset, targets and "
                    "seeds are keys of the plan; each run has one device (--on ray runs many)."
                )
        values = (
            self.run | row_settings | {"dataset": self.dataset, "targets": targets, "seed": seed}
        )
        given = [run.get("arguments") or {} for run in (self.run, row_settings)]
        if all(isinstance(arguments, dict) for arguments in given):  # RunConfig refuses others
            values["arguments"] = given[0] | given[1]
        return values

    def _cell(self, row: Row, targets: tuple[str, ...], seed: int) -> Cell:
        try:
            config = RunConfig(**self.given(row, targets, seed))
        except ValidationError as error:
            raise validation_error(f"row {row.name!r}", error) from error
        needed = ADAPTERS[row.adapter].trained_by
        if needed not in (None, config.algorithm):
            raise UserError(
                f"row {row.name!r}: adapter {row.adapter} needs algorithm {needed}, not "
                f"{config.algorithm}."
            )
        stream = _with_order(self.stream_of(row, targets), seed)
        return Cell(row.name, row.adapter, resolve(config), stream)

    def stream_of(self, row: Row, targets: tuple[str, ...]) -> Stream | None:
        """Returns the stream of a row, with the arguments that its adapter has for these targets.

        The order of images is that of the row: `cells` gives each seed another.
        """
        self._check_targets(row.adapter_by_target, row)
        own = for_target(row.adapter_by_target, targets)
        if not own:
            return row.stream
        stream = row.stream or Stream()
        return stream.model_copy(update={"arguments": stream.arguments | own})

    def _settings_for(self, targets: tuple[str, ...], row: Row) -> dict[str, Any]:
        """Returns the settings that the row has for these targets alone."""
        self._check_targets(row.by_target, row)
        return for_target(row.by_target, targets)

    def _check_targets(self, names: Iterable[str], row: Row) -> None:
        """Raises an error for settings of a target that the plan does not have."""
        known = [normalise_name(n) for targets in self.target_sets() for n in targets]
        for name in map(normalise_name, names):
            if name not in known:
                raise unknown_name(f"target of row {row.name!r}", name, known)


def _with_order(stream: Stream | None, seed: int) -> Stream | None:
    """Gives the stream another order of images for each seed, unless the plan sets the order."""
    if stream is None or "order_seed" in stream.model_fields_set:
        return stream
    return stream.model_copy(update={"order_seed": seed})


def read_plan(path: Path, *, weights: Path | None = None) -> Plan:
    """Reads a plan from its file.

    `weights` is the path, on this machine, of the weights file that the plan names.
    """
    values = _mapping(path)
    if "datasets" in values:
        raise UserError(f"{path} is a plan of several datasets: run it with solodg bench.")
    return _checked(values, path, weights)


def read_plans(path: Path, *, weights: Path | None = None) -> list[Plan]:
    """Reads a plan, or one for each of the `datasets` of a file, which maps them to targets."""
    values = _mapping(path)
    datasets = values.pop("datasets", None)
    if datasets is None:
        return [_checked(values, path, weights)]
    if not isinstance(datasets, dict) or not datasets or {"dataset", "targets"} & set(values):
        raise UserError(
            f"{path}: datasets maps names of datasets to lists of targets, e.g. "
            "{digits-size: [medium, moved]}, and takes the place of dataset and targets."
        )
    name, title = values.get("name", path.stem), values.get("title", path.stem)
    return [
        _checked(
            values
            | {"name": f"{name}-{dataset}", "title": f"{title}: {dataset}"}
            | {"dataset": dataset, "targets": targets},
            path,
            weights,
        )
        for dataset, targets in datasets.items()
    ]


def _mapping(path: Path) -> dict[str, Any]:
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a plan: expected a mapping with title, dataset, rows, ...")
    return values


def _checked(values: dict[str, Any], path: Path, weights: Path | None) -> Plan:
    try:
        plan = Plan.model_validate({"name": path.stem} | values)
    except ValidationError as error:
        raise validation_error(str(path), error) from error
    _check_streams(plan, path)
    name, count = Counter(row.name for row in plan.rows).most_common(1)[0]
    if count > 1:
        raise UserError(f"{path}: {count} rows have one name, {name!r}. Rename one of them.")
    return plan if weights is None else plan.model_copy(update=_with_weights(plan, weights))


def _check_streams(plan: Plan, path: Path) -> None:
    """Raises an error for wrong streams and adapters before anything is trained."""
    points = set()
    for row in plan.rows:
        try:
            given = row.stream.arguments if row.stream else {}
            for own in ({}, *row.adapter_by_target.values()):
                adapter_arguments(row.adapter, given | own)
        except UserError as error:
            fields = ", ".join(name for name in Stream.model_fields if name != "arguments")
            hint = f" A stream has {fields}." if row.stream else ""
            raise UserError(f"{path}: row {row.name!r}: {error}{hint}") from error
        if row.curve and row.stream:
            point = (row.curve, row.stream.domains, row.stream.batch_size)
            if point in points:
                raise UserError(
                    f"{path}: row {row.name!r}: curve {row.curve!r} has another row with the same "
                    "batch size and stream."
                )
            points.add(point)


def _with_weights(plan: Plan, weights: Path) -> dict[str, Any]:
    """Returns the fields of the plan that change when its weights are read from a file.

    The file also takes the place of published weights.
    """

    def moved(run: dict[str, Any]) -> dict[str, Any]:
        named = run.get("weights")
        if named and Path(str(named)).name != weights.name:
            raise UserError(f"--weights {weights.name}: the plan asks for weights {named!r}.")
        if not named and not run.get("pretrained"):
            return run
        return {k: v for k, v in run.items() if k != "pretrained"} | {"weights": str(weights)}

    runs = [plan.run, *(row.run for row in plan.rows)]
    if not any(run.get("weights") or run.get("pretrained") for run in runs):
        raise UserError("--weights: this plan starts from random weights and asks for none.")
    rows = [row.model_copy(update={"run": moved(row.run)}) for row in plan.rows]
    return {"run": moved(plan.run), "rows": rows}
