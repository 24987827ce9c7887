"""The ranges of dependencies: `make lowest` installs their lower ends."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def lowest(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "tools" / "lowest.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def pins(text: str) -> dict[str, str]:
    found = [Requirement(line) for line in text.splitlines() if line and line[0] != "#"]
    return {canonicalize_name(r.name): next(iter(r.specifier)).version for r in found}


def test_every_dependency_is_pinned_to_the_lower_end_of_its_range() -> None:
    pinned = pins(lowest().stdout)
    groups = [PROJECT["dependencies"], *(EXTRAS[name] for name in EXTRAS if name != "dev")]
    requirements = [Requirement(line) for group in groups for line in group]
    assert set(pinned) == {canonicalize_name(r.name) for r in requirements}
    for requirement in requirements:
        version = pinned[canonicalize_name(requirement.name)]
        assert f">={version}" in {str(s) for s in requirement.specifier}


def test_a_version_that_cannot_be_had_is_replaced() -> None:
    pinned = pins(lowest("torch==2.13.0").stdout)
    assert pinned["torch"] == "2.13.0"
    assert pinned["numpy"] == pins(lowest().stdout)["numpy"]


@pytest.mark.parametrize("argument", ["torch", "no-such-package==1"])
def test_a_replacement_that_means_nothing_is_refused(argument: str) -> None:
    done = lowest(argument)
    assert done.returncode == 1
    assert f"'{argument}': give NAME==VERSION" in done.stderr


def test_the_versions_tested_together_are_inside_the_ranges() -> None:
    together = pins((ROOT / "constraints.txt").read_text())
    for line in [*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)]:
        requirement = Requirement(line)
        if requirement.name != PROJECT["name"]:
            version = together[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), requirement


def test_make_lowest_names_tests_that_exist() -> None:
    make = subprocess.run(["make", "-n", "lowest"], cwd=ROOT, capture_output=True, text=True)
    files = [word for word in make.stdout.split() if word.startswith("tests/")]
    assert len(files) > 10
    assert all((ROOT / file).is_file() for file in files)
