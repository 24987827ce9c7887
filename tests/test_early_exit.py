"""Early exit: against a loop over single images, and the same in PyTorch, ONNX and features."""

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from solodg.adapters.bn import BatchStatistics
from solodg.algorithms.early_exit import (
    MARGINS,
    MOST_LOST,
    NEVER,
    MarginChoice,
    gap,
    read_until_clear,
)
from solodg.algorithms.ridge import Ridge, square_rooted
from solodg.algorithms.solo_plus import SoloPlus
from solodg.data.transforms import to_unit
from solodg.errors import UserError
from solodg.models.backbones import build_backbone
from solodg.models.extractor import ReadyFeatures, recorded_features
from solodg.models.image_norm import donor_statistics
from solodg.predict.export import to_onnx
from solodg.predict.onnx import OnnxPredictor, open_session
from solodg.predict.torch import Predictor
from solodg.readings import readings_of
from solodg.runs.model_info import ModelInfo
from solodg.serving.batching import EARLY_EXIT_TOLERANCE, tolerance_of
from solodg.types import Batch

NORMS = (30.0, 0.0, "line:5", 4.0)


def by_hand(each: torch.Tensor, margin: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Means of logits (R, B, C) and numbers of readings, one image after another."""
    means, passes = [], []
    for image in each.unbind(1):
        total, weights, weight, count = image[0].clone(), 1.0, 1.0, 1
        for logits in image[1:]:
            second, first = (total / weights).sort().values[-2:].tolist()
            weight *= min(1.0, max(0.0, (margin - (first - second)) / (margin / 4)))
            if weight == 0:
                break
            total, weights, count = total + weight * logits, weights + weight, count + 1
        means.append(total / weights)
        passes.append(count)
    return torch.stack(means), torch.tensor(passes)


def readers(each: torch.Tensor) -> list:
    return [lambda rows, one=one: one if rows is None else one[rows] for one in each]


@pytest.mark.parametrize("margin", [0.3, 1.0, 2.0, NEVER])
def test_each_image_is_read_until_its_class_is_clear(margin: float) -> None:
    each = torch.randn(4, 40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean, passes = read_until_clear(readers(each), lambda z: z, margin)
    expected, counts = by_hand(each, margin)
    torch.testing.assert_close(mean, expected)
    assert passes.tolist() == counts.tolist()
    if margin == NEVER:
        torch.testing.assert_close(mean, each.mean(0))
    else:
        assert len(set(passes.tolist())) > 1
    for i in (0, 7, 39):  # alone as among the others
        alone, _ = read_until_clear(readers(each[:, i : i + 1]), lambda z: z, margin)
        torch.testing.assert_close(alone, mean[i : i + 1], rtol=1e-12, atol=1e-12)


def test_a_prediction_does_not_jump_where_a_gap_reaches_the_margin() -> None:
    each = torch.randn(3, 200, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    margins = torch.linspace(0.5, 1.5, 2001)
    means = [read_until_clear(readers(each), lambda z: z, float(m))[0] for m in margins]
    steps = torch.stack([(b - a).abs().max() for a, b in itertools.pairwise(means)])
    assert 0 < steps.max() < 0.05  # of changes of several units over the whole range


def test_the_margin_is_the_smallest_that_loses_little_on_domains_held_out() -> None:
    generator = torch.Generator().manual_seed(2)
    choice = MarginChoice([0, 3, 7])
    lost: dict[float, list[float]] = {margin: [] for margin in MARGINS}
    for domain, count in ((0, 300), (3, 900)):  # domain 7 has no images
        y = torch.randint(4, (count,), generator=generator)
        signal = 0.25 * torch.nn.functional.one_hot(y, 4)
        each = signal + 0.1 * torch.randn(3, count, 4, generator=generator)
        for part in range(0, count, 100):
            choice.add(domain, each[:, part : part + 100], y[part : part + 100])
        right = each.mean(0).argmax(1) == y
        for margin, found in lost.items():
            mean, _ = by_hand(each, margin)
            found.append(float((right & (mean.argmax(1) != y)).float().mean()))
    shares = {margin: float(np.mean(found)) for margin, found in lost.items()}
    np.testing.assert_allclose(choice.lost(), list(shares.values()), atol=1e-6)
    assert choice.best() == min(m for m, share in shares.items() if share <= MOST_LOST)
    assert MARGINS[0] < choice.best() < NEVER
    assert shares[NEVER] == 0


def model(margin: float = NEVER, *, pose: bool = False) -> tuple[Ridge, torch.Tensor]:
    """A network of random weights with four readings, and the pixels of some images."""
    torch.manual_seed(0)
    backbone = build_backbone("small_cnn", image_size=32, image_norm=NORMS, pose=pose)
    for module in backbone.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean, std=0.3)
    algorithm = Ridge(backbone, num_classes=4, early_exit=True).eval()
    torch.nn.init.normal_(algorithm.classifier.weight)
    algorithm.margin.fill_(margin)
    pixels = np.random.default_rng(0).integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)
    pixels[::2] //= 3
    return algorithm, torch.from_numpy(pixels)


def model_info(*, pose: bool = False) -> ModelInfo:
    return ModelInfo(
        algorithm="ridge", variant="default", arguments={"early_exit": True}, backbone="small_cnn",
        channels=3, image_norm=NORMS, pose=pose, image_size=32, classes=list("abcd"),
        source_domains=["s"], dataset="toy",
    )  # fmt: skip


@pytest.mark.parametrize("pose", [False, True])
def test_readings_one_by_one_are_those_of_one_pass(pose: bool) -> None:
    algorithm, pixels = model(pose=pose)
    x, rows = to_unit(pixels), torch.tensor([5, 2, 11])
    with torch.inference_mode():
        each = algorithm.backbone.embed_each(x)
        one_by_one = algorithm.backbone.each_reading(x)
        with recorded_features() as seen:
            for place, read in enumerate(one_by_one):
                torch.testing.assert_close(read(None), each[place])
                torch.testing.assert_close(read(rows), each[place, rows])
        stored = ReadyFeatures(each.shape[2], 0, readings_of(NORMS))
        row = each.transpose(0, 1).flatten(1)
        for place, read in enumerate(stored.each_reading(row)):
            torch.testing.assert_close(read(rows), each[place, rows])
    assert [features.embedding.shape[0] for features in seen] == [12, 3]  # of the first reading
    torch.testing.assert_close(seen[0].embedding, each[0])


def clear_half(algorithm: Ridge, x: torch.Tensor) -> float:
    """A margin that some images reach after one reading, and others never."""
    with torch.inference_mode():
        first = algorithm.classifier(square_rooted(algorithm.backbone.embed_each(x)[0]))
    return float(gap(first).median())


def test_threads_do_not_disturb_each_other() -> None:
    algorithm, pixels = model()
    x = to_unit(pixels)
    algorithm.margin.fill_(clear_half(algorithm, x))

    def predict(_: int) -> torch.Tensor:
        with torch.inference_mode():
            return algorithm(x)

    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(predict, range(40)):
            torch.testing.assert_close(found, predict(0), rtol=0, atol=0)


@pytest.mark.parametrize("pose", [False, True])
def test_the_exported_graph_exits_where_the_model_does(pose: bool) -> None:
    algorithm, pixels = model(pose=pose)
    x = to_unit(pixels)
    margin = clear_half(algorithm, x)
    info = model_info(pose=pose)
    before = {}
    for value in (margin, 1e-6, 0.9 * NEVER):  # some images, then all, then none exit at once
        algorithm.margin.fill_(value)
        session = open_session(to_onnx(Predictor(algorithm, info)), "the graph")
        assert [output.name for output in session.get_outputs()] == ["logits", "probabilities"]
        with torch.inference_mode():
            before[value] = algorithm(x).numpy()
        for count in (12, 1):
            logits, _ = session.run(None, {"pixels": pixels.numpy()[:count]})
            np.testing.assert_allclose(logits, before[value][:count], rtol=1e-4, atol=1e-4)
    some, first, every = before.values()
    like_first = np.isclose(some, first, atol=1e-4).all(1)
    assert 0 < like_first.sum() < 12
    assert not np.isclose(some[like_first], every[like_first], atol=1e-4).all()


def test_images_and_stored_features_are_classified_alike() -> None:
    algorithm, pixels = model()
    x = to_unit(pixels)
    algorithm.margin.fill_(clear_half(algorithm, x))
    with torch.inference_mode():
        each = algorithm.backbone.embed_each(x)
        stored = ReadyFeatures(each.shape[2], 0, readings_of(NORMS))
        other = Ridge(stored, num_classes=4, early_exit=True).eval()
        state = {k: v for k, v in algorithm.state_dict().items() if "backbone" not in k}
        other.load_state_dict(state)
        torch.testing.assert_close(other(each.transpose(0, 1).flatten(1)), algorithm(x))


def test_a_batch_changes_probabilities_by_less_than_the_server_allows() -> None:
    algorithm, pixels = model()
    algorithm.margin.fill_(clear_half(algorithm, to_unit(pixels)))
    info = model_info()
    run = Predictor(algorithm, info)
    assert tolerance_of(info) == EARLY_EXIT_TOLERANCE
    for predictor in (run, OnnxPredictor(open_session(to_onnx(run), "the graph"), info)):
        together = predictor.compute(pixels.numpy()).probabilities
        alone = [predictor.compute(image[None]).probabilities for image in pixels.numpy()]
        assert np.abs(together - np.concatenate(alone)).max() < EARLY_EXIT_TOLERANCE


def test_studies_and_batch_statistics_read_all_images_alike() -> None:
    algorithm, pixels = model()
    x = to_unit(pixels)
    algorithm.margin.fill_(clear_half(algorithm, x))
    never = copy.deepcopy(algorithm)
    never.margin.fill_(NEVER)
    donor = torch.arange(len(x)).roll(1)
    answers = []
    for one in (algorithm, never):
        with torch.inference_mode(), one.all_readings(), donor_statistics(one, donor):
            answers.append(one(x))
        answers.append(BatchStatistics(one).eval()(x))
    torch.testing.assert_close(answers[0], answers[2])
    torch.testing.assert_close(answers[1], answers[3])
    assert algorithm.exits_early
    assert not never.exits_early


@pytest.mark.parametrize(("norms", "classes"), [((30.0,), 4), ((30.0, 0.0), 1)])
def test_where_nothing_can_be_saved_there_is_no_early_exit(norms, classes) -> None:
    readings = readings_of(norms)
    algorithm = Ridge(ReadyFeatures(6, 0, readings), num_classes=classes, early_exit=True).eval()
    y, domain = torch.arange(40) % classes, torch.arange(40) // 20
    batch = Batch(torch.randn(40, 6 * len(readings)), y, domain)
    algorithm.solve(lambda: [batch], lambda: [batch])
    assert not algorithm.exits_early
    assert algorithm.outputs(batch.x).readings is None


def test_a_trained_classifier_has_no_early_exit() -> None:
    with pytest.raises(UserError, match=r"early_exit=true: a trained classifier.*classifier=ridge"):
        SoloPlus(ReadyFeatures(6, 0), num_classes=3, classifier="linear", early_exit=True)
