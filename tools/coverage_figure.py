"""Draws accuracy over the share of images answered, for the unseen domains of runs.

    python tools/coverage_figure.py docs/coverage.png "Rotated MNIST=runs/mnist" "PACS=runs/pacs"

The runs are scored by what `solodg evaluate` calls; nothing is written to them.
"""

import sys
from pathlib import Path

import numpy as np

from solodg.figures.style import save_figure
from solodg.report.charts import coverage_panels
from solodg.runs.evaluate import score_run
from solodg.runs.predictions import Predictions
from solodg.runs.tables import UNSEEN


def main(path: Path, named: list[str]) -> None:
    """Scores each run, given as TITLE=FOLDER, and writes a panel for each."""
    panels = {}
    for text in named:
        title, folder = text.split("=", 1)
        scored = [s for s in score_run(Path(folder)) if s.record.role in UNSEEN]
        together = Predictions.concatenate([s.predictions for s in scored])
        panels[title] = (together, np.concatenate([s.labels for s in scored]))
    save_figure(coverage_panels(panels), path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
