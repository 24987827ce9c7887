"""The tally of a part of the torture: what was checked, what failed, and the figures to show."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TextIO


@dataclass
class Tally:
    """Counts checks and keeps a line for each that failed."""

    # Failures are written here at once, by all processes: one that is ended early leaves its own.
    log: ClassVar[TextIO | None] = None

    checks: int = 0
    failures: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # of anything worth a figure
    figures: list[str] = field(default_factory=list)  # sentences for the table

    def check(self, holds: bool, failure: str) -> bool:
        """Counts a check; keeps `failure` where it does not hold. Returns whether it holds."""
        self.checks += 1
        if not holds:
            self.failures.append(failure)
            if self.log is not None:
                self.log.write(failure.strip().replace("\n", "\n  ") + "\n")
                self.log.flush()
        return holds

    def add(self, other: "Tally") -> None:
        """Adds the tally of another process."""
        self.checks += other.checks
        self.failures += other.failures
        self.counts += other.counts
        self.figures += other.figures

    def write(self, path: Path) -> None:
        """Writes the tally as JSON, for the process that reads it with `read`."""
        path.write_text(json.dumps(vars(self)))

    @classmethod
    def read(cls, path: Path) -> "Tally":
        """Reads what `write` wrote."""
        values = json.loads(path.read_text())
        return cls(**values | {"counts": Counter(values["counts"])})
