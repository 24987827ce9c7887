"""DA-ERM against small independent implementations."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from peer_models import DIM, as_episode, feature_batch, on_features
from solodg.algorithms.da_erm import DAERM
from solodg.data.transforms import to_unit
from solodg.runs import checkpoint
from solodg.runs.config import Machine, RunConfig
from solodg.runs.defaults import resolve
from solodg.runs.evaluate import evaluate_run
from solodg.runs.opened_data import input_batches, load_dataset, open_source
from solodg.runs.train import train_run
from solodg.types import Batch


def test_a_domain_is_the_mean_code_of_its_images() -> None:
    algorithm = on_features("da_erm").eval()
    batch = feature_batch()
    codes = algorithm.encode(batch.x[:, :DIM])
    centres = [codes[batch.domain == d].mean(0) for d in range(3)]
    with torch.inference_mode():
        algorithm.finalize(Batch(*(t[part] for t in batch)) for part in (slice(5), slice(5, 24)))
    torch.testing.assert_close(algorithm.domain_embedding, sum(centres).detach() / 3)

    losses = algorithm.losses(as_episode(batch, 16))
    both = torch.cat([batch.x[:, :DIM], torch.stack(centres)[batch.domain]], 1)
    expected = F.cross_entropy(algorithm.classifier(both), batch.y)
    torch.testing.assert_close(losses["class"], expected.detach())
    losses["loss"].backward()
    distances = torch.stack([(codes - centre).square().sum(1) for centre in centres], 1)
    own = torch.autograd.grad(
        F.cross_entropy(-distances, batch.domain), list(algorithm.encode.parameters())
    )
    for parameter, gradient in zip(algorithm.encode.parameters(), own, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)  # nothing of the class loss


def test_the_class_loss_alone_reaches_the_embedding() -> None:
    algorithm = on_features("da_erm")
    batch = feature_batch(requires_grad=True)
    algorithm.losses(as_episode(batch, 16))["loss"].backward()
    z = batch.x.detach()[:, :DIM].requires_grad_()
    codes = algorithm.encode(z).detach()
    centres = torch.stack([codes[batch.domain == d].mean(0) for d in range(3)])
    both = torch.cat([z, centres[batch.domain]], 1)
    (expected,) = torch.autograd.grad(F.cross_entropy(algorithm.classifier(both), batch.y), z)
    torch.testing.assert_close(batch.x.grad[:, :DIM], expected)


def test_target_images_change_predictions_until_the_next_finalize() -> None:
    algorithm = on_features("da_erm").eval()
    batch = feature_batch()
    shown = torch.cat([batch.x + shift for shift in (2, 3, 5)])
    with torch.inference_mode():
        algorithm.finalize([batch])
        plain = algorithm(batch.x)
        algorithm.see_target(shown)
        mean = algorithm.encode(shown[:, :DIM]).mean(0)
        torch.testing.assert_close(algorithm.domain_embedding, mean)
        both = torch.cat([batch.x[:, :DIM], mean.expand(len(batch.x), -1)], 1)
        torch.testing.assert_close(algorithm(batch.x), algorithm.classifier(both))
        assert (algorithm(batch.x) - plain).abs().max() > 1e-3
        algorithm.finalize([batch])
        assert torch.equal(algorithm(batch.x), plain)
    assert algorithm.target_images == 256


def test_da_erm_sees_images_of_the_scored_domain_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(
        dataset="toy", algorithm="da_erm", backbone="small_cnn", steps=1, validate_every=1
    )
    machine = Machine(accelerator="cpu")
    train_run(config, machine, tmp_path)
    shown: list[torch.Tensor] = []
    monkeypatch.setattr(DAERM, "see_target", lambda _self, x: shown.append(x.clone()))
    monkeypatch.setattr(DAERM, "target_images", 7)
    records = evaluate_run(tmp_path, accelerator="cpu")
    evaluate_run(tmp_path, accelerator="cpu")
    first, again = shown[: len(records)], shown[len(records) :]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    parts = load_dataset(resolve(config), machine).targets(resolve(config).targets)
    for record, images in zip(records, first, strict=True):
        assert record.stream == {"target_images": 7}
        assert len(images) == 7
        if record.role == "target":
            part = parts[record.domain]
            own = {row.numpy().tobytes() for row in to_unit(part.images.take(range(len(part))))}
            assert all(row.numpy().tobytes() in own for row in images)


def test_da_erm_is_validated_with_the_domain_in_sight_and_saved_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(
        dataset="toy", algorithm="da_erm", backbone="small_cnn", steps=3, validate_every=3
    )
    shown: list[torch.Tensor] = []
    see_target = DAERM.see_target

    def watched(self: DAERM, x: torch.Tensor) -> None:
        shown.append(x.clone())
        see_target(self, x)

    monkeypatch.setattr(DAERM, "see_target", watched)
    train_run(config, Machine(accelerator="cpu"), tmp_path)
    saved, _ = checkpoint.load(tmp_path)
    source, _ = open_source(resolve(config), Machine(accelerator="cpu"))
    val = source.val
    numbers = np.unique(val.domains)
    # Each domain by itself; what comes after it is for novelty and temperature.
    for number, x in zip(numbers, shown[: len(numbers)], strict=True):
        own = to_unit(val.images.take(np.flatnonzero(val.domains == number)))
        assert {row.numpy().tobytes() for row in x} <= {row.numpy().tobytes() for row in own}
    before = saved.domain_embedding.clone()
    with torch.inference_mode():
        saved.finalize(input_batches(source.train.balanced(config.centre_images, config.seed)))
    torch.testing.assert_close(before, saved.domain_embedding, atol=1e-5, rtol=1e-4)
