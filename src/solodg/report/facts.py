"""The facts at the head of a report: what was trained, on what, and with which settings."""

from pathlib import Path

from solodg.readings import readings_of
from solodg.report.predictions import ScoredRun
from solodg.runs.checkpoint import selected_steps, selection
from solodg.runs.config import ResolvedConfig
from solodg.runs.evidence import Evidence
from solodg.runs.folder import FINISHED, VERSIONS, read_evidence, read_seconds, read_versions
from solodg.runs.model_info import ModelInfo
from solodg.runs.stored_arguments import changed_arguments


def run_facts(folder: Path, run: ScoredRun, info: ModelInfo) -> dict[str, str]:
    """Returns what was trained and how, as texts by title."""
    config, chosen = run.config, selection(folder)
    changed = changed_arguments(config.algorithm, config.arguments, config.variant)
    options = ", ".join(f"{name}={value}" for name, value in changed.items())
    facts = {
        "algorithm": f"{config.algorithm} ({config.variant})" + (f", {options}" if options else ""),
        "backbone": config.backbone + (", frozen" if config.freeze_backbone else ""),
        "dataset": f"{run.dataset}, {info.image_size} pixels, {len(info.classes)} classes",
        "unseen domains": ", ".join(config.targets),
        "source domains": ", ".join(info.source_domains),
        "training": f"{config.steps} steps, seed {config.seed}",
        "settings": _settings(config, info),
        "selected": f"{selected_steps(chosen)}, "
        + ("by leaving one source domain out" if config.select else "by source validation")
        + f" (source validation accuracy {100 * chosen['validation']['accuracy']:.1f}%)",
        "protocol": run.protocol,
    }
    evidence = read_evidence(folder)
    if evidence:
        found = Evidence.model_validate(evidence)
        facts["adapts to each image"] = f"{'; '.join(found.lines())}. Evidence: {found.rests_on}"
    if (folder / FINISHED).is_file():
        facts["training"] += f", {read_seconds(folder / FINISHED):.0f} s"
    if (folder / VERSIONS).is_file():
        versions = read_versions(folder)
        names = ("solodg", "torch", "timm")
        facts["versions"] = ", ".join(f"{n} {versions[n]}" for n in names if n in versions)
    return facts


def _settings(config: ResolvedConfig, info: ModelInfo) -> str:
    """Lists the settings of training that a result may depend on."""
    start = config.weights or ("published" if config.pretrained else "random")
    words = [f"{Path(start).name} weights"]
    if info.image_norm:
        words.append(f"image norm {', '.join(map(str, readings_of(info.image_norm)))}")
    if info.pose:
        words.append("pose")
    words.append(f"learning rate {config.learning_rate:g}")
    if not config.freeze_backbone:
        words.append(f"of the backbone {config.backbone_learning_rate:g}")
    if config.linear_steps:
        words.append(f"{config.linear_steps} linear steps")
    words.append(f"{config.decay or 'constant'} decay")
    words.append(f"label smoothing {config.label_smoothing or 0:g}")
    if config.weight_average:
        words.append(f"weight average {config.weight_average}")
    words.append(f"weight decay {config.weight_decay:g}")
    words.append(f"{config.batch_size} queries, {config.context_images} context images")
    words.append(_augmentation(config))
    return ", ".join(words)


def _augmentation(config: ResolvedConfig) -> str:
    """Returns how training images are augmented."""
    if not config.augment or config.freeze_backbone or config.stored_views == 0:
        return "not augmented"
    copies = f", {config.stored_views} stored copies of each image" if config.stored_views else ""
    return f"augmented{copies}"
