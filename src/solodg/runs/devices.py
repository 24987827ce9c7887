"""Devices and processes, set up by Lightning Fabric."""

from collections.abc import Callable
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
    return fabric


def single_device(accelerator: str) -> torch.device:
    """Returns one device of a kind ("cpu", "gpu", "auto"): evaluation is not distributed."""
    try:
        device: torch.device = Fabric(accelerator=accelerator, devices=1).device
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"cannot set up the device: {error}") from error
    return device


def on_first(fabric: Fabric, work: Callable[[], Result]) -> Result:
    """Calls `work` in the first process; all processes return its result, or raise its error.

    If only the first process raised the error, the others would wait for it forever.
    """
    result: Any = None
    failure: Exception | None = None
    if fabric.is_global_zero:
        try:
            result = work()
        except (UserError, OSError) as error:
            failure = error
    result, failure = fabric.broadcast((result, failure))
    if failure is not None:
        raise failure
    return result  # type: ignore[no-any-return]
