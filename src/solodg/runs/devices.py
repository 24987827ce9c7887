"""Devices and processes, set up by Lightning Fabric."""

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from lightning_fabric import Fabric

from solodg.errors import UserError
from solodg.runs.config import Machine, ResolvedConfig

Result = TypeVar("Result")


def launch(config: ResolvedConfig, machine: Machine) -> Fabric:
    """Starts the processes of a training, one for each device, and returns their Fabric."""
    number = config.devices.lstrip("-").isdigit()
    devices: Any = int(config.devices) if number else config.devices
    try:
        fabric = Fabric(
            accelerator=machine.accelerator,
            devices=devices,
            num_nodes=config.num_nodes,
            strategy=machine.strategy,
            precision=config.precision,
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"cannot set up the devices: {error}") from error
    fabric.launch()
    if fabric.world_size > 1:
        atexit.register(_end_process_group)
    return fabric


def _end_process_group() -> None:
    """Ends the threads of the process group, which may abort a process that exits before them."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def single_device(accelerator: str) -> torch.device:
    """Returns one device of a kind ("cpu", "gpu", "auto"): evaluation is not distributed."""
    try:
        device: torch.device = Fabric(accelerator=accelerator, devices=1).device
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"cannot set up the device: {error}") from error
    return device


def on_first(fabric: Fabric, work: Callable[[], Result]) -> Result:
    """Calls `work` in the first process; all processes return its result, or raise its error.

    If only the first process raised the error, the others would wait for it forever. They raise a
    `UserError` with its message, since not every exception can be sent.
    """
    result: Any = None
    failure: Exception | None = None
    if fabric.is_global_zero:
        try:
            result = work()
        except Exception as error:
            failure = error
    result, message = fabric.broadcast((result, None if failure is None else _message(failure)))
    if failure is not None:
        raise failure
    if message is not None:
        raise UserError(message)
    return result  # type: ignore[no-any-return]


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


@contextmanager
def ending_together(fabric: Fabric) -> Iterator[None]:
    """Ends the processes that this one has started if it fails, since they would wait for it.

    Processes that torchrun or a cluster has started are ended by these.
    """
    try:
        yield
    except BaseException:
        for process in getattr(fabric.strategy.launcher, "procs", []):
            process.terminate()
        raise
