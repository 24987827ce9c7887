"""One run: a configuration -> a folder with the selected model.

Training gets a SourceData, in which the target domains are not.
"""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from lightning_fabric import Fabric

from solodg.runs import checkpoint
from solodg.algorithms import Algorithm
from solodg.runs.build import (
    Say,
    feature_store,
    inputs,
    launch,
    make_algorithm,
    make_backbone,
    make_sampler,
    make_schedule,
    model_info,
    open_source,
    read_source,
    with_features,
    with_pseudo_domains,
)
from solodg.models.backbones import Backbone
from solodg.runs.config import Machine, RunConfig, resolve
from solodg.data import SourceData
from solodg.data.domains import fold
from solodg.data.episodes import EpisodeLoader, EpisodeSampler
from solodg.data.transforms import AUGMENTATIONS, to_unit
from solodg.errors import UserError
from solodg.runs.metrics import metrics, predict
from solodg.runs.predictions import Predictions
from solodg.progress import NoProgress, Progress
from solodg.runs.folder import FINISHED, claim, is_finished
from solodg.seeding import derive
from solodg.storage import read_json, read_lines, write_json
from solodg.runs.target_images import seen_apart, show_target
from solodg.runs.tensorboard import tensorboard
from solodg.runs.fit import METRICS, STATE, Schedule, Score, Transform, fit, on_first
from solodg.types import Batch

LEAVE_ONE_OUT = "leave-one-out"  # folder of the runs that choose the step


def train_run(
    config: RunConfig,
    machine: Machine,
    folder: Path,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    say: Say = lambda text: None,
) -> Path:
    """Train, select on source validation, and leave the selected model in `folder`."""
    config = resolve(config)
    fabric = launch(config, machine)
    if not fabric.is_global_zero:
        progress, say = NoProgress(), lambda text: None
    progress = progress or NoProgress()
    source, config = open_source(config, machine)
    if on_first(fabric, lambda: is_finished(folder, config, resume=resume)):
        say(f"{folder} is finished already: nothing to do.")
        return folder
    clock = _Clock(folder)
    torch.manual_seed(derive(config.seed, "weights"))
    backbone = make_backbone(config)
    store = feature_store(config, machine, backbone, fabric.device, progress)
    source = read_source(source, config, progress, say, store if config.freeze_backbone else None)
    fingerprint = source.fingerprint()
    images = source  # before features take the place of pixels
    if config.freeze_backbone:
        with fabric.rank_zero_first():
            source = with_features(source, store)
    if config.pseudo_domains:
        source = with_pseudo_domains(source, images, config, store)

    trainer = _Trainer(fabric, config, machine, backbone, clock, progress, say)
    trainer.prepare(source)  # what cannot be made claims no folder
    if config.select == LEAVE_ONE_OUT and len(source.domain_names) < 3:
        raise UserError(
            "--select leave-one-out needs three source domains: one to hold out, two to train."
        )
    if fabric.is_global_zero:
        claim(folder, config, machine, fingerprint)
        checkpoint.save_info(folder, model_info(config, source))
    schedule = make_schedule(config)
    if config.select == LEAVE_ONE_OUT:
        chosen = trainer.best_step(source, folder / LEAVE_ONE_OUT)
        say(f"Leaving one source domain out: best after {chosen} of {schedule.steps} steps.")
        schedule = replace(schedule, stop=chosen, validate_every=chosen)
    trainer.train(source, schedule, folder, keep=True)
    if fabric.is_global_zero:
        selected = checkpoint.selection(folder)
        write_json(folder / FINISHED, {"seconds": clock.seconds, "selected": selected})
        clock.stop()
        (folder / STATE).unlink(missing_ok=True)
    fabric.barrier()
    return folder


class _Trainer:
    """Trains models of one configuration, each from the same random start."""

    def __init__(
        self,
        fabric: Fabric,
        config: RunConfig,
        machine: Machine,
        backbone: Backbone,
        clock: "_Clock",
        progress: Progress,
        say: Say,
    ) -> None:
        self.fabric, self.config, self.machine, self.say = fabric, config, machine, say
        self.clock = clock
        self.progress = progress
        self.start = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
        self.backbone = backbone

    def prepare(self, source: SourceData) -> tuple[Algorithm, EpisodeSampler]:
        config = self.config
        self.backbone.load_state_dict(self.start)
        algorithm = make_algorithm(config, self.backbone, source)
        return algorithm, make_sampler(config, source)

    def train(self, source: SourceData, schedule: Schedule, folder: Path, *, keep: bool) -> None:
        config = self.config
        algorithm, sampler = self.prepare(source)
        loader = EpisodeLoader(source.train, sampler, workers=self.machine.workers)
        images_a_step = sum(len(part) for part in sampler(0)[:2])
        self.say(
            f"{len(source.train)} training images of {len(source.domain_names)} domains, "
            f"{len(source.val)} to validate; {images_a_step} images a step."
        )
        frozen = self.backbone if config.freeze_backbone else None
        run = _Run(self.fabric, source, config, folder if keep else None, frozen, self.clock)
        plain: Transform = lambda x, generator: to_unit(x)  # noqa: E731
        augment = AUGMENTATIONS[source.kind] if config.augment else plain
        with tensorboard(self.fabric, folder) as watch:
            fit(
                self.fabric, algorithm, loader, augment, schedule, run, folder, self.progress, watch
            )  # fmt: skip

    def best_step(self, source: SourceData, folder: Path) -> int:
        """Every source domain takes its turn as a domain that was not trained on."""
        curves = []
        for number, name in enumerate(source.domain_names):
            own = folder / fold(name)
            if not on_first(self.fabric, (own / FINISHED).is_file):
                self.say(f"Leaving {name} out:")
                schedule = make_schedule(self.config)
                self.train(source.holding_out(number), schedule, own, keep=False)
                if self.fabric.is_global_zero:
                    write_json(own / FINISHED, {})
                    (own / STATE).unlink(missing_ok=True)
            curves.append(on_first(self.fabric, partial(_curve, own)))
        mean = {step: sum(curve[step] for curve in curves) / len(curves) for step in curves[0]}
        return max(mean, key=lambda step: (mean[step], -step))


def _curve(folder: Path) -> dict[int, float]:
    """Validation accuracy by step."""
    lines = read_lines(folder / METRICS)
    return {line["step"]: line["val_accuracy"] for line in lines if "val_accuracy" in line}


class _Clock:
    """Seconds of a run, those of processes that were killed included (to their last save)."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "seconds.json"
        self.before = read_json(self.path)["seconds"] if self.path.is_file() else 0.0
        self.started = time.perf_counter()

    @property
    def seconds(self) -> float:
        return round(self.before + time.perf_counter() - self.started, 1)

    def save(self) -> None:
        write_json(self.path, {"seconds": self.seconds})

    def stop(self) -> None:
        self.path.unlink(missing_ok=True)


class _Run:
    """Selection on source validation images; the selected model is the saved model."""

    def __init__(
        self,
        fabric: Fabric,
        source: SourceData,
        config: RunConfig,
        folder: Path | None,  # None: nothing is kept of it but its scores
        frozen: Backbone | None,
        clock: "_Clock",
    ) -> None:
        self.fabric, self.folder, self.frozen, self.clock = fabric, folder, frozen, clock
        self.centres = source.train.balanced(config.centre_images, config.seed)
        self.val = source.val

    def validate(self, algorithm: Algorithm) -> Score:
        device = self.fabric.device
        self._finalize(algorithm)
        found, parts = [], seen_apart(algorithm, self.val)
        for part in parts:
            show_target(algorithm, part, device)
            found.append(predict(algorithm.probabilities, inputs(part), device=device))
        if algorithm.target_images:
            self._finalize(algorithm)  # what is kept has seen no domain
        predictions = Predictions.concatenate(found)
        if not np.isfinite(predictions.probabilities).all():
            raise UserError(
                "training has diverged: the model predicts NaN. Try a lower --learning-rate or "
                "--backbone-learning-rate."
            )
        scored = metrics(predictions, np.concatenate([part.labels for part in parts]))
        self.clock.save()
        return Score(scored["accuracy"], -scored["nll"])

    def _finalize(self, algorithm: Algorithm) -> None:
        device = self.fabric.device
        with torch.inference_mode():
            algorithm.finalize(Batch(*(t.to(device) for t in b)) for b in inputs(self.centres))

    def selected(self, algorithm: Algorithm, step: int, score: Score) -> None:
        if self.folder is None:
            return
        validation = {"accuracy": score.accuracy, "nll": -score.negative_nll}
        checkpoint.save_weights(
            self.folder, algorithm, step=step, validation=validation, backbone=self.frozen
        )
