"""Several processes: a failure of the first one ends all of them, with its message."""

import pickle
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision

from solodg.algorithms import ALGORITHMS
from solodg.errors import UserError
from solodg.models.backbones import build_backbone
from solodg.runs.devices import ending_together, on_first
from solodg.runs.fit import Schedule, start
from solodg.storage import hold_lock, try_lock


class TwoProcesses:
    """Stands for Fabric in each of two processes, one after the other."""

    def __init__(self) -> None:
        self.is_global_zero, self.sent = True, b""

    def broadcast(self, value: object) -> object:
        self.sent = pickle.dumps(value) if self.is_global_zero else self.sent
        return pickle.loads(self.sent)


class OddError(Exception):
    """Cannot be sent to another process: it is not made of its message."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} {code}")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("give another"), "give another"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ZeroDivisionError("as if"), "ZeroDivisionError: as if"),
        (OddError("as if", 3), "OddError: as if 3"),
    ],
)
def test_any_failure_of_the_first_process_reaches_the_others(
    error: Exception, message: str
) -> None:
    fabric = TwoProcesses()

    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        on_first(fabric, fail)
    assert raised.value is error
    fabric.is_global_zero = False
    with pytest.raises(UserError, match=message):
        on_first(fabric, lambda: pytest.fail("only the first process works"))


def test_a_failure_ends_the_processes_that_wait_for_it() -> None:
    waiting = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    fabric = SimpleNamespace(strategy=SimpleNamespace(launcher=SimpleNamespace(procs=[waiting])))
    with ending_together(fabric):
        pass
    assert waiting.poll() is None
    with pytest.raises(ZeroDivisionError), ending_together(fabric):
        raise ZeroDivisionError
    assert waiting.wait(timeout=10) != 0


def test_the_gradient_scaler_of_mixed_precision_is_in_the_state(tmp_path: Path) -> None:
    schedule = Schedule(4, 1, 1e-2, 1e-2, 0.0, 0)

    def state():
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[MixedPrecision("16-mixed", "cpu")])
        backbone = build_backbone("small_cnn", channels=3, image_size=32)
        return fabric, start(fabric, ALGORITHMS["erm"](backbone, num_classes=3), schedule)

    fabric, first = state()
    scaler = fabric.strategy.precision.scaler
    scaler.scale(torch.ones(()))  # which makes its tensors
    scaler.update(123.0)
    first.step = 2
    first.save(tmp_path)
    other, resumed = state()
    resumed.restore(other, tmp_path)
    assert resumed.step == 2
    assert other.strategy.precision.scaler.get_scale() == 123.0
    assert other.strategy.precision.state_dict() == fabric.strategy.precision.state_dict()


def test_a_lock_that_was_not_had_leaves_no_file_open(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with try_lock(tmp_path / "lock") as mine, ExitStack() as locks:
        assert mine
        before = open_files()
        assert not any(hold_lock(tmp_path / "lock", locks) for _ in range(20))
        assert open_files() == before
        assert hold_lock(tmp_path / "other", locks)
        with try_lock(tmp_path / "other") as theirs:
            assert not theirs
    with try_lock(tmp_path / "other") as free:
        assert free
