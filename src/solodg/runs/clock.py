"""The time that a run takes, over all its beginnings."""

import time
from pathlib import Path

from solodg.runs.folder import read_seconds
from solodg.storage import write_json


class Clock:
    """Counts the seconds of a run, including those before it was killed and resumed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "seconds.json"
        self.before = read_seconds(self.path) if self.path.is_file() else 0.0
        self.started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Returns the seconds so far."""
        return round(self.before + time.perf_counter() - self.started, 1)

    def save(self) -> None:
        """Writes the seconds so far to the folder, for the case that the run is killed."""
        write_json(self.path, {"seconds": self.seconds})

    def discard(self) -> None:
        """Removes the file of a run that is finished."""
        self.path.unlink(missing_ok=True)
