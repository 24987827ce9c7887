"""Scoring a finished run: the first and only place where its target domains are read."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from solodg import checkpoint
from solodg.adapters import ADAPTERS
from solodg.assembly import (
    Say,
    feature_store,
    inputs,
    load_dataset,
    readable,
    single_device,
    with_features,
)
from solodg.backbones import Backbone, ReadyFeatures
from solodg.config import Machine, RunConfig
from solodg.data import DomainDataset, LabelledImages
from solodg.errors import unknown
from solodg.evaluation import metrics, predict
from solodg.features import FeatureStore
from solodg.progress import NoProgress, Progress
from solodg.runfolder import RESULTS, VERSIONS, read_config, read_machine
from solodg.storage import append_line, read_json
from solodg.types import Record


def evaluate_run(
    folder: Path,
    machine: Machine | None = None,
    *,
    adapter: str = "none",
    progress: Progress | None = None,
    say: Say = lambda text: None,
) -> list[Record]:
    """Score the saved model on its target domains, and on unseen images of its sources."""
    progress = progress or NoProgress()
    algorithm, _ = checkpoint.load(folder)
    config = read_config(folder)
    machine = machine or read_machine(folder)
    if adapter not in ADAPTERS:
        raise unknown("adapter", adapter, ADAPTERS)
    dataset = load_dataset(config, machine)
    device = single_device(machine)
    store = None
    if config.freeze_backbone:
        backbone = algorithm.backbone
        assert isinstance(backbone, Backbone)
        store = feature_store(config, machine, backbone, device, progress)
        algorithm.backbone = ReadyFeatures(backbone.embedding_dim, backbone.style_dim)
    parts = _scored_parts(dataset, config, store, progress, say)
    model = ADAPTERS[adapter](algorithm).to(device).eval()
    facts = {"fingerprint": dataset.fingerprint(), "images": len(dataset.labels)} | dataset.facts
    records = []
    for role, part in parts:
        name = part.domain_names[int(part.domains[0])]
        started = time.perf_counter()
        with progress.bar(f"Scoring {name}", len(part)) as advance:
            result = predict(
                model.probabilities, inputs(part), device=device, advance=lambda n: advance(n)
            )
        seconds = time.perf_counter() - started
        records.append(
            Record(
                dataset=dataset.name,
                algorithm=config.algorithm,
                variant=config.variant,
                adapter=adapter,
                target=list(config.targets),
                domain=name,
                role=role,
                seed=config.seed,
                protocol=_protocol(dataset, config),
                metrics=metrics(result),
                config=_portable(config),
                versions=read_json(folder / VERSIONS),
                data=facts,
                time={
                    "seconds": round(seconds, 3),
                    "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                },
            )
        )
    for record in records:
        append_line(folder / RESULTS, record.model_dump())
    return records


def _scored_parts(
    dataset: DomainDataset,
    config: RunConfig,
    store: FeatureStore | None,
    progress: Progress,
    say: Say,
) -> list[tuple[str, LabelledImages]]:
    """Target domains, then each source domain's test images, or else its validation images."""

    def read(part: LabelledImages) -> LabelledImages:
        return readable(part, config, progress, say)

    targets = [read(part) for part in dataset.targets(config.targets).values()]
    source = dataset.leave_out(config.targets, seed=config.seed, val_fraction=config.val_fraction)
    if store is not None:  # features are stored by whole domains
        targets = [store.replace_images([part])[0] for part in targets]
        source = with_features(source.mapped(read), store)
    role, own = ("in-distribution", source.test)
    if len(own) == 0:
        role, own = ("source-validation", source.val)
    own = read(own)
    parts = [("target", part) for part in targets]
    return parts + [
        (role, own.subset(np.flatnonzero(own.domains == domain)))
        for domain in np.unique(own.domains)
    ]


def _protocol(dataset: DomainDataset, config: RunConfig) -> str:
    """How the data was divided: the dataset's own way, or a seeded one with its share."""
    if dataset.protocol.endswith("random-split") or dataset.protocol == "grouped-split":
        return f"{dataset.protocol}-{config.val_fraction:g}-seed-{config.seed}"
    return dataset.protocol


def _portable(config: RunConfig) -> dict[str, Any]:
    """The configuration without paths of a machine."""
    values = config.model_dump(mode="json")
    for name in ("dataset", "weights"):
        values[name] = Path(values[name]).name if values[name] else values[name]
    return values
