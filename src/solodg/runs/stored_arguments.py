"""Arguments of algorithms and adapters in runs and records: all of them, with their values.

A run or a record names every argument, so that a default can change without changing what was
trained before. Earlier versions named only those that were given. The rest then have the values
that were the defaults of that time, which stand here. A value here is never changed. An argument
that is new gets an entry: the value with which its algorithm does what it did before.

What is called `solo_code` now was called `solo_plus` in runs and records before the option `pose`
existed; they are read with its new name.
"""

from collections.abc import Mapping
from typing import Any

from solodg.errors import UserError

Arguments = Mapping[str, Any]

_ALGORITHMS: dict[str, Arguments] = {
    "coral": {"gamma": 1.0},
    "csd": {"components": 2, "specific_weight": 1.0, "orthonormality_weight": 1.0},
    "da_erm": {"code_dim": 64, "hidden": 256},
    "dson": {},
    "entropy_regularisation": {
        "adversary": 0.1,
        "across": 0.05,
        "within": 0.001,
        "weighting": "episode",
        "domain_rate": 1.0,
    },
    "erm": {},
    "jigen": {"permutations": 30, "jigsaw_weight": 0.7, "whole": None},
    "l2a_ot": {"margin": 0.5, "novelty_weight": 1.0, "cycle_weight": 10.0},
    "masf": {
        "inner_rate": 1e-5,
        "temperature": 2.0,
        "metric_weight": 0.005,
        "margin": 10.0,
        "leak": 0.01,
        "means": "present",
    },
    "mixstyle": {"probability": 0.5, "concentration": 0.1},
    "mldg": {"alpha": 0.5, "beta": 1.0, "second_order": True, "meta_train": "mean"},
    "ridge": {"early_exit": False},
    "rsc": {"feature_share": 1 / 3, "image_share": 1 / 3, "channel_share": None},
    "solo": {
        "posterior": "hierarchical",
        "meta_learning": True,
        "turns": "all",
        "base": "linear",
        "hidden": None,
        "pre_scale_start": -4.0,
        "source_samples": 4,
        "posterior_samples": 10,
        "prior_samples": 10,
        "test_samples": 32,
        "prior_weight": 1.0,
        "kl_weight": 1e-4,
        "kl_reduction": "mean",
        "kl_warmup": 500,
        "style_dim": None,
    },
    "solo_code": {
        "code_dim": 4,
        "domain_weight": 0.3,
        "swap": True,
        "film": True,
        "frame": 0,
        "source_samples": 4,
        "prior_weight": 1.0,
        "kl_weight": 1e-4,
    },
    "solo_plus": {"classifier": "linear", "early_exit": False},
    "ttt": {"rotation_weight": 1.0, "own_stages": 0},
}
_VARIANTS: dict[tuple[str, str], Arguments] = {
    ("mldg", "first-order"): {"second_order": False},
    ("solo", "invariant"): {"posterior": "invariant"},
    ("solo", "no-hierarchy"): {"posterior": "concatenation"},
    ("solo", "no-prior-supervision"): {"prior_weight": 0.0},
    ("solo", "no-meta-learning"): {"meta_learning": False},
    ("solo", "literal"): {
        "turns": "one",
        "base": "none",
        "hidden": "embedding",
        "source_samples": 10,
        "pre_scale_start": None,
        "kl_weight": 1e-5,
        "kl_reduction": "sum",
        "kl_warmup": 0,
    },
    ("solo_code", "no-swap"): {"swap": False},
    ("solo_code", "no-film"): {"film": False},
    ("solo_code", "no-domain-supervision"): {"domain_weight": 0.0},
    ("solo_code", "no-frame"): {"frame": 0},
}
_ADAPTERS: dict[str, Arguments] = {
    "bn": {},
    "lame": {"affinity": "rbf", "neighbours": 5},
    "memo": {"copies": 32, "learning_rate": 0.00025, "prior": None},
    "none": {},
    "shot": {
        "steps": 1,
        "learning_rate": 0.0001,
        "pseudo_weight": 0.3,
        "nesterov": False,
        "weight_decay": 0.0,
        "updates": None,
        "rounds": None,
    },
    "t3a": {"keep": 100},
    "tent": {"steps": 1, "learning_rate": 0.001},
    "ttt": {"steps": 10, "learning_rate": 0.001, "copies": None},
}


def current_name(algorithm: str, *, before_pose: bool) -> str:
    """Returns the name that an algorithm has now; `before_pose`: stored before that option was."""
    return "solo_code" if before_pose and algorithm == "solo_plus" else algorithm


def name_in_keys(algorithm: str) -> str:
    """Returns the name that keys of runs are made of, so that earlier records keep their keys."""
    return {"solo_code": "solo_plus", "solo_plus": "solo_plus with pose"}.get(algorithm, algorithm)


def complete_arguments(
    algorithm: str, arguments: Arguments, variant: str = "default"
) -> dict[str, Any]:
    """Returns stored arguments of an algorithm with those that an earlier version left out."""
    return {**_before(algorithm, variant), **arguments}


def complete_adapter_arguments(adapter: str, arguments: Arguments) -> dict[str, Any]:
    """Returns stored arguments of an adapter with those that an earlier version left out."""
    return {**_ADAPTERS.get(adapter, {}), **arguments}


def complete_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a stored configuration with the arguments that an earlier version left out.

    Raises `UserError` for values that are no configuration.
    """
    algorithm, variant = values.get("algorithm"), values.get("variant")
    stored = values.get("arguments") or {}
    if not (
        isinstance(algorithm, str) and isinstance(variant, str) and isinstance(stored, Mapping)
    ):
        raise UserError(
            "a stored config is damaged: algorithm and variant must be names, arguments an object."
        )
    algorithm = current_name(algorithm, before_pose="pose" not in values)
    arguments = complete_arguments(algorithm, stored, variant)
    return {**values, "algorithm": algorithm, "arguments": arguments}


def changed_arguments(algorithm: str, arguments: Arguments, variant: str) -> dict[str, Any]:
    """Returns the arguments that differ from the defaults of earlier versions.

    Keys of runs are made of these alone: so a run has the key that it had when only given
    arguments were stored, and another key once a default has changed.
    """
    before = _before(algorithm, variant)
    return {k: v for k, v in arguments.items() if k not in before or before[k] != v}


def changed_adapter_arguments(adapter: str, arguments: Arguments) -> dict[str, Any]:
    """Returns the arguments of an adapter that differ from the defaults of earlier versions."""
    before = _ADAPTERS.get(adapter, {})
    return {k: v for k, v in arguments.items() if k not in before or before[k] != v}


def _before(algorithm: str, variant: str) -> dict[str, Any]:
    return {**_ALGORITHMS.get(algorithm, {}), **_VARIANTS.get((algorithm, variant), {})}
