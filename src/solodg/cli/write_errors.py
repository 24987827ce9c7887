"""What to do about a full disk or a folder that cannot be written, for each command."""

import errno
from pathlib import Path

from solodg.runs.cache_folder import FEATURES, MAPS

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FOLDER = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_CONTINUES = {
    "train": "What was saved before is intact: once there is space, --resume continues from it.",
    "bench": "What was saved before is intact: once there is space, the same command continues.",
    "demo": "What was saved before is intact: once there is space, the same command continues.",
}
_ELSEWHERE = {
    "train": "choose another folder with --output",
    "bench": "choose another folder with --output",
    "demo": "choose another folder with --output",
    "explain": "write the figures elsewhere with --output",
    "report": "write the page elsewhere with --output",
    "export": "write the file elsewhere with --onnx",
    "predict": "write the file elsewhere with --csv",
    "study": "copy the run to a folder that can be written",
}


def write_error(error: OSError, command: str) -> str | None:
    """Returns one line on an error of the file system, with what helps this command.

    Returns None for an error of another kind.
    """
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in _FULL:
        help_text = _CONTINUES.get(command, "Make space and repeat the command.")
    elif error.errno in _FORBIDDEN:
        elsewhere = _ELSEWHERE.get(command, "choose another place")
        if {FEATURES, MAPS} & {*Path(str(error.filename)).parts[-2:]}:
            option = "--cache-dir or " if command in ("train", "bench") else ""
            elsewhere = f"name another folder for what is stored with {option}$SOLODG_CACHE"
        help_text = f"Give yourself the permission, or {elsewhere}."
    elif error.errno in _NO_FOLDER:
        elsewhere = _ELSEWHERE.get(command, "choose another place")
        help_text = f"It cannot be written there: {elsewhere}."
    else:
        return None
    return f"{error.strerror}{where}. {help_text}"
