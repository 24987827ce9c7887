"""What all trainings of one run share: devices, machine, clock, progress."""

from dataclasses import dataclass

from lightning_fabric import Fabric

from solodg.progress import Progress, Say
from solodg.runs.clock import Clock
from solodg.runs.config import Machine


@dataclass(frozen=True)
class Workplace:
    """Where the trainings of a run happen, and whom they tell."""

    fabric: Fabric
    machine: Machine
    clock: Clock
    progress: Progress
    say: Say
