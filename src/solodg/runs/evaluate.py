"""Scores a trained run on unseen domains and writes records of its metrics."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from solodg.adapters import Adapter
from solodg.adapters.none import NoAdapter
from solodg.data import DomainDataset, LabelledImages
from solodg.errors import UserError
from solodg.progress import NoProgress, Progress, Say
from solodg.runs import checkpoint
from solodg.runs.averaged_runs import read_averaged
from solodg.runs.class_metrics import all_metrics
from solodg.runs.config import Machine, ResolvedConfig
from solodg.runs.devices import single_device
from solodg.runs.folder import (
    FINISHED,
    RESULTS,
    machine_kind,
    portable,
    read_config,
    read_evidence,
    read_machine,
    read_seconds,
    read_versions,
)
from solodg.runs.metrics import predict
from solodg.runs.novelty import Novelty, load_novelty
from solodg.runs.opened_data import input_batches
from solodg.runs.predictions import Predictions
from solodg.runs.scored_data import ScoredPart, open_scored
from solodg.runs.site_data import PROTOCOL as NEW_SITE
from solodg.runs.site_data import open_site
from solodg.runs.site_estimate import read_estimate
from solodg.runs.stream import Stream, adapter_arguments, make_adapter, predict_stream
from solodg.runs.tables import UNSEEN
from solodg.runs.target_images import give_target_images
from solodg.storage import append_lines
from solodg.types import Record


def evaluate_run(
    folder: Path,
    machine: Machine | None = None,
    *,
    dataset: str | None = None,
    adapter: str = "none",
    stream: Stream | None = None,
    accelerator: str = "auto",
    skip_bad_images: bool = False,
    same_sources: bool = False,
    progress: Progress | None = None,
    say: Say = lambda text: None,
) -> list[Record]:
    """Scores the saved model as `score_run` does, and appends the records to the run's results."""
    scored = score_run(
        folder,
        machine,
        dataset=dataset,
        adapter=adapter,
        stream=stream,
        accelerator=accelerator,
        skip_bad_images=skip_bad_images,
        same_sources=same_sources,
        progress=progress,
        say=say,
    )
    records = [domain.record for domain in scored]
    append_records(folder, records)
    return records


class ScoredRecord(NamedTuple):
    """The record of one domain, with the predictions that it was computed from."""

    record: Record
    predictions: Predictions
    labels: NDArray[np.int64]  # (N,) the true class of each image
    groups: NDArray[np.int64] | None  # (N,) the group of each image


def score_run(
    folder: Path,
    machine: Machine | None = None,
    *,
    on: Path | DomainDataset | None = None,
    dataset: str | None = None,
    adapter: str = "none",
    stream: Stream | None = None,
    accelerator: str = "auto",
    skip_bad_images: bool = False,
    same_sources: bool = False,
    progress: Progress | None = None,
    say: Say = lambda text: None,
) -> list[ScoredRecord]:
    """Scores the saved model on its target domains, and on held-out images of its sources.

    A run without targets is scored on the latter alone. With `on`, labelled images in a folder, a
    CSV or a loaded dataset (see `open_site`), it is scored on these alone, and needs no training
    data. `machine` and `dataset` say where the data lies, if it has moved since training. An
    adapter, or a given `stream`, is scored on unseen domains alone, in the stream's order and
    batches. With `same_sources`, source images that are not those of the training are an error.
    Nothing is written.
    """
    progress = progress or NoProgress()
    algorithm, info = checkpoint.load(folder)
    as_stream = adapter != "none" or stream is not None
    stream = stream or Stream()
    arguments = adapter_arguments(adapter, stream.arguments)
    device = single_device(accelerator)
    algorithm.to(device)
    make_adapter(adapter, algorithm, arguments)  # reports a mistake before data is read
    if algorithm.target_images and as_stream:
        raise UserError(
            f"{info.algorithm} needs {algorithm.target_images} images of each domain before it "
            "predicts any: it has no stream. Score it without --adapter and --stream."
        )
    if on is None and not read_config(folder).targets:
        _explain_no_target(folder, as_stream, say)
    if on is not None:
        config = read_config(folder)
        data, parts = open_site(
            on, info, skip_bad_images=skip_bad_images, progress=progress, say=say
        )
    else:
        config, data, parts, algorithm = open_scored(
            folder,
            algorithm,
            info,
            machine or read_machine(folder),
            device,
            dataset=dataset,
            needs_images=as_stream,  # so that times compare between frozen and other backbones
            skip_bad_images=skip_bad_images,
            same_sources=same_sources,
            progress=progress,
            say=say,
        )
    model = make_adapter(adapter, algorithm, arguments).eval()
    novelty = load_novelty(folder)
    if novelty is not None:
        novelty.to(device)
    if as_stream:
        unseen = [part for part in parts if part.role in UNSEEN]
        scored = _score_stream(model, unseen, stream, device, progress)
    else:
        scored = _score_parts(model, parts, device, progress, novelty)
    stream_settings = stream.model_copy(update={"arguments": arguments}).model_dump()
    common = _common_fields(folder, config, data) | {
        "adapter": adapter,
        "stream": stream_settings if as_stream else {},
        "machine": machine_kind(device),
        "protocol": protocol(data, config) if on is None else NEW_SITE,
    }
    return [
        ScoredRecord(
            _record(domain, common, folder),
            domain.predictions,
            domain.images.labels,
            domain.images.groups,
        )
        for domain in scored
    ]


def _explain_no_target(folder: Path, as_stream: bool, say: Say) -> None:
    """Says what can be scored of a run without targets; raises `UserError` for a stream."""
    trained = f"{folder} was trained on all domains: none is left out."
    if as_stream:
        raise UserError(
            f"{trained} Streams are of unseen domains: name labelled images of one with --on "
            "FOLDER or --on FILE.csv."
        )
    say(
        f"{trained} Scored are held-out images of the domains that it has seen, which say little "
        "about a new site. For that, name labelled images of one with --on FOLDER or --on FILE.csv."
    )
    estimate = read_estimate(folder)
    say(estimate.sentence() if estimate else "No estimate for a new site was made (--estimate).")


def append_records(folder: Path, records: Sequence[Record]) -> None:
    """Appends records to the results of a run."""
    append_lines(folder / RESULTS, [record.model_dump() for record in records])


def _common_fields(folder: Path, config: ResolvedConfig, data: DomainDataset) -> dict[str, Any]:
    """Returns the fields that all records of a run share, however it is scored."""
    averaged = read_averaged(folder)
    return {
        "dataset": data.name,
        "algorithm": config.algorithm,
        "variant": config.variant,
        "target": list(config.targets),
        "seed": config.seed,
        "config": portable(config),
        "versions": read_versions(folder),
        "evidence": {k: v for k, v in read_evidence(folder).items() if k != "seconds"},
        "averaged": averaged.model_dump() if averaged else {},
        "data": {"fingerprint": data.fingerprint(), "images": len(data.labels)} | data.facts,
    }


class _ScoredDomain(NamedTuple):
    role: str
    images: LabelledImages
    predictions: Predictions
    seconds: float
    target_images: int = 0  # unlabelled images that the method was given before it predicted


def _record(scored: _ScoredDomain, common: dict[str, Any], folder: Path) -> Record:
    given = {"target_images": scored.target_images} if scored.target_images else {}
    return Record(
        **common | {"stream": common["stream"] | given},
        domain=scored.images.domain_name,
        role=scored.role,
        metrics=all_metrics(scored.predictions, scored.images.labels),
        time={
            "seconds": round(scored.seconds, 3),
            **_training_time(folder),
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
    )


def _score_parts(
    model: Adapter,
    parts: Sequence[ScoredPart],
    device: torch.device,
    progress: Progress,
    novelty: Novelty | None,
) -> list[_ScoredDomain]:
    """Scores images in order and in large batches: predictions do not depend on either."""
    counted = isinstance(model, NoAdapter) and model.algorithm.exits_early
    run = model.algorithm.outputs if counted else model.probabilities
    scored = []
    for role, images, _ in parts:
        started = time.perf_counter()
        given = give_target_images(model.algorithm, images, device)
        with progress.bar(f"Scoring {images.domain_name}", len(images)) as advance:
            batches = input_batches(images)
            result = predict(run, batches, device=device, advance=advance, novelty=novelty)
        seconds = time.perf_counter() - started
        scored.append(_ScoredDomain(role, images, result, seconds, given))
    return scored


def _score_stream(
    model: Adapter,
    parts: Sequence[ScoredPart],
    stream: Stream,
    device: torch.device,
    progress: Progress,
) -> list[_ScoredDomain]:
    """Scores the unseen domains as one stream; each gets its share of the time, by images."""
    targets = [stream.draw(part.images) for part in parts]
    count = sum(len(images) for images in targets)
    started = time.perf_counter()
    with progress.bar("Adapting and scoring", count) as advance:
        results = predict_stream(model, targets, stream, device, advance)
    seconds = time.perf_counter() - started
    return [
        _ScoredDomain(part.role, images, result, seconds * len(images) / count)
        for part, images, result in zip(parts, targets, results, strict=True)
    ]


def _training_time(folder: Path) -> dict[str, float]:
    """Returns the seconds of training, if it is finished: a run can be scored before its end."""
    finished = folder / FINISHED
    if not finished.is_file():
        return {}
    found = {"training_seconds": read_seconds(finished)}
    evidence = read_evidence(folder)
    return found | ({"evidence_seconds": evidence["seconds"]} if evidence else {})


def protocol(dataset: DomainDataset, config: ResolvedConfig) -> str:
    """Returns the name of the way the data was split, with share and seed of a random split.

    It also says if validation images of the targets are scored, and if groups are shared.
    """
    text = dataset.protocol
    if text.endswith("random-split") or text == "grouped-split":
        text += f"-{config.val_fraction:g}-seed-{config.seed}"
    if config.score_on:
        text += f", targets scored on {config.score_on} images"
        if dataset.groups is not None:
            text += ", whose groups may be among the validation images of the sources"
    if shared := dataset.facts.get("shared_groups"):
        text += f", {shared} group{'s' * (shared > 1)} both in the sources and in the scored images"
    return text
