"""`solodg.train` and `Model`: the whole way in Python, with the results of the command line."""

import gc
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import datasets
import httpx
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import solodg
from conftest import write_images
from solodg.errors import UserError
from solodg.predict.torch import Predictor
from solodg.storage import lock

OPTIONS = {
    "target": "c", "backbone": "small_cnn", "steps": 6, "image_size": 16, "batch_size": 8,
    "context_images": 2, "image_norm": 0, "pose": "off", "seed": 3, "accelerator": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def images(shared_folder: Path) -> Path:
    root = shared_folder / "python" / "own"
    with lock(shared_folder / "python.lock"):
        if not root.is_dir():
            write_images(root, {(d, c): 8 for d in "abc" for c in ("apple", "fig", "pear")})
    return root


@pytest.fixture(scope="module")
def run(images: Path) -> Path:
    """A run that the command line trained in another process."""
    folder = images.parent / "run"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    command = [sys.executable, "-m", "solodg", "train", images, *flags, "--output", folder]
    with lock(images.parent / "run.lock"):
        if not folder.is_dir():
            subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture
def command(request: pytest.FixtureRequest):
    """Runs commands in this process; each returns (exit code, stdout, stderr)."""
    return request.getfixturevalue("solodg")


@pytest.fixture(scope="module")
def held(images: Path) -> solodg.Model:
    """A model that was trained on images in memory."""
    return train(frame(images), name="own")


def train(data, **options) -> solodg.Model:
    return solodg.train(data, **{"verbose": False} | OPTIONS | options)


def paths_frame(images: Path) -> pd.DataFrame:
    paths = sorted(images.rglob("*.png"))
    labels, domains = ([path.parts[i] for path in paths] for i in (-2, -3))
    return pd.DataFrame({"path": list(map(str, paths)), "label": labels, "domain": domains})


def frame(images: Path) -> pd.DataFrame:
    rows = paths_frame(images)
    return rows.assign(image=[Image.open(path) for path in rows["path"]]).drop(columns="path")


def csv(images: Path) -> Path:
    path = images.parent / "own.csv"
    paths_frame(images).to_csv(path, index=False)
    return path


def hugging_face(images: Path) -> datasets.Dataset:
    data = datasets.Dataset.from_pandas(paths_frame(images).rename(columns={"path": "image"}))
    return data.cast_column("image", datasets.Image()).class_encode_column("label")


class Torch(torch.utils.data.Dataset):
    def __init__(self, rows: pd.DataFrame) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str, str]:
        path, label, domain = self.rows.iloc[index]
        return torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1), label, domain


KINDS = {
    "folder": lambda images: images,
    "csv": csv,
    "paths": paths_frame,
    "frame": frame,
    "hugging face": hugging_face,
    "torch": lambda images: Torch(paths_frame(images)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_gives_the_model_of_the_command_line(kind, images, run, held) -> None:
    data = KINDS[kind](images)
    given = {} if isinstance(data, Path) else {"name": "own"}
    model = held if kind == "frame" else train(data, **given)
    wanted = Predictor.load(run).algorithm.state_dict()
    found = model.algorithm.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert model.info.classes == ["apple", "fig", "pear"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_gives_the_scores_of_the_command_line(
    kind, run, tmp_path, command
) -> None:
    site = write_images(tmp_path / "own", {(d, c): 5 for d in "xy" for c in ("apple", "pear")}, 16)
    code, out, err = command("evaluate", run, "--on", site, "--json", "--accelerator", "cpu")
    assert code == 0, err
    wanted = {line["domain"]: line["scores"] for line in map(json.loads, out.splitlines())}
    scores = solodg.load(run).evaluate(KINDS[kind](site), verbose=False)
    assert {name: found.to_json() for name, found in scores.items()} == wanted
    assert scores["x"].missing == ["fig"]
    low, high = scores["x"].overall["accuracy"][1:]
    assert 0 <= low <= high <= 1


def test_without_data_a_model_is_scored_on_its_own_domains(run, command) -> None:
    code, out, _ = command("evaluate", run, "--json", "--accelerator", "cpu")
    wanted = {line["domain"]: line["scores"] for line in map(json.loads, out.splitlines())}
    before = (run / "results.jsonl").read_text()
    scores = solodg.load(run).evaluate(verbose=False)
    assert code == 0
    assert list(scores) == ["c", "a", "b"]
    assert {name: found.to_json() for name, found in scores.items()} == wanted
    assert (run / "results.jsonl").read_text() == before


def test_labelled_images_need_no_domain_and_no_unknown_class(images, held, run) -> None:
    rows = frame(images)
    scores = held.evaluate(rows[["image", "label"]], name="new", verbose=False)
    assert (list(scores), scores["new"].images) == (["new"], 72)
    pairs = list(zip(rows["image"], rows["label"], strict=True))
    assert held.evaluate(pairs, name="new", verbose=False) == scores
    rows.loc[5, "label"] = "quince"
    with pytest.raises(
        UserError, match="'quince', which the model does not know; it knows 'apple'"
    ):
        held.evaluate(rows, verbose=False)
    with pytest.raises(UserError, match="'bar', 'disc', 'ring', which the model does not know"):
        held.evaluate("toy", verbose=False)


def test_images_in_memory_cannot_be_opened_again(held, images, tmp_path, command) -> None:
    folder = held.save(tmp_path / "kept")
    for words in (["evaluate", folder], ["report", folder],
                    ["train", "in-memory:own", "--target", "c"]):  # fmt: skip
        code, _, err = command(*words)
        assert code == 2
        assert "trained on images in the memory of a program, named 'own'" in err
        assert "Traceback" not in err
    with pytest.raises(UserError, match=r"Model\.evaluate\(data\)"):
        held.evaluate(verbose=False)
    code, out, err = command("evaluate", folder, "--dataset", images, "--json")
    assert code == 0, err
    # Pixels in memory are not known to be those of the files: only the target is scored.
    assert [json.loads(line)["domain"] for line in out.splitlines()] == ["c"]


def test_a_run_resumes_with_the_same_data_and_refuses_other_data(images, tmp_path, capsys) -> None:
    folder, rows = tmp_path / "run", frame(images)
    first = train(rows, output=folder)
    assert first.folder == folder
    again = solodg.train(rows, output=folder, resume=True, **OPTIONS)
    assert "is finished already" in capsys.readouterr().err
    image = rows["image"][0]
    assert again.predict(image) == first.predict(image)
    with pytest.raises(UserError, match="holds a run already"):
        train(rows, output=folder)
    (folder / "finished.json").unlink()
    with pytest.raises(UserError, match="source domain 'a' had 24 images and has 23"):
        train(rows[1:], output=folder, resume=True)


def test_a_temporary_run_lives_as_long_as_its_model(images, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = train(images, algorithm="erm", steps=1)
    folder = model.folder
    wanted = model.predict(np.zeros((16, 16, 3), np.uint8))
    kept = model.save(tmp_path / "new" / "kept")
    assert folder.is_dir()
    with pytest.raises(UserError, match="exists already"):
        model.save(kept)
    del model
    gc.collect()
    assert not folder.exists()
    assert solodg.load(kept).predict(np.zeros((16, 16, 3), np.uint8)) == wanted
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]
    with pytest.raises(UserError, match="unknown domain"):
        train(images, target="z")
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]


def test_an_exported_model_predicts_scores_and_is_saved(run, images, tmp_path) -> None:
    model = solodg.load(run)
    assert model.export(tmp_path / "model.onnx") < 1e-4
    exported = solodg.load(tmp_path / "model.onnx")
    assert (model.folder, exported.folder) == (run, None)
    assert (model.runtime, exported.runtime) == ("PyTorch", "ONNX Runtime")
    rows = frame(images)
    ours, theirs = (m.predict(list(rows["image"])) for m in (model, exported))
    assert [p.label for p in ours] == [p.label for p in theirs]
    scores = exported.evaluate(rows, verbose=False)
    wanted = model.evaluate(rows, verbose=False)
    assert scores["c"].overall["accuracy"] == wanted["c"].overall["accuracy"]
    copy = exported.save(tmp_path / "copy.onnx")
    assert solodg.load(copy).predict(rows["image"][0]) == theirs[0]
    assert exported.to("cpu", "32-true") is exported
    for mistake, message in (
        (lambda: exported.export(tmp_path / "again.onnx"), "exported already"),
        (lambda: exported.evaluate(), r"give evaluate\(data\)"),
        (lambda: exported.to("cuda"), "device 'cuda': an exported file is computed on the CPU"),
        (lambda: exported.to("cpu", "bf16-mixed"), "has the precision 32-true"),
        (lambda: exported.algorithm, "no module of torch"),
        (lambda: model.export(tmp_path / "model.bin"), "must end with .onnx"),
    ):
        with pytest.raises(UserError, match=message):
            mistake()


def test_a_model_moves_and_names_itself(run) -> None:
    model = solodg.load(run)
    assert model.to("cpu", "bf16-mixed") is model
    assert model.predictor.precision == "bf16-mixed"
    assert repr(model) == f"Model(solo_plus, small_cnn, 3 classes, {str(run)!r})"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stepz": 5}, r"unknown option 'stepz'\. Did you mean 'steps'"),
        ({"targets": "c"}, r"unknown option 'targets'\. Did you mean 'target'"),
        ({"dataset": "toy"}, "unknown option 'dataset'"),
        ({"score_on": "validation"}, "unknown option 'score_on'"),
        ({"steps": 0}, "wrong option: steps: input should be greater than 0"),
        ({"algorithm": "sole"}, r"unknown algorithm 'sole'\. Did you mean 'solo"),
        ({"target": "z"}, "unknown domain of own 'z'"),
        ({"target": ["a", "b"]}, "at least two source domains, .* there is only 'c'"),
        ({"target": ["a", "b", "c"]}, "no domain of own is a source"),
        ({"name": "x"}, "is for data in memory"),
        ({"resume": True}, "give output"),
        ({"devices": "2"}, "give output"),
    ],
)
def test_a_wrong_option_is_told(images, options, message) -> None:
    with pytest.raises(UserError, match=message):
        train(images, **options)


def test_mistakes_in_data_are_told_before_a_folder_is_made(images, tmp_path) -> None:
    rows = frame(images)
    for data, message in (
        (rows[rows["domain"] == "c"], "no domain of images is a source"),
        (rows[rows["domain"] != "a"], "there is only 'b'"),
        (rows.drop(columns="domain"), "no column 'domain'"),
        (rows[:0], "lists no images"),
        ("nowhere", "unknown dataset 'nowhere'"),
    ):
        with pytest.raises(UserError, match=message):
            train(data, output=tmp_path / "run")
    with pytest.raises(UserError, match="has no slash"):
        train(rows, name="a/b")
    assert not (tmp_path / "run").exists()


def test_what_is_no_path_and_no_image_is_told(digits_onnx) -> None:
    with pytest.raises(UserError, match="a model of type NoneType: expected the path"):
        solodg.load(None)
    for wrong in (None, 42):
        with pytest.raises(UserError, match=rf"{type(wrong).__name__}; expected a path, bytes"):
            solodg.load(digits_onnx).predict(wrong)


def test_public_names_are_listed_and_import_no_torch() -> None:
    code = (
        "import sys, solodg; assert {'Model', 'SoloClassifier', 'load', 'train'} <= {*dir(solodg)};"
        "solodg.load, solodg.train, solodg.Model; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SERVE = """
import signal, sys, solodg
before = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background of a shell
solodg.load(sys.argv[1]).serve(port=0)
assert signal.getsignal(signal.SIGINT) is before
print("goes on")
"""


def test_a_program_goes_on_after_it_has_served(digits_onnx, digits, tmp_path) -> None:
    Image.fromarray(digits[0, 0]).save(tmp_path / "digit.png")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, digits_onnx],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    address = process.stderr.readline().split(" at ")[1].strip()
    answer = httpx.post(
        f"{address}/predict", files={"images": (tmp_path / "digit.png").read_bytes()}
    )
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert answer.status_code == 200
    assert (process.returncode, out) == (0, "goes on\n"), err
