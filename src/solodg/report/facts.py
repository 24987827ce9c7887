"""The facts at the head of a report: what was trained, on what, and with which settings."""

from pathlib import Path

from solodg.report.predictions import ScoredRun
from solodg.runs.averaged_runs import read_averaged
from solodg.runs.checkpoint import selected_steps, selection
from solodg.runs.config import ResolvedConfig
from solodg.runs.evidence import Evidence
from solodg.runs.folder import FINISHED, VERSIONS, read_evidence, read_seconds, read_versions
from solodg.runs.model_info import ModelInfo
from solodg.runs.settings_text import method_text, settings_text
from solodg.runs.site_estimate import read_estimate


def run_facts(folder: Path, run: ScoredRun, info: ModelInfo) -> dict[str, str]:
    """Returns what was trained and how, as texts by title."""
    config, chosen = run.config, selection(folder)
    facts = {
        "algorithm": method_text(config),
        "backbone": config.backbone + (", frozen" if config.freeze_backbone else ""),
        "dataset": f"{run.dataset}, {info.image_size} pixels, {len(info.classes)} classes",
        "unseen domains": ", ".join(config.targets) or "none: trained on all domains",
        "source domains": ", ".join(info.source_domains),
        "training": f"{config.steps} steps, seed {config.seed}",
        "settings": settings_text(config, info),
        "selected": f"{selected_steps(chosen)}, {_selected_by(folder, config)} (source validation "
        f"accuracy {100 * chosen['validation']['accuracy']:.1f}%)",
        "protocol": run.protocol,
    }
    averaged = read_averaged(folder)
    if averaged:
        facts["averaged runs"] = "; ".join(map(str, averaged.runs))
    estimate = read_estimate(folder)
    if estimate or not config.targets:
        facts["new site"] = estimate.sentence() if estimate else "no estimate was made"
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


def _selected_by(folder: Path, config: ResolvedConfig) -> str:
    """Returns what the number of steps was chosen by."""
    if read_estimate(folder) is not None:
        return "the median of those selected with each domain left out in turn"
    return "by leaving one source domain out" if config.select else "by source validation"
