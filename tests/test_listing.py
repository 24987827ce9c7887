"""Folders: links are followed, hidden names skipped, and nothing is left out in silence."""

import json
import os
import unicodedata
from pathlib import Path

import pytest

from conftest import write_images
from solodg.data import DomainDataset, Loading, dataset_spec
from solodg.errors import UserError
from solodg.runs.config import Machine, RunConfig
from solodg.runs.train import train_run


def load(path: Path | str, data_dir: Path = Path("nowhere")) -> DomainDataset:
    return dataset_spec(str(path)).load(Loading(data_dir, image_size=16, channels=3))


def left_out(dataset: DomainDataset) -> dict[str, int]:
    return {entry.reason: entry.count for entry in dataset.left_out}


def test_links_to_folders_are_followed(image_folder: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "store", {("a", "plum"): 5, ("d", "apple"): 4, ("d", "pear"): 4})
    (image_folder / "a" / "plum").symlink_to(tmp_path / "store" / "a" / "plum")
    (image_folder / "d").symlink_to(tmp_path / "store" / "d")
    (image_folder / "b" / "pear" / "more").symlink_to(tmp_path / "store" / "d" / "..", True)
    with pytest.raises(UserError, match="are one folder"):  # b/pear/more/d is the domain d
        load(image_folder)
    (image_folder / "b" / "pear" / "more").unlink()
    dataset = load(image_folder)
    assert dataset.classes == ("apple", "pear", "plum")
    assert dataset.domain_names == ("a", "b", "c", "d")
    assert len(dataset.labels) == 50 + 5 + 8
    assert dataset.images.take(range(63)).shape == (63, 3, 16, 16)


@pytest.mark.parametrize("link", ["loop", "a/loop", "a/apple/loop", "a/apple/inner/loop"])
def test_a_link_to_a_folder_that_contains_it_is_refused(image_folder: Path, link: str) -> None:
    path = image_folder / link
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(image_folder)
    with pytest.raises(UserError, match=f"{link} is a link to a folder that contains it"):
        load(image_folder)


def test_one_folder_in_two_domains_is_refused(image_folder: Path) -> None:
    (image_folder / "c" / "apple").symlink_to(image_folder / "b" / "apple")
    with pytest.raises(UserError, match=r"c/apple and .*b/apple are one folder"):
        load(image_folder)


def test_hidden_names_are_left_out_at_every_level(image_folder: Path) -> None:
    for folder in (".cache/apple", "a/.ipynb_checkpoints", "a/apple/.ipynb_checkpoints"):
        write_images(image_folder, {tuple(folder.rsplit("/", 1)): 2})  # images in each
    (image_folder / "a" / "apple" / "._0.png").write_bytes(b"x")
    dataset = load(image_folder)
    assert len(dataset.labels) == 50
    assert dataset.classes == ("apple", "pear")
    assert left_out(dataset) == {"hidden files and folders": 4}


def test_what_is_no_image_is_counted_by_its_ending(image_folder: Path) -> None:
    for name in ("a/apple/1.nii", "a/apple/2.NII", "b/notes.txt", "README", "a/pear/scan.0001"):
        (image_folder / name).write_text("x")
    (image_folder / "c" / "pear" / "0.png").rename(image_folder / "outside.png")
    os.mkfifo(image_folder / "b" / "apple" / "pipe.png")
    (image_folder / "b" / "gone").symlink_to(image_folder / "nowhere")
    (image_folder / "b" / "self").symlink_to(image_folder / "b" / "self")
    dataset = load(image_folder)
    assert len(dataset.labels) == 49
    found = {entry.reason: (entry.count, entry.example) for entry in dataset.left_out}
    assert found == {
        "files that end in .nii": (2, "a/apple/1.nii"),
        "broken links and special files": (3, "b/gone"),
        "files that end in .txt": (1, "b/notes.txt"),
        "files without the ending of an image": (2, "README"),
        "images outside of domain folders": (1, "outside.png"),
    }


def test_empty_class_and_domain_folders_are_left_out_alike(image_folder: Path) -> None:
    (image_folder / "void" / "apple").mkdir(parents=True)
    (image_folder / "a" / "plum").mkdir()
    dataset = load(image_folder)
    assert dataset.domain_names == ("a", "b", "c")
    assert dataset.classes == ("apple", "pear")
    assert left_out(dataset) == {
        "domain folders without an image": 1,
        "class folders without an image": 1,
    }
    with pytest.raises(UserError, match=r"unknown domain of own 'void'.*without an image"):
        dataset.leave_out(["void"])


def test_folders_without_any_image_are_refused_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "void").mkdir()
    with pytest.raises(UserError, match=r"no images below .*void: expected domain/class/image"):
        load(tmp_path / "void")
    (tmp_path / "void" / "a" / "ill").mkdir(parents=True)
    (tmp_path / "void" / "a" / "ill" / "1.nii").write_text("x")
    with pytest.raises(UserError, match=r"Left out: files that end in \.nii: 1"):
        load(tmp_path / "void")


def test_a_published_domain_must_have_images_and_one_folder(tmp_path: Path) -> None:
    root = tmp_path / "office_home"
    cells = {(d, c): 1 for d in ("Art", "Clipart", "Product") for c in ("Bed", "Fan")}
    write_images(root, cells)
    (root / "Real World").mkdir()
    (root / "extra").mkdir()
    with pytest.raises(UserError, match=r"no images below .*Real World"):
        load("office-home", tmp_path)
    write_images(root, {("Real World", "Bed"): 1})
    assert left_out(load("office-home", tmp_path)) == {
        "folders that are no domain of this dataset": 1
    }
    write_images(root, {("Real_World", "Bed"): 1})
    with pytest.raises(UserError, match="several folders for domain 'Real World'"):
        load("office-home", tmp_path)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Guitar", "guitar"),
        ("Äpfel", unicodedata.normalize("NFD", "Äpfel")),
        ("straße", "STRASSE"),
        (unicodedata.normalize("NFD", "É"), "é"),
    ],
)
@pytest.mark.parametrize("kind", ["classes", "domains"])
def test_names_equal_but_for_case_or_unicode_form_are_refused(tmp_path, one, other, kind) -> None:
    cells = (
        {("a", one): 1, ("b", other): 1} if kind == "classes" else {(one, "x"): 1, (other, "x"): 1}
    )
    write_images(tmp_path / "own", cells)
    with pytest.raises(UserError, match=f"the {kind} .* differ in case or Unicode form"):
        load(tmp_path / "own")


def test_a_name_that_is_not_text_is_refused(image_folder: Path) -> None:
    os.mkdir(os.fsencode(image_folder / "a") + b"/\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        load(image_folder)


# The table


@pytest.fixture
def mixed(image_folder: Path) -> Path:
    (image_folder / "a" / "apple" / "1.nii").write_text("x")
    (image_folder / "void").mkdir()
    return image_folder


def test_datasets_counts_own_images_and_says_what_is_left_out(solodg, mixed: Path) -> None:
    code, out, _ = solodg("datasets", mixed)
    assert code == 0
    assert "own: 50 images, 2 classes, 3 domains" in out
    assert [line.split("│")[1:-1] for line in out.splitlines() if "apple  " in line] == [
        [" apple  ", " 10 ", " 10 ", "  0 ", "  20 "]
    ]
    assert "files that end in .nii: 1, e.g. a/apple/1.nii" in out
    assert "domain folders without an image: 1, e.g. void" in out
    assert "Classes without an image in a domain: 1, e.g. apple in c." in out


def test_the_table_of_a_dataset_can_be_had_as_json(solodg, mixed: Path) -> None:
    code, out, _ = solodg("datasets", mixed, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["images"] == 50
    assert found["counts"]["c"] == {"apple": 0, "pear": 10}
    assert {entry["example"]: entry["count"] for entry in found["left_out"]} == {
        "a/apple/1.nii": 1,
        "void": 1,
    }


def test_many_classes_and_domains_are_added_up(solodg, tmp_path: Path) -> None:
    write_images(
        tmp_path / "own", {(f"d{d:02}", f"c{c:02}"): 1 for d in range(10) for c in range(15)}
    )
    code, out, _ = solodg("datasets", tmp_path / "own")
    assert code == 0
    assert len(out.splitlines()) == 19
    rows = {line.split("│")[1].strip(): line.split() for line in out.splitlines() if "│" in line}
    assert "2 further domains" in out
    assert rows["3 further classes"][-2] == "30"
    assert rows["all"][-2] == "150"


def test_training_prints_the_table_before_it_starts(solodg, mixed: Path, tmp_path: Path) -> None:
    code, out, err = solodg("train", mixed, "--target", "c", "--backbone", "small_cnn",
                            "--image-size", 16, "--steps", 1, "--context-images", 1,
                            "--algorithm", "erm", "--accelerator", "cpu",
                            "--output", tmp_path / "run")  # fmt: skip
    assert code == 0, err
    assert "c (target)" in err
    assert "domain folders without an image: 1, e.g. void" in err
    assert err.index("Left out") < err.index("Training")
    assert "own: 50 images" not in out


def test_training_from_python_says_what_is_left_out(mixed: Path, tmp_path: Path) -> None:
    said: list[str] = []
    config = RunConfig(dataset=str(mixed), targets=("c",), backbone="small_cnn", image_size=16,
                       steps=1, context_images=1, algorithm="erm")  # fmt: skip
    train_run(config, Machine(accelerator="cpu"), tmp_path / "run", say=said.append)
    assert sum("Left out" in line for line in said) == 2
    assert not any("│" in line for line in said)
