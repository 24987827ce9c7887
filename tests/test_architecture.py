"""The house: imports point one way, and entry points stay light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "solodg"

# Lower rooms never import from higher ones; rooms of one floor may know each other.
FLOORS = [
    {
        "allocator",
        "errors",
        "extras",
        "pixels",
        "model_info",
        "prediction",
        "onnx_model",
        "seeding",
        "torchvision_guard",
        "gaussian",
        "image_norm",
        "networks",
        "types",
        "progress",
        "storage",
    },
    {"backbones", "data"},
    {"algorithms"},
    {"adapters"},
    {"training", "checkpoint", "evaluation", "target_images"},
    {
        "config",
        "features",
        "assembly",
        "runfolder",
        "tensorboard",
        "stream",
        "run",
        "score",
        "scored_data",
    },
    {
        "predictor",
        "onnx_export",
        "serving",
        "plan",
        "results",
        "tables",
        "plan_table",
        "plots",
        "benchmark",
        "ray_cluster",
        "estimate",
        "verify",
        "study",
        "study_table",
        "plane",
        "explain",
        "explain_figure",
        "explain_panels",
        "labels",
        "themed",
        "judged",
        "report",
        "report_charts",
        "report_page",
        "plan_page",
        "estimator",
        "stream_figure",
        "demo",
        "cli",
        "__init__",
        "__main__",
    },
]
FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}
# Data and algorithms meet only where a run is put together.
STRANGERS = [("data", "algorithms"), ("data", "backbones"), ("algorithms", "data"),
             ("backbones", "data"), ("training", "data"), ("adapters", "data")]  # fmt: skip


def room(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("solodg"):
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("solodg.")}
    return found


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE))
)
def test_imports_point_one_way(path: Path) -> None:
    own = room(path)
    assert own in FLOOR_OF, f"{own} has no floor: give it one in this test"
    for other in imports(path):
        assert FLOOR_OF[other] <= FLOOR_OF[own], f"{own} imports {other} from above"
        assert (own, other) not in STRANGERS, f"{own} must not know {other}"


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE))
)
def test_every_module_says_what_it_is_and_none_prints(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    calls = [
        n.func.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    ]
    assert "print" not in calls


@pytest.mark.parametrize("statement", ["import solodg", "import solodg.cli"])
def test_importing_the_package_does_not_import_torch(statement: str) -> None:
    code = f"import sys; {statement}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_training_and_test_time_methods_have_an_optimiser() -> None:
    users = {room(p) for p in SOURCE.rglob("*.py") if re.search(r"\boptim\b", p.read_text())}
    assert users == {"training", "adapters"}
