"""The torture itself, in miniature: its parts exist, its checks can fail, its figures are kept."""

import asyncio
import random
from pathlib import Path

import pytest

from serving_process import served
from torture import files, hostile, parts, requests
from torture.commands import IMAGE, pictures
from torture.forked import Finished
from torture.tally import Tally

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"


def test_every_part_has_a_row_in_the_docs_and_all_take_half_an_hour() -> None:
    text = PAGE.read_text()
    assert all(f"| `{name}` |" in text for name in parts.LIMITS)
    assert sum(parts.LIMITS.values()) <= 30 * 60


def test_an_unknown_part_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parts.main(["kill"])
    assert "choose from kills, files" in capsys.readouterr().err


def test_a_part_that_fails_says_so_and_its_figures_go_into_the_page(tmp_path: Path) -> None:
    tally = Tally()
    tally.check(True, "never said")
    assert not tally.check(False, "two is not three")
    tally.figures.append("2 checks made")
    tally.write(tmp_path / "tally.json")
    outcome = parts.Outcome("kills", Tally.read(tmp_path / "tally.json"), 3.0)
    assert outcome.line() == "FAIL kills: 2 checks, 1 failed, 3 s. 2 checks made"
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    for _ in range(2):  # the second time in place of the first
        parts.write_table(page, parts.figures_table([outcome], 0, 60.0))
    assert page.read_text().count("| kills | FAIL | 2 | 1 | 3 | 2 checks made |") == 1
    assert page.read_text().startswith(PAGE.read_text().split(parts.START)[0])


@pytest.mark.parametrize(
    ("code", "err", "problem"),
    [
        (0, "", None),
        (2, "Training: 0 of 3\nerror: no space.\n", None),
        (2, "error: a mistake,\nin two lines.\n", "without one line"),
        (1, "Traceback (most recent call last):\nKeyError: 3\n", "a traceback: KeyError: 3"),
        (-11, "", "exit code -11"),
    ],
)
def test_how_a_command_ended_is_judged(code: int, err: str, problem: str | None) -> None:
    found = Finished(code, "", err).problem()
    assert found == problem if problem is None else problem in str(found)


def test_every_damage_changes_a_file() -> None:
    content = b'{"format": "solodg-model-2"}\n'
    for damage in files.DAMAGES:
        assert damage.change(content, random.Random(0)) != content
        assert isinstance(damage.change(b"", random.Random(0)), bytes)


def test_the_same_seed_makes_the_same_requests() -> None:
    first, second = (hostile.Generator(3, IMAGE.read_bytes()) for _ in range(2))
    assert [first.request(n) for n in range(40)] == [second.request(n) for n in range(40)]
    assert pictures(0, 2) == pictures(0, 2)


def test_hostile_requests_in_miniature(digits_onnx: Path, monkeypatch) -> None:
    monkeypatch.setattr(hostile, "SLOW", 0.0)  # they take 15 seconds
    monkeypatch.setattr(requests, "ROUND", 10)
    tally = Tally()
    with served(digits_onnx, "--max-mb", str(hostile.MAX_MB)) as server:
        asyncio.run(requests.storm(tally, server, seed=0, count=20))
    assert tally.failures == []
    assert tally.counts["good"] == 2
    assert tally.figures[0].startswith("20 hostile requests of")
