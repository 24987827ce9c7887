"""Parquet and Arrow files, streams, and columns under other names, as WILDS has them."""

import csv
import io
import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import solodg as package
from conftest import write_images
from solodg.data import Loading, dataset_spec
from solodg.data.images import MemoryBudget
from solodg.data.in_memory import load_in_memory
from solodg.data.splits import TEST, TRAIN, UNASSIGNED, VAL
from solodg.errors import UserError

SIZE = 16
PIXELS = np.random.default_rng(0).integers(0, 256, (12, SIZE, SIZE, 3), dtype=np.uint8)
LABELS, DOMAINS = ["pear", "apple"] * 6, ["b", "b", "a", "a"] * 3
OPTIONS = {
    "target": "c", "backbone": "small_cnn", "steps": 3, "image_size": 16, "batch_size": 8,
    "context_images": 2, "algorithm": "erm", "accelerator": "cpu", "verbose": False,
}  # fmt: skip


def loading(**settings) -> Loading:
    return Loading(Path(), image_size=SIZE, channels=3, **settings)


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def table(**columns) -> pa.Table:
    contents = [png(pixels) for pixels in PIXELS]
    return pa.table({"image": contents, "label": LABELS, "domain": DOMAINS} | columns)


def hugging_face() -> datasets.Dataset:
    features = datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=["pear", "fig", "apple"]),
        domain=datasets.Value("string"),
    )  # fmt: skip
    images = [Image.fromarray(pixels) for pixels in PIXELS]
    values = {"image": images, "label": LABELS, "domain": DOMAINS}
    return datasets.Dataset.from_dict(values, features=features)


def load(path: Path, **settings):
    return dataset_spec(str(path)).load(loading(**settings))


def assert_whole(found, count: int = 12) -> None:
    assert [found.classes[i] for i in found.labels] == LABELS[:count]
    assert [found.domain_names[i] for i in found.domains] == DOMAINS[:count]
    read = found.images.take(range(count))
    np.testing.assert_array_equal(read, PIXELS[:count].transpose(0, 3, 1, 2))


@pytest.mark.parametrize("form", ["bytes", "hugging-face", "arrow", "parts"])
def test_a_file_holds_the_images_that_were_written(form: str, tmp_path: Path) -> None:
    path = tmp_path / "own.parquet"
    if form == "bytes":
        pq.write_table(table(), path, row_group_size=5)
    elif form == "hugging-face":
        hugging_face().to_parquet(path)
    elif form == "arrow":
        hugging_face().save_to_disk(tmp_path / "saved")
        (path,) = (tmp_path / "saved").glob("*.arrow")
    else:
        path = tmp_path / "parts"
        path.mkdir()
        for number in range(3):
            part = table().slice(4 * number, 4)
            pq.write_table(part, path / f"train-{number}-of-3.parquet")
    found = load(path)
    assert_whole(found)
    part = found.images.subset([3, 5])
    np.testing.assert_array_equal(part.take([1])[0], PIXELS[5].transpose(2, 0, 1))
    assert part.keys() == [found.images.keys()[i] for i in (3, 5)]


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    for i, pixels in enumerate(PIXELS):
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    paths = [f"{i}.png" for i in range(12)]
    rows = pa.table({"path": paths, "label": LABELS, "domain": DOMAINS})
    pq.write_table(rows, tmp_path / "own.parquet")
    assert_whole(load(tmp_path / "own.parquet"))


def test_group_and_split_are_read(tmp_path: Path) -> None:
    splits = ["train", "val", "test", None] * 3
    pq.write_table(table(split=splits, group=list(range(12))), tmp_path / "own.parquet")
    found = load(tmp_path / "own.parquet")
    assert found.split.tolist() == [TRAIN, VAL, TEST, UNASSIGNED] * 3
    assert len(set(found.groups)) == 12


def test_a_model_of_a_parquet_file_is_trained_and_scored(tmp_path: Path, solodg) -> None:
    root = write_images(tmp_path / "own", {(d, c): 6 for d in "abc" for c in ("apple", "pear")})
    files = sorted(root.rglob("*.png"))
    rows = {"image": [f.read_bytes() for f in files], "label": [f.parts[-2] for f in files],
            "domain": [f.parts[-3] for f in files]}  # fmt: skip
    pq.write_table(pa.table(rows), tmp_path / "own.parquet")
    model = package.train(tmp_path / "own.parquet", output=tmp_path / "run", **OPTIONS)
    folder = package.train(root, **OPTIONS)
    expected = folder.algorithm.state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in model.algorithm.state_dict().items())
    code, out, err = solodg("evaluate", tmp_path / "run", "--accelerator", "cpu", "--json")
    assert code == 0, err
    scores = {json.loads(line)["domain"]: json.loads(line) for line in out.splitlines()}
    again = folder.evaluate(root / "c")["c"].overall["accuracy"].value
    assert scores["c"]["metrics"]["accuracy"] == pytest.approx(again)


def test_an_unreadable_image_in_a_file_is_named_by_its_row(tmp_path: Path, solodg) -> None:
    contents = [png(pixels) for pixels in PIXELS]
    contents[7] = b"no image"
    pq.write_table(table(image=contents), tmp_path / "own.parquet")
    with pytest.raises(UserError, match=r"own\.parquet, row 7: not an image"):
        load(tmp_path / "own.parquet").images.take([7])
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match=r"cannot read .*bad\.parquet"):
        load(tmp_path / "bad.parquet")


def test_stored_images_beyond_the_memory_are_refused_while_they_are_read(tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "own.parquet")
    with pytest.raises(UserError, match=r"own\.parquet, row \d+: .*--memory-gb"):
        load(tmp_path / "own.parquet", budget=MemoryBudget(2000))


@pytest.mark.parametrize("features", [True, False])
def test_a_stream_is_read_in_its_order_once(features: bool) -> None:
    if features:
        stream = hugging_face().to_iterable_dataset(num_shards=3)
    else:
        reads = []

        def rows():
            reads.append(1)
            for pixels, label, domain in zip(PIXELS, LABELS, DOMAINS, strict=True):
                yield {"image": {"bytes": png(pixels), "path": None}, "label": label,
                       "domain": domain}  # fmt: skip

        stream = datasets.IterableDataset.from_generator(rows)
    assert_whole(load_in_memory(stream, loading(), name="held"))
    assert_whole(load_in_memory(stream.take(5), loading(), name="held"), 5)


def test_a_stream_of_torch_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(zip(PIXELS, LABELS, DOMAINS, strict=True))

    monkeypatch.setattr("solodg.data.in_memory._BLOCK", 5)  # blocks are joined
    assert_whole(load_in_memory(Stream(), loading(), name="held"))


def test_an_endless_stream_ends_at_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solodg.data.in_memory._BLOCK", 10)

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield PIXELS[0], "a", "b"

    budget = MemoryBudget(25 * SIZE * SIZE * 3)
    with pytest.raises(UserError, match=r"more than 20 images.*memory_gb.*take\(n\)"):
        load_in_memory(Endless(), loading(budget=budget), name="held")


@pytest.fixture
def wilds(tmp_path: Path) -> Path:
    """A folder as camelyon17 of WILDS has it: patches by patient and place, and a table."""
    with (tmp_path / "metadata.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", "patient", "node", "x_coord", "tumor", "slide", "center", "split"])
        for i in range(12):
            patient, center = f"{i // 2:03}", i // 4
            folder = tmp_path / "patches" / f"patient_{patient}_node_{i % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(PIXELS[i]).save(folder / f"patch_x_{i}.png")
            writer.writerow([i, patient, i % 3, i, i % 2, 0, center, int(i % 4 == 3)])
    return tmp_path / "metadata.csv"


WILDS = {
    "path": "patches/patient_{patient}_node_{node}/patch_x_{x_coord}.png",
    "label": "tumor", "domain": "center", "group": "patient",
}  # fmt: skip


def test_wilds_metadata_is_read_by_naming_its_columns(wilds: Path) -> None:
    parts = {"0": "train", "1": "val"}
    found = load(wilds, columns=WILDS, split_values=parts)
    assert (found.classes, found.domain_names) == (("0", "1"), ("0", "1", "2"))
    assert found.labels.tolist() == [0, 1] * 6
    assert found.domains.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert found.split.tolist() == [TRAIN, TRAIN, TRAIN, VAL] * 3
    assert found.groups.tolist() == [i // 2 for i in range(12)]
    np.testing.assert_array_equal(found.images.take([11])[0], PIXELS[11].transpose(2, 0, 1))


def test_the_commands_take_columns(wilds: Path, solodg) -> None:
    options = [word for pair in WILDS.items() for word in ("--column", "=".join(pair))]
    parts = ["--split-value", "0=train", "--split-value", "1=val"]
    code, out, err = solodg("datasets", wilds, *options, *parts, "--json")
    assert code == 0, err
    assert json.loads(out)["counts"] == {str(d): {"0": 2, "1": 2} for d in range(3)}
    code, _, err = solodg("datasets", wilds, *options)
    assert (code, "split '0' is not train, val, test or empty" in err) == (2, True)
    code, _, err = solodg("datasets", wilds, *options[:-1], "group=patiant")
    assert (code, "Did you mean 'patient'" in err) == (2, True)
    code, _, err = solodg("datasets", wilds, "--column", "label")
    assert (code, "expected NAME=VALUE" in err) == (2, True)


def test_a_split_value_that_is_not_named_is_refused(wilds: Path) -> None:
    with pytest.raises(UserError, match="split '1' has no --split-value; given are 0=train"):
        load(wilds, columns=WILDS, split_values={"0": "train"})


def test_columns_of_data_in_memory_are_renamed_by_the_program() -> None:
    with pytest.raises(UserError, match="rename the columns"):
        load_in_memory(hugging_face(), loading(columns={"label": "x"}), name="held")
