"""Freed memory: a training keeps it for its next step, a server returns it to the system.

glibc returns large blocks to the system as soon as they are freed, and the system zeroes them page
by page when they are allocated again: for networks on a CPU that can take longer than computing.
Smaller blocks it keeps, for each thread, and after large blocks were freed larger ones too: a
server that has decoded large images in several threads would hold their memory for ever.
"""

import ctypes
import sys

KEPT_BLOCK = 2**25  # bytes: the largest block that glibc keeps by default
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of glibc's mallopt(3)
_kept = False


def keep_freed_memory() -> None:
    """Lets this process keep the memory that it frees.

    It is a setting of the whole process: a program that computes and ends may call it. A server,
    which gives memory back, must not, nor a library, which is a guest in another process.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        global _kept
        _kept = True


def freed_memory_is_kept() -> bool:
    """Returns whether `keep_freed_memory` was called in this process."""
    return _kept


def return_freed_memory() -> None:
    """Returns the memory that this process has freed to the system, once. It changes no setting."""
    if sys.platform != "linux":
        return
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
