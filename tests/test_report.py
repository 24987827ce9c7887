"""The page of a run, in a real browser: whole, silent, alone, and true to the predictions."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from browser import CHROMIUM, DRIVER, MISSING, browser
from figure_text import disorder
from solodg.data import LabelledImages
from solodg.data.images import ImageArray
from solodg.explain.figure import projection_figure
from solodg.explain.projection import stored_projection
from solodg.models.backbones import build_backbone
from solodg.predict.torch import Predictor
from solodg.progress import NoProgress
from solodg.report.charts import (
    accuracy_over_uncertainty,
    confusion,
    reliability,
    training_curves,
)
from solodg.report.galleries import domain_galleries
from solodg.report.predictions import (
    DomainPredictions,
    helped,
    hurt,
    mistaken,
    predict_run,
    uncertain,
)
from solodg.report.run_page import PER_GALLERY, write_report
from solodg.runs.config import Machine, RunConfig
from solodg.runs.evaluate import evaluate_run, score_run
from solodg.runs.folder import read_config, read_machine
from solodg.runs.metrics_log import METRICS
from solodg.runs.opened_data import load_dataset
from solodg.runs.predictions import Predictions
from solodg.runs.scores import score
from solodg.runs.tables import estimate_text
from solodg.runs.train import train_run
from solodg.storage import read_lines
from test_features import save_weights

in_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained for long enough to know something, and not enough to know all."""
    config = RunConfig(dataset="toy", targets=("sky", "ash"), algorithm="solo",
                       backbone="small_cnn", steps=15, batch_size=8)  # fmt: skip
    folder = tmp_path_factory.mktemp("reported") / "run"
    return train_run(config, Machine(accelerator="cpu"), folder)


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    return write_report(run)


@pytest.fixture(scope="module")
def chromium():
    with browser() as opened:
        yield opened


@in_browser
def test_the_page_is_whole_and_asks_nobody(page: Path, chromium) -> None:
    chromium.open(page)
    chromium.unfold()
    assert chromium.console() == []
    asked = [url for url in chromium.requests() if not url.startswith("data:")]
    assert asked == [page.resolve().as_uri()]
    broken = "return [...document.images].filter(i => !i.naturalWidth).map(i => i.alt)"
    assert chromium.run(broken) == []
    assert chromium.run("return document.images.length") > 20
    assert chromium.run("return [...document.images].every(i => i.alt)")


@in_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_a_desk_and_a_phone(page: Path, chromium, width: int) -> None:
    chromium.open(page, width=width)
    chromium.unfold()
    assert chromium.run("return innerWidth") == width
    assert chromium.run("return document.documentElement.scrollWidth") <= width
    wide = "return Math.max(...[...document.images].map(i => i.getBoundingClientRect().right))"
    assert chromium.run(wide) <= width


@in_browser
def test_the_page_is_light_or_dark_as_the_reader_is(page: Path, chromium) -> None:
    script = "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    brightness = {}
    for dark in (False, True):
        chromium.open(page, dark=dark)
        brightness[dark] = [sum(_numbers(colour)) for colour in chromium.run(script)]
    assert brightness[False][0] < 150 < 600 < brightness[False][1]
    assert brightness[True][0] > 600 > 150 > brightness[True][1]


def _numbers(colour: str) -> list[int]:
    return [int(n) for n in colour.removeprefix("rgb(").removesuffix(")").split(",")]


@in_browser
def test_galleries_hold_what_the_predictions_say(run: Path, page: Path, chromium) -> None:
    """Against the model asked image by image, before and after the adaptation."""
    chromium.open(page)
    cards = chromium.run("""
        return [...document.querySelectorAll('[data-gallery]')].map(g => [
            g.dataset.domain, g.dataset.gallery,
            [...g.querySelectorAll('[data-index]')].map(c => [+c.dataset.index, c.dataset.truth,
                                                               c.innerText])])
    """)
    shown = {(domain, kind): found for domain, kind, found in cards}
    model = Predictor.load(run)
    targets = load_dataset(read_config(run), read_machine(run)).targets(["sky", "ash"])
    assert set(shown) == {(d, k) for d in targets for k in ("helped", "hurt", "mistaken",
                                                            "uncertain")}  # fmt: skip
    for domain, part in targets.items():
        answers = [model.predict(image) for image in part.images.take(range(len(part)))]
        after = np.array([list(a.probabilities.values()) for a in answers])
        before = np.array([_before(model, image) for image in part.images.take(range(len(part)))])
        truth, rows = part.labels, np.arange(len(part))
        was, now = before.argmax(1) == truth, after.argmax(1) == truth
        gain = after[rows, truth] - before[rows, truth]
        entropy = -(after * np.log(after)).sum(1)
        expected = {
            "helped": _most(gain, ~was & now), "hurt": _most(-gain, was & ~now),
            "mistaken": _most(after.max(1), ~now), "uncertain": _most(entropy, rows >= 0),
        }  # fmt: skip
        for kind, indices in expected.items():
            found = shown[domain, kind]
            assert [card[0] for card in found] == indices.tolist()
            for index, label, text in found:
                assert label == model.classes[truth[index]]
                assert f"{answers[index].label} ({answers[index].probability:.2f})" in text


def _before(model: Predictor, image: torch.Tensor) -> np.ndarray:
    """Plainly: the prior classifier's logits with the noise of the model's own samples."""
    with torch.inference_mode():
        z = model.algorithm.embed(image[None] / 255.0)[0].double()
        mean, scale = (t.double() for t in model.algorithm.prior_classifier())
        logits = mean @ z + model.algorithm.test_noise.double() * (scale**2 @ z**2).sqrt()
    return logits.softmax(-1).mean(0).numpy()


def _most(value: np.ndarray, mask: np.ndarray) -> np.ndarray:
    order = np.argsort(-value, kind="stable")
    return order[mask[order]][:PER_GALLERY]


@in_browser
def test_the_table_says_what_evaluate_says(run: Path, page: Path, chromium) -> None:
    chromium.open(page)
    rows = chromium.run("""
        const rows = [...document.querySelector('table').rows];
        return rows.map(r => [...r.cells].map(c => c.innerText))
    """)
    accuracy = rows[0].index("accuracy, %")
    by_domain = {row[0]: row[accuracy] for row in rows[1:] if row[0] != "mean"}
    expected = {r.domain: f"{100 * r.metrics['accuracy']:.1f}" for r in evaluate_run(run)}
    assert by_domain == expected


def test_the_page_has_the_metrics_of_the_unseen_domains_with_intervals(run, page) -> None:
    text = page.read_text()
    assert "balanced accuracy %" in text
    assert "each class against the others" in text
    for domain in score_run(run):
        if domain.record.role == "target":
            classes = Predictor.load(run).classes
            found = score(domain.predictions, domain.labels, classes, domain.groups)
            assert estimate_text(found.overall["accuracy"], "%") in text
            assert estimate_text(found.classes[classes[0]]["sensitivity"], "%") in text


def test_the_page_is_small_and_holds_no_address(page: Path) -> None:
    text = page.read_text()
    assert len(text) < 10_000_000
    assert 'src="http' not in text
    assert "default-src 'none'" in text
    assert "<script" not in text
    assert text.count('loading="lazy"') == text.count("<img ")
    assert str(page.parent) not in text  # no path of a machine


def test_the_page_says_what_adapts_and_why(tmp_path: Path) -> None:
    config = RunConfig(dataset="toy", targets=("sky",), backbone="small_cnn", steps=6, batch_size=8)
    text = write_report(train_run(config, Machine(accelerator="cpu"), tmp_path / "run")).read_text()
    assert "adapts to each image" in text
    assert "image norm: o" in text
    assert "held-out source domains" in text
    assert "the source domains do not differ by rotation" in text


def test_a_method_with_one_classifier_says_so(tmp_path: Path) -> None:
    config = RunConfig(dataset="toy", targets=("sky",), algorithm="erm", backbone="small_cnn",
                       steps=4, batch_size=8)  # fmt: skip
    folder = train_run(config, Machine(accelerator="cpu"), tmp_path / "run")
    with (folder / METRICS).open("ab") as file:
        file.write(b'{"step": 4, "loss"')  # cut off by a crash
    said: list[str] = []
    page = write_report(
        folder, images=30, per_gallery=1, output=tmp_path / "p.html", say=said.append
    )
    assert any("1 damaged line(s)" in line for line in said)
    text = page.read_text()
    assert "one classifier for all images" in text
    assert 'data-gallery="helped"' not in text
    assert 'data-gallery="mistaken"' in text
    assert "At most 30 images" in text
    found = predict_run(Predictor.load(folder), folder, images=30, progress=NoProgress())
    assert all(len(part.labels) == 30 for part in found.parts if part.role == "target")


@pytest.mark.parametrize("frozen", [False, True])
def test_cards_never_contradict_the_table_where_a_domain_sets_the_state(
    frozen: bool, tmp_path: Path, toy, monkeypatch
) -> None:
    """`da_erm` predicts each domain in a state of its own, which a freshly loaded model lacks.

    With a frozen backbone the table is predicted by a copy that reads stored features.
    """
    config = RunConfig(dataset="toy", targets=("sky", "ash"), algorithm="da_erm", seed=1,
                       backbone="small_cnn", steps=30, batch_size=8)  # fmt: skip
    if frozen:
        weights = tmp_path / "w.safetensors"
        backbone = build_backbone("small_cnn", channels=3, image_size=32)
        images = toy.images.take(range(0, len(toy.labels), 16)) / 255
        for _ in range(20):  # so that BatchNorm has statistics, and domains differ in features
            backbone.train()(images)
        save_weights(backbone, weights)
        given = {"weights": str(weights), "freeze_backbone": True, "learning_rate": 0.003}
        config = config.model_copy(update=given)
    folder = train_run(config, Machine(accelerator="cpu"), tmp_path / "run")
    explained = []
    monkeypatch.setattr(
        "solodg.report.galleries.probabilities_figure",
        lambda e: explained.append(e) or projection_figure(e),
    )
    text = write_report(folder, images=12, per_gallery=6).read_text()
    assert len(explained) >= 12
    for e in explained:  # the classifier that is drawn gives the table's probabilities
        assert e.after.samples.mean(0) == pytest.approx(e.predictions.probabilities[0], abs=1e-5)
    predictor = Predictor.load(folder)
    fresh = [predictor.compute(e.pixels[None]).probabilities[0] for e in explained]
    shown = [e.predictions.probabilities[0] for e in explained]
    assert not np.allclose(fresh, shown, atol=1e-4)  # or the state would not matter
    for part in predict_run(predictor, folder, images=12, progress=NoProgress()).parts:
        assert f"<td>{100 * part.metrics['accuracy']:.1f}</td>" in text
        for index in uncertain(part)[:6] if part.role == "target" else ():
            (answer,) = part.predictions.of_image(int(index)).named(predictor.classes)
            mark = "✓" if part.right[index] else "✗"
            assert f"{answer.label} ({answer.probability:.2f}) {mark}" in text


def test_a_card_shows_the_numbers_of_the_table(run: Path) -> None:
    predictor = Predictor.load(run)
    projection = stored_projection(run, predictor)
    part = next(predict_run(predictor, run, images=10, progress=NoProgress()).parts)
    answers = part.predictions.named(predictor.classes)
    for gallery in domain_galleries(predictor, projection, part, 3, NoProgress()):
        for card in gallery.cards:
            assert card.prediction == answers[card.index]
            assert card.right == (answers[card.index].label == card.truth)


def test_a_frozen_run_is_predicted_from_stored_features_and_explained_from_images(
    tmp_path: Path, image_folder: Path, monkeypatch
) -> None:
    weights = tmp_path / "w.safetensors"
    save_weights(build_backbone("small_cnn", channels=3, image_size=32), weights)
    config = RunConfig(dataset=str(image_folder), targets=("b",), algorithm="solo",
                       backbone="small_cnn", steps=5, image_size=32, weights=str(weights),
                       freeze_backbone=True, context_images=2)  # fmt: skip
    machine = Machine(accelerator="cpu", cache_dir=tmp_path / "cache")
    folder = train_run(config, machine, tmp_path / "run")
    explained = []
    monkeypatch.setattr(
        "solodg.report.galleries.probabilities_figure",
        lambda e: explained.append(e) or projection_figure(e),
    )
    write_report(folder, machine, per_gallery=2)
    assert explained
    for e in explained:
        assert e.after.samples.mean(0) == pytest.approx(e.predictions.probabilities[0], abs=1e-5)


def test_galleries_by_hand() -> None:
    labels = np.array([0, 0, 1, 1])
    pixels = LabelledImages(ImageArray(torch.zeros(4, 1, 2, 2)), labels, labels * 0, ("d",))
    before = np.array([[0.4, 0.6], [0.1, 0.9], [0.2, 0.8], [0.5, 0.5]])
    after = np.array([[0.6, 0.4], [0.9, 0.1], [0.7, 0.3], [0.4, 0.6]])
    part = DomainPredictions("target", "d", pixels, Predictions(after, before))
    assert helped(part).tolist() == [1, 0, 3]  # a tie before is the first class: wrong for 3
    assert hurt(part).tolist() == [2]
    assert mistaken(part).tolist() == [2]
    assert uncertain(part).tolist() == [0, 3, 2, 1]
    alone = DomainPredictions("target", "d", pixels, Predictions(after))
    assert helped(alone).tolist() == hurt(alone).tolist() == []


@pytest.mark.parametrize("classes", [2, 7, 10, 24, 65])
def test_charts_can_be_read_with_any_number_of_classes(classes: int) -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(classes, size=500)
    pixels = LabelledImages(ImageArray(torch.zeros(500, 1)), labels, labels * 0, ("d",))
    after = generator.dirichlet(np.full(classes, 0.2), size=500)
    part = DomainPredictions("target", "d", pixels, Predictions(after))
    names = [f"a_rather_long_name_{i}" for i in range(classes)]
    titles = ("unseen domains", "seen domains, new images", "unseen, before adaptation")
    groups = dict.fromkeys(titles, (part.predictions, labels))
    assert disorder(confusion(part, names)) == []
    assert disorder(reliability(groups)) == []
    assert disorder(accuracy_over_uncertainty(groups)) == []


def test_curves_come_from_the_metrics_of_training(run: Path) -> None:
    lines = read_lines(run / "metrics.jsonl")
    charts = training_curves(lines, 15)
    assert len(charts) == 3
    for figure in charts.values():
        assert disorder(figure) == []
    drawn = charts["Accuracy on source validation images"].axes[0].lines[0]
    scored = [line for line in lines if "val_accuracy" in line]
    assert drawn.get_xdata().tolist() == [line["step"] for line in scored]
    assert drawn.get_ydata() == pytest.approx([100 * line["val_accuracy"] for line in scored])
    assert training_curves([], None) == {}


@in_browser
def test_a_plan_ends_with_its_page(tmp_path: Path, solodg, chromium) -> None:
    plan = {"title": "Two <methods>", "dataset": "toy", "targets": ["sky"], "seeds": [0],
            "run": {"backbone": "small_cnn", "steps": 2, "batch_size": 4},
            "rows": [{"name": "ERM", "run": {"algorithm": "erm"}},
                     {"name": "solo", "run": {"algorithm": "solo"}}]}  # fmt: skip
    (tmp_path / "two.yaml").write_text(json.dumps(plan))
    code, _, err = solodg(
        "bench", tmp_path / "two.yaml", "--output", tmp_path / "out", "--accelerator", "cpu"
    )
    assert code == 0, err
    page = tmp_path / "out" / "tables" / "two.html"
    assert str(page) in err
    chromium.open(page, width=390)
    chromium.unfold()
    assert chromium.console() == []
    assert chromium.run("return document.querySelector('h1').innerText") == "Two <methods>"
    assert chromium.run("return document.querySelectorAll('[data-run]').length") == 2
    assert chromium.run("return [...document.images].every(i => i.naturalWidth)")
    assert chromium.run("return document.documentElement.scrollWidth") <= 390
    figures = {row["domain"]: row for row in map(json.loads, (tmp_path / "out" / "results.jsonl")
                                                 .read_text().splitlines())}  # fmt: skip
    text = chromium.run("return document.body.innerText")
    assert f"{100 * figures['sky']['metrics']['accuracy']:.1f}" in text
