"""`solodg evaluate --on`: labelled images of a new site, in every layout, without training data."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import accuracy_score, roc_auc_score

from conftest import write_images
from solodg.predict.export import export_onnx
from solodg.predict.torch import Predictor
from solodg.runs.config import Machine, RunConfig
from solodg.runs.train import train_run
from solodg.storage import lock


@pytest.fixture(scope="module")
def run(shared_folder: Path) -> Path:
    """A run whose training images are gone."""
    folder, images = shared_folder / "far-run", shared_folder / "far-images"
    config = RunConfig(dataset=str(images), targets=("b",), algorithm="solo", image_size=32,
                       backbone="small_cnn", steps=30, batch_size=8, context_images=2)  # fmt: skip
    with lock(shared_folder / "far.lock"):
        if not (folder / "far.onnx").is_file():
            write_images(images, {(d, c): 10 for d in "abc" for c in ("apple", "fig", "pear")})
            train_run(config, Machine(accelerator="cpu"), folder)
            shutil.rmtree(images)
            export_onnx(Predictor.load(folder), folder / "far.onnx")
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Two domains; neither has the class `fig`."""
    return write_images(tmp_path / "site", {(d, c): 8 for d in "xy" for c in ("apple", "pear")})


def lines(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def manifest(site: Path, columns: tuple[str, ...], rows: int | None = None) -> Path:
    """A CSV of the images of a site, two of a group."""
    path = site / "list.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        for image in sorted(site.rglob("*.png"))[:rows]:
            domain, label, name = image.relative_to(site).parts
            group = f"{domain}{label}{int(Path(name).stem) // 2}"
            writer.writerow({"path": f"{domain}/{label}/{name}", "label": label, "domain": domain,
                             "group": group})  # fmt: skip
    return path


def test_a_folder_of_domains_is_scored_as_by_hand(solodg, run, site) -> None:
    code, out, err = solodg("evaluate", run, "--on", site, "--json", "--accelerator", "cpu")
    assert code == 0, err
    found = lines(out)
    assert [line["domain"] for line in found] == ["x", "y"]
    model = Predictor.load(run)
    for line in found:
        paths = sorted((site / line["domain"]).rglob("*.png"))
        truth = [path.parent.name for path in paths]
        answers = model.predict(paths)
        wanted = accuracy_score(truth, [answer.label for answer in answers])
        assert line["metrics"]["accuracy"] == pytest.approx(wanted)
        areas = [
            roc_auc_score([t == c for t in truth], [a.probabilities[c] for a in answers])
            for c in ("apple", "pear")
        ]
        assert line["metrics"]["macro_auc"] == pytest.approx(np.mean(areas))
        assert line["role"] == "new-site"
        assert line["protocol"] == "new site"
        assert line["scores"]["missing_classes"] == ["fig"]
        assert line["data"]["fingerprint"] == found[0]["data"]["fingerprint"]
    stored = lines((run / "results.jsonl").read_text())
    assert [r["protocol"] for r in stored[-2:]] == ["new site"] * 2


def test_all_layouts_and_the_exported_file_give_the_same_numbers(solodg, run, site) -> None:
    one = site / "x"
    with_domain = manifest(site, ("path", "label", "domain"), 16)
    answers = [
        lines(solodg("evaluate", model, "--on", where, "--json")[1])
        for model in (run, run / "far.onnx")
        for where in (one, with_domain)
    ]
    by_label = manifest(site, ("path", "label"), 16)
    answers.append(lines(solodg("evaluate", run, "--on", by_label, "--json")[1]))
    assert [len(found) for found in answers] == [1] * 5
    assert [found[0]["domain"] for found in answers] == ["x", "x", "x", "x", "list"]
    for found in answers:
        for name, value in answers[0][0]["metrics"].items():
            assert found[0]["metrics"][name] == pytest.approx(value, abs=1e-5), name
    assert answers[2][0]["seed"] == -1


def test_groups_widen_what_is_drawn(solodg, run, site) -> None:
    path = manifest(site, ("path", "label", "group"))
    code, out, err = solodg("evaluate", run, "--on", path, "--json")
    assert code == 0, err
    assert lines(out)[0]["scores"]["resampled"] == "groups"
    assert lines(out)[0]["scores"]["units"] == 16
    code, out, _ = solodg("evaluate", run, "--on", path)
    assert "bootstrap samples of groups" in out
    assert "1 of 3 classes (fig)" in out
    assert "Protocol: new site" in out


def test_class_folders_may_hold_folders_and_domains_may_be_named_like_classes(
    solodg, run, site
) -> None:
    (site / "x" / "apple" / "patient").mkdir()
    shutil.move(site / "x" / "apple" / "0.png", site / "x" / "apple" / "patient" / "0.png")
    shutil.move(site / "x" / "apple" / "1.png", site / "x" / "apple" / "patient" / "1.png")
    code, out, _ = solodg("evaluate", run, "--on", site / "x", "--json")
    assert (code, lines(out)[0]["metrics"]["images"]) == (0, 16)
    (site / "x").rename(site / "fig")
    code, out, _ = solodg("evaluate", run, "--on", site, "--json")
    assert [line["domain"] for line in lines(out)] == ["fig", "y"]


def test_a_test_time_method_adapts_to_the_new_site(solodg, run, site) -> None:
    code, out, err = solodg("evaluate", run, "--on", site, "--adapter", "bn", "--json")
    assert code == 0, err
    assert {(line["adapter"], line["role"]) for line in lines(out)} == {("bn", "new-site")}


def test_unknown_classes_are_refused_by_name(solodg, run, site) -> None:
    for folder in (site / "x", site / "y"):
        (folder / "apple").rename(folder / "aple")
    for where in (site, site / "x"):
        code, _, err = solodg("evaluate", run, "--on", where)
        assert code == 2
        assert "images of 'aple'" in err
        assert "it knows 'apple', 'fig', 'pear'" in err


def test_unreadable_images_are_an_error_or_skipped(solodg, run, site) -> None:
    (site / "x" / "pear" / "3.png").write_bytes(b"no image")
    code, _, err = solodg("evaluate", run, "--on", site)
    assert code == 2
    assert "3.png" in err
    assert "--skip-bad-images" in err
    code, out, err = solodg("evaluate", run, "--on", site, "--skip-bad-images", "--json")
    assert code == 0, err
    assert [line["metrics"]["images"] for line in lines(out)] == [15, 16]


def test_a_known_domain_is_said(solodg, run, site) -> None:
    (site / "x").rename(site / "a")
    _, _, err = solodg("evaluate", run, "--on", site)
    assert "'a' is also the name of a source domain" in err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--on", "nowhere"], "nothing at nowhere"),
        (["--on", "empty"], "empty: expected a folder class/image or domain/class/image"),
        (["--on", "note.txt"], "neither a folder nor a .csv"),
        (["--on", "bad.csv"], "no column 'label'"),
        (["--on", "flat"], "expected"),
        (["--on", "flat", "--sensitivity", "0.9"], "two classes; this one has 3"),
    ],
)
def test_wrong_sites_are_one_line(solodg, run, tmp_path, monkeypatch, options, reason) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("note.txt").write_text("x")
    Path("bad.csv").write_text("path,class\na.png,apple\n")
    Path("flat").mkdir()
    Image.new("RGB", (8, 8)).save("flat/a.png")
    code, _, err = solodg("evaluate", run, *options)
    assert code == 2
    assert reason in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "--on FOLDER"),
        (["--on", ".", "--adapter", "tent"], "need the folder of a run"),
        (["--on", ".", "--sensitivity", "0.9"], "the folder of the run"),
        (["--on", ".", "--accelerator", "cuda"], "computed on the CPU"),
    ],
)
def test_what_an_exported_file_cannot_do_is_one_line(solodg, run, options, reason) -> None:
    code, _, err = solodg("evaluate", run / "far.onnx", *options)
    assert code == 2
    assert reason in err
