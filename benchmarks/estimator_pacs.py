"""Leave one domain out with scikit-learn alone: `SoloClassifier` on embeddings of PACS.

`python -m benchmarks.estimator_pacs DATA_DIR WEIGHTS [CACHE_DIR]`; the embeddings are computed once
and kept in the cache, as `solodg train --freeze-backbone` keeps them.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.model_selection import LeaveOneGroupOut, cross_validate

from benchmarks.timing import table
from solodg import SoloClassifier
from solodg.data import DATASETS
from solodg.models.allocator import keep_freed_memory
from solodg.progress import BarProgress
from solodg.runs.build import feature_store, make_backbone, with_features
from solodg.runs.config import Machine, RunConfig
from solodg.runs.defaults import resolve
from solodg.runs.opened_data import open_source


def embeddings(machine: Machine, weights: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns embedding, class and domain of every image.

    Runs read source domains only, so two runs with different targets cover all four.
    """
    found = []
    for target, wanted in (
        ("sketch", ("art_painting", "cartoon", "photo")),
        ("photo", ("sketch",)),
    ):
        config = resolve(
            RunConfig(dataset="pacs", targets=(target,), algorithm="solo",
                      backbone="tf_efficientnet_lite0",
                      weights=weights, freeze_backbone=True)
        )  # fmt: skip
        source, config = open_source(config, machine)
        backbone = make_backbone(config)
        store = feature_store(config, machine, backbone, torch.device("cpu"), BarProgress())
        source = with_features(source, store)
        for part in (source.train, source.val):
            domains = np.array(part.domain_names)[part.domains]
            chosen = np.flatnonzero(np.isin(domains, wanted))
            rows = part.images.take(chosen).numpy()[:, : backbone.embedding_dim]
            found.append((rows, np.array(source.classes)[part.labels[chosen]], domains[chosen]))
    X, y, groups = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return X, y, groups


def main() -> None:
    """Prints the accuracy on each domain that was left out."""
    keep_freed_memory()  # as the command line does
    if len(sys.argv) < 3 or not DATASETS["pacs"].find(Path(sys.argv[1])):
        sys.stderr.write("Give the folder that holds PACS, and a weights file: left out.\n")
        return
    cache = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    X, y, domains = embeddings(Machine(data_dir=Path(sys.argv[1]), cache_dir=cache), sys.argv[2])
    started = time.perf_counter()
    found = cross_validate(
        SoloClassifier(algorithm="solo"), X, y, groups=domains, cv=LeaveOneGroupOut(),
        params={"domains": domains},
    )  # fmt: skip
    seconds = time.perf_counter() - started
    rows = [[name, f"{100 * score:.1f}"] for name, score in
            zip(np.unique(domains), found["test_score"], strict=True)]  # fmt: skip
    title = f"SoloClassifier(algorithm='solo'), leave one domain out, {len(y):,} embeddings of PACS"
    title += f": {seconds:.0f} s"
    sys.stdout.write(table(title, ["left out", "accuracy, %"], rows))


if __name__ == "__main__":
    main()
