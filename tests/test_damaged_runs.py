"""Every file of a run, damaged in every way: one clear line, or the same answer."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from solodg.errors import UserError
from solodg.explain.projection import stored_projection
from solodg.predict.torch import Predictor
from solodg.progress import NoProgress
from solodg.runs.config import Machine, RunConfig
from solodg.runs.metrics_log import read_metrics
from solodg.runs.train import train_run
from solodg.storage import raw_lines, read_json, write_json
from solodg.storage.tensors import read_tensors, write_tensors

PICTURE = Path(__file__).parents[1] / "docs" / "disc.png"
CONFIG = RunConfig(
    dataset="toy", algorithm="solo", arguments={"hidden": 8}, backbone="small_cnn", steps=4,
    validate_every=2, batch_size=8, context_images=2, centre_images=5,
)  # fmt: skip
MACHINE = Machine(accelerator="cpu")
REFUSED = 2  # the exit code of a user's mistake


def flipped(content: bytes, share: float = 0.5) -> bytes:
    """The content with one bit changed, at this share of its length."""
    at = int(share * len(content))
    return content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "nulled": lambda content: b"null",
    "zeroed": lambda content: bytes(len(content)),
    "flipped": flipped,
    "of another type": lambda content: b"[1, 2]",
    "an empty object": lambda content: b"{}",
    "nested deeply": lambda content: b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "not UTF-8": lambda content: b'{"seconds": "\xff\xfe"}',
}
ALL = pytest.mark.parametrize("damage", list(DAMAGES))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(CONFIG, MACHINE, tmp_path_factory.mktemp("damaged") / "run")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to damage."""
    return shutil.copytree(finished, tmp_path / "run")


def spoil(path: Path, damage: str) -> None:
    path.write_bytes(DAMAGES[damage](path.read_bytes()))


def says(text: str, error: str) -> bool:
    """Whether a message holds a text, wherever the terminal breaks its lines."""
    return "".join(text.split()) in "".join(error.split())


@ALL
@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_a_damaged_model_is_refused(solodg, run: Path, name: str, damage: str) -> None:
    spoil(run / name, damage)
    code, out, err = solodg("predict", run, PICTURE, "--json")
    assert (code, out) == (REFUSED, "")
    assert says(name, err)


@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_no_flipped_bit_of_a_model_goes_unseen(solodg, run: Path, name: str) -> None:
    """Exponent bits of weights among them: they give NaN, or another class."""
    whole = (run / name).read_bytes()
    generator = np.random.default_rng(0)
    for at in [0, 8, len(whole) - 1, *generator.integers(len(whole), size=20)]:
        bit = 1 << int(generator.integers(8))
        (run / name).write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        code, out, _ = solodg("predict", run, PICTURE, "--json")
        assert (code, out) == (REFUSED, ""), (at, bit)


def test_a_model_without_its_checksum_is_refused(solodg, run: Path) -> None:
    whole = json.loads((run / "model.json").read_text())
    del whole["checksum"]
    (run / "model.json").write_text(json.dumps(whole))
    code, _, err = solodg("predict", run, PICTURE)
    assert code == REFUSED
    assert says("no checksum", err)


SETTINGS = [
    (name, damage)
    for name in ("config.json", "machine.json", "source.json")
    for damage in DAMAGES
    if (name, damage) != ("machine.json", "an empty object")  # all of its settings have defaults
]


@pytest.mark.parametrize(("name", "damage"), SETTINGS)
def test_damaged_settings_are_refused(solodg, run: Path, name: str, damage: str) -> None:
    spoil(run / name, damage)
    code, out, err = solodg("evaluate", run, "--json")
    assert (code, out) == (REFUSED, "")
    assert says(name, err)


@pytest.mark.parametrize("damage", ["nulled", "flipped", "nested deeply"])
@pytest.mark.parametrize("name", ["versions.json", "finished.json"])
def test_damaged_facts_make_no_record(solodg, run: Path, name: str, damage: str) -> None:
    spoil(run / name, damage)
    code, out, err = solodg("evaluate", run, "--json")
    assert (code, out) == (REFUSED, "")
    assert says(name, err)
    assert not (run / "results.jsonl").exists()


@pytest.mark.parametrize("damage", ["truncated", "emptied", "flipped", "of another type"])
def test_damaged_metrics_are_left_out_and_counted(run: Path, damage: str) -> None:
    spoil(run / "metrics.jsonl", damage)
    said: list[str] = []
    lines = read_metrics(run, said.append)
    broken = len(raw_lines(run / "metrics.jsonl")) - len(lines)
    assert said == ([f"{run / 'metrics.jsonl'}: {broken} damaged line(s) of {broken + len(lines)} "
                     "left out."] if broken else [])  # fmt: skip


@pytest.mark.parametrize("damage", ["nulled", "flipped", "zeroed"])
def test_a_damaged_projection_is_fitted_again(run: Path, damage: str) -> None:
    predictor = Predictor.load(run)
    before = stored_projection(run, predictor)
    spoil(run / "plane.safetensors", damage)
    after = stored_projection(run, predictor)
    assert (before.axes == after.axes).all()
    assert read_tensors(run / "plane.safetensors", checksum_required=True)


@pytest.mark.parametrize("damage", ["flipped", "nulled"])
def test_damaged_earlier_records_stop_no_evaluation(solodg, run: Path, damage: str) -> None:
    (run / "results.jsonl").write_bytes(DAMAGES[damage](b'{"a": 1}\n'))
    code, out, err = solodg("evaluate", run, "--json")
    assert code == 0, err
    assert len(out.splitlines()) == 4


@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
@pytest.mark.parametrize("command", ["export", "report", "explain", "evaluate", "study"])
def test_every_command_refuses_a_damaged_model(
    solodg, run: Path, command: str, name: str, tmp_path: Path
) -> None:
    spoil(run / name, "flipped")
    more = {"export": ["--onnx", tmp_path / "x.onnx"], "explain": [PICTURE]}
    code, _, err = solodg(command, run, *more.get(command, []))
    assert code == REFUSED
    assert says(name, err)


WRONG_INFO = {
    "an unknown argument": ({"arguments": {"hiden": 8}}, "Did you mean 'hidden'"),
    "an argument of another type": ({"arguments": {"hidden": [1]}}, "hidden"),
    "an absurd width": ({"arguments": {"hidden": 10**9}}, "16384"),
    "an absurd number of samples": ({"arguments": {"test_samples": 10**9}}, "16384"),
    "an absurd image size": ({"image_size": 10**9}, "4096"),
    "a negative image size": ({"image_size": -3}, "image_size"),
    "absurd channels": ({"channels": 10**9}, "channels"),
    "a class twice": ({"classes": ["a", "a", "b"]}, "'a' is there 2 times"),
    "fewer classes": ({"classes": ["a", "b"]}, "does not fit model.json"),
    "no classes": ({"classes": []}, "classes"),
    "another width": ({"arguments": {"hidden": 9}}, "does not fit model.json"),
    "an unknown backbone": ({"backbone": "small_cn"}, "small_cnn"),
    "an unknown algorithm": ({"algorithm": "sol"}, "solo"),
    "no pixels": ({"image_norm": [-1]}, "image_norm"),
}


@pytest.mark.parametrize("case", list(WRONG_INFO))
def test_a_description_that_cannot_be_is_refused(solodg, run: Path, case: str) -> None:
    changes, reason = WRONG_INFO[case]
    write_json(run / "model.json", read_json(run / "model.json") | changes)
    code, _, err = solodg("predict", run, PICTURE)
    assert code == REFUSED
    assert says(reason, err)


@pytest.mark.parametrize("name", ["model.json", "model.safetensors", "machine.json", "config.json"])
def test_a_pipe_in_place_of_a_file_does_not_hang(solodg, run: Path, name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    code, _, err = solodg("evaluate", run)
    assert code == REFUSED, err


def test_a_pipe_or_a_device_as_weights_is_refused(solodg, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    for path in (tmp_path / "pipe.safetensors", "/dev/zero"):
        fast = ["--backbone", "small_cnn", "--steps", "1", "--output", tmp_path / "run"]
        code, _, err = solodg("train", "toy", "--weights", path, *fast)
        assert code == REFUSED
        assert says("not a regular file", err)


class _Stop(NoProgress):
    """Ends a training after three of its steps, as a kill would."""

    @contextmanager
    def bar(self, title: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
        made = [0]

        def advance(count: int, note: str = "") -> None:
            made[0] += count
            if title == "Training" and made[0] == 3:
                raise KeyboardInterrupt

        yield advance


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed") / "run"
    with pytest.raises(KeyboardInterrupt):
        train_run(CONFIG, MACHINE, folder, progress=_Stop())
    assert {"state.safetensors", "seconds.json"} <= {path.name for path in folder.iterdir()}
    return folder


@ALL
@pytest.mark.parametrize("name", ["state.safetensors", "seconds.json", "config.json"])
def test_a_damaged_state_is_not_resumed(killed: Path, tmp_path, name: str, damage: str) -> None:
    run = shutil.copytree(killed, tmp_path / "run")
    spoil(run / name, damage)
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        train_run(CONFIG, MACHINE, run, resume=True)


def test_no_flipped_bit_of_a_state_is_resumed(killed: Path, tmp_path: Path) -> None:
    whole = (killed / "state.safetensors").read_bytes()
    path = tmp_path / "state.safetensors"
    for at in np.random.default_rng(1).integers(len(whole), size=20):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
        with pytest.raises(UserError, match="damaged"):
            read_tensors(path)


def test_a_state_of_another_model_is_refused(killed: Path, tmp_path: Path) -> None:
    run = shutil.copytree(killed, tmp_path / "run")
    tensors, header = read_tensors(run / "state.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.ndim > 1)
    write_tensors(run / "state.safetensors", tensors | {name: tensors[name][:1]}, header)
    with pytest.raises(UserError, match="does not fit this run"):
        train_run(CONFIG, MACHINE, run, resume=True)


def test_what_was_not_damaged_resumes(killed: Path, finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(killed, tmp_path / "run")
    train_run(CONFIG, MACHINE, run, resume=True)
    assert (run / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()
