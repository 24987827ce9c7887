"""Progress: a bar on a terminal, lines elsewhere, silence on demand."""

import io

import pytest
from rich.console import Console

from solodg import progress
from solodg.progress import BarProgress, NoProgress


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_title_total_and_note(terminal: bool) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120)
    with BarProgress(console).bar("Training", 7, done=2) as advance:
        for _ in range(5):
            advance(1, "loss 0.5")
    assert "Training" in text.getvalue()
    assert ("7/7" if terminal else "2 of 7") in text.getvalue()
    assert "loss 0.5" in text.getvalue()


def test_long_work_without_a_terminal_speaks_now_and_then(monkeypatch) -> None:
    monkeypatch.setattr(progress, "_LINE_EVERY", -1.0)
    text = io.StringIO()
    with BarProgress(Console(file=text)).bar("Reading", 3) as advance:
        advance(2)
    assert "Reading: 2 of 3" in text.getvalue()


def test_no_progress_says_nothing(capsys) -> None:
    with NoProgress().bar("Training", 3) as advance:
        advance(1, "note")
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
