"""Scoring a finished run: what its predictions on unseen domains are worth, as records."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from solodg.runs import checkpoint
from solodg.adapters import Adapter
from solodg.runs.build import Say, inputs, single_device
from solodg.runs.config import Machine, RunConfig, portable
from solodg.data import DomainDataset, LabelledImages
from solodg.errors import UserError
from solodg.runs.metrics import metrics, predict
from solodg.runs.predictions import Predictions
from solodg.progress import Advance, NoProgress, Progress
from solodg.runs.folder import (
    FINISHED,
    RESULTS,
    VERSIONS,
    machine_kind,
    read_machine,
)
from solodg.runs.scored_data import open_scored
from solodg.storage import append_lines, read_json
from solodg.runs.stream import Stream, adapter_arguments, make_adapter, predict_stream
from solodg.runs.target_images import show_target
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
    progress: Progress | None = None,
    say: Say = lambda text: None,
) -> list[Record]:
    """Score the saved model on its target domains, and on unseen images of its sources.

    `machine` and `dataset` say where the data lies, if it has moved since training. An adapter, or
    a given `stream`, is scored on the target domains alone, in the stream's order and batches.
    """
    progress = progress or NoProgress()
    algorithm, info = checkpoint.load(folder)
    plainly = adapter == "none" and stream is None
    stream = stream or Stream()
    arguments = adapter_arguments(adapter, stream.arguments)
    device = single_device(accelerator)
    algorithm.to(device)
    make_adapter(adapter, algorithm, arguments)  # a mistake is told before data is read
    if algorithm.target_images and not plainly:
        raise UserError(
            f"{info.algorithm} needs {algorithm.target_images} images of each domain before it "
            "predicts any: it has no stream. Score it without --adapter and --stream."
        )
    config, data, opened = open_scored(
        folder,
        algorithm,
        info,
        machine or read_machine(folder),
        device,
        dataset=dataset,
        needs_images=not plainly,  # so that a stream's time is that of all who have one
        skip_bad_images=skip_bad_images,
        progress=progress,
        say=say,
    )
    parts = [(role, part) for role, part, _ in opened]
    model = make_adapter(adapter, algorithm, arguments).eval()
    if plainly:
        scored = _plainly(model, parts, device, progress)
    else:
        targets = [stream.of(part) for role, part in parts if role == "target"]
        scored = _as_a_stream(model, targets, stream, device, progress)
    came = stream.model_copy(update={"arguments": arguments}).model_dump()
    common = {
        "dataset": data.name,
        "algorithm": config.algorithm,
        "variant": config.variant,
        "adapter": adapter,
        "target": list(config.targets),
        "seed": config.seed,
        "protocol": protocol(data, config),
        "config": portable(config),
        "versions": read_json(folder / VERSIONS),
        "data": {"fingerprint": data.fingerprint(), "images": len(data.labels)} | data.facts,
        "stream": {} if plainly else came,
        "machine": machine_kind(device),
    }
    records = [_record(one, common, folder) for one in scored]
    append_lines(folder / RESULTS, [record.model_dump() for record in records])
    return records


class _Scored(NamedTuple):
    role: str
    part: LabelledImages
    result: Predictions
    seconds: float
    shown: int = 0  # images of the domain that the method saw first, without labels


def _record(one: _Scored, common: dict[str, Any], folder: Path) -> Record:
    seen = {"target_images": one.shown} if one.shown else {}
    return Record(
        **common | {"stream": common["stream"] | seen},
        domain=one.part.domain_name,
        role=one.role,
        metrics=metrics(one.result, one.part.labels),
        time={
            "seconds": round(one.seconds, 3),
            **_training_time(folder),
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
    )


def _plainly(
    model: Adapter,
    parts: Sequence[tuple[str, LabelledImages]],
    device: torch.device,
    progress: Progress,
) -> list[_Scored]:
    """In order and in large batches: predictions do not depend on either."""
    scored = []
    for role, part in parts:
        started = time.perf_counter()
        shown = show_target(model.algorithm, part, device)
        with progress.bar(f"Scoring {part.domain_name}", len(part)) as advance:
            result = predict(
                model.probabilities, inputs(part), device=device, advance=partial(_one, advance)
            )
        scored.append(_Scored(role, part, result, time.perf_counter() - started, shown))
    return scored


def _as_a_stream(
    model: Adapter,
    parts: Sequence[LabelledImages],
    stream: Stream,
    device: torch.device,
    progress: Progress,
) -> list[_Scored]:
    count = sum(len(part) for part in parts)
    started = time.perf_counter()
    with progress.bar("Adapting and scoring", count) as advance:
        found = predict_stream(model, parts, stream, device, partial(_one, advance))
    seconds = time.perf_counter() - started  # shared out by the number of images
    return [
        _Scored("target", part, result, seconds * len(part) / count)
        for part, result in zip(parts, found, strict=True)
    ]


def _one(advance: Advance, count: int) -> None:
    advance(count)


def _training_time(folder: Path) -> dict[str, float]:
    """What a finished run took; one that was stopped before its end can be scored too."""
    finished = folder / FINISHED
    return {"training_seconds": read_json(finished)["seconds"]} if finished.is_file() else {}


def protocol(dataset: DomainDataset, config: RunConfig) -> str:
    """How the data was divided: the dataset's own way, or a seeded one with its share."""
    if config.score_on:
        return f"{dataset.protocol}, targets scored on {config.score_on} images"
    if dataset.protocol.endswith("random-split") or dataset.protocol == "grouped-split":
        return f"{dataset.protocol}-{config.val_fraction:g}-seed-{config.seed}"
    return dataset.protocol
