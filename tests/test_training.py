"""Training as real processes: killed and resumed, on two processes, selected and saved."""

import time
from pathlib import Path

import pytest
import torch
from lightning_fabric import Fabric
from safetensors.torch import load_file

import forked
from conftest import write_images
from solodg.algorithms import ALGORITHMS
from solodg.errors import UserError
from solodg.models.backbones import build_backbone
from solodg.runs import checkpoint
from solodg.runs.config import Machine, RunConfig
from solodg.runs.evaluate import evaluate_run
from solodg.runs.fit import Schedule, build_optimizer, fit, start, update
from solodg.runs.train import train_run
from solodg.storage import read_json, read_lines
from solodg.types import Batch, Episode

TRAIN = ["train", "toy", "--backbone", "small_cnn", "--seed", "3", "--accelerator", "cpu"]
CPU = Machine(accelerator="cpu")
DEFAULTS = {"dataset": "toy", "algorithm": "solo", "backbone": "small_cnn", "steps": 30}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_equal_weights(a: Path, b: Path) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_killed_twice_and_resumed_ends_with_the_same_weights(tmp_path, solodg) -> None:
    command = [*TRAIN, "--algorithm", "solo", "--steps", "30", "--validate-every", "4",
               "--batch-size", "8", "--context-images", "2", "--centre-images", "5"]  # fmt: skip
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert solodg(*command, "--output", whole)[0] == 0
    killed = 0
    for _ in range(2):
        process = forked.start(*command, "--output", broken, "--resume")
        deadline = time.monotonic() + 120
        reached = len(read_lines(broken / "metrics.jsonl"))
        while process.exitcode is None and time.monotonic() < deadline:
            if len(read_lines(broken / "metrics.jsonl")) >= reached + 4:
                process.kill()
                killed += 1
                break
            time.sleep(0.002)
        process.join()
    assert killed >= 1
    assert not (broken / "finished.json").exists()
    assert solodg(*command, "--output", broken, "--resume")[0] == 0
    assert_equal_weights(whole, broken)
    assert read_lines(whole / "metrics.jsonl") == read_lines(broken / "metrics.jsonl")


def small(**values) -> RunConfig:
    fast = {"batch_size": 8, "context_images": 2, "centre_images": 10}
    return RunConfig(**(DEFAULTS | fast | values))


def test_the_saved_model_is_the_selected_model(tmp_path: Path) -> None:
    """The weights on disk are those of the best validation, whatever came after."""
    train_run(small(steps=40, validate_every=5, learning_rate=0.05), CPU, tmp_path)
    lines = [x for x in read_lines(tmp_path / "metrics.jsonl") if "val_accuracy" in x]
    best = max(lines, key=lambda x: (x["val_accuracy"], -x["val_nll"]))
    assert checkpoint.selection(tmp_path)["step"] == best["step"]
    scored = [r for r in evaluate_run(tmp_path) if r.role == "source-validation"]
    images = sum(r.metrics["images"] for r in scored)
    accuracy = sum(r.metrics["accuracy"] * r.metrics["images"] for r in scored) / images
    nll = sum(r.metrics["nll"] * r.metrics["images"] for r in scored) / images
    assert accuracy == pytest.approx(best["val_accuracy"], abs=1e-9)
    assert nll == pytest.approx(best["val_nll"], abs=1e-5)


def test_the_same_command_gives_the_same_weights_and_another_seed_does_not(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train_run(small(seed=seed, steps=6), CPU, tmp_path / name)
    assert_equal_weights(tmp_path / "a", tmp_path / "b")
    a, c = weights(tmp_path / "a"), weights(tmp_path / "c")
    assert not torch.equal(a["base.weight"], c["base.weight"])


def test_a_run_learns_and_its_records_say_everything(tmp_path: Path) -> None:
    train_run(small(steps=60), CPU, tmp_path)
    records = evaluate_run(tmp_path)
    target = records[0]
    assert (target.role, target.domain, target.target) == ("target", "sky", ["sky"])
    assert target.metrics["accuracy"] > 0.8
    assert target.protocol == "random-split-0.2-seed-0"
    assert target.config["steps"] == 60
    assert {"torch", "timm", "solodg", "python"} <= target.versions.keys()
    assert len(target.data["fingerprint"]) == 16
    assert target.seed == 0
    assert len(read_lines(tmp_path / "results.jsonl")) == len(records) == 4
    files = {p.name for p in tmp_path.iterdir()}
    assert {"config.json", "versions.json", "metrics.jsonl", "model.json"} <= files
    assert "state.safetensors" not in files
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_a_folder_with_another_run_is_not_overwritten(tmp_path: Path) -> None:
    train_run(small(steps=2), CPU, tmp_path)
    said: list[str] = []
    train_run(small(steps=2), CPU, tmp_path, resume=True, say=said.append)
    assert any("finished already" in text for text in said)
    with pytest.raises(UserError, match="holds a run already"):
        train_run(small(steps=2), CPU, tmp_path)
    with pytest.raises(UserError, match="steps is 2 there, 3 here"):
        train_run(small(steps=3), CPU, tmp_path, resume=True)


@pytest.mark.parametrize("method", ["random", "clusters"])
def test_one_source_domain_trains_with_pseudo_domains(tmp_path: Path, method: str) -> None:
    config = small(targets=("ash", "clay", "moss"), steps=4, context_images=2)
    with pytest.raises(UserError, match="--pseudo-domains"):
        train_run(config, CPU, tmp_path / "without")
    config = config.model_copy(update={"pseudo_domains": method, "num_pseudo_domains": 2})
    train_run(config, CPU, tmp_path / "with")
    assert len(read_json(tmp_path / "with" / "model.json")["source_domains"]) == 2
    assert len(evaluate_run(tmp_path / "with")) == 4


def test_divergence_is_reported_and_not_saved(tmp_path: Path) -> None:
    config = small(algorithm="erm", steps=30, learning_rate=1e30, backbone_learning_rate=1e30)
    with pytest.raises(UserError, match="diverged"):
        train_run(config, CPU, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def test_a_run_that_never_started_does_not_claim_its_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--context-images"):
        train_run(small(context_images=25), CPU, tmp_path)
    train_run(small(steps=2), CPU, tmp_path)
    assert (tmp_path / "finished.json").is_file()


def toy_config(**values) -> RunConfig:
    small = {"batch_size": 8, "context_images": 2, "centre_images": 5, "decay": "constant"}
    return RunConfig(targets=("sky",), **DEFAULTS | small | values)


def test_the_kept_weights_are_the_moving_average(tmp_path: Path) -> None:
    """Against a loop over the weights of every step, each kept by a run that stopped there."""
    decay, steps = 0.8, 5
    average = None
    backbone = build_backbone("small_cnn", channels=3, image_size=32)
    trained = dict(ALGORITHMS["erm"](backbone, num_classes=3).named_parameters())
    for step in range(1, steps + 1):
        config = toy_config(algorithm="erm", steps=step, validate_every=step)
        new = weights(train_run(config, CPU, tmp_path / str(step)))
        share = 1 - min(decay, step / (step + 9))
        if average is None:  # what training starts from: one step of no size
            start = train_run(
                toy_config(algorithm="erm", steps=1, learning_rate=1e-30,
                           backbone_learning_rate=1e-30, weight_decay=0.0),
                CPU, tmp_path / "start",
            )  # fmt: skip
            average = {k: v for k, v in weights(start).items() if k in trained}
        average = {k: v + share * (new[k] - v) for k, v in average.items()}
    config = toy_config(algorithm="erm", steps=steps, validate_every=steps, weight_average=decay)
    kept = weights(train_run(config, CPU, tmp_path / "averaged"))
    for name, value in average.items():
        torch.testing.assert_close(kept[name].float(), value.float(), atol=1e-5, rtol=1e-4)


def test_step_decay_falls_to_a_tenth_after_60_percent_of_the_steps() -> None:
    schedule = Schedule(10, 1, 1.0, 1.0, 0.0, 0, decay="step")
    assert [schedule.factor(step) for step in range(1, 11)] == [1.0] * 6 + [0.1] * 4
    assert Schedule(10, 1, 1.0, 1.0, 0.0, 0).factor(10) == 1.0


def test_cosine_ends_at_nothing() -> None:
    schedule = Schedule(10, 1, 1.0, 1.0, 0.0, 0, decay="cosine")
    factors = [schedule.factor(step) for step in range(1, 11)]
    assert factors[0] == 1.0
    assert factors == sorted(factors, reverse=True)
    assert 0 < factors[-1] < 0.05


def test_leaving_one_out_chooses_the_step_and_never_reads_the_target(tmp_path: Path) -> None:
    config = toy_config(steps=12, validate_every=4, select="leave-one-out")
    folder = train_run(config, CPU, tmp_path / "run")
    curves = []
    for held in ("0-ash", "1-clay", "2-moss"):
        lines = read_lines(folder / "leave-one-out" / held / "metrics.jsonl")
        curves.append({x["step"]: x["val_accuracy"] for x in lines if "val_accuracy" in x})
        assert not (folder / "leave-one-out" / held / "model.safetensors").exists()
    mean = {step: sum(c[step] for c in curves) / 3 for step in (4, 8, 12)}
    best = min(step for step, value in mean.items() if value == max(mean.values()))
    assert checkpoint.selection(folder)["step"] == best
    assert len(list((folder / "leave-one-out").iterdir())) == 3


def test_leaving_one_out_holds_out_each_of_two_domains_that_differ_in_a_sign(tmp_path) -> None:
    cells = {(d, c): 6 for d in ("-15", "15", "3 0", "30", "t") for c in ("apple", "pear")}
    config = toy_config(algorithm="erm", steps=2, validate_every=1, select="leave-one-out",
                        context_images=1, image_size=16).model_copy(
        update={"dataset": str(write_images(tmp_path / "own", cells)), "targets": ("t",)}
    )  # fmt: skip
    folder = train_run(config, CPU, tmp_path / "run")
    folds = sorted((folder / "leave-one-out").iterdir())
    assert [fold.name for fold in folds] == ["0-15", "1-15", "2-30", "3-30"]
    assert all(read_lines(fold / "metrics.jsonl") for fold in folds)


def test_leaving_one_out_needs_three_sources(tmp_path: Path) -> None:
    config = toy_config(steps=4, select="leave-one-out", exclude=("moss",))
    with pytest.raises(UserError, match="three source domains"):
        train_run(config, CPU, tmp_path / "run")


def test_an_excluded_domain_is_neither_trained_on_nor_scored(tmp_path: Path) -> None:
    folder = train_run(
        toy_config(algorithm="erm", steps=2, exclude=("MOSS",)), CPU, tmp_path / "run"
    )
    assert read_json(folder / "model.json")["source_domains"] == ["ash", "clay"]
    assert {record.domain for record in evaluate_run(folder)} == {"sky", "ash", "clay"}


class SameEpisode:
    """The same episode at every step."""

    def __init__(self) -> None:
        x = torch.rand(12, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        y = torch.arange(12) % 3
        self.episode = Episode(Batch(x[:6], y[:6], y[:6] * 0), Batch(x[6:], y[6:], y[6:] * 0 + 1))

    def episodes(self, start: int, stop: int, rank: int = 0):
        yield from (self.episode for _ in range(start, stop))


def new_erm():
    torch.manual_seed(0)
    backbone = build_backbone("small_cnn", channels=3, image_size=32)
    return ALGORITHMS["erm"](backbone, num_classes=3)


def test_fit_makes_one_update_before_each_step_it_yields() -> None:
    """Against updates by hand, without Fabric, without a run folder."""
    schedule = Schedule(4, 1, 1e-2, 1e-2, 0.0, 0)
    fabric, episodes = Fabric(accelerator="cpu", devices=1), SameEpisode()
    algorithm, by_hand = new_erm(), new_erm().train()
    optimizer = build_optimizer(by_hand, schedule)
    state = start(fabric, algorithm, schedule)
    steps = []
    for step, losses in fit(fabric, state, episodes, lambda x, generator: x, schedule):
        expected = update(by_hand, optimizer, episodes.episode)
        assert torch.equal(losses["loss"], expected["loss"])
        pairs = zip(algorithm.parameters(), by_hand.parameters(), strict=True)
        assert all(torch.equal(own, other) for own, other in pairs)
        assert state.step == step
        algorithm.eval()  # as validation does
        steps.append(step)
    assert steps == [1, 2, 3, 4]


def test_validation_is_due_at_its_interval_and_after_the_last_step() -> None:
    schedule = Schedule(10, 4, 1.0, 1.0, 0.0, 0)
    assert [step for step in range(1, 11) if schedule.validates_at(step)] == [4, 8, 10]
    stopped = Schedule(10, 4, 1.0, 1.0, 0.0, 0, stop=6)
    assert [step for step in range(1, 7) if stopped.validates_at(step)] == [4, 6]
