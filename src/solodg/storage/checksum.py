"""Checksums inside files: a changed bit is found when the file is read.

A file holds its own checksum, so that no crash between two files can make them disagree. The
writer puts `PLACEHOLDER` somewhere into the content, and `sealed` replaces its zeros by the hash
of the whole content. The same works for JSON, safetensors and ONNX.
"""

import hashlib

from solodg.errors import UserError

_MARK = b"solodg-blake2b:"
_ZEROS = b"0" * 32  # the digits of a hash of 16 bytes
PLACEHOLDER = (_MARK + _ZEROS).decode()


def sealed(content: bytes) -> bytes:
    """Returns the content with its checksum in place of the one `PLACEHOLDER` in it."""
    if content.count(_MARK) != 1:
        raise UserError(f"cannot store a name that contains {_MARK.decode()!r}: rename it.")
    start = content.index(_MARK) + len(_MARK)
    return content[:start] + _hash(content, start) + content[start + len(_ZEROS) :]


def is_sealed(content: bytes, name: str) -> bool:
    """Returns whether the content holds a checksum; raises `UserError` if it is a wrong one.

    `name` is what the error calls the file.
    """
    at = content.find(_MARK)
    if at < 0:
        return False
    start = at + len(_MARK)
    if content[start : start + len(_ZEROS)] != _hash(content, start):
        raise damaged(name)
    return True


def damaged(name: str, reason: str = "its checksum does not fit its content") -> UserError:
    """Returns the error for a file that has changed since it was written."""
    return UserError(f"{name} is damaged: {reason}. Restore it from a copy, or make it again.")


def _hash(content: bytes, start: int) -> bytes:
    """Hashes the content as if the checksum that starts at `start` were zeros."""
    view = memoryview(content)
    found = hashlib.blake2b(view[:start], digest_size=len(_ZEROS) // 2)
    found.update(_ZEROS)
    found.update(view[start + len(_ZEROS) :])
    return found.hexdigest().encode()
