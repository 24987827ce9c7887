"""One run: a configuration -> a folder with the selected model.

`train_run` reads from top to bottom: data, model, folder, training, selection. Training gets a
SourceData, which does not hold the target domains.
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from lightning_fabric import Fabric

from solodg.algorithms import Algorithm
from solodg.data import DomainDataset, LabelledImages, SourceData
from solodg.data.domains import normalise_name
from solodg.data.episodes import EpisodeLoader, EpisodeSampler
from solodg.data.transforms import AUGMENTATIONS, unaugmented
from solodg.errors import UserError
from solodg.models.backbones import Backbone
from solodg.progress import NoProgress, Progress, Say
from solodg.runs import checkpoint, closed_form
from solodg.runs.build import (
    describe_model,
    feature_store,
    make_algorithm,
    make_backbone,
    make_sampler,
    make_schedule,
    row_store,
    with_pseudo_domains,
    with_rows,
)
from solodg.runs.clock import Clock
from solodg.runs.config import SWAD, Machine, ResolvedConfig, RunConfig
from solodg.runs.defaults import resolve
from solodg.runs.devices import ending_together, launch, on_first
from solodg.runs.fit import Schedule, fit, start
from solodg.runs.folder import FINISHED, check_unchanged, claim, is_finished, training_lock
from solodg.runs.folds import gather_evidence
from solodg.runs.metrics_log import Log, metrics_log, validation_curve
from solodg.runs.open_parts import candidates
from solodg.runs.opened_data import (
    ShowData,
    check_folds,
    open_source,
    read_source,
    remarks_to,
    say_guessed_ranges,
)
from solodg.runs.origin import describe_origin
from solodg.runs.pose_training import train_pose
from solodg.runs.selection import Selection
from solodg.runs.training_state import STATE, Score, TrainingState
from solodg.runs.workplace import Workplace
from solodg.seeding import derive, unchanged_generators
from solodg.storage import write_json

LEAVE_ONE_OUT = "leave-one-out"  # folder of the trainings that choose the step
LOG_EVERY = 10  # steps


def train_run(
    config: RunConfig,
    machine: Machine,
    folder: Path,
    *,
    data: DomainDataset | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    say: Say = lambda text: None,
    show: ShowData | None = None,
) -> Path:
    """Trains a model, selects it on source validation images and leaves it in `folder`.

    `data` is the dataset of the configuration if it is loaded already. With `resume` it continues
    a run that was killed; a finished run is left as it is. `show` is called with a summary of the
    data; without it, `say` gets what was left out of the data.
    """
    resolved = resolve(config)
    fabric = launch(resolved, machine)
    if not fabric.is_global_zero:
        progress, say, show = NoProgress(), lambda text: None, None
    progress = progress or NoProgress()
    with unchanged_generators(), ending_together(fabric), ExitStack() as until_end:
        source, config = open_source(resolved, machine, show or remarks_to(say), data)
        if on_first(fabric, partial(_is_finished, folder, config, resume, until_end)):
            say(f"{folder} is finished already: nothing to do.")
        else:
            _train_and_select(fabric, config, machine, folder, source, progress, say)
    return folder


def _is_finished(folder: Path, config: ResolvedConfig, resume: bool, until_end: ExitStack) -> bool:
    """Returns whether the run is finished already; if not, locks its folder until the end."""
    if is_finished(folder, config, resume=resume):
        return True
    until_end.enter_context(training_lock(folder))
    return is_finished(folder, config, resume=resume)  # another process may have finished it


def _train_and_select(
    fabric: Fabric,
    config: ResolvedConfig,
    machine: Machine,
    folder: Path,
    source: SourceData,
    progress: Progress,
    say: Say,
) -> None:
    if source.shared_groups:
        say(
            f"{source.shared_groups} group(s) have images both in the source domains and among the "
            "target images to score: the score will not be one of unseen groups."
        )
    work = Workplace(fabric, machine, Clock(folder), progress, say)
    # Until held-out domains have decided, one that can read images in every way that is open.
    most = candidates(config, None).all_parts(config) if config.open_parts else config
    torch.manual_seed(derive(config.seed, "weights"))
    backbone = make_backbone(most)
    store = row_store(most, machine, backbone, fabric.device, progress, say, source.kind)
    source = read_source(source, config, progress, say, store)
    say_guessed_ranges(source, say)
    origin = describe_origin(source, backbone if config.starts_from_weights else None)
    on_first(fabric, partial(check_unchanged, folder, origin))
    images = source  # before features take the place of pixels
    if store is not None:
        make_algorithm(most, backbone, source)  # refuses what cannot read stored features or maps
        with fabric.rank_zero_first():
            source = with_rows(source, images, store)
    if config.pseudo_domains:
        features = feature_store(config, machine, backbone, fabric.device, progress)
        source = with_pseudo_domains(source, images, config, features)

    # A run that cannot be trained fails here, before it claims its folder.
    _Setup(work, most, backbone).new_model(source)
    if config.select == LEAVE_ONE_OUT:
        check_folds(source)
    on_first(fabric, partial(claim, folder, config, machine, origin))
    if config.open_parts:
        evidence = gather_evidence(work, config, source, backbone, folder)
        say("What adapts to each image:")
        for line in evidence.lines():
            say(f"  {line}")
        say(f"  Evidence: {evidence.rests_on}.")
        config = evidence.decided(config)
        if not config.freeze_backbone:
            torch.manual_seed(derive(config.seed, "weights"))
            backbone = make_backbone(config)
        if config.stored_views is not None:  # copies in the readings that were decided on
            store = row_store(config, machine, backbone, fabric.device, progress, say, images.kind)
            with fabric.rank_zero_first():
                source = with_rows(source, images, store)
    on_first(fabric, partial(checkpoint.save_info, folder, describe_model(config, source)))
    setup = _Setup(work, config, backbone)
    schedule = make_schedule(config)
    if config.select == LEAVE_ONE_OUT:
        chosen = _best_step(setup, source, schedule, folder / LEAVE_ONE_OUT)
        say(f"Leaving one source domain out: best after {chosen} of {schedule.steps} steps.")
        # SWAD needs the validations on the way; otherwise the chosen step is the selected one.
        every = schedule.validate_every if schedule.average == SWAD else chosen
        schedule = replace(schedule, stop=chosen, validate_every=every)
    _train(setup, source, schedule, folder, save_model=True)

    def finish() -> None:
        selected = checkpoint.selection(folder)
        write_json(folder / FINISHED, {"seconds": work.clock.seconds, "selected": selected})
        work.clock.discard()
        (folder / STATE).unlink(missing_ok=True)

    on_first(fabric, finish)


class _Setup:
    """The models of one run; leave-one-out selection trains several."""

    def __init__(self, work: Workplace, config: ResolvedConfig, backbone: Backbone) -> None:
        self.work, self.config, self.backbone = work, config, backbone
        self._initial = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}

    def new_model(self, source: SourceData) -> tuple[Algorithm, EpisodeSampler]:
        """Returns an algorithm with its initial weights, and the sampler of its episodes."""
        self.backbone.load_state_dict(self._initial)
        algorithm = make_algorithm(self.config, self.backbone, source)
        return algorithm, make_sampler(self.config, source)


def _train(
    setup: _Setup, source: SourceData, schedule: Schedule, folder: Path, *, save_model: bool
) -> None:
    """Trains one model, from the start or from the state that a killed run left in `folder`.

    Without `save_model` only its metrics are kept.
    """
    work, config = setup.work, setup.config
    fabric, workers = work.fabric, work.machine.workers
    algorithm, sampler = setup.new_model(source)
    loader = EpisodeLoader(source.train, sampler, workers=workers)
    images_a_step = sum(len(part) for part in sampler(0)[:2])
    work.say(
        f"{len(source.train)} training images of {len(source.domain_names)} domains, "
        f"{len(source.val)} to validate; {images_a_step} images a step."
    )
    if algorithm.closed_form:
        _solve(setup, algorithm, source, folder, save_model=save_model)
        return
    augment = AUGMENTATIONS[source.kind] if config.augment else unaugmented
    centres = source.train.balanced(config.centre_images, config.seed)
    if setup.backbone.pose is not None and not on_first(fabric, (folder / STATE).is_file):
        train_pose(
            work, setup.backbone, source, sampler, augment, steps=config.steps, seed=config.seed
        )
    state = start(fabric, algorithm, schedule)
    state.restore(fabric, folder, work.say)
    bar = work.progress.bar("Training", schedule.last, state.step)
    with metrics_log(fabric, folder) as log, bar as advance:
        selection = _selection(setup, source, centres, log, folder if save_model else None)
        for step, losses in fit(fabric, state, loader, augment, schedule):
            if step % LOG_EVERY == 0 or step == schedule.last:
                line = {"step": step} | {name: value.item() for name, value in losses.items()}
                log(line)
            if schedule.validates_at(step):
                state.best = selection.validate(state, is_last=step == schedule.last)
                on_first(fabric, partial(state.save, folder))
            if step % LOG_EVERY == 0 or schedule.validates_at(step):
                advance(0, _progress_note(losses["loss"].item(), state.best))
            advance(1)


def _solve(
    setup: _Setup, algorithm: Algorithm, source: SourceData, folder: Path, *, save_model: bool
) -> None:
    """Solves the classifier of an algorithm that has a closed form.

    Without `save_model` only its metrics are kept.
    """
    work = setup.work
    centres = source.train.balanced(setup.config.centre_images, setup.config.seed)
    state = TrainingState(algorithm, algorithm, None, algorithm, step=1)
    closed_form.solve(work, algorithm, source)
    with metrics_log(work.fabric, folder) as log:
        selection = _selection(setup, source, centres, log, folder if save_model else None)
        selection.validate(state, is_last=True)


def _selection(
    setup: _Setup, source: SourceData, centres: LabelledImages, log: Log, folder: Path | None
) -> Selection:
    stored = setup.backbone if setup.config.reads_stored else None
    return Selection(setup.work, source.val, centres, log, folder, stored)


def _progress_note(loss: float, best: Score | None) -> str:
    note = "" if best is None else f", best validation accuracy {100 * best.accuracy:.1f}%"
    return f"loss {loss:.3f}{note}"


def _best_step(setup: _Setup, source: SourceData, schedule: Schedule, folder: Path) -> int:
    """Returns the step with the best accuracy on source domains that were not trained on.

    Each source domain is held out once; the accuracies of a step are averaged over them. With SWAD
    they are those of the weights of single steps: the held-out domain leaves no validation loss of
    the others that could choose an average.
    """
    if schedule.average == SWAD:
        schedule = replace(schedule, average=None)
    fabric = setup.work.fabric
    curves = []
    for number, name in enumerate(source.domain_names):
        # The number, since names may differ in other characters alone: -15 and 15.
        fold = folder / f"{number}-{normalise_name(name)[:40]}"
        if not on_first(fabric, (fold / FINISHED).is_file):
            setup.work.say(f"Leaving {name} out:")
            _train(setup, source.holding_out(number), schedule, fold, save_model=False)
            on_first(fabric, partial(_finish_fold, fold))
        curves.append(on_first(fabric, partial(validation_curve, fold)))
    if len({frozenset(curve) for curve in curves}) > 1 or not curves[0]:
        raise UserError(
            f"the trainings in {folder} were not validated at the same steps: a metrics.jsonl in "
            "it is damaged. Delete that folder and resume."
        )
    mean = {step: sum(curve[step] for curve in curves) / len(curves) for step in curves[0]}
    return max(mean, key=lambda step: (mean[step], -step))


def _finish_fold(fold: Path) -> None:
    write_json(fold / FINISHED, {})
    (fold / STATE).unlink(missing_ok=True)
