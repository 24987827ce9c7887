"""The beginning of a run: opens its data and its backbone, and claims its folder."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from lightning_fabric import Fabric

from solodg.algorithms import Algorithm
from solodg.data import DomainDataset, SourceData
from solodg.data.episodes import EpisodeSampler
from solodg.models.backbones import Backbone
from solodg.progress import NoProgress, Progress, Say
from solodg.runs.build import (
    feature_store,
    make_algorithm,
    make_backbone,
    make_sampler,
    row_store,
    with_pseudo_domains,
    with_rows,
)
from solodg.runs.clock import Clock
from solodg.runs.config import Machine, ResolvedConfig, RunConfig
from solodg.runs.defaults import resolve
from solodg.runs.devices import ending_together, launch, on_first
from solodg.runs.folder import check_unchanged, claim, is_finished, training_lock
from solodg.runs.loggers import check_loggers
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
from solodg.runs.workplace import Workplace
from solodg.seeding import derive, unchanged_generators

LEAVE_ONE_OUT = "leave-one-out"  # value of `select`, and folder of the trainings that choose


class Setup:
    """The models of one run; leave-one-out selection trains several."""

    def __init__(self, work: Workplace, config: ResolvedConfig, backbone: Backbone) -> None:
        self.work, self.config, self.backbone = work, config, backbone
        self._initial = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}

    def new_model(self, source: SourceData) -> tuple[Algorithm, EpisodeSampler]:
        """Returns an algorithm with its initial weights, and the sampler of its episodes."""
        self.backbone.load_state_dict(self._initial)
        algorithm = make_algorithm(self.config, self.backbone, source)
        return algorithm, make_sampler(self.config, source)


@dataclass(frozen=True)
class BegunRun:
    """A run whose folder is claimed, with what its training needs."""

    work: Workplace
    config: ResolvedConfig
    source: SourceData  # as training reads it: pixels, or stored features or maps
    images: SourceData  # the same as pixels
    backbone: Backbone  # reads images in every way that the configuration leaves open


@contextmanager
def begin(
    config: RunConfig,
    machine: Machine,
    folder: Path,
    *,
    data: DomainDataset | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    say: Say = lambda text: None,
    show: ShowData | None = None,
) -> Iterator[BegunRun | None]:
    """Begins or continues a run and locks its folder until the end; yields None if it is finished.

    `data` is the dataset of the configuration if it is loaded already. Raises `UserError` for a run
    that cannot be trained, before it claims its folder, and for one that began with other data,
    weights or versions.
    """
    resolved = resolve(config)
    check_loggers(machine.logger)
    fabric = launch(resolved, machine)
    if not fabric.is_global_zero:
        progress, say, show = NoProgress(), lambda text: None, None
    progress = progress or NoProgress()
    with unchanged_generators(), ending_together(fabric), ExitStack() as until_end:
        with progress.stage("Opening the data"):
            source, config = open_source(resolved, machine, show or remarks_to(say), data)
        if on_first(fabric, partial(_is_finished, folder, config, resume, until_end)):
            say(f"{folder} is finished already: nothing to do.")
            yield None
        else:
            yield _claimed(fabric, config, machine, folder, source, progress, say)


def _is_finished(folder: Path, config: ResolvedConfig, resume: bool, until_end: ExitStack) -> bool:
    """Returns whether the run is finished already; if not, locks its folder until the end."""
    if is_finished(folder, config, resume=resume):
        return True
    until_end.enter_context(training_lock(folder))
    return is_finished(folder, config, resume=resume)  # another process may have finished it


def _claimed(
    fabric: Fabric,
    config: ResolvedConfig,
    machine: Machine,
    folder: Path,
    source: SourceData,
    progress: Progress,
    say: Say,
) -> BegunRun:
    """Opens images and backbone, compares them with those of before, and claims the folder."""
    if source.shared_groups:
        say(
            f"{source.shared_groups} group(s) have images both in the source domains and among the "
            "target images to score: the score will not be one of unseen groups."
        )
    work = Workplace(fabric, machine, Clock(folder), progress, say)
    # Until held-out domains have decided, one that can read images in every way that is open.
    most = candidates(config, None).all_parts(config) if config.open_parts else config
    torch.manual_seed(derive(config.seed, "weights"))
    with progress.stage("Building the backbone"):
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
    Setup(work, most, backbone).new_model(source)
    if config.select == LEAVE_ONE_OUT:
        check_folds(source)
    on_first(fabric, partial(claim, folder, config, machine, origin))
    return BegunRun(work, config, source, images, backbone)
