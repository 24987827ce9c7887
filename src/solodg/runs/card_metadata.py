"""The head of a model card: metadata that the Hugging Face Hub reads, as YAML."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from solodg.data.domains import normalise_name
from solodg.runs.config import ResolvedConfig
from solodg.runs.model_info import ModelInfo
from solodg.runs.recorded_scores import RecordedMetric, RecordedScores
from solodg.runs.site_estimate import SiteEstimate
from solodg.runs.statistics import LEVEL
from solodg.runs.tables import OVERALL_TITLES, ROLES, UNSEEN

_TASK = "image-classification"
# The names that the Hub knows for metrics; the others keep their own.
_TYPES = {"macro_f1": "f1", "macro_auc": "roc_auc", "brier": "brier_score"}


def metadata_text(
    config: ResolvedConfig,
    info: ModelInfo,
    scores: Sequence[RecordedScores],
    estimate: SiteEstimate | None,
    licence: str | None = None,
) -> str:
    """Returns the metadata of a model as the YAML head of its card, between two lines `---`.

    Scores are those of domains that training did not see; fractions, not percent.
    """
    name = f"{config.algorithm} on {info.dataset}"
    values: dict[str, Any] = {
        "library_name": "solodg",
        "pipeline_tag": _TASK,
        "tags": ["solodg", "domain-generalization", _TASK, config.algorithm, config.backbone],
    }
    if licence is not None:
        values["license"] = licence
    results = [_of_domain(each) for each in scores if each.role in UNSEEN]
    if estimate is not None:
        results.append(_of_estimate(estimate, info.dataset))
    if results:
        values["metrics"] = ["accuracy"]
        values["model-index"] = [{"name": name, "results": results}]
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return f"---\n{text}---\n"


def _of_domain(found: RecordedScores) -> dict[str, Any]:
    dataset = {
        "name": f"{found.dataset}, {found.domain} ({ROLES[found.role]}, {found.protocol})",
        "type": normalise_name(found.dataset) or "images",
        "config": found.domain,
        "split": "test",
        "args": {"images": found.images, "resampled": found.resampled, "units": found.units},
    }
    return _result(dataset, found.overall)


def _of_estimate(found: SiteEstimate, dataset: str) -> dict[str, Any]:
    means = {
        name: RecordedMetric(
            value=each.mean,
            low=None if each.half_interval is None else each.mean - each.half_interval,
            high=None if each.half_interval is None else each.mean + each.half_interval,
        )
        for name, each in found.model.mean.items()
    }
    described = {
        "name": f"{dataset}, mean over {len(found.domains)} domains that were left out in turn",
        "type": normalise_name(dataset) or "images",
        "config": "leave-one-domain-out",
        "split": "test",
        "args": {"sites": len(found.domains), "resampled": "sites"},
    }
    return _result(described, means)


def _result(dataset: dict[str, Any], metrics: Mapping[str, RecordedMetric]) -> dict[str, Any]:
    entries = []
    for name, found in metrics.items():
        entry: dict[str, Any] = {
            "name": OVERALL_TITLES[name].removesuffix(" %"),
            "type": _TYPES.get(name, name),
            "value": found.value,
        }
        if found.low is not None and found.high is not None:
            entry["args"] = {"level": LEVEL, "low": found.low, "high": found.high}
        entries.append(entry)
    return {"task": {"type": _TASK, "name": "Image classification"}, "dataset": dataset,
            "metrics": entries}  # fmt: skip
