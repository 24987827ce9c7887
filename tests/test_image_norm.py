"""BatchNorm with a share of the image's own statistics."""

import io
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console
from timm.layers import BatchNormAct2d
from torch import nn

from solodg.adapters.bn import batch_statistics
from solodg.errors import UserError
from solodg.models import image_norm
from solodg.models.backbones import build_backbone
from solodg.models.extractor import ReadyFeatures, recorded_features
from solodg.models.image_norm import (
    ImageBatchNorm,
    donor_statistics,
    normalise_by_image,
    one_reading,
)
from solodg.predict.torch import Predictor
from solodg.progress import BarProgress
from solodg.readings import Reading
from solodg.runs.config import Machine, RunConfig
from solodg.runs.defaults import resolve
from solodg.runs.evaluate import evaluate_run
from solodg.runs.stream import Stream
from solodg.runs.train import train_run
from test_features import save_weights


def learned_norm(kind: type[nn.BatchNorm2d] = nn.BatchNorm2d) -> nn.BatchNorm2d:
    torch.manual_seed(0)
    norm = kind(3).double()
    for tensor in (norm.weight.data, norm.bias.data, norm.running_mean):
        tensor.copy_(torch.randn(3))
    norm.running_var.copy_(torch.rand(3) + 0.5)
    return norm.eval()


def test_each_image_is_normalised_by_the_mix_of_its_own_and_the_source_statistics() -> None:
    norm = learned_norm()
    x = torch.randn(4, 3, 5, 6).double() * 2 + 1
    mixed = ImageBatchNorm(norm, (70.0,)).eval()(x)
    share = 30 / 100
    for image, result in zip(x, mixed, strict=True):
        for channel in range(3):
            values = image[channel]
            mean = (1 - share) * norm.running_mean[channel] + share * values.mean()
            var = (1 - share) * norm.running_var[channel] + share * values.var(correction=0)
            expected = (values - mean) / (var + norm.eps).sqrt()
            expected = expected * norm.weight[channel] + norm.bias[channel]
            torch.testing.assert_close(result[channel], expected)


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, BatchNormAct2d])
def test_with_endless_source_pixels_it_is_the_batch_norm_it_replaces(
    kind: type[nn.BatchNorm2d],
) -> None:
    norm = learned_norm(kind)
    mixed = ImageBatchNorm(norm, (1e15,))
    x = torch.randn(4, 3, 5, 6).double()
    torch.testing.assert_close(mixed.eval()(x), norm(x))
    torch.testing.assert_close(mixed.train()(x), norm.train()(x))
    for name, tensor in norm.state_dict().items():
        torch.testing.assert_close(mixed.state_dict()[name], tensor, msg=name)


def test_a_reading_without_the_images_statistics_does_not_compute_them(monkeypatch) -> None:
    norm, x = learned_norm(), torch.randn(4, 3, 5, 6).double()
    mixed = ImageBatchNorm(norm, (70.0, 0.0)).eval()
    both = mixed(torch.cat([x, x]))
    torch.testing.assert_close(both[4:], norm(x))
    with one_reading(0):
        torch.testing.assert_close(mixed(x), both[:4])
    monkeypatch.setattr(image_norm, "channel_statistics", None)
    with one_reading(1):
        torch.testing.assert_close(mixed(x), norm(x))


def test_a_donor_is_found_in_one_reading_as_in_several() -> None:
    norm, x = learned_norm(), torch.randn(4, 3, 5, 6).double()
    mixed = ImageBatchNorm(norm, (70.0, 7.0)).eval()
    with donor_statistics(mixed, torch.tensor([3, 2, 0, 1])):
        both = mixed(torch.cat([x, x]))
        for place in (0, 1):
            with one_reading(place):
                torch.testing.assert_close(mixed(x), both.view(2, *x.shape)[place])


def test_training_stores_the_running_statistics_of_a_batch_norm() -> None:
    norm, x = nn.BatchNorm2d(3), torch.randn(4, 3, 5, 6)
    mixed = ImageBatchNorm(norm, (10.0,))
    mixed(x)
    norm(x)
    torch.testing.assert_close(mixed.running_mean, norm.running_mean)
    torch.testing.assert_close(mixed.running_var, norm.running_var)


@pytest.mark.parametrize("name", ["small_cnn", "resnet18", "tf_efficientnet_lite0"])
def test_a_prediction_depends_on_its_own_image_only(name: str) -> None:
    backbone = build_backbone(name, image_size=64, image_norm=100.0).eval()
    x = torch.rand(3, 3, 64, 64)
    together = backbone(x)
    alone = backbone(x[1:2])
    torch.testing.assert_close(together.embedding[1:2], alone.embedding, rtol=1e-4, atol=1e-5)
    plain = build_backbone(name, image_size=64).eval()
    assert plain.state_dict().keys() == backbone.state_dict().keys()
    plain.load_state_dict(backbone.state_dict())
    assert not torch.allclose(plain(x).embedding, together.embedding, atol=1e-3)


@pytest.mark.parametrize("name", ["small_cnn", "tf_efficientnet_lite0"])
def test_several_readings_are_averaged(name: str) -> None:
    several = build_backbone(name, image_size=64, image_norm=(0.0, 500.0, 50.0)).eval()
    x = torch.rand(3, 3, 64, 64)
    each = []
    for number in (0.0, 500.0, 50.0):
        one = build_backbone(name, image_size=64, image_norm=number).eval()
        one.load_state_dict(several.state_dict())
        each.append(one(x))
        with several.reading_as([Reading(number)]):
            torch.testing.assert_close(several(x).embedding, each[-1].embedding)
    found = several(x)
    for part in ("embedding", "style"):
        expected = torch.stack([getattr(features, part) for features in each]).mean(0)
        torch.testing.assert_close(getattr(found, part), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(several.embed(x), found.embedding)
    torch.testing.assert_close(several(x[1:2]).embedding, found.embedding[1:2])


def test_readings_in_pieces_are_those_of_one_batch(monkeypatch) -> None:
    norms = (0.0, "line:50", 50.0)
    backbone = build_backbone("small_cnn", image_size=32, image_norm=norms, pose=True).eval()
    x = torch.rand(7, 3, 32, 32)

    def found() -> list[torch.Tensor]:
        with torch.no_grad(), recorded_features() as seen:
            first = backbone.each_reading(x)[1](torch.tensor([6, 0, 1, 2, 3]))
            results = [backbone.each_reading(x)[0](None), first, backbone.embed_each(x)]
            results += [backbone.embed(x), *backbone(x)]
        with torch.no_grad():
            results += [backbone.embed_each(x), backbone.embed(x)]
            with donor_statistics(backbone, torch.arange(7).roll(1)):
                results.append(backbone.embed(x))
            with batch_statistics(image_norm.image_norms(backbone)):
                results.append(backbone.embed(x))
        assert [len(features.embedding) for features in seen] == [7] * 4
        return results + [part for features in seen for part in features]

    together = found()
    for rows in (1, 3, 7):
        monkeypatch.setattr(backbone, "_rows_at_once", lambda x, rows=rows: rows)
        torch.testing.assert_close(found(), together)


def test_in_training_each_image_goes_through_one_reading() -> None:
    backbone = build_backbone("small_cnn", image_size=64, image_norm=(0.0, 50.0)).train()
    backbone.freeze_norm()  # what is remembered, so that an image's features are its own
    x = torch.rand(1, 3, 64, 64).expand(40, -1, -1, -1)
    found = backbone(x).embedding.detach()
    each = []
    for number in (0.0, 50.0):
        with backbone.reading_as([Reading(number)]):
            each.append(backbone(x[:1]).embedding)
    which = [[bool(torch.allclose(row, one[0], atol=1e-5)) for one in each] for row in found]
    assert all(sum(row) == 1 for row in which)
    assert 5 < sum(row[0] for row in which) < 35


def test_ready_features_draw_or_average_readings_as_a_backbone_does() -> None:
    ready = ReadyFeatures(2, 1, readings=(Reading(0.0), Reading(300.0), Reading(100.0)))
    x = torch.arange(18.0).view(2, 9)
    torch.testing.assert_close(ready.eval()(x).embedding, x.view(2, 3, 3)[:, :, :2].mean(1))
    many = ready.train()(x[:1].expand(60, -1)).embedding[:, 0]
    assert set(many.tolist()) == {0.0, 3.0, 6.0}


@pytest.mark.parametrize(
    ("given", "kept"),
    [("300", 300.0), ("0", 0.0), ("0,3000,300", (0.0, 3000.0, 300.0)), ([7], 7.0), (None, None)],
)
def test_readings_are_given_as_numbers_or_text(given, kept) -> None:
    assert RunConfig(dataset="toy", image_norm=given).image_norm == kept


@pytest.mark.parametrize("given", ["-1", "3,3", "many", "0,-2", []])
def test_impossible_readings_are_refused(given) -> None:
    with pytest.raises(ValidationError):
        RunConfig(dataset="toy", image_norm=given)


def test_stored_features_of_several_readings_score_as_pixels_do(tmp_path: Path) -> None:
    save_weights(build_backbone("small_cnn", image_size=32), tmp_path / "w.safetensors")
    config = RunConfig(
        weights=str(tmp_path / "w.safetensors"),
        dataset="toy",
        targets=("sky",),
        backbone="small_cnn",
        freeze_backbone=True,
        algorithm="erm",
        steps=5,
        image_norm=(0.0, 50.0),
    )
    shown = io.StringIO()
    progress = BarProgress(Console(file=shown, width=200))
    machine = Machine(cache_dir=tmp_path / "cache")
    folder = train_run(config, machine, tmp_path / "run", progress=progress)
    for reading in (1, 2):
        assert f"Features of ash, {reading} of 2: done" in shown.getvalue()
    model = Predictor.load(folder)
    assert model.info.image_norm == (0.0, 50.0)
    stored = {r.domain: r.metrics for r in evaluate_run(folder, machine)}  # by stored features
    pixels = {r.domain: r.metrics for r in evaluate_run(folder, machine, stream=Stream())}
    assert stored["sky"]["nll"] == pytest.approx(pixels["sky"]["nll"], rel=1e-3)
    files = list((tmp_path / "cache").rglob("*.npy"))
    one = config.model_copy(update={"image_norm": 50.0})
    train_run(one, Machine(cache_dir=tmp_path / "cache"), tmp_path / "one")
    evaluate_run(tmp_path / "one", machine)
    assert list((tmp_path / "cache").rglob("*.npy")) == files  # each reading is kept once


def test_replaced_norms_of_a_frozen_network_stay_frozen() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).requires_grad_(False)
    normalise_by_image(net, (10.0,))
    assert not any(parameter.requires_grad for parameter in net.parameters())


def test_a_backbone_without_batch_norm_is_refused() -> None:
    with pytest.raises(UserError, match=r"--image-norm 0.*resnet18"):
        build_backbone("convnext_atto", image_size=64, image_norm=100.0)


def test_a_run_stores_image_norm_with_the_model(tmp_path: Path) -> None:
    config = RunConfig(
        dataset="toy", targets=("sky",), algorithm="solo", backbone="small_cnn", steps=2,
        image_norm=50.0,
    )  # fmt: skip
    train_run(config, Machine(), tmp_path / "run")
    model = Predictor.load(tmp_path / "run")
    assert model.info.image_norm == 50.0
    assert any(isinstance(m, ImageBatchNorm) for m in model.algorithm.modules())


def test_recipes_turn_image_norm_on_where_there_is_batch_norm_and_options_override_them() -> None:
    def resolved(**values) -> RunConfig:
        given = {"dataset": "toy", "algorithm": "solo_code", "backbone": "resnet18"}
        return resolve(RunConfig(**given | values))

    assert resolved().image_norm == 100
    assert resolved(pretrained=True).image_norm == (0, 3000, 300)
    assert resolved(backbone="alexnet").image_norm is None
    assert not resolve(resolved(image_norm=0)).image_norm  # also when asked twice
    assert resolved().arguments["frame"] == 2
    assert resolved(variant="no-frame").arguments["frame"] == 0
    assert resolved(arguments={"frame": 0}).arguments["frame"] == 0
    with pytest.raises(UserError, match="frame=-1"):
        resolved(arguments={"frame": -1})
    assert resolved(algorithm="erm").image_norm is None
    assert resolved(algorithm="erm").decay == "cosine"
    assert resolved(algorithm="erm", pretrained=True).decay is None
