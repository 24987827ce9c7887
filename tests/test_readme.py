"""What the README and the docs promise is run, or at least exists."""

import contextlib
import importlib
import io
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml
from scipy import stats
from typer.testing import CliRunner

from conftest import write_images
from serving_process import served
from solodg.adapters import ADAPTERS
from solodg.algorithms import ALGORITHMS
from solodg.bench.comparison import comparison_table
from solodg.bench.plan import read_plans
from solodg.bench.records import read_results
from solodg.cli import app
from solodg.cli.cells import Where
from solodg.data import DATASETS
from solodg.serving.settings import ServerSettings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text: str = README) -> list[list[str]]:
    lines = [line for block in blocks("bash", text) for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines]


def section(text: str, heading: str) -> str:
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def solodg(*arguments: str) -> str:
    """Runs a command in this process, which has imported torch already, and returns its output."""
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, (arguments, done.output)
    return done.output


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the docs and plans alone."""
    for name in ("docs", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_of_the_readme_run_in_order(workplace: Path) -> None:
    *local, serve, curl = [c for c in commands() if c[0] in ("solodg", "curl")]
    assert [c[1] for c in local] == [
        "train", "train", "evaluate", "evaluate", "predict", "export"
    ]  # fmt: skip
    for command in local:
        output = solodg(*command[1:])
        assert command[1] != "predict" or "disc" in output
    assert (serve[:2], curl[0]) == (["solodg", "serve"], "curl")
    field, path = curl[curl.index("--form") + 1].split("=@")
    with served(Path(serve[2])) as server:  # at a free port, in place of the README's
        address = re.sub(r"^http://127\.0\.0\.1:\d+", server.url.rstrip("/"), curl[-1])
        answer = httpx.post(address, files={field: Path(path).read_bytes()})
    assert answer.status_code == 200
    assert "disc" in answer.text


def test_the_python_of_the_readme_runs(workplace: Path) -> None:
    images, features = blocks("python")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(images, "README", "exec"), {})
        exec(compile(features, "README", "exec"), {})
    first, second = output.getvalue().splitlines()
    assert first.startswith("disc")
    assert f"# {second}" in features


def test_the_examples_of_the_python_page_run_in_order(workplace: Path) -> None:
    hospitals, classes = ("hospital_a", "hospital_b", "hospital_c"), ("benign", "malignant")
    write_images(workplace / "scans", {(h, c): 6 for h in hospitals for c in classes}, 32)
    write_images(workplace, {("new_site", c): 4 for c in classes}, 32)
    names: dict = {}
    output = io.StringIO()
    examples = blocks("python", (DOCS / "python.md").read_text())
    with contextlib.redirect_stdout(output):
        for example in examples:
            exec(compile(example, "python.md", "exec"), names)
    first, predicted, scored, exported = output.getvalue().splitlines()
    assert first == "['benign', 'malignant'] runs/scans"
    assert predicted.split()[0] == exported
    assert re.fullmatch(r"[01]\.\d\d, between [01]\.\d\d and [01]\.\d\d", scored)
    assert names["frame_model"].predict("new_site/benign/0.png").label == exported
    assert len(names["scores"]["test_score"]) == 4


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_of_the_docs_exists_with_its_options(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands(page.read_text()):
        if command[0] == "make":
            assert command[1] in targets
        elif command[0] == "solodg":
            help_text = solodg(command[1], "--help")
            for flag in (word for word in command if word.startswith("--")):
                assert re.search(rf"{flag}\b", help_text), command
        else:
            assert command[0] in ("pip", "curl", "python")
    for plan in re.findall(r"configs/[a-z_/]+\.yaml", page.read_text()):
        assert (ROOT / plan).is_file()


def test_the_scripts_and_the_manifest_of_the_cluster_page_hold_together(tmp_path: Path) -> None:
    page = (DOCS / "howto" / "cluster.md").read_text()
    scripts = blocks("sh", page)
    assert len(scripts) == 3
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        (line,) = re.findall(r"^.*solodg (?:bench|train) .*$", script, re.MULTILINE)
        name, *words = line.partition("solodg ")[2].split()
        for flag in (word for word in words if word.startswith("--")):
            assert re.search(rf"{flag}\b", solodg(name, "--help")), flag
    (manifest,) = blocks("yaml", page)
    job = yaml.safe_load(manifest)
    assert job["kind"] == "RayJob"
    asked = shlex.split(job["spec"]["entrypoint"])
    where = Where.checked(
        {flag[2:].replace("-", "_"): value for flag, value in itertools.pairwise(asked)}
    )
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    has = container["resources"]["limits"]
    assert where.ray_gpus_per_cell == has["nvidia.com/gpu"]
    assert where.ray_memory_gb_per_cell < int(has["memory"].removesuffix("Gi"))
    paths = [word for word in asked if word.startswith("/")]
    assert all(word.startswith(container["volumeMounts"][0]["mountPath"]) for word in paths)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_options_and_limits_of_the_use_page_are_those_of_the_server() -> None:
    text = (DOCS / "use.md").read_text()
    named = set(re.findall(r"^\| `(--[a-z-]+)", text, re.MULTILINE))
    assert len(named) >= 8
    help_text = solodg("serve", "--help")
    assert all(flag in help_text for flag in named)
    settings = ServerSettings()
    assert f"| {settings.max_bytes // 1024**2} megabytes" in text
    assert f"| {settings.max_images} a request" in text
    assert f"| {settings.max_pixels // 10**6} million" in text
    assert f"| {settings.queue} images" in text
    assert f"| {settings.seconds:g} seconds" in text
    assert f"| {settings.max_batch} images" in text


@pytest.mark.parametrize(
    ("page", "heading", "names"),
    [
        ("algorithms.md", "Algorithms", ALGORITHMS),
        ("algorithms.md", "Adapters", ADAPTERS),
        ("datasets.md", None, DATASETS),
        ("plans.md", "Plans for the paper's tables",
         [path.stem for path in (ROOT / "configs").glob("*.yaml")]),
    ],
)  # fmt: skip
def test_every_entry_has_a_row_in_the_docs(
    page: str, heading: str | None, names: Iterable[str]
) -> None:
    text = (DOCS / page).read_text()
    rows = re.findall(r"^\| `([^`]+)` \|", section(text, heading) if heading else text, re.M)
    assert set(names) <= set(rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_linked_files_exist(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_modules_named_in_contributing_exist() -> None:
    text = section((ROOT / "CONTRIBUTING.md").read_text(), "How one image travels")
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", text)
    assert len(named) > 10
    for name in named:
        path = ROOT / "src" / "solodg" / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), name


def test_code_named_in_the_method_page_exists() -> None:
    text = (DOCS / "method.md").read_text()
    modules = {
        "mean_hidden": "solodg.algorithms.solo.mean_hidden",
        "meta_shifts": "solodg.algorithms.solo.meta_shifts",
        "posterior_terms": "solodg.algorithms.solo.posterior_terms",
        "solo": "solodg.algorithms.solo",
        "solo_code": "solodg.algorithms.solo_code",
        "film": "solodg.algorithms.solo_code.film",
        "pose": "solodg.algorithms.solo_code.pose",
        "style_code": "solodg.algorithms.solo_code.style_code",
        "image_norm": "solodg.models.image_norm",
        "gaussian": "solodg.algorithms.solo.gaussian",
        "episodes": "solodg.data.episodes",
        "centres": "solodg.algorithms.centres",
    }
    named = re.findall(rf"`({'|'.join(modules)})\.(\w+)(?:\.(\w+))?`", text)
    named += [("solo", "Solo", method) for method in re.findall(r"`Solo\.(_\w+)`", text)]
    assert {module for module, _, _ in named} == set(modules)
    for module, name, attribute in named:
        thing = getattr(importlib.import_module(modules[module]), name)
        assert not attribute or hasattr(thing, attribute), (module, name, attribute)


def test_the_ci_calls_the_test_command_of_the_readme() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()
    assert ["make", "test"] in commands()


def records(name: str) -> list[dict]:
    lines = (DOCS / "results" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def with_interval(per_seed: Iterable[float]) -> str:
    """Fractions of several seeds -> percent: mean ± half of the 95% interval (Student t)."""
    values = 100 * np.array(list(per_seed))
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():.1f} ± {half:.1f}"


def accuracy(found: list[dict], role: str = "target", domains: Iterable[str] = ()) -> str:
    """The mean over domains of each seed, over seeds."""
    chosen = [r for r in found if r["role"] == role and (not domains or r["domain"] in domains)]
    seeds = sorted({r["seed"] for r in chosen})
    return with_interval(
        np.mean([r["metrics"]["accuracy"] for r in chosen if r["seed"] == seed]) for seed in seeds
    )


FAMILIES = {
    "rotation": "rotation",
    "size": "size and position",
    "colour": "colour, contrast, inversion",
    "quality": "blur, noise, compression",
    "background": "background",
    "resolution": "resolution",
    "none": "nothing",
}


def test_the_results_of_the_readme_are_those_of_committed_records() -> None:
    """Means over targets within a seed, then over seeds, of each family of shifts and of all."""
    found = [r for r in records("lab_shifts") if r["role"] == "target"]
    for family, title in (FAMILIES | {"": "all"}).items():
        own = [r for r in found if r["dataset"].endswith(f"-{family}") or not family]
        targets = {(r["dataset"], r["domain"]) for r in own}
        cells = [accuracy([r for r in own if r["algorithm"] == a]) for a in ("erm", "solo_plus")]
        assert f"| {title} | {len(targets)} | {' | '.join(cells)} |" in README


def test_the_tables_of_the_adaptation_page_are_those_of_committed_records() -> None:
    page = (DOCS / "adaptation.md").read_text()
    for path in (DOCS / "results" / f"lab_{name}.jsonl" for name in ("shifts", "written")):
        plans = read_plans(ROOT / "configs" / "lab" / f"{path.stem.removeprefix('lab_')}.yaml")
        results = read_results(path)
        title = plans[0].title.rpartition(": ")[0]
        assert comparison_table(title, plans, results).markdown() in page
        assert all(cell.key in results.done for plan in plans for cell in plan.cells())


def test_the_table_of_donors_is_that_of_committed_studies() -> None:
    page = (DOCS / "adaptation.md").read_text()
    runs = records("lab_written_study")
    donors = ("own", "same domain", "other domain", "mean", "prior")
    rows = [(r["dataset"], *target) for r in runs for target in r["style"].items()]
    for dataset, target, found in rows:
        cells = [f"{100 * found[donor]:.1f}" for donor in donors]
        assert f"| {dataset} | {target} | {' | '.join(cells)} |" in page
    means = [f"{100 * np.mean([found[donor] for *_, found in rows]):.1f}" for donor in donors]
    assert f"| mean | {len(rows)} targets | {' | '.join(means)} |" in page


def test_the_commands_of_the_tutorial_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, with two steps of training."""
    text = (DOCS / "tutorial.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr("sys.argv", ["hospitals.py", "hospitals"])
    importlib.import_module("examples.hospitals").main()
    steps = ["--steps", "2", "--batch-size", "4", "--context-images", "1"]
    run = [words for words in commands(text) if words[0] == "solodg"]
    assert len(run) == 8
    for _, command, *words in run:
        given = [*words[: words.index("--steps")], *steps, *words[words.index("--steps") + 2 :]] \
            if "--steps" in words else words  # fmt: skip
        output = solodg(command, *given)
        assert not re.search(r"[Tt]raceback", output)
    exec(blocks("python", text)[0], {})  # what the page shows
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 222


def demo_rows(file: str = "demo", default: str = "`solo_plus`") -> list[str]:
    rows = []
    for algorithm, name in (("erm", "ERM"), ("solo", "`solo`"), ("solo_plus", default)):
        own = [r for r in records(file) if r["algorithm"] == algorithm]
        cells = [accuracy(own, domains=d) for d in (["0"], ["90"], ["0", "90"])]
        cells.append(accuracy(own, "in-distribution"))
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def study_cells(dataset: str) -> set[str]:
    """Accuracies with own and others' pose, statistics and style, of all runs of a dataset."""
    runs = [r for r in records("study") if r["dataset"] == dataset]
    return {
        with_interval(np.mean([d[donor] for d in run[part].values()]) for run in runs)
        for part in ("frame", "statistics", "style")
        for donor in runs[0][part]["0"]
    }


def test_the_findings_of_the_results_page_are_those_of_committed_records() -> None:
    """Each `mean ± interval` stands in a generated table, or is that of the demo or the study."""
    findings, tables = (DOCS / "results.md").read_text().split("<!-- tables -->")
    demos = [*demo_rows(), *demo_rows("demo_400_steps", "`solo_code`")]
    assert all(row in findings for row in demos)
    demos += demo_rows("demo_solo_code")
    figure = r"\d+\.\d+ ± \d+\.\d+"
    known = set(re.findall(figure, tables)) | set(re.findall(figure, "".join(demos)))
    known |= study_cells("rotated-mnist") | study_cells("rotated-fashion-mnist")
    assert len(re.findall(figure, findings)) > 40
    assert set(re.findall(figure, findings)) <= known
