"""The demo: ERM, `solo` and `solo_plus` on rotated digits, with the same number of steps."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console

from solodg.data import Loading, dataset_spec
from solodg.figures.plots import accuracy_by_domain
from solodg.predict.torch import Predictor
from solodg.progress import Progress, Say
from solodg.report.run_page import write_report
from solodg.runs.config import Machine, RunConfig
from solodg.runs.evaluate import evaluate_run
from solodg.runs.tables import comparison_table, mean_accuracy
from solodg.runs.train import train_run

_NAMES = {"erm": "ERM", "solo": "single-sample (solo)", "solo_plus": "single-sample (solo_plus)"}
_BEST = "solo_plus"


def run_demo(
    output: Path, *, steps: int, seed: int, out: Console, progress: Progress, say: Say
) -> None:
    """Trains, scores and plots all methods, and predicts one image.

    Training resumes where an earlier call was stopped.
    """
    output.mkdir(parents=True, exist_ok=True)  # a mistake is told before a minute of work
    machine = Machine(data_dir=Path("no-such-folder"))  # so that the embedded digits are used
    rows: dict[str, Any] = {}
    for algorithm, name in _NAMES.items():
        say(f"{name}: sources 15-75 degrees, {steps} steps")
        config = _config(algorithm, steps, seed)
        folder = output / f"{algorithm}-{steps}-{seed}"
        train_run(config, machine, folder, resume=True, progress=progress)
        rows[name] = evaluate_run(folder, progress=progress)
    folder = output / f"{_BEST}-{steps}-{seed}"
    out.print(comparison_table("Rotated MNIST (5,000 digits, 32 pixels, small CNN)", rows))

    means = {name: mean_accuracy(records, "target") or 0.0 for name, records in rows.items()}
    gain = round(100 * (means[_NAMES[_BEST]] - means[_NAMES["erm"]]), 1) or 0.0  # no -0.0
    out.print(
        f"{_BEST} against ERM on unseen angles: {gain:+.1f} points. One seed proves little: "
        "try --seed 1 too."
    )

    examples = _examples(seed)
    picture, digit = output / "accuracy.png", output / "unseen-90-degrees.png"
    accuracy_by_domain(
        rows, examples, picture, title="Digits at angles never seen in training", xlabel="degrees"
    )
    Image.fromarray(examples["90"][0]).save(digit)
    prediction = Predictor.load(folder).predict(digit)
    out.print(
        f"One image alone, {digit}: {prediction.label} with probability "
        f"{prediction.probability:.2f}, uncertainty {prediction.uncertainty:.2f}"
    )
    page = write_report(folder, output=output / "report.html", per_gallery=3, progress=progress)
    out.print(f"Model: {folder}\nPicture: {picture}")
    out.print(f"Page, with the adaptation to single images explained: {page}")
    say("Try next")
    binaries = Path(sys.executable).parent
    if shutil.which("solodg") is None:  # as after `make demo`
        say(f"  source {os.path.relpath(binaries / 'activate')}")
    say(f"  solodg predict {folder} {digit} --json")
    say(f"  solodg explain {folder} {digit}        # a figure of this image")
    say("  solodg train rotated-mnist --steps 300        # ResNet-18, a few minutes more")
    say("  solodg train path/to/domain/class/images --target DOMAIN   # your own images")


def _config(algorithm: str, steps: int, seed: int) -> RunConfig:
    """Returns a run with small batches and two validations: the demo is to be over soon."""
    return RunConfig(
        dataset="rotated-mnist",
        algorithm=algorithm,
        backbone="small_cnn",
        steps=steps,
        batch_size=16,
        context_images=2,
        validate_every=max(1, steps // 2),
        seed=seed,
    )


def _examples(seed: int) -> dict[str, NDArray[np.uint8]]:
    """Returns one test digit at every angle, (channels, H, W) each."""
    spec = dataset_spec("rotated-mnist")
    dataset = spec.load(Loading(Path("no-such-folder"), spec.image_size, spec.channels, seed))
    parts = dataset.targets(dataset.domain_names)
    chosen = int(np.flatnonzero(parts["0"].labels == 7)[0])
    return {name: part.images.take([chosen])[0].numpy() for name, part in parts.items()}
