"""What `solodg evaluate` records is what the server and an exported file say of the model."""

import json
from pathlib import Path

import httpx
import pytest

import onnx
import solodg as package
from conftest import write_images
from serving_process import listening
from solodg.predict.onnx import METADATA
from solodg.runs.recorded_scores import MOST_CLASSES, MOST_DOMAINS, read_recorded, recordable
from solodg.storage import CHECKSUM, PLACEHOLDER, append_lines, sealed

FAST = ["--backbone", "small_cnn", "--image-size", "32", "--steps", "4", "--algorithm", "erm",
        "--accelerator", "cpu"]  # fmt: skip


def served_scores(model: package.Model) -> list[dict]:
    with listening(model) as url:
        return httpx.get(f"{url}/model").json()["scores"]


def test_recorded_scores_reach_the_server_and_the_exported_file(solodg, tmp_path: Path) -> None:
    images = write_images(tmp_path / "own", {(d, c): 10 for d in "abc" for c in ("fig", "pear")})
    run, before, after = tmp_path / "run", tmp_path / "before.onnx", tmp_path / "after.onnx"
    code, _, err = solodg("train", images, "--target", "b", *FAST, "--output", run)
    assert code == 0, err
    assert "It holds no scores" in solodg("export", run, "--onnx", before)[2]
    for options in ([], ["--on", images / "a"], ["--adapter", "bn"]):  # the last is not the model
        code, out, err = solodg("evaluate", run, *options, "--json")
        assert code == 0, err
        if not options:
            first = [json.loads(line) for line in out.splitlines()]
    found = served_scores(package.load(run))
    roles = [line["role"] for line in first]
    assert [each["role"] for each in found] == [*roles, "new-site"]
    for line, each in zip(first, found, strict=False):
        assert each["overall"] == line["scores"]["overall"]
        assert each["overall"]["accuracy"]["low"] <= line["metrics"]["accuracy"]
        assert each["images"] == line["metrics"]["images"]
        assert each["resampled"] == "images"
        for name, values in line["scores"]["classes"].items():
            metrics = {key: value for key, value in values.items() if key != "images"}
            assert each["classes"][name] == {"images": values["images"], "metrics": metrics}
    assert "holds the recorded scores of" in solodg("export", run, "--onnx", after)[2]
    assert served_scores(package.load(after)) == found
    assert served_scores(package.load(before)) == []
    _rewrite(after, lambda known: known.pop("scores"))  # as a file of before
    assert package.load(after).recorded_scores() == []
    _rewrite(after, lambda known: known.update(scores=[{"domain": "x"}]))
    with pytest.raises(package.errors.UserError, match="description of the model"):
        package.load(after)


def _rewrite(path: Path, change) -> None:
    model = onnx.load(path)
    entries = {entry.key: entry for entry in model.metadata_props}
    known = json.loads(entries[METADATA].value)
    change(known)
    entries[METADATA].value, entries[CHECKSUM].value = json.dumps(known), PLACEHOLDER
    path.write_bytes(sealed(model.SerializeToString()))


def test_the_latest_record_of_each_domain_counts_and_their_number_is_bounded(tmp_path) -> None:
    def line(domain: str, accuracy: float, **more) -> dict:
        return {"adapter": "none", "dataset": "d", "domain": domain, "role": "target",
                "protocol": "p", "metrics": {"accuracy": accuracy, "images": 4}} | more  # fmt: skip

    path = tmp_path / "results.jsonl"
    assert read_recorded(path) == []
    append_lines(path, [line("a", 0.5), line("b", 0.25), line("a", 0.75)])
    append_lines(path, [line("a", 1.0, stream={"batch_size": 64}), {"another": "line"}])
    with path.open("ab") as file:
        file.write(b'{"torn')
    said: list[str] = []
    found = read_recorded(path, said.append)
    assert [(each.domain, each.overall["accuracy"].value) for each in found] == [
        ("b", 0.25), ("a", 0.75),
    ]  # fmt: skip
    assert all(each.overall["accuracy"].low is None for each in found)
    assert "1 damaged line" in said[0]
    append_lines(path, [line(str(n), 0.5) for n in range(2 * MOST_DOMAINS)])
    assert len(read_recorded(path)) == MOST_DOMAINS
    many = {"overall": {}, "classes": {str(n): {} for n in range(MOST_CLASSES + 1)}}
    assert recordable(many)["classes"] == {}
    assert recordable(many | {"classes": {"x": {}}})["classes"] == {"x": {}}
