"""The images' files: linted, complete for serving without torch, and metrics that exist."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from packaging.requirements import Requirement

import solodg
from serving_process import listening

ROOT = Path(__file__).parents[1]
YAML = sorted(
    {ROOT / "compose.yaml", *ROOT.glob("deploy/**/*.yml"), *ROOT.glob(".github/**/*.yml"),
     *ROOT.glob(".pre-commit-config.yaml"), *ROOT.glob("CITATION.cff")}
)  # fmt: skip

# Loads an exported file and the server where only the given distributions can be imported.
SERVE_WITH = """
import sys
from importlib.metadata import packages_distributions

allowed = set(sys.argv[2].split(","))
def canonical(name): return name.lower().replace("_", "-")
refused = {top for top, names in packages_distributions().items()
           if not allowed & {canonical(name) for name in names}}

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refusal())
import solodg.cli, solodg.model
import solodg.serving.server
from solodg.serving.app import build_app
from solodg.serving.settings import ServerSettings
model = solodg.model.load(sys.argv[1])
build_app(model, "m", ServerSettings())
print(model.predict(sys.argv[3]).label)
"""


@pytest.mark.parametrize("path", YAML, ids=lambda p: p.name)
def test_yaml_files_can_be_read(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict | list)


@pytest.mark.skipif(shutil.which("hadolint", path=Path(sys.executable).parent) is None,
                    reason="hadolint has no wheel for this machine")  # fmt: skip
def test_the_dockerfiles_pass_their_linter() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    files = [ROOT / "Dockerfile", ROOT / "Dockerfile.train"]
    done = subprocess.run([hadolint, *files], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def needed(names: set[str]) -> set[str]:
    """The distributions with all that they require."""
    from importlib.metadata import PackageNotFoundError, requires

    found: set[str] = set()
    left = set(names)
    while left:
        name = left.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        try:
            requirements = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:
            continue
        left |= {r.name for r in requirements if not r.marker or r.marker.evaluate({"extra": ""})}
    return found


def listed() -> set[str]:
    lines = (ROOT / "serve-requirements.txt").read_text().splitlines()
    return {Requirement(line).name for line in lines if not line.startswith("#")}


@pytest.mark.parametrize("missing", ["", "onnxruntime", "python-multipart"])
def test_the_serving_image_installs_what_serving_imports(digits_onnx: Path, missing: str) -> None:
    allowed = needed(listed() - {missing})
    assert "torch" not in allowed
    image = ROOT / "docs" / "disc.png"
    words = [SERVE_WITH, digits_onnx, ",".join({*allowed, "solodg"}), image]
    done = subprocess.run([sys.executable, "-c", *words], capture_output=True, text=True)
    assert (done.returncode != 0) == bool(missing), done.stderr


def test_the_dashboard_and_prometheus_ask_for_metrics_that_the_server_has(
    digits_onnx: Path,
) -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "solodg.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["scrape_configs"][0]
    with listening(solodg.load(digits_onnx)) as url:
        image = (ROOT / "docs" / "disc.png").read_bytes()
        httpx.post(f"{url}/predict", content=image, headers={"Content-Type": "image/png"})
        shown = httpx.get(url + scraped["metrics_path"]).text
    exported = set(re.findall(r"^([a-z_]+)(?:\{| )", shown, re.MULTILINE))
    for query in queries:
        names = set(re.findall(r"\b(?:solodg|process)_[a-z_]+", query))
        assert names, query
        assert names <= exported, query
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    host, port = scraped["static_configs"][0]["targets"][0].split(":")
    assert host in compose
    assert f'"--port", "{port}"' in (ROOT / "Dockerfile").read_text()
    for service in compose.values():
        for volume in service["volumes"]:
            source = volume if isinstance(volume, str) else ""
            if source.startswith("./deploy"):
                assert (ROOT / source.split(":")[0]).is_file()
