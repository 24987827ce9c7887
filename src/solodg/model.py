"""Trains and loads models in Python: `solodg.train`, `solodg.load` and what they return, `Model`.

This module does not import torch: a model that was exported to a file does without it.
"""

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from solodg.errors import UserError, missing_extra
from solodg.pixels import ImageLike, Pixels
from solodg.predict.base import ImagePredictor
from solodg.predict.onnx import OnnxPredictor, is_onnx
from solodg.progress import stderr_output
from solodg.runs.named_settings import named_settings
from solodg.runs.predictions import Predictions

if TYPE_CHECKING:
    import torch

    from solodg.algorithms import Algorithm
    from solodg.predict.torch import Predictor
    from solodg.runs.recorded_scores import RecordedScores
    from solodg.runs.scores import Scores
    from solodg.serving.settings import ServerSettings

_NAME = "images"  # of data in memory, where none is given
_ARGUMENTS = ("target", "estimate", "output", "name", "resume", "verbose")


def train(
    data: Any,
    *,
    target: str | Sequence[str] | None = None,
    estimate: bool = False,
    output: str | Path | None = None,
    name: str | None = None,
    resume: bool = False,
    verbose: bool = True,
    **options: Any,
) -> "Model":
    """Trains a model, as `solodg train` does with the same settings, and returns it.

    Parameters
    ----------
    data
        The name of a dataset, a folder `domain/class/image`, a CSV manifest, a pandas DataFrame
        (columns path or image, label, domain, and optionally group, split), a Hugging Face
        `datasets.Dataset` (the same columns), or a map-style dataset of torch, or another sequence,
        whose items are (image, label, domain).
    target
        The domain to leave out, or several. None: the model is trained on all domains.
    estimate
        Whether to leave each domain out in turn first, to see what to expect on a new site;
        `estimate.json` and the model card in the folder of the run have the result. Only without
        target, and for data on disk.
    output
        The folder of the run. None: a temporary one, which lives as long as the model;
        `Model.save` keeps it.
    name
        Of data in memory, for records and the random split. None: "images".
    resume
        Whether to continue the run in `output`, with the same data and options.
    verbose
        Whether to show messages and progress, on stderr.
    **options
        The options of `solodg train`, with underscores: `backbone="small_cnn"`, `steps=500`.
        They are the fields of `solodg.runs.config.RunConfig` and `Machine`.
    """
    from solodg.data.in_memory import IN_MEMORY, load_in_memory
    from solodg.runs.defaults import resolve
    from solodg.runs.estimate import train_with_estimate
    from solodg.runs.opened_data import loading_of
    from solodg.runs.train import train_run

    progress, say = stderr_output(verbose)
    is_path = isinstance(data, str | Path)
    if is_path and name is not None:
        raise UserError(f"name={name!r} is for data in memory: {data} has a name already.")
    dataset = str(data) if is_path else f"{IN_MEMORY}{_checked_name(name)}"
    if estimate and not is_path:
        raise UserError(
            "estimate=True opens the data once for each domain: write images in memory to a folder "
            "domain/class/image, or give a CSV of their paths."
        )
    config, machine = named_settings(dataset, _domains(target), options, taken=_ARGUMENTS)
    if output is None and (resume or config.devices != "1" or config.num_nodes > 1):
        raise UserError("resume, and training on several devices, need a folder: give output.")
    resolved = resolve(config)
    held = None
    if not is_path:
        loading = loading_of(resolved, machine)
        held = load_in_memory(
            data,
            loading,
            name=_checked_name(name),
            skip_bad_images=resolved.skip_bad_images,
            progress=progress,
        )
    folder, temporary = (Path(output), None) if output is not None else _temporary_folder()
    try:
        if estimate:
            train_with_estimate(config, machine, folder, resume=resume, progress=progress, say=say)
        else:
            train_run(
                resolved, machine, folder, data=held, resume=resume, progress=progress, say=say
            )
        model = load(folder)
    except BaseException:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if temporary is not None:
        weakref.finalize(model, shutil.rmtree, temporary, ignore_errors=True)
    return model


def load(path: str | Path) -> "Model":
    """Loads the model of a run folder or of an exported file: `solodg.load(run).predict(image)`.

    The model is on the CPU until it is moved. An exported file does not need torch.
    """
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
        name: str = _NAME,
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

    def export(self, path: str | Path) -> float:
        """Writes the model as one ONNX file, with its adaptation; `solodg.load(path)` loads it.

        Returns the largest difference of its results from those of PyTorch.
        """
        if isinstance(self.predictor, OnnxPredictor):
            raise UserError(f"{self._path} is exported already: copy the file.")
        from solodg.predict.export import export_onnx

        return export_onnx(self.predictor, Path(path))

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
        name, at = self._path.resolve().name, stderr_output(True)[1]
        serve(self.predictor, name, settings or ServerSettings(), host=host, port=port, draw=draw,
              progress=progress, say=say, announce=at)  # fmt: skip


def _checked_name(name: str | None) -> str:
    name = _NAME if name is None else name
    if not name or Path(name).name != name:
        raise UserError(f"name={name!r}: the name of data in memory is not empty and has no slash.")
    return name


def _domains(target: str | Sequence[str] | None) -> tuple[str, ...]:
    if target is None:
        return ()
    return tuple(map(str, target)) if isinstance(target, list | tuple) else (str(target),)


def _temporary_folder() -> tuple[Path, Path]:
    """Returns a folder for a run, and the temporary folder around it, which is to be removed."""
    outer = Path(tempfile.mkdtemp(prefix="solodg-"))
    return outer / "run", outer
