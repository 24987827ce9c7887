"""A cell of a plan, and the keys by which its training and its records are found again."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from solodg.data import DATASETS
from solodg.runs.config import OFF_VALUES, ResolvedConfig
from solodg.runs.folder import portable
from solodg.runs.stored_arguments import (
    changed_adapter_arguments,
    changed_arguments,
    name_in_keys,
)
from solodg.runs.stream import Stream, adapter_arguments


@dataclass(frozen=True)
class Cell:
    """One run, scored in one way: a row, a set of targets and a seed."""

    row: str
    adapter: str
    config: ResolvedConfig
    stream: Stream | None = None

    @property
    def run_key(self) -> str:
        """Returns a key of the training, the same in every plan, so that it is done only once.

        Fields that are None, or that turn something off, are left out of it: an option that is
        added later, with None as its default, does not change the keys of earlier records. So are
        arguments with the defaults of earlier versions.
        """
        given = {
            k: v
            for k, v in portable(self.config).items()
            if v is not None and v != OFF_VALUES.get(k)
        }
        given["arguments"] = changed_arguments(
            self.config.algorithm, given["arguments"], self.config.variant
        )
        given["algorithm"] = name_in_keys(self.config.algorithm)
        # Folders of the same name may be different datasets.
        if self.config.dataset not in DATASETS:
            given["dataset"] = str(Path(self.config.dataset).resolve())
        text = json.dumps(given, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def key(self) -> str:
        """Returns the key of the training and of the way it is scored; records carry it.

        Arguments of the adapter that are None are left out of it, unless they changed something:
        a plan can so turn off what a later version does, and keep the keys of earlier records.
        """
        if self.adapter == "none" and self.stream is None:
            return self.run_key
        stream = self.stream or Stream()
        given = {k: v for k, v in stream.model_dump().items() if v is not None}
        arguments = adapter_arguments(self.adapter, stream.arguments)
        named = {k: v for k, v in given["arguments"].items() if v is not None}
        given["arguments"] = named | changed_adapter_arguments(self.adapter, arguments)
        text = json.dumps(given, sort_keys=True)
        return f"{self.run_key}-{self.adapter}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def __str__(self) -> str:
        return f"{self.row}, target {' '.join(self.config.targets)}, seed {self.config.seed}"
