"""Loggers that follow a training: TensorBoard and CSV of Lightning Fabric, W&B and MLflow.

All of them get what `metrics.jsonl` has. W&B and MLflow also get the configuration, with names of
files in place of their paths.
"""

import importlib.util
import os
import uuid
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fabric.loggers.csv_logs import CSVLogger
from lightning_fabric.loggers.logger import Logger
from lightning_fabric.loggers.tensorboard import TensorBoardLogger

from solodg.errors import UserError, missing_extra
from solodg.storage import read_json, write_json

TENSORBOARD, CSV, WANDB, MLFLOW = "tensorboard", "csv", "wandb", "mlflow"
_PACKAGES = {TENSORBOARD: "tensorboard", WANDB: "wandb", MLFLOW: "mlflow"}
_IDS = "loggers.json"  # names under which W&B and MLflow know the run, to continue it
_PROJECT = "solodg"
_PARTS = ("estimate", "leave-one-out")  # folders of trainings that belong to another one


def check_loggers(names: Sequence[str] | None) -> None:
    """Raises `UserError` if the package of a named logger is missing."""
    for name in names or ():
        package = _PACKAGES.get(name)
        if package and importlib.util.find_spec(package) is None:
            error = ModuleNotFoundError(f"No module named {package!r}", name=package)
            raise missing_extra(name, f"The logger {name}", error)


def open_loggers(names: Sequence[str] | None, folder: Path) -> dict[str, Logger]:
    """Returns the named loggers of the training in `folder`, by name; None: TensorBoard if there.

    Call it in one process only. A logger writes nothing before its first call.
    """
    check_loggers(names)
    if names is None:
        names = (TENSORBOARD,) if importlib.util.find_spec("tensorboard") else ()
    return {name: _MAKERS[name](folder) for name in names if name != "none"}


class WandbLogger(Logger):
    """Logs to Weights & Biases; a resumed training continues its run.

    The variables of W&B apply: WANDB_MODE=offline writes to the run folder alone, for
    `wandb sync`; WANDB_PROJECT names the project, by default solodg.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._run: Any = None

    @property
    def name(self) -> str:
        """Returns the name of the run."""
        return _run_name(self._folder)

    @property
    def version(self) -> str:
        """Returns the name under which W&B stores the run."""
        return _stored_id(self._folder, WANDB, lambda: uuid.uuid4().hex[:12])

    @property
    def experiment(self) -> Any:
        """Returns the run of W&B; begins it at the first call."""
        if self._run is None:
            import wandb

            try:
                self._run = wandb.init(
                    project=os.environ.get("WANDB_PROJECT", _PROJECT),
                    name=self.name,
                    id=self.version,
                    resume="allow",
                    dir=str(self._folder),
                    # The output, the code and its repository stay here; W&B would store them.
                    settings=wandb.Settings(
                        console="off", silent=True, disable_git=True, save_code=False
                    ),
                )
            except wandb.errors.Error as error:
                raise UserError(
                    f"W&B cannot begin a run: {error} Or set WANDB_MODE=offline, and upload the "
                    "run later by `wandb sync`."
                ) from error
        return self._run

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs values of one step; several calls for one step are one row."""
        self.experiment.log(dict(metrics), step=step)

    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Logs the settings of the run."""
        self.experiment.config.update(_as_dict(params), allow_val_change=True)

    def finalize(self, status: str) -> None:
        """Ends the run of W&B, as failed unless `status` is success."""
        if self._run is not None:
            self._run.finish(exit_code=0 if status == "success" else 1)


class MlflowLogger(Logger):
    """Logs to MLflow; a resumed training continues its run.

    The variables of MLflow apply: MLFLOW_TRACKING_URI names a server or a database. Without it the
    run goes to the folder `mlruns` of the run folder. MLFLOW_EXPERIMENT_NAME names the experiment,
    by default solodg.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._opened: Any = None

    @property
    def name(self) -> str:
        """Returns the name of the run."""
        return _run_name(self._folder)

    @property
    def version(self) -> str:
        """Returns the number under which MLflow stores the run."""
        return _stored_id(self._folder, MLFLOW, self._new_run)

    @property
    def experiment(self) -> Any:
        """Returns the client of MLflow; connects at the first call."""
        if self._opened is None:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException

            uri = os.environ.get("MLFLOW_TRACKING_URI")
            if uri is None:
                uri = (self._folder / "mlruns").resolve().as_uri()
                # MLflow 3 refuses folders without it, and a database needs further packages.
                os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            try:
                self._opened = MlflowClient(tracking_uri=uri)
                self._opened.update_run(self.version, status="RUNNING")
            except MlflowException as error:
                self._opened = None
                reason = str(error).strip().splitlines()[0]
                raise UserError(f"MLflow cannot begin a run at {uri}: {reason}") from error
        return self._opened

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs values of one step."""
        for name, value in metrics.items():
            self.experiment.log_metric(self.version, name, value, step=step)

    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Logs the settings of the run that it does not have yet; MLflow never changes one."""
        known = self.experiment.get_run(self.version).data.params
        for name, value in _as_dict(params).items():
            if name not in known:
                self.experiment.log_param(self.version, name, value)

    def finalize(self, status: str) -> None:
        """Ends the run of MLflow, as failed unless `status` is success."""
        if self._opened is not None:
            ended = "FINISHED" if status == "success" else "FAILED"
            self._opened.set_terminated(self.version, ended)

    def _new_run(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self._opened.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._opened.create_experiment(name)
        return str(self._opened.create_run(experiment, run_name=self.name).info.run_id)


def _tensorboard(folder: Path) -> Logger:
    return TensorBoardLogger(root_dir=folder, name=TENSORBOARD, version="")


def _csv(folder: Path) -> Logger:
    """Returns a logger that writes `csv/metrics.csv` from its beginning."""
    (folder / CSV / "metrics.csv").unlink(missing_ok=True)
    return CSVLogger(root_dir=folder, name=CSV, version="")


_MAKERS: dict[str, Callable[[Path], Logger]] = {
    TENSORBOARD: _tensorboard,
    CSV: _csv,
    WANDB: WandbLogger,
    MLFLOW: MlflowLogger,
}


def _run_name(folder: Path) -> str:
    """Returns the name of the run folder; of a part of a run, with what it is a part of."""
    parts = folder.resolve().parts
    inner = [i for i, part in enumerate(parts) if part in _PARTS and i > 0]
    return "/".join(parts[inner[0] - 1 :]) if inner else parts[-1]


def _stored_id(folder: Path, logger: str, make: Callable[[], str]) -> str:
    """Returns the name under which a logger knows the run; makes and stores it the first time."""
    path = folder / _IDS
    known = read_json(path, dict[str, str]) if path.is_file() else {}
    if logger not in known:
        known[logger] = make()
        write_json(path, known)
    return known[logger]


def _as_dict(params: dict[str, Any] | Namespace) -> dict[str, Any]:
    return vars(params) if isinstance(params, Namespace) else params
