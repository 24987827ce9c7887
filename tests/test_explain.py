"""A figure's numbers are the model's; the projection is the sources'; names never overlap."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from figure_text import disorder, texts
from solodg.errors import UserError
from solodg.explain.explanation import ClassifierOutput, Explanation, Neighbour, explain
from solodg.explain.figure import (
    ONE_CLASSIFIER,
    explain_figure,
    probabilities_figure,
    projection_figure,
)
from solodg.explain.projection import (
    IMAGES_PER_CELL,
    PROJECTION_FILE,
    Projection,
    principal_axes,
    stored_projection,
)
from solodg.figures.style import png, svg, themed_svg
from solodg.predict.torch import Predictor
from solodg.runs.config import Machine, RunConfig
from solodg.runs.folder import read_config, read_machine
from solodg.runs.opened_data import open_source
from solodg.runs.predictions import Predictions
from solodg.runs.train import train_run
from solodg.storage.tensors import read_tensors, write_tensors

KINDS = [("solo", "default"), ("solo", "invariant"), ("solo_code", "default"), ("erm", "default")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("explained")
    return {
        (algorithm, variant): train_run(
            RunConfig(dataset="toy", targets=("sky",), algorithm=algorithm, variant=variant,
                      backbone="small_cnn", steps=12, batch_size=8),
            Machine(accelerator="cpu"), root / f"{algorithm}-{variant}",
        )
        for algorithm, variant in KINDS
    }  # fmt: skip


@pytest.fixture(scope="module")
def picture(toy) -> torch.Tensor:
    return toy.targets(["sky"])["sky"].images.take([3])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_prototypes_times_embedding_are_the_models_logits(runs, picture, kind) -> None:
    model = Predictor.load(runs[kind])
    found = explain(model, stored_projection(runs[kind], model), picture)
    with torch.inference_mode():
        forward = model.algorithm(picture[None] / 255.0)[0].numpy()
    assert found.after.prototypes @ found.embedding + found.after.bias == pytest.approx(
        forward, abs=1e-4
    )
    assert found.after.logits == pytest.approx(forward, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_are_those_that_predict_reports(runs, picture, kind) -> None:
    model = Predictor.load(runs[kind])
    found = explain(model, stored_projection(runs[kind], model), picture)
    assert found.prediction == model.predict(picture)
    sampled = found.after.samples.mean(0)
    assert found.predictions.probabilities[0] == pytest.approx(sampled, abs=1e-6)
    if found.before is not None:
        sampled = found.before.samples.mean(0)
        assert found.predictions.before[0] == pytest.approx(sampled, abs=1e-6)


def test_sampled_probabilities_are_those_of_the_gaussians_that_are_drawn(runs, picture) -> None:
    """By a plain loop in float64: the mean classifier's softmax is another number."""
    folder = runs["solo", "default"]
    model = Predictor.load(folder)
    found = explain(model, stored_projection(folder, model), picture)
    with torch.inference_mode():
        own = model.algorithm.classifiers(picture[None] / 255.0)
        prior = model.algorithm.prior_classifier()
    gaussians = [(found.after, own.mean[0], own.scale[0]), (found.before, *prior)]
    for classifier, mean, scale in gaussians:
        rows = []
        for noise in model.algorithm.test_noise.double().numpy():
            logits = []
            for c in range(len(mean)):
                m, s = mean[c].double().numpy(), scale[c].double().numpy()
                spread = np.sqrt((s**2 * found.embedding**2).sum())
                logits.append((m * found.embedding).sum() + noise[c] * spread)
            rows.append(np.exp(logits) / np.exp(logits).sum())
        assert classifier.samples == pytest.approx(np.array(rows), abs=1e-5)
        assert classifier.prototypes == pytest.approx(mean.numpy(), abs=1e-6)
        low, high = classifier.interval()
        assert (low <= high).all()
        plain = np.exp(classifier.logits) / np.exp(classifier.logits).sum()
        assert not np.allclose(plain, classifier.samples.mean(0), rtol=0, atol=1e-9)


def test_before_is_the_classifier_of_the_sources_for_every_image(runs, toy) -> None:
    folder = runs["solo", "default"]
    model = Predictor.load(folder)
    projection = stored_projection(folder, model)
    images = toy.targets(["sky"])["sky"].images.take([0, 50])
    one, other = (explain(model, projection, image) for image in images)
    rows, _ = model.algorithm.linear_classifier()
    for found in (one, other):
        assert found.before.prototypes == pytest.approx(rows.detach().numpy(), abs=1e-6)
        assert found.before.prototypes @ found.embedding == pytest.approx(
            found.before.logits, abs=1e-4
        )
    assert not np.allclose(one.after.prototypes, other.after.prototypes)
    way = one.after.prototypes - one.before.prototypes
    start = one.before.prototypes - one.before.prototypes.mean(0)
    expected = np.linalg.norm(way - way.mean(0), axis=1) / np.linalg.norm(start, axis=1)
    assert one.moved == pytest.approx(expected)


def test_the_projection_is_fitted_on_a_few_source_training_images_alone(runs) -> None:
    folder = runs["solo", "default"]
    projection = stored_projection(folder, Predictor.load(folder))
    source, _ = open_source(read_config(folder), read_machine(folder))
    train = source.train
    known = {train.images.take([i])[0].numpy().tobytes() for i in range(len(train))}
    assert all(small.tobytes() in known for small in projection.thumbnails)  # toy images are small
    assert "sky" not in projection.domain_names
    cells = list(zip(projection.labels.tolist(), projection.domains.tolist(), strict=True))
    assert max(cells.count(cell) for cell in set(cells)) <= IMAGES_PER_CELL
    assert projection.axes @ projection.axes.T == pytest.approx(np.eye(2), abs=1e-5)
    assert 0 < projection.shown_centres <= 1
    assert 0 < projection.shown_images <= 1


def test_a_source_image_is_its_own_nearest(runs, toy) -> None:
    folder = runs["erm", "default"]
    model = Predictor.load(folder)
    projection = stored_projection(folder, model)
    found = explain(model, projection, torch.from_numpy(projection.thumbnails[17]))
    assert found.nearest[0].index == 17
    assert found.nearest[0].distance == pytest.approx(0, abs=1e-3)
    assert found.nearest[0].label == model.classes[projection.labels[17]]
    distances = [n.distance for n in found.nearest]
    assert distances == sorted(distances)


def test_the_projection_is_kept_until_the_weights_change(runs) -> None:
    folder = runs["solo", "invariant"]
    model = Predictor.load(folder)
    first = stored_projection(folder, model)
    written = (folder / PROJECTION_FILE).stat().st_mtime_ns
    stored_projection(folder, model)
    assert (folder / PROJECTION_FILE).stat().st_mtime_ns == written
    tensors, header = read_tensors(folder / PROJECTION_FILE)
    stale = {name: torch.zeros_like(t) for name, t in tensors.items()}
    write_tensors(folder / PROJECTION_FILE, stale, header | {"weights": "of another model"})
    again = stored_projection(folder, model)
    assert np.array_equal(again.axes, first.axes)
    assert np.array_equal(again.embeddings, first.embeddings)


def test_axes_weigh_every_pair_of_centres_the_same() -> None:
    centres = np.random.default_rng(0).normal(size=(6, 9)) * np.array([9, *[1] * 8])
    centres -= centres.mean(0)
    pairs = [a - b for a, b in itertools.combinations(centres, 2)]
    rows = np.stack([pair / np.linalg.norm(pair) for pair in pairs])
    expected = np.linalg.svd(rows)[2][:2]
    found = principal_axes(centres, centres)
    assert np.abs((found * expected).sum(1)) == pytest.approx([1, 1])


def test_two_classes_give_one_axis_and_the_images_the_other() -> None:
    generator = np.random.default_rng(0)
    centres = np.array([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]])
    images = generator.normal(size=(50, 4)) * np.array([1, 1, 7, 1])
    found = np.abs(principal_axes(centres, images - images.mean(0)))
    assert found[0] == pytest.approx([1, 0, 0, 0], abs=1e-6)
    assert found[1, 2] > 0.95


def test_one_classifier_for_all_is_not_drawn_twice(runs, picture) -> None:
    for kind in (("erm", "default"), ("solo", "invariant")):
        model = Predictor.load(runs[kind])
        found = explain(model, stored_projection(runs[kind], model), picture)
        assert found.before is None
        assert found.moved is None
        words = texts(explain_figure(found))
        assert any(ONE_CLASSIFIER in word for word in words)
        assert "prototype before" not in words
        assert "before" not in words


def test_a_method_without_a_linear_classifier_is_drawn_without_prototypes(
    runs, picture, monkeypatch
) -> None:
    folder = runs["erm", "default"]
    model = Predictor.load(folder)
    projection = stored_projection(folder, model)

    def none() -> None:
        raise UserError("no linear classifier")

    monkeypatch.setattr(model.algorithm, "linear_classifier", none)
    found = explain(model, projection, picture)
    assert found.after.prototypes is None
    assert "prototype" not in texts(explain_figure(found))


def made(classes: int, *, adapts: bool = True, name: str = "class") -> Explanation:
    """Of no model: many classes with long names, all in one place."""
    generator = np.random.default_rng(classes)
    dim, count = 16, 3 * classes
    centres = generator.normal(size=(classes, dim))
    axes = principal_axes(centres - centres.mean(0), centres)
    projection = Projection(centres.mean(0), axes, centres, 1.0, 0.5, 0.1,
                  np.repeat(centres, 3, 0) + generator.normal(size=(count, dim)),
                  np.repeat(np.arange(classes), 3), np.zeros(count, dtype=np.int64),
                  ("a long name of a domain",), np.zeros((count, 3, 8, 8), np.uint8))  # fmt: skip
    names = tuple(f"{name}_{i}_of_many" for i in range(classes))

    def output(shift: float) -> ClassifierOutput:
        rows = centres + shift * generator.normal(size=centres.shape)
        samples = generator.dirichlet(np.full(classes, 0.3), size=8)
        return ClassifierOutput(rows, np.zeros(classes), rows @ centres[0], samples)

    near = tuple(Neighbour(i, float(i), names[i], projection.domain_names[0]) for i in range(5))
    before, after = output(0) if adapts else None, output(0.2)
    predictions = Predictions(
        after.samples.mean(0)[None], before.samples.mean(0)[None] if before else None
    )
    return Explanation(np.full((3, 8, 8), 200, np.uint8), names, projection, centres[0],
                       predictions, before, after, near, truth=1)  # fmt: skip


@pytest.mark.parametrize("adapts", [True, False])
@pytest.mark.parametrize("classes", [5, 7, 10, 65])
def test_no_text_lies_over_another_or_outside(classes: int, adapts: bool) -> None:
    found = made(classes, adapts=adapts)
    for draw in (explain_figure, projection_figure, probabilities_figure):
        assert disorder(draw(found)) == []


def test_pictures_are_what_their_names_say() -> None:
    figure = explain_figure(made(7), "x.png")
    assert png(figure).startswith(b"\x89PNG")
    text = svg(figure).decode()
    assert "<svg" in text
    assert "class_3_of_ma" in text  # real text, that can be searched
    themed = themed_svg(figure).decode()
    assert "currentColor" in themed
    assert "prefers-color-scheme" in themed
    assert themed == themed_svg(explain_figure(made(7), "x.png")).decode()  # the same every time


def test_important_classes_are_those_that_were_said_or_are_true() -> None:
    found = replace(made(65), truth=40)
    first = set(found.important[:3])
    assert {found.predictions.chosen[0], found.predictions.chosen_before[0], 40} == first


def test_explain_writes_both_kinds_for_every_image_and_names_the_bad(
    runs, toy, tmp_path, solodg
) -> None:
    folder = runs["solo", "default"]
    for name in ("a/x.png", "b/x.png"):
        (tmp_path / name).parent.mkdir()
        pixels = toy.targets(["sky"])["sky"].images.take([5])[0].permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(tmp_path / name)
    (tmp_path / "bad.png").write_bytes(b"no image")
    paths = [tmp_path / "a" / "x.png", tmp_path / "bad.png", tmp_path / "b" / "x.png"]
    code, out, err = solodg("explain", folder, *paths, "--output", tmp_path / "out")
    assert code == 2
    assert "bad.png" in err
    assert "after:" in out
    made_files = {p.name for p in (tmp_path / "out").iterdir()}
    assert made_files == {"x.png", "x.svg", "b-x.png", "b-x.svg"}


def test_an_image_is_shown_in_the_pose_that_the_model_estimates(runs, picture) -> None:
    for kind in KINDS:
        model = Predictor.load(runs[kind])
        found = explain(model, stored_projection(runs[kind], model), picture)
        if kind[0] != "solo_code":
            assert found.aligned is None
            continue
        with torch.inference_mode():
            framed = model.algorithm.frame(picture[None] / 255.0)[0]
        assert np.abs(found.aligned - 255 * framed.numpy()).max() <= 0.51


def test_any_sign_may_stand_in_a_name(runs, picture) -> None:
    folder = runs["solo", "default"]
    model = Predictor.load(folder)
    found = explain(model, stored_projection(folder, model), picture)
    text = svg(explain_figure(found, "cost$1_to_$2.png")).decode()
    assert "cost$1_to_$2.png" in text


def test_figures_drawn_at_once_are_the_figures_drawn_alone(runs, picture) -> None:
    folder = runs["solo", "default"]
    model = Predictor.load(folder)
    found = explain(model, stored_projection(folder, model), picture)
    alone = themed_svg(explain_figure(found))
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: themed_svg(explain_figure(found)), range(8))) == {alone}
