"""Files that survive crashes and damage: atomic writes, locks, checksums, JSON, JSON lines.

`solodg.storage.tensors` is apart, since it imports torch.
"""

from solodg.storage.checksum import PLACEHOLDER, damaged, is_sealed, sealed
from solodg.storage.files import (
    hold_lock,
    lock,
    open_atomically,
    read_regular,
    read_text,
    try_lock,
    write_atomically,
)
from solodg.storage.json_files import CHECKSUM, parse_json, read_json, write_json
from solodg.storage.json_lines import (
    append_line,
    append_lines,
    parse_line,
    raw_lines,
    read_lines,
    write_lines,
)

__all__ = [
    "CHECKSUM",
    "PLACEHOLDER",
    "append_line",
    "append_lines",
    "damaged",
    "hold_lock",
    "is_sealed",
    "lock",
    "open_atomically",
    "parse_json",
    "parse_line",
    "raw_lines",
    "read_json",
    "read_lines",
    "read_regular",
    "read_text",
    "sealed",
    "try_lock",
    "write_atomically",
    "write_json",
    "write_lines",
]
