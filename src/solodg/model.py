"""Models in Python: `solodg.load`, and what it and `solodg.train` return, `Model`.

This module does not import torch: a model that was exported to a file does without it.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from solodg.errors import UserError, missing_extra
from solodg.hub.download import local_run
from solodg.pixels import ImageLike, Pixels
from solodg.predict.base import ImagePredictor
from solodg.predict.onnx import OnnxPredictor, is_onnx
from solodg.progress import stderr_output
from solodg.runs.predictions import Predictions

if TYPE_CHECKING:
    import torch

    from solodg.algorithms import Algorithm
    from solodg.predict.torch import Predictor
    from solodg.runs.recorded_scores import RecordedScores
    from solodg.runs.scores import Scores
    from solodg.serving.settings import ServerSettings


def load(path: str | Path) -> "Model":
    """Loads the model of a run folder or of an exported file: `solodg.load(run).predict(image)`.

    `hf://owner/name` is a run on the Hugging Face Hub, `hf://owner/name@v1` one of its revisions.
    The model is on the CPU until it is moved. An exported file does not need torch.
    """
    path = local_run(path)
    if is_onnx(path):
        return Model(OnnxPredictor.load(path), Path(path))
    from solodg.predict.torch import Predictor

    return Model(Predictor.load(path), Path(path))


class Model(ImagePredictor):
    """A trained model, of a run folder or of an exported file. Threads may share it.

    `solodg.train` and `solodg.load` return it. `predictor` computes its predictions, by PyTorch or
    by ONNX Runtime.
    """

    def __init__(self, predictor: "Predictor | OnnxPredictor", path: Path) -> None:
        super().__init__(predictor.info)
        self.predictor, self.runtime = predictor, predictor.runtime
        self._path = path

    def __repr__(self) -> str:
        method = f"{self.info.algorithm}, {self.info.backbone}, {len(self.classes)} classes"
        return f"Model({method}, {str(self._path)!r})"

    @property
    def folder(self) -> Path | None:
        """The folder of the run; None for an exported file."""
        return None if isinstance(self.predictor, OnnxPredictor) else self._path

    @property
    def algorithm(self) -> "Algorithm":
        """The trained method, a module of torch; an exported file has none."""
        if isinstance(self.predictor, OnnxPredictor):
            raise UserError("an exported file has no module of torch: load the folder of the run.")
        return self.predictor.algorithm

    def compute(self, pixels: Pixels) -> Predictions:
        """Runs (B, channels, H, W) pixels through the model, in one forward pass."""
        return self.predictor.compute(pixels)

    def adapted_classifier(self, image: ImageLike) -> NDArray[np.float32]:
        """Returns the weights of the classifier written for this image, (classes, embedding).

        Only solo and solo_code write a classifier for each image; an exported file returns none.
        """
        return self.predictor.adapted_classifier(image)

    def recorded_scores(self) -> "list[RecordedScores]":
        """Returns the recorded scores, the latest of each domain; a file holds those of before."""
        return self.predictor.recorded_scores()

    def to(self, device: "torch.device | str", precision: str | None = None) -> "Model":
        """Moves the model to a device and returns it; an exported file stays on the CPU.

        `precision` is 32-true, 16-mixed or bf16-mixed; None leaves it as it is.
        """
        self.predictor.to(device, precision)
        return self

    def evaluate(
        self,
        data: Any = None,
        *,
        name: str = "images",
        skip_bad_images: bool = False,
        verbose: bool = True,
    ) -> "dict[str, Scores]":
        """Scores the model, as `solodg evaluate` does; returns the scores of each domain by name.

        `data` has labelled images in any of the forms of `solodg.train`, or in a folder
        `class/image`; their domain may be left out. Classes may be missing, and one that the model
        does not know is an error. Without `data`, the model is scored on its target domains and on
        held-out images of its source domains. `name` is the domain of images in memory that have
        none. The scores have 95% intervals, by a bootstrap over images, or over groups where the
        data has them. They are computed at 32 bits, and nothing is written.
        """
        from solodg.runs.scores import score
        from solodg.runs.site_data import labelled_images

        progress, say = stderr_output(verbose)
        reading: dict[str, Any] = {"skip_bad_images": skip_bad_images, "progress": progress}
        on = None if data is None else labelled_images(data, self.info, name, **reading)
        if isinstance(self.predictor, OnnxPredictor):
            from solodg.predict.exported_site import score_exported

            if on is None:
                raise UserError("an exported model has no images of its own: give evaluate(data).")
            scored = score_exported(self.predictor, on, say=say, **reading)
        else:
            from solodg.runs.evaluate import score_run

            device = self.predictor.device.type
            scored = score_run(self._path, on=on, accelerator=device, say=say, **reading)
        return {
            found.record.domain: score(found.predictions, found.labels, self.classes, found.groups)
            for found in scored
        }

    def save(self, path: str | Path) -> Path:
        """Copies the run folder, or the exported file, to a path where nothing is; returns it."""
        path = Path(path)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path} exists already: save the model to another path.")
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside it and then renamed: a copy that was interrupted is never taken for a run.
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
            copy = Path(folder) / path.name
            if self.folder is None:
                shutil.copyfile(self._path, copy)
            else:
                shutil.copytree(self._path, copy)
            os.replace(copy, path)
        return path

    def push_to_hub(
        self,
        name: str,
        *,
        public: bool = False,
        licence: str | None = None,
        onnx: bool = True,
        message: str | None = None,
    ) -> str:
        """Pushes the run to the Hugging Face Hub; returns the address of the commit.

        `name` is "owner/name", optionally with @branch; a repository that does not exist yet is
        private unless `public`. It gets weights and description, records, the exported file (unless
        `onnx` is false) and the model card, which names `licence` as that of the weights. Paths of
        this machine are not pushed.
        """
        if self.folder is None:
            raise UserError(f"{self._path} is an exported file: push the run it was made from.")
        from solodg.hub.push import push_target, upload, write_files

        target = push_target(name)
        text = message or f"Run of solodg: {self.folder.resolve().name}"
        with tempfile.TemporaryDirectory(prefix="solodg-hub-") as scratch:
            write_files(self.folder, Path(scratch), target, licence=licence, onnx=onnx)
            return upload(Path(scratch), target, text, public=public)

    def export(self, path: str | Path) -> float:
        """Writes the model as one ONNX file, with its adaptation; `solodg.load(path)` loads it.

        Returns the largest difference of its results from those of PyTorch.
        """
        if isinstance(self.predictor, OnnxPredictor):
            raise UserError(f"{self._path} is exported already: copy the file.")
        from solodg.predict.export import export_onnx

        return export_onnx(self.predictor, Path(path))

    def export_web(self, folder: str | Path, onnxruntime_web: str | Path | None = None) -> int:
        """Writes a page that classifies images in the browser; returns the bytes of its files.

        `onnxruntime_web` is the folder of that npm package, if it is not in `node_modules` here.
        """
        from solodg.predict.web_page import write_web_page

        package, onnx = Path(onnxruntime_web) if onnxruntime_web else None, self._path
        with tempfile.TemporaryDirectory(prefix="solodg-") as scratch:
            if self.folder is not None:
                onnx = Path(scratch) / "model.onnx"
                self.export(onnx)
            return write_web_page(onnx, self._path.resolve().name, Path(folder), package)

    def serve(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        settings: "ServerSettings | None" = None,
        data_dir: Path | None = None,
        verbose: bool = True,
    ) -> None:
        """Serves a web page and an HTTP API, as `solodg serve` does, until Ctrl-C or SIGTERM.

        `settings` has the limits of the server. `data_dir` is the folder of the datasets, if it has
        moved since training: the server shows figures if it finds the images of the run. Without
        `verbose` it says only where it listens.
        """
        try:
            from solodg.serving.server import serve
            from solodg.serving.settings import ServerSettings
        except ModuleNotFoundError as error:
            raise missing_extra("serve", "The server", error) from error
        (progress, say), draw = stderr_output(verbose), None
        if not isinstance(self.predictor, OnnxPredictor):
            from solodg.explain.drawer import figure_drawer

            draw = figure_drawer(self._path, self.predictor, data_dir, progress, say)
        name = self._path.resolve().name
        limits = settings or ServerSettings()
        at = stderr_output(True)[1]
        serve(
            self.predictor, name, limits, host=host, port=port, draw=draw, progress=progress,
            say=say, announce=at,
        )  # fmt: skip
