"""Scores an exported file on the labelled images of a new site."""

import time
from importlib.metadata import version
from pathlib import Path

from solodg.data import DomainDataset, LabelledImages
from solodg.predict.onnx import OnnxPredictor
from solodg.progress import Advance, NoProgress, Progress, Say
from solodg.runs.class_metrics import all_metrics
from solodg.runs.evaluate import ScoredRecord
from solodg.runs.predictions import Predictions
from solodg.runs.site_data import PROTOCOL, open_site
from solodg.types import Record

_UNKNOWN_SEED = -1  # an exported file does not name the seed of its training


def score_exported(
    predictor: OnnxPredictor,
    on: Path | DomainDataset,
    *,
    skip_bad_images: bool = False,
    progress: Progress | None = None,
    say: Say = lambda text: None,
) -> list[ScoredRecord]:
    """Scores the model of an exported file on labelled images, which `open_site` opens.

    The records have the description of the model in place of a configuration, and the seed -1.
    """
    import onnxruntime

    progress, info = progress or NoProgress(), predictor.info
    data, parts = open_site(on, info, skip_bad_images=skip_bad_images, progress=progress, say=say)
    fingerprint, scored = data.fingerprint(), []
    for role, images, _ in parts:
        started = time.perf_counter()
        with progress.bar(f"Scoring {images.domain_name}", len(images)) as advance:
            found = _predict(predictor, images, advance)
        record = Record(
            dataset=data.name,
            algorithm=info.algorithm,
            variant=info.variant,
            adapter="none",
            target=[],
            domain=images.domain_name,
            role=role,
            seed=_UNKNOWN_SEED,
            protocol=PROTOCOL,
            metrics=all_metrics(found, images.labels),
            config=info.model_dump(mode="json"),
            versions={"solodg": version("solodg"), "onnxruntime": onnxruntime.__version__},
            data={"fingerprint": fingerprint, "images": len(data.labels)} | data.facts,
            time={
                "seconds": round(time.perf_counter() - started, 3),
                "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
        )
        scored.append(ScoredRecord(record, found, images.labels, images.groups))
    return scored


def _predict(predictor: OnnxPredictor, images: LabelledImages, advance: Advance) -> Predictions:
    parts = []
    for batch in images.batches(predictor.batch_size):
        parts.append(predictor.compute(batch.x.numpy()))
        advance(len(batch.y))
    return Predictions.concatenate(parts)
