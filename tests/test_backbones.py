"""Backbones: any timm model, AlexNet, our small one; styles, weights, channels, freezing."""

import subprocess
import sys

import pytest
import timm
import torch
from safetensors.torch import save_file

from solodg.errors import UserError
from solodg.models.backbones import build_backbone
from solodg.models.extractor import Extractor, ReadyFeatures, Standardised
from solodg.models.networks import has_batch_norm
from solodg.readings import Reading

# One that hands out its stages, one that only names them, one of tokens, and the special ones.
NAMES = ["resnet18", "densenet121", "vit_tiny_patch16_224", "alexnet", "small_cnn",
         "tf_efficientnet_lite0"]  # fmt: skip


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_features_have_the_dimensions_that_the_backbone_names(name: str, channels: int) -> None:
    torch.manual_seed(0)
    backbone = build_backbone(name, channels=channels, image_size=64).eval()
    features = backbone(torch.rand(2, channels, 64, 64))
    assert features.embedding.shape == (2, backbone.embedding_dim)
    assert features.style.shape == (2, backbone.style_dim)
    assert torch.isfinite(features.embedding).all()
    torch.manual_seed(1)
    x = torch.rand(2, channels, 64, 64)
    torch.testing.assert_close(backbone.embed(x), backbone(x).embedding)


def test_the_style_is_the_channel_means_of_every_stage() -> None:
    torch.manual_seed(0)
    backbone = build_backbone("resnet18", image_size=64).eval()
    x = torch.rand(3, 3, 64, 64)
    net = backbone.net.model
    h = net.maxpool(first := net.act1(net.bn1(net.conv1((x - backbone.mean) / backbone.std))))
    stages = [first]
    stages += [h := layer(h) for layer in (net.layer1, net.layer2, net.layer3, net.layer4)]
    expected = torch.cat([stage.mean((2, 3)) for stage in stages], 1)
    torch.testing.assert_close(backbone(x).style, expected)
    torch.testing.assert_close(backbone(x).embedding, stages[-1].mean((2, 3)))


def test_normalisation_is_the_published_one_for_colour_images() -> None:
    assert build_backbone("resnet18", image_size=32).mean.flatten().tolist() == pytest.approx(
        [0.485, 0.456, 0.406]
    )
    assert (
        build_backbone("tf_efficientnet_lite0", image_size=32).mean.flatten().tolist() == [0.5] * 3
    )


def test_weights_from_a_file_are_loaded_and_a_classifier_in_it_ignored(tmp_path) -> None:
    torch.manual_seed(0)
    donor = timm.create_model("resnet18", num_classes=10)
    state = {k: v for k, v in donor.state_dict().items() if "num_batches_tracked" not in k}
    save_file(state, tmp_path / "w.safetensors")
    backbone = build_backbone("resnet18", image_size=32, weights=tmp_path / "w.safetensors")
    assert torch.equal(backbone.net.model.conv1.weight, donor.conv1.weight)


def test_colour_weights_serve_grey_images(tmp_path) -> None:
    donor = timm.create_model("resnet18", num_classes=10)
    save_file(donor.state_dict(), tmp_path / "w.safetensors")
    path = tmp_path / "w.safetensors"
    backbone = build_backbone("resnet18", channels=1, image_size=32, weights=path)
    expected = donor.conv1.weight.sum(1, keepdim=True)
    torch.testing.assert_close(backbone.net.model.conv1.weight, expected)


def test_weights_of_another_model_are_refused(tmp_path) -> None:
    save_file(timm.create_model("resnet18").state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="does not fit backbone 'resnet34'"):
        build_backbone("resnet34", image_size=32, weights=tmp_path / "w.safetensors")


def test_weights_of_a_larger_sibling_are_refused(tmp_path) -> None:
    save_file(timm.create_model("resnet34").state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="not of this model"):
        build_backbone("resnet18", image_size=32, weights=tmp_path / "w.safetensors")
    save_file(timm.create_model("resnet50").state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="does not fit"):
        build_backbone("resnet18", channels=1, image_size=32, weights=tmp_path / "w.safetensors")


def test_alexnet_files_of_torchvision_are_read(tmp_path) -> None:
    import torchvision

    donor = torchvision.models.alexnet()
    save_file(donor.state_dict(), tmp_path / "w.safetensors")
    backbone = build_backbone("alexnet", image_size=64, weights=tmp_path / "w.safetensors")
    assert torch.equal(backbone.net.model.classifier[1].weight, donor.classifier[1].weight)


def test_images_too_small_for_a_backbone_are_explained() -> None:
    with pytest.raises(UserError, match=r"32 pixels.*--image-size"):
        build_backbone("alexnet", image_size=32)


def test_normalisation_is_saved_with_the_weights() -> None:
    assert {"mean", "std"} <= build_backbone("small_cnn", image_size=32).state_dict().keys()


def test_a_damaged_or_missing_weights_file_is_named(tmp_path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UserError, match="not a readable safetensors file"):
        build_backbone("resnet18", image_size=32, weights=tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="no weights file"):
        build_backbone("resnet18", image_size=32, weights=tmp_path / "none")


def test_an_unknown_name_gets_its_neighbours() -> None:
    with pytest.raises(UserError, match="resnet18"):
        build_backbone("resnet-18")


def test_a_frozen_backbone_stays_as_it_is_in_training() -> None:
    backbone = build_backbone("small_cnn", channels=1, image_size=32)
    backbone.freeze()
    before = {k: v.clone() for k, v in backbone.state_dict().items()}
    backbone.train()
    assert not backbone(torch.rand(4, 1, 32, 32)).embedding.requires_grad
    assert all(torch.equal(v, before[k]) for k, v in backbone.state_dict().items())


def test_frozen_norm_keeps_statistics_but_trains_weights() -> None:
    backbone = build_backbone("small_cnn", channels=1, image_size=32)
    backbone.freeze_norm()
    before = {k: v.clone() for k, v in backbone.named_buffers()}
    backbone.train()
    assert backbone(torch.rand(4, 1, 32, 32)).embedding.requires_grad
    assert all(torch.equal(v, before[k]) for k, v in backbone.named_buffers())


def test_ready_features_are_split_in_two() -> None:
    features = ReadyFeatures(2, 3)(torch.arange(10.0).view(2, 5))
    assert features.embedding.tolist() == [[0, 1], [5, 6]]
    assert features.style.tolist() == [[2, 3, 4], [7, 8, 9]]


@pytest.mark.parametrize("name", ["small_cnn", "alexnet", "resnet18", "tf_efficientnet_lite0"])
def test_only_the_last_stages_are_trained(name: str) -> None:
    size = 32 if name == "small_cnn" else 64
    backbone = build_backbone(name, image_size=size)
    stages = backbone.net.stages()
    every = {id(p) for group in stages for p in group}
    assert every == {id(p) for p in backbone.parameters()}
    backbone.train_last(2)
    trained = {id(p) for p in backbone.parameters() if p.requires_grad}
    assert trained == {id(p) for group in stages[-2:] for p in group}
    backbone(torch.rand(2, 3, size, size)).embedding.sum().backward()
    for parameter in backbone.parameters():
        assert (parameter.grad is not None) == (id(parameter) in trained)
    with pytest.raises(UserError, match="stages"):
        backbone.train_last(len(stages) + 1)


def test_a_last_norm_is_no_stage() -> None:
    stages = build_backbone("convnext_atto", image_size=64).net.stages()
    assert max(parameter.ndim for parameter in stages[-1]) == 4


@pytest.mark.parametrize(
    ("name", "expected"),
    [("small_cnn", True), ("resnet18", True), ("tf_efficientnet_lite0", True), ("alexnet", False),
     ("convnext_atto", False), ("vit_tiny_patch16_224", False), ("resnet-18", True)],
)  # fmt: skip
def test_which_backbones_have_batch_norm(name: str, expected: bool) -> None:
    assert has_batch_norm(name) is expected


EXTRACTORS = {
    "backbone": lambda: build_backbone("small_cnn", image_size=32),
    "readings": lambda: build_backbone("small_cnn", image_size=32, image_norm=(0.0, 50.0)),
    "ready": lambda: ReadyFeatures(5, 3, readings=(Reading(0.0), Reading(300.0))),
    "standardised": lambda: Standardised(torch.rand(20, 4)),
}
INPUTS = {"ready": (2, 16), "standardised": (2, 4)}


@pytest.mark.parametrize("name", EXTRACTORS)
def test_every_extractor_has_the_dimensions_that_it_names(name: str) -> None:
    extractor = EXTRACTORS[name]().eval()
    assert isinstance(extractor, Extractor)
    x = torch.rand(INPUTS.get(name, (2, 3, 32, 32)))
    features = extractor(x)
    assert features.embedding.shape == (2, extractor.embedding_dim)
    assert features.style.shape == (2, extractor.style_dim)
    torch.testing.assert_close(extractor.embed(x), features.embedding)
    pooled = extractor.pool(extractor.last_map(x))  # of a backbone one reading after the other
    pooled = pooled.view(-1, 2, extractor.embedding_dim).mean(0)
    torch.testing.assert_close(pooled, features.embedding)


@pytest.mark.parametrize("name", ["ready", "standardised"])
def test_extractors_of_stored_features_have_no_images_and_no_stages(name: str) -> None:
    extractor = EXTRACTORS[name]()
    assert extractor.channels is None
    assert extractor.stage_modules() == []


def test_timm_is_imported_only_for_a_backbone_that_needs_it() -> None:
    code = (
        "import sys; from solodg.models import build_backbone; build_backbone('small_cnn'); "
        "early = 'timm' in sys.modules; build_backbone('resnet18'); "
        "sys.exit(early or 'timm' not in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("norm", [None, (0.0, 100.0)])
def test_a_backbone_knows_its_largest_map_for_one_image_in_one_reading(norm) -> None:
    backbone = build_backbone("small_cnn", image_size=28, image_norm=norm)
    assert backbone._largest_map == 32 * 14 * 14  # the first convolution's
