"""What a run folder says of the runs whose weights its model is the mean of: `averaged.json`."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from solodg.storage import read_json

AVERAGED = "averaged.json"


class AveragedRun(BaseModel):
    """A run of an average: the name of its folder, its selected step and validation scores."""

    model_config = ConfigDict(extra="forbid")

    run: str
    seed: int
    step: int
    validation: dict[str, float]
    settings: dict[str, Any]  # that differ from those of the best run

    def __str__(self) -> str:
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        accuracy = f"source validation {100 * self.validation['accuracy']:.1f}%"
        return f"{self.run} (step {self.step}, {accuracy}{settings and ', '}{settings})"


class AveragedRuns(BaseModel):
    """The runs of an average, best first by source validation, and those left out of it."""

    model_config = ConfigDict(extra="forbid")

    selection: str  # uniform or greedy
    runs: list[AveragedRun]
    left_out: list[AveragedRun]


def read_averaged(folder: Path) -> AveragedRuns | None:
    """Reads of which runs the model in a folder is the mean; None if it was trained."""
    path = folder / AVERAGED
    return read_json(path, AveragedRuns) if path.is_file() else None
