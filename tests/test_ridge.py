"""The classifier in closed form, against scikit-learn and plain float64 solutions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sklearn.linear_model import Ridge as SklearnRidge
from sklearn.preprocessing import StandardScaler

import solodg
from solodg.algorithms.ridge import SHRINKAGES, Ridge, square_rooted
from solodg.algorithms.ridge_sums import RidgeSums, total
from solodg.algorithms.solo_plus import SoloPlus
from solodg.errors import UserError
from solodg.models.backbones import build_backbone
from solodg.models.extractor import ReadyFeatures
from solodg.predict.export import export_onnx
from solodg.predict.torch import Predictor
from solodg.readings import Reading
from solodg.runs.config import Machine, RunConfig
from solodg.runs.defaults import resolve
from solodg.runs.evaluate import evaluate_run
from solodg.runs.folder import EVIDENCE
from solodg.runs.train import train_run
from solodg.storage import read_json
from solodg.types import Batch
from tests.test_features import save_weights

READINGS = (Reading(0.0), Reading(300.0))


def features(domains: int = 3, seed: int = 0) -> Batch:
    """Features in two readings: domains of unequal size, of which the last lacks a class."""
    generator = torch.Generator().manual_seed(seed)
    rows, y, domain = [], [], []
    for d in range(domains):
        for c in range(4 if d < domains - 1 else 3):
            count = 5 + 7 * d + 3 * c
            centre = torch.randn(6, generator=torch.Generator().manual_seed(c)).repeat(2)
            rows.append(centre + d / 3 + torch.randn(count, 12, generator=generator))
            y += [c] * count
            domain += [d] * count
    blank = torch.zeros(len(y), 2, 1)  # no style
    x = torch.cat([torch.cat(rows).view(-1, 2, 6), blank], 2).flatten(1)
    return Batch(x, torch.tensor(y), torch.tensor(domain))


def solved(batch: Batch, val: Batch | None = None) -> Ridge:
    model = Ridge(ReadyFeatures(6, 1, READINGS), num_classes=4).eval()
    pieces = [Batch(*parts) for parts in zip(*(t.split(17) for t in batch), strict=True)]
    model.solve(lambda: pieces, lambda: [val or features(seed=1)])
    return model


def sklearn_solution(batch: Batch, shrinkage: float) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias for square-rooted embeddings, by another library."""
    each = batch.x.view(-1, 2, 7)[:, :, :6].transpose(0, 1).reshape(-1, 6).double().numpy()
    z = np.sign(each) * np.sqrt(np.abs(each))
    y, d = (np.tile(t.numpy(), 2) for t in (batch.y, batch.domain))
    weight = np.array([1 / ((y == c) & (d == e)).sum() for c, e in zip(y, d, strict=True)])
    weight /= weight.sum()
    scaler = StandardScaler().fit(z, sample_weight=weight)
    fitted = SklearnRidge(alpha=shrinkage, solver="svd").fit(
        scaler.transform(z), np.eye(4)[y], sample_weight=weight
    )
    coefficients = fitted.coef_ / scaler.scale_
    return coefficients, fitted.intercept_ - coefficients @ scaler.mean_


@pytest.mark.parametrize("shrinkage", SHRINKAGES)
def test_sums_solve_as_scikit_learn_does(shrinkage: float) -> None:
    batch = features()
    model = Ridge(ReadyFeatures(6, 1, READINGS), num_classes=4)
    sums = model.domain_sums(lambda: [batch])
    weight, bias = total([s for of in sums.values() for s in of]).solve(shrinkage)
    expected = sklearn_solution(batch, shrinkage)
    np.testing.assert_allclose(weight.numpy(), expected[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(bias.numpy(), expected[1], rtol=1e-4, atol=1e-6)


def test_the_classifier_is_a_multiple_of_the_solution_with_the_best_shrinkage() -> None:
    batch = features()
    z = square_rooted(batch.x.view(-1, 2, 7)[:, :, :6]).mean(1).double().numpy()
    accuracy = []
    for shrinkage in SHRINKAGES:
        right = []
        for left_out in range(3):
            rest = Batch(*(t[batch.domain != left_out] for t in batch))
            weight, bias = sklearn_solution(rest, shrinkage)
            own = (batch.domain == left_out).numpy()
            chosen = (z[own] @ weight.T + bias).argmax(1)
            right.append((chosen == batch.y.numpy()[own]).mean())
        accuracy.append(np.mean(right))
    weight, bias = sklearn_solution(batch, SHRINKAGES[int(np.argmax(accuracy))])
    model = solved(batch)
    factors = model.classifier.weight.numpy() / weight
    assert factors.min() > 0
    np.testing.assert_allclose(factors, factors.mean(), rtol=1e-3)
    np.testing.assert_allclose(model.classifier.bias.numpy(), factors.mean() * bias, rtol=1e-3)


def test_the_factor_is_the_best_one_for_domains_that_were_left_out() -> None:
    batch, val = features(domains=2), features(domains=2, seed=1)
    model = solved(batch, val)
    factors = [
        float((model.classifier.weight.numpy() / sklearn_solution(batch, s)[0]).mean())
        for s in SHRINKAGES
    ]
    spread = [
        float((model.classifier.weight.numpy() / sklearn_solution(batch, s)[0]).std())
        for s in SHRINKAGES
    ]
    best = int(np.argmin(spread))

    def loss(factor: float) -> float:
        z = square_rooted(val.x.view(-1, 2, 7)[:, :, :6]).mean(1).double()
        found = torch.zeros(len(z), 4, dtype=torch.double)
        for left_out in range(2):
            rest = Batch(*(t[batch.domain != left_out] for t in batch))
            weight, bias = (torch.tensor(a) for a in sklearn_solution(rest, SHRINKAGES[best]))
            own = val.domain == left_out
            found[own] = z[own] @ weight.T + bias
        return float(torch.nn.functional.cross_entropy(factor * found, val.y))

    at = factors[best]
    assert loss(at) < min(loss(0.9 * at), loss(1.1 * at))


def test_one_domain_and_a_constant_feature_are_no_trouble() -> None:
    batch = features(domains=2)
    one = Batch(*(t[batch.domain == 0] for t in batch))
    one.x[:, 0] = one.x[:, 7] = 2.0
    model = solved(one, one)
    assert model.classifier.weight.isfinite().all()
    assert (model(one.x).argmax(1) == one.y).float().mean() > 0.6


def test_sums_of_parts_are_sums() -> None:
    batch = features()
    z, weight = batch.x[:, :6], torch.rand(len(batch.y))
    whole, first, second = (RidgeSums.zero(6, 4) for _ in range(3))
    whole.add_images(z, batch.y, weight)
    first.add_images(z[:20], batch.y[:20], weight[:20])
    second.add_images(z[20:], batch.y[20:], weight[20:])
    for a, b in zip(whole, first.plus(second), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    donor = build_backbone("small_cnn", channels=3, image_size=32)
    for norm in (m for m in donor.modules() if isinstance(m, torch.nn.BatchNorm2d)):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)  # as after training
        torch.nn.init.normal_(norm.bias, std=0.1)
    save_weights(donor, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def frozen(weights: Path, **values) -> RunConfig:
    given = {"dataset": "toy", "targets": ("sky",), "backbone": "small_cnn", "image_size": 32}
    return RunConfig(**given | {"weights": str(weights), "freeze_backbone": True} | values)


def test_the_default_on_a_frozen_backbone_is_solved_decides_and_is_exported(
    tmp_path: Path, weights: Path
) -> None:
    machine = Machine(accelerator="cpu", cache_dir=tmp_path / "cache")
    train_run(frozen(weights), machine, tmp_path / "run")
    evidence = read_json(tmp_path / "run" / EVIDENCE)
    assert "with a ridge classifier" in evidence["rests_on"]
    tried = {"plain", "image norm 300, 0", "image norm 1000, 0, line:300, 100"}
    assert all(set(found) == tried for found in evidence["accuracy"].values())
    model = Predictor.load(tmp_path / "run")
    assert isinstance(model.algorithm, SoloPlus)
    assert model.algorithm.closed_form
    records = evaluate_run(tmp_path / "run", machine)
    assert 0 < records[0].metrics["accuracy"] <= 1
    assert isinstance(model.algorithm, SoloPlus)
    assert ("readings" in records[0].metrics) == model.algorithm.exits_early
    assert records[0].config["arguments"] == {"classifier": "ridge", "early_exit": True}
    assert export_onnx(model, tmp_path / "model.onnx") < 1e-4


def test_views_are_part_of_the_saved_and_exported_model(tmp_path: Path, weights: Path) -> None:
    machine = Machine(accelerator="cpu", cache_dir=tmp_path / "cache")
    forced = frozen(weights, image_norm="0,line:50,zoom:0,flip:50,grey:0", algorithm="ridge")
    train_run(forced, machine, tmp_path / "run")
    model = Predictor.load(tmp_path / "run")
    assert [str(r) for r in model.algorithm.backbone.readings] == [
        "0", "line:50", "zoom:0", "flip:50", "grey:0",
    ]  # fmt: skip
    assert export_onnx(model, tmp_path / "model.onnx") < 1e-4
    images = np.random.default_rng(0).integers(0, 256, (3, 40, 32, 3), dtype=np.uint8)
    ours, theirs = (m.predict(list(images)) for m in (model, solodg.load(tmp_path / "model.onnx")))
    for a, b in zip(ours, theirs, strict=True):
        pair = [list(m.probabilities.values()) for m in (a, b)]
        np.testing.assert_allclose(pair[0], pair[1], atol=1e-4)


def test_a_trained_classifier_on_a_frozen_backbone_is_there_for_the_asking(weights: Path) -> None:
    linear = resolve(frozen(weights, arguments={"classifier": "linear"}))
    assert (linear.steps, linear.arguments) == (
        600,
        {"classifier": "linear", "early_exit": False},
    )
    tuned = resolve(frozen(weights, freeze_backbone=False))
    assert tuned.arguments == {"classifier": "linear", "early_exit": False}
    ridge = resolve(frozen(weights, freeze_backbone=False, algorithm="ridge"))
    assert (ridge.freeze_backbone, ridge.steps) == (True, 1)


def test_options_of_training_are_refused_and_so_are_unknown_views(weights: Path) -> None:
    with pytest.raises(UserError, match=r"--steps: .* closed form.*classifier=linear"):
        resolve(frozen(weights, steps=100))
    with pytest.raises(UserError, match="weights worth freezing"):
        resolve(RunConfig(dataset="toy", algorithm="ridge"))
    with pytest.raises(ValidationError, match="the views are plain, line, zoom, flip, grey"):
        frozen(weights, image_norm="0,sketch:300")
