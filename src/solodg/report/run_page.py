"""Writes a run as one HTML page: settings, accuracy, calibration, and what the adaptation does."""

from pathlib import Path
from typing import Any

import numpy as np

from solodg.explain.projection import stored_projection
from solodg.figures.html import Picture, chart, write_page
from solodg.predict.torch import Predictor
from solodg.progress import NoProgress, Progress, Say
from solodg.report.charts import (
    LabelledPredictions,
    accuracy_over_uncertainty,
    confusion,
    confusion_counts,
    coverage_curves,
    reliability,
    training_curves,
)
from solodg.report.facts import run_facts
from solodg.report.galleries import MAX_CARDS, domain_galleries
from solodg.report.predictions import GALLERIES, DomainPredictions, predict_run
from solodg.report.score_tables import score_tables
from solodg.runs.checkpoint import selection
from solodg.runs.config import Machine
from solodg.runs.folder import REPORT
from solodg.runs.metrics_log import read_metrics
from solodg.runs.predictions import Predictions
from solodg.runs.site_estimate import SiteEstimate, estimate_rows, read_estimate
from solodg.runs.tables import ROLES, metric_row, percent
from solodg.runs.temperature import load_temperature

PER_GALLERY = 6


def write_report(
    folder: Path,
    machine: Machine | None = None,
    *,
    output: Path | None = None,
    dataset: str | None = None,
    images: int | None = None,
    per_gallery: int | None = None,
    progress: Progress | None = None,
    say: Say = lambda text: None,
) -> Path:
    """Predicts the images that a run is scored on and writes its page; returns the page's path.

    The table and the cards of a domain show the same predictions, made by one model.
    """
    progress = progress or NoProgress()
    predictor = Predictor.load(folder)
    projection = stored_projection(folder, predictor, machine, dataset=dataset, progress=progress)
    run = predict_run(
        predictor, folder, machine, dataset=dataset, images=images, progress=progress, say=say
    )
    # Without a domain that was left out, held-out images of the sources take its place.
    unseen = bool(run.config.targets)
    domains = len(run.config.targets or predictor.info.source_domains)
    count = min(per_gallery or PER_GALLERY, max(1, MAX_CARDS // (len(GALLERIES) * domains)))
    parts, galleries = [], {}
    for part in run.parts:
        parts.append(part)
        if part.role == "target" or not unseen:
            galleries[part.domain] = domain_galleries(predictor, projection, part, count, progress)
    targets = [part for part in parts if part.role == "target" or not unseen]
    left_out = f"unseen {', '.join(run.config.targets)}" if unseen else "trained on all domains"
    estimate, temperature = read_estimate(folder), load_temperature(folder)
    path = output or folder / REPORT
    with progress.stage("Drawing charts and computing intervals"):
        write_page(
            path,
            "report.html.j2",
            title=f"{run.config.algorithm} on {run.dataset}, {left_out}",
            shown="unseen domains" if unseen else "held-out images of source domains",
            shown_domain="Unseen domain" if unseen else "Source domain",
            estimate=_estimate(estimate) if estimate else None,
            adapts=targets[0].predictions.before is not None,
            facts=run_facts(folder, run, predictor.info),
            at_most=images,
            curves=_curves(folder, say),
            table=[_row(part) for part in parts],
            means=_means(parts),
            scores=score_tables(targets, predictor.classes),
            confusions=[_confusion(part, predictor.classes) for part in targets],
            calibration=_calibration(targets, [part for part in parts if part not in targets]),
            coverage=[
                chart(coverage_curves(part.predictions, part.labels), f"{part.domain}", "Coverage")
                for part in targets
            ],
            novelty=predictor.novelty.basis if predictor.novelty is not None else None,
            temperature=temperature.sentence() if temperature is not None else None,
            galleries=galleries,
            projection=projection,
        )
    return path


def _curves(folder: Path, say: Say) -> list[Picture]:
    charts = training_curves(read_metrics(folder, say), selection(folder)["step"])
    return [chart(figure, f"{title}, by step", title) for title, figure in charts.items()]


def _row(part: DomainPredictions) -> dict[str, Any]:
    """Returns a domain's row of the table."""
    row = {
        "domain": part.domain,
        "role": ROLES[part.role],
        "unseen": part.role == "target",
        **metric_row(part.metrics)._asdict(),
    }
    if part.right_before is not None:
        row["before"] = percent(part.right_before.mean())
        row["helped"] = str(int((part.right & ~part.right_before).sum()))
        row["hurt"] = str(int((~part.right & part.right_before).sum()))
    return row


def _means(every: list[DomainPredictions]) -> list[tuple[str, str, str]]:
    """Returns role, mean accuracy before adaptation (or nothing) and mean accuracy."""
    means = []
    for role, title in ROLES.items():
        parts = [part for part in every if part.role == role]
        if not parts:
            continue
        before = [part.right_before.mean() for part in parts if part.right_before is not None]
        accuracy = float(np.mean([part.metrics["accuracy"] for part in parts]))
        shown = percent(float(np.mean(before))) if before else ""
        means.append((title, shown, percent(accuracy)))
    return means


def _confusion(part: DomainPredictions, classes: list[str]) -> dict[str, Any]:
    counts = confusion_counts(part, len(classes))
    wrong = counts - np.diag(np.diag(counts))
    worst = np.argsort(-wrong, axis=None, kind="stable")[:5]
    pairs = [np.unravel_index(i, wrong.shape) for i in worst]
    picture = chart(confusion(part, classes), f"Confusion matrix of {part.domain}")
    listed = [(classes[t], classes[s], int(wrong[t, s])) for t, s in pairs if wrong[t, s]]
    return {"domain": part.domain, "picture": picture, "pairs": listed}


def _estimate(found: SiteEstimate) -> dict[str, Any]:
    """Returns the estimate for a new site as texts for the page."""
    titles, rows = estimate_rows(found)
    return {"titles": titles, "rows": rows, "remarks": found.remarks()}


def _calibration(
    targets: list[DomainPredictions], others: list[DomainPredictions]
) -> list[Picture]:
    """Draws accuracy over confidence and over uncertainty."""
    is_unseen = targets[0].role == "target"
    title = "unseen domains" if is_unseen else ROLES[targets[0].role]
    groups = {title: _pooled(targets)}
    if others:
        groups[ROLES[others[0].role]] = _pooled(others)
    confidences = dict(groups)
    (predictions, labels) = groups[title]
    if predictions.before is not None:
        before = "unseen, before adaptation" if is_unseen else "before adaptation"
        confidences[before] = (Predictions(predictions.before), labels)
    return [
        chart(reliability(confidences), "Accuracy over confidence", "Reliability"),
        chart(
            accuracy_over_uncertainty(groups),
            "Accuracy over uncertainty",
            "Accuracy over uncertainty",
        ),
    ]


def _pooled(parts: list[DomainPredictions]) -> LabelledPredictions:
    return (
        Predictions.concatenate([part.predictions for part in parts]),
        np.concatenate([part.labels for part in parts]),
    )
