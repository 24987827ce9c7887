"""Groups, such as patients: none is both trained on and scored, unless the record says so."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import write_images
from solodg.data import DomainDataset
from solodg.data.images import ImageArray
from solodg.data.splits import TEST, TRAIN, UNASSIGNED, VAL
from solodg.errors import UserError
from solodg.predict.torch import Predictor
from solodg.progress import NoProgress
from solodg.report.predictions import predict_run
from solodg.runs.config import Machine, RunConfig
from solodg.runs.evaluate import evaluate_run
from solodg.runs.train import train_run
from solodg.storage import read_json, write_json

CPU = Machine(accelerator="cpu")
SMALL = {"backbone": "small_cnn", "algorithm": "erm", "image_size": 16, "steps": 1,
         "batch_size": 4, "context_images": 1}  # fmt: skip


def numbered(toy: DomainDataset, **changes: object) -> DomainDataset:
    """The toy dataset with the number of each image in place of its pixels."""
    count = torch.arange(len(toy.labels))[:, None].float()
    return replace(toy, images=ImageArray(count), **changes)


def numbers(part) -> np.ndarray:
    return part.images.take(range(len(part)))[:, 0].int().numpy()


def patients(root: Path, *, shared: int, column: str = "group") -> Path:
    """A manifest of four sites; `shared` patients of site d are patients of site a too."""
    write_images(root, {(d, c): 4 for d in "abcd" for c in ("ill", "well")}, size=16)
    rows = [f"path,label,domain,{column}"]
    for d in "abcd":
        for c in ("ill", "well"):
            rows += [f"{d}/{c}/{i}.png,{c},{d},{'a' if d == 'd' and i < shared else d}{i}"
                     for i in range(4)]  # fmt: skip
    (root / "list.csv").write_text("\n".join(rows))
    return root / "list.csv"


@pytest.fixture
def twins(toy: DomainDataset) -> DomainDataset:
    """Image i of `sky` and image i of `ash` are one group; every other image is its own."""
    groups = np.arange(len(toy.labels))
    groups[toy.domains == toy.domain_index("sky")] = groups[toy.domains == toy.domain_index("ash")]
    return numbered(toy, groups=groups)


def test_a_group_in_a_source_and_in_the_target_is_refused(twins: DomainDataset) -> None:
    with pytest.raises(UserError, match=r"90 group\(s\) of toy .*--allow-shared-groups"):
        twins.leave_out(["sky"])
    assert twins.leave_out(["sky"], allow_shared_groups=True).shared_groups == 90
    assert twins.leave_out(["moss"]).shared_groups == 0  # both are sources


def test_an_excluded_domain_may_share_groups(twins: DomainDataset) -> None:
    assert twins.leave_out(["moss"], exclude=["sky"]).domain_names == ("ash", "clay")
    assert twins.leave_out(["sky"], exclude=["ash"]).shared_groups == 0


@pytest.mark.parametrize("part", [TRAIN, VAL])
def test_a_group_that_is_trained_or_selected_on_is_refused(twins, part: int) -> None:
    given = replace(twins, split=np.full(len(twins.labels), part))
    given.split[(np.arange(len(given.split)) % 2 == 0) & (given.domains > 0)] = 3 - part
    with pytest.raises(UserError, match="both in the source domains and among the target"):
        given.leave_out(["sky"])


def test_shared_groups_that_are_test_images_everywhere_do_no_harm(twins: DomainDataset) -> None:
    split = np.where(np.isin(twins.domains, [0, 3]), TEST, UNASSIGNED)
    source = replace(twins, split=split).leave_out(["sky"], exclude=["ash"])
    assert source.shared_groups == 0
    split = np.array([TRAIN, VAL, TEST])[np.arange(len(split)) % 90 % 3]  # alike in all domains
    assert replace(twins, split=split).leave_out(["sky"]).shared_groups == 0


def test_an_open_source_image_whose_group_is_tested_is_not_trained_on(twins) -> None:
    split = np.where(twins.domains == twins.domain_index("sky"), TEST, UNASSIGNED)
    first = np.flatnonzero(twins.domains == 0)
    split[first[10:]] = TRAIN  # ten groups of ash are left open
    with pytest.raises(UserError, match=r"^80 group"):
        replace(twins, split=split).leave_out(["sky"])


def test_the_fingerprint_follows_groups_that_decide_the_split(toy: DomainDataset) -> None:
    groups = np.arange(len(toy.labels))
    prints = {replace(toy, groups=g).fingerprint() for g in (None, groups, groups // 2)}
    assert len(prints) == 3


def test_training_on_shared_groups_is_refused_and_names_an_example(solodg, tmp_path) -> None:
    data = patients(tmp_path / "scans", shared=2)
    code, _, err = solodg("train", data, "--target", "d", "--output", tmp_path / "run")
    assert code == 2
    assert "2 group(s) of list" in err
    assert "a/ill/0.png and d/ill/0.png" in err
    assert not (tmp_path / "run").exists()


def test_records_of_shared_groups_say_so(solodg, tmp_path) -> None:
    data, run = patients(tmp_path / "scans", shared=2), tmp_path / "run"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    code, _, err = solodg("train", data, "--target", "d", "--output", run, "--accelerator", "cpu",
                          "--allow-shared-groups", *options)  # fmt: skip
    assert code == 0, err
    assert "2 group(s) have images both" in err
    code, out, _ = solodg("evaluate", run)
    assert code == 0
    assert "2 groups both in the sources and in the scored images" in out
    for line in (run / "results.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["config"]["allow_shared_groups"] is True
        assert record["data"]["shared_groups"] == 2
        assert "2 groups both in the sources" in record["protocol"]
    reported = predict_run(Predictor.load(run), run, progress=NoProgress())  # of a report
    assert "2 groups both in the sources" in reported.protocol


def test_data_without_shared_groups_trains_and_says_nothing(tmp_path: Path) -> None:
    config = RunConfig(dataset=str(patients(tmp_path / "x", shared=0)), targets=("d",), **SMALL)
    record = evaluate_run(train_run(config, CPU, tmp_path / "run"))[0]
    assert record.protocol == "grouped-split-0.2-seed-0"
    assert "shared_groups" not in record.data


# Validation images of a target, for plans that choose settings


@pytest.mark.parametrize("grouped", [False, True])
def test_validation_images_to_score_are_drawn_where_none_are_given(toy, grouped: bool) -> None:
    groups = np.arange(len(toy.labels)) // 5 if grouped else None
    dataset = numbered(toy, groups=groups)

    def scored(seed: int, val_fraction: float = 0.2) -> list[int]:
        found = dataset.targets(["sky"], VAL, seed=seed, val_fraction=val_fraction)["sky"]
        return numbers(found).tolist()

    assert len(scored(0)) == (20 if grouped else 18)
    assert scored(0) == scored(0) != scored(1)
    assert len(scored(0, 0.5)) == 45
    if grouped:
        chosen = np.unique(np.array(scored(0)) // 5)
        assert scored(0) == np.flatnonzero(np.isin(groups, chosen)).tolist()


def test_a_target_whose_given_split_has_no_validation_images_is_refused(toy) -> None:
    dataset = replace(toy, split=np.where(np.arange(len(toy.labels)) % 2, TRAIN, TEST))
    with pytest.raises(UserError, match="'sky' of toy has no validation image"):
        dataset.targets(["sky"], VAL)


def test_a_run_scored_on_validation_images_scores_no_other(tmp_path: Path) -> None:
    config = RunConfig(dataset="toy", targets=("sky",), score_on="validation", seed=3, **SMALL)
    folder = train_run(config, CPU, tmp_path / "run")
    target = next(r for r in evaluate_run(folder) if r.role == "target")
    assert target.metrics["images"] == 18
    assert target.protocol == "random-split-0.2-seed-3, targets scored on validation images"


# Leaving one source domain out


def test_a_held_out_domain_without_validation_images_validates_on_all_its_own(toy) -> None:
    groups = np.arange(len(toy.labels))
    groups[toy.domains == 0] //= 30  # three groups of ash
    split = np.where(toy.domains == 0, TRAIN, UNASSIGNED)
    source = numbered(toy, groups=groups, split=split).leave_out(["sky"])
    assert not (source.val.domains == 0).any()
    fold = source.holding_out(0)
    assert set(numbers(fold.val)) == set(np.flatnonzero(toy.domains == 0))
    assert not set(numbers(fold.val)) & set(numbers(fold.train))
    assert fold.domain_names == ("clay", "moss")


def test_a_held_out_domain_does_not_validate_on_groups_that_others_train_on(toy) -> None:
    groups = np.arange(len(toy.labels))
    groups[90:170] = groups[:80]  # 80 images of clay are of groups of ash
    split = np.where(np.isin(toy.domains, [0, 1]), TRAIN, UNASSIGNED)
    source = numbered(toy, groups=groups, split=split).leave_out(["sky"])
    assert sorted(numbers(source.held_out(0))) == list(range(80, 90))
    groups[90:180] = groups[:90]
    source = numbered(toy, groups=groups, split=split).leave_out(["sky"])
    with pytest.raises(UserError, match="'ash' cannot be held out"):
        source.held_out(0)


def test_leaving_one_out_trains_where_groups_leave_a_domain_without_validation(tmp_path) -> None:
    data = patients(tmp_path / "scans", shared=0)
    config = RunConfig(dataset=str(data), targets=("d",), select="leave-one-out",
                       val_fraction=0.1, **SMALL)  # fmt: skip
    folder = train_run(config, CPU, tmp_path / "run")
    assert read_json(folder / "finished.json")["selected"]["step"] == 1


def test_a_run_of_before_with_shared_groups_is_still_scored_and_its_records_say_so(
    tmp_path: Path,
) -> None:
    data = patients(tmp_path / "scans", shared=2)
    config = RunConfig(dataset=str(data), targets=("d",), allow_shared_groups=True, **SMALL)
    run = train_run(config, CPU, tmp_path / "run")
    stored = read_json(run / "config.json")
    write_json(run / "config.json", {k: v for k, v in stored.items() if "groups" not in k})
    (record, *_) = evaluate_run(run, CPU)
    assert record.data["shared_groups"] == 2
    assert "2 groups both in the sources" in record.protocol


def test_groups_that_differ_in_case_alone_are_refused(tmp_path: Path) -> None:
    data = patients(tmp_path / "scans", shared=0)
    data.write_text(data.read_text().replace(",d0", ",A0"))
    with pytest.raises(UserError, match="groups 'A0' and 'a0'"):
        train_run(RunConfig(dataset=str(data), targets=("d",), **SMALL), CPU, tmp_path / "run")
