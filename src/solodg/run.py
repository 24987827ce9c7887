"""One run: a configuration -> a folder with the selected model.

Training gets a SourceData, in which the target domains are not.
"""

import time
from pathlib import Path

import numpy as np
import torch
from lightning_fabric import Fabric

from solodg import checkpoint
from solodg.algorithms import Algorithm
from solodg.assembly import (
    Say,
    feature_store,
    inputs,
    launch,
    make_algorithm,
    make_backbone,
    make_schedule,
    model_info,
    open_source,
    read_source,
    with_features,
    with_pseudo_domains,
)
from solodg.backbones import Backbone
from solodg.config import Machine, RunConfig, resolve
from solodg.data import SourceData
from solodg.data.episodes import EpisodeLoader, EpisodeSampler
from solodg.data.transforms import AUGMENTATIONS, to_unit
from solodg.errors import UserError
from solodg.evaluation import metrics, predict
from solodg.progress import NoProgress, Progress
from solodg.runfolder import FINISHED, claim, is_finished
from solodg.seeding import derive
from solodg.storage import write_json
from solodg.tensorboard import tensorboard
from solodg.training import STATE, Score, fit, on_first
from solodg.types import Batch


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
    started = time.perf_counter()

    source = read_source(source, config, progress, say)
    fingerprint = source.fingerprint()
    torch.manual_seed(derive(config.seed, "weights"))
    backbone = make_backbone(config)
    store = feature_store(config, machine, backbone, fabric.device, progress)
    images = source  # before features take the place of pixels
    if config.freeze_backbone:
        with fabric.rank_zero_first():
            source = with_features(source, store)
    if config.pseudo_domains:
        source = with_pseudo_domains(source, images, config, store)

    algorithm = make_algorithm(config, backbone, len(source.classes))
    sampler = EpisodeSampler(
        source.train,
        context=config.context_images,
        queries=config.batch_size,
        seed=config.seed,
        classes=source.classes,
    )
    loader = EpisodeLoader(source.train, sampler, workers=machine.workers)
    images_a_step = sum(len(part) for part in sampler(0)[:2])
    say(
        f"{len(source.train)} training images of {len(source.domain_names)} domains, "
        f"{len(source.val)} to validate; {images_a_step} images a step."
    )
    run = _Run(fabric, source, config, folder, backbone if config.freeze_backbone else None)
    if fabric.is_global_zero:
        claim(folder, config, machine, fingerprint)
        checkpoint.save_info(folder, model_info(config, source))
    augment = AUGMENTATIONS[source.kind] if config.augment else lambda x, generator: to_unit(x)
    with tensorboard(fabric, folder) as watch:
        fit(fabric, algorithm, loader, augment, make_schedule(config), run, folder, progress, watch)
    if fabric.is_global_zero:
        selected = checkpoint.selection(folder)
        seconds = round(time.perf_counter() - started, 1)
        write_json(folder / FINISHED, {"seconds": seconds, "selected": selected})
        (folder / STATE).unlink(missing_ok=True)
    fabric.barrier()
    return folder


class _Run:
    """Selection on source validation images; the selected model is the saved model."""

    def __init__(
        self,
        fabric: Fabric,
        source: SourceData,
        config: RunConfig,
        folder: Path,
        frozen: Backbone | None,
    ) -> None:
        self.fabric, self.folder, self.frozen = fabric, folder, frozen
        self.centres = source.train.balanced(config.centre_images, config.seed)
        self.val = source.val

    def validate(self, algorithm: Algorithm) -> Score:
        device = self.fabric.device
        with torch.inference_mode():
            algorithm.finalize(Batch(*(t.to(device) for t in b)) for b in inputs(self.centres))
        predictions = predict(algorithm.probabilities, inputs(self.val), device=device)
        if not np.isfinite(predictions.probabilities).all():
            raise UserError(
                "training has diverged: the model predicts NaN. Try a lower --learning-rate or "
                "--backbone-learning-rate."
            )
        scored = metrics(predictions)
        return Score(scored["accuracy"], -scored["nll"])

    def selected(self, algorithm: Algorithm, step: int, score: Score) -> None:
        validation = {"accuracy": score.accuracy, "nll": -score.negative_nll}
        checkpoint.save_weights(
            self.folder, algorithm, step=step, validation=validation, backbone=self.frozen
        )
