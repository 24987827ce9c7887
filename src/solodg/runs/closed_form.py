"""Classifiers in closed form: solved for a run, and for the evidence on held-out domains."""

from collections.abc import Iterable
from functools import partial

from solodg.algorithms import Algorithm
from solodg.algorithms.base import Batches
from solodg.algorithms.ridge import Ridge
from solodg.data import LabelledImages, SourceData
from solodg.models.backbones import Backbone
from solodg.runs.build import make_algorithm
from solodg.runs.config import ResolvedConfig
from solodg.runs.evidence import held_out_images, score_combinations
from solodg.runs.open_parts import Candidates
from solodg.runs.opened_data import input_batches
from solodg.runs.workplace import Workplace
from solodg.types import Batch


def solve(work: Workplace, algorithm: Algorithm, source: SourceData) -> None:
    """Solves the classifier of an algorithm on the source data."""
    algorithm.to(work.fabric.device).eval()
    train, val = (_batches(work, part) for part in (source.train, source.val))
    algorithm.solve(train, val)


def solve_folds(
    work: Workplace,
    config: ResolvedConfig,
    source: SourceData,
    backbone: Backbone,
    options: Candidates,
    numbers: list[int],
) -> dict[int, dict[str, list[bool]]]:
    """Returns for each held-out domain which images each combination of parts gets right.

    All folds and combinations follow from one pass over the features: their sums are sums of the
    sums of domains and readings.
    """
    algorithm = make_algorithm(options.all_parts(config), backbone, source)
    assert isinstance(algorithm, Ridge)
    algorithm.to(work.fabric.device).eval()
    sums = algorithm.domain_sums(_batches(work, source.train))
    places = {reading: place for place, reading in enumerate(backbone.readings)}
    right: dict[int, dict[str, list[bool]]] = {}
    for number in numbers:
        held = held_out_images(source, number, config.seed)
        right[number] = {}
        for tried in options.combinations:
            algorithm.solve_without(sums, number, [places[reading] for reading in tried.readings])
            right[number] |= score_combinations(algorithm, held, [tried], work.fabric.device)
    return right


def _batches(work: Workplace, part: LabelledImages) -> Batches:
    return partial(_on_device, work, part)


def _on_device(work: Workplace, part: LabelledImages) -> Iterable[Batch]:
    for batch in input_batches(part):
        yield work.fabric.to_device(batch)
