"""A trained model as a folder of static files: a page that classifies images in the browser.

ONNX Runtime Web, a package of npm, computes in WebAssembly what ONNX Runtime computes elsewhere.
Its files are copied into the folder, so that the page loads nothing from any other place.
"""

import json
import os
import shutil
import tempfile
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from solodg.errors import UserError
from solodg.predict.onnx import OnnxPredictor

PACKAGE = "onnxruntime-web"
# Of the package's folder `dist`; the page has them as `ort.js` and `ort.wasm`, which every web
# server sends with a type that browsers accept.
_RUNTIME = {"ort.wasm.bundle.min.mjs": "ort.js", "ort-wasm-simd-threaded.wasm": "ort.wasm"}
_PAGE = {
    "solodg.predict": ("index.html", "page.js", "pixels.js", "png16.js", "resize.js"),
    "solodg.figures": ("page.css", "results.js"),
}


def find_runtime(folder: Path | None) -> Path:
    """Returns the folder of the npm package onnxruntime-web: the given one, or the installed one.

    Without `folder` it is looked for as npm does: in `node_modules` here and in the folders above.
    """
    if folder is None:
        here = Path.cwd()
        tried = [parent / "node_modules" / PACKAGE for parent in (here, *here.parents)]
    else:
        tried = [folder]
    for package in tried:
        if all((package / "dist" / name).is_file() for name in _RUNTIME):
            return package
    where = f"{folder} does not hold it" if folder else f"no node_modules/{PACKAGE} here or above"
    raise UserError(
        f"ONNX Runtime Web is not installed: {where}. Try: npm install {PACKAGE}, here, or name "
        "the folder of the package by --onnxruntime-web DIR."
    )


def check_folder(folder: Path) -> None:
    """Raises `UserError` unless the folder of a page is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already: write the page to a new folder.")


def write_web_page(onnx: Path, name: str, folder: Path, runtime: Path | None = None) -> int:
    """Writes the page of an exported file to a new folder; returns the bytes of its files.

    `name` is what the page calls the model; `runtime` is the folder of the package onnxruntime-web.
    """
    package = find_runtime(runtime)
    check_folder(folder)
    info = OnnxPredictor.load(onnx).info
    described = {"name": name, "model": info.model_dump(mode="json"), "solodg": version("solodg")}
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside it and then renamed: a page that was interrupted is never taken for a whole one.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        page = Path(scratch) / "page"
        (page / "onnxruntime").mkdir(parents=True)
        for source, names in _PAGE.items():
            for file in names:
                (page / file).write_bytes(files(source).joinpath("static", file).read_bytes())
        for file, short in _RUNTIME.items():
            shutil.copyfile(package / "dist" / file, page / "onnxruntime" / short)
        shutil.copyfile(package / "package.json", page / "onnxruntime" / "package.json")
        shutil.copyfile(onnx, page / "model.onnx")
        (page / "model.json").write_text(json.dumps(described))
        size = sum(path.stat().st_size for path in page.rglob("*") if path.is_file())
        os.replace(page, folder)
    return size
