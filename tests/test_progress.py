"""Progress: a bar on a terminal, lines elsewhere, silence on demand."""

import io
import threading

import pytest
from rich.console import Console

from solodg import progress
from solodg.progress import BarProgress, NoProgress
from solodg.runs.checkpoint import selection
from solodg.runs.config import Machine, RunConfig
from solodg.runs.train import train_run


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


def test_the_closing_line_of_training_has_the_accuracy_of_the_last_validation(tmp_path) -> None:
    text = io.StringIO()
    config = RunConfig(dataset="toy", targets=("sky",), algorithm="erm", backbone="small_cnn",
                       steps=3, validate_every=3, batch_size=4, context_images=1)  # fmt: skip
    console = BarProgress(Console(file=text, width=200))
    run = train_run(config, Machine(accelerator="cpu"), tmp_path / "run", progress=console)
    closing = [line for line in text.getvalue().splitlines() if line.startswith("Training: done")]
    accuracy = 100 * selection(run)["validation"]["accuracy"]
    assert f"best validation accuracy {accuracy:.1f}%" in closing[0]
    assert "loss" in closing[0]


def test_work_of_unknown_length_speaks_after_a_while_and_at_its_end(monkeypatch) -> None:
    monkeypatch.setattr(progress, "_SILENCE", 0.01)
    text, spoken = io.StringIO(), threading.Event()
    console = Console(file=text)
    monkeypatch.setattr(console, "print", _after(console.print, spoken.set))
    with BarProgress(console).stage("Opening the data"):
        assert spoken.wait(20)
    first, *_, last = text.getvalue().splitlines()
    assert first == "Opening the data: 0 s so far"
    assert last.startswith("Opening the data: done in")


def _after(call, then):
    def both(*arguments, **options) -> None:
        call(*arguments, **options)
        then()

    return both


def test_short_work_of_unknown_length_says_nothing(capsys) -> None:
    text = io.StringIO()
    with BarProgress(Console(file=text)).stage("Opening the data"):
        pass
    with NoProgress().stage("Opening the data"):
        pass
    captured = capsys.readouterr()
    assert text.getvalue() == captured.out == captured.err == ""


def test_work_that_fails_is_not_said_to_be_done(monkeypatch) -> None:
    monkeypatch.setattr(progress, "_SILENCE", 0.0)
    text = io.StringIO()
    with pytest.raises(OSError, match="full"), BarProgress(Console(file=text)).stage("Writing"):
        raise OSError("full")
    assert "done" not in text.getvalue()
    assert not [t for t in threading.enumerate() if t.name == "Writing"]
