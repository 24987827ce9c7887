"""SWAD: the mean of the weights of every step while the source validation loss is low."""

import itertools
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from solodg.algorithms import ALGORITHMS
from solodg.bench.cell import Cell
from solodg.cli.config_options import validated
from solodg.errors import UserError
from solodg.models.backbones import build_backbone
from solodg.runs import checkpoint
from solodg.runs import selection as selecting
from solodg.runs import train as run
from solodg.runs.config import Machine, RunConfig
from solodg.runs.defaults import resolve
from solodg.runs.dense_average import DenseAverage, averaged_span
from solodg.runs.evaluate import evaluate_run
from solodg.runs.settings_text import settings_text
from solodg.runs.train import train_run
from solodg.runs.training_state import Score
from solodg.storage import read_json, read_lines

CPU = Machine(accelerator="cpu")

# Validation losses; the validations (from 0) where the average starts and ends; whether training
# may stop. None: it never starts, or it goes on to the last step.
CURVES = [
    ([], None, None),
    ([1.0], None, None),
    ([3, 2], None, None),
    ([1, 2], None, None),  # three are needed
    ([5, 4, 3, 2, 1], None, None),  # falls to the end
    ([5, 4, 5, 3, 4, 2], None, None),  # rises at times, but falls again within three
    ([1, 2, 3], 0, None),
    ([5, 4, 3, 3, 3], 2, None),  # what does not fall has stopped falling
    ([5, 4, 3, 4, 5, 1, 1], 2, None),  # falls again after the start
    ([5, 1, 1, 1.3, 1.4, 1.4, 1.4, 1.4, 1.4], 1, None),  # limit 1.43
    ([5, 1, 1, 1, *[1.31] * 5], 1, None),  # five of six
    ([5, 1, 1, 1, *[1.31] * 6], 1, 3),
    ([5, 1, 1, 1, *[1.31] * 6, 1], 1, 3),  # an end is an end
    ([5, 1, 1, 1, *[1.3] * 9], 1, None),  # not above the limit
    ([5, 1, 1, 1, *[2] * 5, 1, *[2] * 5], 1, None),  # never six in a row
    ([5, 1, 1, 1, *[2] * 5, 1, *[2] * 6], 1, 9),
    ([1, 1, 2, *[9] * 4], 0, None),  # limit 1.73: the third of the window is above it, five are
    ([1, 1, 2, *[9] * 5], 0, 1),
    ([1, 9, 9, *[9] * 4], 0, 0),  # limit 8.23: all but the first are above it
]


@pytest.mark.parametrize(("losses", "start", "end"), CURVES)
def test_losses_choose_the_start_and_the_end(losses, start, end) -> None:
    span = averaged_span([float(loss) for loss in losses])
    assert (span and span.start, span and span.end) == (start, end)


def span_of_the_paper(losses: list[float]) -> tuple[int | None, int | None]:
    """Algorithm 1 of the paper, read line by line, with validations for iterations."""
    start = end = limit = None
    for i in range(len(losses)):
        if limit is None:
            last = losses[max(0, i - 2) : i + 1]
            if len(last) == 3 and losses[i - 2] == min(last):
                start, limit = i - 2, 1.3 / 3 * sum(last)
        elif limit < min(losses[max(0, i - 5) : i + 1]) and i >= 6:
            end = i - 6
            break
    return start, end


def test_start_and_end_against_the_algorithm_of_the_paper() -> None:
    draw = random.Random(0)
    ends = 0
    for _ in range(2000):
        losses = [draw.choice((1.0, 1.1, 2.0, 2.5, 3.0)) for _ in range(draw.randrange(25))]
        span = averaged_span(losses)
        assert (span and span.start, span and span.end) == span_of_the_paper(losses)
        ends += span is not None and span.end is not None
    assert ends > 50


class Walk(nn.Module):
    """Weights that a test moves at random; `frozen` has no gradient."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.norm = nn.BatchNorm1d(2).double()
        self.kept_norm = nn.BatchNorm1d(2).double().eval()

    @torch.no_grad()
    def move(self) -> None:
        for tensor in (self.weight, self.norm.weight, self.norm.running_mean):
            tensor.add_(torch.randn(tensor.shape, generator=self.generator, dtype=tensor.dtype))


CHANGED = ("weight", "norm.weight", "norm.running_mean")


def expected_steps(losses: list[float], every: int) -> range:
    """The steps to average; validation k is after step `every * (k + 1)`."""
    start, end = span_of_the_paper(losses)
    last = len(losses) * every
    if start is None:
        return range(last - every + 1, last + 1)
    return range((start + 1) * every, (last if end is None else (end + 1) * every) + 1)


@pytest.mark.parametrize("losses", [losses for losses, _, _ in CURVES if losses])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("resumed", [False, True])
def test_the_mean_is_that_of_all_recorded_weights(losses, every, resumed) -> None:
    """Against a list of the weights of every step, also if every validation is resumed from."""
    model = Walk()
    average, recorded, step = DenseAverage(model), [], 0
    for loss in losses:
        for _ in range(every):
            model.move()
            step += 1
            average.add(model, step)
            recorded.append({n: t.clone() for n, t in model.state_dict().items()})
        average.validated(model, float(loss))
        copies = len(average.tensors()) / len(average._names)
        assert copies <= 3  # and one for the steps up to the next validation
        if resumed:
            tensors = {name: t.clone() for name, t in average.tensors().items()}
            before, average = average, DenseAverage(model)
            average.restore(model, tensors, before.state().model_validate_json(
                before.state().model_dump_json()))  # fmt: skip
        if average.ended:
            break
    final = Walk()
    final.load_state_dict(recorded[-1])
    steps = average.load_into(final)
    assert steps == expected_steps([float(loss) for loss in losses], every)
    found = final.state_dict()
    for name in CHANGED:
        expected = torch.stack([recorded[step - 1][name] for step in steps]).mean(0)
        torch.testing.assert_close(found[name], expected, atol=1e-12, rtol=1e-12)


def test_only_trained_tensors_are_averaged() -> None:
    names = set(DenseAverage(Walk())._names)
    trained = {"weight", "norm.weight", "norm.bias", "kept_norm.weight", "kept_norm.bias"}
    assert names == trained | {"norm.running_mean", "norm.running_var"}


def test_frozen_statistics_and_frozen_stages_are_not_averaged() -> None:
    backbone = build_backbone("small_cnn", channels=3, image_size=32)
    backbone.freeze_norm()
    backbone.train_last(1)
    algorithm = ALGORITHMS["erm"](backbone, num_classes=3)
    names = DenseAverage(algorithm.train())._names
    assert names == [n for n, p in algorithm.named_parameters() if p.requires_grad]
    assert 0 < len(names) < len(list(algorithm.parameters()))


def small(**values) -> RunConfig:
    fast = {"batch_size": 4, "context_images": 1, "centre_images": 2, "steps": 12}
    defaults = {"dataset": "toy", "targets": ("sky",), "algorithm": "erm", "backbone": "small_cnn"}
    return RunConfig(**defaults | fast | {"weight_average": "swad", "validate_every": 2} | values)


@pytest.fixture
def recorded(monkeypatch):
    """The weights after every step of each training, by step."""
    trainings: list[dict[int, dict[str, torch.Tensor]]] = []
    real_fit = run.fit

    def fit(fabric, state, *rest):
        trainings.append({})
        for step, losses in real_fit(fabric, state, *rest):
            weights = state.algorithm.state_dict()
            trainings[-1][step] = {name: tensor.clone() for name, tensor in weights.items()}
            yield step, losses

    monkeypatch.setattr(run, "fit", fit)
    return trainings


def with_losses(monkeypatch, losses) -> None:
    """Replaces the losses of validations by these; the last one is of the averaged model."""
    given, real = itertools.chain(losses, itertools.repeat(0.5)), selecting.validate

    def validate(*arguments) -> Score:
        return Score(real(*arguments).accuracy, -next(given))

    monkeypatch.setattr(selecting, "validate", validate)


@pytest.mark.parametrize(
    ("losses", "steps", "trained"),
    [
        ([6, 5, 4, 3, 2, 1], range(11, 13), 12),
        ([6, 5, 1, 1, 1, 1], range(6, 13), 12),
        ([1, 1, 1, *[2] * 6, 0.5, 1], range(2, 7), 18),
    ],
)
def test_a_run_saves_the_mean_of_the_weights_of_its_steps(
    tmp_path, monkeypatch, recorded, losses, steps, trained
) -> None:
    with_losses(monkeypatch, losses)
    folder = train_run(small(steps=2 * len(losses)), CPU, tmp_path / "run")
    (weights,) = recorded
    assert max(weights) == trained  # training ends with the average
    saved = load_file(folder / "model.safetensors")
    parameters = dict(checkpoint.load(folder)[0].named_parameters())
    statistics = {name for name in saved if "running" in name}
    assert statistics
    for name in parameters.keys() | statistics:
        expected = torch.stack([weights[step][name] for step in steps]).mean(0)
        torch.testing.assert_close(saved[name], expected, atol=1e-6, rtol=1e-5)
    chosen = checkpoint.selection(folder)
    assert (chosen["first_step"], chosen["step"]) == (steps[0], steps[-1])
    assert chosen["validation"]["nll"] == 0.5
    assert checkpoint.selected_steps(chosen) == f"mean of steps {steps[0]} to {steps[-1]}"
    assert read_json(folder / "finished.json")["selected"] == chosen


def test_the_score_of_the_averaged_model_is_the_one_that_is_reported(tmp_path: Path) -> None:
    folder = train_run(small(), CPU, tmp_path / "run")
    chosen = checkpoint.selection(folder)["validation"]
    scored = [r for r in evaluate_run(folder) if r.role == "source-validation"]
    images = sum(r.metrics["images"] for r in scored)
    for name, tolerance in (("accuracy", 1e-9), ("nll", 1e-5)):
        mean = sum(r.metrics[name] * r.metrics["images"] for r in scored) / images
        assert mean == pytest.approx(chosen[name], abs=tolerance)
    lines = read_lines(folder / "metrics.jsonl")
    assert [x["step"] for x in lines if "val_accuracy" in x] == [2, 4, 6, 8, 10, 12]
    (line,) = [x for x in lines if "averaged_val_accuracy" in x]
    assert (line["averaged_val_accuracy"], line["averaged_val_nll"]) == tuple(chosen.values())
    assert "weight average swad" in settings_text(resolve(small()), checkpoint.load_info(folder))


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize(
    ("algorithm", "losses"),
    [
        ("erm", [6, 5, 4, 3, 2, 1]),
        ("erm", [1, *[9] * 8]),
        ("solo", [6, 1, 1, 1, 5, 1]),
    ],
)
def test_a_run_killed_at_any_validation_ends_with_the_same_mean(
    tmp_path, monkeypatch, losses, algorithm
) -> None:
    config = small(algorithm=algorithm, steps=2 * len(losses))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with monkeypatch.context() as patch:
        with_losses(patch, losses)
        train_run(config, CPU, whole)
    real_save, kills = run.TrainingState.save, 0
    while not (broken / "finished.json").exists():
        done = sum("val_accuracy" in line for line in read_lines(broken / "metrics.jsonl"))

        def save(state, folder):
            real_save(state, folder)
            raise Killed

        with monkeypatch.context() as patch:
            with_losses(patch, losses[done:])
            patch.setattr(run.TrainingState, "save", save)
            with suppress(Killed):
                train_run(config, CPU, broken, resume=True)
                kills -= 1
        kills += 1
    assert kills == sum("val_accuracy" in line for line in read_lines(whole / "metrics.jsonl"))
    first, second = (load_file(folder / "model.safetensors") for folder in (whole, broken))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert read_lines(whole / "metrics.jsonl") == read_lines(broken / "metrics.jsonl")
    assert checkpoint.selection(whole) == checkpoint.selection(broken)


def test_linear_steps_are_not_averaged(tmp_path, monkeypatch, recorded) -> None:
    with_losses(monkeypatch, [1, 1, 5, 4, 3, 2])
    folder = train_run(small(linear_steps=5), CPU, tmp_path / "run")
    assert checkpoint.selection(folder)["first_step"] == 11  # of 6, 8, 10, 12: still falling
    with_losses(monkeypatch, [9, 9, 9, 9, 9, 9])
    folder = train_run(small(linear_steps=11), CPU, tmp_path / "last")
    assert checkpoint.selection(folder)["first_step"] == 12


def test_leaving_one_out_chooses_the_steps_and_the_mean_is_of_these(tmp_path: Path) -> None:
    folder = train_run(small(steps=8, select="leave-one-out"), CPU, tmp_path / "run")
    curves = []
    for fold in sorted((folder / "leave-one-out").iterdir()):
        lines = read_lines(fold / "metrics.jsonl")
        assert not any("averaged_val_accuracy" in line for line in lines)
        curves.append({x["step"]: x["val_accuracy"] for x in lines if "val_accuracy" in x})
    mean = {step: sum(curve[step] for curve in curves) / 3 for step in (2, 4, 6, 8)}
    best = max(mean, key=lambda step: (mean[step], -step))
    lines = read_lines(folder / "metrics.jsonl")
    assert [x["step"] for x in lines if "val_accuracy" in x] == list(range(2, best + 1, 2))
    chosen = checkpoint.selection(folder)
    assert 1 <= chosen["first_step"] <= chosen["step"] <= best


def test_a_frozen_backbone_is_saved_with_the_averaged_classifier(tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    network = build_backbone("small_cnn", channels=3, image_size=32).net
    save_file({n: t.contiguous() for n, t in network.state_dict().items()}, weights)
    machine = Machine(accelerator="cpu", cache_dir=tmp_path / "cache")
    config = small(weights=str(weights), freeze_backbone=True)
    folder = train_run(config, machine, tmp_path / "run")
    assert len(evaluate_run(folder)) == 4
    assert "first_step" in checkpoint.selection(folder)


@pytest.mark.parametrize("value", ["sawd", "0", "1", 1, 0.0, -0.5, "nan", True, [0.9]])
def test_a_wrong_average_is_refused_with_what_is_allowed(value) -> None:
    with pytest.raises(UserError, match=r"--weight-average .*0\.99, or swad"):
        validated(RunConfig, {"dataset": "toy", "weight_average": value})


def test_the_command_line_reads_a_decay_and_swad() -> None:
    def read(value):
        return validated(RunConfig, {"dataset": "toy", "weight_average": value}).weight_average

    assert read("0.99") == 0.99
    assert isinstance(read("0.99"), float)
    assert read("swad") == "swad"


def test_keys_of_cells_with_a_decay_are_those_of_before() -> None:
    def key(average) -> str:
        return Cell("x", "none", resolve(small(weight_average=average))).run_key

    assert (key(None), key(0.99)) == ("ed760c3eda33a23f", "481344d6c65d1a48")
    assert len({key(None), key(0.99), key("swad")}) == 3


def test_a_classifier_in_closed_form_has_no_steps_to_average() -> None:
    with pytest.raises(UserError, match="--weight-average: the ridge classifier is solved"):
        resolve(
            RunConfig(
                dataset="toy", algorithm="ridge", backbone="small_cnn", pretrained=True,
                weight_average="swad",
            )
        )  # fmt: skip


def test_two_processes_by_flags_average_and_save_once(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "solodg", "train", "toy", "--backbone", "small_cnn", "--algorithm",
        "erm", "--accelerator", "cpu", "--devices", "2", "--strategy", "ddp", "--steps", "8",
        "--validate-every", "2", "--linear-steps", "2", "--weight-average", "swad", "--output",
        str(tmp_path / "run"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Selected mean of steps") == 1
    assert checkpoint.load(tmp_path / "run")
