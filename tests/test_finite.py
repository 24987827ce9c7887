"""A number that is not finite means nothing: no front end shows one as an answer."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image

import solodg as package
from solodg import SoloClassifier
from solodg.errors import UserError
from solodg.predict.base import ImagePredictor
from solodg.runs.config import Machine, RunConfig
from solodg.runs.predictions import NotFiniteError, Predictions
from solodg.runs.train import train_run
from solodg.serving.app import build_app
from solodg.serving.settings import ServerSettings
from solodg.storage.tensors import read_tensors, write_tensors

PICTURE = Path(__file__).parents[1] / "docs" / "disc.png"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = RunConfig(dataset="toy", algorithm="erm", backbone="small_cnn", steps=2, batch_size=8,
                       context_images=2)  # fmt: skip
    return train_run(config, Machine(accelerator="cpu"), tmp_path_factory.mktemp("finite") / "run")


def with_weights(trained: Path, folder: Path, value: float) -> Path:
    """A copy of the run whose classifier holds this weight, with a right checksum."""
    run = shutil.copytree(trained, folder / "run")
    tensors, header = read_tensors(run / "model.safetensors")
    (name,) = (n for n in tensors if n.endswith("weight") and not n.startswith("backbone"))
    tensors[name].fill_(value)
    write_tensors(run / "model.safetensors", tensors, header)
    return run


@pytest.fixture
def overflowing(trained: Path, tmp_path: Path) -> Path:
    """A run whose weights are finite, and whose outputs are not."""
    return with_weights(trained, tmp_path, 3e38)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(trained, tmp_path, value) -> None:
    with pytest.raises(UserError, match=r"not finite, e\.g\. in '.*weight'"):
        package.load(with_weights(trained, tmp_path, value))


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_predict_says_which_image_has_no_answer(solodg, overflowing: Path, options) -> None:
    code, out, err = solodg("predict", overflowing, PICTURE, *options)
    assert code == 2
    assert "disc.png" not in out
    assert "not finite" in " ".join(err.split())
    assert "disc.png" in "".join(err.split())


@pytest.mark.parametrize("command", ["evaluate", "report"])
def test_no_score_is_made_of_them(solodg, overflowing: Path, command: str) -> None:
    code, _, err = solodg(command, overflowing)
    assert code == 2
    assert "not finite" in " ".join(err.split())
    assert not (overflowing / "results.jsonl").exists()


def test_no_figure_is_drawn_of_them(solodg, overflowing: Path) -> None:
    code, _, err = solodg("explain", overflowing, PICTURE)
    assert code == 2
    assert "not finite" in " ".join(err.split())
    assert not (overflowing / "explain").exists()


class OneBadImage(ImagePredictor):
    """Predicts NaN for a white image, as one damaged weight may."""

    def compute(self, pixels: np.ndarray) -> Predictions:
        rows = np.full((len(pixels), len(self.classes)), 1 / len(self.classes))
        rows[pixels.mean((1, 2, 3)) == 255] = np.nan
        return Predictions(rows)


def test_the_server_answers_with_an_error_and_serves_the_other_images(trained: Path) -> None:
    app = build_app(OneBadImage(package.load(trained).info), "x", ServerSettings())
    white, good = np.full((8, 8, 3), 255, np.uint8), np.zeros((8, 8, 3), np.uint8)
    with TestClient(app) as client:
        answers = [client.post("/predict", content=png(image)) for image in (white, good)]
        files = [("images", (str(i), png(image))) for i, image in enumerate((white, good))]
        both = client.post("/predict", files=files)
    assert [answer.status_code for answer in answers] == [500, 200]
    assert both.status_code == 500
    assert "not finite" in answers[0].json()["error"]


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_the_estimator_raises_an_error() -> None:
    generator = np.random.default_rng(0)
    X, y = generator.normal(size=(60, 4)), np.arange(60) % 2
    model = SoloClassifier(algorithm="erm", steps=2).fit(X, y, domains=np.arange(60) % 3)
    for parameter in model.model_.parameters():
        parameter.fill_(torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        model.predict(X)


def test_predictions_hold_finite_numbers_only() -> None:
    good, bad = np.full((2, 2), 0.5), np.array([[0.5, 0.5], [np.nan, 0.5]])
    assert len(Predictions(good, good)) == 2
    for arguments in ((bad,), (good, bad)):
        with pytest.raises(NotFiniteError, match="1 of 2"):
            Predictions(*arguments)


def test_json_of_a_prediction_is_json(solodg, trained: Path) -> None:
    code, out, _ = solodg("predict", trained, PICTURE, "--json")
    assert code == 0
    assert json.loads(out, parse_constant=pytest.fail)["class"]
