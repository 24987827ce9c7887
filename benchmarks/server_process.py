"""`solodg serve` in a process of its own, at a free port of the loopback address.

Benchmarks, tests and the torture start their servers with it.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

START_SECONDS, STOP_SECONDS = 120, 60


class Server(NamedTuple):
    """A running server, and the file that it writes its messages to."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def host(self) -> str:
        """Returns the address that the server listens at."""
        return self.url.removeprefix("http://").rpartition(":")[0]

    @property
    def port(self) -> int:
        """Returns the port that the server listens at."""
        return int(self.url.rstrip("/").rpartition(":")[2])

    def memory(self) -> "Memory":
        """Returns how much memory the server has."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
        return Memory(int(sizes["VmRSS"]) / 1024, int(sizes["VmHWM"]) / 1024)


class Memory(NamedTuple):
    """Resident memory of a process in megabytes: now, and the most that it has ever had."""

    now: float
    peak: float


@contextmanager
def served(model: Path, *options: str, **environment: str) -> Iterator[Server]:
    """Starts a server and yields it once it answers; stops it in the end."""
    command = [sys.executable, "-m", "solodg", "serve", str(model), "--port", "0", *options]
    with tempfile.TemporaryDirectory() as scratch:
        # A file and not a pipe: a pipe that nobody reads would stop a server that says much.
        log = Path(scratch) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stderr=file, env=os.environ | environment)
        try:
            yield Server(_address(process, log), process, log)
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Waits until the server says where it listens."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        if found := re.search(r"http://\S+(?=\s)", log.read_text(errors="replace")):
            return found[0]
        if ended:
            break
        time.sleep(0.02)
    raise AssertionError(f"the server did not start: {log.read_text(errors='replace')}")
