"""`solodg predict --csv`: one row for each image, as Python predicts it."""

import csv
from pathlib import Path

import pytest
from PIL import Image

from solodg.predict.torch import Predictor


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def folder(tmp_path: Path, digits) -> Path:
    """Twelve digits as files."""
    (tmp_path / "scans").mkdir()
    for i, pixels in enumerate(digits[:12]):
        Image.fromarray(pixels[0]).save(tmp_path / "scans" / f"{i:02d}.png")
    return tmp_path / "scans"


@pytest.mark.parametrize("exported", [False, True])
def test_rows_are_the_predictions_before_and_after(
    solodg, digits_run, digits_onnx, folder, tmp_path, exported, monkeypatch
) -> None:
    monkeypatch.setattr("solodg.predict.base.inference_batch_size", lambda numbers: 5)
    file = tmp_path / "new" / "answers.csv"
    model = digits_onnx if exported else digits_run
    code, out, err = solodg("predict", model, folder, "--csv", file)
    assert code == 0, err
    assert "12 rows" in out
    found, paths = rows(file), sorted(folder.glob("*.png"))
    assert [row["path"] for row in found] == [str(path) for path in paths]
    for row, answer in zip(found, Predictor.load(digits_run).predict(paths), strict=True):
        assert row["class"] == answer.label
        assert row["class_before"] == max(answer.before, key=answer.before.get)
        assert float(row["uncertainty"]) == pytest.approx(answer.uncertainty, abs=1e-4)
        for name, value in answer.probabilities.items():
            assert float(row[f"probability:{name}"]) == pytest.approx(value, abs=1e-4)
            assert float(row[f"before:{name}"]) == pytest.approx(answer.before[name], abs=1e-4)
        assert row["error"] == ""


def test_a_bad_image_has_a_row_with_its_error(solodg, digits_run, folder, tmp_path) -> None:
    (folder / "03.png").write_bytes(b"no image")
    code, out, err = solodg("predict", digits_run, folder, "--csv", tmp_path / "a.csv")
    assert code == 2
    assert "03.png" in err
    assert "12 rows, 1 of them with an error" in out
    found = rows(tmp_path / "a.csv")
    assert "cannot read image" in found[3]["error"]
    assert set(found[3].values()) == {found[3]["path"], "", found[3]["error"]}
    assert found[4]["class"]


def test_an_existing_file_is_replaced_at_the_end_alone(
    solodg, digits_run, folder, tmp_path, monkeypatch
) -> None:
    file = tmp_path / "a.csv"
    file.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(Predictor, "compute", lambda self, pixels: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            solodg("predict", digits_run, folder, "--csv", file)
    assert file.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["a.csv"]
    assert solodg("predict", digits_run, folder, "--csv", file)[0] == 0
    assert len(rows(file)) == 12


def test_wrong_outputs_are_one_line(solodg, digits_run, folder, tmp_path) -> None:
    code, _, err = solodg("predict", digits_run, folder, "--csv", tmp_path / "a.csv", "--json")
    assert (code, "give one of them" in err) == (2, True)
    code, _, err = solodg("predict", digits_run, folder, "--csv", tmp_path)
    assert (code, "elsewhere with --csv" in err) == (2, True)
