"""One run: a configuration -> a folder with the selected model.

`train_run` reads from top to bottom: data, model, folder, training, selection. Training gets a
SourceData, which does not hold the target domains.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from solodg.algorithms import Algorithm
from solodg.data import DomainDataset, LabelledImages, SourceData
from solodg.data.domains import normalise_name
from solodg.data.episodes import EpisodeLoader
from solodg.data.transforms import AUGMENTATIONS, unaugmented
from solodg.errors import UserError
from solodg.progress import Progress, Say
from solodg.runs import checkpoint, closed_form
from solodg.runs.begin import LEAVE_ONE_OUT, BegunRun, Setup, begin
from solodg.runs.build import describe_model, make_backbone, make_schedule, row_store, with_rows
from solodg.runs.calibration import calibrate
from solodg.runs.config import SWAD, Machine, RunConfig
from solodg.runs.devices import on_first
from solodg.runs.fit import Schedule, fit, start
from solodg.runs.folder import FINISHED, check_no_turns, portable
from solodg.runs.folds import gather_evidence
from solodg.runs.metrics_log import Log, metrics_log, validation_curve
from solodg.runs.model_card import write_card
from solodg.runs.opened_data import ShowData
from solodg.runs.pose_training import train_pose
from solodg.runs.selection import Selection
from solodg.runs.training_state import STATE, Score, TrainingState
from solodg.runs.workplace import Workplace
from solodg.seeding import derive
from solodg.storage import write_json

LOG_EVERY = 10  # steps


def train_run(
    config: RunConfig,
    machine: Machine,
    folder: Path,
    *,
    data: DomainDataset | None = None,
    resume: bool = False,
    stop: int | None = None,
    progress: Progress | None = None,
    say: Say = lambda text: None,
    show: ShowData | None = None,
) -> Path:
    """Trains a model, selects it on source validation images and leaves it in `folder`.

    Without targets it is trained on all domains. `data` is the dataset of the configuration if it
    is loaded already. With `resume` it continues a run that was killed; a finished run is left as
    it is. `stop` is the step after which training ends, if that is chosen already; it is then the
    selected one. `show` is called with a summary of the data; without it, `say` gets what was left
    out of the data.
    """
    begun = begin(
        config, machine, folder, data=data, resume=resume, progress=progress, say=say, show=show
    )
    with begun as run:
        if run is not None:
            if stop is None:
                check_no_turns(folder)
            _train_and_select(run, folder, stop)
    return folder


def _train_and_select(run: BegunRun, folder: Path, stop: int | None) -> None:
    work, config, source, backbone = run.work, run.config, run.source, run.backbone
    fabric, machine, progress, say = work.fabric, work.machine, work.progress, work.say
    if not config.targets:
        _say_all_domains(run, estimated=stop is not None)
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
            store = row_store(
                config, machine, backbone, fabric.device, progress, say, run.images.kind
            )
            with fabric.rank_zero_first():
                source = with_rows(source, run.images, store)
    on_first(fabric, partial(checkpoint.save_info, folder, describe_model(config, source)))
    setup = Setup(work, config, backbone)
    schedule = make_schedule(config)
    if config.select == LEAVE_ONE_OUT and stop is None:
        stop = _best_step(setup, source, schedule, folder / LEAVE_ONE_OUT)
        say(f"Leaving one source domain out: best after {stop} of {schedule.steps} steps.")
    if stop is not None:
        # SWAD needs the validations on the way; otherwise the chosen step is the selected one.
        every = schedule.validate_every if schedule.average == SWAD else stop
        schedule = replace(schedule, stop=stop, validate_every=every)
    algorithm = _train(setup, source, schedule, folder, save_model=True)
    leave_out = config.pseudo_domains is None  # those made of the images are no new domains
    on_first(
        fabric,
        partial(
            calibrate,
            folder,
            algorithm,
            source,
            fabric.device,
            seed=config.seed,
            leave_out=leave_out,
        ),
    )

    def finish() -> None:
        selected = checkpoint.selection(folder)
        write_card(folder)
        write_json(folder / FINISHED, {"seconds": work.clock.seconds, "selected": selected})
        work.clock.discard()
        (folder / STATE).unlink(missing_ok=True)

    on_first(fabric, finish)


def _say_all_domains(run: BegunRun, *, estimated: bool) -> None:
    """Says that no domain is left out, and what that means for the score on a new site."""
    names = run.images.domain_names
    but = f" but {', '.join(run.config.exclude)}" if run.config.exclude else ""
    run.work.say(f"Training on all domains{but}: {', '.join(names)}. None is left out to score.")
    if not estimated:
        run.work.say(
            "Nothing estimates the accuracy on a new site: --estimate does, by leaving each domain "
            "out in turn."
        )


def _train(
    setup: Setup, source: SourceData, schedule: Schedule, folder: Path, *, save_model: bool
) -> Algorithm:
    """Trains one model, from the start or from the state that a killed run left in `folder`.

    Without `save_model` only its metrics are kept. Returns it, with its last weights.
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
        return algorithm
    augment = AUGMENTATIONS[source.kind] if config.augment else unaugmented
    centres = source.train.balanced(config.centre_images, config.seed)
    if setup.backbone.pose is not None and not on_first(fabric, (folder / STATE).is_file):
        train_pose(
            work, setup.backbone, source, sampler, augment, steps=config.steps, seed=config.seed
        )
    state = start(fabric, algorithm, schedule)
    state.restore(fabric, folder, work.say)
    bar = work.progress.bar("Training", schedule.last, state.step)
    with _log(work, config, folder) as log, bar as advance:
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
    return algorithm


def _solve(
    setup: Setup, algorithm: Algorithm, source: SourceData, folder: Path, *, save_model: bool
) -> None:
    """Solves the classifier of an algorithm that has a closed form.

    Without `save_model` only its metrics are kept.
    """
    work = setup.work
    centres = source.train.balanced(setup.config.centre_images, setup.config.seed)
    state = TrainingState(algorithm, algorithm, None, algorithm, step=1)
    with work.progress.stage("Solving the classifier"):
        closed_form.solve(work, algorithm, source)
    with _log(work, setup.config, folder) as log:
        selection = _selection(setup, source, centres, log, folder if save_model else None)
        selection.validate(state, is_last=True)


def _log(work: Workplace, config: RunConfig, folder: Path) -> AbstractContextManager[Log]:
    settings = portable(config)
    return metrics_log(work.fabric, folder, work.machine.logger, settings, work.say)


def _selection(
    setup: Setup, source: SourceData, centres: LabelledImages, log: Log, folder: Path | None
) -> Selection:
    stored = setup.backbone if setup.config.reads_stored else None
    return Selection(setup.work, source.val, centres, log, folder, stored)


def _progress_note(loss: float, best: Score | None) -> str:
    note = "" if best is None else f", best validation accuracy {100 * best.accuracy:.1f}%"
    return f"loss {loss:.3f}{note}"


def _best_step(setup: Setup, source: SourceData, schedule: Schedule, folder: Path) -> int:
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
