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

LOADED = """
import sys
sys.modules["torch"] = None
from importlib.metadata import packages_distributions
import solodg.cli, solodg.serving.server, solodg.model
solodg.model.load(sys.argv[1])
tops = {name.split(".")[0] for name, module in sys.modules.items() if module is not None}
known = packages_distributions()
print(sorted({known[top][0].lower().replace("_", "-") for top in tops if top in known}))
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


def test_the_serving_image_installs_what_serving_imports(digits_onnx: Path) -> None:
    lines = (ROOT / "serve-requirements.txt").read_text().splitlines()
    listed = {Requirement(line).name for line in lines if not line.startswith("#")}
    command = [sys.executable, "-c", LOADED, digits_onnx]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = set(re.findall(r"'([^']+)'", done.stdout)) - {"solodg"}
    assert {"fastapi", "onnxruntime", "numpy"} <= loaded  # so that it could fail
    assert loaded <= needed(listed)
    assert "torch" not in needed(listed)


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
