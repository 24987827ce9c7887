"""Scoring a finished run: the first and only place where its target domains are read."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from solodg import checkpoint
from solodg.adapters import ADAPTERS, Adapter
from solodg.algorithms import Algorithm
from solodg.assembly import (
    Say,
    feature_store,
    inputs,
    load_dataset,
    read_source,
    readable,
    single_device,
    with_features,
)
from solodg.backbones import Backbone, ReadyFeatures
from solodg.config import Machine, RunConfig, portable
from solodg.data import DomainDataset, LabelledImages, SourceData
from solodg.data.domains import TEST, VAL
from solodg.data.transforms import to_unit
from solodg.errors import UserError
from solodg.evaluation import Predictions, metrics, predict
from solodg.features import FeatureStore
from solodg.progress import Advance, NoProgress, Progress
from solodg.runfolder import (
    FINISHED,
    RESULTS,
    SOURCE,
    VERSIONS,
    machine_kind,
    read_config,
    read_machine,
)
from solodg.seeding import numpy_generator
from solodg.storage import append_lines, read_json
from solodg.stream import Stream, make_adapter, predict_stream
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

    `machine` and `dataset` say where the data lies, if it has moved since training. An adapter is
    scored on the target domains alone, in the order and batches of `stream`.
    """
    progress = progress or NoProgress()
    algorithm, info = checkpoint.load(folder)
    config = _moved(read_config(folder), dataset, skip_bad_images)
    machine = machine or read_machine(folder)
    stream = stream or Stream()
    make_adapter(adapter, algorithm, stream.arguments)  # a mistake is told before data is read
    data = load_dataset(config, machine)
    if list(data.classes) != info.classes:
        raise UserError(
            f"the classes of the data ({_shortened(data.classes)}) are not those of the model "
            f"({_shortened(info.classes)}): has a folder been renamed, added or removed?"
        )
    device = single_device(accelerator)
    store = None
    if config.freeze_backbone and not ADAPTERS[adapter].needs_images:
        backbone = algorithm.backbone
        assert isinstance(backbone, Backbone)
        store = feature_store(config, machine, backbone, device, progress)
        algorithm.backbone = ReadyFeatures(backbone.embedding_dim, backbone.style_dim)
    parts = _scored_parts(data, config, folder, store, progress, say)
    model = make_adapter(adapter, algorithm, stream.arguments).to(device).eval()
    if adapter == "none":
        scored = _plainly(model, parts, device, progress)
    else:
        targets = [stream.of(part) for role, part in parts if role == "target"]
        scored = _as_a_stream(model, targets, stream, device, progress)
    facts = {"fingerprint": data.fingerprint(), "images": len(data.labels)} | data.facts
    records = [
        Record(
            dataset=data.name,
            algorithm=config.algorithm,
            variant=config.variant,
            adapter=adapter,
            target=list(config.targets),
            domain=part.domain_names[int(part.domains[0])],
            role=role,
            seed=config.seed,
            protocol=_protocol(data, config),
            metrics=metrics(result),
            config=portable(config),
            versions=read_json(folder / VERSIONS),
            data=facts,
            stream=_seen(algorithm) if adapter == "none" else stream.model_dump(),
            machine=machine_kind(device),
            time={
                "seconds": round(seconds, 3),
                **_training_time(folder),
                "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
        )
        for role, part, result, seconds in scored
    ]
    append_lines(folder / RESULTS, [record.model_dump() for record in records])
    return records


def _seen(algorithm: Algorithm) -> dict[str, int]:
    return {"target_images": algorithm.target_images} if algorithm.target_images else {}


class _Scored(NamedTuple):
    role: str
    part: LabelledImages
    result: Predictions
    seconds: float


def _plainly(
    model: Adapter,
    parts: Sequence[tuple[str, LabelledImages]],
    device: torch.device,
    progress: Progress,
) -> list[_Scored]:
    """In order and in large batches: predictions do not depend on either."""
    scored = []
    for role, part in parts:
        _show_target(model.algorithm, part, device)
        started = time.perf_counter()
        name = part.domain_names[int(part.domains[0])]
        with progress.bar(f"Scoring {name}", len(part)) as advance:
            result = predict(
                model.probabilities, inputs(part), device=device, advance=partial(_one, advance)
            )
        scored.append(_Scored(role, part, result, time.perf_counter() - started))
    return scored


def _show_target(algorithm: Algorithm, part: LabelledImages, device: torch.device) -> None:
    """A few unlabelled images of the domain, to a method that says it needs them, no other."""
    if not algorithm.target_images:
        return
    order = numpy_generator(0, "target-images", *part.domain_names).permutation(len(part))
    shown = part.images.take(np.sort(order[: algorithm.target_images]))
    with torch.inference_mode():
        algorithm.see_target(to_unit(shown).to(device))


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


def _scored_parts(
    dataset: DomainDataset,
    config: RunConfig,
    folder: Path,
    store: FeatureStore | None,
    progress: Progress,
    say: Say,
) -> list[tuple[str, LabelledImages]]:
    """Target domains, then each source domain's test images, or else its validation images."""

    def read(part: LabelledImages) -> LabelledImages:
        if store is not None and store.holds([part]):
            return part
        return readable(part, config, progress, say)

    part = VAL if config.score_on == "validation" else TEST
    targets = [read(images) for images in dataset.targets(config.targets, part).values()]
    if store is not None:
        targets = [store.replace_images([images])[0] for images in targets]
    source = dataset.leave_out(config.left_out, seed=config.seed, val_fraction=config.val_fraction)
    if store is not None or config.skip_bad_images:  # the whole of it, as training had it
        source = read_source(source, config, progress, say, store)
    role, own = _held_out(source, config, folder, store, read, say)
    return [("target", images) for images in targets] + [
        (role, own.subset(np.flatnonzero(own.domains == domain)))
        for domain in np.unique(own.domains)
    ]


def _held_out(
    source: SourceData,
    config: RunConfig,
    folder: Path,
    store: FeatureStore | None,
    read: Callable[[LabelledImages], LabelledImages],
    say: Say,
) -> tuple[str, LabelledImages]:
    """The source images that training did not see: test images, or else validation images."""
    if source.fingerprint() != read_json(folder / SOURCE)["fingerprint"]:
        say(
            "The source images are not those of the training: only the target is scored, since "
            "images that were trained on could stand among the held-out ones."
        )
        return "source-validation", source.val.subset([])
    if store is not None:
        source = with_features(source, store)
    if len(source.test) and config.score_on is None:
        return "in-distribution", read(source.test)
    return "source-validation", read(source.val)


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _moved(config: RunConfig, dataset: str | None, skip_bad_images: bool) -> RunConfig:
    values: dict[str, Any] = {"dataset": dataset} if dataset else {}
    if skip_bad_images:
        values["skip_bad_images"] = True
    return config.model_copy(update=values)


def _training_time(folder: Path) -> dict[str, float]:
    """What a finished run took; one that was stopped before its end can be scored too."""
    finished = folder / FINISHED
    return {"training_seconds": read_json(finished)["seconds"]} if finished.is_file() else {}


def _protocol(dataset: DomainDataset, config: RunConfig) -> str:
    """How the data was divided: the dataset's own way, or a seeded one with its share."""
    if config.score_on:
        return f"{dataset.protocol}, targets scored on {config.score_on} images"
    if dataset.protocol.endswith("random-split") or dataset.protocol == "grouped-split":
        return f"{dataset.protocol}-{config.val_fraction:g}-seed-{config.seed}"
    return dataset.protocol
