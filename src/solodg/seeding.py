"""Random seeds: one derived seed per purpose, so that a run is a pure function of its seed."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, *purpose: str | int) -> int:
    """Returns a 63-bit seed for a purpose, independent of the seeds for other purposes."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """Returns a NumPy generator seeded for a purpose."""
    return np.random.default_rng(derive(seed, *purpose))


def torch_generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Returns a torch generator seeded for a purpose, on the CPU."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """Restores torch's global generators at the end: those of the CPU and of all CUDA devices.

    Weights of networks, and noise in training, are drawn from them. Their state is the caller's.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
