"""One seed, one derived seed per purpose: what is random in a run is a pure function of them."""

import hashlib

import numpy as np
import torch


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for ``purpose``, independent of those for other purposes."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_generator(seed: int, *purpose: str | int) -> np.random.Generator:
    return np.random.default_rng(derive(seed, *purpose))


def torch_generator(seed: int, *purpose: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, *purpose))
