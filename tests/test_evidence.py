"""Evidence: held-out source domains decide what adapts to each image."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import write_images
from solodg.data import Loading, SourceData, dataset_spec
from solodg.errors import UserError
from solodg.predict.torch import Predictor
from solodg.runs import folds
from solodg.runs.config import Machine, ResolvedConfig, RunConfig
from solodg.runs.defaults import resolve
from solodg.runs.domain_rotations import DomainRotations
from solodg.runs.evaluate import evaluate_run
from solodg.runs.evidence import (
    EVIDENCE_BUDGET,
    EVIDENCE_BUDGET_WITH_POSE,
    decide,
    fold_domains,
    fold_steps,
    held_out_images,
)
from solodg.runs.folder import EVIDENCE
from solodg.runs.open_parts import Candidates, Combination, candidates
from solodg.runs.train import train_run
from solodg.runs.validation import validate

ROTATED = DomainRotations(np.array([-30.0, 0.0, 30.0]), 0.6, 0.95)
UPRIGHT = DomainRotations(np.array([-5.0, 0.0, 5.0]), 0.95, 0.96)
ALL = ["plain", "pose", "image norm 100", "image norm 100 and pose"]


def config(**values) -> ResolvedConfig:
    given = {"dataset": "toy", "targets": ("sky",), "backbone": "small_cnn", "steps": 12}
    return resolve(RunConfig(**given | {"batch_size": 8, "context_images": 2} | values))


def test_the_default_leaves_both_parts_open_and_options_close_them() -> None:
    assert config().open_parts == ("image_norm", "pose")
    assert config(image_norm=0).open_parts == ("pose",)
    assert config(image_norm=50, pose="off").open_parts == ()
    assert config(pretrained=True).open_parts == ("image_norm",)
    assert config(backbone="alexnet").open_parts == ("pose",)
    assert config(algorithm="erm").open_parts == config(algorithm="solo").open_parts == ()
    assert config(algorithm="solo", image_norm="auto").open_parts == ("image_norm",)
    with pytest.raises(UserError, match="--pose rotates images"):
        config(pretrained=True, freeze_backbone=True, pose="on", steps=None)


def test_what_is_tried_follows_from_options_and_rotations() -> None:
    assert [str(r) for r in candidates(config(), ROTATED).combinations] == ALL
    without = candidates(config(), UPRIGHT)
    assert [str(r) for r in without.combinations] == ["plain", "image norm 100"]
    assert not without.refused[0].on
    assert "0.95, and by 0.96" in without.refused[0].why
    forced = candidates(config(image_norm=50), ROTATED)
    assert forced.combinations == [Combination(50.0, False), Combination(50.0, True)]
    assert forced.all_parts(config(image_norm=50)).image_norm == (50.0,)
    both = candidates(config(), ROTATED).all_parts(config())
    assert (both.image_norm, both.pose) == ((0.0, 100.0), "on")
    given = candidates(config(pretrained=True), None).all_parts(config(pretrained=True))
    assert (given.image_norm, given.pose) == ((0.0, 1000.0, "line:300", 100.0), "off")


def answers(**shares: float) -> dict[str, list[bool]]:
    """1,000 images; a larger share gets all the images right that a smaller one does."""
    names = dict(zip(("plain", "pose", "norm", "both"), ALL, strict=True))
    return {names[name]: [i < 10 * share for i in range(1000)] for name, share in shares.items()}


def choose(*found: dict[str, list[bool]]) -> tuple[bool, bool]:
    options = candidates(config(), ROTATED)
    evidence = decide(options, {str(i): fold for i, fold in enumerate(found)}, "a test", 1.0)
    decided = evidence.decided(config())
    assert decided.open_parts == ()
    assert bool(decided.image_norm) == (evidence.image_norm is not None)
    assert (decided.pose == "on") == evidence.pose
    said = {part.part: part.on for part in evidence.parts}
    assert said == {"image norm": bool(decided.image_norm), "pose": evidence.pose}
    return bool(decided.image_norm), evidence.pose


@pytest.mark.parametrize(
    ("shares", "norm", "pose"),
    [
        ({"plain": 50, "pose": 50, "norm": 50, "both": 50}, False, False),
        ({"plain": 50, "pose": 60, "norm": 45, "both": 55}, False, True),
        ({"plain": 50, "pose": 45, "norm": 60, "both": 55}, True, False),
        ({"plain": 50, "pose": 55, "norm": 55, "both": 60}, True, True),
        ({"plain": 50, "pose": 49, "norm": 50.8, "both": 40}, False, False),  # less than a point
        ({"plain": 50, "pose": 60, "norm": 50, "both": 60.5}, False, True),
        ({"plain": 50, "pose": 40, "norm": 40, "both": 55}, True, True),  # only together
        ({"plain": 60, "pose": 90, "norm": 89.5, "both": 90.5}, False, True),  # in place of it
        ({"plain": 80, "pose": 75, "norm": 80.5, "both": 81}, False, False),
    ],
)
def test_a_part_is_on_where_it_gains(shares: dict[str, float], norm: bool, pose: bool) -> None:
    assert choose(answers(**shares)) == (norm, pose)
    assert choose(*[answers(**shares)] * 3) == (norm, pose)


def test_gain_and_errors_are_those_of_paired_images() -> None:
    generator = np.random.default_rng(0)
    options = Candidates([Combination(None, False), Combination(100.0, False)], [])
    found = {
        str(i): {name: (generator.random(200) < p).tolist() for name, p in zip(
            ("plain", "image norm 100"), (0.4, 0.6), strict=True)}
        for i in range(3)
    }  # fmt: skip
    evidence = decide(options, found, "a test", 0.0)
    differences = [
        100 * (np.array(f["image norm 100"], float) - np.array(f["plain"], float))
        for f in found.values()
    ]
    means = [d.mean() for d in differences]
    (part,) = evidence.parts
    assert part.gain == pytest.approx(np.mean(means), abs=0.01)
    assert part.error == pytest.approx(
        math.sqrt(sum(d.var(ddof=1) / 200 for d in differences)) / 3, 0.01
    )
    assert part.half_interval == pytest.approx(4.303 * np.std(means, ddof=1) / math.sqrt(3), 0.01)
    assert part.on
    assert f"{part.gain:+.1f} ± " in evidence.lines()[0]


@pytest.mark.parametrize("pose", [False, True])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 9])
def test_folds_stay_within_the_budget(count: int, pose: bool) -> None:
    budget = EVIDENCE_BUDGET_WITH_POSE if pose else EVIDENCE_BUDGET
    for steps in (20, 200, 2000):
        folds_now = min(count, 3)
        each = fold_steps(steps, 40 * count + 32, 40 * max(2, count - 1) + 32, folds_now, pose=pose)
        cost = each * folds_now * (40 * max(2, count - 1) + 32)
        assert cost <= budget * steps * (40 * count + 32)


@pytest.fixture(scope="module")
def toy() -> SourceData:
    spec = dataset_spec("toy")
    return spec.load(Loading(Path("none"), 32, 3, 0)).leave_out(["sky"])


def test_a_fold_is_scored_on_images_that_it_does_not_train_on(toy: SourceData) -> None:
    assert fold_domains(toy) == [0, 1, 2]
    held = held_out_images(toy, 1, 0)
    assert set(held.domains.tolist()) == {1}
    assert not set(held.images.keys()) & set(toy.holding_out(1).train.images.keys())
    # A group of two domains, and a class that the other domains lack, are left out.
    groups = np.arange(len(toy.train))
    own, other = np.flatnonzero(toy.train.domains == 1), np.flatnonzero(toy.train.domains == 0)
    groups[own[:4]] = groups[other[:4]]
    labels = toy.train.labels.copy()
    labels[own[4:7]] = 7
    changed = replace(toy, train=replace(toy.train, groups=groups, labels=labels))
    keys = held_out_images(changed, 1, 0).images.keys()
    assert not set(keys) & set(toy.train.subset(own[:7]).images.keys())
    assert len(keys) == len(own) - 7


def read(folder: Path) -> dict:
    return json.loads((folder / EVIDENCE).read_text())


def test_a_run_says_what_it_decided_and_the_model_is_that(tmp_path: Path) -> None:
    lines: list[str] = []
    train_run(config(), Machine(), tmp_path / "run", say=lines.append)
    evidence = read(tmp_path / "run")
    assert list(evidence["accuracy"]) == ["ash", "clay", "moss"]
    model = Predictor.load(tmp_path / "run")
    assert model.info.image_norm == evidence["image_norm"]
    assert model.info.pose == evidence["pose"]
    assert any("image norm: o" in line for line in lines)
    assert any("pose: off, the source domains do not differ by rotation" in line for line in lines)
    assert not (tmp_path / "run" / folds.FOLDS).exists()
    records = evaluate_run(tmp_path / "run")
    assert records[0].evidence["parts"] == evidence["parts"]
    assert records[0].config["image_norm"] == "auto"
    assert records[0].time["evidence_seconds"] == evidence["seconds"] > 0


@pytest.mark.parametrize(
    ("given", "norm", "pose"),
    [
        ({"image_norm": 0, "pose": "off"}, None, False),
        ({"image_norm": 100, "pose": "on"}, 100.0, True),
    ],
)
def test_parts_can_be_forced_and_forbidden(tmp_path: Path, given, norm, pose) -> None:
    train_run(config(**given), Machine(), tmp_path / "run")
    assert not (tmp_path / "run" / EVIDENCE).exists()
    info = Predictor.load(tmp_path / "run").info
    assert (info.image_norm, info.pose) == (norm, pose)
    assert evaluate_run(tmp_path / "run")[0].evidence == {}


def test_without_its_parts_it_is_erm(tmp_path: Path) -> None:
    off = {"image_norm": 0, "pose": "off"}
    train_run(config(**off), Machine(), tmp_path / "plus")
    train_run(config(algorithm="erm"), Machine(), tmp_path / "erm")
    states = [Predictor.load(tmp_path / n).algorithm.state_dict() for n in ("plus", "erm")]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_run_killed_between_folds_ends_as_one_that_was_not(tmp_path, monkeypatch) -> None:
    train_run(config(), Machine(), tmp_path / "whole")
    run_fold, done = folds._run_fold, []

    def counted(work, config, source, backbone, options, number, steps):
        if len(done) == 2 and 2 not in done:
            done.append(2)
            raise KeyboardInterrupt
        done.append(number)
        return run_fold(work, config, source, backbone, options, number, steps)

    monkeypatch.setattr(folds, "_run_fold", counted)
    with pytest.raises(KeyboardInterrupt):
        train_run(config(), Machine(), tmp_path / "killed")
    train_run(config(), Machine(), tmp_path / "killed", resume=True)
    assert sorted(done) == [0, 1, 2, 2]
    found, expected = read(tmp_path / "killed"), read(tmp_path / "whole")
    assert found["accuracy"] == expected["accuracy"]
    states = [Predictor.load(tmp_path / n).algorithm.state_dict() for n in ("killed", "whole")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_an_averaged_model_has_the_pose_that_was_trained(tmp_path: Path) -> None:
    for name, average in (("plain", None), ("averaged", 0.9)):
        forced = config(image_norm=0, pose="on", weight_average=average)
        train_run(forced, Machine(), tmp_path / name)
    states = [Predictor.load(tmp_path / n).algorithm.state_dict() for n in ("plain", "averaged")]
    poses = [name for name in states[0] if name.startswith("backbone.pose.")]
    assert poses
    assert all(torch.equal(states[0][name], states[1][name]) for name in poses)
    weights = "backbone.net.blocks.0.0.weight"
    assert not torch.equal(states[0][weights], states[1][weights])


def test_a_run_with_pose_killed_in_training_ends_as_one_that_was_not(tmp_path, monkeypatch) -> None:
    forced = config(image_norm=0, pose="on", validate_every=4)
    train_run(forced, Machine(), tmp_path / "whole")
    calls = []

    def killed(*given, **named):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return validate(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr("solodg.runs.selection.validate", killed)
        with pytest.raises(KeyboardInterrupt):
            train_run(forced, Machine(), tmp_path / "killed")
        patch.setattr("solodg.runs.train.train_pose", None)  # it is not trained again
        train_run(forced, Machine(), tmp_path / "killed", resume=True)
    states = [Predictor.load(tmp_path / n).algorithm.state_dict() for n in ("killed", "whole")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_two_sources_and_pseudo_domains_say_what_the_evidence_rests_on(tmp_path: Path) -> None:
    train_run(config(exclude=("moss",), steps=4), Machine(), tmp_path / "two")
    assert "each fold trains on one domain alone" in read(tmp_path / "two")["rests_on"]
    pose, norm = read(tmp_path / "two")["parts"]
    assert (pose["part"], pose["on"]) == ("pose", False)
    assert "of two source domains" in pose["why"]
    assert norm["gain"] is not None
    pseudo = config(pseudo_domains="random", steps=4)
    train_run(pseudo, Machine(), tmp_path / "pseudo")
    assert "pseudo-domains may differ less" in read(tmp_path / "pseudo")["rests_on"]


def test_domains_too_small_to_hold_out_leave_everything_off(tmp_path: Path) -> None:
    images = write_images(tmp_path / "own", {(d, c): 6 for d in "abcd" for c in ("x", "y")})
    small = config(dataset=str(images), targets=("b",), image_size=32, steps=2)
    train_run(small, Machine(), tmp_path / "run")
    evidence = read(tmp_path / "run")
    assert (evidence["image_norm"], evidence["pose"]) == (None, False)
    assert "at least 30 are needed" in evidence["rests_on"]
    assert all("without evidence" in p["why"] for p in evidence["parts"] if p["part"] != "pose")


def test_a_forced_pose_is_used_for_all_images_of_a_fold(tmp_path, monkeypatch) -> None:
    shares = []
    scored = folds.score_combinations

    def watched(algorithm, *given):
        shares.append(algorithm.backbone.upright)
        return scored(algorithm, *given)

    monkeypatch.setattr(folds, "score_combinations", watched)
    train_run(config(pose="on", steps=4), Machine(), tmp_path / "run")
    assert shares == [1.0] * 3
    (part,) = read(tmp_path / "run")["parts"]
    assert part["part"] == "image norm"


def test_rotated_sources_turn_pose_on_and_upright_ones_do_not(tmp_path: Path) -> None:
    values = {"dataset": "rotated-mnist", "targets": ("0", "90"), "train_images": 500}
    values |= {"exclude": ("30", "60"), "steps": 130, "image_norm": 0}
    values |= {"batch_size": 16, "context_images": 4}
    machine = Machine(data_dir=Path("no-such-folder"))
    train_run(config(**values), machine, tmp_path / "run")
    evidence = read(tmp_path / "run")
    assert evidence["pose"]
    (part,) = evidence["parts"]
    assert part["gain"] > 2 * part["error"]
    assert Predictor.load(tmp_path / "run").algorithm.backbone.pose is not None
