"""Averages the weights of finished runs into the model of a new run folder (DiWA).

Rame et al., "Diverse Weight Averaging for Out-of-Distribution Generalization", NeurIPS 2022: runs
from the same initial weights with other settings can be averaged, and their mean is one model. It
is uniform over all runs, or greedy (theirs is called restricted): from the best run by source
validation on, each other one, best first, stays if the mean with it validates at least as well.

What `Algorithm.finalize` computes is computed anew on the source images, for the averaged weights.
Numbers that are no floating-point ones, such as counters, are those of the best run. So are the
configuration and the seed of the new folder; `averaged.json` names every run and how its settings
differ. The running statistics of BatchNorms are averaged like weights.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from solodg.errors import UserError
from solodg.models.backbones import Backbone
from solodg.progress import NoProgress, Progress, Say
from solodg.runs import checkpoint
from solodg.runs.averaged_runs import AVERAGED, AveragedRun, AveragedRuns
from solodg.runs.build import row_store, with_features
from solodg.runs.config import Machine
from solodg.runs.devices import single_device
from solodg.runs.fitting_runs import FinishedRun, fitting_runs
from solodg.runs.folder import (
    CONFIG,
    EVIDENCE,
    FINISHED,
    claim,
    portable,
    read_evidence,
    read_machine,
    read_seconds,
    training_lock,
)
from solodg.runs.model_card import write_card
from solodg.runs.opened_data import open_source, read_source, with_shared_groups
from solodg.runs.scored_data import reading_features
from solodg.runs.training_state import Score
from solodg.runs.validation import validate
from solodg.storage import write_json

State = dict[str, Tensor]
Chosen = tuple[list[FinishedRun], State, Score]  # averaged runs, their mean, its validation score


def average_runs(
    folders: Sequence[Path],
    output: Path,
    *,
    greedy: bool = False,
    machine: Machine | None = None,
    accelerator: str = "auto",
    progress: Progress | None = None,
    say: Say = lambda text: None,
) -> AveragedRuns:
    """Writes a run folder with the mean of the weights of finished runs; returns what it is of.

    `machine` says where the data lies, if it has moved since training. Raises `UserError` for runs
    that do not fit together, before anything is computed.
    """
    if (output / CONFIG).is_file():
        raise UserError(f"{output} holds a run already. Choose another folder with --output.")
    runs = fitting_runs(folders)
    runs.sort(key=lambda run: run.score, reverse=True)
    first = runs[0]
    judge = _Judge(first, machine or read_machine(first.folder), accelerator, progress, say)
    with training_lock(output):
        chosen, state, score = (_greedy if greedy else _uniform)(runs, judge, say)
        steps = max(run.selection["step"] for run in chosen)
        made = _describe(runs, chosen, "greedy" if greedy else "uniform")
        judge.algorithm.load_state_dict(state)
        checkpoint.save_info(output, first.info)
        checkpoint.save_weights(
            output,
            judge.algorithm,
            step=steps,
            runs=len(chosen),
            validation={"accuracy": score.accuracy, "nll": -score.negative_nll},
        )
        write_json(output / AVERAGED, made.model_dump(mode="json"))
        evidence = read_evidence(first.folder)
        if evidence:
            write_json(output / EVIDENCE, evidence)
        claim(output, first.config, judge.machine, first.origin)
        write_card(output)
        seconds = sum(read_seconds(run.folder / FINISHED) for run in runs)
        selected = checkpoint.selection(output)
        write_json(output / FINISHED, {"seconds": seconds, "selected": selected})
    return made


class _Judge:
    """Finalises averaged weights on source images and scores them on validation images."""

    def __init__(
        self,
        run: FinishedRun,
        machine: Machine,
        accelerator: str,
        progress: Progress | None,
        say: Say,
    ) -> None:
        self.machine, self.device = machine, single_device(accelerator)
        self.algorithm = run.load().to(self.device)
        config = with_shared_groups(run.config)
        source, config = open_source(config, machine)
        progress = progress or NoProgress()
        self.store = None
        if config.reads_stored:
            assert isinstance(self.algorithm.backbone, Backbone)
            backbone = self.algorithm.backbone
            self.store = row_store(config, machine, backbone, self.device, progress, say)
        source = read_source(source, config, progress, say, self.store)
        if source.fingerprint() != run.origin.fingerprint:
            raise UserError(
                f"the source images are not those that {run.folder} was trained on: class centres "
                "and validation need them. Restore them, or say where they are with --data-dir."
            )
        if self.store is not None:
            source = with_features(source, self.store)
        self.val = source.val
        self.centres = source.train.balanced(config.centre_images, config.seed)

    def finalised(self, state: State) -> tuple[State, Score]:
        """Returns the weights with what `finalize` computes for them, and their score."""
        self.algorithm.load_state_dict(state)
        reading = self.algorithm
        if self.store is not None:
            reading = reading_features(self.algorithm, self.store)
        score = validate(reading.eval(), self.val, self.centres, self.device)
        # What is stored in place of images does not change the backbone.
        computed = {n: t for n, t in reading.state_dict().items() if not n.startswith("backbone.")}
        return {name: t.clone() for name, t in (state | computed).items()}, score


class _Sum:
    """The sum of the weights of some runs, in double precision."""

    def __init__(self) -> None:
        self.count, self.total, self.like = 0, State(), State()

    def with_(self, run: FinishedRun, state: Mapping[str, Tensor]) -> "_Sum":
        """Returns the sum with another run; raises `UserError` if its tensors are others."""
        more = _Sum()
        more.count, more.like = self.count + 1, self.like or dict(state)
        shapes = {n: t.shape for n, t in more.like.items()}
        wrong = [
            n for n in {**shapes, **state} if n not in state or state[n].shape != shapes.get(n)
        ]
        if wrong:
            raise UserError(
                f"{run.folder} does not fit the other runs: its weights {wrong[0]!r} have another "
                "shape. Their arguments (--set) differ in the size of the model."
            )
        for name, tensor in state.items():
            if tensor.is_floating_point():
                more.total[name] = tensor.double() + self.total.get(name, 0.0)
        return more

    def mean(self) -> State:
        """Returns the mean; numbers that are no floating-point ones are those of the first run."""
        mean = {n: (t / self.count).to(self.like[n].dtype) for n, t in self.total.items()}
        return self.like | mean


def _uniform(
    runs: list[FinishedRun], judge: _Judge, say: Say
) -> tuple[list[FinishedRun], State, Score]:
    """Averages all runs."""
    total = _Sum()
    for run in runs:
        total = total.with_(run, run.load().to(judge.device).state_dict())
    state, score = judge.finalised(total.mean())
    say(f"Mean of {len(runs)} runs: source validation accuracy {100 * score.accuracy:.1f}%.")
    return runs, state, score


def _greedy(
    runs: list[FinishedRun], judge: _Judge, say: Say
) -> tuple[list[FinishedRun], State, Score]:
    """Averages the best run and those, best first, with which the mean validates no worse."""
    total, chosen = _Sum(), list[FinishedRun]()
    best: tuple[State, Score] | None = None
    for run in runs:
        more = total.with_(run, run.load().to(judge.device).state_dict())
        found = judge.finalised(more.mean())
        stays = best is None or found[1].accuracy >= best[1].accuracy
        accuracy = f"source validation accuracy {100 * found[1].accuracy:.1f}%"
        say(f"With {run.folder}: {accuracy}, {'it stays' if stays else 'left out'}.")
        if stays:
            total, best = more, found
            chosen.append(run)
    assert best is not None
    return chosen, *best


def _describe(runs: list[FinishedRun], chosen: list[FinishedRun], selection: str) -> AveragedRuns:
    first = portable(runs[0].config)

    def described(run: FinishedRun) -> AveragedRun:
        differing = {n: v for n, v in portable(run.config).items() if v != first[n]}
        return AveragedRun(
            run=run.folder.resolve().name,
            seed=run.config.seed,
            step=run.selection["step"],
            validation=run.selection["validation"],
            settings=differing,
        )

    return AveragedRuns(
        selection=selection,
        runs=[described(run) for run in chosen],
        left_out=[described(run) for run in runs if run not in chosen],
    )
