"""The architecture: imports point one way between packages, and between the modules of each."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "solodg"

# A module may import from the rows above its own and from no other: rows above it here, for another
# package; rows above it in `MODULES`, for its own. Members of one row do not know each other.
PACKAGES = """
errors inference progress seeding torchvision_shim types
pixels readings storage
models data figures
algorithms
adapters
runs
predict sklearn
bench explain hub
report serving
model
training
__init__ demo
cli
__main__
"""
MODULES = {
    "pixels": """
        dicom
        __init__
    """,
    "storage": """
        checksum files
        json_files
        json_lines tensors
        __init__
    """,
    "models": """
        allocator extractor map_gradients pose same_padding stages views weights
        image_norm published_networks
        networks passes
        backbones
        cut
        map_backbone
        __init__
    """,
    "data": """
        decode fetch idx splits transforms
        images listing
        labelled_images resampling
        domains
        episodes loading pseudo_domains rotation shifts summary
        columns folder recipes rotated stored_images toy
        image_table lab office_home pacs svhn_mnist
        arrow_file held_rows manifest
        in_memory
        site
        __init__
    """,
    "figures": """
        __init__ style
        html plots
    """,
    "algorithms": """
        early_exit fast_weights ranges ridge_sums
        base centres solo.gaussian solo.mean_hidden
        solo.meta_shifts solo.writer
        solo.networks solo.posterior_terms
        solo.prediction solo.training
        solo.method
        solo.__init__
        solo_code.film solo_code.pose solo_code.style_code
        solo_code.method
        solo_code.__init__
        domain_losses erm
        ridge
        coral csd da_erm dson entropy_regularisation fishr group_dro jigen l2a_ot masf miro mixstyle
        mldg rsc ttt vrex
        solo_plus
        __init__
    """,
    "adapters": """
        base
        bn crops lame none shot t3a
        memo tent ttt
        __init__
    """,
    "runs": """
        __init__ cache_folder option row_files
        machine
        averaged_runs config model_info origin predictions recorded_scores statistics
        stored_arguments
        defaults dense_average devices loggers named_settings novelty presets
        metrics metrics_log
        class_metrics coverage temperature
        bootstrap
        scores
        tables
        training_state
        fit feature_cache
        map_cache
        target_images stream
        folder opened_data build checkpoint settings_text
        site_estimate
        card_metadata
        calibration clock domain_rotations fitting_runs scored_data validation
        open_parts operating_point site_data workplace
        begin evidence selection
        closed_form model_card turn_choices
        pose_training
        folds
        average train evaluate
        estimate
    """,
    "predict": """
        __init__ base convolution_pads external_data
        csv_rows graph_parts image_norm_graph onnx torch
        early_exit_graph
        export exported_site web_page
    """,
    "bench": """
        __init__ cell records row verify yaml_file
        plan
        duration table verdict
        comparison runner search
        ray page stream_curves
    """,
    "explain": """
        __init__ label_placement projection studied_run
        explanation study_table swap_poses
        panels
        figure
        drawer swap_study
    """,
    "hub": """
        __init__ names
        files
        download
        push
    """,
    "report": """
        __init__ predictions
        charts facts galleries score_tables
        run_page
    """,
    "serving": """
        __init__ request_error
        settings decode_budget docs_page draining loopback_guard metrics
        admission batching uploads
        schemas
        service
        app
        server
    """,
    "cli": """
        commands config_options console devices options write_errors
        cells data_table score_output
        average cache train predict datasets demo bench export push report serve study
        evaluate explain tune
        __init__
    """,
}
# Data and algorithms meet only where a run is put together.
STRANGERS = [("algorithms", "data"), ("adapters", "data"), ("runs.fit", "data")]


def row_of(table: str) -> dict[str, int]:
    rows = table.strip().splitlines()
    return {name: number for number, row in enumerate(rows) for name in row.split()}


def split(name: str) -> tuple[str, str]:
    """`runs.fit` -> ("runs", "fit"); `runs` -> ("runs", "__init__"); `types` -> ("types", "")."""
    first, _, rest = name.partition(".")
    if first not in MODULES:
        return first, ""
    if (SOURCE / first / rest.replace(".", "/")).is_dir():
        rest = f"{rest}.__init__".lstrip(".")
    return first, rest


def complaint(importer: str, imported: str) -> str | None:
    """Why one module must not import another; None where it may."""
    own, other = split(importer), split(imported)
    if own[0] == other[0]:
        rows, names = row_of(MODULES[own[0]]), (own[1], other[1])
    else:
        rows, names = row_of(PACKAGES), (own[0], other[0])
    missing = [name for name in names if name not in rows]
    if missing:
        return f"{missing[0]} has no row: give it one in this test"
    if rows[names[1]] >= rows[names[0]]:
        return f"{importer} imports {imported}, which is not in a row above its own"
    for stranger, forbidden in STRANGERS:
        if (importer + ".").startswith(stranger + ".") and other[0] == forbidden:
            return f"{importer} must not know {imported}"
    return None


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


KNOWN = {module_name(path) for path in SOURCE.rglob("*.py")}


def imports(text: str) -> set[str]:
    """The modules of this project that a source text imports, at its top or later."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "solodg":
            module = (node.module or "").removeprefix("solodg").lstrip(".")
            for alias in node.names:
                inner = f"{module}.{alias.name}".lstrip(".")
                found.add(inner if inner in KNOWN else module or "__init__")
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.split(".")[0] == "solodg"]
            found |= {name.removeprefix("solodg").lstrip(".") or "__init__" for name in names}
    return found


FILES = pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE))
)


@FILES
def test_imports_point_one_way(path: Path) -> None:
    name = module_name(path)
    found = [complaint(name, other) for other in sorted(imports(path.read_text()) - {name})]
    assert [text for text in found if text] == []


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("data.folder", "algorithms.erm"),  # a package above its own
        ("algorithms.erm", "data.folder"),  # a package below its own that it must not know
        ("bench.table", "explain.figure"),  # a package beside its own
        ("runs.build", "runs.train"),  # a module above its own
        ("algorithms.coral", "algorithms.rsc"),  # a module beside its own
        ("algorithms.erm", "algorithms"),  # the registry, from one of its entries
        ("runs.fit", "data.domains"),
        ("runs.build", "runs.no_such_module"),
        ("storage", "runs.folder"),
    ],
)
def test_a_wrong_import_is_found(importer: str, imported: str) -> None:
    assert complaint(importer, imported) is not None


def test_a_right_import_is_none() -> None:
    assert complaint("runs.train", "runs.build") is None
    assert complaint("cli.train", "runs.train") is None


def test_imports_in_every_form_are_seen() -> None:
    text = "def f():\n    from solodg.runs import train\nimport solodg.cli.bench\nimport torch\n"
    assert imports(text) == {"runs.train", "cli.bench"}


def test_the_top_of_the_package_is_small() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= 13


@FILES
def test_every_module_says_what_it_is_and_none_prints(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    calls = [
        n.func.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    ]
    assert "print" not in calls


@pytest.mark.parametrize(
    "statement", ["import solodg", "import solodg.cli", "import solodg.predict.onnx"]
)
def test_importing_the_package_does_not_import_torch(statement: str) -> None:
    code = f"import sys; {statement}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# `torch.optim`, or the calls of a training loop: a gradient, and the step of an optimiser.
OPTIMISING = re.compile(r"\boptim\b|\.backward\(|\.step\(\)")


def test_only_training_and_test_time_methods_have_an_optimiser() -> None:
    users = {module_name(p) for p in SOURCE.rglob("*.py") if OPTIMISING.search(p.read_text())}
    assert {name for name in users if not name.startswith("adapters.")} == {"runs.fit"}


@pytest.mark.parametrize(
    "line", ["torch.optim.Adam(p)", "loss.backward()", "fabric.backward(loss)", "optimizer.step()"]
)
def test_a_training_loop_is_found(line: str) -> None:
    assert OPTIMISING.search(line)


def undocumented(text: str) -> list[str]:
    """The public classes, functions and methods of a source text that have no docstring."""
    found = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            overload = any(
                isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list
            )
            if node.name.startswith("_") or overload:
                continue
            if not ast.get_docstring(node):
                found.append(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(text).body, "")
    return found


@FILES
def test_every_public_definition_has_a_docstring_and_files_stay_short(path: Path) -> None:
    text = path.read_text()
    assert undocumented(text) == []
    assert len(text.splitlines()) <= 300


def test_a_definition_without_docstring_is_found() -> None:
    text = 'class A:\n    """Is one."""\n    def f(self): ...\n    def _g(self): ...\n'
    assert undocumented(text) == ["A.f"]
