"""The benchmarks measure what they say: the plain form is the same method, and timing is fair."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import head, methods, model, onnx
from benchmarks.plain import plain_posterior
from benchmarks.timing import Timing, alternate, milliseconds, ratio, table
from solodg.adapters import ADAPTERS
from solodg.algorithms import ALGORITHMS


def small(kind: str):
    return head.build(kind, dim=16, classes=5, hidden=12).double()


@pytest.fixture
def shown():
    episode = head.episode(16, 5)
    halves = (half._replace(x=half.x.detach().double()) for half in episode[:2])
    return type(episode)(*halves, episode.num_context)


def test_the_plain_form_has_our_posterior(shown) -> None:
    ours = small("ours")
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    style = shown.target.x[:, 16:]
    codes = torch.randn(10, 5, 16, dtype=torch.float64)
    q = plain_posterior(ours, style, codes)
    hidden = ours._hidden(style, codes, ours._merged_layer())
    torch.testing.assert_close(q.mean, ours.amortiser.mean(hidden))
    torch.testing.assert_close(q.scale, ours.amortiser.scale(hidden))


def test_the_plain_form_has_our_loss_in_expectation(shown) -> None:
    losses = {}
    for kind in ("ours", "plain"):
        torch.manual_seed(0)
        form = small(kind)
        for parameter in form.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
        values = [form.losses(shown)["loss"].detach() for _ in range(60)]
        losses[kind] = torch.stack(values)
    spread = (losses["ours"].var() / 60 + losses["plain"].var() / 60).sqrt()
    assert (losses["ours"].mean() - losses["plain"].mean()).abs() < 4 * spread


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_steps_and_inference_run_at_a_small_size(kind: str) -> None:
    work = {
        "step": head.training_step(kind, 16, 5),
        "predict": head.inference(kind, 16, 5, batch=3),
    }
    assert all(timing.median > 0 for timing in alternate(work, rounds=1).values())


def test_every_algorithm_and_adapter_is_timed() -> None:
    measured = methods.algorithm_rows(16, "small_cnn", (1, 1, 1))
    assert [row[0] for row in measured] == list(ALGORITHMS)
    assert {len(row) for row in measured} == {len(methods.HEADER)}
    assert {row[0] for row in measured if row[1] == "-"} == {"ridge"}  # solved, without steps
    erm = measured[list(ALGORITHMS).index("erm")]
    assert (erm[2], erm[3], erm[5], erm[7]) == ("1.00", "300", "1.00", "1.00")
    adapted = [row[1].split(" (")[0] for row in methods.adapter_rows(16, "small_cnn", (1, 1))]
    assert adapted == [*ADAPTERS] * 2


def test_a_step_is_of_the_images_that_are_said() -> None:
    shown = model.noise_episode(1, 11, 3, 7, channels=3, size=16)
    assert len(shown.merged.y) == 32
    assert shown.merged.x.shape[1:] == (3, 16, 16)
    rows = model.step_rows(model.noise_episode(1, 10), "small_cnn", 1)
    assert {row[0] for row in rows} == set(model.OURS)


def test_what_is_exported_for_timing_says_what_pytorch_says() -> None:
    given = onnx.build("small_cnn", classes=4, size=32)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)
    wanted, found = given.compute(pixels), onnx.exported(given).compute(pixels)
    np.testing.assert_allclose(found.probabilities, wanted.probabilities, atol=1e-5)


def test_candidates_take_turns() -> None:
    order: list[str] = []
    work = {name: (lambda name=name: order.append(name)) for name in "ab"}
    measured = alternate(work, rounds=3, warmup=1)
    assert order == list("ab") * 4
    assert all(t.quartiles[0] <= t.median <= t.quartiles[1] for t in measured.values())


def test_figures_are_written_as_a_person_reads_them() -> None:
    assert milliseconds(Timing([0.0123, 0.01, 0.02])) == "12.3 ms (11.2-16.2)"
    # The second round was slow for both: the ratio within a round does not see it.
    assert ratio(Timing([3.0, 30.0, 3.0]), Timing([2.0, 20.0, 2.0])) == "1.50"
    assert table("T", ["a", "b"], [["1", "2"]]).splitlines()[2:] == [
        "| a | b |",
        "|---|---|",
        "| 1 | 2 |",
    ]


def test_peak_memory_is_measured_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.head", "--memory", "ours", "64", "7"],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert 0 <= float(done.stdout) < 2000
