"""Frozen features: computed once, found again, and the same as the whole model's."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import solodg
from solodg.algorithms import ALGORITHMS, build_algorithm
from solodg.data import dataset_spec
from solodg.data.loading import Loading
from solodg.data.transforms import to_unit
from solodg.errors import UserError
from solodg.models.backbones import Backbone, build_backbone
from solodg.progress import NoProgress
from solodg.runs import checkpoint
from solodg.runs.build import ready_features
from solodg.runs.config import Machine, RunConfig
from solodg.runs.evaluate import evaluate_run
from solodg.runs.feature_cache import FeatureStore
from solodg.runs.metrics import predict
from solodg.runs.opened_data import input_batches
from solodg.runs.scored_data import open_scored, reading_features
from solodg.runs.train import train_run
from solodg.types import Batch


def save_weights(donor: Backbone, path: Path) -> None:
    save_file({name: t.contiguous() for name, t in donor.net.state_dict().items()}, path)


@pytest.fixture
def frozen(tmp_path: Path, image_folder: Path):
    """A run's configuration on real files with a frozen backbone, and its machine."""
    torch.manual_seed(0)
    donor = build_backbone("small_cnn", channels=3, image_size=32)
    save_weights(donor, tmp_path / "w.safetensors")
    config = RunConfig(
        dataset=str(image_folder), algorithm="solo", targets=("b",), backbone="small_cnn", steps=30,
        image_size=32, weights=str(tmp_path / "w.safetensors"), freeze_backbone=True,
        context_images=2,
    )  # fmt: skip
    return config, Machine(accelerator="cpu", cache_dir=tmp_path / "cache")


@pytest.fixture
def forward_count(monkeypatch) -> list[int]:
    seen: list[int] = []
    real = Backbone.forward

    def counted(self, x):
        seen.append(len(x))
        return real(self, x)

    monkeypatch.setattr(Backbone, "forward", counted)
    return seen


def computed(seen: list[int]) -> int:
    """Images that went through a backbone, but for those that tell it its dimensions."""
    total = sum(n for n in seen if n > 1)
    seen.clear()
    return total


def test_features_are_computed_once_for_all_runs(tmp_path, frozen, forward_count) -> None:
    config, machine = frozen
    train_run(config, machine, tmp_path / "r0")
    assert computed(forward_count) == 30  # domains a and c; the target b is not touched
    train_run(config.model_copy(update={"seed": 1}), machine, tmp_path / "r1")
    assert computed(forward_count) == 0  # another split, the same images
    train_run(config.model_copy(update={"algorithm": "erm"}), machine, tmp_path / "r2")
    assert computed(forward_count) == 0
    evaluate_run(tmp_path / "r0")
    assert computed(forward_count) == 20  # only now the target
    other = config.model_copy(update={"targets": ("a",)})
    train_run(other, machine, tmp_path / "r3")
    assert computed(forward_count) == 0


def test_a_model_trained_on_features_predicts_images(tmp_path, frozen, image_folder) -> None:
    config, machine = frozen
    train_run(config, machine, tmp_path / "run")
    model = solodg.load(tmp_path / "run")
    paths = sorted((image_folder / "b").rglob("*.png"))
    predictions = model.predict(paths)
    accuracy = np.mean(
        [p.label == path.parent.name for p, path in zip(predictions, paths, strict=True)]
    )
    assert evaluate_run(tmp_path / "run")[0].metrics["accuracy"] == pytest.approx(accuracy)


def test_other_weights_or_other_images_are_other_features(tmp_path, frozen, forward_count) -> None:
    config, machine = frozen
    train_run(config, machine, tmp_path / "r0")
    computed(forward_count)
    torch.manual_seed(9)
    donor = build_backbone("small_cnn", channels=3, image_size=32)
    save_weights(donor, tmp_path / "w.safetensors")
    train_run(config.model_copy(update={"seed": 2}), machine, tmp_path / "r1")
    assert computed(forward_count) == 30
    (Path(config.dataset) / "a" / "pear" / "3.png").unlink()
    train_run(config.model_copy(update={"seed": 3}), machine, tmp_path / "r2")
    assert computed(forward_count) == 19  # domain a anew, domain c found


def test_stored_features_are_the_features_of_their_image(tmp_path, image_folder) -> None:
    backbone = build_backbone("small_cnn", channels=3, image_size=32).eval()
    dataset = dataset_spec(str(image_folder)).load(Loading(Path("."), 32, 3))
    source = dataset.leave_out(["b"], seed=4)
    store = FeatureStore(backbone, "small_cnn", tmp_path, torch.device("cpu"), NoProgress())
    for part, stored in zip(
        (source.train, source.val), store.replace_images([source.train, source.val]), strict=True
    ):
        order = np.random.default_rng(0).permutation(len(part))
        with torch.inference_mode():
            expected = torch.cat(backbone(to_unit(part.images.take(order))), 1)
        torch.testing.assert_close(stored.images.take(order), expected, atol=1e-5, rtol=1e-5)
        assert stored.images.keys() == part.images.keys()
        half = stored.images.subset(order[:3])
        torch.testing.assert_close(half.take([2, 0]), expected[[2, 0]], atol=1e-5, rtol=1e-5)


def test_an_image_changed_in_place_is_another_image(tmp_path, frozen, forward_count) -> None:
    config, machine = frozen
    path = Path(config.dataset) / "a" / "pear" / "3.png"
    bitmap = path.with_suffix(".bmp")
    Image.open(path).save(bitmap)
    path.unlink()
    train_run(config, machine, tmp_path / "r0")
    computed(forward_count)
    size = bitmap.stat().st_size
    Image.open(bitmap).point(lambda value: 255 - value).save(bitmap)
    assert bitmap.stat().st_size == size
    train_run(config.model_copy(update={"seed": 1}), machine, tmp_path / "r1")
    assert computed(forward_count) == 20


def test_a_backbone_can_be_trained_after_its_features_made_clusters(tmp_path) -> None:
    config = RunConfig(
        dataset="toy", algorithm="solo", backbone="small_cnn", steps=2, context_images=2,
        pseudo_domains="clusters",
    )  # fmt: skip
    train_run(config, Machine(accelerator="cpu", cache_dir=tmp_path / "cache"), tmp_path / "run")
    assert (tmp_path / "run" / "finished.json").is_file()


def test_images_whose_features_are_stored_are_not_decoded_again(
    tmp_path, frozen, monkeypatch
) -> None:
    config, machine = frozen
    train_run(config, machine, tmp_path / "r0")
    before = evaluate_run(tmp_path / "r0")

    def refuse(*_args, **_settings):
        raise AssertionError("an image was decoded")

    monkeypatch.setattr("solodg.data.images.decode_pixels", refuse)
    train_run(config.model_copy(update={"seed": 1}), machine, tmp_path / "r1")
    again = evaluate_run(tmp_path / "r0")
    assert [r.metrics for r in again] == [r.metrics for r in before]


@pytest.mark.parametrize("algorithm", ["erm", "solo_code", "solo_plus"])
def test_opening_data_to_score_leaves_the_model_as_it_was(tmp_path, frozen, algorithm) -> None:
    config, machine = frozen
    steps = None if algorithm == "solo_plus" else 4  # which is solved in closed form
    values = {"algorithm": algorithm, "steps": steps, "validate_every": None}
    train_run(config.model_copy(update=values), machine, tmp_path / "run")
    model, info = checkpoint.load(tmp_path / "run")
    modules = list(model.modules())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scored = open_scored(
        tmp_path / "run", model, info, machine, torch.device("cpu"),
        progress=NoProgress(), say=lambda text: None,
    )  # fmt: skip
    assert [id(module) for module in model.modules()] == [id(module) for module in modules]
    assert not any(module.training for module in modules)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    # Both predict the same: the model from pixels, its copy from stored features.
    target = scored.parts[0]
    found = predict(scored.algorithm.probabilities, input_batches(target.images))
    expected = predict(model.probabilities, input_batches(target.pixels))
    np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=1e-5)
    # What the copy learns is not the model's.
    with torch.no_grad():
        for parameter in scored.algorithm.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(after[name], before[name]) for name in before)


NEED_IMAGES = ("dson", "jigen", "l2a_ot", "miro", "mixstyle", "ttt")  # or a trained backbone


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_that_can_be_trained_on_features_can_be_scored_on_them(name) -> None:
    torch.manual_seed(0)
    backbone = build_backbone("small_cnn", channels=3, image_size=32).eval()
    if name in NEED_IMAGES:
        with pytest.raises(UserError, match="stored features"):
            build_algorithm(name, ready_features(backbone), num_classes=3, num_domains=2)
        return
    algorithm = build_algorithm(name, backbone, num_classes=3, num_domains=2).eval()
    y = torch.arange(6) % 3
    with torch.inference_mode():
        algorithm.finalize([Batch(torch.rand(6, 3, 32, 32), y, torch.arange(6) % 2)])
        x = torch.rand(4, 3, 32, 32)
        copy = reading_features(algorithm)
        assert algorithm.backbone is backbone
        found = copy.probabilities(torch.cat(backbone(x), 1))
        torch.testing.assert_close(found, algorithm.probabilities(x), atol=1e-5, rtol=1e-4)


def test_the_size_of_batches_does_not_change_stored_features(tmp_path, monkeypatch) -> None:
    """To the bit: a cache that was computed in batches of 32 stays true."""
    torch.manual_seed(0)
    backbone = build_backbone("small_cnn", channels=3, image_size=32).eval()
    part = dataset_spec("toy").load(Loading(Path("."), 32, 3)).targets(["sky"])["sky"]
    files = []
    for name, size in (("rule", None), ("fixed", 32)):
        if size is not None:
            monkeypatch.setattr(
                "solodg.runs.feature_cache.inference_batch_size", lambda numbers: 32
            )
        store = FeatureStore(
            backbone, "small_cnn", tmp_path / name, torch.device("cpu"), NoProgress()
        )
        store.replace_images([part])
        files.append([path.read_bytes() for path in (tmp_path / name).glob("*.npy")])
    assert len(part) > 32
    assert files[0] == files[1]


@pytest.mark.parametrize("damage", ["flipped", "emptied", "cut", "foreign"])
def test_damaged_features_are_computed_again(tmp_path, image_folder, forward_count, damage) -> None:
    data = dataset_spec(str(image_folder)).load(Loading(tmp_path, image_size=32, channels=3))
    torch.manual_seed(0)
    backbone = build_backbone("small_cnn", channels=3, image_size=32)
    parts = list(data.targets(["b"]).values())

    def features() -> tuple[torch.Tensor, int]:
        store = FeatureStore(backbone, "small_cnn", tmp_path, torch.device("cpu"), NoProgress())
        forward_count.clear()
        (part,) = store.replace_images(parts)
        return part.images.take(range(len(part))), sum(forward_count)

    whole, count = features()
    assert (count, features()[1]) == (len(whole), 0)
    (path,) = tmp_path.glob("*.npy")
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 64]) + content[middle + 1 :]
    kinds = {"flipped": flipped, "emptied": b"", "cut": content[:middle], "foreign": b"x" * 99}
    path.write_bytes(kinds[damage])
    store = FeatureStore(backbone, "small_cnn", tmp_path, torch.device("cpu"), NoProgress())
    assert not store.holds(parts)
    repaired, count = features()
    assert count == len(whole)
    assert torch.equal(repaired, whole)
    assert path.read_bytes() == content
