"""Names of runs on the Hub: `hf://owner/name`, with a revision `@v1` and a file `/model.onnx`."""

import re
from pathlib import Path
from typing import NamedTuple

from solodg.errors import UserError

_PREFIX = re.compile(r"hf:/{1,2}")  # a Path drops one of the two slashes
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[^/@\s]+))?(?:/(?P<file>[^/\s]+\.onnx))?"
)
_ALLOWED = "expected hf://OWNER/NAME, optionally with @REVISION and /model.onnx"


class HubName(NamedTuple):
    """A run in a repository of the Hub."""

    repo: str  # owner/name
    revision: str | None = None  # a branch, a tag or a commit; None: the main branch
    file: str | None = None  # an exported file in it; None: the run

    def __str__(self) -> str:
        """Returns the name as it is given to commands."""
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://{self.repo}{revision}" + (f"/{self.file}" if self.file else "")


def is_hub_name(name: str | Path) -> bool:
    """Returns whether a name is one of the Hub, and not a path."""
    return _PREFIX.match(str(name)) is not None


def parse_hub_name(name: str | Path) -> HubName:
    """Reads a name of the Hub, with or without `hf://`; raises `UserError` if it is none."""
    text = str(name)
    found = _NAME.fullmatch(_PREFIX.sub("", text, count=1))
    if found is None or ".." in text or "--" in text:
        raise UserError(f"{text!r} names no repository of the Hub: {_ALLOWED}.")
    return HubName(found["repo"], found["revision"], found["file"])
