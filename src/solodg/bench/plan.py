"""A plan of experiments: rows of a table x target domains x seeds, read from one YAML file."""

import itertools
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from solodg.adapters import ADAPTERS
from solodg.bench.cell import Cell
from solodg.data import dataset_spec
from solodg.data.domains import normalise_name
from solodg.errors import UserError, unknown_name, validation_error
from solodg.runs.config import RunConfig
from solodg.runs.defaults import resolve
from solodg.runs.stream import Stream, adapter_arguments

_LONGEST_NAME = 200  # of a plan; file systems allow 255 bytes, and names of files have endings


class Row(BaseModel):
    """One method of the table: the settings in which it differs from the plan's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    run: dict[str, Any] = Field(default_factory=dict)  # fields of RunConfig
    # Fields of RunConfig for one target alone, e.g. those chosen on its source domains.
    by_target: dict[str, dict[str, Any]] = Field(default_factory=dict)
    adapter: str = "none"
    stream: Stream | None = None  # of test images; None: all of them in large batches
    sweep: dict[str, list[Any]] = Field(default_factory=dict)  # a row for each combination
    curve: str = ""  # rows that share it are one curve over batch sizes; a sweep sets it
    paper: dict[str, str] = Field(default_factory=dict)  # numbers of the paper, by column

    @field_validator("paper", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {str(name): str(figure) for name, figure in value.items()}

    def swept(self) -> list["Row"]:
        """Returns a row for each combination of the values in `sweep`, or the row itself.

        A sweep lists values of the stream, or of arguments of the adapter.
        """
        if not self.sweep:
            return [self]
        if not all(self.sweep.values()):
            raise ValueError(
                f"row {self.name!r}: a sweep over no value: give each list at least one"
            )
        if "arguments" in self.sweep:
            raise ValueError(
                f"row {self.name!r}: sweep an argument by its own name, e.g. steps: [1, 10]"
            )
        given = self.stream.model_dump(exclude_unset=True) if self.stream else {}
        rows = []
        for values in itertools.product(*self.sweep.values()):
            named = dict(zip(self.sweep, values, strict=True))
            arguments = {k: v for k, v in named.items() if k not in Stream.model_fields}
            stream = given | {k: v for k, v in named.items() if k in Stream.model_fields}
            stream["arguments"] = given.get("arguments", {}) | arguments
            within = [k for k in named if k in ("domains", "batch_size")]  # panels and points
            curves = [_setting_text(k, v) for k, v in named.items() if k not in within]
            curve = ", ".join([self.name, *curves])
            name = ", ".join([curve, *(_setting_text(k, named[k]) for k in within)])
            changes = {"name": name, "curve": self.curve or curve, "sweep": {}}
            rows.append(Row(**self.model_dump() | changes | {"stream": stream}))
        return rows


def _setting_text(name: str, value: Any) -> str:
    """Formats a setting for the name of a row: "10 steps", "batch 16", "mixed"."""
    if name == "steps":
        return f"{value} step" + ("s" if value != 1 else "")
    if name == "domains":
        return str(value)
    return f"{name.removesuffix('_size').replace('_', ' ')} {value}"


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

    @field_validator("rows")
    @classmethod
    def _all_rows(cls, value: list[Row]) -> list[Row]:
        return [row for given in value for row in given.swept()]

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
        if self.targets is None:
            return [spec.default_targets]
        spelled = {normalise_name(name): name for name in spec.domains}
        return [tuple(spelled.get(normalise_name(n), n) for n in names) for names in self.targets]

    def cells(self) -> list[Cell]:
        """Returns all cells, seed by seed, so that a plan stopped early has complete seeds."""
        return [
            self._cell(row, targets, seed)
            for seed in self.seeds
            for targets in self.target_sets()
            for row in self.rows
        ]

    def _cell(self, row: Row, targets: tuple[str, ...], seed: int) -> Cell:
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
        arguments = (self.run.get("arguments") or {}) | (row_settings.get("arguments") or {})
        try:
            config = RunConfig(**values | {"arguments": arguments})
        except ValidationError as error:
            raise validation_error(f"row {row.name!r}", error) from error
        needed = ADAPTERS[row.adapter].trained_by
        if needed not in (None, config.algorithm):
            raise UserError(
                f"row {row.name!r}: adapter {row.adapter} needs algorithm {needed}, not "
                f"{config.algorithm}."
            )
        return Cell(row.name, row.adapter, resolve(config), _with_order(row.stream, seed))

    def _settings_for(self, targets: tuple[str, ...], row: Row) -> dict[str, Any]:
        """Returns the settings that the row has for these targets alone."""
        chosen = {normalise_name(name): values for name, values in row.by_target.items()}
        targets_of_plan = [normalise_name(n) for names in self.target_sets() for n in names]
        for name in chosen:
            if name not in targets_of_plan:
                raise unknown_name(f"target of row {row.name!r}", name, targets_of_plan)
        return next(
            (chosen[normalise_name(name)] for name in targets if normalise_name(name) in chosen), {}
        )


def _with_order(stream: Stream | None, seed: int) -> Stream | None:
    """Gives the stream another order of images for each seed, unless the plan sets the order."""
    if stream is None or "order_seed" in stream.model_fields_set:
        return stream
    return stream.model_copy(update={"order_seed": seed})


def read_plan(path: Path, *, weights: Path | None = None) -> Plan:
    """Reads a plan from its file.

    `weights` is the path, on this machine, of the weights file that the plan names.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read the plan {path}: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a plan: expected a mapping with title, dataset, rows, ...")
    try:
        plan = Plan.model_validate({"name": path.stem} | values)
    except ValidationError as error:
        raise validation_error(str(path), error) from error
    _check_streams(plan, path)
    names = [row.name for row in plan.rows]
    if len(set(names)) != len(names):
        raise UserError(
            f"{path}: two rows have one name, {next(n for n in names if names.count(n) > 1)!r}. "
            "Rename one of them."
        )
    return plan if weights is None else plan.model_copy(update=_with_weights(plan, weights))


def _check_streams(plan: Plan, path: Path) -> None:
    """Raises an error for wrong streams and adapters before anything is trained."""
    points = set()
    for row in plan.rows:
        try:
            adapter_arguments(row.adapter, row.stream.arguments if row.stream else {})
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
        if named and Path(named).name != weights.name:
            raise UserError(f"--weights {weights.name}: the plan asks for weights {named!r}.")
        if not named and not run.get("pretrained"):
            return run
        return {k: v for k, v in run.items() if k != "pretrained"} | {"weights": str(weights)}

    runs = [plan.run, *(row.run for row in plan.rows)]
    if not any(run.get("weights") or run.get("pretrained") for run in runs):
        raise UserError("--weights: this plan starts from random weights and asks for none.")
    rows = [row.model_copy(update={"run": moved(row.run)}) for row in plan.rows]
    return {"run": moved(plan.run), "rows": rows}
