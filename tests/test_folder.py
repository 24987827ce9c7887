"""Own images from folders and manifests; published datasets in the same layout."""

from pathlib import Path

import numpy as np
import pytest

from conftest import write_images
from solodg.data import DATASETS, Loading, dataset_spec
from solodg.data.splits import TRAIN, UNASSIGNED, VAL
from solodg.errors import UserError


def load(path: Path | str, data_dir: Path = Path("nowhere"), **options):
    return dataset_spec(str(path)).load(
        Loading(data_dir, **({"image_size": 16, "channels": 3} | options))
    )


def test_a_domain_that_lacks_a_class_does_not_shift_labels(image_folder: Path) -> None:
    dataset = load(image_folder)
    assert dataset.classes == ("apple", "pear")
    pears_of_c = dataset.labels[dataset.domains == dataset.domain_index("c")]
    assert set(pears_of_c.tolist()) == {1}
    assert len(dataset.labels) == 50


def test_pixels_match_their_labels(image_folder: Path) -> None:
    dataset = load(image_folder)
    pixels = dataset.images.take(np.arange(len(dataset.labels))).float()
    assert pixels.shape == (50, 3, 16, 16)
    brightness = pixels.mean((1, 2, 3)).numpy()
    assert brightness[dataset.labels == 0].max() < brightness[dataset.labels == 1].min()


def test_domains_that_differ_in_punctuation_stay_apart(tmp_path: Path) -> None:
    write_images(tmp_path / "own", {(d, c): 2 for d in ("-15", "15") for c in "xy"})
    dataset = load(tmp_path / "own")
    assert dataset.domain_names == ("-15", "15")
    assert np.bincount(dataset.domains).tolist() == [4, 4]


def test_a_manifest_in_another_encoding_is_explained(image_folder: Path) -> None:
    (image_folder / "list.csv").write_bytes("path,label,domain\na,Äpfel,b".encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        load(image_folder / "list.csv")


def test_a_given_split_with_groups_is_called_given(image_folder: Path) -> None:
    rows = [f"a/pear/{i}.png,pear,{'xy'[i % 2]},p{i},train" for i in range(6)]
    dataset = load(manifest(image_folder, "path,label,domain,group,split", rows))
    assert dataset.protocol == "given-split"


def test_images_without_a_class_folder_are_explained(image_folder: Path) -> None:
    (image_folder / "a" / "apple" / "0.png").rename(image_folder / "a" / "stray.png")
    with pytest.raises(UserError, match="expected domain/class/image"):
        load(image_folder)


def manifest(folder: Path, header: str, rows: list[str]) -> Path:
    path = folder / "list.csv"
    path.write_text("\n".join([header, *rows]))
    return path


def test_a_manifest_gives_labels_domains_groups_and_splits(image_folder: Path) -> None:
    rows = [
        f"{d}/{c}/{i}.png,{c},site {d},patient{i // 2},{'val' if i > 7 else 'train'}"
        for d in "ab" for c in ("apple", "pear") for i in range(10)
    ]  # fmt: skip
    dataset = load(manifest(image_folder, "path,label,domain,group,split", rows))
    assert dataset.domain_names == ("site a", "site b")
    assert np.bincount(dataset.split, minlength=3)[[TRAIN, VAL]].tolist() == [32, 8]
    assert dataset.groups is not None
    assert len(set(dataset.groups.tolist())) == 5
    assert dataset.images.take([0]).shape == (1, 3, 16, 16)


def test_groups_of_a_manifest_are_kept_together(image_folder: Path) -> None:
    rows = [f"{d}/pear/{i}.png,pear,{d},p{i // 2}" for d in "ab" for i in range(10)]
    rows += [f"c/pear/{i}.png,pear,c,q{i // 2}" for i in range(10)]
    rows += [f"{d}/apple/{i}.png,apple,{d}," for d in "ab" for i in range(10)]
    dataset = load(manifest(image_folder, "path,label,domain,group", rows))
    source = dataset.leave_out(["c"], val_fraction=0.3)
    groups = [
        {Path(key.split(":")[0]).stem for key in part.images.keys() if "pear" in key}  # noqa: SIM118
        for part in (source.train, source.val)
    ]
    pairs = [{int(stem) // 2 for stem in stems} for stems in groups]
    assert not pairs[0] & pairs[1]
    assert dataset.protocol == "grouped-split"


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        ("path,label", ["a/apple/0.png,x"], "no column 'domain'"),
        ("path,label,domain,grup", ["a/apple/0.png,x,a,1"], "Did you mean 'group'"),
        ("path,label,domain", [], "lists no images"),
        ("path,label,domain", ["a/apple/0.png,x,a", "a/apple/0.png,y,a"], "line 3: .*in line 2"),
        ("path,label,domain", ["a/apple/0.png,x,a", "a//apple/0.png,y,b"], "in line 2 too"),
        ("path,label,domain", ["a/apple/0.png,,a"], "line 2: label is empty"),
        ("path,label,domain", ["a/apple/0.png,x,a,1"], "line 2: 4 values for 3 columns"),
        ("path,label,domain,label", ["a/apple/0.png,x,a,y"], "several columns 'label'"),
        ("path,label,domain", ["a/apple/0.png,Ill,a", "b/apple/0.png,ill,b"], "in case or Unicode"),
        ("path,label,domain,split", ["a/apple/0.png,x,a,tset"], "line 2: split 'tset'"),
    ],
)
def test_a_wrong_manifest_is_explained(image_folder: Path, header, rows, message) -> None:
    with pytest.raises(UserError, match=message):
        load(manifest(image_folder, header, rows))


@pytest.mark.parametrize("separator", [";", "\t"])
def test_columns_may_be_separated_by_semicolons_or_tabs(image_folder, separator: str) -> None:
    rows = [separator.join((f"{d}/pear/{i}.png", "pear", d, f"{d}{i}", "\"x, y\""))
            for d in "ab" for i in range(3)]  # fmt: skip
    dataset = load(manifest(image_folder, separator.join(MANY), rows))
    assert dataset.domain_names == ("a", "b")
    assert dataset.groups is not None
    assert dataset.images.take([5]).shape == (1, 3, 16, 16)


MANY = ("path", "label", "domain", "group", "remark")


@pytest.mark.parametrize(
    ("columns", "ignored", "hint"),
    [
        ("path,label,domain,age,site", "age, site", False),
        ("path,label,domain,patient,age", "patient, age", True),
        ("path,label,domain,x,Subject ID", "x, Subject ID", True),
        ("path,label,domain,group,patient", "patient", False),
    ],
)
def test_further_columns_are_ignored_by_name(image_folder, columns, ignored, hint) -> None:
    rows = [f"a/pear/{i}.png,pear,a,{i},y" for i in range(3)]
    (note,) = load(manifest(image_folder, columns, rows)).notes
    assert f"ignored the column(s) {ignored}." in note
    assert ("name that column 'group'" in note) == hint


def test_training_says_which_columns_it_ignores(solodg, image_folder: Path, tmp_path) -> None:
    rows = [f"{d}/pear/{i}.png,pear,{d},p{i}" for d in "abc" for i in range(4)]
    path = manifest(image_folder, "path,label,domain,patient", rows)
    code, _, err = solodg("train", path, "--target", "c", "--backbone", "small_cnn", "--steps", 1,
                          "--image-size", 16, "--output", tmp_path / "run")  # fmt: skip
    assert (code, "ignored the column(s) patient" in err) == (2, True)  # too few images to train
    assert "'group'" in err


@pytest.mark.parametrize("spelling", ["Real World", "Real_World", "RealWorld"])
def test_office_home_is_found_in_every_spelling(tmp_path: Path, spelling: str) -> None:
    cells = {(d, c): 3 for d in ("Art", "Clipart", "Product", spelling) for c in ("Bed", "Fan")}
    write_images(tmp_path / "office_home", cells)
    dataset = load("office-home", tmp_path)
    assert dataset.domain_names == ("Art", "Clipart", "Product", "Real World")
    assert dataset.canonical(["real_world"]) == ("Real World",)
    assert dataset.split.tolist() == [UNASSIGNED] * 24
    assert DATASETS["office-home"].find(tmp_path)


@pytest.mark.parametrize("name", ["vlcs", "terra-incognita", "domainnet", "pacs"])
def test_published_folders_are_read_by_name(tmp_path: Path, name: str) -> None:
    spec = DATASETS[name]
    root = {"vlcs": "VLCS", "terra-incognita": "terra_incognita", "domainnet": "domain_net",
            "pacs": "PACS"}[name]  # fmt: skip
    write_images(tmp_path / root, {(d, c): 2 for d in spec.domains for c in ("x", "y")})
    assert load(name, tmp_path).domain_names == spec.domains
    assert load(name, tmp_path / root).domain_names == spec.domains  # --data-dir may be the root


def test_a_missing_dataset_says_where_to_look_and_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"PACS not found.*--data-dir"):
        load("pacs", tmp_path)


def test_an_unknown_dataset_gets_its_neighbours() -> None:
    with pytest.raises(UserError, match="Did you mean 'rotated-mnist'"):
        dataset_spec("rotated-mnis")


PACS_CLASSES = ("dog", "elephant")


def pacs_with_lists(tmp_path: Path, label_of=lambda c: PACS_CLASSES.index(c) + 1) -> Path:
    domains = DATASETS["pacs"].domains
    write_images(tmp_path / "PACS", {(d, c): 5 for d in domains for c in PACS_CLASSES})
    lists = tmp_path / "PACS-splits"
    lists.mkdir()
    for d in domains:
        for part, numbers in (("train", range(4)), ("crossval", range(4, 5))):
            lines = [f"{d}/{c}/{i}.png {label_of(c)}" for c in PACS_CLASSES for i in numbers]
            (lists / f"{d}_{part}_kfold.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_pacs_uses_the_lists_of_its_authors(tmp_path: Path) -> None:
    dataset = load("pacs", pacs_with_lists(tmp_path))
    source = dataset.leave_out(["sketch"], seed=3)
    assert (len(source.train), len(source.val)) == (24, 6)
    assert all(key.split("/")[2].startswith("4.") for key in source.val.images.keys())  # noqa: SIM118
    assert len(dataset.targets(["sketch"])["sketch"]) == 10
    assert dataset.protocol == "li2017-lists"


def test_pacs_lists_that_contradict_the_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its folder says 'dog'"):
        load("pacs", pacs_with_lists(tmp_path, label_of=lambda c: 2 - PACS_CLASSES.index(c)))


def test_pacs_images_outside_the_lists_are_refused(tmp_path: Path) -> None:
    root = pacs_with_lists(tmp_path)
    write_images(root / "PACS", {("photo", "dog"): 6})
    with pytest.raises(UserError, match="1 images of PACS are in none of the lists"):
        load("pacs", root)


@pytest.mark.parametrize("content", ["a\0b,x,d", "x" * 200_000, '"' + "x\n" * 99_999])
def test_a_manifest_that_is_no_text_is_refused(image_folder: Path, content: str) -> None:
    (image_folder / "list.csv").write_text(f"path,label,domain\n{content}\n")
    with pytest.raises(UserError, match=r"list\.csv"):
        load(image_folder / "list.csv")


def test_a_file_in_two_domains_by_a_link_is_refused(image_folder: Path) -> None:
    (image_folder / "b" / "apple" / "copy.png").symlink_to(image_folder / "a" / "apple" / "0.png")
    with pytest.raises(UserError, match=r"copy\.png and .*0\.png are one file"):
        load(image_folder)
