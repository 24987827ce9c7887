"""Means of finished runs: real small runs, and what does not fit together."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from solodg.bench.verify import read_record, repeat
from solodg.errors import UserError
from solodg.models.backbones import build_backbone
from solodg.progress import NoProgress
from solodg.runs import checkpoint
from solodg.runs.average import average_runs
from solodg.runs.averaged_runs import read_averaged
from solodg.runs.config import Machine, RunConfig
from solodg.runs.evaluate import evaluate_run
from solodg.runs.folder import read_config, read_seconds
from solodg.runs.opened_data import input_batches, open_source
from solodg.runs.train import train_run
from solodg.storage import read_lines

CPU = Machine(accelerator="cpu")
SMALL = {
    "dataset": "toy", "targets": ("sky",), "backbone": "small_cnn", "algorithm": "erm",
    "batch_size": 8, "context_images": 2, "centre_images": 4, "validate_every": 4,
}  # fmt: skip


def train(folder: Path, **options) -> Path:
    return train_run(RunConfig(**SMALL | {"steps": 4} | options), CPU, folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs from the same random weights; the last one says the opposite of the first, loudly."""
    base = tmp_path_factory.mktemp("runs")
    good, other = (
        train(base / name, steps=20, validate_every=20, learning_rate=rate)
        for name, rate in (("good", 4e-3), ("other", 2e-3))
    )
    shutil.copytree(good, base / "bad")
    algorithm, _ = checkpoint.load(good)
    with torch.no_grad():
        for parameter in algorithm.classifier.parameters():
            parameter.mul_(-10)
    checkpoint.save_weights(
        base / "bad", algorithm, step=1, validation={"accuracy": 0.01, "nll": 9.0}
    )
    return [good, other, base / "bad"]


def floats(folder: Path) -> dict[str, torch.Tensor]:
    state = load_file(folder / "model.safetensors")
    return {n: t.double() for n, t in state.items() if t.is_floating_point()}


def test_the_mean_is_that_of_all_tensors_and_a_run_like_any_other(runs, tmp_path, solodg) -> None:
    code, text, _ = solodg("average", *runs, "--output", tmp_path / "mean", "--accelerator", "cpu")
    assert code == 0
    assert "mean of the weights of 3 runs" in text
    ours, each = floats(tmp_path / "mean"), [floats(run) for run in runs]
    for name, tensor in ours.items():
        expected = sum(state[name] for state in each) / 3
        torch.testing.assert_close(tensor, expected.float().double(), rtol=1e-6, atol=1e-7)
    made = read_averaged(tmp_path / "mean")
    assert (made.selection, made.left_out) == ("uniform", [])
    assert {run.run for run in made.runs} == {"good", "other", "bad"}
    best = made.runs[0].run
    assert read_config(tmp_path / "mean") == read_config(runs[0].parent / best)
    rates = {run.run: run.settings.get("learning_rate") for run in made.runs}
    assert rates[best] is None
    assert set(rates.values()) - {None}  # what differs from the best is named
    total = sum(read_seconds(run / "finished.json") for run in runs)
    assert read_seconds(tmp_path / "mean" / "finished.json") == pytest.approx(total)
    records = evaluate_run(tmp_path / "mean", accelerator="cpu")
    assert all(r.averaged == made.model_dump() for r in records)
    assert str(tmp_path) not in (tmp_path / "mean" / "results.jsonl").read_text()
    assert not evaluate_run(runs[0], accelerator="cpu")[0].averaged
    card = (tmp_path / "mean" / "README.md").read_text()
    assert "mean of the weights of 3 runs (uniform)" in card
    assert "bad (step 1" in card
    record = read_record(str(tmp_path / "mean" / "results.jsonl"))
    with pytest.raises(UserError, match="mean of several runs"):
        repeat(record, CPU, NoProgress(), weights=None, dataset=None)


def test_greedy_leaves_out_what_harms_source_validation(runs, tmp_path) -> None:
    said: list[str] = []
    made = average_runs(
        runs[::-1], tmp_path / "mean", greedy=True, accelerator="cpu", say=said.append
    )
    scores = {run.name: checkpoint.selection(run)["validation"]["accuracy"] for run in runs}
    assert made.runs[0].run == max(scores, key=scores.get)
    assert "bad" in [run.run for run in made.left_out]
    assert len(made.runs) + len(made.left_out) == 3
    chosen = checkpoint.selection(tmp_path / "mean")
    assert chosen["runs"] == len(made.runs)
    assert chosen["validation"]["accuracy"] >= max(scores.values())
    ours, each = floats(tmp_path / "mean"), [floats(runs[0].parent / r.run) for r in made.runs]
    for name, tensor in ours.items():
        expected = sum(state[name] for state in each) / len(each)
        torch.testing.assert_close(tensor, expected.float().double(), rtol=1e-6, atol=1e-7)


def test_class_centres_are_those_of_the_averaged_weights(tmp_path) -> None:
    options = {"algorithm": "solo", "steps": 2, "validate_every": 2, "label_smoothing": 0}
    runs = [train(tmp_path / str(rate), **options, learning_rate=rate) for rate in (1e-3, 1e-2)]
    average_runs(runs, tmp_path / "mean", accelerator="cpu")
    algorithm, _ = checkpoint.load(tmp_path / "mean")
    state = {n: t.clone() for n, t in algorithm.state_dict().items()}
    config = read_config(tmp_path / "mean")
    source, _ = open_source(config, CPU)
    with torch.inference_mode():
        algorithm.finalize(input_batches(source.train.balanced(config.centre_images, config.seed)))
    changed = [n for n, t in algorithm.state_dict().items() if not torch.equal(t, state[n])]
    assert changed == []
    each = [floats(run) for run in runs]
    centres = [n for n in state if n not in dict(algorithm.named_parameters()) and n in each[0]]
    moved = [
        n
        for n in centres
        if not torch.allclose(state[n].double(), (each[0][n] + each[1][n]) / 2, atol=1e-6)
    ]
    assert [n for n in moved if not n.startswith("backbone.")]  # not the mean of the runs' centres


def test_runs_of_other_seeds_fit_with_one_split_given_weights_and_a_linear_classifier(
    tmp_path, image_folder
) -> None:
    """On a frozen backbone, whose stored features are read."""
    weights = tmp_path / "small.safetensors"
    torch.manual_seed(0)
    state = build_backbone("small_cnn", channels=3, image_size=32).net.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, weights)
    rows = [
        f"{path},{path.parent.name},{path.parents[1].name},{'val' if path.stem > '6' else 'train'}"
        for path in sorted(image_folder.rglob("*.png"))
    ]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["path,label,domain,split", *rows]))
    options = {
        "dataset": str(table), "targets": ("c",), "weights": str(weights), "image_size": 32,
        "freeze_backbone": True, "steps": 8, "validate_every": 8,
    }  # fmt: skip
    runs = [train(tmp_path / f"{seed}", seed=seed, **options) for seed in (0, 1)]
    average_runs(runs, tmp_path / "mean", accelerator="cpu")
    before, after = floats(runs[0]), floats(tmp_path / "mean")
    frozen = [n for n in before if n.startswith("backbone.")]
    assert frozen
    assert all(torch.equal(before[n], after[n]) for n in frozen)
    assert not torch.equal(before["classifier.weight"], after["classifier.weight"])
    (record, *_) = evaluate_run(tmp_path / "mean", accelerator="cpu")
    assert {run["seed"] for run in record.averaged["runs"]} == {0, 1}
    hidden = options | {"algorithm": "masf", "steps": 1, "validate_every": 1}
    runs = [train(tmp_path / f"masf {seed}", seed=seed, **hidden) for seed in (0, 1)]
    with pytest.raises(UserError, match="only a linear classifier"):
        average_runs(runs, tmp_path / "other", accelerator="cpu")


def test_runs_that_do_not_fit_together_are_refused_by_name(runs, tmp_path, image_folder) -> None:
    def refused(folder: Path, what: str, first: Path = runs[0]) -> None:
        with pytest.raises(UserError, match=what):
            average_runs([first, folder], tmp_path / "mean", accelerator="cpu")
        assert not (tmp_path / "mean").exists()

    quick = {"steps": 1, "validate_every": 1}
    refused(train(tmp_path / "coral", algorithm="coral", **quick), "its algorithm is 'coral")
    refused(train(tmp_path / "alex", image_size=40, **quick), "its size of images is '40'")
    refused(train(tmp_path / "ash", targets=("ash",), **quick), "its targets is 'ash'")
    refused(train(tmp_path / "seed", seed=1, **quick), "its initial weights is .*of seed 1")
    own = {"dataset": str(image_folder), "targets": ("a",), "image_size": 32, **quick}
    one = train(tmp_path / "own", **own)
    refused(one, "its classes is 'apple, pear'")
    # Another image in the sources: another fingerprint.
    shutil.copy(image_folder / "b" / "pear" / "0.png", image_folder / "b" / "pear" / "new.png")
    refused(train(tmp_path / "more", **own), "fingerprint of the source images", first=one)
    with pytest.raises(UserError, match="two run folders"):
        average_runs([runs[0], runs[0]], tmp_path / "mean")
    shutil.copytree(runs[1], tmp_path / "open")
    (tmp_path / "open" / "finished.json").unlink()
    refused(tmp_path / "open", "no finished run")
    with pytest.raises(UserError, match="holds a run already"):
        average_runs(runs[:2], runs[2])
    # The data of the training is gone.
    shutil.copytree(one, tmp_path / "twin")
    with pytest.raises(UserError, match="are not those that"):
        average_runs([one, tmp_path / "twin"], tmp_path / "mean", accelerator="cpu")
    assert read_lines(tmp_path / "mean" / "results.jsonl") == []
