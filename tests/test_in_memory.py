"""Labelled images in memory: what a frame, a Hugging Face dataset and a torch dataset hold."""

import io
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from solodg.data import Loading
from solodg.data.images import MemoryBudget
from solodg.data.in_memory import load_in_memory
from solodg.data.manifest import load_manifest
from solodg.data.splits import TEST, TRAIN, UNASSIGNED
from solodg.errors import UserError

SIZE = 16
PIXELS = np.random.default_rng(0).integers(0, 256, (12, SIZE, SIZE, 3), dtype=np.uint8)
LABELS, DOMAINS = ["pear", "apple"] * 6, ["b", "b", "a", "a"] * 3


def load(data, **settings):
    loading = Loading(Path(), image_size=SIZE, channels=3, window=settings.pop("window", None))
    return load_in_memory(data, loading, name="held", **settings)


def frame(**columns) -> pd.DataFrame:
    values = {"image": list(PIXELS), "label": LABELS, "domain": DOMAINS} | columns
    return pd.DataFrame({name: value for name, value in values.items() if value is not None})


class Items(torch.utils.data.Dataset):
    """A map-style dataset that counts how often it is read."""

    def __init__(self, items: list) -> None:
        self.items, self.reads = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int):
        self.reads += 1
        return self.items[index]


def items(images=PIXELS, labels=LABELS, domains=DOMAINS) -> Items:
    return Items(list(zip(images, labels, domains, strict=True)))


def hugging_face(**features) -> datasets.Dataset:
    kinds = {"image": datasets.Image(), "label": datasets.Value("string"),
             "domain": datasets.Value("string")} | features  # fmt: skip
    images = [Image.fromarray(pixels) for pixels in PIXELS]
    values = {"image": images, "label": LABELS, "domain": DOMAINS}
    return datasets.Dataset.from_dict(values, features=datasets.Features(kinds))


@pytest.mark.parametrize("data", [frame(), items(), hugging_face()], ids=lambda d: type(d).__name__)
def test_images_classes_and_domains_are_those_that_were_given(data) -> None:
    found = load(data)
    assert found.classes == ("apple", "pear")
    assert found.domain_names == ("a", "b")
    assert [found.classes[i] for i in found.labels] == LABELS
    assert [found.domain_names[i] for i in found.domains] == DOMAINS
    np.testing.assert_array_equal(found.images.take(range(12)), PIXELS.transpose(0, 3, 1, 2))
    assert (found.name, found.protocol) == ("held", "random-split")


def test_a_dataset_is_read_once_since_its_images_may_be_random() -> None:
    data = items()
    load(data)
    assert data.reads == len(data)


def test_a_fingerprint_depends_on_pixels_labels_and_domains() -> None:
    changed = PIXELS.copy()
    changed[5, 3, 3, 0] ^= 1
    others = [items(changed), items(labels=LABELS[::-1]), items(domains=DOMAINS[::-1])]
    prints = [load(data).fingerprint() for data in (items(), *others)]
    assert load(frame()).fingerprint() == prints[0]
    assert len(set(prints)) == 4


def test_tensors_of_torch_are_images_labels_and_domains() -> None:
    pixels = torch.from_numpy(PIXELS.transpose(0, 3, 1, 2).copy())
    data = torch.utils.data.TensorDataset(pixels, torch.arange(12) % 2, torch.arange(12) // 6)
    found = load(data)
    assert (found.classes, found.domain_names) == (("0", "1"), ("0", "1"))
    assert torch.equal(found.images.take(range(12)), pixels)
    floats = torch.utils.data.TensorDataset(pixels / 255, *data.tensors[1:])
    assert load(floats).fingerprint() == found.fingerprint()


def test_names_of_class_labels_are_the_classes() -> None:
    label = datasets.ClassLabel(names=["pear", "fig", "apple"])
    data = hugging_face(label=label, domain=datasets.ClassLabel(names=["b", "a"]))
    found = load(data)
    assert (found.classes, found.domain_names) == (("apple", "pear"), ("a", "b"))
    assert found.fingerprint() == load(hugging_face()).fingerprint()
    first = data.features.encode_example({"image": None, "label": -1, "domain": "a"})
    with pytest.raises(UserError, match="the Dataset, row 12: image is empty"):
        load(data.add_item(first))


def test_an_unlabelled_class_label_is_an_error() -> None:
    label = datasets.ClassLabel(names=["pear", "apple"])
    numbers = [0, 1, -1] + [0] * 9
    data = hugging_face().remove_columns("label").add_column("label", numbers)
    with pytest.raises(UserError, match="the Dataset, row 2: label is empty"):
        load(data.cast_column("label", label))


def test_a_file_in_a_hugging_face_dataset_is_decoded_as_in_a_folder(tmp_path: Path) -> None:
    """A large JPEG is decoded at a reduced size, which changes pixels."""
    noise = np.random.default_rng(1).integers(0, 256, (300, 200, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "x.jpg")
    pd.DataFrame({"path": ["x.jpg"], "label": ["x"], "domain": ["d"]}).to_csv(tmp_path / "l.csv")
    wanted = load_manifest(tmp_path / "l.csv", Loading(Path(), SIZE, 3)).images.take([0])
    row = {"label": ["x"], "domain": ["d"]}
    for image in (str(tmp_path / "x.jpg"), {"bytes": (tmp_path / "x.jpg").read_bytes()}):
        data = datasets.Dataset.from_dict({"image": [image]} | row)
        found = load(data.cast_column("image", datasets.Image()))
        assert torch.equal(found.images.take([0]), wanted)


def test_a_frame_of_paths_is_read_as_its_csv(image_folder: Path, monkeypatch) -> None:
    monkeypatch.chdir(image_folder)
    paths = [str(path.relative_to(image_folder)) for path in sorted(image_folder.rglob("*.png"))]
    data = pd.DataFrame(
        {
            "path": paths,
            "label": [path.split("/")[1] for path in paths],
            "domain": [path.split("/")[0] for path in paths],
            "group": [None if i < 4 else i // 4 for i in range(len(paths))],
            "split": ["test" if i % 12 < 4 else None for i in range(len(paths))],
            "age": range(len(paths)),
        }
    )
    data.to_csv("held.csv", index=False)
    wanted = load_manifest(image_folder / "held.csv", Loading(Path(), SIZE, 3))
    for given in (data, data.rename(columns={"path": "image"})):
        found = load(given)
        assert found.fingerprint() == wanted.fingerprint()
        assert np.array_equal(found.groups, wanted.groups)
        assert set(found.split) == {UNASSIGNED, TEST}
        assert "ignored the column(s) age" in found.notes[0]
        assert torch.equal(found.images.take([7, 2]), wanted.images.take([7, 2]))


def test_groups_and_splits_of_images_are_read() -> None:
    found = load(frame(group=[1, 1, 2, None] * 3, split=["train", "", None, "test"] * 3))
    assert found.split[:4].tolist() == [TRAIN, UNASSIGNED, UNASSIGNED, TEST]
    assert len(set(found.groups.tolist())) == 2 + 3  # an image without a group is one of its own
    assert found.protocol == "grouped-split"


def test_values_of_more_than_8_bits_have_a_window_or_a_note() -> None:
    deep = [Image.fromarray(pixels[..., 0].astype(np.uint16) * 16) for pixels in PIXELS]
    assert "12 image(s) have more than 8 bits" in load(frame(image=deep)).notes[0]
    found = load(frame(image=deep), window=(0, 4080))
    assert found.notes == ()
    assert torch.equal(found.images.take([3])[0, 0], torch.from_numpy(PIXELS[3, ..., 0].copy()))


def test_images_without_a_domain_are_of_the_default_one() -> None:
    pairs = [(image, label) for image, label in zip(PIXELS, LABELS, strict=True)]
    for data in (pairs, frame(domain=None), frame(domain=[None] * 12)):
        assert load(data, default_domain="new").domain_names == ("new",)


def png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS[0]).save(file, "PNG")
    return file.getvalue()


NOT_AN_IMAGE = [*PIXELS[:11], {"bytes": b""}]
NO_DOMAIN = [*DOMAINS[:5], None, *DOMAINS[6:]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (frame(domain=None), "the DataFrame has no column 'domain'; it has image, label. Needed"),
        (frame(label=None), "the DataFrame has no column 'label'"),
        (frame(image=None), "the DataFrame has no column 'path'"),
        (frame(path=["x"] * 12), "both a column 'path' and a column 'image'"),
        (frame(grup=LABELS), "Did you mean 'group'"),
        (frame(domain=NO_DOMAIN), "the DataFrame, row 5: domain is empty"),
        (frame(domain=[*DOMAINS[:-1], float("nan")]), "row 11: domain is empty"),
        (frame(label=[pd.NA, *LABELS[1:]]), "row 0: label is empty"),
        (frame(image=NOT_AN_IMAGE), "row 11: an image of type dict"),
        (frame(image=[None, *PIXELS[1:]]), "row 0: image is empty"),
        (frame(image=[png()[:50]] * 12), "row 0: cannot read image"),
        (frame(split=["tset"] * 12), "row 0: split 'tset' is not"),
        (frame()[:0], "the DataFrame lists no images"),
        (frame(path=["x.png"] * 12, image=None), "row 1: x.png is in row 0 too"),
        (frame(label=["Ill", "ill"] * 6), "in case or Unicode form"),
        (hugging_face().remove_columns("domain"), "the Dataset has no column 'domain'"),
        (hugging_face().select([]), "the Dataset lists no images"),
        (datasets.DatasetDict(train=hugging_face()), r"parts train: give one .* data\['train'\]"),
        (items(domains=NO_DOMAIN), "the dataset, item 5: domain is empty"),
        (items([*PIXELS[:11], PIXELS[0] * 2.0]), "item 11: float images must lie in"),
        (items([*PIXELS[:11], 5]), "item 11: an image of type int"),
        (Items([]), "the dataset lists no images"),
        (Items([(PIXELS[0], "x")]), "has no column 'domain'"),
        (Items([(PIXELS[0], "x", "d", 1)]), r"item 0 of the dataset is a tuple of 4: expected"),
        (Items([(PIXELS[0], "x", "d"), PIXELS[0]]), r"item 1 .* is a ndarray: expected a tuple"),
        (Items([PIXELS[0]]), r"item 0 of the dataset is a ndarray: expected a tuple"),
        (PIXELS, "data of type ndarray: expected a path, or a pandas DataFrame"),
        ({"image": []}, "data of type dict"),
        (None, "data of type NoneType"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_line(data, message: str) -> None:
    with pytest.raises(UserError, match=message) as told:
        load(data)
    assert "\n" not in str(told.value)


def test_unreadable_images_are_skipped_if_that_is_wanted() -> None:
    images = list(PIXELS)
    images[4] = images[9] = png()[:50]
    found = load(frame(image=images), skip_bad_images=True)
    good = [i for i in range(12) if i not in (4, 9)]
    assert [found.classes[i] for i in found.labels] == [LABELS[i] for i in good]
    np.testing.assert_array_equal(found.images.take(range(10)), PIXELS[good].transpose(0, 3, 1, 2))
    assert "Skipped 2 unreadable image(s), the first: the DataFrame, row 4" in found.notes[0]
    with pytest.raises(UserError, match="row 4: cannot read image"):
        load(frame(image=images))
    with pytest.raises(UserError, match="lists no images"):
        load(frame(image=[b"x"] * 12), skip_bad_images=True)


def test_more_images_than_memory_allows_are_refused_before_they_are_read() -> None:
    data = items()
    loading = Loading(Path(), image_size=SIZE, channels=3, budget=MemoryBudget(12 * 3 * 256 - 1))
    with pytest.raises(UserError, match=r"12 images, which take .* GB at 16 pixels"):
        load_in_memory(data, loading, name="held")
    assert data.reads <= 1
