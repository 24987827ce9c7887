"""Which finished runs fit together, so that the mean of their weights is a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from solodg.algorithms import ALGORITHMS, Algorithm
from solodg.errors import UserError
from solodg.runs import checkpoint
from solodg.runs.averaged_runs import AVERAGED
from solodg.runs.config import ResolvedConfig
from solodg.runs.folder import FINISHED, read_config, read_origin
from solodg.runs.model_info import ModelInfo
from solodg.runs.origin import Origin
from solodg.runs.training_state import Score


@dataclass(frozen=True)
class FinishedRun:
    """A finished run that may be averaged."""

    folder: Path

    @cached_property
    def config(self) -> ResolvedConfig:
        """Reads the configuration."""
        return read_config(self.folder)

    @cached_property
    def info(self) -> ModelInfo:
        """Reads the description of the model."""
        return checkpoint.load_info(self.folder)

    @cached_property
    def origin(self) -> Origin:
        """Reads what it was trained from."""
        return read_origin(self.folder)

    @cached_property
    def selection(self) -> dict[str, Any]:
        """Reads the selected step and its source validation scores."""
        return checkpoint.selection(self.folder)

    @property
    def score(self) -> Score:
        """Returns the source validation score of the selected step."""
        found = self.selection["validation"]
        return Score(found["accuracy"], -found["nll"])

    def load(self) -> Algorithm:
        """Loads the model in eval mode."""
        return checkpoint.load(self.folder)[0]

    def traits(self, *, linear: bool) -> dict[str, str]:
        """Returns what runs must have in common to be averaged, in words.

        `linear`: whether all that is trained beside the backbone is one linear classifier. Hidden
        layers only fit together if they began with the same weights, thus with the same seed.
        """
        config, info = self.config, self.info
        initial = str(self.origin.weights or "random")
        if not (config.starts_from_weights and linear) or info.pose:
            initial += f", of seed {config.seed}"  # of what begins with random weights
        solved = ALGORITHMS[info.algorithm].is_closed_form(info.arguments)
        return {
            "algorithm": f"{info.algorithm} ({info.variant})",
            "classifier": "solved" if solved else "trained",
            "early exit": "on" if info.arguments.get("early_exit") else "off",
            "backbone": info.backbone,
            "size of images": str(info.image_size),
            "channels": str(info.channels),
            "window": str(info.window),
            "image norm": str(info.image_norm or 0),
            "pose": "on" if info.pose else "off",
            "classes": ", ".join(info.classes),
            "targets": ", ".join(config.targets) or "none",
            "excluded domains": ", ".join(config.exclude or ()) or "none",
            "source domains": ", ".join(info.source_domains),
            "initial weights": initial,
            "fingerprint of the source images": self.origin.fingerprint,
        }


_HINTS = {
    "fingerprint of the source images": "Where a dataset gives no split, the seed splits it: vary "
    "other settings, e.g. --learning-rate, and keep the seed.",
    "initial weights": "Runs from random weights fit together only with the same seed; those of "
    "given weights with another seed too, if only a linear classifier is trained beside the "
    "backbone.",
}


def fitting_runs(folders: Sequence[Path]) -> list[FinishedRun]:
    """Returns the runs in folders; raises `UserError` unless they fit together and are finished."""
    runs = [FinishedRun(folder) for folder in folders]
    if len({run.folder.resolve() for run in runs}) < max(2, len(runs)):
        raise UserError("give at least two run folders to average, each of them once.")
    for run in runs:
        if not (run.folder / FINISHED).is_file():
            raise UserError(
                f"{run.folder} holds no finished run: finish it with its command and --resume."
            )
        if (run.folder / AVERAGED).is_file():
            raise UserError(f"{run.folder} is an average itself: give the runs that it is of.")
        if run.config.pseudo_domains:
            raise UserError(
                f"{run.folder} was trained with --pseudo-domains, whose class centres cannot be "
                "computed again. Average runs with annotated domains."
            )
    linear = _has_one_linear_classifier(runs[0].load())
    first = runs[0].traits(linear=linear)
    for run in runs[1:]:
        for name, value in run.traits(linear=linear).items():
            if value != first[name]:
                raise UserError(
                    f"{run.folder} does not fit {runs[0].folder}: its {name} is {value!r}, there "
                    f"it is {first[name]!r}. {_HINTS.get(name, '')}".strip()
                )
    return runs


def _has_one_linear_classifier(algorithm: Algorithm) -> bool:
    """Returns whether no layer but one linear classifier has weights beside the backbone."""
    layers = {n for n, p in algorithm.named_parameters() if p.ndim > 1}
    return {n for n in layers if not n.startswith("backbone.")} == {"classifier.weight"}
