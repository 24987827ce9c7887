"""A final model on all domains, after each of them was left out in turn to see what to expect.

Every turn is an ordinary run in a folder of its own, with one domain as its target: one of the
chosen method, and one of ERM. The final model takes over what the turns chose: the number of steps
and the parts of the adaptation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solodg.data.domains import normalise_name
from solodg.errors import UserError
from solodg.progress import Progress, Say
from solodg.runs.begin import LEAVE_ONE_OUT, begin
from solodg.runs.checkpoint import DESCRIPTION, load_info, selection
from solodg.runs.config import OFF_VALUES, Machine, ResolvedConfig, RunConfig
from solodg.runs.defaults import is_closed_form, resolve
from solodg.runs.evaluate import evaluate_run
from solodg.runs.evidence import Evidence
from solodg.runs.folder import (
    ESTIMATE,
    EVIDENCE,
    RESULTS,
    TURNS,
    read_evidence,
    training_lock,
)
from solodg.runs.folds import FOLDS
from solodg.runs.opened_data import (
    ShowData,
    check_folds,
    load_dataset,
    source_domains,
)
from solodg.runs.site_estimate import (
    SiteEstimate,
    SiteScores,
    differences,
    method_scores,
)
from solodg.runs.train import train_run
from solodg.runs.turn_choices import chosen_steps, evidence_of_turns
from solodg.storage import read_lines, write_json
from solodg.types import Record

LEAST_DOMAINS = 3
MODEL, ERM = "model", "erm"  # the methods of each turn, and their folders


def train_with_estimate(
    config: RunConfig,
    machine: Machine,
    folder: Path,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    say: Say = lambda text: None,
    show: ShowData | None = None,
) -> Path:
    """Estimates the scores on a new site, then trains the final model on all domains.

    Each domain is left out in turn, by runs in `folder/estimate`. With `resume` it continues where
    it was stopped; what is finished is not run again. `config` is one without targets, as given:
    `resolve` completes it for the method and for ERM.
    """
    methods = _methods(config)
    final = methods[MODEL]
    names = _check_domains(methods, machine)
    if resume:
        _check_resumed(folder)
    begun = begin(final, machine, folder, resume=resume, progress=progress, say=say, show=show)
    with begun as run:  # compares data, weights and versions with those of before
        finished = run is None
    if finished:
        return folder
    with training_lock(folder / TURNS):
        say(
            f"Leaving {len(names)} domains out in turn: {len(names) * len(methods)} trainings "
            "before the final one."
        )
        turns = [
            _run_turn(_Turn(folder, number, len(names), name, methods), machine, progress, say)
            for number, name in enumerate(names)
        ]
        estimate = _estimate(turns, final.seed)
        write_json(folder / ESTIMATE, estimate.model_dump(mode="json"))
        if final.open_parts and not (folder / EVIDENCE).is_file():
            evidence = evidence_of_turns({turn.domain: turn.evidence() for turn in turns})
            write_json(folder / EVIDENCE, evidence.model_dump(mode="json"))
        say(estimate.sentence())
        if not is_closed_form(final):
            selected = ", ".join(str(site.steps) for site in estimate.model.sites)
            steps = f"{estimate.steps}, the median of the turns' ({selected})"
            say(f"Steps of the final model: {steps}.")
        train_run(
            final,
            machine,
            folder,
            resume=True,
            stop=estimate.steps,
            progress=progress,
            say=say,
            show=_show_nothing,
        )
    return folder


@dataclass(frozen=True)
class _Turn:
    """The runs that leave one domain out."""

    parent: Path
    number: int
    count: int  # of all turns
    domain: str
    methods: dict[str, ResolvedConfig]

    def folder(self, method: str) -> Path:
        """Returns the run folder of a method."""
        # The number, since names may differ in other characters alone: -15 and 15.
        name = f"{self.number}-{normalise_name(self.domain)[:40]}"
        return self.parent / TURNS / name / method

    def evidence(self) -> Evidence:
        """Reads what held-out source domains decided about the adaptation."""
        return Evidence.model_validate(read_evidence(self.folder(MODEL)))

    def scores(self, method: str) -> SiteScores:
        """Reads the scores of a method on the domain that was left out."""
        folder = self.folder(method)
        record, info = next(_target_records(folder)), load_info(folder)
        return SiteScores(
            domain=self.domain,
            run=str(folder.relative_to(self.parent)),
            metrics=record.metrics,
            protocol=record.protocol,
            steps=selection(folder)["step"],
            image_norm=info.image_norm or None,
            pose=info.pose,
        )


def _methods(config: RunConfig) -> dict[str, ResolvedConfig]:
    """Returns the completed configurations of the method and of ERM; only one if it is ERM."""
    if isinstance(config, ResolvedConfig):
        raise TypeError("give the configuration before `resolve`, which differs for ERM")
    if config.targets:
        raise UserError(
            f"--estimate leaves every domain out in turn, and --target {config.targets[0]} leaves "
            "out that one: give one of them. To keep a domain out of everything, use --exclude."
        )
    if config.devices != "1" or config.num_nodes > 1:
        raise UserError(
            "--estimate trains its turns one after another, on one device: leave out --devices and "
            "--num-nodes."
        )
    # Targets only now: `resolve` would leave the default target of a dataset out.
    model = resolve(config).model_copy(update={"targets": ()})
    plain: dict[str, Any] = {
        "algorithm": "erm",
        "variant": "default",
        "arguments": {},
        "freeze_backbone": model.freeze_backbone,
    }
    for name in ("image_norm", "pose"):  # off in ERM, whether given or not
        given = getattr(config, name)
        plain[name] = given if given == OFF_VALUES[name] else None
    erm = resolve(config.model_copy(update=plain)).model_copy(update={"targets": ()})
    return {MODEL: model} if erm == model else {MODEL: model, ERM: erm}


def _check_domains(methods: dict[str, ResolvedConfig], machine: Machine) -> list[str]:
    """Returns the domains to leave out in turn; raises `UserError` if one of them cannot be."""
    config = methods[MODEL]
    dataset = load_dataset(config, machine)
    excluded = dataset.canonical(config.exclude or ())
    names = [name for name in dataset.domain_names if name not in excluded]
    if len(names) < LEAST_DOMAINS:
        there = f"there {'is' if len(names) == 1 else 'are'} {len(names)} ({', '.join(names)})"
        raise UserError(
            f"--estimate leaves each domain out and trains on the others: it needs at least "
            f"{LEAST_DOMAINS} domains, and {there}. Add domains, or train without --estimate and "
            "score the model on a new site with `solodg evaluate RUN --on SITE`."
        )
    for name in names:
        try:
            source = source_domains(dataset, config.model_copy(update={"targets": (name,)}))
            if config.select == LEAVE_ONE_OUT:
                check_folds(source)
        except UserError as error:
            raise UserError(f"--estimate cannot leave {name!r} out: {error}") from error
    return names


def _check_resumed(folder: Path) -> None:
    """Raises `UserError` if the run in the folder has begun to train without its turns."""
    begun = any((folder / name).exists() for name in (DESCRIPTION, EVIDENCE, FOLDS))
    if begun and not (folder / TURNS).is_dir():
        raise UserError(
            f"{folder} holds a run that was begun without --estimate. Resume it without, or choose "
            "another folder with --output."
        )


def _run_turn(turn: _Turn, machine: Machine, progress: Progress | None, say: Say) -> _Turn:
    """Trains and scores the runs of a turn, unless they are finished."""
    for method, config in turn.methods.items():
        folder = turn.folder(method)
        where = f"Turn {turn.number + 1} of {turn.count}"
        say(f"{where}, {turn.domain} is left out: {config.algorithm}")
        config = config.model_copy(update={"targets": (turn.domain,)})
        train_run(
            config, machine, folder, resume=True, progress=progress, say=say, show=_show_nothing
        )
        if next(_target_records(folder), None) is None:
            accelerator = machine.accelerator
            evaluate_run(
                folder, accelerator=accelerator, same_sources=True, progress=progress, say=say
            )
    return turn


def _target_records(folder: Path) -> Iterator[Record]:
    """Yields the records of the model itself on the domain that was left out."""
    for line in read_lines(folder / RESULTS):
        record = Record.model_validate(line)
        plain = record.adapter == "none" and "batch_size" not in record.stream
        if record.role == "target" and plain:
            yield record


def _estimate(turns: list[_Turn], seed: int) -> SiteEstimate:
    """Computes the estimate from the scores of all turns."""
    methods = turns[0].methods
    found = {
        method: method_scores(
            config.algorithm, config.variant, [turn.scores(method) for turn in turns]
        )
        for method, config in methods.items()
    }
    model, erm = found[MODEL], found.get(ERM)
    return SiteEstimate(
        seed=seed,
        model=model,
        erm=erm,
        difference=differences(model, erm) if erm else {},
        steps=chosen_steps([site.steps for site in model.sites]),
    )


def _show_nothing(summary: object) -> None:
    """Shows nothing: the data was shown when the run began."""
