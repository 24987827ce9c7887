"""The options of the machine: where a run reads its data and computes."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator

from solodg.runs.option import option

LOGGERS = ("tensorboard", "csv", "wandb", "mlflow", "none")


def _default_data_dir() -> Path:
    from solodg.data.loading import default_data_dir  # late: it imports torch

    return default_data_dir()


class Machine(BaseModel):
    """Where a run reads its data and computes. None of it changes the result of the run."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    data_dir: Path = Field(
        default_factory=_default_data_dir,
        description="Folder that holds the datasets.",
        json_schema_extra={"shown_default": "$SOLODG_DATA or data"},
    )
    cache_dir: Path | None = option(
        None,
        "Folder in which features and maps of frozen stages are stored.",
        shown_default="~/.cache/solodg",
    )
    map_disk_gb: float = option(20.0, "Disk for all stored maps together, in GB.", gt=0, le=1e6)
    download: bool = option(False, "Fetch MNIST, Fashion-MNIST or SVHN if missing.")
    workers: PositiveInt = option(2, "Threads that load training images ahead of the model.")
    memory_gb: float = option(4.0, "Memory for decoded images, in GB.", gt=0, le=1e6)
    accelerator: str = option("auto", "Kind of device: auto, cpu, cuda, mps.")
    strategy: str = option(
        "auto", "How several devices work together, by Lightning Fabric: auto, ddp, ..."
    )
    logger: tuple[str, ...] | None = option(
        None,
        "Who follows the training, beside metrics.jsonl: tensorboard, csv, wandb, mlflow or none; "
        "repeat for several, or separate them by commas.",
        shown_default="tensorboard if installed",
    )

    @field_validator("logger", mode="before")
    @classmethod
    def _as_names(cls, value: Any) -> Any:
        """Reads names in a list, or separated by commas in one text."""
        if value is None:
            return None
        texts = [value] if isinstance(value, str) else list(value)
        names = tuple(name.strip() for text in texts for name in str(text).split(","))
        unknown = [name for name in names if name not in LOGGERS]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no logger; choose from {', '.join(LOGGERS)}")
        return tuple(dict.fromkeys(names))
