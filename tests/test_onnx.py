"""An exported model is the same model: one file, no torch, the adaptation in the graph."""

import importlib.metadata
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import onnx
import solodg
from solodg.algorithms import ALGORITHMS
from solodg.algorithms.erm import ERM
from solodg.algorithms.solo import adapts
from solodg.errors import UserError
from solodg.models.backbones import build_backbone
from solodg.predict.export import export_onnx, to_onnx
from solodg.predict.onnx import INPUT, METADATA, open_session
from solodg.predict.torch import Predictor
from solodg.runs.model_info import ModelInfo
from solodg.storage import CHECKSUM, PLACEHOLDER, read_json, sealed
from solodg.types import Batch
from test_contracts import VARIANTS, finalized

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from solodg.cli import main; main()"


def toy_info(toy, name: str, variant: str = "default") -> ModelInfo:
    return ModelInfo(
        algorithm=name, variant=variant, arguments=ALGORITHMS[name].variants[variant],
        backbone="small_cnn", channels=3, image_size=32, classes=list(toy.classes),
        source_domains=["ash", "clay", "moss"], dataset="toy",
    )  # fmt: skip


@pytest.mark.parametrize("batch", [1, 64])
def test_500_real_images_get_the_same_answer_as_from_pytorch(
    digits_run: Path, digits_onnx: Path, digits: np.ndarray, batch: int
) -> None:
    model = solodg.load(digits_run)
    session = open_session(digits_onnx.read_bytes(), "digits")
    for start in range(0, len(digits), batch):
        pixels = digits[start : start + batch]
        logits, probabilities, before, novelty = session.run(None, {INPUT: pixels})
        np.testing.assert_allclose(novelty, model.compute(pixels).novelty, atol=1e-3)
        with torch.inference_mode():
            x = torch.from_numpy(pixels).float() / 255
            np.testing.assert_allclose(logits, model.algorithm(x), atol=1e-4, rtol=1e-4)
            np.testing.assert_allclose(probabilities, model.algorithm.probabilities(x), atol=1e-4)
            prior = model.algorithm.prior_logits(model.algorithm.features(x))
        # The mean of the prior's samples is not the softmax of its mean, but near it.
        assert np.abs(before - prior.softmax(1).numpy()).mean() < 0.05


def test_adapting_changes_what_is_said_of_an_image(digits_onnx: Path, digits: np.ndarray) -> None:
    outputs = solodg.load(digits_onnx).compute(digits[:100])
    np.testing.assert_allclose(outputs.before.sum(1), 1, atol=1e-5)
    assert np.abs(outputs.probabilities - outputs.before).max() > 0.05


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_every_method_can_be_exported(toy, tmp_path: Path, name: str, variant: str) -> None:
    model = Predictor(finalized(name, variant), toy_info(toy, name, variant))
    assert export_onnx(model, tmp_path / "x.onnx") < 1e-4
    loaded = solodg.load(tmp_path / "x.onnx")
    pixels = toy.targets(["sky"])["sky"].images.take(range(7)).numpy()
    for wanted, found in zip(
        model.predict_pixels(pixels), loaded.predict_pixels(pixels), strict=True
    ):
        assert found.label == wanted.label
        assert found.probabilities == pytest.approx(wanted.probabilities, abs=1e-4)
        assert (found.before is None) == (not adapts(model.algorithm))
        assert found.before == pytest.approx(wanted.before, abs=1e-4)
    assert loaded.info == model.info


def test_a_class_that_no_source_has_stays_impossible(toy, tmp_path: Path) -> None:
    algorithm = finalized("solo", "default")
    algorithm.absent[1] = True
    model = Predictor(algorithm, toy_info(toy, "solo"))
    export_onnx(model, tmp_path / "x.onnx")
    pixels = toy.targets(["sky"])["sky"].images.take(range(3)).numpy()
    found = solodg.load(tmp_path / "x.onnx").compute(pixels)
    assert (found.probabilities[:, 1] == 0).all()
    assert (found.before[:, 1] == 0).all()


def test_a_process_without_torch_predicts_from_the_file(
    digits_run: Path, digits_onnx: Path, digits: np.ndarray, tmp_path: Path
) -> None:
    for number in range(5):
        Image.fromarray(digits[60 * number, 0]).resize((50, 40)).save(tmp_path / f"{number}.png")
    command = [sys.executable, "-c", WITHOUT_TORCH, "predict", digits_onnx, tmp_path, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 5
    expected = solodg.load(digits_run).predict([row["image"] for row in rows])
    for row, answer in zip(rows, expected, strict=True):
        assert row["class"] == answer.label
        assert row["probabilities"] == pytest.approx(answer.probabilities, abs=1e-4)
        assert row["before"] == pytest.approx(answer.before, abs=1e-4)
        assert row["uncertainty"] == pytest.approx(answer.uncertainty, abs=1e-3)


def test_every_form_of_an_image_gives_the_same_answer(
    digits_onnx: Path, digits: np.ndarray, tmp_path: Path
) -> None:
    model, pixels = solodg.load(digits_onnx), digits[7, 0]
    Image.fromarray(pixels).save(tmp_path / "x.png")
    tensor = torch.from_numpy(pixels)[None]
    forms = [tmp_path / "x.png", (tmp_path / "x.png").read_bytes(), pixels, pixels / 255.0, tensor]
    answers = [model.predict(form) for form in forms]
    assert all(answer == answers[0] for answer in answers)
    with pytest.raises(UserError, match="load the run"):
        model.adapted_classifier(pixels)


def test_threads_may_share_a_model_and_batches_change_nothing(
    digits_onnx: Path, digits: np.ndarray
) -> None:
    model, images = solodg.load(digits_onnx), [image[0] for image in digits[::10]]
    alone = [model.predict(image) for image in images]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(model.predict, images)) == alone
    for one, other in zip(alone, model.predict(images), strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-6)


def test_the_file_says_what_it_is_and_is_whole(digits_onnx: Path, digits_run: Path) -> None:
    model = onnx.load(digits_onnx, load_external_data=False)
    onnx.checker.check_model(model, full_check=True)
    assert not any(t.external_data for t in model.graph.initializer)
    known = json.loads({p.key: p.value for p in model.metadata_props}[METADATA])
    assert known["model"] == read_json(digits_run / "model.json")
    assert known["versions"]["torch"] == importlib.metadata.version("torch")
    (given,) = model.graph.input
    assert given.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    assert given.type.tensor_type.shape.dim[0].dim_param == "batch"
    assert str(Path.home()).encode() not in digits_onnx.read_bytes()  # no path of a machine


class Restless(ERM):
    """Says something else every time."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def test_a_graph_that_differs_from_pytorch_is_not_written(toy, tmp_path: Path) -> None:
    algorithm = Restless(build_backbone("small_cnn", image_size=32), num_classes=3)
    with pytest.raises(UserError, match="differs from PyTorch"):
        export_onnx(Predictor(algorithm, toy_info(toy, "erm")), tmp_path / "x.onnx")
    assert not list(tmp_path.iterdir())


def test_exporting_leaves_the_model_as_it_was(digits_run: Path, digits: np.ndarray) -> None:
    model = Predictor.load(digits_run)
    before = model.predict_pixels(digits[:3])
    to_onnx(model)
    assert not any(module.training for module in model.algorithm.modules())
    assert model.predict_pixels(digits[:3]) == before


def test_files_of_others_are_refused(digits_onnx: Path, tmp_path: Path) -> None:
    model = onnx.load(digits_onnx)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "anonymous.onnx")
    with pytest.raises(UserError, match="holds no description of its model"):
        solodg.load(tmp_path / "anonymous.onnx")
    (tmp_path / "broken.onnx").write_bytes(digits_onnx.read_bytes()[:1000])
    with pytest.raises(UserError, match="not a readable ONNX file"):
        solodg.load(tmp_path / "broken.onnx")
    with pytest.raises(UserError, match="solodg export"):
        solodg.load(tmp_path / "nowhere.onnx")


@pytest.mark.parametrize(
    ("size", "image_norm"), [(28, 100.0), (48, 100.0), (64, 100.0), (100, 100.0), (32, (0.0, 90.0))]
)
def test_frames_and_readings_of_any_size_are_exported(tmp_path: Path, size, image_norm) -> None:
    torch.manual_seed(0)
    backbone = build_backbone("small_cnn", channels=3, image_size=size, image_norm=image_norm)
    for norm in (m for m in backbone.modules() if isinstance(m, torch.nn.BatchNorm2d)):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)  # as after training
    model = ALGORITHMS["solo_code"](backbone, num_classes=3, frame=2)
    torch.nn.init.normal_(model.frame.pose.weight, std=0.1)
    y = torch.arange(12) % 3
    model.eval().finalize([Batch(torch.rand(12, 3, size, size), y, torch.arange(12) // 6)])
    info = ModelInfo(
        algorithm="solo_code", variant="default", arguments={"frame": 2}, backbone="small_cnn",
        channels=3, image_size=size, image_norm=image_norm, classes=["a", "b", "c"],
        source_domains=["d", "e"], dataset="toy",
    )  # fmt: skip
    path = tmp_path / "framed.onnx"
    assert export_onnx(Predictor(model, info), path) < 1e-4
    assert solodg.load(path).info.image_norm == image_norm


def test_no_flipped_bit_of_a_file_goes_unseen(digits_onnx: Path, tmp_path: Path) -> None:
    whole, path = digits_onnx.read_bytes(), tmp_path / "x.onnx"
    generator = np.random.default_rng(0)
    mark = whole.index(b"solodg-blake2b:")
    for at in [0, mark, mark + 20, len(whole) - 1, *generator.integers(len(whole), size=20)]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
        with pytest.raises(UserError, match=r"damaged|not a readable"):
            solodg.load(path)


def changed(path: Path, folder: Path, change) -> Path:
    """A copy of an exported file with changed metadata, and a right checksum."""
    model = onnx.load(path)
    (entry,) = (p for p in model.metadata_props if p.key == METADATA)
    known = json.loads(entry.value)
    change(model, known["model"])
    entry.value = json.dumps(known)
    (seal,) = (p for p in model.metadata_props if p.key == CHECKSUM)
    seal.value = PLACEHOLDER
    (folder / "changed.onnx").write_bytes(sealed(model.SerializeToString()))
    return folder / "changed.onnx"


WRONG = {
    "fewer classes than outputs": (lambda _, info: info["classes"].pop(), "9 classes"),
    "a class twice": (lambda _, info: info["classes"].__setitem__(0, "1"), "times"),
    "another size": (lambda _, info: info.update(image_size=31), "inputs and outputs"),
    "an absurd size": (lambda _, info: info.update(image_size=10**9), "4096"),
    "another type": (lambda _, info: info.update(classes=None), "classes"),
    "another format": (lambda _, info: info.update(format="solodg-model-9"), "format"),
    "another output": (
        lambda model, _: model.graph.output.pop(1) and model.graph.output.pop(1),
        "inputs and outputs",
    ),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_a_description_that_does_not_fit_the_graph_is_refused(digits_onnx, tmp_path, case) -> None:
    change, reason = WRONG[case]
    with pytest.raises(UserError, match=reason):
        solodg.load(changed(digits_onnx, tmp_path, change))


def test_files_without_a_checksum_are_those_of_earlier_versions(digits_onnx, tmp_path) -> None:
    path = tmp_path / "x.onnx"
    for format_, accepted in (("solodg-model-2", True), ("solodg-model-3", False)):
        model = onnx.load(digits_onnx)
        known = json.loads({p.key: p.value for p in model.metadata_props}[METADATA])
        known["model"]["format"] = format_
        del model.metadata_props[:]
        model.metadata_props.add(key=METADATA, value=json.dumps(known))
        onnx.save(model, path)
        if accepted:
            assert solodg.load(path).info.format == format_
        else:
            with pytest.raises(UserError, match="no checksum"):
                solodg.load(path)


@pytest.mark.parametrize("metadata", ["{", "null", "[" * 5000, '{"model": 3}', "\xff"])
def test_metadata_that_is_no_description_is_refused(digits_onnx, tmp_path, metadata: str) -> None:
    model = onnx.load(digits_onnx)
    del model.metadata_props[:]
    model.metadata_props.add(key=METADATA, value=metadata)
    onnx.save(model, tmp_path / "x.onnx")
    with pytest.raises(UserError, match=r"x\.onnx"):
        solodg.load(tmp_path / "x.onnx")


def in_initializer(model) -> onnx.TensorProto:
    return model.graph.initializer[0]


def in_attribute(model) -> onnx.TensorProto:
    node = model.graph.node.add(op_type="Constant", name="c", output=["unused"])
    attribute = node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR)
    attribute.t.CopyFrom(model.graph.initializer[0])
    return attribute.t


def in_branch(model) -> onnx.TensorProto:
    node = model.graph.node.add(op_type="If", name="i", input=["x"], output=["unused"])
    branch = node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
    branch.initializer.add().CopyFrom(model.graph.initializer[0])
    return branch.initializer[0]


@pytest.mark.parametrize("place", [in_initializer, in_attribute, in_branch])
def test_a_file_that_refers_to_other_files_is_refused(
    digits_onnx: Path, tmp_path: Path, place, monkeypatch
) -> None:
    def externalise(model, info: dict) -> None:
        tensor = place(model)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="secret.bin")

    path = changed(digits_onnx, tmp_path, externalise)
    opened = []
    monkeypatch.setattr("onnxruntime.InferenceSession", lambda *_, **__: opened.append(1))
    with pytest.raises(UserError, match="refers to data in other files"):
        solodg.load(path)
    assert not opened
