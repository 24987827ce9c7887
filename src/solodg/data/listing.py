"""Lists the images of a folder `domain/class/image`, and what else is there and is left out.

Links to folders are followed. Names that begin with a dot are left out at every level.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from solodg.data.decode import EXTENSIONS
from solodg.errors import UserError

EMPTY_DOMAIN = "domain folders without an image"
_EMPTY_CLASS = "class folders without an image"
_HIDDEN = "hidden files and folders"
_OTHER_FOLDER = "folders that are no domain of this dataset"
_OUTSIDE = "images outside of domain folders"
_UNREADABLE = "broken links and special files"
_Identity = tuple[int, int]  # device and inode: the same for every path to a file


@dataclass(frozen=True)
class LeftOut:
    """What a dataset leaves out for one reason: how often, and an example."""

    reason: str
    count: int
    example: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.count}, e.g. {self.example}"


class ListedImage(NamedTuple):
    """An image file: its path below the root, the folder of its class and that of its domain."""

    path: str
    label: str
    domain: str


class Listing:
    """The images below `root`; `left_out` grows while they are listed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._left_out: dict[str, LeftOut] = {}
        self._seen: dict[_Identity, Path] = {}
        self._files: dict[_Identity, Path] = {}

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Returns what was left out, the most frequent reason first."""
        return tuple(sorted(self._left_out.values(), key=lambda entry: -entry.count))

    def domains(self) -> list[str]:
        """Returns the names of the folders below the root."""
        self._seen[_identity(self.root)] = self.root
        folders, files = self._entries(self.root)
        for path in files:
            self._leave_out(_OUTSIDE if _is_image(path) else _ending(path), path)
        return [path.name for path in folders]

    def images(self, domain: str, layout: str = "domain/class/image") -> list[ListedImage]:
        """Returns the images of a domain, sorted by path; an error names the expected `layout`."""
        self._visit(self.root / domain, (_identity(self.root),))
        folders, files = self._entries(self.root / domain)
        for path in files:
            if _is_image(path):
                where = "domain folder" if layout.startswith("domain") else "folder"
                raise UserError(f"{path} lies directly in the {where}: expected {layout}.")
            self._leave_out(_ending(path), path)
        above = (_identity(self.root), _identity(self.root / domain))
        by_class = {folder: sorted(self._files_below(folder, above)) for folder in folders}
        empty = [folder for folder, paths in by_class.items() if not paths]
        if len(empty) == len(by_class):
            self._leave_out(EMPTY_DOMAIN, self.root / domain)
        else:
            for folder in empty:
                self._leave_out(_EMPTY_CLASS, folder)
        return [
            ListedImage(str(path.relative_to(self.root)), folder.name, domain)
            for folder, paths in by_class.items()
            for path in paths
        ]

    def skip_domains(self, names: Iterable[str]) -> None:
        """Leaves out folders that are no domain of a published dataset."""
        for name in names:
            self._leave_out(_OTHER_FOLDER, self.root / name)

    def _files_below(self, folder: Path, above: tuple[_Identity, ...]) -> Iterator[Path]:
        """Yields the images of a class, also those of folders within its folder."""
        open_folders = [(folder, above)]
        while open_folders:
            folder, above = open_folders.pop()
            above = (*above, self._visit(folder, above))
            folders, files = self._entries(folder)
            open_folders += [(inner, above) for inner in folders]
            for path in files:
                if _is_image(path):
                    self._check_link(path)
                    yield path
                else:
                    self._leave_out(_ending(path), path)

    def _visit(self, folder: Path, above: tuple[_Identity, ...]) -> _Identity:
        """Notes that a folder is read; an error if it was read before, under another path."""
        identity = _identity(folder)
        if identity in above:
            raise UserError(f"{folder} is a link to a folder that contains it: remove the link.")
        other = self._seen.setdefault(identity, folder)
        if other != folder:
            raise UserError(
                f"{folder} and {other} are one folder, by a link: its images would be there twice. "
                "Remove one of them."
            )
        return identity

    def _check_link(self, path: Path) -> None:
        """Raises `UserError` if a file is also in another domain, by a link."""
        try:
            other = self._files.setdefault(_identity(path), path)
        except OSError:  # a broken link: reported as an unreadable image
            return
        here, there = (file.relative_to(self.root).parts[0] for file in (path, other))
        if here != there:
            raise UserError(
                f"{path} and {other} are one file, by a link: it would be in two domains. Remove "
                "one of them."
            )

    def _entries(self, folder: Path) -> tuple[list[Path], list[Path]]:
        """Returns the folders and the files in a folder, by name; leaves out all else."""
        folders, files = [], []
        try:
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError as error:
            raise UserError(f"cannot read the folder {folder}: {error.strerror}.") from error
        for entry in entries:
            path = folder / entry.name
            if entry.name.startswith("."):
                self._leave_out(_HIDDEN, path)
            elif not _is_text(entry.name):
                raise UserError(f"a name in {folder} is not UTF-8: {entry.name!a}. Rename it.")
            elif _follows(entry, folder=True):
                folders.append(path)
            elif _follows(entry, folder=False) or (entry.is_symlink() and _is_image(path)):
                files.append(path)  # a broken link to an image is reported as an unreadable image
            else:
                self._leave_out(_UNREADABLE, path)
        return folders, files

    def _leave_out(self, reason: str, path: Path) -> None:
        first = LeftOut(reason, 0, str(path.relative_to(self.root)))
        before = self._left_out.get(reason, first)
        self._left_out[reason] = replace(before, count=before.count + 1)


def _is_text(name: str) -> bool:
    """Returns whether a name is UTF-8; the system allows others, which cannot be recorded."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _follows(entry: "os.DirEntry[str]", *, folder: bool) -> bool:
    """Returns whether an entry is a folder, or a regular file; links are followed."""
    try:
        return entry.is_dir() if folder else entry.is_file()
    except OSError:  # a link to itself
        return False


def _identity(folder: Path) -> _Identity:
    found = folder.stat()
    return found.st_dev, found.st_ino


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in EXTENSIONS


def _ending(path: Path) -> str:
    """Returns the reason to leave out a file that does not end like an image."""
    ending = path.suffix.lower()
    # Numbered parts, as in `scan.0001`, would give a reason for every file.
    if not 2 <= len(ending) <= 10 or not ending[1:].isalnum() or ending[1:].isdigit():
        return "files without the ending of an image"
    return f"files that end in {ending}"
