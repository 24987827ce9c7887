"""A run as one HTML page: what was trained, what it is worth, and what the adaptation does."""

from pathlib import Path
from typing import Any

import numpy as np

from solodg.explain.explanation import Explanation, explain
from solodg.explain.figure import plane_figure, probabilities_figure
from solodg.explain.projection import Plane, kept_plane
from solodg.figures.html import Card, Gallery, Picture, chart, photo, write_page
from solodg.models.image_norm import readings_of
from solodg.predict.torch import Predictor
from solodg.progress import NoProgress, Progress
from solodg.report.charts import (
    accuracy_over_uncertainty,
    confusion,
    confusion_counts,
    reliability,
    training_curves,
)
from solodg.report.predictions import GALLERIES, DomainPredictions, RunPredictions, predict_run
from solodg.runs.build import Say
from solodg.runs.checkpoint import selection
from solodg.runs.config import Machine, RunConfig
from solodg.runs.folder import FINISHED, REPORT, VERSIONS
from solodg.runs.metrics_log import METRICS
from solodg.runs.tables import ROLES, metric_row
from solodg.storage import read_json, read_lines

MOST_CARDS = 48  # on a page: it stays small enough to send
PER_GALLERY = 6

_TITLES = {
    "helped": ("Helped most", "wrong before the adaptation to the image, right after it"),
    "hurt": ("Hurt most", "right before the adaptation to the image, wrong after it"),
    "mistaken": ("Surest mistakes", "wrong with the highest probability"),
    "uncertain": ("Most uncertain", "the flattest probabilities, right or wrong"),
}


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
    """Judge the run's images and write the page; returns where it is."""
    progress = progress or NoProgress()
    predictor = Predictor.load(folder)
    plane = kept_plane(folder, predictor, machine, dataset=dataset, progress=progress)
    run = predict_run(folder, machine, dataset=dataset, images=images, progress=progress, say=say)
    targets = [part for part in run.parts if part.role == "target"]
    count = min(per_gallery or PER_GALLERY, max(1, MOST_CARDS // (len(GALLERIES) * len(targets))))
    path = output or folder / REPORT
    write_page(
        path,
        "report.html.j2",
        title=f"{run.config.algorithm} on {run.dataset}, unseen {', '.join(run.config.targets)}",
        adapts=targets[0].before is not None,
        facts=_facts(folder, run),
        shortened=run.shortened,
        curves=_curves(folder),
        table=_table(run),
        means=_means(run),
        confusions=[_confusion(part, run.info.classes) for part in targets],
        trust=_trust(run),
        galleries=_galleries(predictor, plane, targets, count, progress),
        plane=plane,
    )
    return path


def _galleries(
    predictor: Predictor,
    plane: Plane,
    targets: list[DomainPredictions],
    count: int,
    progress: Progress,
) -> dict[str, list[Gallery]]:
    """By domain; of each kind the first `count` images, explained."""
    ranked = {t.domain: {kind: GALLERIES[kind](t) for kind in _kinds(t)} for t in targets}
    total = sum(min(count, len(r)) for kinds in ranked.values() for r in kinds.values())
    galleries: dict[str, list[Gallery]] = {}
    with progress.bar("Drawing", total) as advance:
        for part in targets:
            galleries[part.domain] = []
            for kind, indices in ranked[part.domain].items():
                gallery = Gallery(kind, *_TITLES[kind], len(indices))
                galleries[part.domain].append(gallery)
                for index in indices[:count]:
                    pixels = part.pixels.images.take([index])[0]
                    found = explain(predictor, plane, pixels, truth=int(part.labels[index]))
                    gallery.cards.append(_card(part, int(index), found))
                    advance(1)
    return galleries


def _kinds(part: DomainPredictions) -> list[str]:
    """Where nothing is adapted, nothing is helped or hurt by it."""
    return [kind for kind in GALLERIES if part.before is not None or kind not in ("helped", "hurt")]


def _facts(folder: Path, run: RunPredictions) -> dict[str, str]:
    config, chosen = run.config, selection(folder)
    options = ", ".join(f"{name}={value}" for name, value in config.arguments.items())
    facts = {
        "algorithm": f"{config.algorithm} ({config.variant})" + (f", {options}" if options else ""),
        "backbone": config.backbone + (", frozen" if config.freeze_backbone else ""),
        "dataset": f"{run.dataset}, {run.info.image_size} pixels, {len(run.info.classes)} classes",
        "unseen domains": ", ".join(config.targets),
        "source domains": ", ".join(run.info.source_domains),
        "training": f"{config.steps} steps, seed {config.seed}",
        "settings": _settings(config),
        "selected": f"step {chosen['step']}, "
        + ("by leaving one source domain out" if config.select else "by source validation")
        + f" (source validation accuracy {100 * chosen['validation']['accuracy']:.1f}%)",
        "protocol": run.protocol,
    }
    if (folder / FINISHED).is_file():
        facts["training"] += f", {read_json(folder / FINISHED)['seconds']:.0f} s"
    if (folder / VERSIONS).is_file():
        versions = read_json(folder / VERSIONS)
        names = ("solodg", "torch", "timm")
        facts["versions"] = ", ".join(f"{n} {versions[n]}" for n in names if n in versions)
    return facts


def _settings(config: RunConfig) -> str:
    """What a result may depend on besides the data and the method."""
    start = config.weights or ("published" if config.pretrained else "random")
    words = [f"{Path(start).name} weights"]
    if config.image_norm:
        numbers = readings_of(config.image_norm)
        words.append(f"image norm {', '.join(f'{number:g}' for number in numbers)}")
    words.append(f"learning rate {config.learning_rate:g}")
    if not config.freeze_backbone:
        words.append(f"of the backbone {config.backbone_learning_rate:g}")
    words.append(f"{config.decay or 'constant'} decay")
    words.append(f"label smoothing {config.label_smoothing or 0:g}")
    if config.weight_average:
        words.append(f"weight average {config.weight_average:g}")
    words.append(f"weight decay {config.weight_decay:g}")
    words.append(f"{config.batch_size} queries, {config.context_images} context images")
    words.append("augmented" if config.augment and not config.freeze_backbone else "not augmented")
    return ", ".join(words)


def _curves(folder: Path) -> list[Picture]:
    charts = training_curves(read_lines(folder / METRICS), selection(folder).get("step"))
    return [chart(figure, f"{title}, by step", title) for title, figure in charts.items()]


def _table(run: RunPredictions) -> list[dict[str, Any]]:
    """A row a domain."""
    rows = []
    for part in run.parts:
        row = {
            "domain": part.domain,
            "role": ROLES[part.role],
            "unseen": part.role == "target",
            **metric_row(part.metrics)._asdict(),
        }
        if part.right_before is not None:
            row["before"] = f"{100 * part.right_before.mean():.1f}"
            row["helped"] = str(int((part.right & ~part.right_before).sum()))
            row["hurt"] = str(int((~part.right & part.right_before).sum()))
        rows.append(row)
    return rows


def _means(run: RunPredictions) -> list[tuple[str, str, str]]:
    """Role, accuracy before (or nothing), accuracy."""
    means = []
    for role, title in ROLES.items():
        parts = [part for part in run.parts if part.role == role]
        if not parts:
            continue
        before = [part.right_before.mean() for part in parts if part.right_before is not None]
        accuracy = np.mean([part.metrics["accuracy"] for part in parts])
        shown = f"{100 * np.mean(before):.1f}" if before else ""
        means.append((title, shown, f"{100 * accuracy:.1f}"))
    return means


def _confusion(part: DomainPredictions, classes: list[str]) -> dict[str, Any]:
    counts = confusion_counts(part, len(classes))
    wrong = counts - np.diag(np.diag(counts))
    worst = np.argsort(-wrong, axis=None, kind="stable")[:5]
    pairs = [np.unravel_index(i, wrong.shape) for i in worst]
    picture = chart(confusion(part, classes), f"Confusion matrix of {part.domain}")
    listed = [(classes[t], classes[s], int(wrong[t, s])) for t, s in pairs if wrong[t, s]]
    return {"domain": part.domain, "picture": picture, "pairs": listed}


def _trust(run: RunPredictions) -> list[Picture]:
    """What confidence and uncertainty are worth."""
    targets = [part for part in run.parts if part.role == "target"]
    others = [part for part in run.parts if part.role != "target"]
    groups = {"unseen domains": _pooled(targets)}
    if others:
        groups[ROLES[others[0].role]] = _pooled(others)
    confidences = {name: (after, labels) for name, (after, labels, _) in groups.items()}
    if targets[0].before is not None:
        rows = [part.before for part in targets if part.before is not None]
        labels = groups["unseen domains"][1]
        confidences["unseen, before adaptation"] = (np.concatenate(rows), labels)
    return [
        chart(reliability(confidences), "Accuracy over confidence", "Reliability"),
        chart(
            accuracy_over_uncertainty(groups),
            "Accuracy over uncertainty",
            "Accuracy over uncertainty",
        ),
    ]


def _pooled(parts: list[DomainPredictions]) -> tuple[Any, Any, Any]:
    return (
        np.concatenate([part.after for part in parts]),
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.uncertainty for part in parts]),
    )


def _card(part: DomainPredictions, index: int, e: Explanation) -> Card:
    truth = e.classes[int(part.labels[index])]
    alt = f"{truth} of {part.domain}"
    thumbnails = e.plane.thumbnails
    return Card(
        domain=part.domain,
        index=index,
        image=photo(e.pixels, alt),
        truth=truth,
        before="" if e.before is None else _said(e.classes, e.before.probabilities),
        after=_said(e.classes, e.after.probabilities),
        right=bool(part.right[index]),
        uncertainty=f"{e.after.uncertainty:.2f}",
        figures=[
            chart(plane_figure(e), f"{alt} in the plane of the source class centres"),
            chart(probabilities_figure(e), f"Probabilities of the classes for {alt}"),
        ],
        nearest=[
            (photo(thumbnails[n.index], f"{n.label} of {n.domain}"), f"{n.label}, {n.domain}")
            for n in e.nearest
        ],
        framed=None if e.framed is None else photo(e.framed, f"{alt} in its own frame"),
    )


def _said(classes: tuple[str, ...], probabilities: Any) -> str:
    best = int(np.argmax(probabilities))
    return f"{classes[best]} ({probabilities[best]:.2f})"
