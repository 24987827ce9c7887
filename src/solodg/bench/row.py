"""A row of a plan: one method, and the rows that its sweep makes."""

import itertools
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from solodg.data.domains import normalise_name
from solodg.runs.stream import Stream


class Row(BaseModel):
    """One method of the table: the settings in which it differs from the plan's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    run: dict[str, Any] = Field(default_factory=dict)  # fields of RunConfig
    # Fields of RunConfig for one target alone, e.g. those chosen on its source domains.
    by_target: dict[str, dict[str, Any]] = Field(default_factory=dict)
    adapter: str = "none"
    # Arguments of the adapter for one target alone, e.g. those chosen on its source domains.
    adapter_by_target: dict[str, dict[str, Any]] = Field(default_factory=dict)
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


def for_target(by_target: dict[str, dict[str, Any]], targets: tuple[str, ...]) -> dict[str, Any]:
    """Returns the settings of the first of these targets that has any of its own, or none."""
    own = {normalise_name(name): values for name, values in by_target.items()}
    return next((own[normalise_name(n)] for n in targets if normalise_name(n) in own), {})


def _setting_text(name: str, value: Any) -> str:
    """Formats a setting for the name of a row: "10 steps", "batch 16", "mixed"."""
    if name == "steps":
        return f"{value} step" + ("s" if value != 1 else "")
    if name == "domains":
        return str(value)
    return f"{name.removesuffix('_size').replace('_', ' ')} {value}"
