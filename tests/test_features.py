"""Frozen features: computed once, found again, and the same as the whole model's."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import solodg
from solodg.data import dataset_spec
from solodg.data.loading import Loading
from solodg.data.transforms import to_unit
from solodg.models.backbones import Backbone, build_backbone
from solodg.runs.config import Machine, RunConfig
from solodg.runs.evaluate import evaluate_run
from solodg.runs.train import train_run


def save_weights(donor: Backbone, path: Path) -> None:
    save_file({name: t.contiguous() for name, t in donor.net.state_dict().items()}, path)


@pytest.fixture
def frozen(tmp_path: Path, image_folder: Path):
    """A run's configuration on real files with a frozen backbone, and its machine."""
    torch.manual_seed(0)
    donor = build_backbone("small_cnn", channels=3, image_size=32)
    save_weights(donor, tmp_path / "w.safetensors")
    config = RunConfig(
        dataset=str(image_folder), targets=("b",), backbone="small_cnn", steps=30, image_size=32,
        weights=str(tmp_path / "w.safetensors"), freeze_backbone=True, context_images=2,
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
    from solodg.progress import NoProgress
    from solodg.runs.feature_cache import FeatureStore

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
        dataset="toy", backbone="small_cnn", steps=2, pseudo_domains="clusters", context_images=2
    )
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

    monkeypatch.setattr("solodg.data.images.decode", refuse)
    train_run(config.model_copy(update={"seed": 1}), machine, tmp_path / "r1")
    again = evaluate_run(tmp_path / "r0")
    assert [r.metrics for r in again] == [r.metrics for r in before]
