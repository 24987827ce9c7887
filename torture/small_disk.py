"""A disk that is full or read-only: by a mount of our own, or, where that is forbidden, by limits.

The mount is a tmpfs in a namespace of its own, so that no other process sees it and nothing is left
of it. Containers may forbid this. Then the size of files is limited in place of the disk, and a
folder is read-only for a user who does not own it.
"""

import ctypes
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000  # of unshare(2)
_NOBODY = 65534
SIZE = 256 * 1024**2  # bytes


def enter_namespace() -> bool:
    """Gives this process mounts of its own; returns whether that is permitted."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _NEW_MOUNTS if user == 0 else _NEW_MOUNTS | _NEW_USER
    if libc.unshare(flags) != 0:
        return False
    try:
        if flags & _NEW_USER:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        _mount("--make-rprivate", "/")
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _mount(*arguments: object) -> None:
    command = ["mount", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True)


class MountedDisk:
    """A tmpfs. `fill` leaves so many bytes free, `protect` makes it read-only."""

    kind = "a tmpfs of 256 MB"

    def __init__(self, folder: Path) -> None:
        """Mounts the disk at `folder`."""
        self.folder, self._filler = folder, folder / "filler"
        folder.mkdir(parents=True, exist_ok=True)
        _mount("-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", folder)

    def used(self) -> int:
        """Returns the bytes in use."""
        found = os.statvfs(self.folder)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def fill(self, free: int) -> Callable[[], None]:
        """Leaves `free` bytes; returns what a command's process has to call first: nothing."""
        missing = SIZE - self.used() - free
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(missing, 1))
        return lambda: None

    def protect(self) -> Callable[[], None]:
        """Makes the disk read-only."""
        _mount("-o", "remount,ro", self.folder)
        return lambda: None

    def release(self) -> None:
        """Makes the disk writable, and frees what `fill` took."""
        _mount("-o", "remount,rw", self.folder)
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmounts the disk."""
        subprocess.run(["umount", str(self.folder)], check=True, capture_output=True)


class LimitedDisk:
    """A folder whose limits are those of the processes that write there."""

    kind = "a limit on the size of files, and another user, since mounts are forbidden here"

    def __init__(self, folder: Path) -> None:
        """Makes the folder."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def used(self) -> int:
        """Returns the size of the largest file, since that is what `fill` limits."""
        return max((p.stat().st_size for p in self.folder.rglob("*") if p.is_file()), default=0)

    def fill(self, free: int) -> Callable[[], None]:
        """Returns what a command's process has to call first: it limits the size of a file."""
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (free, free))

    def protect(self) -> Callable[[], None]:
        """Takes away permissions; returns what a command's process has to call first."""
        for path in [self.folder, *self.folder.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        return _become_nobody if os.getuid() == 0 else lambda: None

    def release(self) -> None:
        """Gives the permissions back."""
        for path in [self.folder, *self.folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)

    def close(self) -> None:
        """Does nothing: there is no mount."""


def _become_nobody() -> None:
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)
