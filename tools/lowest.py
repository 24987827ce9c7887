"""Prints constraints for pip that pin every dependency of the project to its lowest version.

    python tools/lowest.py [NAME==VERSION ...] > lowest.txt

pip always takes the newest versions, so the lower bounds of pyproject.toml are pinned here one by
one. NAME==VERSION replaces a bound that cannot be had on this machine. `make lowest` uses it.
"""

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
_LOWER = re.compile(r"(?P<name>[A-Za-z0-9._-]+)>=(?P<version>[0-9][0-9.]*)")


def lower_bounds(pyproject: str) -> dict[str, str]:
    """Returns the lowest allowed version of each direct dependency, by name.

    Those of all extras but `dev` are among them: users do not need tests and linters.
    """
    project = tomllib.loads(pyproject)["project"]
    extras = project["optional-dependencies"]
    groups = [project["dependencies"], *(extras[name] for name in extras if name != "dev")]
    bounds = {}
    for requirement in (line for group in groups for line in group):
        found = _LOWER.match(requirement)
        if not found:
            sys.exit(f"{requirement!r} in pyproject.toml has no lower bound: write NAME>=VERSION.")
        bounds[found["name"].lower()] = found["version"]
    return bounds


def main(given: list[str]) -> None:
    """Prints the constraints, those in `given` in place of the project's own."""
    bounds = lower_bounds(PYPROJECT.read_text())
    for argument in given:
        name, _, version = argument.partition("==")
        if name.lower() not in bounds or not version:
            sys.exit(f"{argument!r}: give NAME==VERSION, with one of {', '.join(sorted(bounds))}.")
        bounds[name.lower()] = version
    print("\n".join(f"{name}=={version}" for name, version in sorted(bounds.items())))


if __name__ == "__main__":
    main(sys.argv[1:])
