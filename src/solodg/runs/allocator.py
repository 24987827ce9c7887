"""Keeps freed memory in the process instead of returning it to the system after each step.

glibc returns large blocks to the system as soon as they are freed, and the system zeroes them page
by page when they are allocated again: for networks on a CPU that can take longer than computing.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of glibc's mallopt(3)


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
