"""Commands in forked children: this process has imported everything, so a child starts at once.

To import torch takes seconds, to fork takes milliseconds. It is safe as long as this process has
one thread, which `preload` checks: a lock that another thread holds would be locked forever in the
child. So this process never trains, and never opens an ONNX session.
"""

import contextlib
import ctypes
import importlib
import os
import pkgutil
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from torture.tally import Tally

Case = TypeVar("Case")
# Not onnxruntime, whose import starts a thread.
LATE = ("sklearn.metrics", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg",
        "onnx", "torch.onnx", "torch.utils.tensorboard", "timm")  # fmt: skip
COMMAND_SECONDS = 120.0  # longer is a failure
MEMORY = 12 * 1024**3  # bytes of address space; a command that asks for more fails, not the machine
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def preload() -> None:
    """Imports every module that a command may need, in this process, and checks its threads."""
    import solodg
    from solodg.torchvision_shim import make_torchvision_importable

    make_torchvision_importable()
    for module in pkgutil.walk_packages(solodg.__path__, "solodg."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("the torture must have one thread: set OMP_NUM_THREADS=1.")


class Finished(NamedTuple):
    """How a command ended; a negative code is the number of a signal."""

    code: int
    out: str
    err: str

    def problem(self, allowed: Sequence[int] = (0, 2)) -> str | None:
        """Returns what is wrong with the way the command ended, or None.

        Wrong are a traceback, an exit code that is not allowed, and an error of no or several
        lines.
        """
        if "Traceback (most recent call last)" in self.err:
            return f"a traceback: {last_line(self.err)}"
        if self.code not in allowed:
            return f"exit code {self.code}: {last_line(self.err)}"
        if self.code == 2:
            errors = [x for x in self.err.splitlines() if x.startswith("error:")]
            if len(errors) != 1 or not last_line(self.err).startswith("error:"):
                return f"exit code 2 without one line of error: {self.err[-300:]!r}"
        return None


def last_line(text: str) -> str:
    """Returns the last line that is not empty."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


class Child:
    """A command that runs in a forked child of this process."""

    def __init__(
        self, arguments: Sequence[object], before: Callable[[], None] = lambda: None
    ) -> None:
        """Starts `solodg ARGUMENTS`; `before` is called in the child first."""
        self.code: int | None = None
        self._out, self._err = bytearray(), bytearray()
        # Pipes and not files, since the size of a child's files may be limited.
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run([str(x) for x in arguments], before, out_end, err_end)
        self._pipes = {out: self._out, err: self._err}
        for pipe, end in ((out, out_end), (err, err_end)):
            os.close(end)
            os.set_blocking(pipe, False)

    def _read(self) -> None:
        """Reads what the command has written, so that its pipes are never full."""
        for pipe, said in self._pipes.items():
            with contextlib.suppress(BlockingIOError):
                while content := os.read(pipe, 1 << 16):
                    said += content

    def poll(self) -> int | None:
        """Returns the exit code, or None while the command runs."""
        if self.code is None:
            self._read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def signal(self, number: int) -> None:
        """Sends a signal, unless the command has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends the command by SIGKILL and waits for its end."""
        self.signal(signal.SIGKILL)
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def said(self) -> str:
        """Returns what the command has written to stderr so far."""
        self._read()
        return self._err.decode(errors="replace")

    def finish(self, seconds: float = COMMAND_SECONDS) -> Finished:
        """Waits for the end. A command that takes too long is killed, which shows in its code."""
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
            time.sleep(0.002)
        self._read()
        finished = Finished(self.poll() or 0, self._out.decode(errors="replace"), self.said())
        self.close()
        return finished

    def close(self) -> None:
        """Closes the pipes; nothing more can be read."""
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes = {}


def run(*arguments: object, before: Callable[[], None] = lambda: None) -> Finished:
    """Runs a command to its end."""
    return Child(arguments, before).finish()


def _run(arguments: list[str], before: Callable[[], None], out: int, err: int) -> None:
    """Runs a command in the child, and ends the child as Python would."""
    code = 1
    try:
        _die_with_parent()
        os.dup2(out, 1)
        os.dup2(err, 2)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        before()
        from solodg.cli import main

        sys.argv = ["solodg", *arguments]
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


class Lane:
    """Work in a forked child of this process that returns a tally."""

    def __init__(self, work: Callable[[Tally], None], scratch: Path) -> None:
        """Starts the work; `scratch` is a folder for the file that the tally comes back in."""
        self.path = Path(tempfile.mkdtemp(dir=scratch)) / "tally.json"
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            _die_with_parent()
            tally = Tally()
            try:
                work(tally)
            except Exception:
                tally.check(False, f"the torture itself failed: {traceback.format_exc()}")
            tally.write(self.path)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def wait(self) -> Tally:
        """Waits for the end of the work, which is killed if this is interrupted."""
        try:
            _, status = os.waitpid(self.pid, 0)
        except BaseException:  # the time is up, or Ctrl-C
            self.kill()
            raise
        if status:
            tally = Tally()
            tally.check(False, f"a process of the torture ended with status {status}")
            return tally
        return Tally.read(self.path)

    def kill(self) -> None:
        """Ends the work, and with it the commands that it runs."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def in_lanes(
    cases: Sequence[Case], work: Callable[[Tally, Sequence[Case], Path], None], scratch: Path,
    tally: Tally, lanes: int = 2,
) -> None:  # fmt: skip
    """Shares cases between processes, each with a folder of its own, and adds up their tallies."""
    running = []
    for number in range(lanes):
        folder = scratch / f"lane-{number}"
        folder.mkdir(parents=True)
        share = cases[number::lanes]
        running.append(Lane(partial(_share, work, share, folder), scratch))
    while running:
        lane = running.pop()
        try:
            tally.add(lane.wait())
        except BaseException:
            for other in running:
                other.kill()
            raise


def _share(
    work: Callable[[Tally, Sequence[Case], Path], None],
    cases: Sequence[Case],
    folder: Path,
    tally: Tally,
) -> None:
    work(tally, cases, folder)
