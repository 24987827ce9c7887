"""Runs on the Hugging Face Hub: its real client against a local server, and its cache offline."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import ModelCard, constants
from typer.testing import CliRunner

import solodg as package
from conftest import write_images
from hub_server import TOKEN, Hub, hub_server
from solodg.cli import app
from solodg.errors import UserError
from solodg.hub.download import local_run
from solodg.hub.names import HubName, parse_hub_name
from solodg.storage import read_json, write_json

OPTIONS = {
    "target": "c", "backbone": "small_cnn", "steps": 3, "image_size": 16, "batch_size": 8,
    "context_images": 2, "algorithm": "erm", "accelerator": "cpu", "verbose": False,
}  # fmt: skip
IMAGE = Path(__file__).parents[1] / "docs" / "disc.png"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on images below a folder whose name is private, with scores."""
    root = tmp_path_factory.mktemp("private-name")
    write_images(root / "scans", {(d, c): 6 for d in "abc" for c in ("apple", "pear")})
    package.train(root / "scans", output=root / "run", **OPTIONS)
    done = CliRunner().invoke(app, ["evaluate", str(root / "run"), "--accelerator", "cpu"])
    assert done.exit_code == 0, done.output
    return root / "run"


@pytest.fixture(scope="module")
def pushed(run: Path):
    """A server on which the run is, in a private repository."""
    with hub_server() as hub, pytest.MonkeyPatch.context() as patch:
        use(patch, hub, run.parent / "hub-cache")
        package.load(run).push_to_hub("me/scans", licence="cc-by-4.0")
        yield hub


def use(patch: pytest.MonkeyPatch, hub: Hub | None, cache: Path, token: str | None = TOKEN) -> None:
    """Points the client, which reads its variables at import, to a server and a cache."""
    url = "http://127.0.0.1:9" if hub is None else hub.url
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", url)
    patch.setattr("huggingface_hub.hf_api.api.endpoint", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setenv("SOLODG_CACHE", str(cache / "solodg"))
    patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    patch.delenv("HF_TOKEN", raising=False)
    if token:
        patch.setenv("HF_TOKEN", token)


def test_a_pushed_run_is_private_and_has_all_that_is_needed(pushed: Hub, run: Path) -> None:
    assert pushed.visibility == {"me/scans": "private"}
    files = pushed.files("me/scans")
    assert {"model.safetensors", "model.json", "model.onnx", "README.md", "config.json",
            "source.json", "versions.json", "results.jsonl"} \
            <= set(files)  # fmt: skip
    assert "state.safetensors" not in files
    for name in ("model.safetensors", "model.json"):
        assert files[name] == (run / name).read_bytes()


def test_no_path_of_the_machine_is_pushed(pushed: Hub, run: Path) -> None:
    stored = read_json(run / "config.json")["dataset"]
    assert stored == str(run.parent / "scans")
    for name, content in pushed.files("me/scans").items():
        for private in (run.parent.name, str(Path.home()) + "/", os.getcwd() + "/"):
            assert private.encode() not in content, name
    config = json.loads(pushed.files("me/scans")["config.json"])
    assert config["dataset"] == "scans"


def test_a_file_that_holds_a_private_path_stops_the_push(
    pushed: Hub, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, pushed, tmp_path)
    package.load(run).save(tmp_path / "copy")
    write_json(tmp_path / "copy" / "versions.json", {"torch": f"from {run.parent}/scans"})
    before = len(pushed.asked)
    with pytest.raises(UserError, match=r"holds the path .*private-name.*Nothing was pushed"):
        package.load(tmp_path / "copy").push_to_hub("me/scans", onnx=False)
    assert pushed.asked[before:] == []


def test_the_metadata_of_the_card_is_what_the_hub_reads(pushed: Hub, run: Path) -> None:
    card = ModelCard(pushed.files("me/scans")["README.md"].decode())
    assert card.data.license == "cc-by-4.0"
    assert (card.data.library_name, card.data.pipeline_tag) == ("solodg", "image-classification")
    by_type = {(r.dataset_config, r.metric_type): r for r in card.data.eval_results}
    (record,) = [
        r for r in map(json.loads, (run / "results.jsonl").read_text().splitlines())
        if r["role"] == "target"
    ]  # fmt: skip
    found = by_type["c", "accuracy"]
    assert found.metric_value == pytest.approx(record["metrics"]["accuracy"])
    assert found.metric_args["low"] <= found.metric_value <= found.metric_args["high"]
    assert pushed.files("me/scans")["README.md"].decode() in pushed.cards
    for text in (
        "left out (targets): c",
        "random-split",
        "hf://me/scans",
        "The weights: cc-by-4.0",
    ):
        assert text in card.text
    own = ModelCard((run / "README.md").read_text())
    assert own.data.license is None
    assert "None is stated for these weights" in own.text


def test_a_run_of_the_hub_predicts_as_the_one_that_was_pushed(
    pushed: Hub, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, solodg
) -> None:
    use(monkeypatch, pushed, tmp_path)
    wanted = package.load(run).predict(IMAGE)
    model = package.load("hf://me/scans")
    assert model.predict(IMAGE).probabilities == wanted.probabilities
    exported = package.load("hf://me/scans/model.onnx")
    np.testing.assert_allclose(
        list(exported.predict(IMAGE).probabilities.values()),
        list(wanted.probabilities.values()),
        atol=1e-5,
    )
    code, out, _ = solodg("predict", "hf://me/scans", IMAGE, "--json")
    assert (code, json.loads(out)["class"]) == (0, wanted.label)
    code, out, _ = solodg("evaluate", "hf://me/scans", "--on", run.parent / "scans", "--json")
    assert code == 0
    scored = {json.loads(line)["domain"] for line in out.splitlines()}
    assert scored == {"a", "b", "c"}
    cached = [p.read_bytes() for p in tmp_path.glob("models--me--scans/snapshots/*/results.jsonl")]
    assert cached == [pushed.files("me/scans")["results.jsonl"]]  # records go to a copy


def test_a_revision_is_read_by_its_name(
    pushed: Hub, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, pushed, tmp_path)
    package.load(run).push_to_hub("me/scans@v1", onnx=False)
    assert local_run("hf://me/scans@v1").name == pushed.branches["me/scans", "v1"]
    assert local_run("hf://me/scans").name == pushed.branches["me/scans", "main"]
    with pytest.raises(UserError, match="no revision 'v2'"):
        local_run("hf://me/scans@v2")


def test_a_private_or_missing_repository_says_what_to_do(
    pushed: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, pushed, tmp_path, token=None)
    with pytest.raises(UserError, match=r"no repository 'me/scans' .* or it is private .*HF_TOKEN"):
        package.load("hf://me/scans")
    use(monkeypatch, pushed, tmp_path)
    with pytest.raises(UserError, match="no repository 'me/none'"):
        package.load("hf://me/none")
    pushed.visibility["me/other"] = "public"
    pushed.commit("me/other", "main", {"config.json": b"{}", "evil.py": b"1/0", "model.pkl": b""})
    with pytest.raises(UserError, match="holds no run of solodg"):
        package.load("hf://me/other")
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".py", ".pkl")]


def test_a_push_without_permission_is_refused_in_words(
    pushed: Hub, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, pushed, tmp_path, token="hf_somebody")
    with pytest.raises(UserError, match="HF_TOKEN"):
        package.load(run).push_to_hub("me/fresh", onnx=False)


def test_a_cache_of_the_hub_serves_offline(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache laid out by hand: blobs, links to them in a snapshot, and a reference."""
    sha = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--me--scans"
    snapshot = repo / "snapshots" / sha
    for folder in (repo / "blobs", repo / "refs", snapshot):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(sha)
    for number, name in enumerate(("model.json", "model.safetensors", "config.json")):
        (repo / "blobs" / str(number)).write_bytes((run / name).read_bytes())
        (snapshot / name).symlink_to(Path("../../blobs") / str(number))
    use(monkeypatch, None, tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = package.load("hf://me/scans").predict(IMAGE)
    assert found.probabilities == package.load(run).predict(IMAGE).probabilities
    with pytest.raises(UserError, match=r"not in the cache of the Hub.*HF_HUB_OFFLINE is set"):
        package.load("hf://me/other")
    with pytest.raises(UserError, match="me/scans"):
        package.load(run).push_to_hub("me/scans", onnx=False)


def test_damage_in_the_cache_is_found(
    pushed: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, pushed, tmp_path)
    weights = (local_run("hf://me/scans") / "model.safetensors").resolve()
    content = bytearray(weights.read_bytes())
    content[-9] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        package.load("hf://me/scans")


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install 'solodg\[hub\]'"):
        package.load("hf://me/scans")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf://me/scans", HubName("me/scans")),
        ("me/scans@v1", HubName("me/scans", "v1")),
        (Path("hf://me/scans@v1/model.onnx"), HubName("me/scans", "v1", "model.onnx")),
    ],
)
def test_names_of_the_hub_are_read(text: str | Path, name: HubName) -> None:
    assert parse_hub_name(text) == name
    assert parse_hub_name(str(name)) == name


@pytest.mark.parametrize("text", ["hf://me", "hf://me/../x", "hf://a/b/c/d", "hf://me/x/y.pkl", ""])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="expected hf://OWNER/NAME"):
        parse_hub_name(text)
