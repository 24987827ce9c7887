"""`solodg.load(run).predict(image)`: every way to hand over an image gives the same answer."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import solodg
from solodg.errors import UserError
from solodg.predict.torch import Predictor
from solodg.runs.config import Machine, RunConfig
from solodg.runs.train import train_run
from solodg.storage import read_json, write_json


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    config = RunConfig(dataset="toy", algorithm="solo", backbone="small_cnn", steps=30,
                       batch_size=8, context_images=2, centre_images=10)  # fmt: skip
    return train_run(config, Machine(accelerator="cpu"), folder)


@pytest.fixture
def picture(tmp_path: Path, toy) -> tuple[Path, np.ndarray]:
    pixels = toy.targets(["sky"])["sky"].images.take([0])[0].permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(tmp_path / "x.png")
    return tmp_path / "x.png", pixels


def test_every_form_of_an_image_gives_the_same_answer(run: Path, picture) -> None:
    path, pixels = picture
    model = solodg.load(run)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    forms = [path, str(path), path.read_bytes(), Image.open(path), pixels, pixels / 255.0, tensor,
             tensor.float() / 255]  # fmt: skip
    answers = [model.predict(form) for form in forms]
    assert all(answer == answers[0] for answer in answers)
    together = model.predict(forms)
    for answer in together:
        assert answer.probability == pytest.approx(answers[0].probability, abs=1e-5)


def test_an_answer_is_a_distribution_with_its_uncertainty(run: Path, picture) -> None:
    answer = solodg.load(run).predict(picture[0])
    assert answer.label in ("bar", "disc", "ring")
    assert sum(answer.probabilities.values()) == pytest.approx(1)
    assert answer.probability == max(answer.probabilities.values())
    assert answer.probabilities[answer.label] == answer.probability
    assert 0 <= answer.uncertainty <= 1


def test_the_adapted_classifier_differs_from_image_to_image(run: Path, toy) -> None:
    model = solodg.load(run)
    images = toy.targets(["sky"])["sky"].images.take([0, 40])
    first, second = (model.adapted_classifier(image) for image in images)
    assert first.shape == (3, 128)
    assert not np.allclose(first, second)
    embedding = model.algorithm.backbone(images[:1] / 255.0).embedding[0].detach().numpy()
    logits = model.algorithm(images[:1] / 255.0)[0].detach().numpy()
    assert first @ embedding == pytest.approx(logits, abs=1e-4)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 4, 2), np.uint8), "shape"),
        (np.zeros(5, np.uint8), "shape"),
        (np.full((4, 4), 3.0), r"\[0, 1\]"),
        (np.zeros((4, 4), np.int32), "int32"),
        ("no-such-file.png", "no such file"),
    ],
)
def test_what_is_no_image_is_explained(run: Path, image, message: str) -> None:
    with pytest.raises(UserError, match=message):
        solodg.load(run).predict(image)


def test_threads_may_share_a_model(run: Path, toy) -> None:
    model = solodg.load(run)
    images = list(toy.targets(["sky"])["sky"].images.take(range(24)))
    expected = [model.predict(image) for image in images]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(model.predict, images)) == expected


def test_a_checkpoint_of_another_format_is_refused(run: Path, tmp_path: Path) -> None:
    info = read_json(run / "model.json")
    write_json(tmp_path / "model.json", info | {"format": "solodg-model-99"})
    with pytest.raises(UserError, match=r"solodg-model-99.*reads .*'solodg-model-3'"):
        solodg.load(tmp_path)
    write_json(tmp_path / "model.json", {k: v for k, v in info.items() if k != "classes"})
    with pytest.raises(UserError, match=r"damaged.*: classes"):
        solodg.load(tmp_path)
    write_json(tmp_path / "model.json", info)
    with pytest.raises(UserError, match="not reached its first validation"):
        solodg.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        solodg.load(tmp_path)
    with pytest.raises(UserError, match="holds no model"):
        solodg.load(tmp_path / "elsewhere")


def test_nothing_in_a_model_is_pickled(run: Path) -> None:
    for path in run.iterdir():
        if path.is_file():
            assert path.suffix in {".json", ".jsonl", ".safetensors", ".md"}


def test_the_next_batch_is_decoded_while_this_one_is_computed(
    run: Path, picture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = Predictor.load(run)
    monkeypatch.setattr(Predictor, "batch_size", 2)
    (tmp_path / "bad.png").write_bytes(b"no image")
    paths = [picture[0], tmp_path / "bad.png", picture[0], picture[0], picture[0]]
    decoded, ahead = [], []
    pixels, compute = predictor.pixels, predictor.compute

    def recorded(image):
        decoded.append(image)
        return pixels(image)

    def waiting(batch):
        wanted = min(len(paths), 2 * (len(ahead) + 2))  # this batch and the next
        deadline = time.monotonic() + 20
        while len(decoded) < wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        ahead.append(len(decoded))
        return compute(batch)

    monkeypatch.setattr(predictor, "pixels", recorded)
    monkeypatch.setattr(predictor, "compute", waiting)
    found = list(predictor.predict_each(paths))
    assert ahead == [4, 5, 5]
    assert [isinstance(one, UserError) for one in found] == [False, True, False, False, False]
    assert {one.label for one in found if not isinstance(one, UserError)} == {found[0].label}
