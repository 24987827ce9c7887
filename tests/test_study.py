"""The swap study (styles, poses, statistics) against the model called directly."""

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from solodg.algorithms.solo_code.pose import mean_pose
from solodg.data.transforms import to_unit
from solodg.errors import UserError
from solodg.explain.studied_run import random_derangement
from solodg.explain.study_table import RunAccuracies, means_by_donor, study_table
from solodg.explain.swap_poses import POSES, swap_poses
from solodg.explain.swap_study import (
    STATISTICS,
    STYLES,
    LabelledFeatures,
    open_study,
    study_run,
    style_accuracies,
    swap_statistics,
    swap_styles,
)
from solodg.models.image_norm import donor_statistics, image_norms, normalise_by_image
from solodg.progress import NoProgress
from solodg.readings import Reading
from solodg.runs import checkpoint
from solodg.runs.config import Machine, RunConfig
from solodg.runs.evaluate import evaluate_run
from solodg.runs.train import train_run
from solodg.types import Batch, Features


def trained(folder: Path, **values) -> Path:
    given = {"dataset": "toy", "targets": ("sky", "ash"), "backbone": "small_cnn", "steps": 20}
    given |= {"batch_size": 8, "context_images": 2, "centre_images": 10}
    return train_run(RunConfig(**given | values), Machine(accelerator="cpu"), folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each method with styles; tests do not change its weights."""
    folder = tmp_path_factory.mktemp("studied")
    return {name: trained(folder / name, algorithm=name) for name in ("solo", "solo_code")}


@pytest.mark.parametrize("algorithm", ["solo", "solo_code"])
def test_the_own_style_gives_the_models_own_accuracy(runs, algorithm: str) -> None:
    folder = runs[algorithm]
    found = swap_styles(open_study(folder, None), NoProgress())
    assert set(found) == {"sky", "ash"}
    assert all(set(values) == set(STYLES) for values in found.values())
    assert all(0 <= v <= 1 for values in found.values() for v in values.values())
    assert found == swap_styles(open_study(folder, None), NoProgress())  # the same seed
    # Accuracy by the mean classifier; records average sampled ones, so they may differ a little.
    records = {r.domain: r.metrics["accuracy"] for r in evaluate_run(folder) if r.role == "target"}
    assert all(abs(found[d]["own"] - records[d]) < 0.05 for d in found)


class StyleReader(torch.nn.Module):
    """Says the class that the style says; its prior says class 0."""

    def logits(self, observed: Features) -> torch.Tensor:
        return observed.style

    def prior_logits(self, observed: Features) -> torch.Tensor:
        return torch.eye(3)[torch.zeros(len(observed.style), dtype=torch.long)]


def test_each_donor_gives_the_style_that_it_names() -> None:
    labels = torch.arange(3).repeat(200)
    seen = LabelledFeatures(Features(torch.zeros(600, 2), torch.eye(3)[labels]), labels)
    foreign = torch.eye(3)[torch.full((50,), 1)]
    known = torch.eye(3)[torch.full((10,), 2)]
    found = style_accuracies(StyleReader(), seen, foreign, known, torch.Generator().manual_seed(0))
    assert found["own"] == 1.0
    assert 0.2 < found["same domain"] < 0.46
    assert all(found[name] == pytest.approx(1 / 3) for name in ("other domain", "mean", "prior"))


def test_a_method_without_styles_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not adapt to the image"):
        open_study(trained(tmp_path / "run", algorithm="erm", steps=1), None)
    invariant = {"algorithm": "solo", "variant": "invariant", "steps": 1}
    with pytest.raises(UserError, match="does not adapt"):
        open_study(trained(tmp_path / "other", **invariant), None)


def test_each_donor_gives_the_pose_that_it_names(runs, tmp_path: Path) -> None:
    folder = shutil.copytree(runs["solo_code"], tmp_path / "run")
    model, _ = checkpoint.load(folder)
    torch.nn.init.normal_(model.frame.pose.weight, std=3.0)  # frames that differ a lot
    checkpoint.save_weights(folder, model, step=30, validation={})
    studied = open_study(folder, None)
    found = swap_poses(studied, NoProgress())
    assert set(found) == {"sky", "ash"}

    @torch.inference_mode()
    def asked(domain: str, whose: str) -> float:
        shown, other = studied.targets[domain], {"sky": "ash", "ash": "sky"}[domain]
        generator = torch.Generator().manual_seed(1)
        x, frame = every(shown).x, studied.algorithm.frame
        maps = {
            "own": lambda: frame.poses(x),
            "same domain": lambda: frame.poses(x)[torch.randperm(len(x), generator=generator)],
            "other domain": lambda: frame.poses(every(studied.targets[other]).x)[
                torch.randint(len(studied.targets[other]), (len(x),), generator=generator)
            ],
            "mean": lambda: mean_pose(frame.poses(every(studied.source).x)).expand(len(x), 2, 3),
            "none": lambda: torch.eye(2, 3).expand(len(x), 2, 3),
        }[whose]()
        logits = studied.algorithm.logits(studied.algorithm.features(x, maps))
        return float((logits.argmax(1).numpy() == shown.labels).mean())

    for domain, accuracies in found.items():
        assert tuple(accuracies) == POSES
        for whose, accuracy in accuracies.items():
            drawn = whose in ("same domain", "other domain")  # with another seed here
            assert accuracy == pytest.approx(asked(domain, whose), abs=0.15 if drawn else 1e-9)


def test_poses_of_a_backbone_and_statistics_are_swapped_without_a_style(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", algorithm="solo_plus", image_norm=100, pose="on")
    studied = open_study(folder, None)
    pose = studied.algorithm.backbone.pose
    torch.nn.init.normal_(pose.layers[-1].bias, std=2.0)
    with torch.no_grad():
        pose.layers[-1].weight.mul_(5)
    found = swap_poses(studied, NoProgress())
    for domain, accuracies in found.items():
        assert tuple(accuracies) == POSES
        x, labels = every(studied.targets[domain]).x, studied.targets[domain].labels
        with torch.inference_mode():
            own = (studied.algorithm(x).argmax(1).numpy() == labels).mean()
            with studied.algorithm.backbone.reading_as((Reading(100.0),), upright=False):
                none = (studied.algorithm(x).argmax(1).numpy() == labels).mean()
        assert accuracies["own"] == pytest.approx(own)
        assert accuracies["none"] == pytest.approx(none)
    assert set(study_run(folder, None, NoProgress())) == {"pose", "statistics"}


def every(part) -> Batch:
    batch = next(part.batches(len(part)))
    return batch._replace(x=to_unit(batch.x))


@given(st.integers(2, 50), st.integers(0, 100))
def test_the_donor_of_the_same_domain_is_never_the_image_itself(count: int, seed: int) -> None:
    other = random_derangement(count, torch.Generator().manual_seed(seed))
    assert sorted(other.tolist()) == list(range(count))
    assert (other != torch.arange(count)).all()


def test_a_laboratory_run_is_studied_on_what_it_is_scored_on(tmp_path: Path) -> None:
    small = {"backbone": "small_cnn", "algorithm": "solo", "steps": 1, "context_images": 1}
    images = {"dataset": "rotated-mnist", "targets": ("15",), "train_images": 50, "image_size": 16}
    studied = {}
    for part in ("validation", None):
        config = RunConfig(**small, **images, score_on=part)
        folder = train_run(config, Machine(accelerator="cpu"), tmp_path / str(part))
        studied[part] = len(open_study(folder, None).targets["15"])
        (scored,) = (r for r in evaluate_run(folder) if r.role == "target")
        assert studied[part] == scored.metrics["images"]
    assert studied["validation"] < studied[None]


def test_without_poses_and_image_norm_only_styles_are_swapped(runs) -> None:
    found = study_run(runs["solo"], None, NoProgress())
    assert set(found) == {"style"}


def test_own_and_no_statistics_give_what_such_models_give(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", algorithm="solo", image_norm=10)
    studied = open_study(folder, None, images=20)
    assert all(len(part) == 20 for part in studied.targets.values())
    found = swap_statistics(studied, NoProgress())
    model, _ = checkpoint.load(folder)
    plain, _ = checkpoint.load(folder)
    for norm in image_norms(plain):
        norm.source_pixels = (1e12,)  # as good as none of the image's own
    for name, part in studied.targets.items():
        assert tuple(found[name]) == STATISTICS
        for whose, asked in (("own", model), ("none", plain)):
            with torch.inference_mode():
                right = asked.eval()(to_unit(part.images.take(range(20)))).argmax(1).numpy()
            assert found[name][whose] == pytest.approx((right == part.labels).mean())
    assert all(norm.donor is None for norm in image_norms(studied.algorithm))  # as it was


def test_donor_statistics_are_those_they_have_themselves() -> None:
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm2d(3)
    net = torch.nn.Sequential(norm)
    normalise_by_image(net, (5.0,))
    net.eval()
    x, other = torch.rand(4, 3, 6, 6), 3 * torch.rand(4, 3, 6, 6)
    with donor_statistics(net, torch.arange(4, 8).repeat(2)):
        lent = net(torch.cat([x, other]))
    assert torch.equal(lent[4:], net(other))  # lenders are normalised by themselves
    share = 36 / 41
    mean = share * other.mean((2, 3), keepdim=True)
    var = (1 - share) + share * other.var((2, 3), correction=0, keepdim=True)
    assert torch.allclose(lent[:4], (x - mean) / (var + norm.eps).sqrt(), atol=1e-5)
    assert torch.equal(net(x), net(torch.cat([x, other]))[:4])


def test_means_are_over_the_domains_of_a_seed() -> None:
    answers = [
        RunAccuracies(0, {"a": {"own": 0.5, "none": 0.1}}),
        RunAccuracies(0, {"b": {"own": 0.7, "none": 0.1}}),  # another run with the same seed
        RunAccuracies(1, {"a": {"own": 0.9, "none": 0.1}}),
        RunAccuracies(1, {"b": {"own": 0.9, "none": 0.1}}),
    ]
    assert means_by_donor(answers)["own"].mean == pytest.approx(75)
    assert means_by_donor(answers)["own"].n == 2
    assert means_by_donor(answers, "b")["own"].mean == pytest.approx(80)
    assert study_table("style", answers).row_count == 3
