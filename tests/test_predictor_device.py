"""Where a model computes, and at which precision; --version and shell completion."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from solodg.errors import UserError
from solodg.explain.explanation import explain_pixels
from solodg.explain.projection import stored_projection
from solodg.predict.export import export_onnx
from solodg.predict.torch import Predictor


@pytest.fixture
def image(tmp_path: Path, digits) -> Path:
    Image.fromarray(digits[0, 0]).save(tmp_path / "digit.png")
    return tmp_path / "digit.png"


def test_a_predictor_moves_and_keeps_its_precision(digits_run, digits) -> None:
    model = Predictor.load(digits_run)
    plain = model.compute(digits[:40]).probabilities
    assert model.to("cpu", "bf16-mixed") is model
    assert model.to(torch.device("cpu")).precision == "bf16-mixed"
    coarse = model.compute(digits[:40]).probabilities
    assert not np.array_equal(plain, coarse)  # it did compute with fewer bits
    assert np.abs(plain - coarse).max() < 0.1
    assert np.array_equal(model.to("cpu", "32-true").compute(digits[:40]).probabilities, plain)


def test_inputs_and_weights_are_on_the_device_of_the_model(digits_run, digits) -> None:
    model = Predictor.load(digits_run)
    seen = []
    model.algorithm.register_forward_pre_hook(lambda module, given: seen.append(given[0].device))
    model.to("meta")
    assert {p.device.type for p in model.algorithm.parameters()} == {"meta"}
    assert model.inputs([digits[0, 0]]).device.type == "meta"
    assert model.algorithm(model.inputs([digits[0, 0]])).device.type == "meta"
    assert [device.type for device in seen] == ["meta"]


def test_an_unknown_device_or_precision_is_an_error(digits_run) -> None:
    model = Predictor.load(digits_run)
    with pytest.raises(UserError, match="cannot move the model to device 'warp'"):
        model.to("warp")
    with pytest.raises(UserError, match="unknown precision 'bf16'"):
        model.to("cpu", "bf16")
    assert (model.device.type, model.precision) == ("cpu", "32-true")


def test_an_explanation_follows_the_precision(digits_run, digits) -> None:
    model = Predictor.load(digits_run)
    projection = stored_projection(digits_run, model)
    plain = explain_pixels(model, projection, digits[0])
    coarse = explain_pixels(model.to("cpu", "bf16-mixed"), projection, digits[0])
    assert not np.array_equal(plain.embedding, coarse.embedding)
    assert np.allclose(plain.after.logits, coarse.after.logits, atol=0.5)


def test_export_is_at_full_precision_whatever_that_of_the_predictor(
    digits_run, digits_onnx, tmp_path
) -> None:
    model = Predictor.load(digits_run).to("cpu", "bf16-mixed")
    assert export_onnx(model, tmp_path / "a.onnx") < 1e-4


@pytest.mark.parametrize("options", [[], ["--accelerator", "cpu", "--precision", "bf16-mixed"]])
def test_commands_take_a_device_and_a_precision(solodg, digits_run, image, tmp_path, options):
    code, out, err = solodg("predict", digits_run, image, *options)
    assert code == 0, err
    assert "digit.png" in out
    code, _, err = solodg("explain", digits_run, image, "--output", tmp_path / "figures", *options)
    assert code == 0, err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--accelerator", "warp"], "cannot set up the device"),
        (["--precision", "8"], "unknown precision '8'"),
    ],
)
@pytest.mark.parametrize("command", ["predict", "explain", "serve"])
def test_a_wrong_device_is_one_line(solodg, digits_run, image, command, options, reason) -> None:
    images = [] if command == "serve" else [image]
    code, _, err = solodg(command, digits_run, *images, *options)
    assert code == 2
    assert reason in err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--accelerator", "cuda"], "computed on the CPU"),
        (["--precision", "bf16-mixed"], "has the precision 32-true"),
    ],
)
@pytest.mark.parametrize("command", ["predict", "serve"])
def test_an_exported_file_refuses_other_devices(
    solodg, digits_onnx, image, command, options, reason
) -> None:
    images = [] if command == "serve" else [image]
    code, _, err = solodg(command, digits_onnx, *images, *options)
    assert code == 2
    assert reason in err


def test_a_missing_device_is_one_line(solodg, digits_run, image) -> None:
    missing = "mps" if torch.cuda.is_available() else "cuda"  # no machine has both
    code, _, err = solodg("predict", digits_run, image, "--accelerator", missing)
    assert code == 2
    assert "cannot set up the device" in err


def test_the_version_is_printed(solodg) -> None:
    assert solodg("--version") == (0, f"solodg {version('solodg')}\n", "")
    assert "solodg demo" in solodg("--help")[1]


def test_a_shell_completes_commands_and_options() -> None:
    call = "import sys; sys.argv = ['solodg']; from solodg.cli import main; main()"
    for words, count, wanted in (
        ("solodg ev", "1", "evaluate"),
        ("solodg predict --cs", "2", "--csv"),
    ):
        environment = os.environ | {
            "_SOLODG_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": count,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", call], env=environment, capture_output=True, text=True
        )
        assert wanted in done.stdout.split()
