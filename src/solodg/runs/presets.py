"""Named sets of settings for `solodg train --preset`."""

from typing import Any

from solodg.runs.config import OFF_VALUES

PRESETS: dict[str, dict[str, Any]] = {
    # The paper's recipe taken literally, with the learning-rate drop of the authors' code. It
    # works from pretrained weights only: docs/method.md says what the defaults change, and why.
    "literal": {
        "algorithm": "solo",
        "variant": "literal",
        "steps": 10_000,
        "batch_size": 128,
        "context_images": 10,
        "learning_rate": 1e-4,
        "backbone_learning_rate": 5e-5,
        "weight_decay": 5e-4,
        **OFF_VALUES,
        "decay": "step",
    },
}
