"""Freed memory: a training keeps it for its next step, a server returns it to the system.

glibc returns large blocks to the system as soon as they are freed, and the system zeroes them page
by page when they are allocated again: for networks on a CPU that can take longer than computing.
Smaller blocks it keeps, for each thread, and after large blocks were freed larger ones too: a
server that has decoded large images in several threads would hold their memory for ever.
"""

import ctypes
import sys
from functools import cache
from typing import Any

from solodg.inference import inference_batch_size

_KEPT_BLOCK = 2**25 - 2**16  # bytes: glibc keeps blocks of 32 MB, its own bookkeeping included
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of glibc's mallopt(3)
_kept = False


def keep_freed_memory() -> None:
    """Lets this process keep the memory that it frees.

    It is a setting of the whole process: a program that computes and ends may call it. A server,
    which gives memory back, must not, nor a library, which is a guest in another process.
    """
    global _kept
    _kept = True
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def freed_memory_is_kept() -> bool:
    """Returns False where glibc returns large blocks: unless `keep_freed_memory` was called."""
    return _kept or _of_glibc("mallopt") is None


def images_at_once(numbers: int, largest_map: int) -> int:
    """Returns how many images of so many numbers each go through a network at once.

    That is a batch of `inference_batch_size`. Where freed memory is returned to the system, as in a
    program that uses the library, it is no more than keeps the largest map, of so many numbers for
    one image on a CPU, in a block that the allocator keeps: larger ones are zeroed for every layer.
    """
    batch = inference_batch_size(numbers)
    if freed_memory_is_kept():
        return batch
    return max(1, min(batch, _KEPT_BLOCK // (4 * max(largest_map, 1))))


def return_freed_memory() -> None:
    """Returns the memory that this process has freed to the system, once. It changes no setting."""
    malloc_trim = _of_glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


@cache
def _of_glibc(name: str) -> Any:
    """Returns a function of glibc, or None where there is another C library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
