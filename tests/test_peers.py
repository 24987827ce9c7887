"""What several training-time methods share: refused arguments, stored features, whole runs."""

from pathlib import Path

import pytest
import torch

from peer_models import as_episode, images, kind_on_images, on_features
from solodg.algorithms import ALGORITHMS, build_algorithm
from solodg.errors import UserError
from solodg.models.backbones import build_backbone
from solodg.runs.config import Machine, RunConfig
from solodg.runs.evaluate import evaluate_run
from solodg.runs.train import train_run
from solodg.types import Batch


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("csd", {"components": 1, "num_domains": 3}),
        ("jigen", {"permutations": 72}),
        ("mixstyle", {"probability": 1.5}),
        ("rsc", {"feature_share": 1.0}),
    ],
)
def test_impossible_arguments_are_refused(name: str, arguments: dict) -> None:
    with pytest.raises(ValueError, match="must"):
        kind_on_images(ALGORITHMS[name], **arguments)


@pytest.mark.parametrize("name", ["dson", "l2a_ot"])
def test_stored_features_are_a_user_error(name: str) -> None:
    with pytest.raises(UserError, match="stored features"):
        on_features(name)


@pytest.mark.parametrize("name", ["dson", "da_erm"])
def test_a_run_is_trained_saved_and_scored(tmp_path: Path, name: str) -> None:
    config = RunConfig(
        dataset="toy", algorithm=name, backbone="small_cnn", steps=2, validate_every=2
    )
    train_run(config, Machine(accelerator="cpu"), tmp_path)
    records = evaluate_run(tmp_path, accelerator="cpu")
    for record in records:
        few = {"target_images": min(256, record.metrics["images"])}  # a domain may have fewer
        assert record.stream == (few if name == "da_erm" else {})


@pytest.mark.parametrize("name", ["mldg", "masf"])
def test_inner_steps_are_differentiated_through_attention(name: str) -> None:
    backbone = build_backbone("vit_tiny_patch16_224", channels=3, image_size=32)
    algorithm = build_algorithm(name, backbone, num_classes=4, num_domains=3)
    batch = Batch(images(6).float(), torch.arange(6) % 4, torch.arange(6) // 2)
    algorithm.losses(as_episode(batch, 4))["loss"].backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in backbone.parameters())
