"""The command line as a user meets it: answers, and one clear line for every mistake."""

import inspect
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from conftest import write_images
from solodg import cli
from solodg.cli.commands import COMMANDS
from solodg.cli.predict import image_paths
from solodg.data import DATASETS, DomainDataset, rotated
from solodg.errors import UserError

FAST = ["--backbone", "small_cnn", "--image-size", "32", "--steps", "4", "--context-images", "2",
        "--accelerator", "cpu"]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run on real files, and the files."""
    root = tmp_path_factory.mktemp("cli")
    images = write_images(root / "own", {(d, c): 10 for d in "abc" for c in ("apple", "pear")})
    command = ["train", images, "--target", "b", *FAST, "--steps", "40", "--output", root / "run"]
    trained = CliRunner().invoke(cli.app, list(map(str, command)))
    assert trained.exit_code == 0, trained.output
    return root / "run", images


def test_train_evaluate_predict_on_own_images(solodg, trained) -> None:
    run, images = trained
    code, out, err = solodg("evaluate", run)
    assert code == 0, err
    assert "unseen" in out
    assert "random-split-0.2-seed-0" in out
    code, out, err = solodg("predict", run, images / "b" / "pear", images / "b" / "apple" / "0.png")
    assert code == 0, err
    assert out.count("pear/") == 10
    assert "apple/0.png" in out


def test_predictions_as_json_from_a_list_on_stdin(solodg, trained) -> None:
    run, images = trained
    paths = [str(p) for p in sorted((images / "b").rglob("*.png"))]
    code, out, _ = solodg("predict", run, "-", "--json", stdin="\n".join(paths))
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [row["image"] for row in rows] == paths
    assert {"class", "probability", "uncertainty", "probabilities"} <= rows[0].keys()


def test_records_as_json(solodg, trained) -> None:
    code, out, _ = solodg("evaluate", trained[0], "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    wanted = {"dataset", "algorithm", "variant", "adapter", "target", "seed", "protocol", "metrics",
              "config", "versions", "data"}  # fmt: skip
    assert wanted <= records[0].keys()
    assert str(trained[1].parent) not in out  # no path of a machine


def test_a_folder_without_images_is_an_error_that_says_what_images_end_with(tmp_path) -> None:
    with pytest.raises(UserError, match=r"no images in folder .*: expected files .*\.dcm .*\.png"):
        image_paths([str(tmp_path)])


def test_a_bad_image_among_good_ones_is_named_and_the_others_answered(solodg, trained, tmp_path):
    run, images = trained
    (tmp_path / "bad.png").write_bytes(b"no image")
    code, out, err = solodg("predict", run, tmp_path / "bad.png", images / "b" / "pear" / "1.png")
    assert code == 2
    assert "bad.png" in err
    assert "pear/1.png" in out


def test_datasets_are_listed_with_what_is_found(solodg, tmp_path) -> None:
    code, out, _ = solodg("datasets", "--json", "--data-dir", tmp_path)
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert rows.keys() == DATASETS.keys()
    assert rows["pacs"]["domains"] == ["art_painting", "cartoon", "photo", "sketch"]
    assert rows["pacs"]["found"] is None
    assert "5,000" in rows["rotated-mnist"]["found"]
    code, out, _ = solodg("datasets", "--data-dir", tmp_path)
    assert code == 0
    assert "domaingeneralization" in out.replace("\n", "")


MISTAKES = {
    "unknown dataset": (["train", "pasc"], "Did you mean 'pacs'"),
    "no such file": (["train", "scans/sites.csv"], "nothing at scans/sites.csv: expected a folder"),
    "unknown target": (["train", "toy", "--target", "skyy"], "Did you mean 'sky'"),
    "unknown backbone": (["train", "toy", "--backbone", "resnet118"], "resnet18"),
    "unknown algorithm": (["train", "toy", "--algorithm", "sol"], "Did you mean 'solo'"),
    "unknown variant": (["train", "toy", "--variant", "invarant"], "Did you mean 'invariant'"),
    "unknown preset": (["train", "toy", "--preset", "paper"], "literal"),
    "unknown argument": (
        ["train", "toy", "--algorithm", "solo", "--set", "kl_wait=1"],
        "Did you mean 'kl_weight'",
    ),
    "argument of another type": (
        ["train", "toy", "--algorithm", "solo", "--set", "kl_weight=much"],
        "valid number",
    ),
    "argument out of its choices": (
        ["train", "toy", "--algorithm", "solo", "--set", "turns=two"],
        "'one' or 'all'",
    ),
    "malformed argument": (["train", "toy", "--set", "kl_weight"], "NAME=VALUE"),
    "no such value": (["train", "toy", "--steps", "0"], "--steps"),
    "channels": (["train", "toy", "--channels", "2"], "--channels"),
    "missing data": (["train", "pacs", "--target", "sketch"], "--data-dir"),
    "missing data elsewhere": (["train", "vlcs", "--data-dir", "."], "VLCS not found"),
    "a subset of what has none": (["train", "pacs", "--train-images", "9"], "--train-images"),
    "images too small": (["train", "toy", "--backbone", "alexnet"], "--image-size"),
    "precision": (["train", "toy", "--precision", "bf16-true"], "--precision"),
    "an argument of a method without": (["train", "toy", "--set", "frame=0"], "--pose"),
    "pose of features": (
        ["train", "toy", "--pretrained", "--freeze-backbone", "--pose", "on"],
        "--pose rotates",
    ),
    "an unknown pose": (["train", "toy", "--pose", "perhaps"], "'auto', 'on' or 'off'"),
    "no samples": (
        ["train", "toy", "--algorithm", "solo", "--set", "source_samples=0"],
        "equal to 1",
    ),
    "an absurd width": (
        ["train", "toy", "--algorithm", "solo_code", "--set", "code_dim=1000000000"],
        "16384",
    ),
    "an absurd size": (["train", "toy", "--image-size", "1000000000"], "4096"),
    "absurd readings": (["train", "toy", "--image-norm", ",".join(map(str, range(99)))], "16"),
    "an infinite rate": (["train", "toy", "--learning-rate", "inf"], "finite"),
    "infinite memory": (["train", "toy", "--memory-gb", "inf"], "--memory-gb"),
    "an argument nested deeply": (["train", "toy", "--set", f"code_dim={'[' * 5000}"], "code_dim"),
    "frozen without weights": (["train", "toy", "--freeze-backbone"], "--weights"),
    "two kinds of weights": (["train", "toy", "--pretrained", "--weights", "x"], "exclude"),
    "missing weights": (["train", "toy", "--weights", "nowhere.safetensors"], "no weights file"),
    "too few images": (["train", "toy", "--context-images", "25"], "--context-images 24"),
    "one source": (
        ["train", "toy", "--target", "ash", "--target", "sky", "--target", "moss"],
        "--pseudo-domains",
    ),
    "no run": (["evaluate", "nowhere"], "holds no model"),
    "no model": (["predict", "nowhere", "x.png"], "holds no model"),
    "no run to explain": (["explain", "nowhere", "x.png"], "holds no model"),
    "no run to report": (["report", "nowhere"], "holds no model"),
    "no exported file": (["predict", "nowhere.onnx", "x.png"], "solodg export"),
    "export of nothing": (["export", "nowhere", "--onnx", "x.onnx"], "holds no model"),
    "export to another kind": (["export", "nowhere", "--onnx", "x.pt"], ".onnx"),
    "nothing to serve": (["serve", "nowhere"], "holds no model"),
    "a queue that is too short": (["serve", "x.onnx", "--queue", "3"], "--max-images"),
    "no such limit": (["serve", "x.onnx", "--timeout", "0"], "must be finite and above 0"),
    "no token": (["serve", "x.onnx", "--token-file", "nowhere"], "token"),
    "bad strategy": (["train", "toy", "--strategy", "dpp"], "devices"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_clear_line_and_exit_code_2(solodg, tmp_path, monkeypatch, case) -> None:
    arguments, hint = MISTAKES[case]
    monkeypatch.chdir(tmp_path)
    code, _, err = solodg(*arguments)
    assert code == 2
    assert "Traceback" not in err
    line = err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert hint in line


def test_an_unreadable_training_image_is_named_or_skipped_on_demand(solodg, tmp_path) -> None:
    images = write_images(tmp_path / "own", {(d, c): 8 for d in "abc" for c in ("x", "y")})
    (images / "a" / "x" / "5.png").write_bytes(b"broken")
    (images / "c" / "y" / "2.png").write_bytes(b"broken")
    common = ["train", images, "--target", "b", *FAST]
    code, _, err = solodg(*common, "--output", tmp_path / "r0")
    assert code == 2
    assert ".png" in err.splitlines()[-1]
    assert "--skip-bad-images" in err
    code, _, err = solodg(*common, "--output", tmp_path / "r1", "--skip-bad-images")
    assert code == 0, err
    assert sum(int(line.split()[1]) for line in err.splitlines() if "Skipped" in line) == 2


def test_an_empty_class_folder_and_an_empty_target_are_explained(solodg, tmp_path) -> None:
    (tmp_path / "own" / "a").mkdir(parents=True)
    code, _, err = solodg("train", tmp_path / "own", "--target", "a", "--output", tmp_path / "r")
    assert code == 2
    assert "no images" in err


def test_without_a_target_the_domains_that_are_trained_on_are_listed(solodg, trained) -> None:
    code, _, err = solodg("train", trained[1], *FAST, "--output", trained[0].parent / "other")
    assert code == 0
    assert "Training on all domains: a, b, c" in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_is_one_clear_line(solodg, trained, tmp_path, monkeypatch) -> None:
    """Writes go to a device that is always full."""
    real = Path.open

    def full(path: Path, mode: str = "r", *rest, **options):
        target = Path("/dev/full") if "w" in mode and path.name.startswith(".model") else path
        return real(target, mode, *rest, **options)

    monkeypatch.setattr(Path, "open", full)
    code, _, err = solodg("train", "toy", *FAST, "--output", tmp_path / "run")
    assert code == 2
    assert "No space left" in err
    assert "once there is space, --resume continues from it" in err
    assert "Traceback" not in err


def test_help_teaches(solodg) -> None:
    shown = {"train": "--target", "evaluate": "--adapter", "predict": "stdin",
             "explain": "plane", "report": "no network", "export": "--onnx",
             "serve": "--max-pixels", "datasets": "--json", "cache": "--clear",
             "demo": "--steps"}  # fmt: skip
    for command, word in shown.items():
        code, out, _ = solodg(command, "--help")
        assert code == 0
        assert word in out
    code, out, _ = solodg("--help")
    assert all(name in out for name in ("train", "evaluate", "predict", "datasets", "demo"))


def test_the_literal_preset_is_the_papers(tmp_path, solodg) -> None:
    code, _, err = solodg("train", "toy", *FAST, "--preset", "literal", "--output", tmp_path / "r")
    assert code == 0, err
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    assert config["variant"] == "literal"
    assert config["backbone_learning_rate"] == 5e-5
    assert config["steps"] == 4  # what is given by hand goes over the preset


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded dataset with a tenth of its digits."""
    pool = rotated._embedded_digits(0)
    small = replace(pool, test=pool.test[:200], test_labels=pool.test_labels[:200])

    def dataset(_wanted: int, size: int, channels: int, seed: int) -> DomainDataset:
        return rotated._rotated_dataset(rotated._MNIST, small, 200, size, channels, seed)

    monkeypatch.setattr(rotated, "_embedded_dataset", dataset)


@pytest.mark.usefixtures("few_digits")
def test_the_demo_compares_methods_and_ends_with_what_to_try(solodg, tmp_path) -> None:
    code, out, err = solodg("demo", "--steps", "2", "--output", tmp_path / "demo")
    assert code == 0, err
    assert "ERM" in out
    assert "solo_plus" in out
    assert "unseen 0" in out.replace("\n", " ")
    assert (tmp_path / "demo" / "accuracy.png").stat().st_size > 5_000
    assert str(tmp_path / "demo" / "report.html") in out
    assert (tmp_path / "demo" / "report.html").stat().st_size > 100_000
    assert "solodg predict" in err


def test_square_brackets_in_names_are_kept(solodg, trained, tmp_path) -> None:
    run, images = trained
    picture = tmp_path / "pear [copy].png"
    picture.write_bytes((images / "b" / "pear" / "1.png").read_bytes())
    code, out, _ = solodg("predict", run, picture)
    assert code == 0
    assert "pear [copy].png" in out


def test_values_of_arguments_are_read_as_what_they_mean(solodg, tmp_path) -> None:
    code, _, err = solodg("train", "toy", *FAST, "--output", tmp_path / "r", "--algorithm", "solo",
                          "--set", "meta_learning=False", "--set", "kl_weight=.5")  # fmt: skip
    assert code == 0, err
    arguments = json.loads((tmp_path / "r" / "config.json").read_text())["arguments"]
    assert (arguments["meta_learning"], arguments["kl_weight"]) == (False, 0.5)


def test_the_literal_budget_is_there_for_erm(solodg, tmp_path) -> None:
    code, _, err = solodg("train", "toy", *FAST, "--preset", "literal", "--algorithm", "erm",
                          "--output", tmp_path / "r")  # fmt: skip
    assert code == 0, err


def copy_of_run(trained, tmp_path: Path) -> tuple[Path, Path]:
    run, images = tmp_path / "run", tmp_path / "own"
    shutil.copytree(trained[0], run)
    shutil.copytree(trained[1], images)
    return run, images


def test_images_that_moved_are_scored_where_they_are(solodg, trained, tmp_path) -> None:
    run, images = copy_of_run(trained, tmp_path)
    code, out, err = solodg("evaluate", run, "--dataset", images, "--json")
    assert code == 0, err
    assert [json.loads(line)["role"] for line in out.splitlines()] == [
        "target", "source-validation", "source-validation",
    ]  # fmt: skip


def test_sources_that_changed_are_not_scored_as_held_out(solodg, trained, tmp_path) -> None:
    run, images = copy_of_run(trained, tmp_path)
    shutil.copy(images / "a" / "pear" / "0.png", images / "a" / "pear" / "new.png")
    code, out, err = solodg("evaluate", run, "--dataset", images, "--json")
    assert code == 0
    assert [json.loads(line)["role"] for line in out.splitlines()] == ["target"]
    assert "not those of the training" in err


def test_classes_that_changed_are_refused(solodg, trained, tmp_path) -> None:
    run, images = copy_of_run(trained, tmp_path)
    for domain in "abc":
        (images / domain / "apple").rename(images / domain / "zapple")
    code, _, err = solodg("evaluate", run, "--dataset", images)
    assert code == 2
    assert "not those of the model" in err


def test_a_bad_target_image_can_be_left_out_at_evaluation(solodg, trained, tmp_path) -> None:
    run, images = copy_of_run(trained, tmp_path)
    (images / "b" / "pear" / "0.png").write_bytes(b"broken")
    code, _, err = solodg("evaluate", run, "--dataset", images)
    assert code == 2
    assert "--skip-bad-images" in err
    code, _, err = solodg("evaluate", run, "--dataset", images, "--skip-bad-images")
    assert code == 0, err
    assert "Skipped 1" in err


def test_a_class_whose_images_are_all_bad_is_refused(solodg, tmp_path) -> None:
    images = write_images(tmp_path / "own", {(d, c): 6 for d in "abc" for c in ("x", "y")})
    for domain in "ac":
        for path in (images / domain / "y").iterdir():
            path.write_bytes(b"broken")
    code, _, err = solodg("train", images, "--target", "b", *FAST, "--skip-bad-images",
                          "--output", tmp_path / "r")  # fmt: skip
    assert code == 2
    assert "unknown class 'y'" in err


def test_targets_are_recorded_as_the_data_spells_them(solodg, trained, tmp_path) -> None:
    code, _, err = solodg("train", trained[1], "--target", "B", *FAST, "--output", tmp_path / "r")
    assert code == 0, err
    assert json.loads((tmp_path / "r" / "config.json").read_text())["targets"] == ["b"]


@pytest.mark.parametrize("variant", ["default", "literal"])
def test_a_single_query_is_enough_when_a_domain_lacks_a_class(solodg, tmp_path, variant) -> None:
    cells = {(d, c): 8 for d in "abc" for c in ("x", "y")}
    del cells["a", "x"]
    images = write_images(tmp_path / "own", cells)
    code, _, err = solodg("train", images, "--target", "b", *FAST, "--variant", variant, "--steps",
                          "12", "--batch-size", "1", "--output", tmp_path / "r")  # fmt: skip
    assert code == 0, err


def test_evaluate_with_an_adapter_records_its_stream(solodg, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--target", "sky", "--target", "ash", "--algorithm", "erm", *FAST)
    assert solodg("train", "toy", *options, "--output", run)[0] == 0
    options = ("--adapter", "tent", "--batch-size", "16", "--steps", "2", "--stream", "mixed")
    code, answer, said = solodg("evaluate", run, *options, "--json")
    assert code == 0, said
    records = [json.loads(line) for line in answer.splitlines()]
    assert {r["domain"] for r in records} == {"sky", "ash"}
    assert all(r["adapter"] == "tent" for r in records)
    assert records[0]["stream"] == {
        "arguments": {"steps": 2, "learning_rate": 0.001}, "batch_size": 16, "domains": "mixed",
        "order_seed": 0, "reset": "domain", "images": None,
    }  # fmt: skip
    code, _, said = solodg("evaluate", run, "--steps", "3")
    assert code == 2
    assert "adapter none takes no 'steps'" in said


def test_a_stream_changes_no_answer_of_a_single_sample_method(solodg, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--target", "sky", "--target", "ash", "--algorithm", "solo", *FAST)
    assert solodg("train", "toy", *options, "--output", run)[0] == 0
    found = []
    for stream in ([], ["--batch-size", "1"], ["--batch-size", "7", "--stream", "mixed"]):
        code, answer, said = solodg("evaluate", run, *stream, "--json")
        assert code == 0, said
        records = [json.loads(line) for line in answer.splitlines()]
        assert bool(records[0]["stream"]) == bool(stream)
        found.append(
            {r["domain"]: r["metrics"]["accuracy"] for r in records if r["role"] == "target"}
        )
    assert found[0] == found[1] == found[2]


def test_an_output_that_is_a_file_is_a_line_of_error(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "file").write_text("")
    command = ["train", "toy", "--backbone", "small_cnn", "--steps", "1"]
    monkeypatch.setattr("sys.argv", ["solodg", *command, "--output", str(tmp_path / "file")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert "choose another folder with --output" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "options", [["--queue-mb", "nan"], ["--max-mb", "inf"], ["--timeout", "nan"]]
)
def test_limits_of_the_server_are_finite(solodg, trained, options: list[str]) -> None:
    code, _, err = solodg("serve", trained[0], *options)
    assert code == 2
    assert "finite" in err


def test_the_list_of_commands_has_the_first_sentence_of_each() -> None:
    for name, command in typer.main.get_command(cli.app).commands.items():  # type: ignore[attr-defined]
        first = inspect.cleandoc(command.help).split("\n\n")[0].replace("\n", " ")
        assert (name, COMMANDS[name].summary) == (command.name, first)
        assert command.epilog == COMMANDS[name].epilog


def test_the_help_of_the_program_imports_no_command() -> None:
    code = (
        "import sys; from solodg.cli import main; sys.argv = ['solodg', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.exit(', '.join({'pydantic', 'numpy', 'solodg.cli.train'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Train on all domains" in done.stdout
